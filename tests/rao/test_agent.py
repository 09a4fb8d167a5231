"""The agent loop with scripted agents: recursion, bounds, refusals, what parents and children see of each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import networkx as nx
import pytest

from lib.errors import UserError
from lib.rao.agent import NO_CODE, AgentConfig, Play, Session, rollout, rollouts
from lib.rao.rewards import node_rewards
from lib.sampling import Completion, RngKey, SamplingParams, run_sync
from lib.sampling.scripted import ScriptedSampler
from lib.sandbox.repl import ReplPool
from lib.tree import Tree
from tests.micro import WordEpisode, chat, code, observed, play, script

END = code("finish('')")


@pytest.fixture(scope="module")
def pool() -> Iterator[ReplPool]:
    with ReplPool() as made:
        yield made


def launch(goal: str) -> str:
    return f"launch_subagent('{goal}')"


# --- recursion --------------------------------------------------------------------------------------------------------


def test_pitfall_29_children_of_children_launch_and_the_tree_shows_three_levels(pool: ReplPool):
    plays = {
        "root": [code(f"print(await {launch('a')})"), code("finish('ROOT')")],
        "a": [code(f"x = await {launch('b')}"), code("finish('A' if x == 'B' else 'lost')")],
        "b": [code(f"x = await {launch('c')}"), code("finish('B' if x == 'C' else 'lost')")],
        "c": [code("finish('C')")],
    }
    tree = play(plays, pool=pool)
    assert [(n.id, n.depth, n.task) for n in tree] == [("0", 0, "root"), ("0.0", 1, "a"), ("0.0.0", 2, "b"),
                                                       ("0.0.0.0", 3, "c")]  # fmt: skip
    assert tree.depth == 3 and all(n.info["verified"] == 1.0 for n in tree) and observed(tree)[0] == "A"
    assert nx.dag_longest_path_length(tree.to_networkx()) == 3
    assert [line.index(n.id) for n, line in zip(tree, tree.to_text().split("\n"), strict=True)] == [4, 8, 12, 16]


def test_without_a_cap_agents_nest_as_deep_as_they_like(pool: ReplPool):
    plays = {"root": [code(f"print(await {launch('root')})"), code("finish('ROOT')")]}
    tree = play(plays, pool=pool, max_depth=None, max_nodes=41)
    assert tree.depth == 40 and len(tree) == 41


def test_pitfall_28_the_depth_cap_is_counted_by_the_host(pool: ReplPool):
    plays = {"root": [code("max_depth = 99\nlaunch_subagent.depth = -9"), code(f"print(await {launch('root')})"), END]}
    tree = play(plays, pool=pool, max_depth=2)
    assert list(tree.nodes) == ["0", "0.0", "0.0.0"]
    assert observed(tree, "0.0.0")[1] == (
        "No sub-agent was launched: depth 2 is the deepest allowed. Do the work yourself."
    )


def test_depth_cap_of_zero_refuses_every_launch(pool: ReplPool):
    tree = play({"root": [code(f"print(await {launch('a')})"), END]}, pool=pool, max_depth=0)
    assert len(tree) == 1 and observed(tree)[0].startswith("No sub-agent was launched: depth 0")


def test_single_agent_has_no_launch_tool(pool: ReplPool):
    tree = play({"root": [code(f"await {launch('a')}"), END]}, pool=pool, recursive=False)
    assert len(tree) == 1 and observed(tree)[0] == "NameError: name 'launch_subagent' is not defined"


# --- what children get and give ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "as_json", "as_string"),
    [
        ("'text'", "'text'", "'text'"),
        ("", "''", "''"),
        ("7", "7", "'7'"),
        ("None", "None", "'None'"),
        ("{'n': [1, 2.5], 'ok': True}", "{'n': [1, 2.5], 'ok': True}", "\"{'n': [1, 2.5], 'ok': True}\""),
        ("(1, 2)", "[1, 2]", "'(1, 2)'"),
        ("{1: 'one'}", "{'1': 'one'}", "\"{1: 'one'}\""),
        ("float('nan')", "'nan'", "'nan'"),
        ("{3}", "'{3}'", "'{3}'"),
        ("b'raw'", "\"b'raw'\"", "\"b'raw'\""),
    ],
)
def test_finish_values_are_json_values_or_text(pool: ReplPool, given: str, as_json: str, as_string: str):
    plays = {"root": [code(f"x = await {launch('a')}\nprint(repr(x))"), END], "a": [code(f"finish({given})")]}
    assert observed(play(plays, pool=pool))[0] == as_json
    assert observed(play(plays, pool=pool, returns="string"))[0] == as_string


def test_structured_returns_are_values_to_compute_with(pool: ReplPool):
    plays = {
        "root": [code(f"parts = await asyncio.gather({launch('a')}, {launch('b')})",
                      "print(sum(p['n'] for p in parts), parts[0]['names'][-1])"), END],
        "a": [code("finish({'n': 3, 'names': ['x', 'y']})")],
        "b": [code("finish({'n': 4, 'names': []})")],
    }  # fmt: skip
    assert observed(play(plays, pool=pool))[0] == "7 y"


def test_last_finish_counts_and_what_follows_it_in_the_cell_still_runs(pool: ReplPool):
    tree = play({"root": [code("finish('no')", "note('between')", "finish('ROOT')", "note('after')")]},
                episode := WordEpisode(), pool=pool)  # fmt: skip
    assert tree.root.info["verified"] == 1.0 and episode.board == ["between", "after"] and tree.root.turns == 1


def test_finish_counts_even_if_the_cell_fails_after_it(pool: ReplPool):
    tree = play({"root": [code("finish('ROOT')", "1 / 0")]}, pool=pool)
    assert tree.root.status == "finished" and tree.root.info["verified"] == 1.0


def test_children_share_the_world_and_see_what_siblings_did(pool: ReplPool):
    plays = {
        "root": [code("note('root')", f"await {launch('a')}", f"await {launch('b')}", "print(read())"), END],
        "a": [code("note('a')"), END],
        "b": [code("note('b saw ' + ','.join(read()))"), END],
    }
    assert observed(play(plays, pool=pool))[0] == "['root', 'a', 'b saw root,a']"


def test_arguments_of_tools_arrive_as_they_were_written(pool: ReplPool):
    got: list[Any] = []

    def craft(ingredients: dict[str, int], target: tuple[str, int]) -> str:
        got.append((ingredients, target))
        return f"Crafted {target[1]} {target[0]}."

    episode = WordEpisode(tools={"craft": craft})
    tree = play({"root": [code("k = 2", "print(craft({'raw_o1': 2 * k}, ('o1_i1', 3 * k)))"), END]}, episode, pool=pool)
    assert got == [({"raw_o1": 4}, ("o1_i1", 6))] and type(got[0][1]) is tuple
    assert observed(tree)[0] == "Crafted 6 o1_i1."


# --- sequence and parallel --------------------------------------------------------------------------------------------


def flags(tree: Tree) -> dict[str, bool]:
    return {n.id: bool(n.info.get("parallel")) for n in tree if n.parent}


def test_launches_in_sequence_are_not_parallel_and_gathered_ones_are(pool: ReplPool):
    two = {"a": [code("x = 1"), END], "b": [code("x = 1"), END]}
    one_by_one = {"root": [code(f"await {launch('a')}", f"await {launch('b')}"), END], **two}
    together = {"root": [code(f"await asyncio.gather({launch('a')}, {launch('b')})"), END], **two}
    alone = {"root": [code(f"await asyncio.gather({launch('a')})"), END], **two}
    assert flags(play(one_by_one, pool=pool)) == {"0.0": False, "0.1": False}
    assert flags(play(together, pool=pool)) == {"0.0": True, "0.1": True}
    assert flags(play(alone, pool=pool)) == {"0.0": False}


def test_gathered_children_are_parallel_even_if_the_first_is_done_at_once(pool: ReplPool):
    calls = ", ".join([launch("a")] * 3)
    plays = {"root": [code(f"await asyncio.gather({calls})", f"await {launch('a')}"), END], "a": [END]}
    assert flags(play(plays, pool=pool)) == {"0.0": True, "0.1": True, "0.2": True, "0.3": False}


def test_children_remember_the_turn_that_launched_them(pool: ReplPool):
    plays = {"root": [code("x = 1"), code(f"await {launch('a')}"), code("x = 2"), code(f"await {launch('a')}"), END],
             "a": [END]}  # fmt: skip
    tree = play(plays, pool=pool)
    assert [tree.nodes[name].info["turn"] for name in ("0.0", "0.1")] == [2, 4]


def test_moments_of_actions_lie_between_start_and_end(pool: ReplPool):
    plays = {"root": [code(f"await {launch('a')}"), END], "a": [code("x = 1"), END]}
    tree = play(plays, pool=pool)
    for node in tree:
        stamps = [node.started, *node.info["times"], node.ended]
        assert len(node.info["times"]) == node.turns and stamps == sorted(stamps)
    assert tree.root.started <= tree.nodes["0.0"].started and tree.nodes["0.0"].ended <= tree.root.ended


# --- ends -------------------------------------------------------------------------------------------------------------


def test_child_out_of_steps_is_told_as_text(pool: ReplPool):
    plays = {"root": [code(f"print(await {launch('a')})"), END], "a": [code(f"x = {k}") for k in range(9)]}
    tree = play(plays, pool=pool, max_steps=3)
    assert tree.nodes["0.0"].status == "out_of_steps" and tree.nodes["0.0"].turns == 3
    assert observed(tree)[0] == "The sub-agent did not finish within 3 steps."


def test_child_whose_context_is_full_is_kept_with_no_success(pool: ReplPool):
    plays = {"root": [code(f"print(await {launch('a')})"), code("finish('ROOT')")],
             "a": [code("print('x' * 900)"), code("finish('A')")]}  # fmt: skip
    tree = node_rewards(play(plays, pool=pool, context=500), lam=1.0)
    child = tree.nodes["0.0"]
    assert child.status == "context_full" and len(child.ids) <= 500 and child.turns == 1
    assert observed(tree)[0] == "The sub-agent failed before finishing."
    assert child.success == 0.0 and tree.root.reward == 1.0 + 1.0 * 0.0


def test_an_action_that_fills_the_context_still_finishes_if_it_says_so(pool: ReplPool):
    prompt = len(chat().prompt("Goal: root")[0])
    action = code("finish('ROOT')")
    need = len(chat().tokenizer.encode(action)) + 1
    tree = play({"root": [action]}, pool=pool, context=prompt + need)
    assert tree.root.status == "finished" and len(tree.root.ids) == prompt + need
    tree = play({"root": [action]}, pool=pool, context=prompt + need - 1, max_steps=5)
    assert tree.root.status in ("finished", "context_full") and len(tree.root.ids) <= prompt + need - 1


@pytest.mark.parametrize("spare", range(1, 60, 7))
def test_no_node_ever_exceeds_its_context(pool: ReplPool, spare: int):
    prompt = len(chat().prompt("Goal: root")[0])
    tree = play({"root": [code("print('some text')")] * 9}, pool=pool, context=prompt + spare, stuck_after=99)
    assert tree.root.status == "context_full" and prompt < len(tree.root.ids) <= prompt + spare


def test_the_same_action_again_and_again_ends_the_node(pool: ReplPool):
    plays = {"root": [code("x = 1"), code("x = 2"), *[code("print('again')")] * 9]}
    tree = play(plays, pool=pool, stuck_after=4)
    assert tree.root.status == "error" and tree.root.turns == 6
    assert tree.root.info["reason"] == "the same action again and again"
    alternating = {"root": [code("x = 1"), code("x = 2")] * 5}
    assert play(alternating, pool=pool, max_steps=8).root.status == "out_of_steps"


@pytest.mark.parametrize("action", ["I would rather talk.", "<python>print(1)", "print(1)</python>", ""])
def test_an_action_without_code_is_told_so_and_costs_a_step(pool: ReplPool, action: str):
    tree = play({"root": [action, code("finish('ROOT')")]}, pool=pool)
    assert observed(tree)[0] == NO_CODE and tree.root.turns == 2 and tree.root.info["verified"] == 1.0


def test_thoughts_before_the_code_are_not_run_and_only_the_first_block_is(pool: ReplPool):
    tree = play({"root": ["<thought>1/0</thought>" + code("print('first')") + code("print('second')"), END]}, pool=pool)
    assert observed(tree)[0] == "first"


def test_errors_are_counted(pool: ReplPool):
    tree = play({"root": [code("1 / 0"), code("x = 1"), code("nobody"), END]}, pool=pool)
    assert tree.root.info["errors"] == 2


def test_time_limit_marks_the_tree_as_one_that_may_not_repeat():
    from lib.sandbox.repl import Limits

    with ReplPool(1, Limits(seconds=0.2)) as pool:
        tree = play({"root": [code("while True: pass"), code("finish('ROOT')")]}, pool=pool)
    assert tree.info["timed_out"] is True and tree.root.info["verified"] == 1.0


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_node_cap_refuses_marks_the_tree_and_fails_its_root(pool: ReplPool):
    calls = ", ".join([launch("a")] * 5)
    plays = {"root": [code(f"print(*await asyncio.gather({calls}), sep='|')"), code("finish('ROOT')")],
             "a": [code("finish('A')")]}  # fmt: skip
    tree = play(plays, pool=pool, max_nodes=3)
    refusal = "No sub-agent was launched: 3 agents have worked on this task already."
    assert len(tree) == 3 and observed(tree)[0] == "|".join(["A", "A", *[refusal] * 3])
    assert tree.info["overrun"] is True and tree.root.status == "finished" and tree.root.info["verified"] == 0.0
    assert tree.nodes["0.0"].info["verified"] == 1.0
    assert play(plays, pool=pool, max_nodes=6).root.info["verified"] == 1.0


def test_a_task_that_does_not_fit_a_context_is_refused_and_not_the_parents_end(pool: ReplPool):
    plays = {"root": [code("print(await launch_subagent('x' * 5000))"), code("finish('ROOT')")]}
    tree = play(plays, pool=pool, context=500)
    assert observed(tree)[0] == "No sub-agent was launched: its task does not fit its context of 500 tokens."
    assert len(tree) == 1 and tree.root.info["verified"] == 1.0


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("launch_subagent()", "RuntimeError: launch_subagent: missing 1 required positional argument: 'goal'"),
        ("launch_subagent('a', 'b')", "takes 2 positional arguments but 3 were given"),
        ("launch_subagent(target='a')", "got an unexpected keyword argument 'target'"),
        ("launch_subagent(7)", "RuntimeError: launch_subagent takes text, not 7"),
    ],
)
def test_bad_launch_arguments_are_errors_in_the_code_and_launch_nothing(pool: ReplPool, call: str, seen: str):
    tree = play({"root": [code(f"await {call}"), code("finish('ROOT')")]}, pool=pool)
    assert seen in observed(tree)[0] and len(tree) == 1 and tree.root.info["verified"] == 1.0


@pytest.mark.parametrize("calls", ["{}, launch_subagent(7)", "launch_subagent(7), {}"])
@pytest.mark.parametrize("pause", [0.0, 1e-4])
def test_a_bad_launch_inside_gather_aborts_the_siblings_that_run(pool: ReplPool, calls: str, pause: float):
    """The good child has begun when the bad call fails its parent's cell; nobody waits for it any more."""
    plays = {
        "root": [code(f"await asyncio.gather({calls.format(launch('slow'))})"), code("finish('ROOT')")],
        "slow": [code(f"await {launch('deeper')}"), code("finish('SLOW')")],
        "deeper": [code("finish('DEEPER')")],
    }
    tree = play(plays, pool=pool, sampler=ScriptedSampler(script(plays), chat(), seconds_per_token=pause))
    assert tree.root.status == "finished" and tree.root.info["verified"] == 1.0
    assert tree.nodes["0.0"].status == "aborted" and "takes text, not 7" in observed(tree)[0]
    assert node_rewards(tree).nodes["0.0"].reward == 0.0
    assert all(node.ended >= node.started for node in tree)


