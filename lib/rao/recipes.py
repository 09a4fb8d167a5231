"""TextCraft-Synth's recipe graph: the published rules, a generator, a solver and the task generator.

Items have meaningless names, so that nothing about a recipe can be guessed from the name; every item belongs to one of
five domains and one of thirteen tiers (0 = base material). The difficulty of a task is the tier of its target.
Rules: those of the released generator (RAO, arXiv 2605.06639), whose recorded statistics the tests compare with ours.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.errors import UserError

PREFIX = "synth:"
DOMAINS = {"m": "metal", "c": "crystal", "o": "organic", "a": "arcane", "t": "tech"}
MAX_TIER = 12
# Letters = the domains that give one ingredient each, in order; the first one is the item's own domain.
CROSS_DOMAIN = {
    10: {"mc": "mc", "ct": "ct", "am": "am", "ot": "ot"},
    11: {"mct": "mct", "oam": "oam", "act": "act", "tca": "tca"},
    12: {"all": "mcoat", "mcat": "mcat", "oacm": "oacm", "tcoa": "tcoa"},
}
TIERS = {"easy": range(2, 4), "medium": range(4, 7), "hard": range(7, 10), "extreme": range(10, 13)}
MAX_COUNT = {"easy": 3, "medium": 3, "hard": 2, "extreme": 2}
MIX = {"easy": 0.25, "medium": 0.35, "hard": 0.25, "extreme": 0.15}


@dataclass(frozen=True)
class Recipe:
    """The only way to make an item: `ingredients` for one application give `result_count` pieces."""

    ingredients: dict[str, int]
    result_count: int
    tier: int
    domain: str


@dataclass(frozen=True)
class CraftAction:
    """One step of a plan: a recipe applied `times` times; `ingredients` and `result_count` are totals over those."""

    item: str
    times: int
    ingredients: dict[str, int]
    result_count: int


@dataclass
class Task:
    """One TextCraft-Synth problem: gain `target_items` from `initial_inventory`.

    `max_depth` is the tier of the deepest target, `num_craft_steps` the number of distinct items to craft (both None if
    the file does not say and no recipes are at hand), `gold_trajectory` one right plan, `max_steps` the file's budget.
    """

    id: str
    goal: str
    target_items: dict[str, int]
    initial_inventory: dict[str, int]
    difficulty: str
    max_depth: int | None
    num_craft_steps: int | None
    gold_trajectory: list[CraftAction] | None = None
    max_steps: int = 75


class RecipeBook:
    """An acyclic set of recipes, one for each craftable item.

    `base_items` are the items without a recipe, sorted; `order` lists all items, each after its ingredients.

    Args:
        recipes: item -> recipe.
        base_items: further base items which no recipe uses (they occur in tasks as distractors).

    Raises:
        UserError: an item needs itself, directly or through others.
    """

    def __init__(self, recipes: Mapping[str, Recipe], base_items: Iterable[str] = ()) -> None:
        self.recipes = dict(recipes)
        used = {name for recipe in self.recipes.values() for name in recipe.ingredients}
        self.base_items: tuple[str, ...] = tuple(sorted((used | set(base_items)) - self.recipes.keys()))
        self._known = frozenset(self.recipes) | frozenset(self.base_items)
        graph = {item: list(recipe.ingredients) for item, recipe in self.recipes.items()}
        try:
            self.order: tuple[str, ...] = tuple(graphlib.TopologicalSorter(graph).static_order())
        except graphlib.CycleError as error:
            chain = " -> ".join(error.args[1])
            raise UserError(f"The recipes are circular ({chain}); remove one of them.") from None

    def is_base(self, item: str) -> bool:
        """Whether the item has no recipe, so that it can only be in the inventory from the start."""
        return item not in self.recipes

    def known(self, item: str) -> bool:
        """Whether the item has a recipe or is an ingredient (or was declared a base item)."""
        return item in self._known

    def tier(self, item: str) -> int:
        """The item's nominal depth, 0 for everything without a recipe."""
        return self.recipes[item].tier if item in self.recipes else 0

    def _lines(self) -> Iterable[str]:
        for item, recipe in sorted(self.recipes.items()):
            pieces = [name for name, count in recipe.ingredients.items() for _ in range(count)]
            row = {
                "type": "minecraft:crafting_shapeless",
                "ingredients": [{"item": PREFIX + name} for name in pieces],
                "result": {"item": PREFIX + item, "count": recipe.result_count},
                "synth_metadata": {"depth": recipe.tier, "domain": recipe.domain},
            }
            yield json.dumps(row)

    def digest(self) -> str:
        """Twelve hex digits that name this set of recipes, whatever their order."""
        return hashlib.sha256("\n".join(self._lines()).encode()).hexdigest()[:12]

    def save(self, path: str | Path) -> None:
        """Write the recipes in the original JSONL schema, sorted by item."""
        Path(path).write_text("".join(line + "\n" for line in self._lines()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RecipeBook:
        """Read recipes in the original JSONL schema (`synth_recipes.jsonl`).

        Raises:
            UserError: missing or empty file, or a line that is not such a recipe (file and line are named).
        """
        recipes: dict[str, Recipe] = {}
        for where, row in read_jsonl(path, "recipe"):
            item, recipe = _parse_recipe(where, row)
            if item in recipes:
                raise UserError(f"{where}: a second recipe for '{item}'; keep one recipe for each item.")
            recipes[item] = recipe
        try:
            return cls(recipes)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def read_jsonl(path: str | Path, what: str) -> list[tuple[str, dict]]:
    """Read a JSONL file of objects as ("file, line n", object) pairs.

    Raises:
        UserError: the file is missing, unreadable or holds no line, or a line is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"Cannot read the {what} file '{path}' ({reason}): give the path of a JSONL file.") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error}); every line must hold one {what} object.") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected one {what} object, found {type(row).__name__}.")
        rows.append((where, row))
    if not rows:
        raise UserError(f"The {what} file '{path}' is empty: it must hold one {what} object a line.")
    return rows


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value from a file is a whole number of at least `least` (True and False are not numbers here)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _parse_recipe(where: str, row: dict) -> tuple[str, Recipe]:
    def name(entry: object, field: str) -> str:
        item = entry.get("item") if isinstance(entry, dict) else None
        if not isinstance(item, str) or not item.startswith(PREFIX) or item == PREFIX:
            raise UserError(f'{where}: {field} must be like {{"item": "{PREFIX}m0_i1"}}, found {json.dumps(entry)}.')
        return item.removeprefix(PREFIX)

    if row.get("type") != "minecraft:crafting_shapeless":
        raise UserError(f"{where}: recipe type {row.get('type')!r} is not 'minecraft:crafting_shapeless'.")
    entries, result, metadata = (row.get(field) for field in ("ingredients", "result", "synth_metadata"))
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: 'ingredients' must be a non-empty list of items.")
    ingredients: dict[str, int] = {}
    for entry in entries:
        item = name(entry, "an ingredient")
        ingredients[item] = ingredients.get(item, 0) + 1
    item = name(result, "'result'")
    if not is_count(result.get("count")):
        raise UserError(f"{where}: result count of '{item}' must be a positive whole number.")
    if not isinstance(metadata, dict) or not is_count(metadata.get("depth")):
        raise UserError(f"{where}: 'synth_metadata' of '{item}' must hold a 'depth' of at least 1.")
    return item, Recipe(ingredients, result["count"], metadata["depth"], str(metadata.get("domain", "")))


def item_name(letter: str, tier: int, index: int) -> str:
    """Name of the index-th item of a domain and tier; ten prefixes, so later items carry their index.

    Example: ("m", 0, 3) m3_ore, ("a", 0, 3) raw_a3, ("m", 1, 10) m0_i1_10, ("a", 7, 17) a7_i7_7_17.
    """
    variant = index % 10
    if tier == 0:  # no index here: 25 slots share 10 names, so low variants are drawn more often, as published
        return f"{letter}{variant}_ore" if letter in "mc" else f"raw_{letter}{variant}"
    return f"{letter}{variant}_i{tier}" + (f"_{tier}" if tier >= 6 else "") + (f"_{index}" if index >= 10 else "")


def _result_count(rng: random.Random, tier: int) -> int:
    low, high = {1: (2, 4), 2: (2, 3), 3: (1, 2), 4: (1, 2), 5: (1, 2)}.get(tier, (1, 1))
    return rng.randint(low, high)


def _ingredient_number(rng: random.Random, tier: int) -> int:
    base = 1 if tier == 1 else 2 if tier <= 7 else 3 if tier <= 11 else 4
    return min(6, base + rng.randint(0, min(2, tier // 3)))


def _draw_ingredients(rng: random.Random, tiers: list[list[str]], tier: int) -> dict[str, int]:
    """Ingredients of one recipe from the domain's lower `tiers`, near tiers preferred (weight 1 / (distance + 1))."""
    pool = [(name, 1 / (tier - below + 1)) for below in (tier - 1, tier - 2) if below >= 0 for name in tiers[below]]
    if tier >= 4:
        far = rng.randint(tier - 4, tier - 3)
        pool.append((rng.choice(tiers[far]), 1 / (tier - far + 1)))
    ingredients = {}
    for _ in range(min(_ingredient_number(rng, tier), len(pool))):
        drawn = rng.choices(range(len(pool)), [weight for _, weight in pool])[0]
        name, _ = pool.pop(drawn)
        ingredients[name] = rng.randint(1, 2) if tier <= 4 else 1  # a name drawn twice collapses into one
    return ingredients


def generate_recipes(seed: int = 42, items_per_domain_tier: int = 25) -> RecipeBook:
    """Build a recipe graph after the published rules, so that worlds not seen in training can be made at will.

    Args:
        seed: names the world; the same seed gives the same recipes on every machine.
        items_per_domain_tier: items of a domain at tiers 0-2 (the tier-0 slots share 10 names); one fewer per three
            further tiers. The default gives 1,452 items, 1,402 of them craftable.

    Raises:
        UserError: `items_per_domain_tier` below 1.

    Source: RAO, TextCraft-Synth. The random stream is our own: seed 42 has the published item names and
    statistics, not the published recipes (load those from `synth_recipes.jsonl`).
    """
    if items_per_domain_tier < 1:
        raise UserError(f"items_per_domain_tier is {items_per_domain_tier}: give at least 1.")
    rng = random.Random(seed)
    pools = {letter: [] for letter in DOMAINS}
    recipes: dict[str, Recipe] = {}
    for letter, domain in DOMAINS.items():
        tiers: list[list[str]] = pools[letter]
        for tier in range(MAX_TIER + 1):
            names = [item_name(letter, tier, i) for i in range(max(1, items_per_domain_tier - tier // 3))]
            if tier > 0:
                for name in names:
                    ingredients = _draw_ingredients(rng, tiers, tier)
                    recipes[name] = Recipe(ingredients, _result_count(rng, tier), tier, domain)
            tiers.append(names)
    for tier, items in CROSS_DOMAIN.items():
        for suffix, letters in items.items():
            ingredients = {rng.choice(pools[letter][tier - 3]): rng.randint(1, 2) for letter in letters}
            recipes[f"x{tier}_{suffix}"] = Recipe(ingredients, 1, tier, DOMAINS[letters[0]])
    return RecipeBook(recipes, (name for tiers in pools.values() for name in tiers[0]))


def solve(book: RecipeBook, targets: Mapping[str, int], inventory: Mapping[str, int]) -> list[CraftAction]:
    """The frugal plan: every item's total is ordered once and rounded up to whole recipe applications once.

    Args:
        targets: item -> gain over the inventory. What is already held of a target does not count towards it, hence it
            cannot serve as an ingredient either.
        inventory: item -> pieces held at the start.

    Returns:
        Actions in an order in which they can be crafted, one for each distinct item.

    Raises:
        UserError: a target has no recipe, or base materials do not suffice.
    """
    for item in targets:
        if book.is_base(item):
            raise UserError(f"'{item}' has no recipe, so it cannot be a target.")
    need = defaultdict(int, targets)
    plan = []
    for item in reversed(book.order):
        missing = need.get(item, 0) - (0 if item in targets else inventory.get(item, 0))
        if missing <= 0:
            continue
        if book.is_base(item):
            held = inventory.get(item, 0)
            raise UserError(f"Not solvable: {need[item]} of the base item '{item}' are needed, {held} are held.")
        recipe = book.recipes[item]
        times = -(-missing // recipe.result_count)
        ingredients = {name: count * times for name, count in recipe.ingredients.items()}
        for name, count in ingredients.items():
            need[name] += count
        plan.append(CraftAction(item, times, ingredients, times * recipe.result_count))
    return plan[::-1]


def difficulty_of(tier: int) -> str:
    """Name of a target's tier: easy 2-3, medium 4-6, hard 7-9, extreme 10-12, else "unknown"."""
    return next((name for name, tiers in TIERS.items() if tier in tiers), "unknown")


def goal_text(targets: Mapping[str, int]) -> str:
    """The goal as agents read it, for example `Craft the following items: 2x a7_i2_17, 1x m0_i3`."""
    return "Craft the following items: " + ", ".join(f"{count}x {item}" for item, count in targets.items())


def naive_requirement(book: RecipeBook, targets: Mapping[str, int]) -> dict[str, int]:
    """Base materials if every recipe gave one piece only: the generous allowance that tasks start from."""
    need = defaultdict(int, targets)
    for item in reversed(book.order):
        if item in need and not book.is_base(item):
            for name, count in book.recipes[item].ingredients.items():
                need[name] += need[item] * count
    return {item: count for item, count in need.items() if book.is_base(item)}


def _make_task(book: RecipeBook, rng: random.Random, task_id: str, item: str, count: int) -> Task:
    targets, tier = {item: count}, book.tier(item)
    inventory = {name: n + rng.randint(0, max(1, n // 2)) for name, n in naive_requirement(book, targets).items()}
    for name in rng.sample(book.base_items, min(len(book.base_items), rng.randint(1, 3))):  # distractors
        inventory.setdefault(name, rng.randint(1, 5))
    plan = solve(book, targets, inventory)
    return Task(task_id, goal_text(targets), targets, inventory, difficulty_of(tier), tier, len(plan), plan)


def generate_tasks(
    book: RecipeBook, seed: int = 42, train_size: int = 10_000, val_size: int = 1_000
) -> tuple[list[Task], list[Task]]:
    """Make training and validation tasks over one recipe graph, with no target item in both.

    Args:
        seed: of the item split, the inventories and the order.
        train_size, val_size: tasks asked for, mixed easy / medium / hard / extreme 25 / 35 / 25 / 15 %. A task is an
            (item, count) pair and occurs once, so the pools bound what is obtained: the defaults exhaust the pools of
            a full-sized graph, 2,522 + 632 tasks. A split does not depend on the other's size.

    Returns:
        (train, val), each in random order; every task carries the frugal plan as its gold trajectory.

    Source: RAO, TextCraft-Synth. One deviation: the published gold plans round up once per path through the graph
    and so apply recipes up to a third more often; the number of distinct crafts is the same.
    """
    rng = random.Random(seed)
    pools: dict[str, dict[str, list[tuple[str, int]]]] = {"train": defaultdict(list), "val": defaultdict(list)}
    for difficulty, tiers in TIERS.items():
        for tier in tiers:
            items = sorted(item for item, recipe in book.recipes.items() if recipe.tier == tier)
            rng.shuffle(items)
            cut = len(items) * 4 // 5
            for split, part in (("train", items[:cut]), ("val", items[cut:])):
                counts = range(1, MAX_COUNT[difficulty] + 1)
                pools[split][difficulty] += [(item, count) for item in part for count in counts]
    tasks = []
    for split, size in (("train", train_size), ("val", val_size)):
        rng = random.Random(f"{seed} {split}")
        chosen = []
        for difficulty, share in MIX.items():
            pool = pools[split][difficulty]
            chosen += rng.sample(pool, min(len(pool), round(size * share)))
        rng.shuffle(chosen)
        ids = (f"textcraft_synth.{split}.{number}" for number in range(len(chosen)))
        tasks.append([_make_task(book, rng, task_id, *pair) for task_id, pair in zip(ids, chosen, strict=True)])
    return tasks[0], tasks[1]
