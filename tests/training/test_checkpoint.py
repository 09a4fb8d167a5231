"""Checkpoints: resuming is exact, damage is seen, a full disk costs nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lib.errors import UserError
from lib.training import checkpoint
from lib.training.advantages import assign
from lib.training.checkpoint import export_policy, load_latest, save_checkpoint
from lib.training.trainer import Trainer, TrainerConfig
from lib.tree import Tree
from tests.training.policies import fill_logprobs, random_trees, tiny_llama

CONFIG = TrainerConfig(cpu=True, lr=1e-3, warmup=3)


def batch(model: torch.nn.Module, step: int) -> list[Tree]:
    """What the policy of this moment would sample at this step."""
    return fill_logprobs(model, random_trees(2, 3, seed=step))


def run(trainer: Trainer, steps: int, generator: np.random.Generator) -> list[dict[str, float]]:
    """Train, drawing the seed of every batch from the caller's generator."""
    rows = []
    for _ in range(steps):
        kept, report = assign(batch(trainer.model, int(generator.integers(1000))))
        rows.append(trainer.step(kept, report))
        rows[-1].pop("seconds")
    return rows


def state(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(steps: int = 1) -> Trainer:
    trainer = Trainer(tiny_llama(), CONFIG)
    run(trainer, steps, np.random.default_rng(0))
    return trainer


def test_pitfall_27_two_steps_resume_two_steps_equal_four(tmp_path: Path):
    whole, generator = Trainer(tiny_llama(), CONFIG), np.random.default_rng(5)
    expected = run(whole, 4, generator)

    first, generator = Trainer(tiny_llama(), CONFIG), np.random.default_rng(5)
    rows = run(first, 2, generator)
    save_checkpoint(tmp_path, first, cursor={"epoch": 1, "task": "val.3"}, generators={"data": generator})

    resumed, generator = Trainer(tiny_llama(seed=9), CONFIG), np.random.default_rng(77)
    found = load_latest(tmp_path)
    found.restore(resumed, generators={"data": generator})
    assert found.step == 2 and found.cursor == {"epoch": 1, "task": "val.3"} and found.skipped == ()
    rows += run(resumed, 2, generator)
    assert rows == expected  # every metric, bit for bit
    assert state(resumed.model).equal(state(whole.model))
    saved, live = resumed.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"]
    assert all(saved[i]["exp_avg_sq"].equal(live[i]["exp_avg_sq"]) for i in live)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: np.random.default_rng(seed),
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda seed: torch.Generator().manual_seed(seed),
    ],
)
def test_generators_continue_where_they_were(tmp_path: Path, make):
    def draw(generator) -> list[float]:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return generator.standard_normal(3).tolist()

    trainer, generator = trained(), make(1)
    draw(generator)
    save_checkpoint(tmp_path, trainer, generators={"g": generator})
    expected, other = draw(generator), make(2)
    load_latest(tmp_path).restore(trainer, {"g": other})
    assert draw(other) == expected
    with pytest.raises(UserError, match=r"has generators \['g'\], the program passes \[\]"):
        load_latest(tmp_path).restore(trainer)


def damage_truncate(path: Path) -> None:
    (path / "optimizer.pt").write_bytes((path / "optimizer.pt").read_bytes()[:-100])


def damage_bit(path: Path) -> None:
    data = bytearray((path / "weights.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "weights.safetensors").write_bytes(data)


def damage_missing(path: Path) -> None:
    (path / "state.json").unlink()


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (damage_truncate, "optimizer.pt has changed"),
        (damage_bit, "weights.safetensors has changed"),
        (damage_missing, "state.json is missing"),
        (damage_manifest, "manifest.json is not readable"),
    ],
)
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage, what: str):
    trainer = trained()
    save_checkpoint(tmp_path, trainer)
    good = state(trainer.model).clone()
    run(trainer, 1, np.random.default_rng(1))
    damage(save_checkpoint(tmp_path, trainer))
    found = load_latest(tmp_path)
    assert found.step == 1 and found.skipped[0].startswith(f"checkpoint step_00000002 is damaged ({what}")
    resumed = Trainer(tiny_llama(3), CONFIG)
    found.restore(resumed)
    assert state(resumed.model).equal(good)
    run(resumed, 1, np.random.default_rng(1))
    save_checkpoint(tmp_path, resumed, keep=1)  # replaces the damaged one
    assert load_latest(tmp_path).skipped == () and load_latest(tmp_path).step == 2
    damage(tmp_path / "step_00000002")
    with pytest.raises(UserError, match="no usable checkpoint in .*delete them to start afresh"):
        load_latest(tmp_path)


