"""Advantages against values worked by hand, `rao-eq3`, `rao-eq4`, and against TRL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import UserError
from lib.training.advantages import assign, depth_weights, drop_constant_groups, grpo, leave_one_out, reinforce
from lib.tree import Node, Segment, Tree

TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text())


def tree(group: str, rewards: dict[str, float] | float, sample: int = 0, prompt: int = 7) -> Tree:
    """A tree from rewards by node id."""
    rewards = rewards if isinstance(rewards, dict) else {"0": rewards}
    out = Tree(group, group, sample)
    for name, reward in rewards.items():
        out.add(Node(name, "t", [Segment([prompt], False, None, "p")], "finished", reward=reward))
    return out


def flat(group: str, rewards: list[float]) -> list[Tree]:
    return [tree(group, reward, i) for i, reward in enumerate(rewards)]


def advantages(trees: list[Tree]) -> list[float]:
    return [node.advantage for t in trees for node in t]


def test_rao_eq3_leave_one_out_by_hand():
    trees = [tree("g", {"0": 1.0, "0.0": 0.0, "0.1": 1.0}, 0), tree("g", 0.5, 1), tree("g", {"0": 0.0, "0.0": 1.0}, 2)]
    # baselines: (0.5 + 0) / 2 = 0.25, (1 + 0) / 2 = 0.5, (1 + 0.5) / 2 = 0.75; every node of a tree uses its tree's
    assert leave_one_out(trees) == [0.25, 0.5, 0.75]
    assert advantages(trees) == [0.75, -0.25, 0.75, 0.0, -0.75, 0.25]


def test_rao_eq3_baseline_uses_root_rewards_only():
    a = [tree("g", {"0": 1.0, "0.0": 0.0}, 0), tree("g", 0.0, 1)]
    b = [tree("g", {"0": 1.0, "0.0": 1.0}, 0), tree("g", 0.0, 1)]
    leave_one_out(a), leave_one_out(b)
    assert a[1].root.advantage == b[1].root.advantage == -1.0


def test_a_lone_survivor_subtracts_itself_and_its_root_has_no_signal():
    lone = [tree("g", {"0": 0.7, "0.0": 0.2})]
    leave_one_out(lone)
    assert advantages(lone) == pytest.approx([0.0, -0.5])
    assert drop_constant_groups(flat("h", [0.7]))[0] == []


def test_grpo_by_hand_and_without_scale():
    trees = flat("g", [1.0, 0.0, 0.0, 1.0])
    grpo(trees)  # mean 0.5, sample standard deviation sqrt(4 * 0.25 / 3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages(trees) == pytest.approx([expected, -expected, -expected, expected], abs=1e-12)
    assert grpo(trees, scale=False) == [1.0] * 4
    assert advantages(trees) == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("kind", sorted(TRL["types"]))
def test_grpo_equals_trl(kind: str):
    recorded, size = TRL["types"][kind], TRL["group"]
    trees = [tree(f"g{i // size}", reward, i % size) for i, reward in enumerate(recorded["rewards"])]
    grpo(trees)
    assert advantages(trees) == pytest.approx(recorded["advantages"], abs=1e-5)


def test_reinforce_subtracts_a_constant():
    trees = flat("g", [1.0, 0.0])
    assert reinforce(trees, baseline=0.25) == [0.25, 0.25]
    assert advantages(trees) == [0.75, -0.25]


def test_pitfall_14_one_mixed_group_among_constant_ones_is_what_trains():
    trees = [t for i, rewards in enumerate([[1, 1], [0, 0], [0.35, 0.35], [0, 1]]) for t in flat(f"g{i}", rewards)]
    kept, report = assign(trees)
    assert {t.group for t in kept} == {"g3"}
    assert (report.groups, report.dropped, report.kept, report.effective_batch) == (4, 3, 1, 2)


def test_pitfall_14_equal_roots_with_different_children_are_signal():
    trees = [tree("g", {"0": 1.0, "0.0": 0.0}, 0), tree("g", {"0": 1.0, "0.0": 1.0}, 1)]
    kept, report = assign(trees)
    assert len(kept) == 2 and report.dropped == 0
    assert advantages(kept) == [0.0, -1.0, 0.0, 0.0]


def test_pitfall_16_nearly_constant_group_is_not_blown_up():
    for rewards in ([0.35] * 7 + [0.0], [0.35] * 7 + [0.35 + 1e-7]):
        trees = flat("g", rewards)
        leave_one_out(trees)
        assert max(abs(a) for a in advantages(trees)) <= 0.35
        grpo(trees)
        assert max(abs(a) for a in advantages(trees)) < 10


@pytest.mark.parametrize("estimator", [leave_one_out, grpo])
@given(reward=st.floats(0, 2), n=st.integers(1, 9))
def test_pitfall_16_constant_group_has_exactly_zero_advantage(estimator, reward: float, n: int):
    trees = flat("g", [reward] * n)
    estimator(trees)
    assert advantages(trees) == [0.0] * n


def test_pitfall_17_group_members_share_one_prompt():
    trees = [tree("g", 1.0, 0, prompt=7), tree("g", 0.0, 1, prompt=8)]
    with pytest.raises(UserError, match="group 'g' holds 2 different root prompts"):
        leave_one_out(trees)


@pytest.mark.parametrize("estimator", [leave_one_out, grpo])
def test_pitfall_18_every_group_has_its_own_mean(estimator):
    trees = flat("easy", [1.0, 0.9]) + flat("hard", [0.1, 0.0])
    estimator(trees)
    assert [a > 0 for a in advantages(trees)] == [True, False, True, False]


def test_missing_reward_names_the_node():
    bad = tree("g", {"0": 1.0, "0.0": 0.0})
    for value in (None, float("nan")):
        bad.nodes["0.0"].reward = value
        with pytest.raises(UserError, match=f"node 0.0 of tree g has reward {value}"):
            leave_one_out([bad])


def test_rao_eq4_depth_weights_by_hand():
    trees = [tree("g", dict.fromkeys(["0", "0.0", "0.1", "0.1.0"], 0.0)), tree("h", dict.fromkeys(["0", "0.0"], 0.0))]
    # 6 nodes on 3 depths: N_0 = 2, N_1 = 3, N_2 = 1, so w = 6/(3*2), 6/(3*3), 6/(3*1)
    assert depth_weights(trees) == pytest.approx({0: 1.0, 1: 2 / 3, 2: 2.0})
    assert [n.weight for n in trees[0]] == pytest.approx([1.0, 2 / 3, 2 / 3, 2.0])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_rao_eq4_keeps_total_weight_and_balances_depths(depths: list[int]):
    chains = [tree(f"g{i}", {".".join("0" * (d + 1)): 0.0 for d in range(depth + 1)}) for i, depth in enumerate(depths)]
    weights = depth_weights(chains)
    totals = {d: sum(n.weight for t in chains for n in t if n.depth == d) for d in weights}
    assert sum(totals.values()) == pytest.approx(sum(len(t) for t in chains))
    assert max(totals.values()) == pytest.approx(min(totals.values()))


def test_depth_weights_other_modes_and_bad_input():
    trees = [tree("g", dict.fromkeys(["0", "0.0", "0.0.0"], 0.0))]
    assert depth_weights(trees, "gamma", 0.5) == {0: 1.0, 1: 0.5, 2: 0.25}
    assert depth_weights(trees, "none") == {0: 1.0, 1: 1.0, 2: 1.0}
    with pytest.raises(UserError, match="mode 'sqrt' is unknown; use one of inverse, gamma, none"):
        depth_weights(trees, "sqrt")
    with pytest.raises(UserError, match="gamma=0"):
        depth_weights(trees, "gamma", 0)
    with pytest.raises(UserError, match="estimator 'ppo' is unknown"):
        assign(trees, "ppo")


def test_depth_weights_are_counted_after_dropping_and_without_truncated_nodes():
    dead = [tree("dead", dict.fromkeys(["0", "0.0", "0.1"], 1.0), i) for i in range(2)]
    live = [tree("live", {"0": 1.0, "0.0": 1.0, "0.1": 0.0}, 0), tree("live", 0.0, 1)]
    live[0].nodes["0.1"].status = "context_full"
    kept, _ = assign(dead + live)
    assert [n.weight for n in kept[0]] == [1.0, 1.0, 1.0]  # 4 nodes, 2 depths, 2 at each
    assign(dead + live, drop_truncated=True)
    assert [n.weight for n in live[0]][:2] == [0.75, 1.5]  # 3 nodes, 2 depths, 2 and 1
