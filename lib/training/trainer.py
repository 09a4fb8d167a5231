"""One optimiser step on a batch of trees, for any Hugging Face causal language model, full or with a PEFT adapter.

Trees in, metrics out: `collate` cuts sequences and `token_logprobs` scores their trained tokens (`lib.training.batch`),
a loss is averaged with whole-batch coefficients (`lib.training.losses`), AdamW steps. Nothing here draws a random
number (no shuffling, no dropout): there is no generator to pass, and weights, optimiser and counters are all that
resuming needs.

Imitation is the same path: advantage 1 and loss "reinforce" with "token_mean" is cross-entropy on trainable tokens.

Several processes (Accelerate): every process is given the *same* list of trees and takes every n-th micro-batch, so
advantages, depth weights and denominators stay those of the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lib.errors import UserError
from lib.training import losses
from lib.training.advantages import GroupReport
from lib.training.batch import Batch, MicroBatch, collate, token_logprobs
from lib.tree import Tree


class RatioMismatch(UserError):
    """The trainer does not reproduce the sampler's log-probabilities before the first update (pitfall 5)."""


class NoSignal(UserError):
    """Several steps in a row without a single group whose rewards differ (pitfalls 13, 15)."""


class NonFinite(UserError):
    """A log-probability or a gradient norm is not a finite number (pitfall 9)."""


