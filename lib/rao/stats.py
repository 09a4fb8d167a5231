"""Numbers that describe trees: delegation, parallelism, cost, and why tasks failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lib.tree import Node, Tree


def parallel_launch_share(trees: Sequence[Tree]) -> float | None:
    """Share of launched agents that ran at the same time as a sibling; None without launches."""
    flags = [bool(n.info.get("parallel")) for t in trees for n in t if n.parent is not None]
    return sum(flags) / len(flags) if flags else None


def critical_path_tokens(tree: Tree, node: Node | None = None) -> int:
    """Sampled tokens that have to come one after the other: a node's own, plus for every turn the longest of the
    children that ran together, or the sum of those that ran in sequence. No machine changes this number."""
    node = node or tree.root
    total = node.tokens_out
    by_turn: dict[int, list[Node]] = {}
    for child in tree.children(node):
        by_turn.setdefault(child.info.get("turn", 0), []).append(child)
    for children in by_turn.values():
        together = [critical_path_tokens(tree, c) for c in children if c.info.get("parallel")]
        alone = [critical_path_tokens(tree, c) for c in children if not c.info.get("parallel")]
        total += max(together, default=0) + sum(alone)
    return total


def failure_kind(tree: Tree) -> str:
    """Why a root task failed, "" if it did not.

    "overflow": the root's context was full. "gave up": it finished although no craft of a target had succeeded.
    "wrong craft": its last craft was refused. "bad copy": it used a name or item that does not exist. "overrun": too
    many agents. "other": out of steps or stuck.
    """
    root = tree.root
    if root.info.get("verified"):
        return ""
    if tree.info.get("overrun"):
        return "overrun"
    if root.status == "context_full":
        return "overflow"
    if root.status != "finished":
        return "other"
    seen = [s.text for s in root.segments[1:] if not s.trainable]
    unknown = ("no recipe makes", "does not use", "NameError", "KeyError", "IndexError")
    if any(sign in text for text in seen for sign in unknown):
        return "bad copy"
    if seen and "Error" in seen[-1]:
        return "wrong craft"
    return "gave up"


def describe(trees: Sequence[Tree]) -> dict[str, Any]:
    """Means over a batch of trees, for logs and tables; success is the verifier's, not the reward's."""
    nodes = [n for t in trees for n in t]
    actions = [s.text or str(s.ids) for n in nodes for s in n.segments if s.trainable]
    roots = [float(t.root.info.get("verified") or 0) for t in trees]
    repeats = [a == b for n in nodes for a, b in _pairs([s.ids for s in n.segments if s.trainable])]
    status = Counter(n.status for n in nodes)
    return {
        "root_success": sum(roots) / len(trees),
        "node_success": sum(float(n.info.get("verified") or 0) for n in nodes) / len(nodes),
        "nodes": len(nodes) / len(trees),
        "depth": sum(t.depth for t in trees) / len(trees),
        "depth_max": max(t.depth for t in trees),
        "tokens_out": sum(n.tokens_out for n in nodes),
        "tokens_in": sum(n.tokens_in for n in nodes),
        "context_full": status["context_full"] / len(nodes),
        "unfinished": 1 - status["finished"] / len(nodes),
        "distinct_actions": len(set(actions)) / max(1, len(actions)),
        "repeated_actions": sum(repeats) / max(1, len(repeats)),
        "parallel_launch_share": parallel_launch_share(trees),
        "timed_out": sum(bool(t.info.get("timed_out")) for t in trees),
    }


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items, items[1:], strict=False))
