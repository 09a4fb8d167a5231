"""TextCraft-Synth as a world: task files, the shared inventory with its tools, and the exact verifier.

One `World` belongs to a whole agent tree: children get it by reference, so a craft is visible to all at once. Rules and
effects follow the released environment (RAO, arXiv 2605.06639), the wording of messages is our own.
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

_TARGET = re.compile(r"\s*([1-9]\d{0,8})x (\S+)\s*")


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


def _field(where: str, holder: dict, name: str, kind: type, default: Any) -> Any:
    """An optional field; absent and null are the same."""
    value = holder.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{where}: '{name}' is {json.dumps(value)[:60]}; it must be of type {kind.__name__}.")
    return value


def _counts(where: str, holder: dict, name: str, least: int) -> dict[str, int]:
    if name not in holder:
        raise UserError(f"{where}: the field '{name}' is missing.")
    value = holder[name]
    if not isinstance(value, dict) or not all(is_count(count, least) for count in value.values()):
        raise UserError(f"{where}: '{name}' must be an object of item names with whole numbers of at least {least}.")
    return value


def _parse_step(where: str, row: Any) -> CraftAction:
    target = row.get("target") if isinstance(row, dict) else None
    if not isinstance(target, list) or len(target) != 2 or not isinstance(target[0], str) or not is_count(target[1]):
        raise UserError(f"{where}: a step of 'gold_trajectory' must have a 'target' [item, times].")
    if not is_count(row.get("result_count")):
        raise UserError(f"{where}: a step of 'gold_trajectory' must have a positive 'result_count'.")
    return CraftAction(target[0], target[1], _counts(where, row, "ingredients", 1), row["result_count"])


def _check_items(where: str, book: RecipeBook, task: Task) -> None:
    steps = task.gold_trajectory or []
    for item in [*task.target_items, *(name for step in steps for name in (step.item, *step.ingredients))]:
        if not book.known(item) and item not in task.initial_inventory:
            raise UserError(f"{where}: unknown item '{item}': the recipes given are not those of this task file.")
    for item in task.target_items:
        if book.is_base(item):
            raise UserError(f"{where}: the target '{item}' has no recipe, so it cannot be crafted.")


def _parse_task(where: str, row: dict, book: RecipeBook | None) -> Task:
    misc = _field(where, row, "misc", dict, {})
    targets = _counts(where, misc, "target_items", 1)
    inventory = _counts(where, misc, "initial_inventory", 0)
    task_id = _field(where, row, "id", str, "")
    if not task_id:
        raise UserError(f"{where}: the field 'id' is missing.")
    if not targets:
        raise UserError(f"{where}: 'target_items' is empty; a task needs at least one target.")
    goal = _field(where, row, "goal", str, goal_text(targets))
    max_steps = _field(where, row, "max_steps", int, 75)
    if max_steps < 1:
        raise UserError(f"{where}: 'max_steps' is {max_steps}; it must be at least 1.")
    gold = _field(where, misc, "gold_trajectory", list, None)
    plan = None if gold is None else [_parse_step(where, step) for step in gold]
    depth = _field(where, misc, "max_depth", int, max(map(book.tier, targets)) if book else None)
    difficulty = _field(where, misc, "difficulty", str, difficulty_of(depth) if depth else "unknown")
    steps = _field(where, misc, "num_craft_steps", int, None if plan is None else len(plan))
    task = Task(task_id, goal, targets, inventory, difficulty, depth, steps, plan, max_steps)
    if book is not None:
        _check_items(where, book, task)
    return task


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
        message: argument of the last `finish` (any truthy value, so a blank or a number will do), None if the node
            never finished.

    Returns:
        False also for a node without targets.

    Source: RAO, exact success proxy of TextCraft-Synth.
    """
    gains = [after.get(item, 0) - before.get(item, 0) >= count for item, count in targets.items()]
    return bool(message) and bool(gains) and all(gains)


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