class TrainerConfig(BaseModel):
    """How to train; defaults are RAO's released settings where they exist.

    Raises:
        UserError: an unknown name or a value out of range, in one sentence.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    loss: Literal["reinforce", "ppo_clip", "cispo"] = "cispo"
    """Token loss, see `lib.training.losses`."""
    aggregation: losses.Aggregation = "token_mean"
    """How token losses are averaged, see `lib.training.losses.coefficients`."""
    eps_low: float = Field(0.2, ge=0, le=1)
    """`ppo_clip`: ratios below 1 - eps_low stop pushing down."""
    eps_high: float | None = Field(None, gt=0)
    """`ppo_clip`: ratios above 1 + eps_high stop pushing up (None: 0.2). `cispo`: bound of the ratio (None: 5.0)."""
    temperature: float = Field(1.0, gt=0)
    """Temperature that sampled the trees; logits are divided by it."""
    lr: float = Field(3e-6, gt=0)
    """Learning rate after warm-up, constant."""
    warmup: int = Field(0, ge=0)
    """Updates over which the rate rises linearly to `lr`; the first update already moves."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.017, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch of trees."""
    minibatches: int = Field(1, ge=1)
    """Updates per pass; tree i goes to minibatch i mod minibatches."""
    micro_batch: int = Field(16, ge=1)
    """Sequences per forward pass, and per local batch of `bnpo`; changes memory and speed, else never the result."""
    max_length: int | None = Field(None, ge=1)
    """Constant denominator per sequence for aggregation "constant"."""
    drop_truncated: bool = False
    """Leave nodes that were cut off out of losses and denominators alike."""
    check_ratio: bool = True
    """Before the first update the mean importance ratio must lie in [0.98, 1.02]; False only for imitation, whose
    demonstrator has no log-probabilities to compare with."""
    max_silent_steps: int = Field(5, ge=1)
    """This many steps in a row without signal end the run with `NoSignal`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time, same result."""
    precision: Literal["no", "bf16"] = "no"
    """Autocast of the forward pass; weights keep their own type."""
    cpu: bool = False
    """Stay on the CPU even if there is an accelerator."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"training setting {name}={first['input']!r} is not accepted: {first['msg']}; "
                f"known settings: {', '.join(type(self).model_fields)}"
            ) from error


def _token_batches(trees: list[Tree], config: TrainerConfig) -> list[MicroBatch]:
    return collate(trees, config.drop_truncated, config.micro_batch, config.aggregation, config.max_length)


class _Scorer(nn.Module):
    """The policy behind one `forward`, because data parallel wrappers see gradients only through theirs."""

    def __init__(self, model: nn.Module, logprobs: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.logprobs = model, logprobs

    def forward(self, batch: Batch, temperature: float) -> Tensor:
        return self.logprobs(self.model, batch, temperature)


class Trainer:
    """Optimises a policy on batches of trees.

    The model is set to eval mode: the sampler has no dropout, and an importance ratio compares the two. A process's
    first `Accelerator` fixes its device and precision, so trainers that live side by side agree on both.

    Args:
        model: the policy; trained in place, only parameters that require a gradient.
        config: see `TrainerConfig`.
        collate: cuts trees into batches; the default makes token sequences.
        logprobs: scores a batch with gradient; the default is `token_logprobs`.
        accelerator: one made by the caller, for several processes or trackers.

    Raises:
        UserError: nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        collate: Callable[[list[Tree], TrainerConfig], list[Any]] = _token_batches,
        logprobs: Callable[..., Tensor] = token_logprobs,
        accelerator: Accelerator | None = None,
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise UserError(f"{type(model).__name__} has no parameter that requires a gradient; add LoRA or unfreeze")
        self.config, self.model, self._collate = config, model.eval(), collate
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.modules():  # layers checkpoint in training mode only; their dropout stays in eval mode
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = True
        self.accelerator = accelerator or Accelerator(cpu=config.cpu, mixed_precision=config.precision)
        adam = torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        self._scorer, self.optimizer = self.accelerator.prepare(_Scorer(model, logprobs), adam)
        ramp = max(1, config.warmup)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda update: min(1.0, (update + 1) / ramp))
        self.steps = self.updates = self.silent_steps = 0

    def step(self, trees: list[Tree], report: GroupReport | None = None) -> dict[str, float]:
        """Train on one batch: `epochs` times `minibatches` updates, one by default.

        A batch without signal changes nothing and is counted; the count is reset by the next batch that has some.

        Args:
            trees: advantages and weights set. report: what `assign` said about the groups, for the metrics.

        Returns:
            Plain numbers. Ratios are raw, before any clipping (pitfall 7), over the nodes that were scored; `kl` is the
            mean of ratio - 1 - log ratio, an estimate of KL(behaviour || policy); `entropy` is the mean of -log pi
            over sampled tokens; `tokens` were scored, `sequences` hold them; `seconds` is wall-clock time.

        Raises:
            RatioMismatch, NoSignal, NonFinite: see there. UserError, ValueError: as `collate`.
        """
        started = time.perf_counter()
        n = self.config.minibatches
        parts = [self._collate(trees[i::n], self.config) for i in range(n)]
        updates = [self._update(part) for part in parts * self.config.epochs if part]
        self.steps += 1
        self.silent_steps = 0 if updates else self.silent_steps + 1
        if self.silent_steps >= self.config.max_silent_steps:
            raise NoSignal(
                f"{self.silent_steps} steps in a row had no group whose rewards differ, so nothing can be learned; "
                "look at the rewards: the task may be too hard, too easy, or every episode may be truncated"
            )
        metrics = _merge(updates)
        if report is not None:
            metrics |= {"groups": report.groups, "dropped": report.dropped, "kept": report.kept}
            metrics["effective_batch"] = report.effective_batch
        return metrics | {"step": self.steps, "updates": len(updates), "seconds": time.perf_counter() - started}

    def state_dict(self) -> dict[str, int]:
        """Counters that a checkpoint keeps beside weights, optimiser and scheduler."""
        return {"steps": self.steps, "updates": self.updates, "silent_steps": self.silent_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Inverse of `state_dict`."""
        self.steps, self.updates, self.silent_steps = state["steps"], state["updates"], state["silent_steps"]

    def _update(self, batches: list[Batch]) -> dict[str, float]:
        acc, world = self.accelerator, self.accelerator.num_processes
        mine = batches[acc.process_index :: world]
        count = -(-len(batches) // world)  # all processes must run backward equally often
        stats = _Stats(acc.device)
        for i in range(count):
            real = i < len(mine)
            batch = (mine[i] if real else replace(batches[0], coef=batches[0].coef * 0)).to(acc.device)
            with acc.no_sync(self._scorer) if i + 1 < count else nullcontext():
                logp = self._scorer(batch, self.config.temperature)
                if not logp.isfinite().all():
                    self.optimizer.zero_grad()
                    bad = int((~logp.isfinite()).nonzero()[0])
                    raise NonFinite(f"the policy gives node {batch.name(bad)} a log-probability of {logp[bad].item()}")
                loss, clipped = self._loss(logp, batch)
                acc.backward(loss * world)  # data parallel averages over processes; the coefficients already do
            if real:
                stats.add(loss.detach(), logp.detach(), batch.old_logp, clipped)
        metrics = stats.metrics(acc)
        if self.updates == 0 and self.config.check_ratio and not 0.98 <= metrics["ratio_mean"] <= 1.02:
            self.optimizer.zero_grad()
            raise RatioMismatch(
                f"before the first update the mean importance ratio is {metrics['ratio_mean']:.4f}, not within "
                "[0.98, 1.02]: sampler and trainer disagree; compare temperature, weights and log-probabilities"
            )
        norm = float(acc.clip_grad_norm_(self._scorer.parameters(), self.config.max_grad_norm))
        if not norm < float("inf"):
            self.optimizer.zero_grad()
            raise NonFinite(f"the gradient norm is {norm}, so this update was not made; lower lr or check the rewards")
        metrics |= {"grad_norm": norm, "lr": self.scheduler.get_last_lr()[0]}
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return metrics | {"sequences": sum(len(batch.names) for batch in batches)}

    def _loss(self, logp: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        c = self.config
        high = {} if c.eps_high is None else {"eps_high": c.eps_high}
        options = {"reinforce": {}, "ppo_clip": {"eps_low": c.eps_low, **high}, "cispo": high}[c.loss]
        per_token, clipped = getattr(losses, c.loss)(logp, batch.old_logp, batch.adv, **options)
        return (batch.coef * per_token).sum(), clipped


class _Stats:
    """Sums over micro-batches, then over processes."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(6, device=device)
        self.low, self.high = torch.tensor([float("inf")], device=device), torch.zeros(1, device=device)

    def add(self, loss: Tensor, logp: Tensor, old_logp: Tensor, clipped: Tensor) -> None:
        log_ratio = logp - old_logp
        ratio = log_ratio.exp()
        kl = log_ratio.expm1() - log_ratio  # ratio - 1 - log ratio without the cancellation near ratio 1
        tokens = torch.ones_like(logp)
        self.sums += torch.stack([loss, ratio.sum(), kl.sum(), -logp.sum(), clipped.sum(), tokens.sum()])
        self.low, self.high = self.low.minimum(ratio.min()), self.high.maximum(ratio.max())

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        loss, ratio, kl, entropy, clipped, tokens = accelerator.gather(self.sums[None]).sum(0).tolist()
        return {
            "loss": loss,
            "ratio_min": float(accelerator.gather(self.low).min()),
            "ratio_mean": ratio / tokens,
            "ratio_max": float(accelerator.gather(self.high).max()),
            "clip_share": clipped / tokens,
            "kl": kl / tokens,
            "entropy": entropy / tokens,
            "tokens": int(tokens),
        }


def _merge(updates: list[dict[str, float]]) -> dict[str, float]:
    """One row of metrics for several updates: extremes of the extremes, sums of counts, means of the rest."""
    rules = {"ratio_min": min, "ratio_max": max, "tokens": sum, "sequences": sum}
    columns = {key: [update[key] for update in updates] for key in (updates[0] if updates else {})}
    return {key: rules[key](xs) if key in rules else sum(xs) / len(xs) for key, xs in columns.items()}
