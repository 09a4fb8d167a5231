"""Sampling parameters, random number keys, the lockstep gate, and running async code from sync code."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from lib.errors import UserError
from lib.runs import ROOT
from lib.sampling import Gate, Parking, RngKey, SamplingParams, run_sync

KEY = RngKey(1, 2, "task", 3, (0, 1), 4)
RECORDED = [0.8727950133260537, 0.8270065286276761]  # other numbers would change every recorded result


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}])
def test_pitfall_06_truncated_sampling_raises(truncation: dict):
    with pytest.raises(UserError, match="biases importance ratios"):
        SamplingParams(**truncation)
    assert SamplingParams(top_p=1.0, top_k=0).temperature == 1.0


def test_a_key_names_its_numbers_whatever_was_drawn_before():
    first = KEY.generator().random(8)
    for other in range(5):
        RngKey(other, 0, "x", 0, ()).generator().random(100)
    assert np.array_equal(KEY.generator().random(8), first)
    assert np.array_equal(KEY.generator().random(3), first[:3])


def test_random_streams_are_those_of_recorded_runs():
    assert RngKey(0, 0, "t", 0, (0,)).generator().random(2).tolist() == RECORDED



@pytest.mark.parametrize(
    "other",
    [
        RngKey(9, 2, "task", 3, (0, 1), 4),
        RngKey(1, 9, "task", 3, (0, 1), 4),
        RngKey(1, 2, "tusk", 3, (0, 1), 4),
        RngKey(1, 2, "task", 9, (0, 1), 4),
        RngKey(1, 2, "task", 3, (0, 9), 4),
        RngKey(1, 2, "task", 3, (0,), 4),
        RngKey(1, 2, "task", 3, (0, 1), 9),
        RngKey(2, 1, "task", 3, (0, 1), 4),
    ],
)
def test_every_part_of_a_key_matters(other: RngKey):
    assert other.generator().random() != KEY.generator().random()


def test_first_numbers_of_neighbouring_keys_are_uniform_and_uncorrelated():
    numbers = np.array([RngKey(0, s, "t", g, (0, c)).generator().random() for s in range(10) for g in range(10)
                        for c in range(10)])  # fmt: skip
    assert kstest(numbers, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1


KEYS = st.builds(
    RngKey, st.just(0), st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 2),
    st.lists(st.integers(0, 12), max_size=3).map(tuple), st.integers(0, 2),
)  # fmt: skip


@given(st.lists(KEYS, max_size=6), st.randoms())
def test_keys_sort_by_step_task_sample_and_path_whatever_the_order_of_arrival(keys, random):
    shuffled = list(keys)
    random.shuffle(shuffled)
    assert sorted(shuffled) == sorted(keys)
    for a, b in zip(sorted(keys), sorted(keys)[1:], strict=False):
        assert (a.step, a.task, a.sample, a.path, a.turn) <= (b.step, b.task, b.sample, b.path, b.turn)


def test_sibling_ten_comes_after_sibling_nine():
    assert RngKey(0, 0, "t", 0, (0, 9)) < RngKey(0, 0, "t", 0, (0, 10))


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_gate_is_idle_only_when_nobody_runs():
    async def main() -> list[str]:
        gate, log = Gate(), []

        async def watch() -> None:
            await gate.idle()
            log.append("idle")

        gate.enter()
        gate.enter()
        watcher = asyncio.create_task(watch())
        for k in (1, 2):
            await asyncio.sleep(0)
            log.append(f"leaves {k}")
            gate.leave()
        await watcher
        return log

    assert run_sync(main()) == ["leaves 1", "leaves 2", "idle"]


def test_gate_that_was_taken_again_before_the_watcher_ran_is_not_idle():
    async def main() -> bool:
        gate = Gate()
        gate.enter()
        watcher = asyncio.create_task(gate.idle())
        await asyncio.sleep(0)
        gate.leave()
        gate.enter()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        early = watcher.done()
        gate.leave()
        await watcher
        return early

    assert run_sync(main()) is False


def test_one_gate_serves_several_event_loops():
    gate = Gate()

    async def main() -> None:
        gate.enter()
        asyncio.get_running_loop().call_later(0.01, gate.leave)
        await gate.idle()

    run_sync(main())
    run_sync(main())
    assert gate.running == 0


def test_waking_hands_over_a_token_before_the_sleeper_runs():
    async def main() -> list[int]:
        gate, counts = Gate(), []
        parking = Parking(gate)
        gate.enter()
        sleeper = asyncio.create_task(parking.wait())
        await asyncio.sleep(0)
        counts.append(gate.running)
        parking.wake()
        parking.wake()  # nobody sleeps any more
        counts.append(gate.running)
        await sleeper
        counts.append(gate.running)
        return counts

    assert run_sync(main()) == [0, 1, 1]


def test_waking_with_an_error_raises_it_in_the_sleeper():
    async def main() -> None:
        parking = Parking(Gate())
        sleeper = asyncio.create_task(parking.wait())
        await asyncio.sleep(0)
        parking.wake(KeyError("lost"))
        await sleeper

    with pytest.raises(KeyError, match="lost"):
        run_sync(main())


@pytest.mark.parametrize("woken", [False, True])
def test_cancelled_sleeper_holds_exactly_one_token_to_unwind_with(woken: bool):
    async def main() -> int:
        gate = Gate()
        parking = Parking(gate)
        gate.enter()
        sleeper = asyncio.create_task(parking.wait())
        await asyncio.sleep(0)
        if woken:
            parking.wake()
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        return gate.running

    assert run_sync(main()) == 1


# --- run_sync ---------------------------------------------------------------------------------------------------------


async def _double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def _fail() -> None:
    await asyncio.sleep(0)
    raise LookupError("not here")


def test_sync_entry_returns_values_and_raises_errors():
    assert run_sync(_double(21)) == 42
    with pytest.raises(LookupError, match="not here"):
        run_sync(_fail())


def test_sync_entry_works_inside_a_running_loop_as_in_a_notebook():
    async def cell() -> int:
        return run_sync(_double(run_sync(_double(5))))

    assert asyncio.run(cell()) == 20


INTERRUPTED = """
import asyncio, sys
from lib.sampling import run_sync

async def work():
    print("started", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("unwound", flush=True)

try:
    run_sync(work())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def test_ctrl_c_unwinds_the_coroutine_and_ends_in_keyboard_interrupt():
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert rest.split() == ["unwound", "interrupted"] and process.returncode == 7
    assert time.monotonic() - began < 5
