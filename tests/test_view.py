"""What pictures agree on: positions, the clock, names and colours, checked against hand-worked values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import example_node, example_tree, segment

from lib import view
from lib.errors import UserError
from lib.rao.stats import critical_path_tokens
from lib.tree import Node, Tree


def make(*ids: str) -> Tree:
    tree = Tree("t", "t")
    for i in ids:
        tree.add(Node(i, f"Craft the item {i}", status="finished"))
    return tree


def token_tree(*, gather: bool) -> Tree:
    """Root acts with 10 and 20 tokens; its first action launches children that sample 5 and 7 tokens."""
    tree = Tree("t", "t")
    tree.add(example_node("0", "root", [("a" * 10, "seen"), ("b" * 20, "")], ended=9.0, info={"times": [1.0, 8.0]}))
    second = 1.5 if gather else 3.0
    tree.add(example_node("0.0", "kid", [("c" * 5, "")], started=1.5, ended=3.0, info={"times": [2.0]}))
    tree.add(example_node("0.1", "kid", [("d" * 7, "")], started=second, ended=6.0, info={"times": [5.0]}))
    for kid in ("0.0", "0.1"):
        tree.nodes[kid].info |= {"turn": 1} | ({"parallel": True} if gather else {})
    return tree


# -- layout -----------------------------------------------------------------------------------------------------------


def test_layout_of_a_full_binary_tree():
    spots = view.tree_layout(make("0", "0.0", "0.0.0", "0.0.1", "0.1", "0.1.0", "0.1.1"))
    assert spots == {
        "0": (1.5, 0), "0.0": (0.5, 1), "0.1": (2.5, 1),
        "0.0.0": (0, 2), "0.0.1": (1, 2), "0.1.0": (2, 2), "0.1.1": (3, 2),
    }  # fmt: skip


def test_layout_packs_a_shallow_sibling_over_a_deep_one():
    """The leaf 0.1 stands one unit beside 0.0, not beside the widest level of its subtree."""
    spots = view.tree_layout(make("0", "0.0", "0.0.0", "0.0.1", "0.0.2", "0.1"))
    assert spots["0.1"][0] - spots["0.0"][0] == 1
    assert min(x for x, _ in spots.values()) == 0


def test_layout_of_some_nodes_only():
    assert view.tree_layout(make("0", "0.0", "0.1"), {"0", "0.1"}) == {"0": (0, 0), "0.1": (0, 1)}


@given(st.lists(st.integers(0, 30), max_size=30))
def test_layout_never_overlaps_and_centres_parents(picks: list[int]):
    ids, kids = ["0"], {"0": 0}
    for pick in picks:
        parent = ids[pick % len(ids)]
        ids.append(f"{parent}.{kids[parent]}")
        kids[parent] += 1
        kids[ids[-1]] = 0
    spots = view.tree_layout(make(*ids))
    for depth in {y for _, y in spots.values()}:
        row = sorted(x for x, y in spots.values() if y == depth)
        assert all(b - a > 1 - 1e-9 for a, b in zip(row, row[1:], strict=False))
    for i, count in kids.items():
        if count:
            xs = [spots[f"{i}.{k}"][0] for k in range(count)]
            assert xs == sorted(xs)
            assert spots[i][0] == pytest.approx((xs[0] + xs[-1]) / 2)


def test_a_large_tree_keeps_the_nodes_nearest_to_the_root_and_counts_the_rest():
    tree = make("0", "0.0", "0.0.0", "0.0.0.0", "0.1", "0.1.0")
    shown, hidden = view.visible_nodes(tree, 4)
    assert shown == {"0", "0.0", "0.1", "0.0.0"}
    assert hidden == {"0.0.0": 1, "0.1": 1}
    assert view.count_text(tree, shown) == "showing 4 of 6 nodes"
    assert view.visible_nodes(tree, 6) == (set(tree.nodes), {})
    with pytest.raises(UserError, match="max_nodes=0"):
        view.visible_nodes(tree, 0)


# -- time -------------------------------------------------------------------------------------------------------------


def test_seconds_are_the_recorded_ones():
    time = view.clock(token_tree(gather=True))
    assert (time.unit, time.note) == ("seconds", "")
    assert time.start == {"0": 0, "0.0": 1.5, "0.1": 1.5}
    assert time.end == {"0": 9, "0.0": 3, "0.1": 6}
    assert time.actions == {"0": [1, 8], "0.0": [2], "0.1": [5]}
    with pytest.raises(UserError, match="unit='s'"):
        view.clock(token_tree(gather=True), "s")  # type: ignore[arg-type]


def test_missing_action_times_are_spread_over_the_life_of_the_node():
    tree = token_tree(gather=True)
    tree.root.info = {}
    assert view.clock(tree).actions["0"] == [2.25, 6.75]


def test_critical_path_tokens_of_parallel_and_sequential_children():
    """Parallel: 10 + max(5, 7) + 20 = 37; one after the other: 10 + 5 + 7 + 20 = 42."""
    parallel = view.clock(token_tree(gather=True), "tokens")
    assert parallel.start == {"0": 0, "0.0": 10, "0.1": 10}
    assert parallel.end == {"0": 37, "0.0": 15, "0.1": 17}
    assert parallel.actions["0"] == [10, 37]
    sequential = view.clock(token_tree(gather=False), "tokens")
    assert sequential.start == {"0": 0, "0.0": 10, "0.1": 15}
    assert sequential.end["0"] == 42


def test_tokens_wait_for_a_batch_of_parallel_children_between_two_single_ones():
    """Children of 3, (4 beside 6) and 5 tokens after an action of 10, before one of 1: 10 + 3 + 6 + 5 + 1 = 25."""
    tree = Tree("t", "t")
    tree.add(example_node("0", "root", [("a" * 10, "seen"), ("b", "")]))
    for k, (tokens, parallel) in enumerate([(3, False), (4, True), (6, True), (5, False)]):
        tree.add(example_node(f"0.{k}", "kid", [("c" * tokens, "")], info={"turn": 1, "parallel": parallel}))
    time = view.clock(tree)
    assert time.start == {"0": 0, "0.0": 10, "0.1": 13, "0.2": 13, "0.3": 19}
    assert time.actions["0"] == [10, 25]


@given(st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_critical_path_agrees_with_the_number_in_the_statistics(depth: int, width: int, gather: bool):
    tree = example_tree(depth, width, gather=gather)
    assert view.clock(tree, "tokens").end["0"] == critical_path_tokens(tree)


def test_a_tree_that_did_not_record_launches_says_what_was_assumed():
    tree = token_tree(gather=False)
    for n in tree:
        n.started = n.ended = 0.0
        n.info = {}
    time = view.clock(tree)
    assert time.end["0"] == 37
    assert "launching actions not recorded" in time.note
    assert view.clock(example_tree(timed=False)).note == ""


def test_children_of_a_node_without_segments_still_have_a_time():
    time = view.clock(make("0", "0.0"))
    assert time.end == {"0": 0, "0.0": 0}
    assert time.actions == {"0": [], "0.0": []}


def test_snapshots_cut_the_tree_at_launches_and_end_complete():
    tree = token_tree(gather=False)
    tree.root.reward = 1.0
    states = view.snapshots(tree, 4)
    assert [list(s.nodes) for s in states] == [["0"], ["0", "0.0"], ["0", "0.0", "0.1"], ["0", "0.0", "0.1"]]
    assert [s.root.status for s in states] == ["running", "running", "running", "finished"]
    assert states[2].nodes["0.0"].status == "finished"
    assert states[0].root.reward is None
    assert tree.root.reward == 1.0


# -- names and colours ------------------------------------------------------------------------------------------------


def test_labels_drop_the_words_that_all_tasks_share():
    assert view.node_labels(make("0", "0.0")) == {"0": "0", "0.0": "0.0"}
    assert view.node_labels(make("0")) == {"0": "Craft the item 0"}


def test_labels_of_children_drop_their_own_shared_words_when_the_root_differs():
    tree = make("0", "0.0", "0.1")
    tree.root.task = "How many spells?"
    assert view.node_labels(tree) == {"0": "How many spells?", "0.0": "0.0", "0.1": "0.1"}


def test_labels_of_equal_tasks_stay_whole():
    tree = make("0", "0.0")
    tree.nodes["0.0"].task = tree.root.task
    assert set(view.node_labels(tree).values()) == {"Craft the item 0"}


def test_clean_removes_terminal_codes_and_control_characters():
    assert view.clean("\x1b[31mred\x1b[0m\n\x07two\u202e") == "red two"
    assert view.clean("abcdefgh", 4) == "abc…"


def test_scales():
    tree = make("0", "0.0")
    tree.root.reward, tree.root.success, tree.root.advantage = 1.4, 0.5, -0.25
    assert view.color_scale([tree], "reward")[:2] == (0, 1.4)
    assert view.color_scale([tree], "success")[:2] == (0, 1)
    assert view.color_scale([tree], "advantage")[:2] == (-0.25, 0.25)
    assert view.color_scale([tree], "depth")[:2] == (0, 1)
    with pytest.raises(UserError, match="color='size'"):
        view.color_scale([tree], "size")  # type: ignore[arg-type]


def test_shades_are_exact_at_the_ends_and_in_the_middle():
    scale = (0.0, 1.0, ("#000000", "#808080", "#FF0000"))
    assert [view.shade(v, scale) for v in (0.0, 0.25, 0.5, 1.0)] == ["#000000", "#404040", "#808080", "#FF0000"]
    assert view.shade(7.0, scale) == "#FF0000"
    assert view.shade(None, scale) == view.UNKNOWN
    assert view.is_dark("#0072B2")
    assert not view.is_dark("#F4EFE6")


def test_example_tree_is_a_sound_record():
    tree = example_tree(2, 3)
    assert len(tree) == 13
    assert tree.root.segments[0] == segment(tree.root.segments[0].text)
    assert example_tree(2, 3).to_json() == tree.to_json()


def test_amounts_have_three_digits_that_count():
    assert [view.amount_text(v) for v in (0.21149, 4.5, 99.96, 1326.0)] == ["0.211", "4.5", "100", "1,326"]
