"""Exercises of the RAO notebooks: stubs fail their checks, solutions pass, and plausible mistakes are caught."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from lib import notebooks
from lib.exercises import expect, rao_01, rao_02, report
from lib.policy import ChatFormat, train_micro_tokenizer
from lib.rao.coldstart import ATOMS
from lib.rao.recipes import Recipe, RecipeBook

ROOM = notebooks.FOLDER / "rao"
BOOK = RecipeBook({
    "plank": Recipe({"raw_wood": 1}, 4, 1, ""), "plate": Recipe({"iron_ore": 2}, 1, 1, ""),
    "stick": Recipe({"plank": 1}, 2, 2, ""), "axle": Recipe({"stick": 2, "plate": 1}, 1, 3, ""),
})  # fmt: skip
CHAT = ChatFormat(train_micro_tokenizer([""], 260, ATOMS))
CHECKS: dict[str, tuple[str, Callable[..., None], tuple[Any, ...]]] = {
    "read_action": ("01_recursive_agents", rao_01.check_read_action, ()),
    "critical_path": ("01_recursive_agents", rao_01.check_critical_path, ()),
    "attention_pairs": ("01_recursive_agents", rao_01.check_attention_pairs, ()),
    "careful": ("01_recursive_agents", rao_01.check_careful, (BOOK, CHAT)),
    "compounding_reward": ("02_credit_on_trees", rao_02.check_compounding_reward, ()),
    "best_constant": ("02_credit_on_trees", rao_02.check_best_constant, ()),
    "depth_baseline": ("02_credit_on_trees", rao_02.check_depth_baseline, ()),
    "token_weights": ("02_credit_on_trees", rao_02.check_token_weights, ()),
    "gradient": ("02_credit_on_trees", rao_02.check_gradient, ()),
}
every_exercise = pytest.mark.parametrize("name", CHECKS)


def functions(stem: str, tag: str) -> dict[str, Callable[..., Any]]:
    """The functions that a notebook's cells with a tag define, without running the rest of it."""
    folder = ROOM if tag == "exercise" else ROOM / "solutions"
    sources = [cell.source for cell in notebooks.load(folder / f"{stem}.ipynb").cells if tag in notebooks.tags(cell)]
    room: dict[str, Any] = {}
    for source in sources:
        exec(source, room)
    statements = [statement for source in sources for statement in ast.parse(source).body]
    return {s.name: room[s.name] for s in statements if isinstance(s, ast.FunctionDef)}


@every_exercise
def test_stub_fails_and_the_notebook_says_so_instead_of_stopping(name):
    stem, check, context = CHECKS[name]
    stub = functions(stem, "exercise")[name]
    with pytest.raises(NotImplementedError):
        check(stub, *context)
    assert report(check, stub, *context).startswith(f"{name}: not done yet")


@every_exercise
def test_solution_passes(name):
    stem, check, context = CHECKS[name]
    assert report(check, functions(f"{stem}_solutions", "solution")[name], *context) == f"{name}: passed"


@pytest.mark.parametrize("stem", sorted({stem for stem, _, _ in CHECKS.values()}))
def test_every_exercise_has_a_check_and_a_solution(stem):
    names = {name for name, (of, _, _) in CHECKS.items() if of == stem}
    assert set(functions(stem, "exercise")) == names == set(functions(f"{stem}_solutions", "solution"))


def greedy_tags(text):
    """Takes the last block instead of the first."""
    code = text.rpartition("<python>")[2].partition("</python>")[0].strip() if "</python>" in text else None
    return (text.partition("<thought>")[2].partition("</thought>")[0].strip() or None, code)


def all_together(tree, node):
    return node.tokens_out + max([all_together(tree, c) for c in tree.children(node)] or [0])


def turns_ignored(tree, node):
    children = [(turns_ignored(tree, c), c.info["parallel"]) for c in tree.children(node)]
    together = max([n for n, parallel in children if parallel], default=0)
    return node.tokens_out + together + sum(n for n, parallel in children if not parallel)


def square(tree):
    return sum(len(node.ids) ** 2 for node in tree)


