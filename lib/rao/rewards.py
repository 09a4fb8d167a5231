"""Node rewards of RAO: own success plus a bonus for children that succeeded."""

from __future__ import annotations

import math
from typing import Literal, get_args

from lib.errors import UserError
from lib.tree import Node, Tree

Proxy = Literal["exact", "judge", "root"]


def success_of(tree: Tree, node: Node, proxy: Proxy) -> float:
    """s~ of one node under a success proxy.

    Args:
        proxy: "exact" is the verifier's verdict on the node's own goal ("dense"); "judge" is a judge's verdict in
            `node.info["judged"]`, and the exact one at the root; "root" gives every node the root's verdict ("sparse").

    Returns:
        A number in [0, 1]; 0 for a node that did not finish.

    Raises:
        UserError: the verdict is missing.
    """
    source = tree.root if proxy == "root" else node
    if source.status != "finished":
        return 0.0
    name = "judged" if proxy == "judge" and source.parent is not None else "verified"
    value = source.info.get(name)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        where = f"node {source.id} of {tree.task_id}"
        raise UserError(f"{where} has {name}={value!r}: proxy {proxy!r} needs a number in [0, 1]")
    return float(value)


def node_rewards(tree: Tree, lam: float = 0.0, proxy: Proxy = "exact") -> Tree:
    """Set success and reward of every node: R = s~ + lambda * mean of the immediate children's s~ (`rao-eq1`).

    The mean, not the sum, so launching more children earns nothing by itself; children enter with their s~ only, so
    bonuses do not compound. A node without children gets no bonus. The terms are kept in `info["reward_terms"]`.

    Args:
        lam: weight of the delegation bonus, >= 0 (paper: 0.4 for Oolong, 0 where the policy already delegates).
        proxy: see `success_of`. Under "root" every node gets the root's success and no bonus, as released.

    Returns:
        The same tree.
    """
    if not 0 <= lam < math.inf:
        raise UserError(f"lam={lam}: the weight of the delegation bonus must be a number of at least 0")
    if proxy not in get_args(Proxy):
        raise UserError(f"proxy={proxy!r}: choose one of {', '.join(get_args(Proxy))}")
    for node in tree:
        node.success = success_of(tree, node, proxy)
    for node in tree:
        children = tree.children(node)
        bonus = lam * sum(c.success for c in children) / len(children) if children and proxy != "root" else 0.0
        node.info["reward_terms"] = {"success": node.success, "delegation": bonus}
        node.reward = node.success + bonus
    return tree
