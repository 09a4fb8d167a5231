"""The recursive CodeAct agent: think, write Python, read what came of it; launch copies of yourself for sub-tasks.

`rollout` runs one tree. Everything that bounds an agent (depth, steps, tokens, nodes) lives here, in the host, never in
the session whose code the agent writes.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lib.errors import UserError
from lib.policy import ChatFormat
from lib.sampling import RngKey, Sampler, SamplingParams
from lib.sandbox.repl import ReplPool, ToolError
from lib.tree import Node, Segment, Tree

CODE = re.compile(r"<python>(.*?)</python>", re.DOTALL)
NO_CODE = "No code was found. Write your code between <python> and </python>."


@dataclass(frozen=True)
class AgentConfig:
    """Bounds and switches of the agent loop.

    Args:
        recursive: whether `launch_subagent` exists; the single-agent baseline is the same without it.
        context: most tokens of one node, prompt included.
        max_steps: most actions of one node (paper: 25 for TextCraft).
        max_depth: deepest node that may exist, None for no cap (paper: 6 in training, none at test).
        max_nodes: most nodes of one tree; running over it marks the tree and fails its root.
        max_action: most tokens of one action (paper: 8192).
        temperature: of sampling (paper: 1.0 in training, 0 at test).
        returns: "json" hands a child's finish value to its parent as it is (paper's text), "string" as text (released
            code).
        stuck_after: equal actions in a row after which the node ends with status "error".
    """

    recursive: bool = True
    context: int = 1536
    max_steps: int = 25
    max_depth: int | None = 6
    max_nodes: int = 1024
    max_action: int = 256
    temperature: float = 1.0
    returns: str = "json"
    stuck_after: int = 4

    def __post_init__(self) -> None:
        if self.returns not in ("json", "string"):
            raise UserError(f"returns={self.returns!r}: choose 'json' or 'string'")
        for name in ("context", "max_steps", "max_nodes", "max_action", "stuck_after"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")


@dataclass
class Assignment:
    """What a node is asked to do: the goal it reads and whatever its environment needs to judge it."""

    goal: str
    data: dict[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One task as all nodes of one tree see it. A new object for every tree; it may hold state that nodes share."""

    task_id: str

    def root(self) -> Assignment:
        """The original task."""
        ...

    def prompt(self, assignment: Assignment, recursive: bool) -> str:
        """The text that opens a node."""
        ...

    def tools(self, assignment: Assignment) -> dict[str, Callable[..., Any]]:
        """Synchronous tools of a node, besides `finish` and `launch_subagent`."""
        ...

    def delegate(self, *args: Any, **kwargs: Any) -> Assignment:
        """Turn the arguments of `launch_subagent` into an assignment, at the moment of launch.

        Raises:
            ToolError: they make no sense; nothing is launched.
        """
        ...

    def verify(self, assignment: Assignment, message: Any) -> float | None:
        """Exact success of a node that has just ended, None if nobody can tell. `message` is None without finish."""
        ...


@dataclass
class Session:
    """What all nodes of one rollout share."""

    sampler: Sampler
    chat: ChatFormat
    repl: ReplPool
    config: AgentConfig


async def rollout(
    session: Session, episode: Episode, *, group: str, sample: int, seed: int, step: int, keep_text: bool = True
) -> Tree:
    """Run one task to its end and return the tree of agents that worked on it.

    Args:
        episode: the task with the state its agents share.
        group, sample: which group of equal tasks the tree belongs to, and its number there. Together they name the
            tree, also in its random number keys, so groups of different tasks must differ.
        seed, step: parts of every random number key.
        keep_text: keep the text of segments beside their ids.
    """
    tree = Tree(task_id=episode.task_id, group=group, sample=sample, seed=seed, step=step)
    run = _Rollout(session, episode, tree, keep_text)
    assignment = episode.root()
    root = run.create("0", assignment, run.prompt(assignment))
    session.sampler.gate.enter()
    try:
        await run.work(root, assignment)
    finally:
        session.sampler.gate.leave()
    if tree.info.get("overrun"):
        tree.root.info["verified"] = 0.0
    return tree