def trusting(prompt, rng):
    yield '<python>await launch_subagent({"stick": 2})\ncraft({"iron_ore": 2}, ("plate", 1))</python>'
    yield '<python>craft({"stick": 2, "plate": 1}, ("axle", 1))\nfinish("done")</python>'


def does_it_all_again(prompt, rng):
    yield '<python>await launch_subagent({"stick": 2})\ncraft({"iron_ore": 2}, ("plate", 1))</python>'
    yield '<python>craft({"raw_wood": 1}, ("plank", 4))\ncraft({"plank": 1}, ("stick", 2))</python>'
    yield '<python>craft({"stick": 2, "plate": 1}, ("axle", 1))\nfinish("done")</python>'


def never_delegates(prompt, rng):
    yield '<python>craft({"raw_wood": 1}, ("plank", 4))\ncraft({"plank": 1}, ("stick", 2))</python>'
    yield '<python>craft({"iron_ore": 2}, ("plate", 1))</python>'
    yield '<python>craft({"stick": 2, "plate": 1}, ("axle", 1))\nfinish("done")</python>'


def not_compounding(tree, node, lam):
    """`rao-eq1` as it stands."""
    children = [child.info["verified"] for child in tree.children(node)]
    return node.info["verified"] + (lam * sum(children) / len(children) if children else 0.0)


def mean_reward(p, r):
    return p @ r


def one_baseline_for_all(trees):
    """`rao-eq3` as it stands."""
    total = sum(tree.root.reward for tree in trees)
    share = {tree.sample: (total - tree.root.reward) / (len(trees) - 1) for tree in trees}
    return {(tree.sample, node.id): node.reward - share[tree.sample] for tree in trees for node in tree}


def own_tree_included(trees):
    """Compares with everybody at the same depth, itself too."""

    def mean(depth):
        peers = [node.reward for tree in trees for node in tree if node.depth == depth]
        return sum(peers) / len(peers)

    return {(tree.sample, node.id): node.reward - mean(node.depth) for tree in trees for node in tree}


def count_nodes(trees):
    """`rao-eq4` as it stands."""
    depths = [node.depth for tree in trees for node in tree]
    return {d: len(depths) / (len(set(depths)) * depths.count(d)) for d in set(depths)}


def never_clips(loss, ratio, advantage):
    return -advantage if loss == "reinforce" else -ratio * advantage


def clips_both_sides_always(loss, ratio, advantage):
    if loss == "ppo_clip":
        return -ratio * advantage if 0.8 <= ratio <= 1.2 else 0.0
    return -advantage if loss == "reinforce" else -min(ratio, 5.0) * advantage


@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("read_action", greedy_tags, "second"),
        ("critical_path", all_together, "one after the other: expected 23, got 18"),
        ("critical_path", turns_ignored, "expected 40"),
        ("attention_pairs", square, "expected 55, got 100"),
        ("careful", trusting, "success of the root with a lying child"),
        ("careful", does_it_all_again, "sticks left over"),
        ("careful", never_delegates, "agents with an honest child"),
        ("compounding_reward", not_compounding, "expected 1.32, got 1.2"),
        ("best_constant", mean_reward, "least variance"),
        ("depth_baseline", one_baseline_for_all, "node 0.0 of tree 0"),
        ("depth_baseline", own_tree_included, "node 0 of tree 0"),
        ("token_weights", count_nodes, "weights by depth"),
        ("gradient", never_clips, "ppo_clip at ratio 0.1 with advantage -0.5"),
        ("gradient", clips_both_sides_always, "ppo_clip at ratio 0.1 with advantage 1.0"),
    ],
)
def test_plausible_mistake_is_caught_and_told(name, mistake, said):
    _, check, context = CHECKS[name]
    with pytest.raises(AssertionError, match=said):
        check(mistake, *context)


def test_expectations_compare_numbers_to_a_billionth_and_the_rest_exactly():
    expect({"a": [1.0, 2]}, {"a": [1.0 + 1e-12, 2]}, "close")
    for got, wanted in [(1.001, 1.0), ([1, 2], [1, 2, 3]), ({"a": 1}, {"b": 1}), ("1", 1), (2, 1)]:
        with pytest.raises(AssertionError, match="case: expected"):
            expect(got, wanted, "case")
