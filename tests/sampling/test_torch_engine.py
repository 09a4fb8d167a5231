"""The batching engine against `transformers`, and against itself under other schedules, sizes and weights."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lib.errors import UserError
from lib.policy import ChatFormat, load_policy
from lib.rao.agent import AgentConfig, Session, rollout, rollouts
from lib.runs import ROOT
from lib.sampling import Completion, RngKey, SamplingParams, run_sync
from lib.sampling.torch_engine import KEPT_PROMPTS, TorchEngine
from lib.sandbox.repl import ReplPool
from lib.tree import Tree
from tests.micro import WordEpisode, chat, code, policy


def llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama whose distributions are far from uniform."""
    shape: dict[str, Any] = {
        "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**shape | sizes)).eval()


def reference(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the token after every position, shape (T, V)."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def random_ids(length: int, seed: int = 0, vocab: int = 80) -> list[int]:
    return np.random.default_rng(seed).integers(vocab, size=length).tolist()


def key(k: int, turn: int = 0, path: tuple[int, ...] = (0,)) -> RngKey:
    return RngKey(0, 0, f"t{k}", 0, path, turn)


def sample_all(engine: TorchEngine, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """All prompts at once, prompt k under key k; nodes end with it."""

    async def main() -> list[Completion]:
        return await asyncio.gather(*(agent(engine, ids, params, key(k)) for k, ids in enumerate(prompts)))

    return run_sync(main())


async def agent(engine: TorchEngine, ids: list[int], params: SamplingParams, name: RngKey) -> Completion:
    """A node of one action."""
    engine.gate.enter()
    try:
        return await engine.sample(ids, params, name)
    finally:
        engine.release(name)
        engine.gate.leave()


# --- the same numbers as transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 36},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 1},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["mqa", "gqa2", "mha", "gqa3-head-dim", "mqa8", "tied-theta", "llama3-rope"],
)  # fmt: skip
def test_log_probabilities_equal_transformers(shape: dict):
    model = llama(**shape)
    engine = TorchEngine(model, max_len=400, slots=2)
    for length in (2, 17, 300):  # the longest is read in two chunks
        ids = random_ids(length, length)
        expected = reference(model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert np.allclose(engine.logprobs(ids), expected.tolist(), atol=1e-4)


def test_trained_policy_has_the_log_probabilities_of_transformers():
    folder = ROOT / "data" / "micro" / "textcraft"
    if not folder.is_dir():
        pytest.skip(f"{folder.relative_to(ROOT)} does not exist: the trained policy was not compared")
    trained = load_policy(folder)
    prompt = trained.chat.prompt("Craft the following items: 2x a7_i2_17\nDelegation: yes")[0]
    ids = prompt + trained.tokenizer.encode('<python>print(get_info(["a7_i2_17"]))</python>') + random_ids(200)
    engine = TorchEngine(trained.model, max_len=512, slots=2)
    expected = reference(trained.model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert np.allclose(engine.logprobs(ids), expected.tolist(), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_pitfall_05_and_08_sampled_log_probabilities_equal_recomputed_ones(temperature: float):
    """Rows of very different lengths at once, so that padding, chunks and groups all take part."""
    model = llama()
    prompts = [random_ids(n, n) for n in [1, 2, 3, 5, 40, 41, 90, 300, *range(4, 60, 3)]]
    done = sample_all(TorchEngine(model, max_len=400), prompts, SamplingParams(temperature, max_tokens=12))
    for ids, c in zip(prompts, done, strict=True):
        rows = reference(model, ids + c.ids, temperature)[len(ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(c.ids)[:, None])[:, 0]
        assert len(c.ids) == 12 and np.allclose(c.logprobs, expected.tolist(), atol=1e-4)
    other = reference(model, prompts[4] + done[4].ids, 1.0 if temperature == 0.6 else 0.6)[len(prompts[4]) - 1 : -1]
    wrong = other.gather(1, torch.tensor(done[4].ids)[:, None])[:, 0]
    assert not np.allclose(done[4].logprobs, wrong.tolist(), atol=1e-2), "the temperature makes a difference"


def test_pitfall_08_sampled_tokens_follow_the_distribution_of_transformers():
    model, prompt = llama(), random_ids(6)
    done = sample_all(TorchEngine(model, max_len=16), [prompt] * 1500, SamplingParams(1.3, max_tokens=1))
    p = reference(model, prompt, 1.3)[-1].exp().double().numpy()
    counts = np.bincount([c.ids[0] for c in done], minlength=80)
    common = p * 1500 >= 5
    seen = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) / p.sum() * 1500
    assert common.sum() > 10 and chisquare(seen, expected).pvalue > 0.01


def test_greedy_sampling_takes_the_likeliest_token_and_is_certain_of_it():
    model, ids = llama(), random_ids(9)
    [done] = sample_all(TorchEngine(model, max_len=64), [ids], SamplingParams(0.0, max_tokens=20))
    grown = list(ids)
    for _ in range(20):
        grown.append(int(reference(model, grown)[-1].argmax()))
    assert ids + done.ids == grown and done.logprobs == [0.0] * 20


# --- ends ---------------------------------------------------------------------------------------------------------


def test_stop_id_ends_a_completion_and_belongs_to_it():
    model, ids = llama(), random_ids(9)
    [free] = sample_all(TorchEngine(model, max_len=64), [ids], SamplingParams(1.0, max_tokens=20))
    assert free.finish_reason == "length" and len(free.ids) == 20
    stop = free.ids[7]
    [done] = sample_all(TorchEngine(model, max_len=64), [ids], SamplingParams(1.0, max_tokens=20, stop_ids=(stop,)))
    assert done.finish_reason == "stop" and done.ids == free.ids[: free.ids.index(stop) + 1]


def test_context_bounds_a_completion_and_a_full_one_is_refused():
    engine = TorchEngine(llama(), max_len=20)
    [done] = sample_all(engine, [random_ids(15)], SamplingParams(max_tokens=99))
    assert len(done.ids) == 5 and done.finish_reason == "length"
    for length in (0, 20, 21):
        with pytest.raises(UserError, match=f"{length} tokens of prompt leave no room in a context of 20"):
            sample_all(engine, [random_ids(length)], SamplingParams())
    [again] = sample_all(engine, [random_ids(15)], SamplingParams(max_tokens=99))
    assert again.ids == done.ids, "a refusal leaves the engine as it was"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9)), {}, "not 'gpt2'"),
        (lambda: llama(attention_bias=True), {}, "without biases"),
        (lambda: llama(hidden_act="gelu"), {}, "SiLU"),
        (llama, {"max_len": 513}, "max_len=513 exceeds the model's context of 512"),
        (llama, {"kv_bytes": 1000}, "kv_bytes=1000 holds no slot of 2048 bytes"),
    ],
)
def test_models_and_budgets_that_cannot_work_are_refused(model, options: dict, words: str):
    with pytest.raises(UserError, match=words):
        TorchEngine(model(), **{"max_len": 16} | options)


