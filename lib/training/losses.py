"""Token losses and how they are averaged, kept apart so that any of one goes with any of the other.

A loss maps 1-D tensors over trained tokens to one loss per token. An aggregation maps sequence lengths to one
coefficient per sequence. Their product, summed, is the loss of the batch; because the coefficients are computed over
the whole batch *before* it is split, the micro-batches' losses add up to exactly the whole batch's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lib.errors import UserError

Aggregation = Literal["token_mean", "sequence_mean", "bnpo", "constant"]


def reinforce(logp: Tensor, old_logp: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Plain policy gradient, -A log pi; with A = 1 this is the cross-entropy of imitation.

    Args:
        logp: log-probabilities under the policy, with gradient, shape (T,). old_logp: under the behaviour policy,
            shape (T,). advantage: advantage times weight, shape (T,).

    Returns:
        Loss per token, shape (T,), and which tokens clipping took out of the gradient or bounded, shape (T,).

    Source: `rao-eq5` on policy.
    """
    return -advantage * logp, torch.zeros_like(logp, dtype=torch.bool)


def ppo_clip(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, eps_low: float = 0.2, eps_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, -min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A): a token that moved far stops pushing.

    Args and returns as `reinforce`; rho = pi / pi_behaviour per token, never per sequence (pitfall 21).
    """
    ratio = (logp - old_logp).exp()
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high)
    clipped = ((ratio > 1 + eps_high) & (advantage > 0)) | ((ratio < 1 - eps_low) & (advantage < 0))
    return -(ratio * advantage).minimum(bounded * advantage), clipped


def cispo(logp: Tensor, old_logp: Tensor, advantage: Tensor, eps_high: float = 5.0) -> tuple[Tensor, Tensor]:
    """-sg(clip(rho, 0, eps_high)) A log pi: bounds a token's weight yet never drops its gradient.

    Args and returns as `reinforce`.

    Source: the loss of RAO's released configurations.
    """
    ratio = (logp - old_logp).exp().detach()
    return -ratio.clamp(0, eps_high) * advantage * logp, ratio > eps_high


def coefficients(
    lengths: Sequence[int], aggregation: Aggregation, local_batch: int = 1, max_length: int | None = None
) -> list[float]:
    """What each trained token of a sequence counts in the batch's loss.

    `token_mean`: 1 / all tokens (RAO, DAPO). `sequence_mean`: 1 / (sequences * own tokens) (GRPO). `bnpo`: the token
    mean of each run of `local_batch` consecutive sequences, averaged over runs (TRL's bnpo, where a run is what one
    device sees at once). `constant`: 1 / (sequences * max_length) (Dr. GRPO).

    Args:
        lengths: trained tokens of every sequence in the whole batch, each at least 1.
        aggregation: see above.
        local_batch: sequences per run for `bnpo`. max_length: the constant for `constant`.

    Returns:
        One coefficient per sequence.

    Raises:
        UserError: unknown aggregation, or `constant` without its length.
    """
    if not lengths:
        return []
    n = len(lengths)
    if aggregation == "token_mean":
        return [1 / sum(lengths)] * n
    if aggregation == "sequence_mean":
        return [1 / (n * own) for own in lengths]
    if aggregation == "bnpo":
        runs = [sum(lengths[i : i + local_batch]) for i in range(0, n, local_batch)]
        return [1 / (len(runs) * runs[i // local_batch]) for i in range(n)]
    if aggregation == "constant":
        if max_length is None:
            raise UserError("aggregation 'constant' divides by a fixed length; set max_length to the token limit")
        return [1 / (n * max_length)] * n
    raise UserError(f"aggregation {aggregation!r} is unknown; use one of {', '.join(get_args(Aggregation))}")
