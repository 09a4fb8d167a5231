"""Checks for `rao/02_credit_on_trees`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lib.exercises import expect
from lib.training import losses
from lib.tree import Node, Segment, Tree


def _tree(sample: int, nodes: dict[str, tuple[float, int]]) -> Tree:
    """A tree from node id -> (value, sampled tokens); the value is both verdict and reward."""
    tree = Tree("exercise", "exercise", sample)
    for name, (value, tokens) in nodes.items():
        segments = [Segment([0, 0], False, None, ""), Segment([1] * tokens, True, [0.0] * tokens, "")]
        tree.add(Node(name, "t", segments, "finished", reward=value, info={"verified": value}))
    return tree


def check_compounding_reward(compounding_reward: Callable[[Tree, Node, float], float]) -> None:
    """Exercise 1, with values worked by hand."""
    verdicts = {"0": 1, "0.0": 1, "0.1": 0, "0.0.0": 1, "0.0.1": 0, "0.1.0": 1, "0.1.1": 1}
    tree = _tree(0, {name: (s, 1) for name, s in verdicts.items()})
    expect(compounding_reward(tree, tree.nodes["0.0.1"], 0.4), 0.0, "a failed leaf")
    expect(compounding_reward(tree, tree.nodes["0.0"], 0.4), 1.2, "children are leaves: as in rao-eq1")
    expect(compounding_reward(tree, tree.root, 0.4), 1.32, "the root of tree A: 1 + 0.4 * (1.2 + 0.4) / 2")
    chain = _tree(0, {"0": (1, 1), "0.0": (1, 1), "0.0.0": (1, 1)})
    expect(compounding_reward(chain, chain.root, 0.5), 1.75, "a chain of three with lambda 0.5: 1 + 0.5 + 0.25")


def check_best_constant(best_constant: Callable[[np.ndarray, np.ndarray], float]) -> None:
    """Exercise 2: no other constant on a fine grid has less variance, and it is unchanged by a shift of the rewards."""
    for p, r in [([0.2, 0.3, 0.5], [1.0, 0.2, 0.0]), ([0.9, 0.1], [0.0, 1.0]), ([0.25, 0.25, 0.5], [-1.0, 3.0, 2.0])]:
        p, r = np.array(p), np.array(r)
        score = np.eye(len(p)) - p
        b = float(best_constant(p, r))

        def spread(b: float, p: np.ndarray = p, r: np.ndarray = r, score: np.ndarray = score) -> float:
            return float(p @ ((r - b) ** 2 * (score**2).sum(axis=1)))

        best = min(spread(x) for x in np.linspace(r.min() - 1, r.max() + 1, 4001))
        expect(spread(b) <= best + 1e-9, True, f"least variance for p={p.tolist()}, r={r.tolist()} with b={b:.4f}")
        expect(float(best_constant(p, r + 10.0)), b + 10.0, "rewards shifted by 10 shift the constant by 10")


def check_depth_baseline(depth_baseline: Callable[[list[Tree]], dict[tuple[int, str], float]]) -> None:
    """Exercise 3, with values worked by hand."""
    trees = [
        _tree(0, {"0": (1.0, 1), "0.0": (0.0, 1), "0.1": (1.0, 1)}),
        _tree(1, {"0": (0.5, 1), "0.0": (0.75, 1), "0.0.0": (1.0, 1)}),
        _tree(2, {"0": (0.0, 1), "0.0": (0.25, 1)}),
    ]
    wanted = {
        (0, "0"): 0.75, (1, "0"): 0.0, (2, "0"): -0.75,  # roots: as in rao-eq3
        (0, "0.0"): -0.5, (0, "0.1"): 0.5,  # against 0.75 and 0.25
        (1, "0.0"): 0.75 - 1.25 / 3,  # against 0, 1 and 0.25: nodes are averaged, not trees
        (2, "0.0"): 0.25 - 1.75 / 3,  # against 0, 1 and 0.75
        (1, "0.0.0"): 0.5,  # nobody else is that deep: against the root baseline of tree 1, 0.5
    }  # fmt: skip
    got = depth_baseline(trees)
    expect(set(got), set(wanted), "nodes with an advantage")
    for key, value in wanted.items():
        expect(float(got[key]), value, f"advantage of node {key[1]} of tree {key[0]}")


def check_token_weights(token_weights: Callable[[list[Tree]], dict[int, float]]) -> None:
    """Exercise 4, with values worked by hand: 6 tokens at depth 0, 12 at depth 1, 2 at depth 2."""
    trees = [_tree(0, {"0": (1, 2), "0.0": (1, 9), "0.0.0": (1, 2)}), _tree(1, {"0": (1, 4), "0.0": (1, 3)})]
    expect(dict(token_weights(trees)), {0: 20 / 18, 1: 20 / 36, 2: 20 / 6}, "weights by depth")
    expect(dict(token_weights(trees[1:])), {0: 7 / 8, 1: 7 / 6}, "weights of the second tree alone")


def check_gradient(gradient: Callable[[str, float, float], float]) -> None:
    """Exercise 5: equals automatic differentiation of `lib.training.losses`, on both sides of every bound."""
    for name in ("reinforce", "ppo_clip", "cispo"):
        for ratio in (0.1, 0.7, 0.9, 1.0, 1.1, 1.5, 4.0, 8.0):
            for advantage in (1.0, -0.5):
                logp = torch.tensor([np.log(ratio)], dtype=torch.float64, requires_grad=True)
                loss, _ = getattr(losses, name)(logp, torch.zeros_like(logp), torch.full_like(logp, advantage))
                loss.sum().backward()
                case = f"{name} at ratio {ratio} with advantage {advantage}"
                expect(float(gradient(name, ratio, advantage)), float(logp.grad), case)
