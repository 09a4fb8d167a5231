"""The TextCraft-Synth world against the original files and the recorded transcripts of the released environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import UserError
from lib.rao.recipes import CraftAction, Recipe, RecipeBook, Task, generate_recipes, generate_tasks, solve
from lib.rao.textcraft import World, achieved, goal_text, load_tasks, parse_goal, replay, save_tasks

BOOK = RecipeBook(
    {
        "t7_i1_17": Recipe({"raw_t3": 2}, 2, 1, "tech"),
        "t1_i2": Recipe({"t7_i1_17": 1, "raw_t0": 2}, 3, 2, "tech"),
    }
)

# Where the released environment and ours differ on purpose. Everything not named here is compared, call by call.
DEVIATIONS = {
    "probe info_unhashable, info_none": "get_info raises TypeError in the agent's code there; here it returns an error "
    "text, as craft does for bad arguments",
    "return text of launch_subagent (all kinds)": "the transcripts are of the shared-budget variant, whose text ends "
    "with a budget note; effects and verdicts of the children are compared, the text belongs to the agent loop",
    "kinds launch_over_budget, grandchild_over_child_budget": "a launch is refused for want of shared steps; the "
    "depth-aware variant knows only a depth cap and each agent's own steps",
    "kinds launch_zero_steps, launch_negative_steps": "num_steps is no argument of the depth-aware launch",
    "kind launch_list_targets": "raises AttributeError in the parent there; refusing it is the agent loop's part",
    "kind launch_empty_targets": "the child is graded on its parent's targets there; the targets are an input here",
    "step and trajectory rewards": "the per-step bonus miscounts parallel children; rewards are computed on the tree",
}


# --- replay of the original gold trajectories ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original_book(real_data: Path) -> RecipeBook:
    return RecipeBook.load(real_data / "textcraft_synth" / "synth_recipes.jsonl")


@pytest.mark.parametrize(("split", "number"), [("train", 300), ("val", 120)])
def test_all_original_gold_trajectories_replay_to_success(real_data, original_book, split, number):
    tasks = load_tasks(real_data / "textcraft_synth" / f"textcraft_synth_{split}.jsonl", original_book)
    assert len(tasks) == number and all(replay(original_book, task) for task in tasks)
    for task in tasks:
        assert task.max_steps == 75 and parse_goal(task.goal) == task.target_items
        plan = solve(original_book, task.target_items, task.initial_inventory)
        assert len(plan) == task.num_craft_steps == len(task.gold_trajectory)
        assert sum(step.times for step in plan) <= sum(step.times for step in task.gold_trajectory)


def test_original_task_files_are_written_back_byte_for_byte(real_data, tmp_path):
    original = real_data / "textcraft_synth" / "textcraft_synth_val.jsonl"
    save_tasks(load_tasks(original), tmp_path / "val.jsonl")
    assert (tmp_path / "val.jsonl").read_bytes() == original.read_bytes()


def test_difficulty_and_depth_are_filled_in_from_the_recipes(real_data, original_book, tmp_path):
    original = real_data / "textcraft_synth" / "textcraft_synth_val.jsonl"
    rows = [json.loads(line) for line in original.read_text().splitlines()]
    for row in rows:
        for field in ("difficulty", "max_depth", "num_craft_steps"):
            del row["misc"][field]
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_tasks(tmp_path / "bare.jsonl", original_book) == load_tasks(original, original_book)
    assert {task.difficulty for task in load_tasks(tmp_path / "bare.jsonl")} == {"unknown"}


def test_a_gold_trajectory_that_goes_wrong_is_no_success():
    task = Task("x", "", {"t1_i2": 3}, {"raw_t3": 2, "raw_t0": 2}, "easy", 2, 2)
    with pytest.raises(UserError, match="Task 'x' has no gold trajectory"):
        replay(BOOK, task)
    good = solve(BOOK, task.target_items, task.initial_inventory)
    for plan, success in ((good, True), (good[::-1], False), (good[:1], False), ([], False)):
        task.gold_trajectory = plan
        assert replay(BOOK, task) is success


# --- replay of the recorded transcripts ------------------------------------------------------------------------------


def test_transcripts_replay_with_equal_effects_and_verdicts(real_data, original_book):
    """Every call of all 92 episodes: same result, same inventory after it; every agent: same verdict."""
    lines = (real_data / "oracles" / "textcraft_transcripts.jsonl").read_text().splitlines()
    counts = {"episodes": 0, "calls": 0, "verdicts": 0, "succeeded": 0}
    for row in map(json.loads, lines):
        verdicts, calls = replay_transcript(original_book, row)
        assert verdicts == official_verdicts(row), row["id"]
        counts["episodes"] += 1
        counts["calls"] += calls
        counts["verdicts"] += len(verdicts)
        counts["succeeded"] += sum(verdicts.values())
    assert counts == {"episodes": 92, "calls": 722, "verdicts": 126, "succeeded": 81}


def children_in_order(row: dict) -> dict[str, dict]:
    """Agent name -> its recorded trajectory (the transcripts name agents by path, the trajectories by number)."""
    root_only = {"n": 0, "parent": None, **row["final"], "target_items": row["target_items"]}
    trajectories = row.get("trajectories") or [root_only]
    names: dict[int, str] = {}
    for t in trajectories:
        siblings = sum(other["parent"] == t["parent"] for other in trajectories[: t["n"]])
        names[t["n"]] = "root" if t["parent"] is None else f"{names[t['parent']]}.{siblings + 1}"
    return {names[t["n"]]: t for t in trajectories}


def official_verdicts(row: dict) -> dict[str, bool]:
    verdicts = {name: bool(t["success"]) for name, t in children_in_order(row).items()}
    assert verdicts["root"] == row["final"]["success"]
    return verdicts


def within(agent: str, ancestor: str) -> bool:
    return agent == ancestor or agent.startswith(ancestor + ".")


def replay_transcript(book: RecipeBook, row: dict) -> tuple[dict[str, bool], int]:
    """Run the recorded calls in order of completion; returns each agent's verdict and the number of calls compared."""
    world = World(book, row["initial_inventory"])
    agents = children_in_order(row)
    before: dict[str, dict[str, int]] = {}
    after: dict[str, dict[str, int]] = {}
    messages: dict[str, Any] = dict.fromkeys(agents)
    calls = row["calls"]
    for i, call in enumerate(calls):
        for name in agents:  # an agent starts when it or an agent below it first acts, gathered siblings at once
            if name not in before and any(within(call["agent"], other) for other in start_together(calls, i, name)):
                before[name] = world.view_inventory()
        result, raised, message = run_cell(world, call["call"])
        if message is not None:
            messages[call["agent"]] = message
        after[call["agent"]] = world.view_inventory()
        compare(call, result, raised)
        assert world.inventory == call["inventory_after"], (row["id"], i)
    assert world.inventory == row["final"]["inventory"]
    never = world.view_inventory()  # a child that never acted has no success, whatever the inventories
    return {
        name: achieved(agent["target_items"], before.get(name, never), after.get(name, never), messages[name])
        for name, agent in agents.items()
    }, len(calls)


