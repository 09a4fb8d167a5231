"""The tree record: lengths, order, loss-free storage, and a check that notices every kind of damage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import get_args

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import UserError
from lib.tree import Node, Segment, Status, Tree, load_trees, save_trees

FEW = settings(max_examples=40)
NUMBER = st.floats(-50, 50)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = draw(st.lists(st.integers(0, 200_000), max_size=6))
    trainable = draw(st.booleans())
    logprobs = draw(st.lists(st.floats(-50, 0), min_size=len(ids), max_size=len(ids))) if trainable else None
    return Segment(ids, trainable, logprobs, draw(st.text()))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Up to eight nodes, each hung below one that is there already; texts are any unicode."""
    tree = Tree(draw(st.text()), draw(st.text()), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
    tree.info = draw(st.dictionaries(st.text(), JSON, max_size=2))
    tree.info.pop("mixed_versions", None)
    version = draw(st.integers(0, 3))
    names: list[str] = []
    for k in range(draw(st.integers(1, 8))):
        name = f"{draw(st.sampled_from(names))}.{k}" if names else "0"
        names.append(name)
        node = Node(name, draw(st.text()), draw(st.lists(segments(), max_size=4)), version=version)
        node.status = draw(st.sampled_from(get_args(Status)))
        node.success, node.reward, node.advantage = (draw(st.none() | NUMBER) for _ in range(3))
        node.weight, node.started, node.ended = (draw(NUMBER) for _ in range(3))
        node.info = draw(st.dictionaries(st.text(), JSON, max_size=2))
        tree.add(node)
    return tree


@FEW
@given(trees())
def test_pitfall_03_ids_mask_and_logprobs_have_one_length_with_zeros_where_masked(tree: Tree):
    tree.check()
    for node in tree:
        assert len(node.ids) == len(node.mask) == len(node.logprobs) == node.tokens_in + node.tokens_out
        assert sum(node.mask) == node.tokens_out
        assert all(p == 0 for p, sampled in zip(node.logprobs, node.mask, strict=True) if not sampled)


@FEW
@given(trees())
def test_parents_come_before_children_and_depth_counts_edges(tree: Tree):
    seen: list[str] = []
    graph = tree.to_networkx()
    for node in tree:
        assert node.parent is None if not seen else node.parent in seen
        seen.append(node.id)
        assert node.depth == nx.shortest_path_length(graph, "0", node.id)
        assert [c.id for c in tree.children(node)] == [n.id for n in tree if n.parent == node.id]
    assert tree.root.id == "0" and tree.depth == max(n.depth for n in tree)
    assert graph.number_of_edges() == len(tree) - 1 and nx.is_arborescence(graph)


@FEW
@given(trees())
def test_json_lines_lose_nothing(tree: Tree):
    line = tree.to_json()
    assert "\n" not in line and Tree.from_json(line) == tree


@FEW
@given(trees())
def test_text_has_one_line_for_each_node(tree: Tree):
    lines = tree.to_text().split("\n")
    assert len(lines) == len(tree)
    assert all(node.id in line for node, line in zip(sorted(tree, key=_preorder(tree)), lines, strict=True))


def _preorder(tree: Tree) -> Callable[[Node], int]:
    order = list(nx.dfs_preorder_nodes(tree.to_networkx(), "0"))
    return lambda node: order.index(node.id)


def small_tree() -> Tree:
    tree = Tree("t", "g")
    for name in ("0", "0.0", "0.1", "0.1.0"):
        host = Segment([5, 6], False, None, "go")
        tree.add(Node(name, "task", [host, Segment([7, 8, 9], True, [-1.0, -2.0, -0.5], "act")], "finished"))
    return tree


def test_worked_example_of_the_properties_of_a_node():
    node = small_tree().nodes["0.1.0"]
    assert (node.parent, node.depth, node.turns, node.tokens_in, node.tokens_out) == ("0.1", 2, 1, 2, 3)
    assert node.ids == [5, 6, 7, 8, 9] and node.mask == [False, False, True, True, True]
    assert node.logprobs == [0.0, 0.0, -1.0, -2.0, -0.5]


def test_files_keep_trees_in_order_with_any_text(tmp_path):
    trees = [small_tree() for _ in range(3)]
    for k, tree in enumerate(trees):
        tree.sample = k
        tree.root.segments[0].text = f'quote " slash \\ line\nend\u2028 NUL \0 눈사람 ☃ \ud83d {k}'
    save_trees(trees, tmp_path / "trees.jsonl")
    assert load_trees(tmp_path / "trees.jsonl") == trees
    assert len((tmp_path / "trees.jsonl").read_text().strip().split("\n")) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_neither_written_nor_read(value: float):
    tree = small_tree()
    tree.root.reward = value
    with pytest.raises(ValueError, match="JSON compliant"):
        tree.to_json()
    tree.root.reward = 0.125
    with pytest.raises(UserError, match="not a saved tree"):
        Tree.from_json(tree.to_json().replace("0.125", json.dumps(value)))


def test_other_schema_version_is_refused_by_number():
    raw = json.loads(small_tree().to_json())
    raw["schema"] = 99
    with pytest.raises(UserError, match="schema 99, this version reads 1"):
        Tree.from_json(json.dumps(raw))


def _without_nodes(raw: dict) -> None:
    del raw["nodes"]


def _unknown_field(raw: dict) -> None:
    raw["nodes"][0]["surprise"] = 1


def _orphan(raw: dict) -> None:
    del raw["nodes"][0]


def _twice(raw: dict) -> None:
    raw["nodes"].append(raw["nodes"][1])


def _segments_are_text(raw: dict) -> None:
    raw["nodes"][0]["segments"] = "none"


@pytest.mark.parametrize("damage", [_without_nodes, _unknown_field, _orphan, _twice, _segments_are_text])
def test_damaged_records_are_refused_in_one_sentence(damage: Callable[[dict], None]):
    raw = json.loads(small_tree().to_json())
    damage(raw)
    with pytest.raises(UserError, match="not a saved tree"):
        Tree.from_json(json.dumps(raw))


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '"tree"', "null", "{}", "[" * 100_000])
def test_lines_that_are_no_tree_are_refused_in_one_sentence(line: str):
    with pytest.raises(UserError, match="not a saved tree"):
        Tree.from_json(line)


