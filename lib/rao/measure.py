"""Evaluation of trained arms on TextCraft-Synth, and the numbers behind the claims."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lib.evaluate import interval, summarise
from lib.policy import Policy
from lib.rao.agent import AgentConfig
from lib.rao.experiment import TaskSet, for_evaluation, make_pool, play
from lib.rao.stats import critical_path_tokens
from lib.tree import Tree


@dataclass(frozen=True)
class Evaluation:
    """One arm on held-out tasks: what `lib.evaluate` reports, with the trees it rests on."""

    summary: dict[str, Any]
    trees: list[Tree]

    def outcomes(self, *difficulties: str) -> list[float]:
        """Root success of every task, of all difficulties if none is named."""
        chosen = [t for t in self.trees if not difficulties or t.info["difficulty"] in difficulties]
        return [float(t.root.success or 0.0) for t in chosen]


def evaluate_arm(
    policy: Policy,
    tasks: TaskSet,
    agent: AgentConfig,
    *,
    temperature: float = 0.0,
    workers: int = 0,
    style: str = "short",
    seed: int = 0,
) -> Evaluation:
    """Play every task once, greedily by default, without a depth cap."""
    agent = for_evaluation(agent, temperature)
    with make_pool(policy, tasks, agent.context, workers, style) as pool:
        trees = play(pool, tasks, agent, seed=seed, batch=16 * max(1, workers))
    return Evaluation(summarise(trees), trees)


def latency(policy: Policy, tasks: TaskSet, agent: AgentConfig, style: str = "short") -> dict[str, list[float]]:
    """Wall time and critical-path tokens of tasks played one at a time.

    Returns:
        {"seconds": [...], "critical_path": [...], "success": [...]}, one entry a task.
    """
    agent = for_evaluation(agent)
    rows: dict[str, list[float]] = {"seconds": [], "critical_path": [], "success": []}
    with make_pool(policy, tasks, agent.context, 0, style) as pool:
        for item in tasks.items:
            started = time.perf_counter()
            tree = play(pool, TaskSet(tasks.books, [item]), agent)[0]
            rows["seconds"].append(time.perf_counter() - started)
            rows["critical_path"].append(float(critical_path_tokens(tree)))
            rows["success"].append(float(tree.root.success or 0.0))
    return rows


def first_reaching(history: Sequence[Mapping[str, Any]], level: float = 0.8, window: int = 5) -> dict[str, Any] | None:
    """Step and sampled tokens at which training success, averaged over `window` steps, first reaches `level`.

    Success is that of the training rollouts: at temperature 1, on tasks drawn anew every step. None if never reached.
    """
    success = [row["root_success"] for row in history]
    for i in range(window - 1, len(success)):
        if np.mean(success[i - window + 1 : i + 1]) >= level:
            return {"step": history[i]["step"], "tokens": history[i]["tokens_out_total"]}
    return None


def claim(outcomes: Sequence[float], seed: int, source: str, note: str = "") -> dict[str, Any]:
    """A mean over tasks in the form that results files keep."""
    return {
        "value": float(np.mean(outcomes)), "n": len(outcomes), "ci95": interval([outcomes]), "seeds": [seed],
        "note": note, "source": source, "outcomes": list(outcomes),
    }  # fmt: skip


def number(value: float, n: int, seed: int, source: str, note: str = "") -> dict[str, Any]:
    """A measured number that has no interval of its own."""
    return {"value": float(value), "n": n, "ci95": None, "seeds": [seed], "note": note, "source": source}