async def rollouts(
    session: Session,
    make_episode: Callable[[Any], Episode],
    tasks: Sequence[tuple[Any, str, int]],
    *,
    seed: int,
    step: int,
    keep_text: bool = True,
    on_done: Callable[[Tree], None] | None = None,
) -> list[Tree]:
    """Run many trees at once; all their live nodes share the sampler.

    Args:
        make_episode: makes a fresh episode of a task.
        tasks: (task, group, sample) of every tree.
        on_done: called with each tree as it ends.
    """

    async def one(task: Any, group: str, sample: int) -> Tree:
        tree = await rollout(
            session, make_episode(task), group=group, sample=sample, seed=seed, step=step, keep_text=keep_text
        )
        if on_done is not None:
            on_done(tree)
        return tree

    try:
        async with asyncio.TaskGroup() as workers:
            running = [workers.create_task(one(*item)) for item in tasks]
    except ExceptionGroup as group:  # the first fault has cancelled the other trees; it is what went wrong
        raise group.exceptions[0] from None
    return [r.result() for r in running]


@dataclass(frozen=True)
class Play:
    """`rollouts` in the form that `lib.sampling.workers` sends to worker processes.

    Args:
        make_episode: makes a fresh episode of a task; must pickle.
    """

    make_episode: Callable[[Any], Episode]

    async def __call__(
        self,
        sampler: Sampler,
        chat: ChatFormat,
        repl: ReplPool,
        jobs: list[Any],
        *,
        config: AgentConfig,
        **options: Any,
    ) -> list[Tree]:
        return await rollouts(Session(sampler, chat, repl, config), self.make_episode, jobs, **options)


