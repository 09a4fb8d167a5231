"""The record every rollout makes, every reward reads, every picture draws and every batch is cut from.

A `Tree` is one rollout of one task. A `Node` is one agent instance (RAO), one completion (TIER) or one activation
chosen by an orchestrator (Puppeteer). A node is a list of `Segment`s in the order the policy saw them; their
concatenated ids are exactly what the policy saw and produced. Nothing is ever decoded and encoded again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import networkx as nx

from lib.errors import UserError

SCHEMA = 1
Status = Literal["running", "finished", "out_of_steps", "context_full", "error", "aborted"]


@dataclass
class Segment:
    """A run of tokens with one origin: the host (prompt, observation) or the policy (action).

    Args:
        ids: token ids, shape (T,).
        trainable: True only for tokens that the policy itself sampled.
        logprobs: log-probabilities of `ids` under the distribution that sampled them, shape (T,); None unless
            trainable.
        text: the same tokens for people; never encoded again.
    """

    ids: list[int]
    trainable: bool
    logprobs: list[float] | None
    text: str

    def check(self, where: str) -> None:
        """Raise ValueError if lengths, mask and log-probabilities disagree or a log-probability is not finite."""
        if self.trainable != (self.logprobs is not None):
            raise ValueError(f"node {where}: log-probabilities must be present exactly on trainable segments")
        if self.logprobs is not None:
            if len(self.logprobs) != len(self.ids):
                counts = f"{len(self.ids)} sampled ids but {len(self.logprobs)} log-probabilities"
                raise ValueError(f"node {where}: {counts}")
            bad = [x for x in self.logprobs if x is None or not math.isfinite(x)]
            if bad:
                raise ValueError(f"node {where}: log-probability {bad[0]} is not a finite number")


@dataclass
class Node:
    """One agent instance.

    Args:
        id: path from the root, "0", "0.1", "0.1.0"; also the path of the random number key.
        task: the goal as the agent reads it.
        segments: prompt, action, observation, action, ... in order.
        status: how the node ended.
        success: s~ in [0, 1], set by a reward function (`rao-eq1`).
        reward: R, set by a reward function. advantage: A. weight: the depth weight w_d (`rao-eq4`).
        version: policy version that sampled the node's actions.
        started, ended: seconds since the tree began.
        info: anything else that JSON can hold; `info["reward_terms"]` shows every term of the reward.
    """

    id: str
    task: str
    segments: list[Segment] = field(default_factory=list)
    status: Status = "running"
    success: float | None = None
    reward: float | None = None
    advantage: float | None = None
    weight: float = 1.0
    version: int = 0
    started: float = 0.0
    ended: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def parent(self) -> str | None:
        """Id of the node that launched this one; None for the root."""
        return self.id.rpartition(".")[0] or None

    @property
    def depth(self) -> int:
        """Number of edges to the root; the root has depth 0."""
        return self.id.count(".")

    @property
    def ids(self) -> list[int]:
        """Everything the policy saw and produced, in order, shape (T,)."""
        return [i for s in self.segments for i in s.ids]

    @property
    def mask(self) -> list[bool]:
        """True on tokens that the policy sampled, shape (T,)."""
        return [s.trainable for s in self.segments for _ in s.ids]

    @property
    def logprobs(self) -> list[float]:
        """Behaviour log-probabilities, 0 where `mask` is False, shape (T,)."""
        return [x for s in self.segments for x in (s.logprobs if s.logprobs is not None else [0.0] * len(s.ids))]

    @property
    def tokens_in(self) -> int:
        """Tokens the host wrote."""
        return sum(len(s.ids) for s in self.segments if not s.trainable)

    @property
    def tokens_out(self) -> int:
        """Tokens the policy sampled."""
        return sum(len(s.ids) for s in self.segments if s.trainable)

    @property
    def turns(self) -> int:
        """Number of actions taken."""
        return sum(s.trainable for s in self.segments)


@dataclass
class Tree:
    """One rollout of one root task: nodes keyed by id, in the order they were launched.

    Args:
        task_id: id of the root task. group: trees with equal `group` answer the same prompt and share a baseline.
        sample: number of the tree in its group. seed, step: parts of the random number key.
    """

    task_id: str
    group: str
    sample: int = 0
    seed: int = 0
    step: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Node:
        """The node that holds the original task."""
        return next(iter(self.nodes.values()))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, node: Node) -> Node:
        """Add a node; its parent must be there already."""
        if node.id in self.nodes:
            raise ValueError(f"tree {self.task_id}: node {node.id} exists already")
        if self.nodes and node.parent not in self.nodes:
            raise ValueError(f"tree {self.task_id}: node {node.id} has no parent {node.parent} in the tree")
        self.nodes[node.id] = node
        return node

    def children(self, node: Node) -> list[Node]:
        """Immediate children C(X) in launch order."""
        return [n for n in self if n.parent == node.id]

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(n.depth for n in self)

    @property
    def versions(self) -> list[int]:
        """Policy versions that took part, sorted."""
        return sorted({n.version for n in self})

    def check(self) -> None:
        """Raise ValueError if an invariant is broken: parents first, one root, sound segments, one policy version."""
        if not self.nodes:
            raise ValueError(f"tree {self.task_id} has no root")
        seen: set[str] = set()
        for key, node in self.nodes.items():
            if key != node.id or (node.parent is not None) != bool(seen) or (seen and node.parent not in seen):
                raise ValueError(f"tree {self.task_id}: node {node.id} is out of place")
            seen.add(key)
            if node.status not in get_args(Status):
                raise ValueError(f"node {node.id}: unknown status {node.status!r}")
            for segment in node.segments:
                segment.check(node.id)
        if len(self.versions) > 1 and not self.info.get("mixed_versions"):
            raise ValueError(f"tree {self.task_id} mixes policy versions {self.versions} without being flagged for it")

    # -- views ------------------------------------------------------------------------------------------------------

    def to_networkx(self) -> nx.DiGraph:
        """Directed graph, edges from parent to child; node attributes are the node's scalar fields."""
        graph = nx.DiGraph(task_id=self.task_id, sample=self.sample)
        for n in self:
            graph.add_node(
                n.id, depth=n.depth, task=n.task, status=n.status, success=n.success, reward=n.reward,
                advantage=n.advantage, weight=n.weight, turns=n.turns, tokens_in=n.tokens_in, tokens_out=n.tokens_out,
            )  # fmt: skip
            if n.parent is not None:
                graph.add_edge(n.parent, n.id)
        return graph

    def to_text(self) -> str:
        """The tree as indented text, one line a node, for terminals and as a fallback for pictures."""
        graph = self.to_networkx()
        for n in self:
            success = "?" if n.success is None else f"{n.success:g}"
            task = " ".join(n.task.split())
            graph.nodes[n.id]["label"] = f"{n.id}  {task}  [{n.status}, s={success}, {n.tokens_out} tokens]"
        return "\n".join(nx.generate_network_text(graph, sources=[self.root.id]))

    def to_json(self) -> str:
        """One line of JSON, loss-free."""
        return json.dumps({"schema": SCHEMA, **asdict(self) | {"nodes": [asdict(n) for n in self]}}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Tree:
        """Inverse of `to_json`.

        Raises:
            UserError: the line is not a tree of this schema version.
        """
        try:
            raw = json.loads(line, parse_constant=_no_number)
            version = raw.pop("schema")
            if version != SCHEMA:
                raise UserError(f"saved tree has schema {version}, this version reads {SCHEMA}; record the trees again")
            nodes = [Node(**n | {"segments": [Segment(**s) for s in n["segments"]]}) for n in raw.pop("nodes")]
            tree = cls(**raw)
            for node in nodes:
                tree.add(node)
        except UserError:
            raise
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"not a saved tree: {line[:60]!r} (expected one line written by save_trees)") from error
        return tree


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def save_trees(trees: Iterable[Tree], path: str | Path) -> None:
    """Write trees as JSON lines."""
    with open(path, "w", encoding="utf8") as file:
        file.writelines(tree.to_json() + "\n" for tree in trees)


def load_trees(path: str | Path) -> list[Tree]:
    """Read trees written by `save_trees`.

    Raises:
        UserError: the file is missing or holds something else.
    """
    if not Path(path).is_file():
        raise UserError(f"no trees at {path}: the file does not exist")
    with open(path, encoding="utf8") as file:
        return [Tree.from_json(line) for line in file if line.strip()]
