"""TextCraft-Synth as recursive agents see it: prompt, tools, delegation by targets, exact verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lib.errors import UserError
from lib.rao.agent import Assignment
from lib.rao.recipes import RecipeBook, Task, goal_text, is_count
from lib.rao.textcraft import World, achieved
from lib.sandbox.repl import ToolError

TOOLS = "get_info(items), craft(ingredients, (item, total_count)), view_inventory(), finish(message)"
LAUNCH = "await launch_subagent(targets)"

SHORT = """{goal}
Delegation: {delegation}"""

FULL = """You are an agent in a crafting game. You act by writing Python; variables persist between your turns.

Goal: {goal}
The starting inventory is sufficient. The goal counts what you gain on top of what is held now.

Each turn: one to three sentences of reasoning between <thought> and </thought>, then code between <python> and
</python>. You see what the code prints. Tools:
- get_info(items: list[str]) -> list[dict]: recipe, tier and count held of each item
- craft(ingredients: dict[str, int], target: tuple[str, int]) -> str: apply a recipe; the ingredients are totals for the
  total count, which must be a multiple of the recipe's output
- view_inventory() -> dict[str, int]
- finish(message: str): end when the goal is reached
{delegation}
Check a result before you claim it. If a craft fails, read the error and correct the counts or make what is missing."""

FULL_DELEGATION = """\
- await launch_subagent(targets: dict[str, int], context: str = "") -> str: a copy of you with a fresh memory crafts
  the targets; the inventory is shared with it. Delegate intermediate items that need several crafts of their own; run
  independent ones together with `await asyncio.gather(...)`. Sub-agents can delegate too."""


class CraftEpisode:
    """One crafting task; all agents of the tree share its inventory.

    Args:
        book: the recipes.
        task: what the root has to craft.
        style: "short" for micro policies, "full" for language models.
    """

    def __init__(self, book: RecipeBook, task: Task, style: str = "short"):
        if style not in ("short", "full"):
            raise UserError(f"prompt style {style!r}: choose 'short' or 'full'")
        self.task, self.task_id, self.style = task, task.id, style
        self.world = World(book, task.initial_inventory)

    def root(self) -> Assignment:
        return self._assign(self.task.target_items, "")

    def _assign(self, targets: dict[str, int], context: str) -> Assignment:
        goal = goal_text(targets) + (f"\n{context}" if context else "")
        return Assignment(goal, {"targets": dict(targets), "before": self.world.view_inventory()})

    def prompt(self, assignment: Assignment, recursive: bool) -> str:
        if self.style == "short":
            return SHORT.format(goal=assignment.goal, delegation="yes" if recursive else "no")
        return FULL.format(goal=assignment.goal, delegation=FULL_DELEGATION if recursive else "")

    def tools(self, assignment: Assignment) -> dict[str, Callable[..., Any]]:
        world = self.world
        return {"get_info": world.get_info, "craft": world.craft, "view_inventory": world.view_inventory}

    def delegate(self, targets: dict[str, int], context: str = "") -> Assignment:
        if not isinstance(targets, dict) or not targets:
            raise ToolError('launch_subagent takes the targets as a dict, for example {"m0_i3": 2}')
        bad = [(k, v) for k, v in targets.items() if not isinstance(k, str) or not is_count(v)]
        if bad:
            raise ToolError(f"launch_subagent: {bad[0][0]!r}: {bad[0][1]!r} is not an item with a positive count")
        return self._assign(targets, str(context))

    def verify(self, assignment: Assignment, message: Any) -> float:
        data = assignment.data
        return float(achieved(data["targets"], data["before"], self.world.inventory, message))


@dataclass(frozen=True)
class CraftEpisodes:
    """Makes episodes of (recipe book key, task) pairs; pickles, so worker processes can make their own.

    Args:
        books: recipe graphs by key. style: of the prompts, see `CraftEpisode`.
    """

    books: Mapping[int, RecipeBook]
    style: str = "short"

    def __call__(self, item: tuple[int, Task]) -> CraftEpisode:
        book, task = item
        return CraftEpisode(self.books[book], task, self.style)
