"""TextCraft-Synth as a world: task files, the shared inventory with its tools, and the exact verifier.

One `World` belongs to a whole agent tree: children get it by reference, so a craft is visible to all at once. Rules and
effects follow the released environment (`oracles/textcraft_transcripts.jsonl`); the wording of messages is our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.rao.recipes import CraftAction, RecipeBook, Task, difficulty_of, goal_text, is_count, read_jsonl

__all__ = [
    "Task", "World", "achieved", "difficulty_of", "goal_text", "load_tasks", "parse_goal", "replay", "save_tasks",
]  # fmt: skip

_TARGET = re.compile(r"\s*(\d+)x (\S+)\s*")


def parse_goal(text: str) -> dict[str, int]:
    """Read the targets back from a goal, so that a child's own goal can be verified; inverse of `goal_text`.

    Raises:
        UserError: the text is not of that form.
    """
    head, colon, tail = text.partition(":")
    matches = [_TARGET.fullmatch(part) for part in tail.split("\n", 1)[0].split(",")]
    if not colon or not head.endswith("items") or not all(matches):
        raise UserError(f"The goal {text!r} names no targets: write it like '{goal_text({'m0_i1': 2})}'.")
    targets: dict[str, int] = {}
    for match in matches:
        targets[match[2]] = targets.get(match[2], 0) + int(match[1])
    return targets


def _counts(where: str, field: str, value: Any, least: int) -> dict[str, int]:
    if not isinstance(value, dict) or not all(is_count(count, least) for count in value.values()):
        raise UserError(f"{where}: '{field}' must be an object of item names with whole numbers of at least {least}.")
    return value


def _parse_gold(where: str, rows: Any) -> list[CraftAction]:
    plan = []
    for row in rows if isinstance(rows, list) else [rows]:
        try:
            (item, times), total = row["target"], row["result_count"]
            fine = isinstance(item, str) and is_count(times) and is_count(total)
        except (TypeError, KeyError, ValueError):
            fine = False
        if not fine:
            raise UserError(f"{where}: a step of 'gold_trajectory' needs 'target' [item, times] and 'result_count'.")
        ingredients = _counts(where, "gold_trajectory ingredients", row.get("ingredients"), 1)
        plan.append(CraftAction(item, times, ingredients, total))
    return plan


def _parse_task(where: str, row: dict, book: RecipeBook | None) -> Task:
    misc = row.get("misc")
    if not isinstance(misc, dict):
        raise UserError(f"{where}: the field 'misc' (an object with target_items, initial_inventory) is missing.")
    for field, holder in (("id", row), ("target_items", misc), ("initial_inventory", misc)):
        if field not in holder:
            raise UserError(f"{where}: the field '{field}' is missing.")
    targets = _counts(where, "target_items", misc["target_items"], 1)
    if not targets:
        raise UserError(f"{where}: 'target_items' is empty; a task needs at least one target.")
    inventory = _counts(where, "initial_inventory", misc["initial_inventory"], 0)
    max_steps = row.get("max_steps", 75)
    if not is_count(max_steps):
        raise UserError(f"{where}: 'max_steps' is {max_steps!r}; it must be a whole number of at least 1.")
    gold = misc.get("gold_trajectory")
    plan = None if gold is None else _parse_gold(where, gold)
    depth, difficulty, steps = misc.get("max_depth"), misc.get("difficulty"), misc.get("num_craft_steps")
    if book is not None:
        for item in [*targets, *(name for step in plan or () for name in (step.item, *step.ingredients))]:
            if not book.known(item) and item not in inventory:
                raise UserError(f"{where}: unknown item '{item}'; the recipes do not go with this task file.")
        for item in targets:
            if book.is_base(item):
                raise UserError(f"{where}: target '{item}' has no recipe, so it cannot be crafted.")
        depth = max(map(book.tier, targets)) if depth is None else depth
    if difficulty is None:
        difficulty = "unknown" if book is None or depth < 2 else difficulty_of(depth)
    steps = len(plan) if steps is None and plan is not None else steps
    goal = row.get("goal", goal_text(targets))
    return Task(str(row["id"]), goal, targets, inventory, difficulty, depth, steps, plan, max_steps)


def load_tasks(path: str | Path, book: RecipeBook | None = None) -> list[Task]:
    """Read a task file of the original schema (one object a line, targets and inventory under `misc`).

    Args:
        book: the recipes that the tasks are for; with it items are checked and a missing difficulty is filled in from
            the target's tier (without it: "unknown").

    Raises:
        UserError: missing or empty file, or a bad line; the sentence names file and line.
    """
    tasks: list[Task] = []
    seen: set[str] = set()
    for where, row in read_jsonl(path, "task"):
        task = _parse_task(where, row, book)
        if task.id in seen:
            raise UserError(f"{where}: a second task with the id '{task.id}'; ids must be unique in a file.")
        seen.add(task.id)
        tasks.append(task)
    return tasks


def save_tasks(tasks: Iterable[Task], path: str | Path) -> None:
    """Write tasks in the original schema; `load_tasks` reads them back unchanged."""
    with Path(path).open("w", encoding="utf-8") as file:
        for task in tasks:
            misc: dict[str, Any] = {"target_items": task.target_items, "initial_inventory": task.initial_inventory}
            if task.gold_trajectory is not None:
                misc["gold_trajectory"] = [
                    {
                        "action": "craft",
                        "target": [step.item, step.times],
                        "ingredients": step.ingredients,
                        "result_count": step.result_count,
                    }
                    for step in task.gold_trajectory
                ]
            misc |= {
                "difficulty": task.difficulty,
                "max_depth": task.max_depth,
                "num_craft_steps": task.num_craft_steps,
            }
            row = {"goal": task.goal, "id": task.id, "max_steps": task.max_steps, "misc": misc}
            file.write(json.dumps(row | {"fork_strategy": "subtask"}) + "\n")


class World:
    """The inventory that all agents of a tree share, with the three tools that read and change it.

    Tools never raise for what an agent passes: a bad call returns a text that starts with "Error: ".

    Args:
        book: the recipes.
        inventory: item -> pieces at the start (copied).
    """

    def __init__(self, book: RecipeBook, inventory: Mapping[str, int]) -> None:
        self.book = book
        self.inventory = {item: count for item, count in inventory.items() if count > 0}

    def craft(self, ingredients: dict[str, int], target: tuple[str, int]) -> str:
        """Apply a recipe: exactly the ingredients for the total count, which is a multiple of the recipe's output.

        Args:
            ingredients: item -> total pieces to consume.
            target: (item, total pieces to make).

        Returns:
            `Crafted 3 o1_i1_21.`, or `Error: ...` with nothing changed.
        """
        problem = _bad_arguments(ingredients, target) or self._bad_craft(ingredients, *target)
        if problem:
            return f"Error: {problem}"
        item, count = target[0], int(target[1])
        for name, used in ingredients.items():
            self.inventory[name] -= used
            if self.inventory[name] == 0:
                del self.inventory[name]
        self.inventory[item] = self.inventory.get(item, 0) + count
        return f"Crafted {count} {item}."

    def _bad_craft(self, ingredients: dict[str, int], item: str, count: int) -> str | None:
        recipe = self.book.recipes.get(item)
        if recipe is None:
            return f"no recipe makes {item}."
        if count % recipe.result_count:
            return f"{item} is made in multiples of {recipe.result_count}, not {int(count)}."
        times = count // recipe.result_count
        for name, each in recipe.ingredients.items():
            if name not in ingredients:
                return f"{item} also needs {name}."
            if ingredients[name] != each * times:
                return f"{int(count)} {item} needs {each * times} {name}, not {int(ingredients[name])}."
        for name in ingredients:
            if name not in recipe.ingredients:
                return f"{item} does not use {name}."
        short = [(name, n, self.inventory.get(name, 0)) for name, n in ingredients.items()]
        short_text = ", ".join(f"{name} (need {int(n)}, have {have})" for name, n, have in short if n > have)
        return f"not enough {short_text}." if short_text else None

    def get_info(self, items: list[str]) -> list[dict[str, Any]] | str:
        """What is known about items: recipe, tier and pieces held.

        Returns:
            For each item a dict with `item, can_craft, is_base, in_inventory, crafting_depth` and `recipes`, a list of
            `{"ingredients": {...}, "result_count": n}`; an error text if `items` is not a list of names.
        """
        try:
            names = list(items)
            hash(tuple(names))
        except TypeError:
            return "Error: get_info takes a list of item names."
        return [self._info(name) for name in names]

    def _info(self, item: str) -> dict[str, Any]:
        recipe = self.book.recipes.get(item)
        shown = [] if recipe is None else [
            {"ingredients": dict(recipe.ingredients), "result_count": recipe.result_count}
        ]  # fmt: skip
        held = self.inventory.get(item, 0)
        return {
            "item": item,
            "can_craft": recipe is not None,
            # distractors that no recipe uses are base items too, though the recipes alone do not show it
            "is_base": recipe is None and (self.book.known(item) or held > 0),
            "in_inventory": held,
            "crafting_depth": self.book.tier(item),
            "recipes": shown,
        }

    def view_inventory(self) -> dict[str, int]:
        """A copy of the inventory, without items of which none is left."""
        return dict(self.inventory)


def _bad_arguments(ingredients: Any, target: Any) -> str | None:
    """Why a craft call has arguments of the wrong types; True counts as 1, as in the released environment."""
    if not isinstance(ingredients, dict):
        return f"ingredients must be a dict, got {type(ingredients).__name__}."
    if not isinstance(target, tuple) or len(target) != 2:
        return "target must be a tuple (item, total count)."
    for role, name, count in [("target", *target), *(("ingredient", *entry) for entry in ingredients.items())]:
        if not isinstance(name, str):
            return f"{role} item must be a name, got {type(name).__name__}."
        if not isinstance(count, int):
            return f"{role} count of {name} must be an int, got {type(count).__name__}."
        if count <= 0:
            return f"{role} count of {name} must be positive, got {count}."
    return None


def achieved(
    targets: Mapping[str, int], before: Mapping[str, int], after: Mapping[str, int], message: object
) -> bool:
    """The exact node verifier: finished with a non-empty message and every target gained in full.

    Args:
        targets: the node's own targets.
        before: inventory when the node was launched; what was held then does not count.
        after: inventory when the node ended. It is shared, so a sibling's craft counts and a consumed target does not.
        message: argument of the last `finish`, None if the node never finished.

    Source: papers/rao.md section 2, success of TextCraft.
    """
    return bool(message) and all(after.get(item, 0) - before.get(item, 0) >= n for item, n in targets.items())


def replay(book: RecipeBook, task: Task) -> bool:
    """Whether the task's gold trajectory runs without an error and achieves its targets.

    Raises:
        UserError: the task has no gold trajectory.
    """
    if task.gold_trajectory is None:
        raise UserError(f"Task '{task.id}' has no gold trajectory to replay; use `solve` to make one.")
    world = World(book, task.initial_inventory)
    for step in task.gold_trajectory:
        if world.craft(step.ingredients, (step.item, step.result_count)).startswith("Error"):
            return False
    return achieved(task.target_items, task.initial_inventory, world.inventory, "done")
