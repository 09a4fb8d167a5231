"""What ablations are read from: finished runs by arm, curves on a common grid, held-out success, paired differences,
and who owns the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.evaluate import interval
from lib.rao.shipped import ShippedRun, shipped_runs
from lib.tree import Tree

History = Sequence[Mapping[str, Any]]


def finished_runs(beside: Path | None = None) -> tuple[list[ShippedRun], set[tuple[str, int]]]:
    """Shipped runs of the main experiment, and those that this reproduction has made itself.

    Args:
        beside: folder of the reproduction; its run of an arm and seed takes the place of a shipped one unless it is
            shorter, as smoke runs are.

    Returns:
        The runs ordered by arm and seed, and which (arm, seed) were made here.
    """
    chosen = {(run.arm, run.seed): run for run in shipped_runs()}
    live = set()
    for run in shipped_runs(folder=beside) if beside else []:
        key = run.arm, run.seed
        if key not in chosen or len(run.metrics) >= len(chosen[key].metrics):
            chosen[key] = run
            live.add(key)
    return [chosen[key] for key in sorted(chosen)], live


def smoothed(history: History, key: str, window: int = 5) -> list[dict[str, float]]:
    """A metric averaged over the last `window` steps, from the step on at which there are so many.

    Returns:
        Rows with `step`, `tokens_out_total` and the metric; rows without it are left out before averaging.
    """
    rows = [row for row in history if row.get(key) is not None]
    means = np.convolve([row[key] for row in rows], np.ones(window) / window, "valid") if len(rows) >= window else []
    return [
        {"step": row["step"], "tokens_out_total": row["tokens_out_total"], key: float(mean)}
        for row, mean in zip(rows[window - 1 :], means, strict=True)
    ]


def on_token_grid(histories: Sequence[History], key: str, points: int = 40) -> list[list[dict[str, float]]]:
    """A metric of several seeds at common numbers of sampled tokens, linear between steps; seeds sample different
    numbers a step, so their curves share no point otherwise.

    Returns:
        For each history `points` rows, over the range that all of them cover; empty lists if there is none.
    """
    tokens = [[row["tokens_out_total"] for row in history] for history in histories]
    low, high = max((t[0] for t in tokens if t), default=0), min((t[-1] for t in tokens if t), default=0)
    if not all(tokens) or low > high:
        return [[] for _ in histories]
    grid = np.linspace(low, high, points)
    curves = [np.interp(grid, t, [row[key] for row in h]) for t, h in zip(tokens, histories, strict=True)]
    return [[{"tokens_out_total": float(x), key: float(y)} for x, y in zip(grid, c, strict=True)] for c in curves]


def held_out(runs: Sequence[ShippedRun], arm: str) -> dict[str, dict[str, Any]]:
    """Held-out success of an arm by difficulty, over its seeds.

    Returns:
        {difficulty: {"n": tasks per seed, "success", "ci95"}}; the interval is hierarchical (seeds, then tasks), and
        None where several seeds did not keep the outcomes of single tasks.
    """
    found = [run for run in runs if run.arm == arm]
    rows = [run.results["curves"]["evaluations"][arm]["by_difficulty"] for run in found]
    table = {}
    for level in rows[0] if rows else ():
        outcomes = [outcomes_of(run, level) for run in found]
        ci95 = rows[0][level]["ci95"] if len(rows) == 1 else None
        if all(outcomes):
            ci95 = interval(outcomes)
        success = float(np.mean([row[level]["success"] for row in rows]))
        table[level] = {"n": min(row[level]["n"] for row in rows), "success": success, "ci95": ci95}
    return table


def outcomes_of(run: ShippedRun, difficulty: str) -> list[float]:
    """Success of a run's own arm on each held-out task of a difficulty, in task order; empty if it was not kept."""
    return run.results["curves"].get("outcomes", {}).get(run.arm, {}).get(difficulty, [])


def differences(run: ShippedRun, base: ShippedRun, difficulty: str) -> list[float]:
    """Success of one run minus that of another on the same tasks, task by task; empty if either kept none."""
    pairs = list(zip(outcomes_of(run, difficulty), outcomes_of(base, difficulty), strict=False))
    return [a - b for a, b in pairs]


def gradient_share(trees: Sequence[Tree]) -> dict[int, float]:
    """Which share of the update each depth owns: tokens * depth weight * |advantage|, as shares of the total.

    Args:
        trees: kept by `lib.training.advantages.assign`, so advantages and weights are set. Every sampled token weighs
            the same in the loss (`token_mean`), so this is each depth's share of the coefficients before log pi.

    Returns:
        Shares by depth, which sum to 1; empty without signal.
    """
    mass: dict[int, float] = {}
    for tree in trees:
        for node in tree:
            mass[node.depth] = mass.get(node.depth, 0.0) + node.tokens_out * node.weight * abs(node.advantage)
    total = sum(mass.values())
    return {depth: mass[depth] / total for depth in sorted(mass)} if total else {}
