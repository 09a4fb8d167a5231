"""How much faster one update is than the usual padded one, on a batch of tree nodes.

    python tests/benchmarks/bench_trainer.py [--repeats 5] [--sequences 128]

Both sides do the same optimiser step (same loss, clipping, AdamW; checked) on the same nodes, in turns within one run,
so that the ratio survives a busy machine. "Padded" is the common way: all sequences of the batch padded on the right to
the longest, an attention mask, logits for every position. A second padded variant, in micro-batches of 16 in the given
order, shows how much of the gain is only micro-batching. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from lib.training import losses  # noqa: E402
from lib.training.trainer import Trainer, TrainerConfig  # noqa: E402
from lib.tree import Node, Segment, Tree  # noqa: E402

VOCABULARY = 600


def policy() -> LlamaForCausalLM:
    """The micro policy's shape: 4 layers of 128, one KV head, about a million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def workload(sequences: int) -> list[Tree]:
    """Trees of one node: three turns, or one in every third; observations of 20 to 60 tokens, actions of 5 to 25."""
    rng = random.Random(0)
    trees = []
    for i in range(sequences):
        node = Node("0", "t", status="finished", advantage=rng.choice([-1.0, 1.0]))
        for _ in range(rng.choice([1, 3, 3])):
            seen, action = (rng.choices(range(VOCABULARY), k=rng.randint(*span)) for span in ((20, 60), (5, 25)))
            node.segments += [Segment(seen, False, None, "o"), Segment(action, True, [-6.4] * len(action), "a")]
        trees.append(Tree("bench", "g", i, nodes={"0": node}))
    return trees


def padded_step(model: LlamaForCausalLM, trees: list[Tree], size: int) -> Callable[[], float]:
    """One update the usual way, `size` sequences per forward pass in the given order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6, betas=(0.9, 0.95), weight_decay=0.017)
    nodes = [tree.root for tree in trees]
    tokens = sum(node.tokens_out for node in nodes)

    def pad(rows: list[list], fill: float) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows])

    def step() -> float:
        total = 0.0
        for i in range(0, len(nodes), size):
            part = nodes[i : i + size]
            ids, mask = pad([n.ids for n in part], 0), pad([n.mask for n in part], False)[:, 1:]
            old = pad([n.logprobs for n in part], 0.0)[:, 1:]
            attention = pad([[1] * len(n.ids) for n in part], 0)
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            advantage = torch.tensor([[n.advantage] for n in part])
            per_token, _ = losses.cispo(logp, old, advantage)
            loss = (per_token * mask).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--sequences", type=int, default=128, help="nodes in the batch")
    options = parser.parse_args()
    trees = workload(options.sequences)
    trainer = Trainer(policy(), TrainerConfig(cpu=True, check_ratio=False))
    variants: dict[str, Callable[[], float]] = {
        "padded": padded_step(policy(), trees, options.sequences),
        "padded_micro_batches": padded_step(policy(), trees, 16),
        "trainer": lambda: trainer.step(trees)["loss"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(options.repeats + 1):
        values = []
        for name, step in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            values.append(step())
            if repeat:  # the first round warms up
                seconds[name].append(time.process_time() - cpu)
            print(f"round {repeat} {name}: {time.perf_counter() - wall:.2f} s")
        if max(values) - min(values) > 1e-3:
            raise SystemExit(f"the variants do not compute the same loss: {values}")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    lengths = [len(tree.root.ids) for tree in trees]
    print(
        json.dumps(
            {
                "benchmark": "trainer", "threads": torch.get_num_threads(), "torch": torch.__version__,
                "sequences": len(lengths), "tokens": sum(lengths), "longest": max(lengths),
                "trained_tokens": sum(tree.root.tokens_out for tree in trees),
                "cpu_seconds_per_step": {name: round(value, 3) for name, value in median.items()},
                "speedup_over_padded": round(median["padded"] / median["trainer"], 2),
                "speedup_over_padded_micro_batches": round(median["padded_micro_batches"] / median["trainer"], 2),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
