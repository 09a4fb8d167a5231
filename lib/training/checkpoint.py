"""Checkpoints that survive a kill, a full disk and a flipped bit, and the export of a finished policy.

A checkpoint is a folder `step_00000012` with the trained weights (`weights.safetensors`; with LoRA only the adapter),
optimiser and schedule (`optimizer.pt`), counters, data cursor and generator states (`state.json`), and a manifest of
SHA-256 sums. It is written under a temporary name, flushed to the disk and renamed, so a folder with the final name is
complete; the sums find what went wrong afterwards.

Fully sharded training (FSDP) keeps no complete weights in one process and is not covered; use `Accelerator.save_state`.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lib.errors import UserError

if TYPE_CHECKING:
    from lib.training.trainer import Trainer

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.pt", "state.json", "manifest.json"
Generators = Mapping[str, np.random.Generator | torch.Generator]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk.

    Args:
        path: its folder. step: trainer steps done. cursor: whatever the caller saved about its data.
        skipped: one sentence for each newer checkpoint that is damaged; show them to the user.
    """

    path: Path
    step: int
    cursor: dict[str, Any]
    skipped: tuple[str, ...]

    def restore(self, trainer: Trainer, generators: Generators | None = None) -> None:
        """Put the saved state back, so that the next step is the one an uninterrupted run would have made.

        Args:
            trainer: made with the same model architecture and settings. generators: as given to `save_checkpoint`.

        Raises:
            UserError: the weights or the generators do not fit.
        """
        state = json.loads((self.path / STATE).read_text())
        saved, live = load_file(self.path / WEIGHTS), _trained(trainer.model)
        differing = sorted(k for k in saved.keys() | live.keys() if _shape(saved, k) != _shape(live, k))
        if differing:
            name = differing[0]
            raise UserError(
                f"checkpoint {self.path} does not fit this model: parameter {name} is {_shape(saved, name)} in the "
                f"checkpoint and {_shape(live, name)} in the model; build the model with the settings of that run"
            )
        generators = generators or {}
        if state["generators"].keys() != generators.keys():
            raise UserError(
                f"checkpoint {self.path} has generators {sorted(state['generators'])}, "
                f"the program passes {sorted(generators)}; pass the same ones"
            )
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(saved[name])
        training = torch.load(self.path / OPTIMIZER, map_location="cpu", weights_only=True)
        trainer.optimizer.load_state_dict(training["optimizer"])
        trainer.scheduler.load_state_dict(training["scheduler"])
        trainer.load_state_dict(state["counters"])
        for name, generator in generators.items():
            _set_generator(generator, state["generators"][name])


def save_checkpoint(
    directory: str | Path,
    trainer: Trainer,
    cursor: dict[str, Any] | None = None,
    generators: Generators | None = None,
    keep: int = 3,
) -> Path:
    """Write everything needed to go on, without ever endangering the checkpoint before.

    Call it in every process; the main one writes.

    Args:
        directory: where checkpoints live. trainer: what to save; its `steps` names the checkpoint.
        cursor: what the caller needs to find its place in the data; anything JSON can hold.
        generators: random number generators by name; the trainer itself has none.
        keep: how many checkpoints stay.

    Returns:
        The folder of the new checkpoint.

    Raises:
        UserError: the disk is full, or the directory holds a later checkpoint of another run.
    """
    directory = Path(directory)
    final = directory / f"step_{trainer.steps:08d}"
    if trainer.accelerator.is_main_process:
        _drop_damaged_future(directory, final)
        temporary = directory / f".writing_{final.name}"
        try:
            for unfinished in directory.glob(".writing_step_*"):  # of a killed process
                shutil.rmtree(unfinished)
            temporary.mkdir(parents=True)
            _write(temporary, trainer, cursor or {}, generators or {})
            if final.exists():
                shutil.rmtree(final)
            os.rename(temporary, final)
            _flush(directory)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not _disk_full(error):
                raise
            raise UserError(
                f"the disk is full, so checkpoint {final.name} was not written to {directory}; earlier checkpoints are "
                "intact: free some space (or lower keep) and resume"
            ) from error
        for old in _checkpoints(directory)[max(1, keep) :]:
            shutil.rmtree(old)
    trainer.accelerator.wait_for_everyone()
    return final


