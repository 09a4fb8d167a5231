"""Node rewards of RAO (`rao-eq1`), by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import UserError
from lib.rao.rewards import node_rewards, success_of
from lib.tree import Node, Tree


def tree_of(verdicts: dict[str, Any], **statuses: str) -> Tree:
    """Nodes with verifier's verdicts; statuses are given as n0_1="out_of_steps"."""
    tree = Tree("t", "g")
    for name, verdict in verdicts.items():
        status = statuses.get("n" + name.replace(".", "_"), "finished")
        tree.add(Node(name, "task", status=status, info={"verified": verdict}))
    return tree


def rewards(tree: Tree) -> dict[str, float]:
    return {n.id: n.reward for n in tree}


def test_pitfall_23_rao_eq1_worked_example_of_the_paper():
    """Root succeeds, one of two children succeeds, lambda 0.4: 1 + 0.4 * 0.5 * (0 + 1) = 1.2."""
    tree = node_rewards(tree_of({"0": 1, "0.0": 0, "0.1": 1}), lam=0.4)
    assert rewards(tree) == pytest.approx({"0": 1.2, "0.0": 0.0, "0.1": 1.0})
    assert tree.root.info["reward_terms"] == pytest.approx({"success": 1.0, "delegation": 0.2})


def test_pitfall_23_rao_eq1_three_levels_by_hand():
    """Bonuses do not compound: the root sees its child's success, not the child's own bonus."""
    tree = node_rewards(tree_of({"0": 0, "0.0": 1, "0.0.0": 1, "0.0.1": 1, "0.1": 0.5}), lam=0.5)
    assert rewards(tree) == pytest.approx(
        {"0": 0 + 0.5 * (1 + 0.5) / 2, "0.0": 1 + 0.5 * (1 + 1) / 2, "0.0.0": 1.0, "0.0.1": 1.0, "0.1": 0.5}
    )


def test_rao_eq1_mean_and_not_sum_so_more_children_earn_nothing():
    one = node_rewards(tree_of({"0": 1, "0.0": 1}), lam=0.4)
    many = node_rewards(tree_of({"0": 1, **{f"0.{k}": 1 for k in range(9)}}), lam=0.4)
    assert one.root.reward == many.root.reward == pytest.approx(1.4)
    diluted = node_rewards(tree_of({"0": 1, "0.0": 1, "0.1": 0, "0.2": 0, "0.3": 0}), lam=0.4)
    assert diluted.root.reward == pytest.approx(1.1)


@pytest.mark.parametrize("lam", [0.0, 0.4, 3.0])
def test_rao_eq1_without_children_there_is_no_bonus(lam: float):
    tree = node_rewards(tree_of({"0": 1}), lam=lam)
    assert tree.root.reward == 1.0 and tree.root.info["reward_terms"]["delegation"] == 0.0


def test_rao_eq1_lambda_zero_is_success_alone():
    assert rewards(node_rewards(tree_of({"0": 0, "0.0": 1, "0.1": 0.25}))) == {"0": 0.0, "0.0": 1.0, "0.1": 0.25}


@pytest.mark.parametrize("status", ["out_of_steps", "context_full", "error", "aborted"])
def test_rao_eq1_unfinished_children_count_in_the_number_of_children_with_nothing(status: str):
    """Even if what they were asked for had been made."""
    tree = node_rewards(tree_of({"0": 1, "0.0": 1, "0.1": 1}, n0_1=status), lam=0.4)
    assert tree.nodes["0.1"].success == 0.0 and tree.root.reward == pytest.approx(1 + 0.4 * 0.5)


def test_rao_eq1_unfinished_root_keeps_the_bonus_of_its_children():
    tree = node_rewards(tree_of({"0": 1, "0.0": 1}, n0="out_of_steps"), lam=0.4)
    assert tree.root.success == 0.0 and tree.root.reward == pytest.approx(0.4)


def test_sparse_reward_gives_every_node_the_roots_success_and_no_bonus():
    tree = node_rewards(tree_of({"0": 1, "0.0": 0, "0.0.0": 0}, n0_0="out_of_steps"), lam=0.4, proxy="root")
    assert rewards(tree) == {"0": 1.0, "0.0": 1.0, "0.0.0": 1.0}
    tree = node_rewards(tree_of({"0": 0, "0.0": 1}), proxy="root")
    assert rewards(tree) == {"0": 0.0, "0.0": 0.0}
    tree = node_rewards(tree_of({"0": 1, "0.0": 1}, n0="context_full"), proxy="root")
    assert rewards(tree) == {"0": 0.0, "0.0": 0.0}


def test_judge_decides_about_children_and_the_verifier_about_the_root():
    tree = tree_of({"0": 1, "0.0": 0, "0.1": 0})
    tree.root.info["judged"] = 0
    tree.nodes["0.0"].info["judged"] = 1
    tree.nodes["0.1"].info["judged"] = 0.5
    node_rewards(tree, lam=0.4, proxy="judge")
    assert rewards(tree) == pytest.approx({"0": 1 + 0.4 * 0.75, "0.0": 1.0, "0.1": 0.5})


def test_rewards_can_be_set_again_under_another_proxy():
    tree = node_rewards(tree_of({"0": 1, "0.0": 0}), lam=0.4)
    again = node_rewards(node_rewards(tree, proxy="root"), lam=0.4)
    assert rewards(again) == {"0": 1.0, "0.0": 0.0}


@pytest.mark.parametrize("value", [None, "1", math.nan, -0.1, 1.1, math.inf, [1], {}])
def test_a_verdict_that_is_no_share_names_node_and_value(value: Any):
    with pytest.raises(UserError, match=r"node 0\.0 of t has verified=.*: proxy 'exact' needs a number in \[0, 1\]"):
        node_rewards(tree_of({"0": 1, "0.0": value}))


def test_a_missing_verdict_names_what_is_missing():
    tree = tree_of({"0": 1, "0.0": 1})
    with pytest.raises(UserError, match="node 0.0 of t has judged=None: proxy 'judge'"):
        node_rewards(tree, proxy="judge")
    del tree.root.info["verified"]
    with pytest.raises(UserError, match="node 0 of t has verified=None"):
        success_of(tree, tree.root, "exact")


@pytest.mark.parametrize("lam", [-0.1, math.nan, math.inf])
def test_impossible_weights_of_the_bonus_are_refused(lam: float):
    with pytest.raises(UserError, match="lam="):
        node_rewards(tree_of({"0": 1}), lam=lam)


def test_unknown_proxies_are_refused():
    with pytest.raises(UserError, match="proxy='dense': choose one of exact, judge, root"):
        node_rewards(tree_of({"0": 1}), proxy="dense")  # type: ignore[arg-type]


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(st.lists(ODD, min_size=1, max_size=5), st.floats(), st.sampled_from(["exact", "judge", "root"]))
def test_pitfall_24_rewards_are_finite_and_in_range_or_a_user_error(verdicts: list[Any], lam: float, proxy: Any):
    tree = tree_of({"0": verdicts[0], **{f"0.{k}": v for k, v in enumerate(verdicts[1:])}})
    try:
        node_rewards(tree, lam, proxy)
    except UserError:
        return
    for node in tree:
        assert 0 <= node.success <= 1 and 0 <= node.reward <= 1 + lam and math.isfinite(node.reward)