def start_together(calls: list[dict], now: int, name: str) -> list[str]:
    """The agents whose first action marks the launch of `name`: itself, or all that its parent gathered with it."""
    parent = name.rpartition(".")[0]
    launch = next((c for c in calls[now:] if c["agent"] == parent), None) if parent else None
    if launch is None or "gather" not in launch["call"]:
        return [name]
    return [f"{parent}.{i + 1}" for i in range(launch["call"].count("launch_subagent("))]


def run_cell(world: World, source: str) -> tuple[Any, str | None, Any]:
    """One recorded cell: (value of its last statement, exception class, argument of the last finish)."""
    if "launch_subagent" in source or source == "craft({":  # children act in their own calls; this cell does not parse
        return None, None, None
    messages: list[Any] = []

    def finish(message: Any = "") -> Any:
        messages.append(message)
        return message

    names = {"craft": world.craft, "get_info": world.get_info, "view_inventory": world.view_inventory, "finish": finish}
    head, newline, last = source.rpartition("\n")
    raised = None
    try:
        exec(head, names)
        if last.startswith("raise "):
            exec(last, names)
        result = eval(last.removeprefix("__r = "), names)
    except (TypeError, ValueError) as error:
        result, raised = None, type(error).__name__
    return result, raised, messages[-1] if messages else None


