"""From rewards to advantages: who gets how much credit. Pure functions over `list[Tree]` whose nodes carry rewards.

An algorithm name bundles three choices that are separate here: a baseline and a scale (this module), and how token
losses are averaged (`lib.training.losses`). G rollouts answer one prompt; R is a node's reward, m and s are the mean
and the sample standard deviation of the group's root rewards.

| method        | baseline           | advantage           | call                     | averaging of token losses     |
|---------------|--------------------|---------------------|--------------------------|-------------------------------|
| REINFORCE     | none or constant b | R - b               | reinforce(trees, b)      | any                           |
| leave-one-out | mean of the others | R - b (`rao-eq3`)   | leave_one_out(trees)     | token_mean (RAO)              |
| GRPO          | m                  | (R - m)/(s + floor) | grpo(trees)              | sequence_mean: own mean first |
| BNPO          | m                  | (R - m)/(s + floor) | grpo(trees)              | bnpo: per local batch         |
| DAPO          | m                  | (R - m)/(s + floor) | grpo(trees)              | token_mean: 1/all tokens      |
| Dr. GRPO      | m                  | R - m               | grpo(trees, scale=False) | constant: 1/(sequences*max)   |

BNPO and DAPO mean the averaging of that name only (as in TRL), not DAPO's dynamic sampling, overlong penalty or wider
clip. Leave-one-out differs from R - m by the factor G/(G-1) at the root, and is unbiased because no reward is part of
its own baseline. On a tree every node shares its root's baseline, which is what `rao-eq3` says.

The order matters: centre, drop groups without signal, weigh depths. `assign` does it in that order.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from lib.errors import UserError
from lib.tree import Node, Tree

STD_FLOOR = 1e-4
Estimator = Literal["leave_one_out", "grpo", "reinforce"]
DepthMode = Literal["inverse", "gamma", "none"]


@dataclass(frozen=True)
class GroupReport:
    """What happened to the groups of a batch, so that a shrinking batch is seen and not guessed (pitfalls 14, 15).

    Args:
        groups: groups that came in. dropped: groups without signal, taken out. kept: groups that train.
        effective_batch: trees in kept groups.
    """

    groups: int
    dropped: int
    kept: int
    effective_batch: int


def is_truncated(node: Node) -> bool:
    """Whether the node was cut off by its context or token limit rather than by its own decision."""
    return node.status == "context_full" or bool(node.info.get("truncated"))


def _groups(trees: list[Tree]) -> dict[str, list[Tree]]:
    """Trees by group, after checking that members share one prompt (pitfall 17) and that every node has a reward."""
    groups: dict[str, list[Tree]] = {}
    for tree in trees:
        groups.setdefault(tree.group, []).append(tree)
        for node in tree:
            if node.reward is None or not math.isfinite(node.reward):
                raise UserError(
                    f"node {node.id} of tree {tree.task_id} has reward {node.reward}; "
                    "apply a reward function to the trees before computing advantages"
                )
    for name, members in groups.items():
        prompts = {(tuple(t.root.segments[0].ids) if t.root.segments else t.root.task) for t in members}
        if len(prompts) > 1:
            raise UserError(
                f"group {name!r} holds {len(prompts)} different root prompts; trees share a baseline only if they "
                "answer the same prompt, so give each prompt its own group"
            )
    return groups


def leave_one_out(trees: list[Tree]) -> list[float]:
    """Centre every node by the mean root reward of the *other* trees of its group, which leaves the gradient unbiased.

    A = R - mean of the other trees' root rewards, the same baseline for every node of a tree. A group of one (its other
    rollouts failed) falls back to subtracting its own root reward, so its root gets no signal. Sums are exact
    fractions: a group with equal rewards gets advantages of exactly 0.0, not a rounding residue.

    Args:
        trees: rewards set. Writes `node.advantage`.

    Returns:
        The baseline of each tree, in the order of `trees`.

    Raises:
        UserError: a node has no finite reward, or the members of a group have different prompts.

    Source: `rao-eq3`; the fallback follows the released code.
    """
    baseline: dict[int, Fraction] = {}
    for members in _groups(trees).values():
        rewards = [Fraction(tree.root.reward) for tree in members]
        total = sum(rewards)
        for tree, own in zip(members, rewards, strict=True):
            baseline[id(tree)] = (total - own) / (len(members) - 1) if len(members) > 1 else own
    for tree in trees:
        for node in tree:
            node.advantage = float(Fraction(node.reward) - baseline[id(tree)])
    return [float(baseline[id(tree)]) for tree in trees]


def grpo(trees: list[Tree], scale: bool = True) -> list[float]:
    """Centre every node by its group's mean root reward and, by default, divide by the spread of the root rewards.

    A = (R - m) / (s + 1e-4), s the sample standard deviation (n - 1), or R - m with `scale=False` (Dr. GRPO). The floor
    1e-4 is added, so a nearly constant group is not blown up (pitfall 16). A group of one has A = R - own root reward.

    Args:
        trees: rewards set. Writes `node.advantage`.
        scale: divide by the spread.

    Returns:
        The divisor of each tree, in the order of `trees`; 1.0 where nothing was divided.

    Raises:
        UserError: as `leave_one_out`.

    Source: GRPO as published with DeepSeekMath; floor and n - 1 as in TRL.
    """
    mean: dict[str, Fraction] = {}
    divisor: dict[str, float] = {}
    for name, members in _groups(trees).items():
        rewards = [Fraction(tree.root.reward) for tree in members]
        mean[name] = sum(rewards) / len(rewards)
        spread = scale and len(rewards) > 1
        divisor[name] = float(statistics.stdev(rewards)) + STD_FLOOR if spread else 1.0
    for tree in trees:
        for node in tree:
            node.advantage = float(Fraction(node.reward) - mean[tree.group]) / divisor[tree.group]
    return [divisor[tree.group] for tree in trees]


def reinforce(trees: list[Tree], baseline: float = 0.0) -> list[float]:
    """Credit every node with its own reward minus a constant: the simplest policy gradient, high in variance.

    Args:
        trees: rewards set. Writes `node.advantage`.
        baseline: constant to subtract.

    Returns:
        The baseline of each tree.

    Raises:
        UserError: as `leave_one_out`.
    """
    _groups(trees)
    for tree in trees:
        for node in tree:
            node.advantage = node.reward - baseline
    return [baseline] * len(trees)


def drop_constant_groups(trees: list[Tree]) -> tuple[list[Tree], GroupReport]:
    """Take out groups that teach nothing: all centred rewards, over all nodes of all members, are identical.

    Args:
        trees: advantages set.

    Returns:
        The kept trees in their order, and the report.

    Source: released RAO code (drop after centring, before depth weights); pitfalls 14 and 15.
    """
    values: dict[str, set[float | None]] = {}
    for tree in trees:
        values.setdefault(tree.group, set()).update(node.advantage for node in tree)
    alive = {name for name, seen in values.items() if len(seen) > 1}
    kept = [tree for tree in trees if tree.group in alive]
    return kept, GroupReport(len(values), len(values) - len(alive), len(alive), len(kept))


def depth_weights(
    trees: list[Tree], mode: DepthMode = "inverse", gamma: float = 1.0, drop_truncated: bool = False
) -> dict[int, float]:
    """Balance depths: deep nodes are many and would otherwise own the gradient.

    `inverse`: w_d = N / (D * N_d) with N nodes on D non-empty depths, N_d of them at depth d, counted over the whole
    batch; so every depth has the same total weight and the sum of all weights stays N. `gamma`: w_d = gamma**d.
    `none`: 1.

    Args:
        trees: the whole batch, never a part of it. Writes `node.weight`.
        mode: see above.
        gamma: base for `gamma`, greater than 0.
        drop_truncated: leave truncated nodes out of the counts, as `collate` leaves them out of the loss.

    Returns:
        w_d by depth.

    Raises:
        UserError: unknown mode, or gamma not positive.

    Source: `rao-eq4`; gamma is the released code's alternative.
    """
    if mode not in get_args(DepthMode):
        raise UserError(f"depth weight mode {mode!r} is unknown; use one of {', '.join(get_args(DepthMode))}")
    if mode == "gamma" and not gamma > 0:
        raise UserError(f"gamma={gamma} for depth weights must be greater than 0")
    nodes = [node for tree in trees for node in tree if not (drop_truncated and is_truncated(node))]
    counts = Counter(node.depth for node in nodes)
    rule: dict[DepthMode, Callable[[int], float]] = {
        "inverse": lambda d: len(nodes) / (len(counts) * counts[d]),
        "gamma": lambda d: gamma**d,
        "none": lambda d: 1.0,
    }
    weights = {depth: rule[mode](depth) for depth in sorted(counts)}
    for node in nodes:
        node.weight = weights[node.depth]
    return weights


def assign(
    trees: list[Tree],
    estimator: Estimator = "leave_one_out",
    depth: DepthMode = "inverse",
    gamma: float = 1.0,
    drop_truncated: bool = False,
) -> tuple[list[Tree], GroupReport]:
    """Everything between rewards and the trainer, in the right order: centre, drop constant groups, weigh depths.

    Args:
        trees: one batch, rewards set. Writes `node.advantage` and `node.weight`.
        estimator: which advantage. depth, gamma, drop_truncated: as in `depth_weights`.

    Returns:
        The kept trees and the report; both go to `Trainer.step`.

    Raises:
        UserError: as the functions it calls, or an unknown estimator.
    """
    functions = {"leave_one_out": leave_one_out, "grpo": grpo, "reinforce": reinforce}
    if estimator not in functions:
        raise UserError(f"advantage estimator {estimator!r} is unknown; use one of {', '.join(functions)}")
    functions[estimator](trees)
    kept, report = drop_constant_groups(trees)
    depth_weights(kept, depth, gamma, drop_truncated)
    return kept, report
