"""Checks for `rao/03_textcraft_synth`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lib.exercises import expect
from lib.tree import Node, Segment, Tree


def _tree(nodes: dict[str, tuple[int, int, bool]]) -> Tree:
    """A tree from node id -> (sampled tokens, turn of the parent that launched it, whether it ran beside a sibling)."""
    tree = Tree("exercise", "exercise")
    for name, (tokens, turn, parallel) in nodes.items():
        segments = [Segment([0], False, None, ""), Segment([1] * tokens, True, [0.0] * tokens, "")]
        tree.add(Node(name, "t", segments, "finished", info={"turn": turn, "parallel": parallel}))
    return tree


def check_tokens_below_root(tokens_below_root: Callable[[Tree], float]) -> None:
    """Exercise 1, with values worked by hand."""
    expect(tokens_below_root(_tree({"0": (40, 0, False)})), 0.0, "a root alone")
    tree = _tree({"0": (10, 0, False), "0.0": (20, 1, True), "0.1": (5, 1, True), "0.0.0": (5, 1, False)})
    expect(tokens_below_root(tree), 0.75, "30 of 40 tokens are sampled below the root")


def check_critical_path(critical_path: Callable[[Tree, Node], int]) -> None:
    """Exercise 2, with values worked by hand."""
    tree = _tree({"0": (10, 0, False), "0.0": (20, 1, True), "0.1": (5, 1, True), "0.0.0": (5, 1, False),
                  "0.2": (7, 2, False), "0.3": (8, 2, False)})  # fmt: skip
    expect(critical_path(tree, tree.nodes["0.1"]), 5, "a leaf")
    expect(critical_path(tree, tree.nodes["0.0"]), 25, "20 + 5")
    expect(critical_path(tree, tree.root), 50, "10 + max(25, 5) in turn 1 + 7 + 8 in turn 2")


def check_reach(reach: Callable[[Sequence[dict[str, Any]], float, int], int | None]) -> None:
    """Exercise 3, with values worked by hand."""
    rows = [{"step": i + 1, "root_success": s} for i, s in enumerate([0.0, 1.0, 0.5, 0.9, 1.0, 1.0])]
    expect(reach(rows, 0.8, 1), 2, "no averaging: a lucky step counts")
    expect(reach(rows, 0.79, 3), 4, "(1.0 + 0.5 + 0.9) / 3 = 0.8")
    expect(reach(rows, 0.99, 3), None, "never")
