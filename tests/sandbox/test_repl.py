"""REPL sessions: state, tools that run at once, limits that end in observations, parents that wait without a worker.

Attacks on sessions are in tests/attacks.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lib.runs import ROOT
from lib.sampling import Gate, run_sync
from lib.sandbox.repl import STALLED, Limits, Observation, Repl, ReplPool, ToolError

LIMITS = Limits(seconds=1.0, memory=16 << 20, recursion=150, calls=60, output=500, arguments=4000)


@pytest.fixture(scope="module")
def pool() -> Iterator[ReplPool]:
    with ReplPool(1, LIMITS) as made:
        yield made


async def echo(x: Any = 0) -> Any:
    """A tool that answers at once."""
    return x


def run(repl: Repl, *cells: str, **inputs: Any) -> Observation:
    """Run cells in order; the observation of the last."""

    async def main() -> Observation:
        for cell in cells:
            seen = await repl.run(cell, inputs)
        return seen

    return run_sync(main())


# --- what an agent sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "seen"),
    [
        ("print('a', 1)", "a 1"),
        ("1 + 1", "2"),
        ("'text'", "text"),
        ("['a', 1.5]", "['a', 1.5]"),
        ("print('a')\n2", "a\n2"),
        ("x = 1", "(no output)"),
        ("None", "(no output)"),
        ("print()", "(no output)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("print('before')\nraise ValueError('two\\nlines')", "before\nValueError: two lines"),
        ("nobody", "NameError: name 'nobody' is not defined"),
        ("x = = 1", "SyntaxError: Expected an expression"),
        ("yield 1", "NotImplementedError: The monty syntax parser does not yet support yield expressions"),
    ],
)
def test_observation_reads_like_a_notebook_cell(pool: ReplPool, cell: str, seen: str):
    assert run(pool.session({}), cell).text == seen


def test_state_lasts_for_fifty_turns(pool: ReplPool):
    repl = pool.session({})
    run(repl, "numbers = []\ndef double(n): return 2 * n\nclass Box:\n    size = 3\nbox = Box()")
    for k in range(50):
        assert run(repl, f"numbers.append(double({k}))\nlen(numbers)").value == k + 1
    assert run(repl, "sum(numbers)").value == 2 * sum(range(50)) and run(repl, "box.size").value == 3


def test_sessions_do_not_see_each_other(pool: ReplPool):
    one, two = pool.session({}), pool.session({})
    run(one, "secret = 7\nimport json\njson.loads = None")
    assert run(two, "secret").error == "NameError: name 'secret' is not defined"
    assert run(two, "import json\njson.loads('[1]')").value == [1]


def test_an_error_keeps_what_was_done_before_it(pool: ReplPool):
    repl = pool.session({})
    assert run(repl, "x = 5\nraise KeyError('k')").error == "KeyError: k"
    assert run(repl, "x").value == 5


def test_inputs_are_bound_before_the_cell_runs(pool: ReplPool):
    assert run(pool.session({}), "len(context) + n", context="four", n=3).value == 7


def test_asyncio_is_there_without_an_import(pool: ReplPool):
    assert run(pool.session({"echo": echo}), "await asyncio.gather(echo(1), echo(2))").value == [1, 2]


def test_clock_and_random_numbers_are_those_of_every_session(pool: ReplPool):
    cell = "[str(datetime.datetime.now()), time.time(), random.random(), random.random()]"
    first, second = (run(pool.session({}), "import datetime, random, time", cell).value for _ in range(2))
    assert first == second and first[2] != first[3]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_values_pass_to_tools_and_back_unchanged(pool: ReplPool):
    given: list[Any] = []

    def take(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return (1, {"a": [None, True, 2.5, "눈"]})

    cell = 'take({"m0_i3": 2}, ("o1_i1", 4), deep=[(1, (2, 3))], none=None) == (1, {"a": [None, True, 2.5, "눈"]})'
    assert run(pool.session({"take": take}), cell).value is True
    assert given == [(({"m0_i3": 2}, ("o1_i1", 4)), {"deep": [(1, (2, 3))], "none": None})]
    assert isinstance(given[0][0][1], tuple) and isinstance(given[0][1]["deep"][0], tuple)


def test_wrong_arguments_and_tool_errors_are_raised_in_the_code(pool: ReplPool):
    def grab(count: int) -> int:
        if count > 3:
            raise ToolError("at most three")
        return count

    async def fetch(count: int) -> int:
        return grab(count)

    repl = pool.session({"grab": grab, "fetch": fetch})
    assert run(repl, "grab()").error == "TypeError: grab(): missing a required argument: 'count'"
    assert run(repl, "await fetch(1, 2)").error == "TypeError: fetch(): too many positional arguments"
    assert run(repl, "grab(9)").error == "RuntimeError: at most three"
    assert run(repl, "await fetch(9)").error == "RuntimeError: at most three"
    caught = "try:\n    {}\nexcept RuntimeError as error:\n    print('caught', error)"
    assert run(repl, caught.format("grab(9)")).text == "caught at most three"
    assert run(repl, caught.format("await fetch(9)")).text == "caught at most three"


@pytest.mark.parametrize("call", ["broken()", "await abroken()", "await asyncio.gather(echo(), abroken())"])
def test_any_other_exception_of_a_tool_is_a_fault_of_the_host(pool: ReplPool, call: str):
    def broken() -> None:
        raise LookupError("the host has a hole")

    async def abroken() -> None:
        broken()

    gate = Gate()
    gate.enter()
    repl = pool.session({"broken": broken, "abroken": abroken, "echo": echo}, gate)
    with pytest.raises(LookupError, match="the host has a hole"):
        run(repl, call)
    assert gate.running == 1


def test_gathered_calls_run_at_the_same_time(pool: ReplPool):
    """Each of three calls waits until all three have begun: in sequence none would ever end."""

    async def main() -> Observation:
        barrier = asyncio.Barrier(3)

        async def meet(name: str) -> str:
            async with asyncio.timeout(5):
                await barrier.wait()
            return name.upper()

        return await pool.session({"meet": meet}).run("await asyncio.gather(meet('a'), meet('b'), meet('c'))")

    assert run_sync(main()).value == ["A", "B", "C"]


def test_awaits_one_after_the_other_run_in_order(pool: ReplPool):
    log: list[str] = []

    async def step(name: str) -> str:
        log.append(f"begin {name}")
        await asyncio.sleep(0.001)
        log.append(f"end {name}")
        return name

    cell = "a = await step('a')\nb = await step('b' + a)\n[a, b]"
    assert run(pool.session({"step": step}), cell).value == ["a", "ba"]
    assert log == ["begin a", "end a", "begin ba", "end ba"]


def test_code_goes_on_with_the_first_answer_while_others_are_still_running(pool: ReplPool):
    async def main() -> Observation:
        second = asyncio.Event()

        async def slow() -> str:
            await second.wait()
            return "slow"

        async def quick() -> str:
            return "quick"

        def note() -> None:
            second.set()

        cell = "async def one():\n    x = await quick()\n    note()\n    return x\nawait asyncio.gather(slow(), one())"
        return await pool.session({"slow": slow, "quick": quick, "note": note}).run(cell)

    assert run_sync(main()).value == ["slow", "quick"]


@pytest.mark.parametrize("cell", ["echo(1)", "x = echo(1)\nprint('later')", "[echo(k) for k in range(3)]\nNone"])
def test_a_call_without_await_says_that_it_did_not_run(pool: ReplPool, cell: str):
    called: list[int] = []

    async def echo(x: int) -> None:
        called.append(x)

    seen = run(pool.session({"echo": echo}), cell)
    assert "[echo was called without await and did not run]" in seen.text and not called and seen.error is None


@pytest.mark.parametrize(
    "cell", ["await early", "now = echo(2)\n[await early, await now]", "await asyncio.gather(echo(1), early)"]
)
def test_awaiting_a_call_of_an_earlier_cell_ends_with_advice_and_not_with_a_hang(pool: ReplPool, cell: str):
    repl = pool.session({"echo": echo})
    run(repl, "x = 1\nearly = echo(1)")
    assert run(repl, cell).error == f"RuntimeError: {STALLED}"
    assert run(repl, "await echo(x)").value == 1


def test_a_failed_gather_cancels_what_is_still_running_and_hands_every_token_back(pool: ReplPool):
    """The one that fails ends the cell; its sibling has unwound before the next cell begins."""
    log: list[str] = []

    async def main() -> tuple[Observation, int]:
        gate = Gate()

        async def forever() -> None:
            log.append("begun")
            try:
                await asyncio.sleep(60)
            finally:
                log.append("unwound")

        async def fails() -> None:
            raise ToolError("no")

        gate.enter()
        repl = pool.session({"forever": forever, "fails": fails}, gate)
        await repl.run("x = 1\nawait asyncio.gather(forever(), fails(), forever())")
        log.append("next")
        return await repl.run("x"), gate.running

    seen, running = run_sync(main())
    assert log == ["begun", "begun", "unwound", "unwound", "next"] and seen.value == 1 and running == 1


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "words", "timed_out"),
    [
        ("kept = 4\nwhile True: pass", "TimeoutError: feed time limit exceeded", True),
        ("try:\n    while True: pass\nexcept BaseException: print('caught')", "TimeoutError: feed time limit", True),
        ("kept = 'a' * (64 << 20)", "MemoryError: memory limit exceeded", False),
        ("kept = []\nwhile True: kept.append('a' * 1000)", "MemoryError: ", False),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded", False),
        ("kept = 4\nwhile True: tool()", "RuntimeError: more than 60 tool calls in one run", False),
        ("while True: await echo()", "RuntimeError: more than 60 tool calls in one run", False),
        ("while True:\n    try: tool()\n    except Exception: pass", "more than 60 tool calls in one run", False),
        ("await asyncio.gather(*[echo(k) for k in range(61)])", "more than 60 tool calls in one run", False),
    ],
)
def test_limits_end_a_cell_in_an_observation_and_the_session_goes_on(pool: ReplPool, cell, words, timed_out):
    repl = pool.session({"tool": lambda: None, "echo": echo})
    run(repl, "kept = 3")
    began = time.monotonic()
    seen = run(repl, cell)
    assert words in seen.error and seen.timed_out is timed_out and time.monotonic() - began < 10
    assert run(repl, "kept").value == 3, "the session works as before"


def test_sixty_calls_are_allowed_in_every_cell(pool: ReplPool):
    repl = pool.session({"echo": echo})
    for _ in range(2):
        assert run(repl, "len(await asyncio.gather(*[echo(k) for k in range(60)]))").value == 60


def test_waiting_for_tools_does_not_count_as_time_of_the_code():
    async def nap() -> str:
        await asyncio.sleep(0.6)
        return "rested"

    with ReplPool(1, Limits(seconds=0.4)) as pool:
        assert run(pool.session({"nap": nap}), "await nap()").value == "rested"


def test_time_of_the_code_adds_up_over_its_waits():
    """Parking the heap must not start the clock anew."""
    spin = "for _ in range(40):\n    for _ in range(3_000_000): pass\n    await echo()"
    with ReplPool(1, Limits(seconds=0.3)) as pool:
        assert run(pool.session({"echo": echo}), spin).timed_out


def test_sleeping_takes_no_time(pool: ReplPool):
    began = time.monotonic()
    assert run(pool.session({}), "import time\ntime.sleep(3)\nawait asyncio.sleep(3)\n'awake'").value == "awake"
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("cell", "start"),
    [
        ("print('ab' * 5000)", "abab"),
        ("for k in range(3000): print(k)", "0\n1\n2\n"),
        ("'ab' * 5000", "abab"),
        ("[7] * 5000", "[7, 7"),
        ("raise ValueError('ab' * 5000)", "ValueError: abab"),
    ],
)
def test_long_output_values_and_errors_are_cut_with_a_note(pool: ReplPool, cell: str, start: str):
    text = run(pool.session({}), cell).text
    assert text.startswith(start) and "more characters were cut]" in text and len(text) < LIMITS.output + 60
    lost = int(text.rpartition("[")[2].split()[0])
    assert lost + LIMITS.output == len(_uncut(cell))


def _uncut(cell: str) -> str:
    if cell.startswith("for"):
        return "".join(f"{k}\n" for k in range(3000))
    if cell.startswith("print"):
        return "ab" * 5000 + "\n"
    return {"'": "ab" * 5000, "[": repr([7] * 5000), "r": "ValueError: " + "ab" * 5000}[cell[0]]


def test_output_at_the_limit_is_whole(pool: ReplPool):
    assert run(pool.session({}), "print('x' * 499)").stdout == "x" * 499 + "\n"
    assert run(pool.session({}), "'x' * 500").value == "x" * 500


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("'x' * 4001", "is larger than 4000 characters"),
        ("[0] * 400", "is larger than 4000 characters"),
        ("{'k': ['x' * 3000, 'y' * 1100]}", "is larger than 4000 characters"),
        ("10 ** 2000", "is an integer of more than 4096 bits"),
        ("[{'a': (10 ** 2000,)}]", "is an integer of more than 4096 bits"),
        ("deep", "is nested more than 100 levels deep"),
        ("Box()", "is a MontyClassProxy: pass numbers, text, lists, tuples and dicts"),
        ("ValueError('x')", "is a ValueError: pass"),
        ("print", "is a MontyStdTypeProxy: pass"),
    ],
)
@pytest.mark.parametrize("call", ["take({})", "take(x={})", "await atake({})"])
def test_arguments_the_host_could_not_handle_are_refused_in_the_code(pool: ReplPool, argument, words, call):
    given: list[Any] = []

    async def atake(x: Any) -> None:
        given.append(x)

    def take(x: Any) -> None:
        given.append(x)

    setup = "class Box: pass\ndeep = []\nfor _ in range(101): deep = [deep]"
    seen = run(pool.session({"take": take, "atake": atake}), setup, call.format(argument))
    name = call.partition("take")[0].replace("await ", "") + "take"
    assert seen.error.startswith(f"ValueError: {name}(): an argument {words}") and not given


def test_values_that_cannot_be_printed_are_told_as_text(pool: ReplPool):
    assert "cannot be shown" in run(pool.session({}), "10 ** 5000").text
    assert run(pool.session({}), "x = []\nx.append(x)\nx").text == "['[...]']"


# --- many sessions, few workers ---------------------------------------------------------------------------------------


def grow(pool: ReplPool, trees: int, depth: int, width: int) -> tuple[list[int], float]:
    """Trees whose inner nodes run a cell that waits for `width` children; node counts and seconds."""
    gate = Gate()

    async def node(level: int) -> int:
        async def launch_subagent(k: int) -> int:
            return await node(level + 1)

        gate.enter()
        try:
            repl = pool.session({"launch_subagent": launch_subagent}, gate)
            calls = f"[launch_subagent(k) for k in range({width if level < depth else 0})]"
            return (await repl.run(f"1 + sum(await asyncio.gather(*{calls}))")).value
        finally:
            gate.leave()

    async def main() -> list[int]:
        return await asyncio.gather(*(node(0) for _ in range(trees)))

    began = time.monotonic()
    counts = run_sync(main())
    assert gate.running == 0
    return counts, time.monotonic() - began


@pytest.mark.parametrize(("trees", "depth", "width"), [(1, 6, 4), (8, 6, 2)])
def test_deep_and_wide_trees_finish_on_one_worker_in_bounded_memory(trees: int, depth: int, width: int):
    """Every parent is alive while its children work: 1,365 wait in the first case, with a single worker process."""
    size = (width ** (depth + 1) - 1) // (width - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ReplPool(1) as pool:
        counts, seconds = grow(pool, trees, depth, width)
    assert counts == [size] * trees and seconds < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "kilobytes"
    assert sum(counts) / seconds >= 100, "nodes a second, without model time"


def test_a_chain_of_waiting_parents_is_no_deadlock():
    with ReplPool(1) as pool:
        assert grow(pool, 1, 60, 1)[0] == [61]


INTERRUPTED = """
import sys
from lib.sampling import run_sync
from lib.sandbox.repl import Limits, ReplPool

async def launch_subagent():
    import asyncio
    print("waiting", flush=True)
    await asyncio.sleep(60)

async def main(pool):
    await pool.session({"launch_subagent": launch_subagent}).run("await launch_subagent()")

try:
    with ReplPool() as pool:
        run_sync(main(pool))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def test_ctrl_c_ends_a_waiting_session_and_its_worker():
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)  # ends only when the worker, which holds the pipe too, is gone
    finally:
        process.kill()
    assert rest.split() == ["interrupted"] and process.returncode == 7


def test_sessions_work_inside_a_running_loop_as_in_a_notebook(pool: ReplPool):
    async def cell(make: Callable[[], Repl]) -> Any:
        return run(make(), "1 + 1").value

    assert asyncio.run(cell(lambda: pool.session({}))) == 2
