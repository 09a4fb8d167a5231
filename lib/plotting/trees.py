"""Pictures of rollouts: the tree, its timeline, its growth, and many trees side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lib import view
from lib.errors import UserError
from lib.plotting.style import FAINT, MIDDLE, new_axes, styled
from lib.tree import Tree

LETTER = 0.072  # inches: width of a letter at 7 points
HALO = "#E69F00"


@styled
def draw_tree(tree: Tree, *, color: view.ColorBy = "reward", max_nodes: int = 80, ax: Axes | None = None) -> Figure:
    """Draw one rollout: nodes are agents, edges are calls, the colour is a value, the rim says how the agent ended.

    Args:
        tree: the rollout.
        color: the value that colours a node; grey where no reward function has set it.
        max_nodes: a larger tree shows this many nodes nearest to the root, says so, and marks each cut with "+n".
        ax: draw here instead of in a new figure.

    Raises:
        UserError: unknown `color`, or `max_nodes` below 1.
    """
    shown, hidden = view.visible_nodes(tree, max_nodes)
    spots = view.tree_layout(tree, shown)
    scale = view.color_scale([tree], color)
    levels = 1 + int(max(y for _, y in spots.values()))
    if ax is None:
        ax = new_axes(0.8 + max(0.75, 1.25 - 0.06 * levels) * levels)[1][0, 0]
    span = max(x for x, _ in spots.values())
    inch = ax.get_position().width * ax.figure.get_figwidth() / max(span + 1, 4)
    _nodes(ax, tree, spots, color, scale, size=min(400.0, (inch * 46) ** 2))
    upright = _texts(ax, tree, spots, hidden, inch)
    ax.set_ylim(levels - 1 + (0.85 if upright else 0.6), -0.35)
    pad = max(0.6, (4 - span) / 2)
    ax.set_xlim(-pad, span + pad)
    tokens = sum(n.tokens_out for n in tree)
    title = [
        view.clean(tree.task_id, 40),
        view.count_text(tree, shown),
        f"depth {tree.depth}",
        f"{tokens:,} sampled tokens",
    ]
    ax.set_title(" · ".join(title))
    _rim_legend(ax, tree, shown)
    _color_bar(ax, scale, color)
    return ax.figure


def _nodes(ax: Axes, tree: Tree, spots: view.Spots, color: view.ColorBy, scale: view.Scale, size: float) -> None:
    """Edges, discs and, where they fit, values; the y axis points down and is not drawn."""
    values = view.node_values(tree, color)
    bend = np.linspace(0, 1, 24)
    ease = 3 * bend**2 - 2 * bend**3
    links = [(spots[tree.nodes[i].parent], spots[i]) for i in spots if tree.nodes[i].depth]  # type: ignore[index]
    paths = [np.stack([x0 + (x1 - x0) * ease, y0 + (y1 - y0) * bend], axis=1) for (x0, y0), (x1, y1) in links]
    ax.add_collection(LineCollection(paths, colors=MIDDLE, linewidths=1.1, zorder=1))
    for status in view.STATUS_EDGE:
        members = [i for i in spots if tree.nodes[i].status == status]
        if members:
            fills = [view.shade(values[i], scale) for i in members]
            ax.scatter(
                *zip(*(spots[i] for i in members), strict=True), s=size, fc=fills, zorder=3, **_rim(status, size)
            )
    for i, spot in spots.items():
        if size > 250 and values[i] is not None:
            ink = "white" if view.is_dark(view.shade(values[i], scale)) else view.INK
            ax.text(*spot, f"{values[i]:.2g}", ha="center", va="center", fontsize=6.5, color=ink, zorder=4)
    ax.axis("off")


def _texts(ax: Axes, tree: Tree, spots: view.Spots, hidden: Mapping[str, int], inch: float) -> bool:
    """Task and tokens under each node: level where the gap to the neighbours allows it, else upright under leaves.

    Returns:
        True if some text stands upright and needs more room.
    """
    labels = view.node_labels(tree)
    levels: dict[float, list[float]] = {}
    for x, y in spots.values():
        levels.setdefault(y, []).append(x)
    inner = {tree.nodes[i].parent for i in spots}
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.88}
    upright = False
    for i, (x, y) in spots.items():
        gap = min((abs(x - other) for other in levels[y] if other != x), default=max(4.0, x)) * inch
        letters = min(40, int(gap / LETTER))
        cut = f"+{hidden[i]} hidden" if i in hidden else ""
        if letters >= 9:
            lines = [view.clean(labels[i], letters), f"{tree.nodes[i].tokens_out} tokens", cut]
            ax.text(x, y + 0.22, "\n".join(filter(None, lines)), ha="center", va="top", fontsize=7, bbox=box, zorder=2)
        elif i not in inner and inch > 0.13:
            upright = True
            text = cut or view.clean(labels[i], 13)
            ax.text(x, y + 0.18, text, ha="center", va="top", fontsize=6.5, rotation=90, zorder=2)
        elif cut:
            ax.text(x, y - 0.15, f"+{hidden[i]}", ha="left", va="bottom", fontsize=6.5, zorder=4)
    return upright


def _rim(status: str, size: float) -> dict[str, Any]:
    """Rim of a disc of `size` square points; thinner on tiny discs, which it would hide otherwise."""
    edge, width, dashes = view.STATUS_EDGE[status]
    return {"edgecolors": edge, "linewidths": width * min(1.0, size**0.5 / 9), "linestyles": [(0, dashes or None)]}


def _rim_legend(ax: Axes, tree: Tree, shown: set[str]) -> None:
    count = Counter(tree.nodes[i].status for i in shown)
    handles = [
        ax.scatter([], [], s=90, facecolors="white", label=f"{s.replace('_', ' ')} ({count[s]})", **_rim(s, 90))
        for s in view.STATUS_EDGE
        if count[s]
    ]
    title = "rim: how the agent ended"
    ax.legend(handles=handles, title=title, loc="upper left", alignment="left", scatteryoffsets=[0.5])


def _color_bar(ax: Axes | np.ndarray, scale: view.Scale, color: view.ColorBy) -> None:
    low, high, colors = scale
    figure = ax.flat[0].figure if isinstance(ax, np.ndarray) else ax.figure
    mappable = ScalarMappable(Normalize(low, high), LinearSegmentedColormap.from_list("values", colors))
    bar = figure.colorbar(mappable, ax=ax, shrink=0.7, aspect=16, pad=0.01)
    bar.locator = MaxNLocator(5, integer=color == "depth")
    bar.update_ticks()
    bar.set_label(view.VALUE_NAME[color], fontsize=8)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)


@styled
def draw_timeline(
    tree: Tree, *, unit: Literal["seconds", "tokens"] = "seconds", color: view.ColorBy = "reward", max_nodes: int = 40
) -> Figure:
    """Draw when each agent lived: one bar per node, pale while children run, a white tick when an action was ready.

    Children launched one after the other form a staircase, children launched together begin side by side.

    Args:
        tree: the rollout.
        unit: seconds as recorded, or sampled tokens along the critical path (always for trees without time stamps).
        color: the value that colours a bar. max_nodes: bars shown, nearest to the root first.

    Raises:
        UserError: unknown `color`, or `max_nodes` below 1.
    """
    shown, _ = view.visible_nodes(tree, max_nodes)
    time, labels, values = view.clock(tree, unit), view.node_labels(tree), view.node_values(tree, color)
    scale = view.color_scale([tree], color)
    rows = sorted(shown, key=lambda i: [int(part) for part in i.split(".")])
    row = {i: k for k, i in enumerate(rows)}
    figure, axes = new_axes(0.9 + 0.23 * max(3, len(rows)))
    ax = axes[0, 0]
    for i, k in row.items():
        fill = view.shade(values[i], scale)
        ax.barh(k, time.end[i] - time.start[i], left=time.start[i], height=0.62, color=fill, zorder=2)
        ax.vlines(time.actions[i], k - 0.31, k + 0.31, color="white", lw=1.2, zorder=4)
        for left, right in _union((time.start[c.id], time.end[c.id]) for c in tree.children(tree.nodes[i])):
            ax.barh(k, right - left, left=left, height=0.62, color="white", alpha=0.6, lw=0, zorder=3)
        if (parent := tree.nodes[i].parent) is not None:
            ax.plot([time.start[i]] * 2, [row[parent], k], color=MIDDLE, lw=0.8, zorder=1)
    names = ["     " * tree.nodes[i].depth + view.clean(labels[i], 26) for i in rows]
    ax.set_yticks(range(len(rows)), names, ha="left")
    ax.tick_params(axis="y", pad=max(40.0, 4.5 * max(map(len, names))))
    ax.set_ylim(len(rows) - 0.4, -0.6)
    end = max(time.end.values())
    ax.set_xlim(0, end or 1)
    ax.grid(axis="x", color=FAINT)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("\n".join(filter(None, [time.unit, time.note])))
    key = "pale: waits for children   white tick: action ready"
    ax.text(1, 1.01, key, transform=ax.transAxes, ha="right", va="bottom", fontsize=7.5)
    ax.set_title(
        f"{view.clean(tree.task_id, 40)} · {view.count_text(tree, shown)} · {view.amount_text(end)} {time.unit}"
    )
    _color_bar(ax, scale, color)
    return figure


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping spans joined."""
    joined: list[tuple[float, float]] = []
    for left, right in sorted(spans):
        if joined and left <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], right))
        else:
            joined.append((left, right))
    return joined


