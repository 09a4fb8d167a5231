"""Token losses and aggregations against hand-worked values and against TRL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import UserError
from lib.training import losses

TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
AGGREGATION = {
    "grpo": "sequence_mean", "bnpo": "bnpo", "dapo": "token_mean", "dr_grpo": "constant", "cispo": "token_mean",
}  # fmt: skip


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_pitfall_21_ratio_is_per_token_three_token_example():
    old = t(0.5, 0.5, 0.5).log()
    logp = t(0.75, 0.25, 0.5).log().requires_grad_()  # ratios 1.5, 0.5, 1; their product is 0.75
    per_token, clipped = losses.ppo_clip(logp, old, t(1, 1, 1))
    assert per_token.tolist() == pytest.approx([-1.2, -0.5, -1.0])  # only the first is clipped
    assert clipped.tolist() == [True, False, False]
    per_token.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.0, -0.5, -1.0])


def test_ppo_clip_takes_the_pessimistic_side():
    logp, old = t(1.5, 0.5, 1.5, 0.5).log(), t(1, 1, 1, 1).log()
    per_token, clipped = losses.ppo_clip(logp, old, t(1, 1, -1, -1), eps_low=0.2, eps_high=0.3)
    assert per_token.tolist() == pytest.approx([-1.3, -0.5, 1.5, 0.8])
    assert clipped.tolist() == [True, False, False, True]


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    logp = t(-1.0, -1.0, -1.0).requires_grad_()
    old = (t(-1.0, -1.0, -1.0) - t(1.0, 2.0, 8.0).log()).detach()  # ratios 1, 2, 8
    per_token, clipped = losses.cispo(logp, old, t(1, -2, 3))
    assert per_token.tolist() == pytest.approx([1 * 1 * 1, 2 * -2 * 1, 5 * 3 * 1])
    per_token.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-1.0, 4.0, -15.0])  # no gradient through the ratio, none dropped
    assert clipped.tolist() == [False, False, True]


def test_reinforce_with_advantage_one_is_cross_entropy():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1, 4, 8, 0, 3])
    logp = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
    per_token, clipped = losses.reinforce(logp, torch.zeros(5), torch.ones(5))
    assert per_token.mean().item() == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item())
    assert not clipped.any()


def test_coefficients_by_hand():
    lengths = [1, 3, 4]
    assert losses.coefficients(lengths, "token_mean") == [1 / 8] * 3
    assert losses.coefficients(lengths, "sequence_mean") == pytest.approx([1 / 3, 1 / 9, 1 / 12])
    assert losses.coefficients(lengths, "bnpo", local_batch=2) == pytest.approx([1 / 8, 1 / 8, 1 / 8])
    assert losses.coefficients([1, 1, 4], "bnpo", local_batch=2) == pytest.approx([1 / 4, 1 / 4, 1 / 8])
    assert losses.coefficients(lengths, "constant", max_length=10) == [1 / 30] * 3
    assert losses.coefficients([], "token_mean") == []


def test_coefficients_refuse_what_they_do_not_know():
    with pytest.raises(UserError, match="'mean' is unknown; use one of token_mean"):
        losses.coefficients([1], "mean")
    with pytest.raises(UserError, match="set max_length"):
        losses.coefficients([1], "constant")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 5))
def test_every_mean_gives_a_batch_of_ones_the_loss_one(lengths: list[int], local: int):
    for aggregation in ("token_mean", "sequence_mean", "bnpo"):
        coefs = losses.coefficients(lengths, aggregation, local)
        assert math.isclose(sum(c * n for c, n in zip(coefs, lengths, strict=True)), 1.0)


@pytest.mark.parametrize("kind", sorted(TRL["types"]))
def test_loss_of_flat_groups_equals_trl(kind: str):
    micro, size = TRL["types"][kind]["micro"], TRL["micro_batch"]
    assert len(micro) >= 2
    rows = [row for m in micro for row in zip(m["logp"], m["old_logp"], m["advantage"], strict=True)]
    coefs = losses.coefficients([len(logp) for logp, _, _ in rows], AGGREGATION[kind], size, TRL["max_tokens"])
    loss = losses.cispo if kind == "cispo" else losses.ppo_clip
    values = [
        c * loss(t(*logp), t(*old), t(*[advantage] * len(logp)))[0].sum().item()
        for (logp, old, advantage), c in zip(rows, coefs, strict=True)
    ]
    for i, m in enumerate(micro):  # each micro-batch by itself, not only the sum
        assert sum(values[i * size : (i + 1) * size]) == pytest.approx(m["loss"], abs=1e-5)
    moved = max(abs(a - b) for logp, old, _ in rows for a, b in zip(logp, old, strict=True))
    assert moved > 0.2, "the fixture must reach the clipped region, or it proves little"
