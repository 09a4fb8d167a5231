"""Record what TRL's GRPO trainer computes on a tiny random policy, as an oracle for `lib.training`.

TRL is not a dependency of this project; make the fixture again in an environment of its own:

    pip install torch==2.13.0 trl==1.16.0 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0
    python tests/training/make_trl_fixture.py

Each loss type is really trained for two optimiser steps on one generation batch (num_iterations=2), so in the second
step the importance ratios differ from 1. That step is recorded: per micro-batch and sequence the log-probabilities of
the sampled tokens under the current and the old policy, the advantage, and the loss TRL returned (already divided for
gradient accumulation, so the sum over micro-batches is the loss of the step).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<eos>", *"abcdefghij"]
GROUP, MICRO, ACCUMULATION, MAX_TOKENS = 4, 4, 2, 12
TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo")


class Recorder(GRPOTrainer):
    """A GRPO trainer that keeps what goes into and comes out of its loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.scored: list[float] = []
        self.micro: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        self.scored += out["advantages"].tolist()
        return out

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.seen = out[0].detach()
        return out

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()

        def rows(x: torch.Tensor) -> list[list[float]]:
            return [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]

        self.micro.append(
            {
                "step": self.state.global_step,
                "logp": rows(self.seen),
                "old_logp": rows(inputs["old_per_token_logps"]),
                "advantage": inputs["advantages"].tolist(),
                "loss": loss.item(),
            }
        )
        return loss


def record(loss_type: str) -> dict[str, Any]:
    """Train twice on one generation batch and return the second step."""
    set_seed(1)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    rewards: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        values = [c.count("a") + 0.5 * c.count("b") for c in completions]
        rewards.extend(values)
        return values

    with tempfile.TemporaryDirectory() as folder:
        trainer = Recorder(
            model=LlamaForCausalLM(config),
            reward_funcs=reward,
            processing_class=fast,
            train_dataset=Dataset.from_dict({"prompt": ["a b c", "d e f g"]}),
            args=GRPOConfig(
                output_dir=folder, loss_type=loss_type, num_generations=GROUP, per_device_train_batch_size=MICRO,
                gradient_accumulation_steps=ACCUMULATION, num_iterations=2, max_steps=2, learning_rate=0.03,
                max_completion_length=MAX_TOKENS, beta=0.0, epsilon=0.2, temperature=1.0, use_cpu=True, bf16=False,
                epsilon_high=5.0 if loss_type == "cispo" else 0.2, report_to="none", save_strategy="no",
                gradient_checkpointing=False, shuffle_dataset=False, disable_tqdm=True,
            ),
        )  # fmt: skip
        trainer.train()
    second = [{k: v for k, v in m.items() if k != "step"} for m in trainer.micro if m["step"] == 1]
    assert len(second) == ACCUMULATION
    return {"rewards": rewards, "advantages": trainer.scored, "micro": second, "loss": sum(m["loss"] for m in second)}


if __name__ == "__main__":
    fixture = {
        "made_by": "tests/training/make_trl_fixture.py",
        "versions": {"trl": trl.__version__, "torch": torch.__version__.split("+")[0]},
        "group": GROUP, "micro_batch": MICRO, "max_tokens": MAX_TOKENS, "eps": 0.2, "eps_high_cispo": 5.0,
        "types": {name: record(name) for name in TYPES},
    }  # fmt: skip
    path = Path(__file__).with_name("trl_losses.json")
    path.write_text(json.dumps(fixture, indent=0) + "\n")
