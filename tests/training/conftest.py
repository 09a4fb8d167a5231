"""A tiny policy and trees that it sampled itself, so that ratios start at 1."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from lib.tree import Tree
from tests.training.policies import fill_logprobs, random_trees, tiny_llama


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def trees(model: LlamaForCausalLM) -> list[Tree]:
    """Twelve trees in three groups, sampled (as far as log-probabilities go) by `model`."""
    return fill_logprobs(model, random_trees())
