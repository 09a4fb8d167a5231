"""A scripted crafter with stated flaws: the teacher of the cold start, and, without flaws, the yardstick of task sizes.

It reads and writes the same text as a policy. Its good behaviours, each a probability in `Skill`:

- *look*: read the recipes of the ingredients before crafting, and make what is missing, one after the other in the
  order of the recipe;
- *simple*: craft an ingredient that takes base items only on the spot;
- for an ingredient that needs more: *delegate* it with the right count, or, where there is no delegation, *open* it in
  the agent's own context;
- *retry* after a failed craft, instead of claiming success.

Every agent begins with three small functions, so that Python does the arithmetic and the agent decides what to look at,
what to make, and what to give to whom. Nothing it orders or crafts relies on stock: every agent makes what it uses, so
that agents cannot starve each other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from lib.rao.textcraft import parse_goal
from lib.sampling.scripted import Script

FUNCTIONS = """p={}
def look(xs): p.update({i["item"]:i["recipes"][0] for i in get_info(xs)});print({x:p[x] for x in xs})
def need(x,n): return {y:v*-(-n//p[x]["result_count"]) for y,v in p[x]["ingredients"].items()}
def make(x,n): return craft(need(x,n),(x,-(-n//p[x]["result_count"])*p[x]["result_count"]))"""

RECIPES = re.compile(r"\{'.*'result_count'.*\}")


@dataclass(frozen=True)
class Skill:
    """Probabilities of the demonstrator's choices.

    Args:
        look, simple, retry: see the module.
        delegate, wrong: for a complex ingredient under delegation; what is left forgets it. `wrong` delegates one
            piece of it.
        open: for a complex ingredient without delegation; else it is forgotten.
        parallel: launch several children with `asyncio.gather` rather than one after the other.
        early: finish right after reading the goal.
    """

    look: float = 1.0
    simple: float = 1.0
    retry: float = 1.0
    delegate: float = 1.0
    wrong: float = 0.0
    open: float = 1.0
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
        self.recipes: dict[str, list[str]] = {}  # item -> its ingredients

    def lucky(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def learn(self, seen: str) -> None:
        """Read the recipes out of what `look` has printed."""
        for shown in RECIPES.findall(seen):
            self.recipes |= {item: list(recipe["ingredients"]) for item, recipe in ast.literal_eval(shown).items()}

    def parts(self, item: str) -> list[str]:
        """The ingredients that have to be crafted, as far as names tell."""
        return [x for x in self.recipes[item] if _craftable(x)]

    def run(self, targets: dict[str, int]) -> Generator[str, str, None]:
        if self.lucky(self.skill.early):
            yield _act('finish("done")')
            return
        self.learn((yield _act(FUNCTIONS, f"look({_names(list(targets))})")))
        for item, count in targets.items():
            if item in self.recipes:
                yield from self.make(item, [f't0=("{item}",{count})'], 0)
        yield _act('finish("done")')

    def make(self, item: str, lines: list[str], level: int) -> Generator[str, str, None]:
        """Turns that make an item whose recipe is known, in the amount that `lines` have noted as t0, t1, ..."""
        close = f"print(make(*t{level}))"
        if not self.parts(item):
            yield _act(*lines, close)
            return
        if self.lucky(self.skill.look):
            seen = yield from self.complete(item, lines, level)
        else:
            seen = yield _act(*lines, close, thought="Just craft.")
        if "Error" in seen and self.lucky(self.skill.retry):
            yield from self.complete(item, [], level)

    def complete(self, item: str, lines: list[str], level: int) -> Generator[str, str, str]:
        """Look the parts up, make them in order, then craft; returns what the last craft printed."""
        lines = [*lines, f"n{level}=need(*t{level})", *(["j=[]"] if self.recursive else [])]
        self.learn((yield _act(*lines, f"look({_names(self.parts(item))})", thought="Parts first.")))
        lines = []
        parallel, launched = self.lucky(self.skill.parallel), False
        for part in self.parts(item):
            lines.append(f'x="{part}"')
            if not self.parts(part):
                if self.lucky(self.skill.simple):
                    lines.append(f"make(x,n{level}[x])")
            elif self.recursive:
                choice = self.rng.random()
                if choice < self.skill.delegate + self.skill.wrong:
                    count = f"n{level}[x]" if choice < self.skill.delegate else "1"
                    launch = f"launch_subagent({{x:{count}}})"
                    lines.append(f"j.append({launch})" if parallel else f"await {launch}")
                    launched = True
            elif self.lucky(self.skill.open):
                yield from self.make(part, [*lines, f"t{level + 1}=(x,n{level}[x])"], level + 1)
                lines = []
        if launched and parallel:
            lines.append("await asyncio.gather(*j)")
        return (yield _act(*lines, f"print(make(*t{level}))"))


def _craftable(item: str) -> bool:
    return not (item.startswith("raw_") or item.endswith("_ore"))
