"""Small policies and a small world for tests of the core: a tokenizer of a few hundred entries, a random Llama, and
episodes whose tasks are words."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import cache
from typing import Any

import numpy as np

from lib.policy import ChatFormat, Policy, make_micro_policy, train_micro_tokenizer
from lib.rao.agent import AgentConfig, Assignment, Session, rollout
from lib.rao.coldstart import ATOMS
from lib.sampling import Completion, Gate, RngKey, SamplingParams, run_sync
from lib.sampling.scripted import ScriptedSampler
from lib.sandbox.repl import ReplPool, ToolError
from lib.tree import Tree

TEXTS = [
    '<python>print(get_info(["m0_i3"]))</python>',
    '<python>finish("done")</python>',
    "Goal: Craft the following items: 2x raw_a3, 1x m0_ore",
] * 20


@cache
def chat(vocab: int = 400) -> ChatFormat:
    """The conversation format of a micro tokenizer; with 260 entries it merges nothing: one token a byte."""
    return ChatFormat(train_micro_tokenizer(TEXTS, vocab, ATOMS))


def policy(context: int = 512, seed: int = 0, **sizes: int) -> Policy:
    """A random policy of some ten thousand parameters."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | sizes
    made = make_micro_policy(chat().tokenizer, context, seed, **shape)
    for name, weight in made.model.named_parameters():
        if "norm" not in name:
            weight.data *= 1.6 if "embed" in name else 8  # far from uniform distributions
    return made


class WordEpisode:
    """A world whose goals are words: a node succeeds if it finishes with its goal in capitals.

    Args:
        goal: of the root.
        tools: more tools for every node.
    """

    task_id = "words"

    def __init__(self, goal: str = "root", tools: Mapping[str, Callable[..., Any]] | None = None):
        self.goal, self.extra = goal, dict(tools or {})
        self.board: list[str] = []

    def root(self) -> Assignment:
        return Assignment(self.goal)

    def prompt(self, assignment: Assignment, recursive: bool) -> str:
        return f"Goal: {assignment.goal}"

    def tools(self, assignment: Assignment) -> dict[str, Callable[..., Any]]:
        return {"note": self.board.append, "read": lambda: list(self.board), **self.extra}

    def delegate(self, goal: str) -> Assignment:
        if not isinstance(goal, str):
            raise ToolError(f"launch_subagent takes text, not {goal!r}")
        return Assignment(goal)

    def verify(self, assignment: Assignment, message: Any) -> float:
        return float(message == assignment.goal.upper())


def code(*lines: str) -> str:
    """An action that runs these lines."""
    return "<python>" + "\n".join(lines) + "</python>"


def script(plays: Mapping[str, list[str]], default: tuple[str, ...] = ("<python>finish('')</python>",)) -> Any:
    """A script for `ScriptedSampler`: the actions of a node are found by its goal."""

    def play(prompt: str, rng: np.random.Generator) -> Generator[str, str, None]:
        goal = prompt.partition("Goal: ")[2].partition("<|end|>")[0]
        yield from (action for action in plays.get(goal, default))  # a generator can be sent observations

    return play


def play(
    plays: Mapping[str, list[str]], episode: Any = None, *, pool: ReplPool, sampler: Any = None, **config: Any
) -> Tree:
    """One tree of scripted agents."""
    limits = {"context": 4000, "max_action": 2000} | config
    sampler = sampler or ScriptedSampler(script(plays), chat())
    session = Session(sampler, chat(), pool, AgentConfig(**limits))
    tree = run_sync(rollout(session, episode or WordEpisode(), group="words", sample=0, seed=0, step=0))
    tree.check()
    assert sampler.gate.running == 0, "somebody holds a token of the lockstep gate still"
    return tree


def observed(tree: Tree, node: str = "0") -> list[str]:
    """What a node was told after each of its actions, without the marks of the template."""
    texts = [s.text for s in tree.nodes[node].segments[2::2]]
    return [text.removeprefix("<|end|><|user|>").removesuffix("<|end|><|assistant|>") for text in texts]


class FixedSampler:
    """Returns prepared ids, whatever it is asked, and keeps what it was asked."""

    deterministic, version = True, 0

    def __init__(self, actions: list[list[int]]):
        self.gate, self.actions, self.prompts = Gate(), list(actions), []

    async def sample(self, ids: list[int], params: SamplingParams, key: RngKey) -> Completion:
        self.prompts.append(list(ids))
        new = self.actions.pop(0)
        return Completion(new, [-0.5] * len(new), "stop", self.version)

    def release(self, key: RngKey) -> None:
        pass