def test_missing_file_of_trees_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.jsonl: the file does not exist"):
        load_trees(tmp_path / "nowhere.jsonl")


def test_a_node_needs_its_parent_and_an_id_of_its_own():
    tree = small_tree()
    with pytest.raises(ValueError, match=r"node 0\.1 exists already"):
        tree.add(Node("0.1", "again"))
    with pytest.raises(ValueError, match=r"node 0\.7\.0 has no parent 0\.7"):
        tree.add(Node("0.7.0", "orphan"))
    with pytest.raises(ValueError, match="node 1 has no parent None"):
        tree.add(Node("1", "second root"))


def _key_is_not_the_id(tree: Tree) -> None:
    tree.nodes["0.0"].id = "0.5"


def _child_first(tree: Tree) -> None:
    tree.nodes = dict(sorted(tree.nodes.items(), key=lambda kv: -len(kv[0])))


def _second_root(tree: Tree) -> None:
    tree.nodes["1"] = Node("1", "other")


def _no_nodes(tree: Tree) -> None:
    tree.nodes = {}


def _strange_status(tree: Tree) -> None:
    tree.nodes["0.1"].status = "asleep"  # type: ignore[assignment]


def _logprobs_too_short(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs.pop()


def _logprobs_too_long(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs.append(-1.0)


def _sampled_without_logprobs(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs = None


def _host_text_with_logprobs(tree: Tree) -> None:
    tree.nodes["0.1"].segments[0].logprobs = [0.0, 0.0]


def _nan(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs[1] = math.nan


def _infinite(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs[1] = -math.inf


def _none(tree: Tree) -> None:
    tree.nodes["0.1"].segments[1].logprobs[1] = None  # type: ignore[call-overload]


def _other_version(tree: Tree) -> None:
    tree.nodes["0.1"].version = 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_key_is_not_the_id, "node 0.5 is out of place"),
        (_child_first, "node 0.1.0 is out of place"),
        (_second_root, "node 1 is out of place"),
        (_no_nodes, "has no root"),
        (_strange_status, "node 0.1: unknown status 'asleep'"),
        (_logprobs_too_short, "node 0.1: 3 sampled ids but 2 log-probabilities"),
        (_logprobs_too_long, "node 0.1: 3 sampled ids but 4 log-probabilities"),
        (_sampled_without_logprobs, "node 0.1: log-probabilities must be present exactly on trainable segments"),
        (_host_text_with_logprobs, "node 0.1: log-probabilities must be present exactly on trainable segments"),
        (_nan, "node 0.1: log-probability nan is not a finite number"),
        (_infinite, "node 0.1: log-probability -inf is not a finite number"),
        (_none, "node 0.1: log-probability None is not a finite number"),
        (_other_version, r"mixes policy versions \[0, 1\]"),
    ],
)
def test_check_names_the_damaged_node(damage: Callable[[Tree], None], words: str):
    tree = small_tree()
    tree.check()
    damage(tree)
    with pytest.raises(ValueError, match=words.replace(".", r"\.") if "[" not in words else words):
        tree.check()


def test_pitfall_33_mixed_versions_must_be_flagged():
    tree = small_tree()
    _other_version(tree)
    assert tree.versions == [0, 1]
    tree.info["mixed_versions"] = True
    tree.check()


def test_text_shows_shape_status_success_and_cost():
    tree = small_tree()
    tree.nodes["0.1"].success = 0.5
    tree.nodes["0.1"].task = "Craft the following items: 1x a\nhurry"
    assert tree.to_text().split("\n") == [
        "╙── 0  task  [finished, s=?, 3 tokens]",
        "    ├─╼ 0.0  task  [finished, s=?, 3 tokens]",
        "    └─╼ 0.1  Craft the following items: 1x a hurry  [finished, s=0.5, 3 tokens]",
        "        └─╼ 0.1.0  task  [finished, s=?, 3 tokens]",
    ]