def test_context_smaller_than_the_roots_prompt_is_refused(pool: ReplPool):
    with pytest.raises(UserError, match=r"context=4 is smaller than the prompt of \d+ tokens; raise the context"):
        play({}, pool=pool, context=4)


@pytest.mark.parametrize("name", ["context", "max_steps", "max_nodes", "max_action", "stuck_after"])
def test_impossible_bounds_are_refused_by_name(name: str):
    with pytest.raises(UserError, match=f"{name}=0: must be at least 1"):
        AgentConfig(**{name: 0})


def test_unknown_kind_of_returns_is_refused():
    with pytest.raises(UserError, match="returns='yaml': choose 'json' or 'string'"):
        AgentConfig(returns="yaml")


# --- keys, versions, faults -------------------------------------------------------------------------------------------


class Recorder(ScriptedSampler):
    """Keeps the keys it was asked under; pretends that weights change at the n-th action."""

    def __init__(self, plays: dict[str, list[str]], change_at: int | None = None):
        super().__init__(script(plays), chat())
        self.keys: list[RngKey] = []
        self.change_at = change_at

    async def sample(self, ids: list[int], params: SamplingParams, key: RngKey) -> Completion:
        self.keys.append(key)
        if len(self.keys) == self.change_at:
            self.version += 1
        return await super().sample(ids, params, key)


