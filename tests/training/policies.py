"""A tiny policy, random trees, and the naive way to score them."""

from __future__ import annotations

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lib.tree import Node, Segment, Tree


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of 12 thousand parameters; large weights, so that its distributions are far from uniform."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=256, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def score(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The naive oracle: full logits of one sequence; entry t scores token t + 1, shape (T - 1,)."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def fill_logprobs(model: torch.nn.Module, trees: list[Tree], temperature: float = 1.0) -> list[Tree]:
    """Write the policy's own log-probabilities into trainable segments."""
    with torch.no_grad():
        for node in (node for tree in trees for node in tree):
            scores, start = score(model, node.ids, temperature).tolist(), 0
            for segment in node.segments:
                if segment.trainable:
                    segment.logprobs = scores[start - 1 : start - 1 + len(segment.ids)]
                start += len(segment.ids)
    return trees


def random_trees(groups: int = 3, members: int = 4, seed: int = 0) -> list[Tree]:
    """Trees of 1 to 5 nodes with random tokens and rewards; log-probabilities are 0 until `fill_logprobs`."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(64) for _ in range(rng.randint(low, high))]

    trees = []
    for g in range(groups):
        prompt = ids(3, 8)
        for sample in range(members):
            tree = Tree(f"task{g}", f"group{g}", sample)
            for name in ["0", "0.0", "0.1", "0.0.0", "0.1.0"][: rng.randint(1, 5)]:
                node = Node(
                    name, "t", [Segment(prompt if name == "0" else ids(3, 8), False, None, "prompt")], "finished"
                )
                for _ in range(rng.randint(1, 3)):
                    action = ids(1, 6)
                    node.segments.append(Segment(action, True, [0.0] * len(action), "action"))
                    node.segments.append(Segment(ids(1, 5), False, None, "observation"))
                node.reward = round(rng.random(), 2)
                tree.add(node)
            trees.append(tree)
    return trees