class _Rollout:
    """The state of one tree while it grows."""

    def __init__(self, session: Session, episode: Episode, tree: Tree, keep_text: bool):
        self.session, self.episode, self.tree, self.keep_text = session, episode, tree, keep_text
        self.config = session.config
        self.clock = time.perf_counter()
        self.launched: dict[str, int] = {}
        self.working: dict[str, list[Node]] = {}  # parent -> children that run right now

    def now(self) -> float:
        return time.perf_counter() - self.clock

    def create(self, path: str, assignment: Assignment, prompt: tuple[list[int], str]) -> Node:
        node = Node(path, assignment.goal, version=self.session.sampler.version, started=self.now())
        node.info["times"] = []
        self.launched[path] = 0
        self.add(node, *prompt)
        return self.tree.add(node)

    def prompt(self, assignment: Assignment) -> tuple[list[int], str]:
        """Ids and text that open a node.

        Raises:
            UserError: they leave no room for an action.
        """
        prompt = self.session.chat.prompt(self.episode.prompt(assignment, self.config.recursive))
        need, context = len(prompt[0]), self.config.context
        if need >= context:
            raise UserError(f"context={context} is smaller than the prompt of {need} tokens; raise the context")
        return prompt

    def key(self, node: Node) -> RngKey:
        t = self.tree
        path = tuple(int(x) for x in node.id.split("."))
        return RngKey(t.seed, t.step, t.group, t.sample, path, node.turns)

    def add(self, node: Node, ids: list[int], text: str, logprobs: list[float] | None = None) -> None:
        node.segments.append(Segment(ids, logprobs is not None, logprobs, text if self.keep_text else ""))

    async def work(self, node: Node, assignment: Assignment) -> Any:
        """Run one agent until it ends; returns what it gave to `finish`, None if it never did."""
        finished: list[Any] = []
        repl = self.session.repl.session(self._tools(node, assignment, finished), self.session.sampler.gate)
        try:
            while node.status == "running":
                await self._turn(node, repl, finished)
        finally:
            self.session.sampler.release(self.key(node))
            node.ended = self.now()
        message = finished[-1] if node.status == "finished" else None
        node.info["verified"] = self.episode.verify(assignment, message)
        return message

    async def _turn(self, node: Node, repl: Any, finished: list[Any]) -> None:
        """One action and its observation; sets the node's status when that was the last."""
        chat, config = self.session.chat, self.config
        ids = node.ids
        room = config.context - len(ids)
        params = SamplingParams(config.temperature, min(config.max_action, room), chat.stop_ids)
        done = await self.session.sampler.sample(ids, params, self.key(node))
        if done.version != self.tree.root.version and not self.tree.info.get("mixed_versions"):
            versions = f"{self.tree.root.version} and {done.version}"
            raise RuntimeError(f"node {node.id} of {self.tree.task_id} mixes policy versions {versions}")
        text = chat.tokenizer.decode(done.ids, skip_special_tokens=True)
        self.add(node, done.ids, text, done.logprobs)
        node.info["times"].append(self.now())
        code = CODE.search(text)
        if code is None:
            seen = NO_CODE
        else:
            observation = await repl.run(code[1].strip("\n"))
            seen = observation.text
            if observation.timed_out:
                self.tree.info["timed_out"] = True  # a wall clock decided something: the tree may not repeat
        if finished:
            node.status = "finished"
            return
        ids, shown = chat.observation(seen, done.ids)
        node.info.setdefault("errors", 0)
        node.info["errors"] += "Error" in seen
        if len(ids) + len(done.ids) >= room:
            node.status = "context_full"
        elif node.turns >= config.max_steps:
            node.status = "out_of_steps"
        elif self._stuck(node):
            node.status, node.info["reason"] = "error", "the same action again and again"
        if node.status == "running":
            self.add(node, ids, shown)

    def _stuck(self, node: Node) -> bool:
        last = [s.ids for s in node.segments if s.trainable][-self.config.stuck_after :]
        return len(last) == self.config.stuck_after and all(x == last[0] for x in last)

    def _tools(self, node: Node, assignment: Assignment, finished: list[Any]) -> dict[str, Callable[..., Any]]:
        def finish(message: Any = "") -> None:
            finished.append(_as_json(message, self.config.returns))

        async def launch_subagent(*args: Any, **kwargs: Any) -> Any:
            return await self._launch(node, args, kwargs)

        tools = {**self.episode.tools(assignment), "finish": finish}
        if self.config.recursive:
            tools["launch_subagent"] = launch_subagent
        return tools

    async def _launch(self, parent: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Start a child and wait for it; whatever goes wrong with it is told to the parent as text."""
        config = self.config
        try:
            assignment = self.episode.delegate(*args, **kwargs)
        except TypeError as error:  # wrong number or names of arguments
            raise ToolError(f"launch_subagent: {str(error).rpartition('delegate')[2].lstrip('() ')}") from error
        if config.max_depth is not None and parent.depth + 1 > config.max_depth:
            return f"No sub-agent was launched: depth {config.max_depth} is the deepest allowed. Do the work yourself."
        if len(self.tree) >= config.max_nodes:
            self.tree.info["overrun"] = True
            return f"No sub-agent was launched: {config.max_nodes} agents have worked on this task already."
        try:
            prompt = self.prompt(assignment)
        except UserError:
            return f"No sub-agent was launched: its task does not fit its context of {config.context} tokens."
        path = f"{parent.id}.{self.launched[parent.id]}"
        self.launched[parent.id] += 1
        child = self.create(path, assignment, prompt)
        child.info["turn"] = parent.turns
        siblings = self.working.setdefault(parent.id, [])
        siblings.append(child)
        try:
            await asyncio.sleep(0)  # calls that were gathered with this one are launched too before any child works
            if len(siblings) > 1:
                for node in siblings:
                    node.info["parallel"] = True
            message = await self.work(child, assignment)
        except asyncio.CancelledError:  # the code that launched it has ended without waiting for it
            child.status, child.ended = "aborted", self.now()
            raise
        finally:
            siblings.remove(child)
        if child.status == "finished":
            return message
        if child.status == "out_of_steps":
            return f"The sub-agent did not finish within {config.max_steps} steps."
        return "The sub-agent failed before finishing."


def _as_json(value: Any, returns: str) -> Any:
    """A finish value as it is handed on: JSON as it is, anything else as text."""
    if returns == "string":
        return value if isinstance(value, str) else str(value)
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return str(value)