TWO = {"root": [code(f"await {launch('a')}"), END], "a": [code("x = 1"), END]}


def test_every_action_has_a_key_of_its_own_named_by_group_and_path(pool: ReplPool):
    sampler = Recorder(TWO)
    session = Session(sampler, chat(), pool, AgentConfig(context=4000))
    run_sync(rollout(session, WordEpisode(), group="100/task.7", sample=3, seed=5, step=2))
    assert sampler.keys == [
        RngKey(5, 2, "100/task.7", 3, (0,), 0),
        RngKey(5, 2, "100/task.7", 3, (0, 0), 0),
        RngKey(5, 2, "100/task.7", 3, (0, 0), 1),
        RngKey(5, 2, "100/task.7", 3, (0,), 1),
    ]


@pytest.mark.parametrize("change_at", [2, 3, 4])
def test_pitfall_33_a_tree_never_mixes_policy_versions(pool: ReplPool, change_at: int):
    with pytest.raises(RuntimeError, match="mixes policy versions 0 and 1"):
        play(TWO, pool=pool, sampler=Recorder(TWO, change_at))


def test_a_fault_of_the_host_comes_out_as_itself_and_ends_the_batch(pool: ReplPool):
    def broken() -> None:
        raise LookupError("the world has a hole")

    plays = {"root": [code("broken()"), END], "a": [code(f"await {launch('root')}"), END]}
    session = Session(ScriptedSampler(script(plays), chat()), chat(), pool, AgentConfig(context=4000))
    for goal in ("root", "a"):
        jobs = [(goal, "g0", 0), ("b", "g1", 0)]
        with pytest.raises(LookupError, match="the world has a hole"):
            run_sync(rollouts(session, lambda g: WordEpisode(g, {"broken": broken}), jobs, seed=0, step=0))
    assert session.sampler.gate.running == 0


