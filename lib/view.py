"""What every picture of a tree agrees on: nodes shown, where they stand, when they ran, their names and colours.

Pure functions without a plotting library, so that matplotlib figures, widgets and the HTML player look the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import zip_longest
from os.path import commonprefix
from typing import Literal, get_args

from lib.errors import UserError
from lib.tree import Node, Tree

ColorBy = Literal["reward", "success", "advantage", "depth", "weight"]
Scale = tuple[float, float, tuple[str, str, str]]  # lowest value, highest value, colours from low to high
Spots = dict[str, tuple[float, float]]

# Okabe and Ito's palette, readable with every common colour blindness; its yellow is left out (invisible on white).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
SIGNED = ("#D55E00", "#F4EFE6", "#0072B2")  # bad, neutral, good
GRADED = ("#E4F1EC", "#5BA893", "#0B4F45")  # little to much
UNKNOWN, INK = "#C9C9C9", "#333333"
VALUE_NAME = {
    "reward": "reward R", "success": "success s̃", "advantage": "advantage A", "depth": "depth (edges to the root)",
    "weight": "depth weight w",
}  # fmt: skip
# Edge colour, width in points, dashes (on, off) in points; () is a solid line.
STATUS_EDGE: dict[str, tuple[str, float, tuple[float, ...]]] = {
    "finished": ("#333333", 1.4, ()),
    "out_of_steps": ("#333333", 1.8, (3.0, 1.5)),
    "context_full": ("#333333", 2.0, (1.0, 1.2)),
    "error": ("#A5005A", 2.4, ()),
    "aborted": ("#A5005A", 2.0, (3.0, 1.5)),
    "running": ("#9A9A9A", 1.0, ()),
}


def tree_layout(tree: Tree, only: set[str] | None = None) -> Spots:
    """Tidy positions, so that equal trees look equal in every notebook.

    Subtrees are packed as closely as their outlines allow, siblings stand in launch order at least one unit apart and a
    parent stands in the middle of its children.

    Args:
        tree: the rollout.
        only: ids to place, closed under parents; all nodes if None.

    Returns:
        For each id (x, depth): x >= 0 in units of the smallest distance of neighbours, depth in edges.
    """
    kept = [n for n in tree if only is None or n.id in only]
    children: dict[str | None, list[str]] = defaultdict(list)
    for node in kept:
        children[node.parent].append(node.id)
    outline: dict[str, list[tuple[float, float]]] = {}  # of each subtree: leftmost and rightmost x on every level
    shift: dict[str, float] = {}  # x relative to the parent
    for node in reversed(kept):
        below: list[tuple[float, float]] = []
        for kid in children[node.id]:
            own = outline.pop(kid)
            shift[kid] = max((b[1] - o[0] + 1 for b, o in zip(below, own, strict=False)), default=0.0)
            moved = [(left + shift[kid], right + shift[kid]) for left, right in own]
            below = [(b or m)[:1] + (m or b)[1:] for b, m in zip_longest(below, moved)]
        kids = children[node.id]
        middle = (shift[kids[0]] + shift[kids[-1]]) / 2 if kids else 0.0
        for kid in kids:
            shift[kid] -= middle
        outline[node.id] = [(0.0, 0.0)] + [(left - middle, right - middle) for left, right in below]
    x = {tree.root.id: -min(left for left, _ in outline[tree.root.id])}
    for node in kept[1:]:
        x[node.id] = x[node.parent] + shift[node.id]  # type: ignore[index]
    return {n.id: (x[n.id], float(n.depth)) for n in kept}


def visible_nodes(tree: Tree, limit: int) -> tuple[set[str], dict[str, int]]:
    """The nodes nearest to the root, so that a large tree still gives a legible picture that says what it leaves out.

    Returns:
        ids of at most `limit` nodes, level by level and in launch order, and for each of them that lost some the number
        of hidden descendants that have it as nearest visible ancestor.

    Raises:
        UserError: `limit` is below 1.
    """
    if limit < 1:
        raise UserError(f"max_nodes={limit}: a picture needs at least 1 node")
    shown = {n.id for n in sorted(tree, key=lambda n: n.depth)[:limit]}
    hidden: dict[str, int] = defaultdict(int)
    for node in tree:
        if node.id not in shown:
            ancestor = node.parent
            while ancestor not in shown:
                ancestor = tree.nodes[ancestor].parent  # type: ignore[index]
            hidden[ancestor] += 1
    return shown, dict(hidden)


def count_text(tree: Tree, shown: set[str]) -> str:
    """How many nodes there are and, if fewer, how many are shown."""
    if len(shown) < len(tree):
        return f"showing {len(shown)} of {len(tree)} nodes"
    return "1 node" if len(tree) == 1 else f"{len(tree)} nodes"


def amount_text(value: float) -> str:
    """A time or a count of tokens with three digits that count: 0.211, 4.5, 1,326."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def clean(text: str, width: int | None = None) -> str:
    """One printable line of untrusted text: terminal codes and control characters out, ellipsis beyond `width`."""
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if width is None or len(text) <= width else text[: max(1, width - 1)].rstrip() + "…"


def node_labels(tree: Tree) -> dict[str, str]:
    """Tasks as labels, without the words with which all of them (or all below the root) begin alike."""
    tasks = {n.id: clean(n.task).split(" ") for n in tree}
    prefix = commonprefix(list(tasks.values())) or commonprefix([tasks[n.id] for n in tree if n.depth])
    cut = len(prefix) if len(tasks) > 1 else 0
    return {i: " ".join(w[cut:] if w[:cut] == prefix and len(w) > cut else w) for i, w in tasks.items()}


