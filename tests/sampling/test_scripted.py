"""The sampler whose policy is a Python generator."""

from __future__ import annotations

import time

from lib.sampling import RngKey, SamplingParams, run_sync
from lib.sampling.scripted import ScriptedSampler
from tests.micro import chat

KEY = RngKey(0, 0, "t", 0, (0,))


def echo(prompt: str, rng):
    seen = yield f"first {rng.integers(1000)}"
    while True:
        seen = yield f"saw {seen}"


def ask(sampler: ScriptedSampler, turns: int, key: RngKey = KEY, max_tokens: int = 100) -> list[list[int]]:
    ids, actions = chat().prompt("Goal: x")[0], []
    for turn in range(turns):
        node = RngKey(key.seed, key.step, key.task, key.sample, key.path, turn)
        done = run_sync(sampler.sample(ids, SamplingParams(max_tokens=max_tokens), node))
        actions.append(done.ids)
        assert done.logprobs == [0.0] * len(done.ids) and done.version == sampler.version
        ids = [*ids, *done.ids, *chat().observation(f"result {turn}", done.ids)[0]]
    return actions


def texts(actions: list[list[int]]) -> list[str]:
    return [chat().tokenizer.decode(ids) for ids in actions]


def test_script_is_sent_what_came_since_its_last_action():
    first, second, third = texts(ask(ScriptedSampler(echo, chat()), 3))
    assert first.startswith("first ") and first.endswith("<|end|>")
    assert "result 0" in second and "result 1" in third and "result 0" not in third


def test_every_node_has_its_own_script_with_its_own_numbers():
    sampler = ScriptedSampler(echo, chat())
    one, two = (texts(ask(sampler, 1, RngKey(0, 0, "t", 0, (0, k))))[0] for k in range(2))
    assert one != two
    assert texts(ask(ScriptedSampler(echo, chat()), 1, RngKey(0, 0, "t", 0, (0, 1)))) == [two]


def test_script_that_has_ended_or_never_begins_acts_emptily():
    def short(prompt, rng):
        yield "only this"

    def nothing(prompt, rng):
        return
        yield

    assert texts(ask(ScriptedSampler(short, chat()), 3)) == ["only this<|end|>", "<|end|>", "<|end|>"]
    assert texts(ask(ScriptedSampler(nothing, chat()), 1)) == ["<|end|>"]


def test_actions_are_cut_at_the_token_limit():
    sampler = ScriptedSampler(echo, chat())
    done = run_sync(sampler.sample(chat().prompt("x")[0], SamplingParams(max_tokens=3), KEY))
    assert len(done.ids) == 3 and done.finish_reason == "length"


def test_released_node_starts_over_and_new_weights_only_count():
    sampler = ScriptedSampler(echo, chat())
    first = ask(sampler, 1)
    sampler.release(KEY)
    assert ask(sampler, 1) == first
    run_sync(sampler.load_weights({}, 3))
    assert sampler.version == 3


def test_pretended_seconds_pass():
    began = time.monotonic()
    [ids] = ask(ScriptedSampler(echo, chat(), seconds_per_token=0.01), 1)
    assert time.monotonic() - began >= 0.01 * len(ids)