def test_budget_bounds_the_number_of_slots():
    assert TorchEngine(llama(), max_len=16, slots=96, kv_bytes=3 * 2048 + 100).slots == 3


# --- scheduling never chooses the numbers ---------------------------------------------------------------------------


def test_completions_do_not_depend_on_company_order_or_slots():
    model, params = llama(), SamplingParams(1.0, max_tokens=9)
    prompts = [random_ids(n, n) for n in (4, 30, 7, 12, 21)]
    together = sample_all(TorchEngine(model, max_len=64), prompts, params)
    narrow = sample_all(TorchEngine(model, max_len=64, slots=1), prompts, params)
    alone = []
    for k, ids in enumerate(prompts):

        async def one(engine: TorchEngine, ids: list[int] = ids, k: int = k) -> Completion:
            return await engine.sample(ids, params, key(k))

        alone.append(run_sync(one(TorchEngine(model, max_len=64))))
    for a, b, c in zip(together, narrow, alone, strict=True):
        assert a.ids == b.ids == c.ids
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5) and np.allclose(a.logprobs, c.logprobs, atol=1e-5)


def test_shared_prefixes_are_forked_and_change_nothing():
    model, params = llama(), SamplingParams(1.0, max_tokens=6)
    system = random_ids(40)
    prompts = [system + random_ids(8, seed=s) for s in range(6)]
    engine = TorchEngine(model, max_len=64)
    first = sample_all(engine, prompts[:1], params)
    assert engine.stats["tokens_forked"] == 0
    rest = sample_all(engine, prompts, params)
    assert engine.stats["tokens_forked"] >= 6 * 40 and rest[0].ids == first[0].ids
    for k, ids in enumerate(prompts):
        expected = reference(model, ids + rest[k].ids)[len(ids) - 1 : -1].gather(1, torch.tensor(rest[k].ids)[:, None])
        assert np.allclose(rest[k].logprobs, expected[:, 0].tolist(), atol=1e-4)