def node_values(tree: Tree, by: ColorBy) -> dict[str, float | None]:
    """The value of each node that its colour shows; None where no reward function has set it yet.

    Raises:
        UserError: `by` names no such value.
    """
    if by not in get_args(ColorBy):
        raise UserError(f"color={by!r}: nodes can be coloured by {', '.join(get_args(ColorBy))}")
    return {n.id: getattr(n, by) for n in tree}


def color_scale(trees: list[Tree], by: ColorBy) -> Scale:
    """One scale for several trees: lowest value, highest value and the three colours between them.

    Success spans [0, 1], rewards at least that; advantages are symmetric, so that white is exactly 0.
    """
    values = [v for tree in trees for v in node_values(tree, by).values() if v is not None]
    if by == "advantage":
        top = max((abs(v) for v in values), default=0.0) or 1.0
        return -top, top, SIGNED
    low, high = min([0.0, *values]), max([1.0, *values])
    return low, high, SIGNED if by in ("reward", "success") else GRADED


def shade(value: float | None, scale: Scale) -> str:
    """The colour "#rrggbb" of a value on a scale, by linear interpolation; grey if there is no value."""
    if value is None:
        return UNKNOWN
    low, high, colors = scale
    place = min(max((value - low) / (high - low), 0.0), 1.0) * 2
    left, right = (colors[0], colors[1]) if place <= 1 else (colors[1], colors[2])
    part = place if place <= 1 else place - 1
    rgb = [(int(left[k : k + 2], 16), int(right[k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in rgb)


def is_dark(color: str) -> bool:
    """True if text on this "#rrggbb" background must be white (relative luminance as in WCAG, simplified gamma)."""
    red, green, blue = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3


@dataclass(frozen=True)
class Clock:
    """When things happened in one tree.

    Args:
        unit: "seconds" or "sampled tokens on the critical path".
        note: what was assumed because it had not been recorded, else empty.
        start, end: of each node. actions: the moments at which each action of a node had been sampled, shape (turns,).
    """

    unit: str
    note: str
    start: dict[str, float]
    end: dict[str, float]
    actions: dict[str, list[float]]


def clock(tree: Tree, unit: Literal["seconds", "tokens"] = "seconds") -> Clock:
    """Time in seconds as recorded, or in sampled tokens on the critical path, which no machine changes.

    In tokens an action lasts as long as it has tokens, and the next one waits for the children that it launched. A
    child tells which action that was (`info["turn"]`, from 1) and whether it ran beside a sibling (`info["parallel"]`);
    neighbours that did are drawn side by side. A tree without time stamps is always measured in tokens.

    Raises:
        UserError: another unit.
    """
    if unit not in ("seconds", "tokens"):
        raise UserError(f"unit={unit!r}: time is told in 'seconds' or 'tokens'")
    if unit == "seconds" and any(n.ended > 0 for n in tree):
        actions = {n.id: _stamps(n) for n in tree}
        return Clock("seconds", "", {n.id: n.started for n in tree}, {n.id: n.ended for n in tree}, actions)
    start, end, actions = {tree.root.id: 0.0}, {}, {}
    kids: dict[tuple[str | None, int], list[Node]] = defaultdict(list)
    for n in tree:
        last = max(1, tree.nodes[n.parent].turns) if n.parent else 1
        kids[n.parent, min(n.info.get("turn", 1), last)].append(n)

    def run(node: Node) -> None:
        """Fill in the subtree of a node whose start is known."""
        now, moments = start[node.id], []
        lengths = [len(s.ids) for s in node.segments if s.trainable]
        for turn, length in enumerate(lengths or [0], 1):
            now += length
            moments.append(now)
            begin, beside = now, False  # of the latest batch of children
            for kid in kids[node.id, turn]:
                together = kid.info.get("parallel", "turn" not in kid.info)
                begin = begin if together and beside else now
                start[kid.id], beside = begin, together
                run(kid)
                now = max(now, end[kid.id])
        actions[node.id], end[node.id] = moments[: len(lengths)], now

    run(tree.root)
    unknown = any(n.depth and "turn" not in n.info for n in tree)
    note = "launching actions not recorded: children drawn as launched together by the first action" if unknown else ""
    return Clock("sampled tokens on the critical path", note, start, end, actions)


def _stamps(node: Node) -> list[float]:
    """Recorded moments of the actions; spread evenly over the node's life where they are missing."""
    times = node.info.get("times", [])
    if len(times) == node.turns:
        return times
    return [node.started + (k + 0.5) * (node.ended - node.started) / node.turns for k in range(node.turns)]


def snapshots(tree: Tree, count: int) -> list[Tree]:
    """The tree as it was at up to `count` moments: at launches of nodes, and complete at last. For `draw_growth`."""
    time = clock(tree)
    born = sorted(set(time.start.values()))
    cuts = min(count - 1, len(born))
    moments = [born[k * len(born) // cuts] for k in range(cuts)] + [max(time.end.values())]

    def at(node: Node, moment: float) -> Node:
        open_ = time.end[node.id] > moment
        return replace(node, status="running", success=None, reward=None, advantage=None) if open_ else node

    return [replace(tree, nodes={n.id: at(n, t) for n in tree if time.start[n.id] <= t}) for t in moments]