def test_many_trees_come_back_in_the_order_of_their_jobs(pool: ReplPool):
    done: list[str] = []
    jobs = [(goal, f"group {goal}", k) for k, goal in enumerate(["a", "b", "c"])]
    session = Session(ScriptedSampler(script({"a": [code("x = 1")] * 3 + [END]}), chat()), chat(), pool,
                      AgentConfig(context=4000))  # fmt: skip
    trees = run_sync(rollouts(session, WordEpisode, jobs, seed=0, step=0, on_done=lambda t: done.append(t.group)))
    assert [(t.root.task, t.group, t.sample) for t in trees] == [("a", "group a", 0), ("b", "group b", 1),
                                                                 ("c", "group c", 2)]  # fmt: skip
    assert sorted(done) == ["group a", "group b", "group c"]
    again = run_sync(Play(WordEpisode)(session.sampler, chat(), pool, jobs, config=session.config, seed=0, step=0))
    assert [t.group for t in again] == [t.group for t in trees]


def test_text_can_be_left_out_and_ids_stay(pool: ReplPool):
    session = Session(ScriptedSampler(script(TWO), chat()), chat(), pool, AgentConfig(context=4000))
    full, bare = (
        run_sync(rollout(session, WordEpisode(), group="g", sample=0, seed=0, step=0, keep_text=keep))
        for keep in (True, False)
    )
    assert [n.ids for n in full] == [n.ids for n in bare]
    assert all(s.text == "" for n in bare for s in n.segments) and all(s.text for n in full for s in n.segments)


def test_recorded_trees_are_saved_and_read_without_loss(pool: ReplPool):
    tree = play(TWO, pool=pool)
    assert Tree.from_json(tree.to_json()) == tree and json.loads(tree.to_json())["task_id"] == "words"
