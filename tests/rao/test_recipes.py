"""Recipe graphs, solver and task generator, against the published rules and the recorded statistics of three seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import mean

import numpy as np
import pytest
from scipy.stats import chi2, chi2_contingency

from lib.errors import UserError
from lib.rao.recipes import (
    CROSS_DOMAIN,
    MAX_COUNT,
    TIERS,
    CraftAction,
    Recipe,
    RecipeBook,
    difficulty_of,
    generate_recipes,
    generate_tasks,
    goal_text,
    item_name,
    naive_requirement,
    solve,
)
from lib.rao.textcraft import replay

PER_TIER = {0: 50, 1: 125, 2: 125, 3: 120, 4: 120, 5: 120, 6: 115, 7: 115, 8: 115, 9: 110, 10: 114, 11: 114, 12: 109}
TASKS = {
    "train": {"easy": 588, "medium": 852, "hard": 544, "extreme": 538},
    "val": {"easy": 147, "medium": 213, "hard": 136, "extreme": 136},
}
ORACLE_SEEDS = ("42", "1", "2")
DIGEST = "653d5e11de13"


def small_book() -> RecipeBook:
    """plank: 1 log -> 4; stick: 2 planks -> 3; ladder: 2 sticks and 1 plank -> 1."""
    return RecipeBook(
        {
            "plank": Recipe({"log": 1}, 4, 1, "wood"),
            "stick": Recipe({"plank": 2}, 3, 2, "wood"),
            "ladder": Recipe({"stick": 2, "plank": 1}, 1, 3, "wood"),
        }
    )


def true_depths(book: RecipeBook) -> dict[str, int]:
    depths: dict[str, int] = {}
    for item in book.order:
        below = [] if book.is_base(item) else [depths[name] for name in book.recipes[item].ingredients]
        depths[item] = 1 + max(below) if below else 0
    return depths


@pytest.fixture(scope="module")
def book() -> RecipeBook:
    return generate_recipes(42)


@pytest.fixture(scope="module")
def tasks(book):
    train, val = generate_tasks(book, 42)
    return {"train": train, "val": val}


# --- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("letter", "tier", "index", "name"),
    [
        ("m", 0, 3, "m3_ore"),
        ("c", 0, 24, "c4_ore"),
        ("a", 0, 0, "raw_a0"),
        ("o", 0, 19, "raw_o9"),
        ("m", 1, 0, "m0_i1"),
        ("a", 2, 17, "a7_i2_17"),
        ("m", 5, 9, "m9_i5"),
        ("m", 6, 4, "m4_i6_6"),
        ("t", 12, 20, "t0_i12_12_20"),
    ],
)
def test_item_names_follow_the_published_pattern(letter, tier, index, name):
    assert item_name(letter, tier, index) == name


@pytest.mark.parametrize("seed", [42, 1, 2, 100, 701])
def test_counts_that_the_rules_force(seed):
    book = generate_recipes(seed)
    per_tier = Counter(map(book.tier, [*book.recipes, *book.base_items]))
    assert per_tier == PER_TIER and sum(per_tier.values()) == 1452 and len(book.recipes) == 1402
    own = Counter((r.tier, r.domain) for item, r in book.recipes.items() if not item.startswith("x"))
    assert all(own[tier, "organic"] == 25 - tier // 3 for tier in range(1, 13)) and len(own) == 12 * 5
    cross = {item: recipe for item, recipe in book.recipes.items() if item.startswith("x")}
    assert set(cross) == {f"x{tier}_{suffix}" for tier, items in CROSS_DOMAIN.items() for suffix in items}
    assert len(cross) == 12 and cross["x12_all"].domain == "metal" and cross["x10_am"].domain == "arcane"
    for item, recipe in cross.items():
        letters = item.split("_")[1].replace("all", "mcoat")
        assert [name[0] for name in recipe.ingredients] == list(letters)
        assert {book.tier(name) for name in recipe.ingredients} == {recipe.tier - 3}


@pytest.mark.parametrize("seed", range(100, 105))
def test_every_recipe_is_within_the_rules(seed):
    book = generate_recipes(seed)
    outputs = {1: {2, 3, 4}, 2: {2, 3}} | dict.fromkeys((3, 4, 5), {1, 2}) | dict.fromkeys(range(6, 13), {1})
    fewest = {1: 1} | dict.fromkeys(range(2, 8), 2) | dict.fromkeys(range(8, 12), 3) | {12: 4}
    for item, recipe in book.recipes.items():
        if item.startswith("x"):
            continue
        tier, number = recipe.tier, len(recipe.ingredients)
        assert recipe.result_count in outputs[tier]
        assert number <= min(6, fewest[tier] + min(2, tier // 3))
        # only the ten names on 25 tier-0 slots can be drawn twice, which collapses a tier-2 recipe to one ingredient
        assert number >= fewest[tier] or (tier == 2 and number == 1)
        assert set(recipe.ingredients.values()) <= ({1, 2} if tier <= 4 else {1})
        distances = Counter(tier - book.tier(name) for name in recipe.ingredients)
        assert set(distances) <= {1, 2, 3, 4} and distances[3] + distances[4] <= (tier >= 4)
        letters = {name[4] if name.startswith("raw_") else name[0] for name in recipe.ingredients}
        assert letters == {item[0]}


def test_the_graph_has_no_cycle_and_base_items_only_at_the_bottom(book):
    place = {item: i for i, item in enumerate(book.order)}
    assert all(place[name] < place[item] for item, recipe in book.recipes.items() for name in recipe.ingredients)
    assert all(book.is_base(item) and book.tier(item) == 0 and book.known(item) for item in book.base_items)
    assert not book.is_base("m0_i1") and book.tier("x12_all") == 12 and not book.known("zz9_i1")


def test_the_graph_is_the_same_on_every_machine():
    """A changed digest means other worlds: results made before are then not comparable."""
    assert generate_recipes(42).digest() == DIGEST
    code = (
        "from lib.rao.recipes import *; b = generate_recipes(42); t, v = generate_tasks(b, 42, 40, 20);"
        "print(b.digest(), [(x.goal, x.initial_inventory, x.gold_trajectory) for x in t + v])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("0", "1")
    ]
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout.startswith(DIGEST.encode())


def test_seeds_and_sizes_give_other_worlds():
    assert generate_recipes(1).digest() != generate_recipes(2).digest()
    assert len(generate_recipes(1, items_per_domain_tier=1).recipes) == 5 * 12 + 12
    with pytest.raises(UserError, match="items_per_domain_tier is 0"):
        generate_recipes(items_per_domain_tier=0)


# --- statistics ------------------------------------------------------------------------------------------------------


def recipe_statistics(book: RecipeBook) -> dict[str, dict[str, Counter]]:
    depths = true_depths(book)
    out: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for item, recipe in book.recipes.items():
        key = f"{recipe.tier}_cross" if item.startswith("x") else str(recipe.tier)
        counts = recipe.ingredients.values()
        out["distinct_ingredients_by_tier"][key][str(len(counts))] += 1
        out["ingredient_total_by_tier"][key][str(sum(counts))] += 1
        out["result_count_by_tier"][key][str(recipe.result_count)] += 1
        out["ingredient_count_each_by_tier"][key].update(map(str, counts))
        out["ingredient_tier_distance_by_tier"][key].update(
            str(recipe.tier - book.tier(name)) for name in recipe.ingredients
        )
        out["true_depth_by_nominal_tier"][key][str(depths[item])] += 1
        for name in recipe.ingredients:
            if book.is_base(name):
                variant = int(name[5] if name.startswith("raw_") else name[1])
                group = "variants_0_4" if variant < 5 else "variants_5_9"
                out["base_item_uses_as_ingredient"]["all"][group] += 1
    return out


def merged(tables: Iterable[dict[str, dict[str, Counter]]]) -> dict[str, dict[str, Counter]]:
    out: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for table in tables:
        for quantity, by_tier in table.items():
            for tier, counts in by_tier.items():
                out[quantity][tier].update(counts)
    return out


def homogeneity(ours: Counter, theirs: Counter) -> tuple[float, int]:
    """Chi-square statistic and degrees of freedom for "same distribution"; values expected less than 5 times joined."""
    table = np.array([[row[value] for value in sorted(ours | theirs, key=int)] for row in (ours, theirs)], float)
    expected = table.sum(0) * table[1].sum() / table.sum()
    rare = expected < 5
    table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)]) if rare.any() else table
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 0.0, 0
    result = chi2_contingency(table, correction=False)
    return float(result.statistic), int(result.dof)


def test_recipe_distributions_agree_with_the_official_generator(real_data):
    """Three official graphs against twelve of ours: 7 quantities in up to 15 groups, each and all together."""
    official = json.loads((real_data / "oracles" / "textcraft_stats.json").read_text())["seeds"]
    quantities = recipe_statistics(generate_recipes(0)).keys()
    flat = "base_item_uses_as_ingredient"
    theirs = merged(
        {q: {"all": Counter(official[s][q])} if q == flat else official[s][q] for q in quantities}
        for s in ORACLE_SEEDS
    )
    ours = merged(recipe_statistics(generate_recipes(seed)) for seed in range(200, 212))
    total, dof, groups = 0.0, 0, 0
    for quantity in sorted(theirs):
        assert ours[quantity].keys() == theirs[quantity].keys(), quantity
        for tier in theirs[quantity]:
            # variant groups are names, not numbers: give them numbers for sorting
            pair = [Counter({v.replace("variants_", "").replace("_", ""): n for v, n in c[quantity][tier].items()})
                    for c in (ours, theirs)]  # fmt: skip
            statistic, df = homogeneity(*pair)
            if df:
                assert chi2.sf(statistic, df) > 5e-4, (quantity, tier, pair)
                total, dof, groups = total + statistic, dof + df, groups + 1
    assert groups > 45 and chi2.sf(total, dof) > 0.01, (total, dof, groups)


def test_names_counts_and_domains_equal_the_official_graph(real_data):
    official = RecipeBook.load(real_data / "textcraft_synth" / "synth_recipes.jsonl")
    ours = generate_recipes(1)
    assert {i: (r.tier, r.domain) for i, r in ours.recipes.items()} == {
        i: (r.tier, r.domain) for i, r in official.recipes.items()
    }
    assert set(official.base_items) == set(ours.base_items) - {"raw_o6", "raw_t2"}  # in no recipe of that seed
    seeds = json.loads((real_data / "oracles" / "textcraft_stats.json").read_text())["seeds"]
    for seed in ORACLE_SEEDS:
        assert seeds[seed]["distinct_items_per_tier"] == {str(tier): n for tier, n in PER_TIER.items()}


def test_task_statistics_agree_with_the_official_generator(real_data, book, tasks):
    """Means over tasks vary from graph to graph; our three graphs must lie within 15 % of the official three, and the
    count of distinct crafts, which every limit of the agents hangs on, within 10 %."""
    seeds = json.loads((real_data / "oracles" / "textcraft_stats.json").read_text())["seeds"]
    official = {seed: seeds[seed]["tasks"]["train"] for seed in ORACLE_SEEDS}
    books = {seed: generate_recipes(seed) for seed in (1, 2)} | {42: book}
    graphs = {seed: generate_tasks(books[seed], seed, 1_500, 0)[0] for seed in (1, 2)} | {42: tasks["train"]}
    for difficulty in TIERS:
        counts = Counter(n for task in graphs[42] if task.difficulty == difficulty for n in task.target_items.values())
        assert counts == {int(n): tasks for n, tasks in official["42"][difficulty]["target_count"].items()}
        rows = []
        for seed, train in graphs.items():
            for task in (t for t in train if t.difficulty == difficulty):
                needed = naive_requirement(books[seed], task.target_items)
                held = sum(task.initial_inventory[name] for name in needed)
                spent = [pair for step in task.gold_trajectory for pair in step.ingredients.items()]
                used = sum(n for item, n in spent if books[seed].is_base(item))
                rows.append(
                    {
                        "gold_craft_actions": len(task.gold_trajectory),
                        "fewest_recipe_applications": sum(step.times for step in task.gold_trajectory),
                        "inventory_kinds": len(task.initial_inventory),
                        "inventory_items": sum(task.initial_inventory.values()),
                        "share_of_needed_base_items_really_used": used / held,
                    }
                )
        for name in rows[0]:
            ours = mean(row[name] for row in rows)
            theirs = mean(official[seed][difficulty][name]["mean"] for seed in ORACLE_SEEDS)
            assert ours == pytest.approx(theirs, rel=0.1 if name == "gold_craft_actions" else 0.15), (difficulty, name)


# --- solver ----------------------------------------------------------------------------------------------------------


def test_solve_orders_each_total_once():
    """5 ladders: 10 sticks = 4 x 3, hence 8 + 5 = 13 planks = 4 x 4, hence 4 logs (rounding per path would take 5)."""
    assert solve(small_book(), {"ladder": 5}, {"log": 4}) == [
        CraftAction("plank", 4, {"log": 4}, 16),
        CraftAction("stick", 4, {"plank": 8}, 12),
        CraftAction("ladder", 5, {"stick": 10, "plank": 5}, 5),
    ]


def test_solve_uses_held_intermediates_but_not_held_targets():
    book = small_book()
    plan = solve(book, {"ladder": 1}, {"stick": 2, "plank": 1, "ladder": 7})
    assert plan == [CraftAction("ladder", 1, {"stick": 2, "plank": 1}, 1)]
    # sticks are a target too: the two held ones may not go into the ladder, or the gain would be one short
    plan = solve(book, {"ladder": 1, "stick": 4}, {"stick": 2, "plank": 5})
    assert plan[0] == CraftAction("stick", 2, {"plank": 4}, 6)


def test_solve_says_why_not():
    with pytest.raises(UserError, match="5 of the base item 'log' are needed, 3 are held"):
        solve(small_book(), {"plank": 20}, {"log": 3})
    with pytest.raises(UserError, match="'log' has no recipe"):
        solve(small_book(), {"log": 1}, {"log": 3})
    with pytest.raises(UserError, match="'zz9' has no recipe"):
        solve(small_book(), {"zz9": 1}, {})


def test_naive_requirement_ignores_multiplicity():
    """1 ladder = 2 sticks + 1 plank = 2*2 + 1 planks = 5 logs, though 2 logs would do."""
    assert naive_requirement(small_book(), {"ladder": 1}) == {"log": 5}
    assert naive_requirement(small_book(), {"ladder": 3, "log": 2}) == {"log": 17}


def test_circular_recipes_are_refused():
    with pytest.raises(UserError, match="circular .*ingot.*block|circular .*block.*ingot"):
        RecipeBook({"ingot": Recipe({"block": 1}, 9, 1, "m"), "block": Recipe({"ingot": 9}, 1, 2, "m")})


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_tasks_exhaust_the_pool_with_the_published_totals(tasks):
    for split, totals in TASKS.items():
        assert Counter(task.difficulty for task in tasks[split]) == totals
        pairs = [tuple(task.target_items.items()) for task in tasks[split]]
        assert len(set(pairs)) == len(pairs) == sum(totals.values()) and all(len(pair) == 1 for pair in pairs)
        assert [task.id for task in tasks[split][:2]] == [f"textcraft_synth.{split}.0", f"textcraft_synth.{split}.1"]
    targets = {split: {item for task in tasks[split] for item in task.target_items} for split in tasks}
    assert not targets["train"] & targets["val"]


def test_every_task_is_solvable_and_its_gold_replays(book, tasks):
    for task in tasks["train"] + tasks["val"]:
        assert replay(book, task), task.id
        assert task.num_craft_steps == len(task.gold_trajectory) == len({step.item for step in task.gold_trajectory})


def test_inventories_follow_the_rule(book, tasks):
    distractors = Counter()
    for task in tasks["val"]:
        needed = naive_requirement(book, task.target_items)
        for name, n in needed.items():
            assert n <= task.initial_inventory[name] <= n + max(1, n // 2), task.id
        rest = {name: n for name, n in task.initial_inventory.items() if name not in needed}
        assert len(rest) <= 3 and all(book.is_base(name) and 1 <= n <= 5 for name, n in rest.items())
        distractors.update(rest)
        ((item, count),) = task.target_items.items()
        assert difficulty_of(book.tier(item)) == task.difficulty and task.max_depth == book.tier(item)
        assert 1 <= count <= MAX_COUNT[task.difficulty] and task.goal == goal_text(task.target_items)
    assert len(distractors) == 50  # from the whole world, not only from the target's domain


def test_sizes_bound_the_tasks_in_the_published_mix(book, tasks):
    train, val = generate_tasks(book, 42, train_size=100, val_size=1_000)
    assert Counter(task.difficulty for task in train) == {"easy": 25, "medium": 35, "hard": 25, "extreme": 15}
    assert val == tasks["val"]  # the validation tasks do not depend on how many training tasks are made
    held_out = {item for task in tasks["val"] for item in task.target_items}
    assert not held_out & {item for task in train for item in task.target_items}


def test_difficulty_names():
    names = [difficulty_of(tier) for tier in range(14)]
    assert names == ["unknown"] * 2 + ["easy"] * 2 + ["medium"] * 3 + ["hard"] * 3 + ["extreme"] * 3 + ["unknown"]


# --- files -----------------------------------------------------------------------------------------------------------


def test_saving_and_loading_is_loss_free(book, tmp_path):
    book.save(tmp_path / "a.jsonl")
    again = RecipeBook.load(tmp_path / "a.jsonl")
    assert again.recipes == book.recipes and again.digest() == book.digest()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 1402
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(lines)))
    assert RecipeBook.load(tmp_path / "b.jsonl").digest() == book.digest()
    first = json.loads(lines[0])
    first["result"]["count"] += 1
    (tmp_path / "c.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    assert RecipeBook.load(tmp_path / "c.jsonl").digest() != book.digest()


@pytest.mark.parametrize("name", ["synth_recipes.jsonl", "synth_recipes_committed.jsonl"])
def test_original_recipe_files_load_and_save_to_the_same_recipes(real_data, tmp_path, name):
    original = real_data / "textcraft_synth" / name
    book = RecipeBook.load(original)
    book.save(tmp_path / name)
    assert sorted((tmp_path / name).read_text().splitlines()) == sorted(original.read_text().splitlines())
    assert len(book.recipes) == {"synth_recipes.jsonl": 1402, "synth_recipes_committed.jsonl": 382}[name]


GOOD = {
    "type": "minecraft:crafting_shapeless",
    "ingredients": [{"item": "synth:m0_ore"}, {"item": "synth:m0_ore"}],
    "result": {"item": "synth:m0_i1", "count": 4},
    "synth_metadata": {"depth": 1, "domain": "metal"},
}


@pytest.mark.parametrize(
    ("second_line", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected one recipe object, found list"),
        (json.dumps(GOOD), "a second recipe for 'm0_i1'"),
        (json.dumps(GOOD | {"type": "minecraft:crafting_shaped"}), "recipe type 'minecraft:crafting_shaped'"),
        (json.dumps(GOOD | {"ingredients": []}), "'ingredients' must be a non-empty list"),
        (json.dumps(GOOD | {"ingredients": ["synth:m0_ore"]}), 'an ingredient must be like .* found "synth:m0_ore"'),
        (json.dumps(GOOD | {"ingredients": [{"item": "m0_ore"}]}), "an ingredient must be like"),
        (json.dumps(GOOD | {"result": {"item": "synth:b"}}), "result count of 'b' must be a positive"),
        (json.dumps(GOOD | {"result": {"item": "synth:b", "count": True}}), "result count of 'b' must be a positive"),
        (json.dumps(GOOD | {"result": None}), "'result' must be like"),
        (json.dumps(GOOD | {"result": {"item": "synth:b", "count": 1}, "synth_metadata": {}}), "must hold a 'depth'"),
    ],
)
def test_a_bad_recipe_line_is_one_sentence_with_file_and_line(tmp_path, second_line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + second_line + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl, line 2: .*{says}") as error:
        RecipeBook.load(path)
    assert "\n" not in str(error.value)


def test_bad_recipe_files(tmp_path):
    with pytest.raises(UserError, match="Cannot read the recipe file .*none.jsonl.*No such file"):
        RecipeBook.load(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UserError, match="empty.jsonl' is empty"):
        RecipeBook.load(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        RecipeBook.load(tmp_path / "binary.jsonl")
    loop = GOOD | {"ingredients": [{"item": "synth:m0_i1"}]}
    (tmp_path / "loop.jsonl").write_text(json.dumps(loop))
    with pytest.raises(UserError, match=r"loop\.jsonl: The recipes are circular \(m0_i1 -> m0_i1\)"):
        RecipeBook.load(tmp_path / "loop.jsonl")
