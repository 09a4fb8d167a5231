"""A run folder holds everything one experiment leaves behind, written so that a crash or a full disk loses nothing.

    runs/<id>/   params.yaml  environment.json  metrics.jsonl  results.json  trees/  checkpoints/  NOTEBOOK.ipynb  .html
    runs/latest  a link to the newest one
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lib.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "accelerate", "pydantic-monty", "numpy", "vllm")
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Measured(BaseModel):
    """One measured claim: a value that counts only with its sample size, seeds and interval.

    Attributes:
        value: the measured number, in the claim's unit.
        n: number of held-out tasks per seed that it rests on.
        ci95: its 95 % interval over tasks, None where none can be given.
        seeds: the training seeds it rests on.
        outcomes: one number per task whose mean is `value`, shape (n,); lets several seeds share one interval.
        source: trained in this run, or evaluated from what the repository ships.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    value: float
    n: int = Field(ge=0)
    ci95: tuple[float, float] | None
    seeds: list[int]
    note: str = ""
    source: Literal["live", "shipped"]
    outcomes: list[float] | None = None


class Results(BaseModel):
    """What an experiment notebook leaves in `results.json`.

    Attributes:
        claims: measured numbers by the ids of `data/claims.yaml`.
        curves: numbers behind the figures, free in form.
        figures: picture files (PNG or SVG) inside the run folder, in reading order.
    """

    model_config = ConfigDict(extra="forbid")
    claims: dict[str, Measured] = {}
    curves: dict[str, Any] = {}
    figures: list[str] = []

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a results file, so that a page never shows half-understood numbers.

        Raises:
            UserError: the file is missing or breaks the schema; names the first field that does.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except FileNotFoundError:
            raise UserError(f"'{path}' is missing: the experiment did not write its results.") from None
        except ValidationError as error:
            raise UserError(f"'{path}' is not a results file: {_first_problem(error)}.") from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


def write_atomic(path: str | Path, data: str | bytes) -> None:
    """Replace a file as a whole, so that no reader and no crash ever meets half of it.

    Args:
        path: the file; its folder is made when missing.
        data: the full content.

    Raises:
        UserError: the disk is full; the old content stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _told(error, path) from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _told(error: OSError, path: Path) -> Exception:
    """A full disk as one sentence for the user; any other error as it is."""
    if error.errno not in DISK_FULL:
        return error
    return UserError(
        f"The disk is full: '{path}' could not be written; make room and repeat the same command, "
        "all that was written before is kept."
    )


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of plain values and of numpy or torch scalars and arrays; paths become text."""

    def plain(item: Any) -> Any:
        if hasattr(item, "tolist"):
            return item.tolist()
        if isinstance(item, Path):
            return str(item)
        raise TypeError(f"{type(item).__name__} cannot be written as JSON: {item!r}")

    return json.dumps(value, default=plain, indent=indent, ensure_ascii=False)


