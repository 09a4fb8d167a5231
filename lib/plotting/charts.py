"""Pictures of measured numbers: learning curves, success by difficulty, failures, distributions, reward terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy import stats

from lib.errors import UserError
from lib.plotting.style import new_axes, styled
from lib.tree import Tree
from lib.view import INK, PALETTE, clean, count_text, visible_nodes

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo")


@styled
def curves(
    series: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    x: str,
    y: str,
    *,
    ylabel: str,
    xlabel: str | None = None,
    title: str = "",
    lines: Mapping[str, float] | None = None,
    share: bool = False,
) -> Figure:
    """Draw mean learning curves with a band over seeds.

    Args:
        series: for each arm its runs (one per seed); a run is a list of metric rows. Rows without `y` are skipped. An
            arm is drawn where all of its runs have a value, so that the mean never changes its seeds midway.
        x, y: keys in the rows. ylabel, xlabel: axis labels with units; xlabel is `x` if None.
        lines: values for dotted horizontal lines, such as a published result or the cold start.
        share: the values are shares; the axis is fixed to 0-100 %.

    Raises:
        UserError: an arm has no run, a run has no such keys, or the runs of an arm share no `x`.
    """
    figure, axes = new_axes(3.6)
    ax = axes[0, 0]
    for k, (name, runs) in enumerate(series.items()):
        grid, values = _aligned(name, runs, x, y)
        color, mean = PALETTE[k % len(PALETTE)], values.mean(axis=0)
        low, high, band = _band(values)
        ax.plot(grid, mean, color=color, ls=DASHES[k % len(DASHES)], marker="o" if len(grid) < 15 else "", ms=4,
                label=f"{name}\n{_seeds(len(runs))}{band}")  # fmt: skip
        if len(runs) > 1:
            ax.fill_between(grid, low, high, color=color, alpha=0.18, lw=0)
    for k, (name, value) in enumerate((lines or {}).items()):
        ax.axhline(value, color=INK, lw=1, ls=DASHES[-1 - k % len(DASHES)], label=f"{name}: {value:.3g}")
    if share:
        ax.set_ylim(0, 1.02)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel=xlabel or x, ylabel=ylabel, title=title)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _aligned(name: str, runs: Sequence[Sequence[Mapping[str, Any]]], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of all runs of an arm at the points that all of them have: shapes (T,) and (runs, T)."""
    tables = [{row[x]: row[y] for row in run if x in row and row.get(y) is not None} for run in runs]
    if not tables or not all(tables):
        known = sorted({key for run in runs for row in run for key in row})
        raise UserError(
            f"curve {name!r}: a run has no rows with {x!r} and {y!r}; its rows have {', '.join(known) or 'nothing'}"
        )
    grid = sorted(set.intersection(*(set(t) for t in tables)))
    if not grid:
        raise UserError(f"curve {name!r}: its {len(runs)} runs share no value of {x!r}; record them at the same points")
    return np.array(grid), np.array([[t[point] for point in grid] for t in tables], dtype=float)


