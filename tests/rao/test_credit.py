"""The five equations on the four trees of notebook 02, against values worked by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest

from lib.errors import UserError
from lib.rao.rewards import node_rewards
from lib.training.advantages import assign, depth_weights, leave_one_out
from lib.training.batch import collate
from lib.training.losses import cispo
from lib.tree import Node, Segment, Tree

VERDICTS = [
    {"0": 1, "0.0": 1, "0.1": 0, "0.0.0": 1, "0.0.1": 0, "0.1.0": 1, "0.1.1": 1},
    {"0": 0, "0.0": 1, "0.1": 0, "0.0.0": 1, "0.0.1": 1, "0.1.0": 0, "0.1.1": 0},
    {"0": 1, "0.0": 0, "0.1": 0},
    {"0": 0},
]


def make(verdicts: dict[str, float], sample: int = 0) -> Tree:
    """A finished tree with two sampled tokens in every node."""
    tree = Tree("cart", "cart", sample)
    for name, s in verdicts.items():
        segments = [Segment([1, 2], False, None, "prompt"), Segment([3, 4], True, [-0.5, -0.25], "action")]
        tree.add(Node(name, name, segments, "finished", info={"verified": s}))
    return tree


def four(lam: float = 0.4) -> list[Tree]:
    return [node_rewards(make(verdicts, k), lam) for k, verdicts in enumerate(VERDICTS)]


def rewards(tree: Tree) -> list[float]:
    return [node.reward for node in tree]


def test_rao_eq1_own_success_plus_mean_success_of_immediate_children():
    a, b, c, d = four()
    assert rewards(a) == pytest.approx([1 + 0.4 / 2, 1 + 0.4 / 2, 0.4, 1, 0, 1, 1])
    assert rewards(b) == pytest.approx([0.2, 1.4, 0, 1, 1, 0, 0])
    assert rewards(c) == pytest.approx([1, 0, 0]) and rewards(d) == [0]
    assert a.nodes["0.1"].info["reward_terms"] == pytest.approx({"success": 0, "delegation": 0.4})
    assert rewards(node_rewards(a, 0.0)) == list(VERDICTS[0].values())


@pytest.mark.parametrize("children", [1, 2, 9])
def test_rao_eq1_pays_neither_for_more_children_nor_for_depth(children):
    star = make({"0": 1} | {f"0.{k}": 1 for k in range(children)})
    chain = make({".".join("0" * (k + 1)): 1 for k in range(children + 1)})
    assert node_rewards(star, 0.4).root.reward == pytest.approx(1.4)
    assert node_rewards(chain, 0.4).root.reward == pytest.approx(1.4)


def test_rao_eq1_a_child_that_did_not_finish_counts_as_failed_whatever_it_made():
    tree = make({"0": 1, "0.0": 1, "0.1": 1})
    tree.nodes["0.1"].status = "out_of_steps"
    assert rewards(node_rewards(tree, 0.4)) == pytest.approx([1.2, 1, 0])


def test_rao_eq1_success_proxies():
    tree = make(VERDICTS[0])
    for node in tree:
        node.info["judged"] = 1.0  # the judge believes everybody; the root has its verifier
    assert rewards(node_rewards(tree, 0.4, "judge")) == pytest.approx([1.4, 1.4, 1.4, 1, 1, 1, 1])
    assert rewards(node_rewards(tree, 0.4, "root")) == [1] * 7
    assert rewards(node_rewards(make(VERDICTS[1]), 0.4, "root")) == [0] * 7


def test_rao_eq1_refuses_missing_verdicts_and_a_negative_bonus():
    tree = make({"0": 1, "0.0": 1})
    with pytest.raises(UserError, match=r"node 0\.0 of cart has judged=None"):
        node_rewards(tree, 0.4, "judge")
    tree.nodes["0.0"].info["verified"] = 1.5
    with pytest.raises(UserError, match=r"verified=1\.5"):
        node_rewards(tree, 0.4)
    with pytest.raises(UserError, match="lam=-0.1"):
        node_rewards(tree, -0.1)


def test_rao_eq2_weighted_sum_over_nodes_is_alpha_times_the_sum_of_means_by_depth():
    trees = four()
    weights = depth_weights(trees)
    assert weights == {0: 1.5, 1: 1.0, 2: 0.75}
    by_depth = defaultdict(list)
    for node in (node for tree in trees for node in tree):
        by_depth[node.depth].append(node.reward)
    means = {d: sum(x) / len(x) for d, x in by_depth.items()}
    assert means == pytest.approx({0: 0.6, 1: 0.5, 2: 0.625})
    assert sum(n.weight * n.reward for t in trees for n in t) == pytest.approx(6 * 1.725)


def test_rao_eq3_baselines_of_the_four_trees():
    trees = four()
    assert leave_one_out(trees) == pytest.approx([0.4, 2.2 / 3, 1.4 / 3, 0.8])
    assert [n.advantage for n in trees[0]] == pytest.approx([0.8, 0.8, 0, 0.6, -0.4, 0.6, 0.6])


def test_rao_eq5_every_token_gets_weight_times_advantage_over_all_tokens():
    """On policy the gradient by each token's log-probability is -w A / T; the node with A = 0 counts in T only."""
    trees, _ = assign(four())
    trees[0].nodes["0.1"].advantage = 0.0  # 0.4 - 0.4, up to rounding of 0.4
    wanted = {f"cart/{t.sample}/{n.id}": -n.weight * n.advantage / 36 for t in trees for n in t}
    assert wanted["cart/0/0"] == pytest.approx(-1.5 * 0.8 / 36)
    assert wanted["cart/1/0.0.0"] == pytest.approx(-0.75 * (1 - 2.2 / 3) / 36)
    got = {}
    for batch in collate(trees, micro_batch=5):
        logp = batch.old_logp.clone().requires_grad_()
        loss, _ = cispo(logp, batch.old_logp, batch.adv)
        (loss * batch.coef).sum().backward()
        for i, gradient in enumerate(logp.grad.tolist()):
            got.setdefault(batch.name(i), []).append(gradient)
    assert len(got) == 17 and "cart/0/0.1" not in got
    for name, gradients in got.items():
        assert gradients == pytest.approx([wanted[name]] * 2, abs=1e-7), name