def load_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`; a last line cut off by a crash is left out.

    Args:
        path: the file, or the run folder that holds it.

    Returns:
        One record per line, in the order written.

    Raises:
        UserError: the file is missing, or a line in its middle is not JSON.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing: no metrics were logged there.") from None
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise UserError(f"'{path}' line {number} is not JSON; remove that line to read the rest.") from None
    return records


def code_version() -> dict[str, Any]:
    """The git commit the code stands at and whether files differ from it; both None outside a git checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changed = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def environment(seed: int | None = None, command: str | None = None) -> dict[str, Any]:
    """What someone needs to know to repeat a run: code, versions, machine, seed and command."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_version(),
        "python": platform.python_version(),
        "versions": versions,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "command": command,
    }


class Run:
    """One experiment's folder: parameters and environment at once, metrics line by line, results at the end."""

    def __init__(
        self, folder: str | Path = "", params: Mapping[str, Any] | None = None, command: str | None = None
    ) -> None:
        """Open a run folder, a new one or one to go on with.

        Args:
            folder: where to write; "" makes a temporary folder.
            params: the experiment's parameters, kept in `params.yaml` without `run_dir`, which is a place and not a
                setting; `seed` among them goes into the record.
            command: what the user typed, for the record; None keeps the one recorded there before.

        Raises:
            UserError: the folder cannot be made, or the disk is full.
        """
        params = {name: value for name, value in (params or {}).items() if name != "run_dir"}
        if not folder:
            folder = tempfile.mkdtemp(prefix="run-")
        self.folder = Path(folder).resolve()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UserError(f"The run folder '{folder}' cannot be made ({error.strerror}); name another one.") from None
        known = self.path("environment.json")
        if command is None and known.exists():
            command = json.loads(known.read_bytes())["command"]
        write_atomic(self.path("params.yaml"), yaml.safe_dump(params, sort_keys=False, allow_unicode=True))
        write_atomic(known, to_json(environment(params.get("seed"), command), indent=1) + "\n")
        self._drop_torn_line()

    def path(self, *parts: str) -> Path:
        """A place inside the run folder; its parent folder exists afterwards."""
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`; a kill right after this call cannot lose it.

        Args:
            record: numbers by name; `step` and `steps` (the total) let a reader tell how far the run is.

        Raises:
            UserError: the disk is full; the line is taken back whole, the lines before it stay.
        """
        line = (to_json(record) + "\n").encode()
        path = self.path("metrics.jsonl")
        with open(path, "ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                file.truncate(start)
                raise _told(error, path) from error

    def keep_metrics(self, steps: int) -> list[dict[str, Any]]:
        """Drop the metrics of steps after `steps`, which a resumed run will make again; returns what stays.

        Raises:
            UserError: the disk is full; the old file stays.
        """
        path = self.path("metrics.jsonl")
        kept = [row for row in load_metrics(path) if row.get("step", 0) <= steps] if path.exists() else []
        write_atomic(path, "".join(to_json(row) + "\n" for row in kept))
        return kept

    def save_results(self, results: Mapping[str, Any]) -> Path:
        """Write `results.json`, after checking it against the schema `Results`.

        Args:
            results: claims, curves and figures.

        Returns:
            The file written.

        Raises:
            UserError: a field breaks the schema, a figure is not in the run folder, or the disk is full.
        """
        try:
            checked = Results.model_validate_json(to_json(results))
        except ValidationError as error:
            raise UserError(f"The results do not fit the schema: {_first_problem(error)}.") from None
        for name in checked.figures:
            if not (self.folder / name).is_file():
                raise UserError(f"The results name the figure '{name}', which is not in '{self.folder}'.")
        path = self.path("results.json")
        write_atomic(path, to_json(checked.model_dump(), indent=1) + "\n")
        return path

    def _drop_torn_line(self) -> None:
        """A crash may have cut the last line; the next one must not be glued to it."""
        path = self.path("metrics.jsonl")
        if path.exists():
            data = path.read_bytes()
            if not data.endswith(b"\n"):
                os.truncate(path, data.rfind(b"\n") + 1)


def link_latest(folder: str | Path) -> Path:
    """Point `latest`, beside a run folder, at it; a reader sees the old or the new one, never none.

    Raises:
        UserError: something that is not a link stands at that name.
    """
    folder = Path(folder)
    link = folder.parent / "latest"
    if link.exists() and not link.is_symlink():
        raise UserError(f"'{link}' is not a link to a run; move it away, its name is needed.")
    temporary = folder.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name, target_is_directory=True)
    os.replace(temporary, link)
    return link


class Progress:
    """A bar with step k of n, time gone and time left, for the caller to hand to code that itself prints nothing."""

    def __init__(self, total: int, label: str) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, desc=label, dynamic_ncols=True)

    def update(self, steps: int = 1, **shown: float | str) -> None:
        """Go on by `steps`, and show some numbers beside the bar."""
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(steps)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
