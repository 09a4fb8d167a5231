"""From trees to tensors and back to log-probabilities: the token policy's half of training.

Sequences of similar length share a micro-batch and only trained tokens meet the output head, so a batch of tree nodes
with very different lengths costs little more than its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from lib.errors import UserError
from lib.training import losses
from lib.training.advantages import is_truncated
from lib.tree import Node, Tree


class Batch(Protocol):
    """What the trainer needs of a micro-batch (a dataclass): three aligned vectors over its N trained decisions and a
    name for each sequence. Everything else is between `collate` and `logprobs`."""

    old_logp: Tensor
    adv: Tensor
    coef: Tensor
    names: Sequence[str]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        ...

    def name(self, index: int) -> str:
        """The node that trained decision `index` belongs to."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences with N trained tokens in all.

    Position convention: `mask[b, t]` marks the token `ids[b, t]` itself as trained; it is predicted from the hidden
    state at t - 1. So t >= 1, and padding is never marked. The vectors list the marked tokens row by row.

    Args:
        ids: token ids, shape (B, T). mask: trained tokens, the only mask there is (pitfall 4), shape (B, T).
        old_logp: behaviour log-probabilities, shape (N,). adv: advantage times weight, shape (N,).
        coef: what a token counts in the whole batch's loss, shape (N,).
        names: task, sample and node of each row, length B.
    """

    ids: Tensor
    mask: Tensor
    old_logp: Tensor
    adv: Tensor
    coef: Tensor
    names: tuple[str, ...]

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch on another device."""
        moved = {k: getattr(self, k).to(device) for k in ("ids", "mask", "old_logp", "adv", "coef")}
        return replace(self, **moved)

    def name(self, index: int) -> str:
        """The row that trained token `index` belongs to."""
        return self.names[int(self.mask.nonzero()[index, 0])]


def collate(
    trees: list[Tree],
    drop_truncated: bool = False,
    micro_batch: int = 16,
    aggregation: losses.Aggregation = "token_mean",
    max_length: int | None = None,
) -> list[MicroBatch]:
    """Cut a batch of trees into micro-batches of similar length, one sequence per node.

    A node whose advantage times weight is 0 adds nothing to the gradient, so it is not put into a micro-batch; but it
    *does* count in the denominators, or else the learning rate would depend on how many nodes happened to be average.
    Nodes without sampled tokens, and truncated nodes under `drop_truncated`, count nowhere.

    Args:
        trees: advantages and weights set. drop_truncated, micro_batch, aggregation, max_length: as in `TrainerConfig`.

    Returns:
        Micro-batches; empty if no node has signal.

    Raises:
        ValueError: broken record (lengths, mask, non-finite log-probability), naming the node (pitfalls 3, 9).
        UserError: a node without advantage, or text without token ids (pitfall 30).
    """
    rows: list[tuple[str, Node]] = []
    for tree in trees:
        tree.check()
        for node in tree:
            name = f"{tree.task_id}/{tree.sample}/{node.id}"
            _check(node, name)
            if node.tokens_out and not (drop_truncated and is_truncated(node)):
                rows.append((name, node))
    coefs = losses.coefficients([node.tokens_out for _, node in rows], aggregation, micro_batch, max_length)
    live = [(name, node, c) for (name, node), c in zip(rows, coefs, strict=True) if node.advantage * node.weight != 0]
    return _pack(live, micro_batch)


def _check(node: Node, name: str) -> None:
    if node.advantage is None:
        raise UserError(f"node {name} has no advantage; call lib.training.advantages.assign before training")
    for segment in node.segments:
        if segment.text and not segment.ids:
            raise UserError(
                f"node {name} has a segment with text but without token ids; record the ids the policy saw, "
                "they are never made again from text"
            )
    if node.segments and node.segments[0].trainable:
        raise UserError(f"node {name} starts with a sampled token; its first token needs a prompt to be predicted from")


def _pack(rows: list[tuple[str, Node, float]], micro_batch: int) -> list[MicroBatch]:
    rows = sorted(rows, key=lambda row: len(row[1].ids))
    return [_pad(rows[i : i + micro_batch]) for i in range(0, len(rows), micro_batch)]


def _pad(rows: list[tuple[str, Node, float]]) -> MicroBatch:
    nodes = [node for _, node, _ in rows]
    width = max(len(node.ids) for node in nodes)
    counts = torch.tensor([node.tokens_out for node in nodes])
    advantages = torch.tensor([(node.advantage or 0.0) * node.weight for node in nodes], dtype=torch.float32)
    return MicroBatch(
        ids=torch.tensor([node.ids + [0] * (width - len(node.ids)) for node in nodes]),
        mask=torch.tensor([node.mask + [False] * (width - len(node.ids)) for node in nodes]),
        old_logp=torch.tensor([x for node in nodes for s in node.segments for x in s.logprobs or []]),
        adv=advantages.repeat_interleave(counts),
        coef=torch.tensor([c for _, _, c in rows], dtype=torch.float32).repeat_interleave(counts),
        names=tuple(name for name, _, _ in rows),
    )


def token_logprobs(
    model: nn.Module, batch: MicroBatch, temperature: float = 1.0, positions: Tensor | None = None
) -> Tensor:
    """Score trained tokens only: the head is the largest matrix of a small model, and most tokens are observations.

    No attention mask: padding is on the right, and causal attention never looks to the right.

    Args:
        model: a Hugging Face causal language model, with or without PEFT adapter.
        batch: see `MicroBatch`. temperature: divides the logits, as it did when sampling.
        positions: position of each token if not 0, 1, 2, ..., shape (B, T).

    Returns:
        Log-probabilities with gradient, fp32, shape (N,).

    Raises:
        UserError: the model changes logits after its head, which this function would not see.
    """
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        if (value := getattr(model.config, name, neutral)) not in (neutral, None):
            raise UserError(f"{model.config.model_type} models have {name}={value}, which this trainer does not apply")
    # Without a mask, transformers takes a gap in the positions for the start of another packed sequence and hides all
    # earlier tokens from it. A mask of ones prevents that and still allows the fast causal path.
    seen = None if positions is None else torch.ones_like(batch.ids)
    decoder = model.get_decoder()
    hidden = decoder(batch.ids, attention_mask=seen, position_ids=positions, use_cache=False).last_hidden_state
    row, column = batch.mask.nonzero(as_tuple=True)
    logits = model.get_output_embeddings()(hidden[row, column - 1]).float() / temperature
    return logits.gather(1, batch.ids[batch.mask][:, None])[:, 0] - logits.logsumexp(1)


def recompute_logprobs(
    model: nn.Module, trees: list[Tree], temperature: float = 1.0, micro_batch: int = 16
) -> tuple[Tensor, Tensor]:
    """Recorded against recomputed log-probabilities of all sampled tokens, to see a wrong sampling path (pitfall 8).

    Args:
        model, temperature, micro_batch: as elsewhere. trees: advantages are not needed.

    Returns:
        Recorded and recomputed log-probabilities, two vectors of shape (N,).
    """
    rows = [(f"{t.task_id}/{t.sample}/{n.id}", n, 0.0) for t in trees for n in t if n.tokens_out]
    device = next(model.parameters()).device
    batches = [batch.to(device) for batch in _pack(rows, micro_batch)]
    with torch.no_grad():
        fresh = [token_logprobs(model, batch, temperature).cpu() for batch in batches]
    return torch.cat([batch.old_logp.cpu() for batch in batches]), torch.cat(fresh)