def test_kept_prompts_are_bounded():
    engine = TorchEngine(llama(), max_len=64)
    sample_all(engine, [random_ids(10, s) for s in range(3 * KEPT_PROMPTS)], SamplingParams(max_tokens=1))
    assert len(engine._prompts) == KEPT_PROMPTS


def test_a_turn_costs_its_new_tokens_only():
    engine, ids = TorchEngine(llama(), max_len=64), random_ids(20)

    async def main() -> None:
        done = await engine.sample(ids, SamplingParams(max_tokens=5), key(0, turn=0))
        before = engine.stats["tokens_processed"]
        more = [*ids, *done.ids, *random_ids(3, 1)]
        await engine.sample(more, SamplingParams(max_tokens=5), key(0, turn=1))
        # the last sampled token, three new ones, and four of the five sampled then
        assert engine.stats["tokens_processed"] - before == 1 + 3 + 4

    run_sync(main())


def test_a_prompt_that_does_not_continue_the_node_is_an_error():
    engine, ids = TorchEngine(llama(), max_len=64), random_ids(20)

    async def main() -> None:
        await engine.sample(ids, SamplingParams(max_tokens=5), key(0, turn=0))
        await engine.sample(random_ids(30, 7), SamplingParams(max_tokens=5), key(0, turn=1))

    with pytest.raises(RuntimeError, match="does not continue what was sampled before"):
        run_sync(main())


def test_two_nodes_under_one_key_are_an_error_and_not_a_hang():
    engine = TorchEngine(llama(), max_len=64, timeout=5)

    async def main() -> None:
        params = SamplingParams(max_tokens=5)
        await asyncio.gather(*(engine.sample(random_ids(9, s), params, key(0)) for s in range(2)))

    with pytest.raises(RuntimeError, match="under one random number key"):
        run_sync(main())


def test_deepest_nodes_are_admitted_first():
    engine = TorchEngine(llama(), max_len=64, slots=1)
    order: list[int] = []

    async def one(depth: int) -> None:
        await agent(engine, random_ids(5), SamplingParams(max_tokens=4), key(0, path=(0,) * (depth + 1)))
        order.append(depth)

    async def main() -> None:
        await asyncio.gather(*(one(depth) for depth in (1, 0, 3, 2)))

    run_sync(main())
    assert order == [3, 2, 1, 0]


# --- trees ------------------------------------------------------------------------------------------------------------

ACTIONS = [
    code("note('x')"),
    code("print(await launch_subagent('a'))"),
    code("print(await asyncio.gather(launch_subagent('a'), launch_subagent('b')))"),
    code("await asyncio.gather(launch_subagent(5), launch_subagent('c'))"),  # the first fails and aborts the second
    code("print(read())", "finish('ROOT')"),
    "no code at all",
]