def load_latest(directory: str | Path) -> Checkpoint | None:
    """Find the newest checkpoint whose files are all there and unchanged.

    Args:
        directory: as in `save_checkpoint`; it need not exist.

    Returns:
        The checkpoint, with a sentence for each damaged newer one, or None if there is none at all.

    Raises:
        UserError: there are checkpoints, but every one is damaged.
    """
    skipped: list[str] = []
    for path in _checkpoints(Path(directory)):
        if damage := _damage(path):
            skipped.append(f"checkpoint {path.name} is damaged ({damage}) and was skipped")
            continue
        state = json.loads((path / STATE).read_text())
        return Checkpoint(path, state["counters"]["steps"], state["cursor"], tuple(skipped))
    if skipped:
        raise UserError(f"no usable checkpoint in {directory}: {'; '.join(skipped)}; delete them to start afresh")
    return None


def export_policy(model: nn.Module, tokenizer: Any, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a policy as an ordinary Hugging Face directory, which every tool of that ecosystem loads.

    A PEFT adapter is merged into a copy; the live model is left alone. Other files in the directory stay.

    Args:
        model: the policy. tokenizer: anything with `save_pretrained`.
        directory: made if missing. dtype: of the weights.

    Returns:
        The directory.

    Raises:
        UserError: the disk is full.
    """
    directory = Path(directory)
    temporary = directory / ".writing_policy"
    plain = copy.deepcopy(model)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    try:
        plain.to(dtype).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        files = sorted(temporary.iterdir())
        for file in files:
            _flush(file)
        for file in files:
            os.replace(file, directory / file.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _disk_full(error):
            raise
        raise UserError(f"the disk is full, so the policy was not exported to {directory}; free some space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _write(folder: Path, trainer: Trainer, cursor: dict[str, Any], generators: Generators) -> None:
    save_file({name: p.detach().contiguous() for name, p in _trained(trainer.model).items()}, folder / WEIGHTS)
    with open(folder / OPTIMIZER, "wb") as file:
        torch.save({"optimizer": trainer.optimizer.state_dict(), "scheduler": trainer.scheduler.state_dict()}, file)
    state = {
        "format": FORMAT,
        "counters": trainer.state_dict(),
        "cursor": cursor,
        "generators": {name: _get_generator(g) for name, g in generators.items()},
    }
    (folder / STATE).write_text(json.dumps(state))
    sums = {name: _digest(folder / name) for name in (WEIGHTS, OPTIMIZER, STATE)}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1))
    for file in (*folder.iterdir(), folder):
        _flush(file)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes: with LoRA the adapter, else all weights (tied ones once)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "absent"


def _checkpoints(directory: Path) -> list[Path]:
    """Newest first."""
    return sorted(directory.glob("step_" + "[0-9]" * 8), reverse=True)


def _drop_damaged_future(directory: Path, final: Path) -> None:
    """After a resume from before a damaged checkpoint, the damaged one must not count as the newest."""
    for path in _checkpoints(directory):
        if path.name > final.name:
            if not _damage(path):
                raise UserError(
                    f"{directory} holds {path.name}, later than {final.name} that is to be written; "
                    "resume from it, or use another directory for another run"
                )
            shutil.rmtree(path)


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing."""
    try:
        sums = json.loads((path / MANIFEST).read_text())
        for name in (WEIGHTS, OPTIMIZER, STATE):
            if _digest(path / name) != sums[name]:
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    saved = json.loads((path / STATE).read_text())["format"]
    return "" if saved == FORMAT else f"format {saved}, this version reads {FORMAT}"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Force a file or a folder's entries out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_full(error: BaseException | None) -> bool:
    """Look along the chain: torch and safetensors wrap the operating system's error in their own."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _get_generator(generator: np.random.Generator | torch.Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    return json.loads(json.dumps(generator.bit_generator.state, default=np.ndarray.tolist))


def _set_generator(generator: np.random.Generator | torch.Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    else:
        generator.bit_generator.state = state