def compare(call: dict, result: Any, raised: str | None) -> None:
    where = (call["agent"], call["call"])
    if "launch_subagent" in call["call"] or call.get("raised") == "error_text":
        return
    if call.get("probe") in ("info_unhashable", "info_none"):
        assert call["raised"] == "TypeError" and result == "Error: get_info takes a list of item names.", where
        return
    assert raised == call.get("raised"), where
    official = call.get("returned")
    if isinstance(official, str) and official.startswith("Error: "):
        assert result.startswith("Error: ") and result.endswith(".") and "\n" not in result, where
    elif made := re.fullmatch(r"Successfully crafted (\d+) (\S+)\(s\)", str(official)):
        assert result == f"Crafted {made[1]} {made[2]}.", where
    else:
        assert result == official, where


def test_the_table_of_deviations_names_things_that_exist(real_data):
    rows = [json.loads(x) for x in (real_data / "oracles" / "textcraft_transcripts.jsonl").read_text().splitlines()]
    kinds = {row["kind"] for row in rows} | {call.get("probe") for row in rows for call in row["calls"]}
    for what in DEVIATIONS:
        if match := re.match(r"(?:kinds?|probe) (.*)", what):
            assert set(match[1].split(", ")) <= kinds, what


# --- the world by hand -----------------------------------------------------------------------------------------------


def test_craft_moves_pieces_and_a_failure_moves_nothing():
    world = World(BOOK, {"raw_t3": 5, "raw_t0": 2, "gone": 0})
    assert world.craft({"raw_t3": 4}, ("t7_i1_17", 4)) == "Crafted 4 t7_i1_17."
    assert world.inventory == {"raw_t3": 1, "raw_t0": 2, "t7_i1_17": 4}
    assert world.craft({"t7_i1_17": 1, "raw_t0": 2}, ("t1_i2", 3)) == "Crafted 3 t1_i2."
    assert world.view_inventory() == {"raw_t3": 1, "t7_i1_17": 3, "t1_i2": 3}  # used-up items disappear


@pytest.mark.parametrize(
    ("ingredients", "target", "says"),
    [
        ({"raw_t3": 2}, ("t7_i1_17", 3), "t7_i1_17 is made in multiples of 2, not 3."),
        ({"raw_t3": 2}, ("t7_i1_17", 4), "4 t7_i1_17 needs 4 raw_t3, not 2."),
        ({"raw_t3": 6}, ("t7_i1_17", 6), "not enough raw_t3 (need 6, have 5)."),
        ({"raw_t3": 2, "raw_t0": 1}, ("t7_i1_17", 2), "t7_i1_17 does not use raw_t0."),
        ({"raw_t0": 2}, ("t1_i2", 3), "t1_i2 also needs t7_i1_17."),
        ({"t7_i1_17": 2, "raw_t0": 4}, ("t1_i2", 6), "not enough t7_i1_17 (need 2, have 0), raw_t0 (need 4, have 1)."),
        ({"x": 1}, ("raw_t3", 1), "no recipe makes raw_t3."),
        ({"raw_t3": 2}, ("t7_i1_17", 2.0), "target count of t7_i1_17 must be an int, got float."),
        ({"raw_t3": 2}, ("t7_i1_17", -2), "target count of t7_i1_17 must be positive, got -2."),
        ({"raw_t3": 0}, ("t7_i1_17", 2), "ingredient count of raw_t3 must be positive, got 0."),
        ({("raw_t3",): 2}, ("t7_i1_17", 2), "ingredient item must be a name, got tuple."),
        ({"raw_t3": 2}, ["t7_i1_17", 2], "target must be a tuple (item, total count)."),
        ({"raw_t3": 2}, (["t7_i1_17"], 2), "target item must be a name, got list."),
        (None, ("t7_i1_17", 2), "ingredients must be a dict, got NoneType."),
    ],
)
def test_craft_errors_name_the_thing(ingredients, target, says):
    world = World(BOOK, {"raw_t3": 5, "raw_t0": 1})
    assert world.craft(ingredients, target) == f"Error: {says}"
    assert world.inventory == {"raw_t3": 5, "raw_t0": 1}


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["t7_i1_17", "raw_t3", "", "zz"]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(JUNK, JUNK)
def test_tools_answer_anything_and_keep_the_inventory_whole(first, second):
    world = World(BOOK, {"raw_t3": 5})
    assert isinstance(world.craft(first, second), str)
    assert isinstance(world.get_info(first), (list, str))
    assert world.inventory in ({"raw_t3": 5}, {"raw_t3": 3, "t7_i1_17": 2}, {"raw_t3": 1, "t7_i1_17": 4})


