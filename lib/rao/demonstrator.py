"""A scripted crafter with stated flaws: the teacher of the cold start, and, without flaws, the yardstick of task sizes.

It reads and writes the same text as a policy. Its good behaviours, each a probability in `Skill`:

- *look*: read the recipes of the ingredients before crafting, and make what is missing;
- *simple*: craft an ingredient that takes base items only in the same breath;
- for an ingredient that needs more: *delegate* it with the right count, or *open* it in the agent's own context;
- *retry* after a failed craft, instead of claiming success.

Nothing it orders or crafts relies on stock: every agent makes what it uses, so that agents cannot starve each other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lib.rao.textcraft import parse_goal
from lib.sampling.scripted import Script

LIST = re.compile(r"\[\{.*\}\]")


@dataclass(frozen=True)
class Skill:
    """Probabilities of the demonstrator's choices.

    Args:
        look, simple, retry: see the module.
        delegate, open, wrong: for a complex ingredient under delegation; what is left ignores it. `wrong` delegates
            something else: a base item, or the right item in the wrong count.
        open_single: the same choice for an agent that cannot delegate.
        parallel: launch several children with `asyncio.gather` rather than one after the other.
        early: finish right after reading the goal.
    """

    look: float = 1.0
    simple: float = 1.0
    retry: float = 1.0
    delegate: float = 1.0
    open: float = 0.0
    wrong: float = 0.0
    open_single: float = 1.0
    parallel: float = 1.0
    early: float = 0.0


EXPERT = Skill()


def crafter(skill: Skill) -> Script:
    """The demonstrator as a script for `ScriptedSampler`."""

    def script(prompt: str, rng: np.random.Generator) -> Generator[str, str, None]:
        agent = _Crafter(skill, rng, recursive="Delegation: yes" in prompt)
        goal = next(line for line in prompt.split("\n") if "Craft the following items: " in line)
        yield from agent.run(parse_goal(goal[goal.index("Craft the following items: ") :]))

    return script


def _act(*lines: str, thought: str = "") -> str:
    head = f"<thought>{thought}</thought>" if thought else ""
    return head + "<python>" + "\n".join(lines) + "</python>"


def _names(items: list[str]) -> str:
    return "[" + ",".join(f'"{x}"' for x in items) + "]"


class _Crafter:
    def __init__(self, skill: Skill, rng: np.random.Generator, recursive: bool):
        self.skill, self.rng, self.recursive = skill, rng, recursive
        self.recipes: dict[str, tuple[dict[str, int], int]] = {}  # item -> (ingredients, pieces made)

    def lucky(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def learn(self, seen: str) -> None:
        """Read the recipes out of a printed `get_info`."""
        for shown in LIST.findall(seen):
            for info in ast.literal_eval(shown):
                if info["recipes"]:
                    self.recipes[info["item"]] = (info["recipes"][0]["ingredients"], info["recipes"][0]["result_count"])

    def simple(self, item: str) -> bool:
        """Whether every ingredient is a base item, as far as names tell."""
        return not any(_craftable(x) for x in self.recipes[item][0])

    def run(self, targets: dict[str, int]) -> Generator[str, str, None]:
        if self.lucky(self.skill.early):
            yield _act('finish("done")')
            return
        self.learn((yield _act(f"print(get_info({_names(list(targets))}))")))
        for item, count in targets.items():
            if item in self.recipes:
                yield from self.make(item, str(count), 0, [], "")
        yield _act('finish("done")')

    def make(self, item: str, need: str, level: int, before: list[str], thought: str) -> Generator[str, str, list[str]]:
        """Turns that make `need` pieces of an item whose recipe is known; `before` are lines that go first."""
        recipe, made = self.recipes[item]
        # written down while the recipe is in view: r what it takes, t what it gives, for all pieces needed
        head = [*before, f"k=-(-{need}//{made})", f"r{level}={_counts(recipe, 'k')}", f't{level}=("{item}",{made}*k)']
        parts = [x for x in recipe if _craftable(x)]
        close = f"print(craft(r{level},t{level}))"
        looked = not parts or self.lucky(self.skill.look)
        if looked:
            seen = yield from self.complete(item, parts, level, head, close, thought)
        else:
            seen = yield _act(*head, close, thought=thought)
        if "Error" in seen and parts and self.lucky(self.skill.retry):
            yield from self.complete(item, parts, level, [], close, thought)

    def complete(
        self, item: str, parts: list[str], level: int, head: list[str], close: str, thought: str
    ) -> Generator[str, str, str]:
        """Look the ingredients up, make them, then craft; returns what the last craft printed."""
        if not parts:
            return (yield _act(*head, close, thought=thought))
        self.learn((yield _act(*head, f"print(get_info({_names(parts)}))", thought=thought)))
        recipe = self.recipes[item][0]
        lines: list[str] = []
        launches: list[str] = []
        for part in (x for x in parts if self.simple(x) and self.lucky(self.skill.simple)):
            inner, pieces = self.recipes[part]
            lines.append(f'k=-(-r{level}["{part}"]//{pieces})')
            lines.append(f"craft({_counts(inner, 'k')},(\"{part}\",{pieces}*k))")
        for part in (x for x in parts if not self.simple(x)):
            choice = self.rng.random()
            if not self.recursive:
                if choice < self.skill.open_single:
                    yield from self.make(part, f'r{level}["{part}"]', level + 1, lines, f"{part} for {item}")
                    lines = []
            elif choice < self.skill.delegate:
                launches.append(f'launch_subagent({{"{part}":r{level}["{part}"]}})')
            elif choice < self.skill.delegate + self.skill.open:
                yield from self.make(part, f'r{level}["{part}"]', level + 1, lines, f"{part} for {item}")
                lines = []
            elif choice < self.skill.delegate + self.skill.open + self.skill.wrong:
                other = list(recipe)[int(self.rng.integers(len(recipe)))]
                launches.append(f'launch_subagent({{"{other}":{recipe[part]}}})')
        if len(launches) > 1 and self.lucky(self.skill.parallel):
            lines.append(f"await asyncio.gather({','.join(launches)})")
        else:
            lines += [f"await {x}" for x in launches]
        return (yield _act(*lines, close, thought=f"{item}" if level else ""))


def _craftable(item: str) -> bool:
    return not (item.startswith("raw_") or item.endswith("_ore"))


def _counts(recipe: dict[str, Any], times: str) -> str:
    return "{" + ",".join(f'"{x}":{n}*{times}' for x, n in recipe.items()) + "}"