def test_damaged_later_checkpoint_gives_way_and_a_sound_one_is_protected(tmp_path: Path):
    trainer = trained(2)
    later = save_checkpoint(tmp_path, trainer)
    fresh = trained(1)
    with pytest.raises(UserError, match="holds step_00000002, later than step_00000001"):
        save_checkpoint(tmp_path, fresh)
    damage_bit(later)
    save_checkpoint(tmp_path, fresh)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_half_written_folder_is_invisible_and_swept_up(tmp_path: Path):
    trainer = trained()
    save_checkpoint(tmp_path, trainer)
    (tmp_path / ".writing_step_00000007").mkdir()
    assert load_latest(tmp_path).step == 1
    save_checkpoint(tmp_path, trainer)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_no_checkpoint_is_none(tmp_path: Path):
    assert load_latest(tmp_path) is None and load_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("nth", range(5))  # four files and their folder are flushed before the rename
def test_full_disk_at_any_moment_is_one_sentence_and_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch, nth: int):
    trainer = trained()
    save_checkpoint(tmp_path, trainer)
    run(trainer, 1, np.random.default_rng(1))
    real, calls = os.fsync, iter(range(100))

    def fsync(handle: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match=r"the disk is full, so checkpoint step_00000002 was not written .* intact"):
        save_checkpoint(tmp_path, trainer)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert load_latest(tmp_path).step == 1 and load_latest(tmp_path).skipped == ()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_torch_writing_to_a_really_full_device_is_recognised():
    with pytest.raises(Exception) as caught, open("/dev/full", "wb") as file:
        torch.save({"weights": torch.zeros(100_000)}, file)
    assert checkpoint._disk_full(caught.value)
    assert checkpoint._disk_full(checkpoint.SafetensorError("I/O error: No space left on device (os error 28)"))
    assert not checkpoint._disk_full(PermissionError(errno.EACCES, "no"))


def test_other_failures_are_not_called_a_full_disk(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        save_checkpoint(tmp_path / "file", trained())


def test_keeps_the_last_k(tmp_path: Path):
    trainer, generator = Trainer(tiny_llama(), CONFIG), np.random.default_rng(0)
    for _ in range(4):
        run(trainer, 1, generator)
        save_checkpoint(tmp_path, trainer, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def test_other_architecture_is_refused_by_name_and_shape(tmp_path: Path):
    save_checkpoint(tmp_path, trained())
    model = tiny_llama()
    model.resize_token_embeddings(70)
    trainer = Trainer(model, CONFIG)
    with pytest.raises(UserError, match=r"parameter lm_head.weight is \(64, 32\) in the checkpoint and \(70, 32\)"):
        load_latest(tmp_path).restore(trainer)


def test_lora_checkpoint_holds_the_adapter_only(tmp_path: Path):
    def policy() -> torch.nn.Module:
        return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))

    trainer = Trainer(policy(), CONFIG)
    run(trainer, 2, np.random.default_rng(0))
    path = save_checkpoint(tmp_path, trainer)
    assert all("lora_" in name for name in load_file(path / "weights.safetensors"))
    resumed = Trainer(policy(), CONFIG)
    load_latest(tmp_path).restore(resumed)
    assert state(resumed.model).equal(state(trainer.model))


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))


@pytest.mark.parametrize("lora", [False, True])
def test_export_is_an_ordinary_hugging_face_directory(tmp_path: Path, lora: bool):
    model = tiny_llama()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    (tmp_path / "meta.json").write_text("{}")
    before = state(model).clone()
    export_policy(model, tokenizer(), tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json", "meta.json"} <= {p.name for p in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".writing*"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert (loaded(ids).logits - model(ids).logits).abs().max() < 0.1
    assert state(model).equal(before) and model.dtype == torch.float32


def test_export_to_a_full_disk_leaves_the_old_policy(tmp_path: Path, monkeypatch):
    export_policy(tiny_llama(1), tokenizer(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls, real = iter(range(100)), os.fsync

    def fsync(handle: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="the disk is full, so the policy was not exported"):
        export_policy(tiny_llama(2), tokenizer(), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
