"""Sampling speed on a multi-turn tree workload: `torch_engine` against two ways of using Hugging Face `generate`.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py [--policy DIR] [--trees 24]

Everything runs in one process of one thread, one after the other, on the same trees with the same forced lengths, so
trust the ratios of one run. Workload: trees of 1 to 40 nodes, three turns a node (observation 20-60 tokens, action 5-25
tokens), children start when their parent ends the turn that launches them. Prints one JSON object.

- *waves*: all ready nodes in one left-padded batch, the whole conversation read again every turn (batched `generate`)
- *waves with cache*: one node at a time, keeping its cache between turns
- *engine*: `lib.sampling.torch_engine`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from lib.policy import load_policy
from lib.sampling import RngKey, SamplingParams
from lib.sampling.torch_engine import TorchEngine

WAVE = 256  # most rows of one batched generate


@dataclass
class Job:
    """One node of the workload: three turns of (observation ids, action length), and the children of each turn."""

    path: tuple[int, ...]
    turns: list[tuple[list[int], int]]
    children: dict[int, list[Job]] = field(default_factory=dict)


def workload(trees: int, vocabulary: int, seed: int = 0) -> list[Job]:
    """Random trees; each child hangs on a random earlier node and a random turn of it."""
    rng = np.random.default_rng(seed)

    def job(path: tuple[int, ...]) -> Job:
        turns = [
            (rng.integers(4, vocabulary, rng.integers(20, 61)).tolist(), int(rng.integers(5, 26))) for _ in range(3)
        ]
        return Job(path, turns)

    roots = []
    for t in range(trees):
        nodes = [job((t,))]
        for _ in range(int(np.clip(rng.geometric(1 / 18), 1, 40)) - 1):
            parent = nodes[rng.integers(len(nodes))]
            child = job((*parent.path, sum(map(len, parent.children.values()))))
            parent.children.setdefault(int(rng.integers(3)), []).append(child)
            nodes.append(child)
        roots.append(nodes[0])
    return roots


async def with_engine(engine: TorchEngine, roots: list[Job]) -> int:
    """Play the workload through the engine; returns sampled tokens."""
    sampled = 0

    async def play(job: Job) -> None:
        nonlocal sampled
        ids: list[int] = []
        started = []
        for turn, (observation, length) in enumerate(job.turns):
            ids += observation
            key = RngKey(0, 0, "bench", 0, job.path, turn)
            done = await engine.sample(ids, SamplingParams(max_tokens=length), key)
            ids += done.ids
            sampled += len(done.ids)
            for child in job.children.get(turn, []):
                engine.gate.enter()
                started.append(asyncio.create_task(play(child)))
        engine.release(key)
        engine.gate.leave()
        await asyncio.gather(*started)

    for _ in roots:
        engine.gate.enter()
    await asyncio.gather(*[play(r) for r in roots])
    return sampled


def in_waves(model: LlamaForCausalLM, roots: list[Job]) -> int:
    """Batched `generate` for whatever is ready; a wave lasts as long as its longest action."""
    ready = [(job, 0, []) for job in roots]
    sampled = 0
    while ready:
        wave, ready = ready[:WAVE], ready[WAVE:]
        prompts = [ids + job.turns[turn][0] for job, turn, ids in wave]
        width, most = max(map(len, prompts)), max(job.turns[turn][1] for job, turn, _ in wave)
        padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=most,
                             min_new_tokens=most, pad_token_id=0)  # fmt: skip
        for (job, turn, _), prompt, row in zip(wave, prompts, out[:, width:].tolist(), strict=True):
            length = job.turns[turn][1]
            sampled += length
            ready += [(child, 0, []) for child in job.children.get(turn, [])]
            if turn + 1 < len(job.turns):
                ready.append((job, turn + 1, prompt + row[:length]))
    return sampled


def with_cache(model: LlamaForCausalLM, roots: list[Job]) -> int:
    """`generate` node by node, each keeping its cache between turns."""
    todo, sampled = list(roots), 0
    while todo:
        job = todo.pop()
        cache, ids = DynamicCache(config=model.config), []
        for turn, (observation, length) in enumerate(job.turns):
            ids += observation
            prompt = torch.tensor([ids])
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, do_sample=True,
                                 top_k=0, max_new_tokens=length, min_new_tokens=length, pad_token_id=0)  # fmt: skip
            ids = out[0].tolist()
            sampled += length
            todo += job.children.get(turn, [])
    return sampled


def gflops(n: int = 1024, repeats: int = 8) -> float:
    """Matrix product rate of this machine, one thread, fp32."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    started = time.process_time()
    for _ in range(repeats):
        a @ b
    return 2 * n**3 * repeats / (time.process_time() - started) / 1e9


def main() -> None:
    """Run all three on the same workload and print rates, ratios and the share of the roofline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", help="a Llama policy; a random one of the micro shape without it")
    parser.add_argument("--trees", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.policy:
        model = load_policy(args.policy).model
    else:
        shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=512, num_key_value_heads=1, max_position_embeddings=2048, **shape)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None  # lengths are forced
    roots = workload(args.trees, model.config.vocab_size)
    results = {}

    def timed(name: str, run) -> None:
        started = time.process_time()
        sampled = run()
        results[name] = sampled / (time.process_time() - started)

    engine = TorchEngine(model, max_len=1024, slots=96)
    asyncio.run(with_engine(engine, workload(2, model.config.vocab_size, seed=1)))  # warm up
    before = dict(engine.stats)
    started = time.process_time()
    timed("engine", lambda: asyncio.run(with_engine(engine, roots)))
    seconds = time.process_time() - started
    processed = engine.stats["tokens_processed"] - before["tokens_processed"]
    with torch.inference_mode():
        timed("waves", lambda: in_waves(model, roots))
        timed("waves with cache", lambda: with_cache(model, roots))
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n and "norm" not in n)
    ideal = 2 * weights * processed / (gflops() * 1e9)
    print(json.dumps({
        "sampled_tokens_per_cpu_second": {k: round(v) for k, v in results.items()},
        "processed_tokens_per_cpu_second": round(processed / seconds),
        "ratio_to_waves": round(results["engine"] / results["waves"], 2),
        "ratio_to_waves_with_cache": round(results["engine"] / results["waves with cache"], 2),
        "share_of_roofline": round(ideal / seconds, 3),
        "roofline": "linear layers of all processed tokens at this machine's one-thread fp32 matrix rate",
        "parameters": sum(p.numel() for p in model.parameters()), "trees": args.trees,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
