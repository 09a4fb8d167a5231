"""Numbers that describe trees, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lib.rao.stats import critical_path_tokens, describe, failure_kind, parallel_launch_share
from lib.tree import Node, Segment, Tree


def node(name: str, tokens: int = 1, status: str = "finished", seen: tuple[str, ...] = (), **info: Any) -> Node:
    """A node of one action of `tokens` tokens, then observations."""
    made = Node(name, "task", [Segment([0], False, None, "prompt")], status, info=info)
    made.segments.append(Segment(list(range(tokens)), True, [-1.0] * tokens, f"action {name}"))
    made.segments += [Segment([0], False, None, text) for text in seen]
    return made


def tree_of(*nodes: Node, **info: Any) -> Tree:
    tree = Tree("t", "g", info=info)
    for made in nodes:
        tree.add(made)
    return tree


# --- critical path ----------------------------------------------------------------------------------------------------


def test_critical_path_of_five_nodes_by_hand():
    """Turn 1 gathers two children (7 with its own child of 4, and 9), turn 2 launches one alone (5)."""
    tree = tree_of(
        node("0", 10),
        node("0.0", 7, turn=1, parallel=True),
        node("0.1", 9, turn=1, parallel=True),
        node("0.0.0", 4, turn=1),
        node("0.2", 5, turn=2),
    )
    assert critical_path_tokens(tree) == 10 + max(7 + 4, 9) + 5
    assert critical_path_tokens(tree, tree.nodes["0.0"]) == 11
    assert critical_path_tokens(tree, tree.nodes["0.1"]) == 9


def test_critical_path_adds_up_what_ran_in_sequence_and_overlaps_what_was_gathered():
    alone = [node(f"0.{k}", k + 1, turn=1) for k in range(3)]
    together = [node(f"0.{k}", k + 1, turn=1, parallel=True) for k in range(3)]
    assert critical_path_tokens(tree_of(node("0", 1), *alone)) == 1 + 1 + 2 + 3
    assert critical_path_tokens(tree_of(node("0", 1), *together)) == 1 + 3
    in_turns = [node(f"0.{k}", k + 1, turn=k, parallel=True) for k in range(3)]
    assert critical_path_tokens(tree_of(node("0", 1), *in_turns)) == 1 + 1 + 2 + 3


def test_parallel_share_counts_launches_over_all_trees():
    one = tree_of(node("0"), node("0.0", parallel=True), node("0.1", parallel=True), node("0.2"))
    two = tree_of(node("0"), node("0.0"))
    assert parallel_launch_share([one, two]) == 2 / 4
    assert parallel_launch_share([tree_of(node("0"))]) is None and parallel_launch_share([]) is None


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "info", "kind"),
    [
        (node("0", verified=1.0), {}, ""),
        (node("0", verified=0.0), {"overrun": True}, "overrun"),
        (node("0", status="context_full", verified=0.0), {}, "overflow"),
        (node("0", status="out_of_steps", verified=0.0), {}, "other"),
        (node("0", status="error", verified=0.0), {}, "other"),
        (node("0", verified=0.0, seen=("Error: no recipe makes x.", "ok")), {}, "bad copy"),
        (node("0", verified=0.0, seen=("Error: m2 does not use m9.",)), {}, "bad copy"),
        (node("0", verified=0.0, seen=("NameError: name 'k1' is not defined",)), {}, "bad copy"),
        (node("0", verified=0.0, seen=("ok", "Error: not enough m1 (need 2, have 1).")), {}, "wrong craft"),
        (node("0", verified=0.0, seen=("Error: not enough m1.", "Crafted 2 m1.")), {}, "gave up"),
        (node("0", verified=0.0), {}, "gave up"),
    ],
)
def test_every_kind_of_failure(root: Node, info: dict, kind: str):
    assert failure_kind(tree_of(root, **info)) == kind


# --- batches ----------------------------------------------------------------------------------------------------------


def test_description_of_two_trees_by_hand():
    one = tree_of(
        node("0", 4, verified=1.0),
        node("0.0", 2, verified=1.0, parallel=True),
        node("0.1", 3, "out_of_steps", verified=0.0, parallel=True),
    )
    two = tree_of(node("0", 5, "context_full", verified=0.0), timed_out=True)
    seen = describe([one, two])
    assert seen == {
        "root_success": 0.5, "node_success": 0.5, "nodes": 2.0, "depth": 0.5, "depth_max": 1, "tokens_out": 14,
        "tokens_in": 4, "context_full": 0.25, "unfinished": 0.5, "distinct_actions": 0.75, "repeated_actions": 0.0,
        "parallel_launch_share": 1.0, "timed_out": 1,
    }  # fmt: skip


def test_pitfall_13_a_context_that_truncates_most_nodes_shows():
    cut = [tree_of(node("0", 9, "context_full", verified=0.0)) for _ in range(6)]
    sound = [tree_of(node("0", 9, verified=1.0)) for _ in range(4)]
    assert describe(cut + sound)["context_full"] == 0.6 and describe(sound)["context_full"] == 0.0


def actions(*texts: str) -> Tree:
    made = Node("0", "task", [], "finished", info={"verified": 0.0})
    for text in texts:
        made.segments += [Segment(list(text.encode()), True, [-1.0] * len(text), text), Segment([0], False, None, "-")]
    return tree_of(made)


def test_pitfall_25_collapse_to_one_answer_is_visible():
    healthy = [actions(f"look {k}", f"craft {k}", f"finish {k}") for k in range(8)]
    template = [actions("look", "craft", "finish") for _ in range(8)]
    stuck = [actions("!!!!", "!!!!", "!!!!") for _ in range(8)]
    rows = [describe(trees) for trees in (healthy, template, stuck)]
    assert [row["distinct_actions"] for row in rows] == [1.0, 3 / 24, 1 / 24]
    assert [row["repeated_actions"] for row in rows] == [0.0, 0.0, 1.0]


def test_pitfall_25_collapse_is_visible_without_texts_too():
    trees = [actions("!!!!", "!!!!") for _ in range(4)]
    for tree in trees:
        for segment in tree.root.segments:
            segment.text = ""
    assert describe(trees)["distinct_actions"] == 1 / 8 and describe(trees)["repeated_actions"] == 1.0