def test_get_info_by_hand():
    world = World(BOOK, {"raw_o6": 3, "t7_i1_17": 4})
    made, base, distractor, unknown = world.get_info(["t7_i1_17", "raw_t3", "raw_o6", "zz9_i1"])
    assert made == {
        "item": "t7_i1_17",
        "can_craft": True,
        "is_base": False,
        "in_inventory": 4,
        "crafting_depth": 1,
        "recipes": [{"ingredients": {"raw_t3": 2}, "result_count": 2}],
    }
    assert base["is_base"] and not base["can_craft"] and base["recipes"] == [] and base["crafting_depth"] == 0
    assert distractor["is_base"] and distractor["in_inventory"] == 3  # no recipe uses it, yet it is held
    assert not unknown["is_base"] and not unknown["can_craft"]


def test_what_agents_get_is_a_copy():
    world = World(BOOK, start := {"raw_t3": 5})
    world.view_inventory().clear()
    world.get_info(["t7_i1_17"])[0]["recipes"][0]["ingredients"]["raw_t3"] = 1
    world.craft({"raw_t3": 2}, ("t7_i1_17", 2))
    assert world.inventory == {"raw_t3": 3, "t7_i1_17": 2} and start == {"raw_t3": 5}
    assert BOOK.recipes["t7_i1_17"].ingredients == {"raw_t3": 2}


# --- the verifier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "message", "success"),
    [
        ({}, {"a": 2, "b": 1}, "done", True),
        ({}, {"a": 9, "b": 9}, "done", True),  # more than asked is fine
        ({}, {"a": 1, "b": 1}, "done", False),  # one short
        ({}, {"a": 2}, "done", False),  # one target missing
        ({"a": 5, "b": 1}, {"a": 5, "b": 1}, "I had them", False),  # what was held at the start does not count
        ({"a": 5}, {"a": 7, "b": 1}, "done", True),
        ({}, {"a": 2, "b": 1}, "", False),
        ({}, {"a": 2, "b": 1}, None, False),  # never finished
        ({}, {"a": 2, "b": 1}, 0, False),
        ({}, {"a": 2, "b": 1}, " ", True),
        ({}, {"a": 2, "b": 1}, 7, True),
    ],
)
def test_the_verifier(before, after, message, success):
    assert achieved({"a": 2, "b": 1}, before, after, message) is success


def test_a_node_without_targets_has_no_success():
    assert achieved({}, {}, {"a": 1}, "done") is False


# --- goals and files -------------------------------------------------------------------------------------------------


def test_goals_by_hand():
    text = "Craft the following items: 2x a7_i2_17, 1x m0_i3"
    assert goal_text({"a7_i2_17": 2, "m0_i3": 1}) == text and parse_goal(text) == {"a7_i2_17": 2, "m0_i3": 1}
    assert parse_goal(text + "\n\nContext: use your 99x t7_i1_17, 1x b") == {"a7_i2_17": 2, "m0_i3": 1}
    for bad in ("", "Do nothing", "Craft the following items: ", "Craft the following items: m0_i3", "items: 0x a"):
        with pytest.raises(UserError, match="names no targets"):
            parse_goal(bad)


@given(st.dictionaries(st.from_regex(r"[a-z0-9_]+", fullmatch=True), st.integers(1, 10**6), min_size=1, max_size=5))
def test_goals_are_read_back(targets):
    assert parse_goal(goal_text(targets)) == targets