class Fortune:
    """A tokenizer that reads any sampled tokens as one of `ACTIONS`, so that a random policy grows trees."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        return ACTIONS[sum(ids) % len(ACTIONS)]


FORTUNE = ChatFormat(Fortune(chat().tokenizer))


def grow(engine: TorchEngine, tasks: int = 3, samples: int = 2, temperature: float = 1.0, **config: Any) -> list[Tree]:
    """Trees of the random policy on this engine."""
    agent = AgentConfig(max_steps=3, max_depth=4, max_action=4, context=500, temperature=temperature, **config)
    jobs = [(f"goal {t}", f"g{t}", s) for t in range(tasks) for s in range(samples)]
    with ReplPool() as pool:
        session = Session(engine, FORTUNE, pool, agent)
        grown = run_sync(rollouts(session, WordEpisode, jobs, seed=0, step=0))
    for tree in grown:
        tree.check()
    assert engine.gate.running == 0 and not engine._waiting and not engine._active and not engine._kept
    assert sorted(engine._free) == list(range(engine.slots)), "every slot came back"
    return grown


def outcome(tree: Tree) -> dict[str, tuple]:
    """What was sampled and how it ended, by node; the order of launches in different branches may differ."""
    return {node.id: (node.ids, node.status) for node in tree}


def timeless(trees: list[Tree]) -> list[dict]:
    """Trees without what a clock wrote."""
    rows = [asdict(tree) for tree in trees]
    for row in rows:
        for node in row["nodes"].values():
            del node["started"], node["ended"], node["info"]["times"]
    return rows


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return policy().model


@pytest.fixture(scope="module")
def trees(model: torch.nn.Module) -> list[Tree]:
    return grow(TorchEngine(model, max_len=512))


def test_two_lockstep_runs_with_one_seed_give_equal_trees(model, trees: list[Tree]):
    assert timeless(grow(TorchEngine(model, max_len=512))) == timeless(trees)
    statuses = {node.status for tree in trees for node in tree}
    assert {"finished", "out_of_steps", "aborted"} <= statuses, "the trees have seen something"
    assert max(tree.depth for tree in trees) == 4 and sum(map(len, trees)) > 40


def test_results_do_not_depend_on_the_number_of_slots(model, trees: list[Tree]):
    """Two slots for trees of depth 4: parents are evicted and rebuilt, deepest first keeps things moving."""
    engine = TorchEngine(model, max_len=512, slots=2)
    few = grow(engine)
    assert engine.stats["tokens_rebuilt"] > 0
    for a, b in zip(trees, few, strict=True):
        assert outcome(a) == outcome(b)
        assert all(np.allclose(a.nodes[name].logprobs, b.nodes[name].logprobs, atol=1e-4) for name in a.nodes)


def test_a_tree_does_not_depend_on_the_other_trees(model, trees: list[Tree]):
    [alone, _] = grow(TorchEngine(model, max_len=512), tasks=1)
    assert outcome(alone) == outcome(trees[0])


def test_another_seed_step_group_or_sample_gives_other_tokens(model, trees: list[Tree]):
    firsts = [tuple(tree.root.segments[1].ids) for tree in trees]
    assert len(set(firsts)) == len(firsts)


def test_rollout_log_probabilities_are_those_of_whole_node_passes(model, trees: list[Tree]):
    node = max((n for tree in trees for n in tree), key=lambda n: len(n.ids))
    expected = reference(model, node.ids)[:-1].gather(1, torch.tensor(node.ids[1:])[:, None])[:, 0].tolist()
    got = node.logprobs[1:]
    sampled = node.mask[1:]
    assert sum(sampled) == node.tokens_out > 4
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b, m in zip(got, expected, sampled, strict=True) if m)


def test_free_schedule_finishes_the_same_work(model, trees: list[Tree]):
    free = grow(TorchEngine(model, max_len=512, schedule="free"))
    assert [outcome(t) for t in free] == [outcome(t) for t in trees]


def test_context_full_ends_a_node_before_the_engine_refuses_it(model):
    prompt = len(chat().prompt("Goal: goal 0")[0])
    agent = AgentConfig(max_steps=30, max_depth=0, max_action=4, context=prompt + 40, stuck_after=99)
    engine = TorchEngine(model, max_len=prompt + 40)
    with ReplPool() as pool:
        session = Session(engine, FORTUNE, pool, agent)
        tree = run_sync(rollout(session, WordEpisode("goal 0"), group="g", sample=3, seed=5, step=0))
    tree.check()
    assert tree.root.status in ("context_full", "finished") and len(tree.root.ids) <= prompt + 40


# --- weights ----------------------------------------------------------------------------------------------------------


def test_pitfall_10_new_weights_really_run():
    old, new, ids = llama(0), llama(1), random_ids(12)
    engine, params = TorchEngine(old, max_len=64), SamplingParams(0.0, max_tokens=8)
    probe = engine.logprobs(ids)
    [before] = sample_all(engine, [ids], params)
    run_sync(engine.load_weights(new.state_dict(), 7))
    [after] = sample_all(engine, [ids], params)  # the kept prompt of the old weights must not be forked
    [expected] = sample_all(TorchEngine(new, max_len=64), [ids], params)
    assert before.ids != after.ids == expected.ids and (before.version, after.version) == (0, 7)
    assert not np.allclose(engine.logprobs(ids), probe, atol=0.1)
    assert np.allclose(engine.logprobs(ids), TorchEngine(new, max_len=64).logprobs(ids), atol=1e-6)


def test_engine_keeps_its_own_copy_of_the_weights():
    source, ids = llama(0), random_ids(12)
    engine = TorchEngine(source, max_len=64)
    before = engine.logprobs(ids)
    with torch.no_grad():
        for weight in source.parameters():
            weight.zero_()
    assert np.allclose(engine.logprobs(ids), before, atol=1e-6), "weights change at a sync only, never in a rollout"


def test_weights_of_another_architecture_are_refused():
    engine = TorchEngine(llama(), max_len=64)
    with pytest.raises(UserError, match="weights lack .*model.layers.1"):
        run_sync(engine.load_weights(llama(num_hidden_layers=1).state_dict(), 1))


def test_pitfall_33_weights_cannot_change_while_nodes_are_sampled():
    engine = TorchEngine(llama(), max_len=64)

    async def main() -> None:
        engine.gate.enter()  # somebody runs, so the engine waits
        asking = asyncio.create_task(engine.sample(random_ids(5), SamplingParams(max_tokens=3), key(0)))
        engine.gate.enter()
        await asyncio.sleep(0)
        try:
            with pytest.raises(RuntimeError, match="would mix policy versions"):
                await engine.load_weights(llama(1).state_dict(), 1)
        finally:
            engine.gate.leave()
        assert (await asking).version == 0

    run_sync(main())


# --- waits ------------------------------------------------------------------------------------------------------------


def test_pitfall_11_engine_that_never_answers_is_a_timeout_that_names_the_phase():
    engine = TorchEngine(llama(), max_len=64, timeout=0.3)
    began = time.monotonic()

    async def main() -> None:
        engine.gate.enter()
        engine.gate.enter()  # an agent that never parks keeps the lockstep engine waiting
        await engine.sample(random_ids(5), SamplingParams(max_tokens=3), key(4, path=(0, 2)))

    with pytest.raises(TimeoutError, match=r"sampling: no answer from torch_engine for node 0\.2 of t4 in 0\.3 s"):
        run_sync(main())
    assert time.monotonic() - began < 2
    engine.forget_nodes()
    assert len(sample_all(engine, [random_ids(5)], SamplingParams(max_tokens=3))[0].ids) == 3


def test_a_fault_in_a_tick_ends_every_wait_with_that_fault(monkeypatch):
    engine = TorchEngine(llama(), max_len=64)

    def broken(*_: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(engine, "_forward", broken)
    with pytest.raises(RuntimeError, match="no memory left"):
        sample_all(engine, [random_ids(5), random_ids(6)], SamplingParams(max_tokens=3))
    monkeypatch.undo()
    engine.forget_nodes()
    assert len(sample_all(engine, [random_ids(5)], SamplingParams(max_tokens=3))[0].ids) == 3


def test_cancelled_requests_give_their_slots_back():
    engine = TorchEngine(llama(), max_len=200, slots=2)

    async def main() -> None:
        engine.gate.enter()
        for k in range(5):
            asking = asyncio.create_task(agent(engine, random_ids(5), SamplingParams(max_tokens=190), key(k)))
            await asyncio.sleep(0)
            await engine.sample(random_ids(5), SamplingParams(max_tokens=2), key(100 + k))
            assert key(k) in engine._active, "it has begun"
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            engine.release(key(100 + k))
        engine.gate.leave()

    run_sync(main())
    assert engine.gate.running == 0
    assert sorted(engine._free) == [0, 1]
    assert len(sample_all(engine, [random_ids(5)] * 3, SamplingParams(max_tokens=3))) == 3


def test_one_engine_serves_several_event_loops():
    engine = TorchEngine(llama(), max_len=64)
    prompts, params = [random_ids(5), random_ids(50)], SamplingParams(max_tokens=3)
    first, second = (sample_all(engine, prompts, params) for _ in range(2))
    assert [c.ids for c in first] == [c.ids for c in second]
