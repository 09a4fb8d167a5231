"""TextCraft-Synth as agents see it: prompts, delegation by targets, the shared inventory, verdicts nobody can fake."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import UserError
from lib.rao.crafting import CraftEpisode, CraftEpisodes
from lib.rao.recipes import Recipe, RecipeBook, Task, goal_text
from lib.rao.rewards import node_rewards
from lib.rao.textcraft import parse_goal
from lib.sampling.scripted import ScriptedSampler
from lib.sandbox.repl import ReplPool, ToolError
from lib.tree import Tree
from tests.micro import chat, code, observed, play

BOOK = RecipeBook(
    {
        "m1_i1": Recipe({"m0_ore": 2}, 2, 1, "metal"),
        "c1_i1": Recipe({"c0_ore": 1}, 1, 1, "crystal"),
        "m2_i2": Recipe({"m1_i1": 1, "c1_i1": 1}, 1, 2, "metal"),
    }
)
TASK = Task("t.0", goal_text({"m2_i2": 2}), {"m2_i2": 2}, {"m0_ore": 9, "c0_ore": 9, "m1_i1": 1}, "easy", 2, 4)
M1 = "craft({'m0_ore': 2}, ('m1_i1', 2))"
C1 = "craft({'c0_ore': 2}, ('c1_i1', 2))"
M2 = "craft({'m1_i1': 2, 'c1_i1': 2}, ('m2_i2', 2))"
DONE = code("finish('done')")


@pytest.fixture(scope="module")
def pool() -> Iterator[ReplPool]:
    with ReplPool() as made:
        yield made


def craft(pool: ReplPool, plays: dict[str, list[str]], **config: Any) -> Tree:
    """One tree of scripted agents; the actions of a node are found by its targets, written like "1 m1_i1, 2 c1_i1"."""

    def script(prompt: str, rng: Any) -> Iterator[str]:
        goal = parse_goal(prompt.partition("<|user|>")[2].partition("\nDelegation")[0])
        yield from (action for action in plays[", ".join(f"{count} {item}" for item, count in goal.items())])

    return play({}, CraftEpisode(BOOK, TASK), pool=pool, sampler=ScriptedSampler(script, chat()), **config)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_short_prompt_holds_the_goal_and_whether_delegation_exists():
    episode = CraftEpisode(BOOK, TASK)
    yes, no = (episode.prompt(episode.root(), recursive) for recursive in (True, False))
    assert yes == "Craft the following items: 2x m2_i2\nDelegation: yes"
    assert no == yes.replace("yes", "no")


def test_full_prompt_names_every_tool_and_delegation_only_where_it_exists():
    episode = CraftEpisode(BOOK, TASK, style="full")
    yes, no = (episode.prompt(episode.root(), recursive) for recursive in (True, False))
    for words in ("get_info", "craft", "view_inventory", "finish", "<python>", "Goal: Craft the following items: 2x"):
        assert words in yes and words in no
    assert "launch_subagent" in yes and "gather" in yes
    assert "launch" not in no and "gather" not in no and "elegat" not in no


def test_tools_of_the_prompt_are_those_that_exist(pool: ReplPool):
    episode = CraftEpisode(BOOK, TASK)
    assert set(episode.tools(episode.root())) == {"get_info", "craft", "view_inventory"}


def test_unknown_style_is_refused():
    with pytest.raises(UserError, match="prompt style 'loud': choose 'short' or 'full'"):
        CraftEpisode(BOOK, TASK, style="loud")


# --- a whole tree by hand ---------------------------------------------------------------------------------------------


def test_single_agent_solves_the_task_with_the_shown_recipes(pool: ReplPool):
    acts = [code("print(get_info(['m2_i2']))"), code(M1, C1, f"print({M2})"), DONE]
    tree = craft(pool, {"2 m2_i2": acts}, recursive=False)
    assert "'ingredients': {'m1_i1': 1, 'c1_i1': 1}" in observed(tree)[0]
    assert observed(tree)[1] == "Crafted 2 m2_i2." and tree.root.info["verified"] == 1.0


def test_children_craft_into_the_shared_inventory_and_are_judged_by_their_own_targets(pool: ReplPool):
    launch = "await asyncio.gather(launch_subagent({'m1_i1': 1}), launch_subagent({'c1_i1': 2}))"
    plays = {
        "2 m2_i2": [code(launch, f"print({M2})", "print(view_inventory())"), DONE],
        "1 m1_i1": [code(M1), DONE],
        "2 c1_i1": [code("craft({'c0_ore': 1}, ('c1_i1', 1))"), DONE],  # one short
    }
    tree = node_rewards(craft(pool, plays), lam=0.4)
    assert observed(tree)[0].startswith("Error: not enough c1_i1 (need 2, have 1).")
    assert [n.success for n in tree] == [0.0, 1.0, 0.0]
    assert tree.root.reward == pytest.approx(0.4 * 0.5)
    assert [n.info.get("parallel") for n in tree] == [None, True, True]


def test_what_was_held_at_the_launch_does_not_count(pool: ReplPool):
    """The parent holds one m1_i1 already; a child that makes nothing has not gained it."""
    plays = {"2 m2_i2": [code("await launch_subagent({'m1_i1': 1})"), DONE], "1 m1_i1": [DONE]}
    assert craft(pool, plays).nodes["0.0"].info["verified"] == 0.0


def test_gathered_children_all_count_from_the_moment_of_their_launch(pool: ReplPool):
    """The first makes two pieces before the second begins to work; both were launched before that."""
    launch = "await asyncio.gather(launch_subagent({'m1_i1': 2}), launch_subagent({'m1_i1': 1}))"
    plays = {"2 m2_i2": [code(launch), DONE], "2 m1_i1": [code(M1), DONE], "1 m1_i1": [DONE]}
    tree = craft(pool, plays)
    verdicts = [tree.nodes[f"0.{k}"].info["verified"] for k in (0, 1)]
    assert verdicts == [1.0, 1.0], "a sibling's craft counts, as published"


def test_a_child_that_spends_what_it_was_asked_for_has_not_gained_it(pool: ReplPool):
    launch = "await launch_subagent({'m1_i1': 2, 'c1_i1': 2})"
    plays = {"2 m2_i2": [code(launch), DONE], "2 m1_i1, 2 c1_i1": [code(M1, C1, f"print({M2})"), DONE]}
    tree = craft(pool, plays)
    assert tree.nodes["0.0"].info["verified"] == 0.0 and tree.root.info["verified"] == 1.0


@pytest.mark.parametrize("message", ["''", "None", "0", "[]", "False"])
def test_an_empty_message_is_no_success_even_if_everything_was_made(pool: ReplPool, message: str):
    tree = craft(pool, {"2 m2_i2": [code(M1, C1, M2), code(f"finish({message})")]})
    assert tree.root.status == "finished" and tree.root.info["verified"] == 0.0


def test_context_of_a_launch_is_read_below_the_goal_and_not_verified(pool: ReplPool):
    episode = CraftEpisode(BOOK, TASK)
    assignment = episode.delegate({"m1_i1": 1}, "use m0_ore\nCraft the following items: 9x c1_i1")
    assert assignment.goal.split("\n")[:2] == ["Craft the following items: 1x m1_i1", "use m0_ore"]
    assert parse_goal(assignment.goal) == {"m1_i1": 1} == assignment.data["targets"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{}", "takes the targets as a dict"),
        ("[('m1_i1', 1)]", "takes the targets as a dict"),
        ("'1x m1_i1'", "takes the targets as a dict"),
        ("{'m1_i1': 0}", "'m1_i1': 0 is not an item with a positive count"),
        ("{'m1_i1': -1}", "'m1_i1': -1 is not"),
        ("{'m1_i1': True}", "'m1_i1': True is not"),
        ("{'m1_i1': 1.5}", "'m1_i1': 1.5 is not"),
        ("{'m1_i1': float('nan')}", "'m1_i1': nan is not"),
        ("{7: 1}", "7: 1 is not"),
        ("", "missing 1 required positional argument: 'targets'"),
        ("{'m1_i1': 1}, budget=3", "unexpected keyword argument 'budget'"),
        ("{'m1_i1': 10 ** 2000}", "integer of more than 4096 bits"),
    ],
)
def test_launches_without_sensible_targets_are_errors_for_the_agent(pool: ReplPool, arguments: str, words: str):
    tree = craft(pool, {"2 m2_i2": [code(f"await launch_subagent({arguments})"), DONE]})
    assert words in observed(tree)[0] and len(tree) == 1


@pytest.mark.parametrize(
    "call",
    ["craft({'m0_ore': 10 ** 1000}, ('m1_i1', 10 ** 1000))", "craft(None, None)", "craft({}, ('m1_i1',))",
     "get_info(7)", "craft({'m0_ore': 2}, ['m1_i1', 2])", "get_info([['m1_i1']])", "get_info([None, 1.5, ('a',)])",
     "get_info('m1')",
     "craft({'m0_ore': float('nan')}, ('m1_i1', 2))", "craft({1: 2}, ('m1_i1', 2))"],
)  # fmt: skip
def test_tools_answer_every_plain_argument_and_change_nothing(pool: ReplPool, call: str):
    tree = craft(pool, {"2 m2_i2": [code(f"print({call})", "print(view_inventory())"), DONE]})
    assert observed(tree)[0].endswith(str(TASK.initial_inventory))


def test_make_of_episodes_pickles_and_gives_every_tree_a_world_of_its_own():
    make = pickle.loads(pickle.dumps(CraftEpisodes({7: BOOK})))
    one, two = make((7, TASK)), make((7, TASK))
    one.world.craft({"m0_ore": 2}, ("m1_i1", 2))
    assert one.world.view_inventory() != two.world.view_inventory() == TASK.initial_inventory
    assert one.task_id == "t.0"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers()),
    max_leaves=6,
)


@settings(max_examples=150)
@given(ANYTHING, st.booleans())
def test_pitfall_24_the_verifier_is_total_on_whatever_an_agent_finishes_with(message: Any, made: bool):
    """A number in [0, 1] for any value, and never a success that was not crafted."""
    episode = CraftEpisode(BOOK, TASK)
    root = episode.root()
    if made:
        for ingredients, target in (({"m0_ore": 2}, ("m1_i1", 2)), ({"c0_ore": 2}, ("c1_i1", 2)),
                                    ({"m1_i1": 2, "c1_i1": 2}, ("m2_i2", 2))):  # fmt: skip
            assert episode.world.craft(ingredients, target).startswith("Crafted")
    verdict = episode.verify(root, message)
    assert verdict == float(made and bool(message))


@settings(max_examples=150)
@given(ANYTHING, ANYTHING)
def test_pitfall_24_delegation_is_total_a_goal_or_a_word_to_the_agent(targets: Any, context: Any):
    episode = CraftEpisode(BOOK, TASK)
    try:
        assignment = episode.delegate(targets, context)
    except ToolError as error:
        assert str(error).startswith("launch_subagent")
    else:
        assert isinstance(assignment.goal, str) and episode.verify(assignment, "done") == 0.0