def _band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Lower and upper edge over seeds, each of shape (T,), and the words for the legend.

    Two or three seeds say too little about spread, so their whole range is shown; more get Student's 95 % interval.
    """
    n = len(values)
    if n <= 3:
        return values.min(axis=0), values.max(axis=0), "" if n == 1 else ", band: min–max"
    half = stats.t.ppf(0.975, n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
    return values.mean(axis=0) - half, values.mean(axis=0) + half, ", band: 95 % interval"


def _seeds(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


@styled
def bars_by_difficulty(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    published: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
    ylabel: str = "success on held-out tasks",
) -> Figure:
    """Draw success by difficulty, one bar per arm, with 95 % intervals and, as diamonds, published values.

    Args:
        results: results[arm][difficulty] = {"success", "ci95": [low, high] or None, "n"}, as `lib.evaluate` prints it.
        published: published[arm][difficulty], where the paper reports it.

    Raises:
        UserError: nothing to draw, or a cell lacks one of its three keys.
    """
    levels = list(dict.fromkeys(level for cells in results.values() for level in cells))
    if not levels:
        raise UserError("bars_by_difficulty got no results: evaluate at least one arm at one difficulty")
    figure, axes = new_axes(3.6)
    ax = axes[0, 0]
    width = 0.8 / len(results)
    for k, (arm, cells) in enumerate(results.items()):
        for level, cell in cells.items():
            if missing := {"success", "ci95", "n"} - set(cell):
                raise UserError(
                    f"results[{arm!r}][{level!r}] lacks {', '.join(sorted(missing))}; pass what lib.evaluate prints"
                )
        spots = np.array([levels.index(level) + (k - (len(results) - 1) / 2) * width for level in cells])
        means = [cell["success"] for cell in cells.values()]
        ax.bar(spots, means, width * 0.92, color=PALETTE[k % len(PALETTE)], label=arm, zorder=2)
        for spot, cell in zip(spots, cells.values(), strict=True):
            top = cell["success"]
            if cell["ci95"] is not None:
                low, top = cell["ci95"]
                ax.plot([spot, spot], [low, top], color=INK, lw=1.2, zorder=3)
            ax.text(spot, top + 0.02, f"{cell['success']:.2f}", ha="center", va="bottom", fontsize=7)
        paper = (published or {}).get(arm, {})
        points = [(spot, paper[level]) for spot, level in zip(spots, cells, strict=True) if level in paper]
        if points:
            ax.scatter(*zip(*points, strict=True), marker="D", s=34, fc="white", ec=INK, lw=1.2, zorder=4)
    if published:
        ax.scatter([], [], marker="D", s=34, fc="white", ec=INK, lw=1.2, label="published value")
    counts = {level: sorted({cells[level]["n"] for cells in results.values() if level in cells}) for level in levels}
    ax.set_xticks(
        range(len(levels)), [f"{level}\nn = {'–'.join(map(str, {c[0]: 0, c[-1]: 0}))}" for level, c in counts.items()]
    )
    ax.set_ylim(0, 1.12)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set(ylabel=f"{ylabel} (bars: 95 % interval)", title=title)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def stacked_failures(
    failures: Mapping[str, Mapping[str, int]], *, title: str = "", of: str = "failed episodes"
) -> Figure:
    """Draw, for each arm, which share of its failures is of which kind.

    Args:
        failures: failures[arm][kind] = number of episodes. of: what the shares are shares of.

    Raises:
        UserError: no arm, or a negative count.
    """
    kinds = list(dict.fromkeys(kind for counts in failures.values() for kind in counts))
    if not kinds or any(c < 0 for counts in failures.values() for c in counts.values()):
        raise UserError("stacked_failures needs at least one arm, one kind of failure and counts that are not negative")
    figure, axes = new_axes(1.1 + 0.42 * len(failures))
    ax = axes[0, 0]
    totals = [sum(counts.values()) for counts in failures.values()]
    left = np.zeros(len(failures))
    for k, kind in enumerate(kinds):
        counts = np.array([counts.get(kind, 0) for counts in failures.values()])
        shares = counts / np.maximum(totals, 1)
        ax.barh(range(len(failures)), shares, left=left, height=0.62, color=PALETTE[k % len(PALETTE)], label=kind,
                hatch=HATCHES[k % len(HATCHES)], edgecolor="white", lw=0.8)  # fmt: skip
        for row, (count, share) in enumerate(zip(counts, shares, strict=True)):
            if share >= 0.04:
                ax.text(left[row] + share / 2, row, str(count), ha="center", va="center", fontsize=7.5,
                        bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85})  # fmt: skip
        left += shares
    names = [f"{arm}\nn = {total}" for arm, total in zip(failures, totals, strict=True)]
    ax.set_yticks(range(len(failures)), names)
    ax.set_ylim(len(failures) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(axis="y", visible=False)
    ax.set(xlabel=f"share of {of}", title=title)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


@styled
def histogram(groups: Mapping[str, Sequence[int]], *, xlabel: str, title: str = "") -> Figure:
    """Draw how an integer quantity, such as tree depth, is distributed in each group, one row per group.

    Args:
        groups: the values of each group, in the order of the rows.

    Raises:
        UserError: all groups are empty.
    """
    values = [v for group in groups.values() for v in group]
    if not values:
        raise UserError(f"histogram of {xlabel!r} got no values in {len(groups)} groups: give at least one value")
    figure, axes = new_axes(0.7 + 0.85 * len(groups), len(groups), 1, sharex=True, sharey=True)
    for k, (ax, (name, group)) in enumerate(zip(axes[:, 0], groups.items(), strict=True)):
        counts = Counter(group)
        shares = [counts[v] / max(1, len(group)) for v in sorted(counts)]
        ax.bar(sorted(counts), shares, 0.86, color=PALETTE[k % len(PALETTE)])
        mean = f"\nmean {np.mean(group):.2g}" if len(group) else ""
        ax.text(1.005, 0.5, f"{name}\nn = {len(group)}{mean}", transform=ax.transAxes, va="center", fontsize=8)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    ax.set_xlim(min(values) - 0.6, max(values) + 0.6)
    ax.set_xlabel(xlabel)
    axes[0, 0].set_title(title)
    figure.supylabel("share of the group", fontsize=9)
    return figure


@styled
def reward_terms(tree: Tree, *, max_nodes: int = 40) -> Figure:
    """Draw what each node's reward is made of: its terms stacked, negative ones below zero, the reward as a black tick.

    Args:
        tree: a tree whose nodes hold `info["reward_terms"]`. max_nodes: bars shown, nearest to the root first.

    Raises:
        UserError: no node has reward terms.
    """
    shown, _ = visible_nodes(tree, max_nodes)
    nodes = [n for n in tree if n.id in shown]
    terms = {n.id: n.info.get("reward_terms", {}) for n in nodes}
    names = list(dict.fromkeys(name for row in terms.values() for name in row))
    if not names:
        raise UserError(f"tree {tree.task_id} has no reward terms: apply a reward function to it first")
    figure, axes = new_axes(3.0)
    ax = axes[0, 0]
    up, down = np.zeros(len(nodes)), np.zeros(len(nodes))
    for k, name in enumerate(names):
        values = np.array([terms[n.id].get(name, 0.0) for n in nodes], dtype=float)
        ax.bar(range(len(nodes)), values, 0.72, bottom=np.where(values >= 0, up, down), color=PALETTE[k % len(PALETTE)],
               label=clean(name, 30))  # fmt: skip
        up, down = up + np.maximum(values, 0), down + np.minimum(values, 0)
    known = [(k, n.reward) for k, n in enumerate(nodes) if n.reward is not None]
    if known:
        ax.scatter(
            *zip(*known, strict=True), marker="_", s=260 * min(1.0, 14 / len(nodes)) + 30, c="black", label="reward R"
        )
    ax.axhline(0, color=INK, lw=0.8)
    ax.set_xticks(range(len(nodes)), [n.id for n in nodes], rotation=90 if len(nodes) > 12 else 0)
    ax.set(xlabel="node (path from the root)", ylabel="reward (no unit)")
    ax.set_title(f"{clean(tree.task_id, 40)} · {count_text(tree, shown)}")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