@styled
def gallery(
    trees: Sequence[Tree],
    titles: Sequence[str] | None = None,
    *,
    color: view.ColorBy = "reward",
    columns: int = 4,
    max_nodes: int = 80,
) -> Figure:
    """Draw many trees small and on one colour scale, to compare shapes.

    Args:
        trees: at least one. titles: one per tree; task ids if None. columns: trees in a row.

    Raises:
        UserError: no trees, or another number of titles.
    """
    titles = [t.task_id for t in trees] if titles is None else titles
    if not trees or len(titles) != len(trees):
        raise UserError(
            f"gallery got {len(trees)} trees and {len(titles)} titles: give at least one tree and one title each"
        )
    scale = view.color_scale(list(trees), color)
    columns = min(columns, len(trees))
    rows = -(-len(trees) // columns)
    figure, axes = new_axes(0.2 + 2.1 * rows, rows, columns)
    for ax in axes.flat[len(trees) :]:
        ax.axis("off")
    shown_nodes = [view.visible_nodes(tree, max_nodes)[0] for tree in trees]
    depth = max(tree.nodes[i].depth for tree, shown in zip(trees, shown_nodes, strict=True) for i in shown)
    for ax, tree, title, shown in zip(axes.flat, trees, titles, shown_nodes, strict=False):
        spots = view.tree_layout(tree, shown)
        _small(ax, tree, spots, color, scale, (max(x for x, _ in spots.values()), depth), 7.0 / columns)
        success = "" if tree.root.success is None else f", s̃ = {tree.root.success:.2g}"
        ax.set_title(
            f"{view.clean(title, 34)}\n{view.count_text(tree, shown)}{success}", fontsize=8, fontweight="normal"
        )
    _color_bar(axes, scale, color)
    return figure


def _small(
    ax: Axes,
    tree: Tree,
    spots: view.Spots,
    color: view.ColorBy,
    scale: view.Scale,
    frame: tuple[float, float],
    inches: float,
    new: Sequence[str] = (),
) -> None:
    """A tree without texts in a frame of given span and depth, about `inches` wide; `new` nodes get a halo."""
    span, depth = frame
    size = min(130.0, max(9.0, (inches / (span + 1) * 46) ** 2))
    halo = np.array([spots[i] for i in new]).reshape(-1, 2)
    ax.scatter(halo[:, 0], halo[:, 1], s=size * 3.2, c=HALO, alpha=0.45, lw=0, zorder=2)
    _nodes(ax, tree, spots, color, scale, size)
    pad = max(0.6, (3 - span) / 2)
    ax.set_xlim(-pad, span + pad)
    ax.set_ylim(depth + 0.35, -0.35)


@styled
def draw_growth(
    snapshots: Sequence[Tree],
    titles: Sequence[str] | None = None,
    *,
    color: view.ColorBy = "reward",
    max_nodes: int = 80,
) -> Figure:
    """Draw one tree at several moments: every node at its final place, new nodes with a halo.

    Args:
        snapshots: states of one rollout in time order, as `lib.view.snapshots` cuts them.
        titles: one per state; the numbers of nodes if None.

    Raises:
        UserError: no states, or a node of an earlier state is missing in the last one.
    """
    if not snapshots or any(i not in snapshots[-1].nodes for tree in snapshots for i in tree.nodes):
        raise UserError(
            f"draw_growth got {len(snapshots)} states: give states of one tree in time order, the largest last"
        )
    places = view.tree_layout(snapshots[-1], view.visible_nodes(snapshots[-1], max_nodes)[0])
    frame = (max(x for x, _ in places.values()), max(y for _, y in places.values()))
    scale = view.color_scale(list(snapshots), color)
    figure, axes = new_axes(0.7 + 0.5 * max(3, frame[1] + 1), 1, len(snapshots))
    before: set[str] = set()
    for k, (ax, tree) in enumerate(zip(axes[0], snapshots, strict=True)):
        spots = {i: places[i] for i in tree.nodes if i in places}
        new = [i for i in spots if i not in before]
        _small(ax, tree, spots, color, scale, frame, 7.0 / len(snapshots), new)
        ax.set_title(titles[k] if titles else f"{view.count_text(tree, set(spots))}, {len(new)} new", fontsize=8)
        before |= set(tree.nodes)
    _color_bar(axes, scale, color)
    return figure