def test_generated_tasks_are_read_back(tmp_path):
    book = generate_recipes(7, items_per_domain_tier=5)
    tasks, _ = generate_tasks(book, 7, 40, 0)
    save_tasks(tasks, tmp_path / "tasks.jsonl")
    assert load_tasks(tmp_path / "tasks.jsonl", book) == tasks and len(tasks) == 40


GOLD = {"action": "craft", "target": ["t7_i1_17", 1], "ingredients": {"raw_t3": 2}, "result_count": 2}
ROW = {"id": "a", "misc": {"target_items": {"t7_i1_17": 2}, "initial_inventory": {"raw_t3": 2, "raw_o6": 1}}}


def with_misc(**fields: Any) -> dict:
    return ROW | {"id": "b", "misc": ROW["misc"] | fields}


def test_only_targets_and_inventory_are_required(tmp_path):
    (tmp_path / "min.jsonl").write_text(json.dumps(ROW) + "\n\n" + json.dumps(with_misc(gold_trajectory=[GOLD])))
    plain, gold = load_tasks(tmp_path / "min.jsonl", BOOK)
    goal, inventory = "Craft the following items: 2x t7_i1_17", {"raw_t3": 2, "raw_o6": 1}
    assert plain == Task("a", goal, {"t7_i1_17": 2}, inventory, "unknown", 1, None, None, 75)
    assert gold.gold_trajectory == [CraftAction("t7_i1_17", 1, {"raw_t3": 2}, 2)] and gold.num_craft_steps == 1


@pytest.mark.parametrize(
    ("second_line", "says"),
    [
        ('{"id": ', "not valid JSON"),
        ("3", "expected one task object, found int"),
        (json.dumps(ROW), "a second task with the id 'a'"),
        (json.dumps({"id": "b"}), "the field 'target_items' is missing"),
        (json.dumps({"misc": ROW["misc"]}), "the field 'id' is missing"),
        (json.dumps(ROW | {"id": 5}), "'id' is 5; it must be of type str"),
        (json.dumps({"id": "b", "misc": {"target_items": {"a": 1}}}), "the field 'initial_inventory' is missing"),
        (json.dumps(ROW | {"misc": []}), r"'misc' is \[\]; it must be of type dict"),
        (json.dumps(with_misc(target_items={})), "'target_items' is empty"),
        (json.dumps(with_misc(target_items={"t7_i1_17": 0})), "'target_items' must be .* at least 1"),
        (json.dumps(with_misc(initial_inventory={"raw_t3": 1.5})), "'initial_inventory' must be .* at least 0"),
        (json.dumps(with_misc(initial_inventory={"raw_t3": True})), "'initial_inventory' must be"),
        (json.dumps(with_misc(difficulty=3)), "'difficulty' is 3; it must be of type str"),
        (json.dumps(with_misc(gold_trajectory=[{"target": ["a"]}])), r"must have a 'target' \[item, times\]"),
        (json.dumps(with_misc(gold_trajectory=[GOLD | {"result_count": 0}])), "a positive 'result_count'"),
        (json.dumps(with_misc(gold_trajectory=[GOLD | {"ingredients": None}])), "'ingredients' must be an object"),
        (json.dumps(with_misc(target_items={"zz9_i1": 1})), "unknown item 'zz9_i1'"),
        (json.dumps(with_misc(gold_trajectory=[GOLD | {"ingredients": {"zz": 1}}])), "unknown item 'zz'"),
        (json.dumps(with_misc(target_items={"raw_t3": 1})), "the target 'raw_t3' has no recipe"),
        (json.dumps(with_misc(target_items={"raw_o6": 1})), "the target 'raw_o6' has no recipe"),
        (json.dumps(ROW | {"id": "b", "max_steps": 0}), "'max_steps' is 0"),
    ],
)
def test_a_bad_task_line_is_one_sentence_with_file_and_line(tmp_path, second_line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + second_line + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl, line 2: .*{says}") as error:
        load_tasks(path, BOOK)
    assert "\n" not in str(error.value)


def test_bad_task_files(tmp_path):
    with pytest.raises(UserError, match="Cannot read the task file .*none.jsonl.*No such file"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="empty.jsonl' is empty"):
        load_tasks(tmp_path / "empty.jsonl")
