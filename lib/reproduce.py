"""Run the papers' experiment notebooks at one scale and compare what they measure with the papers.

    python -m lib.reproduce [rao|tier|puppeteer|all] --scale smoke|laptop|smol|paper [--seeds N] [--ablations] [--fresh]

A notebook takes part at a scale when `notebooks/params/<paper>/<notebook>.<scale>.yaml` exists. With `--ablations` each
`<notebook>.<scale>.<arm>.yaml` runs too, on top of that file. With several seeds `<notebook>.<scale>.seeds.yaml`, if
there is one, lies between them: larger test sets, for results that ship. One notebook, arm and seed is a unit: it has
its own folder, named after a hash of its parameters, and is kept when it is finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lib import notebooks, report
from lib.errors import UserError
from lib.runs import DISK_FULL, ROOT, Results, Run, link_latest, to_json, write_atomic
from lib.site import notebook_html

PAPERS = ("rao", "tier", "puppeteer")
SCALES = ("smoke", "laptop", "smol", "paper")


class UnitFailed(Exception):
    """A notebook raised; the message is one sentence with notebook, cell, error and where the evidence lies."""


@dataclass(frozen=True)
class Unit:
    """One execution of one notebook.

    Attributes:
        paper: the folder of the notebook.
        notebook: its path.
        arm: which ablation; "" is the main experiment.
        seed: also among the parameters.
        parameters: given to the notebook, without `run_dir`.
    """

    paper: str
    notebook: Path
    arm: str
    seed: int
    parameters: dict[str, Any]

    @property
    def title(self) -> str:
        """For people: paper, notebook, arm and seed."""
        return f"{self.paper}/{self.notebook.stem}{' ' + self.arm if self.arm else ''}, seed {self.seed}"

    @property
    def place(self) -> str:
        """Folder name inside a run: other parameters, other folder, so nothing stale is ever taken up again."""
        digest = hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.paper}/{self.notebook.stem}{'.' + self.arm if self.arm else ''}-seed{self.seed}-{digest}"

    def executed(self, run: Path) -> Path:
        """The executed notebook's HTML in a run folder; written last, so it exists only when the unit is finished."""
        return run / self.place / f"{self.notebook.stem}.html"

    def results(self, folder: Path) -> Path:
        """Its results file below a run folder or below the shipped results."""
        return folder / self.place / "results.json"


def plan(papers: Sequence[str], scale: str, seeds: int, ablations: bool, folder: Path = notebooks.FOLDER) -> list[Unit]:
    """Everything to run, in reading order, checked before anything runs.

    Args:
        papers: which.
        scale: picks the parameter files.
        seeds: how many, counted up from the file's own seed.
        ablations: whether the arms run too.
        folder: the notebooks.

    Raises:
        UserError: nothing to run, or a parameter file that does not fit its notebook.
    """
    units = []
    for paper in papers:
        for notebook in notebooks.find(folder / paper):
            base = folder / "params" / paper / f"{notebook.stem}.{scale}.yaml"
            if not base.exists():
                continue
            larger = base.with_name(f"{notebook.stem}.{scale}.seeds.yaml")
            arms = sorted(set(base.parent.glob(f"{notebook.stem}.{scale}.*.yaml")) - {larger}) if ablations else []
            layers = [base, larger] if seeds > 1 and larger.exists() else [base]
            defaults = notebooks.parameters(notebook)
            missing = {"seed", "run_dir"} - set(defaults)
            if missing:
                raise UserError(f"'{notebook}' lacks the parameter '{missing.pop()}', which every experiment needs.")
            for file in [base, *arms]:
                given = {}
                for layer in layers if file == base else [*layers, file]:
                    given |= _read(layer)
                notebooks.check_parameters(notebook, given, file)
                first = given.get("seed", defaults["seed"])
                arm = "" if file == base else file.name.split(".")[-2]
                units += [
                    Unit(paper, notebook, arm, seed, given | {"seed": seed}) for seed in range(first, first + seeds)
                ]
    if not units:
        raise UserError(f"No experiment of {' or '.join(papers)} has parameters for the scale '{scale}'.")
    return units


def _read(file: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"'{file}' is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise UserError(f"'{file}' must hold 'name: value' lines; it holds {type(given).__name__}.")
    return given


def execute(unit: Unit, run: Path, command: str, say: Callable[[str], None]) -> None:
    """Run one unit through papermill; its folder keeps everything, also when it fails.

    Args:
        unit: what.
        run: the run folder.
        command: what the user typed, for the record.
        say: takes lines of progress.

    Raises:
        UnitFailed: a cell raised, the kernel died, or no results were written.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    home = Run(run / unit.place, unit.parameters, command)
    output = home.path(unit.notebook.name)
    cells = len(notebooks.load(unit.notebook).cells) + 1  # papermill adds one with the parameters
    where = {"cell": 0}
    begin = time.monotonic()
    stop = threading.Event()

    def watch() -> None:
        pace = Pace()
        while not stop.wait(1.0):
            minutes, seconds = divmod(int(time.monotonic() - begin), 60)
            spent = f"cell {where['cell']}/{cells}  {minutes:02d}:{seconds:02d}"
            say(f"{unit.title}  {spent}  {pace.describe(_newest(home.folder))}".rstrip())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        papermill.execute_notebook(
            unit.notebook,
            output,
            parameters=unit.parameters | {"run_dir": str(home.folder)},
            cwd=unit.notebook.parent,
            kernel_name="python3",
            progress_bar=False,
            extra_arguments=notebooks.QUIET,
            on_cell_start=lambda cell, cell_index: where.update(cell=cell_index + 1),
        )
    except papermill.PapermillExecutionError as error:
        raise _failed(unit, error.cell_index + 1, f"{error.ename}: {error.evalue}", output) from error
    except (CellTimeoutError, DeadKernelError) as error:
        raise _failed(unit, where["cell"], str(error).splitlines()[0], output) from error
    finally:
        stop.set()
        watcher.join()
    Results.load(unit.results(run))
    write_atomic(unit.executed(run), notebook_html(output))


def _failed(unit: Unit, cell: int, problem: str, output: Path) -> UnitFailed:
    kept = f"the executed copy is kept at '{output}'"
    return UnitFailed(f"{unit.title} failed in cell {cell}: {problem.rstrip('. ')}; {kept}.")


def _newest(folder: Path) -> dict[str, Any]:
    """The last complete record of a run's metrics; empty when there is none yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().split(b"\n")
    return json.loads(lines[-2]) if len(lines) > 1 else {}


class Pace:
    """Time left, from the steps seen since watching began, so that a resumed run is not taken for a fast one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.first: tuple[float, int] | None = None

    def describe(self, record: dict[str, Any]) -> str:
        """A record as text: step of steps and minutes left where it logs `step` and `steps`, then its first numbers."""
        text = []
        step, steps = record.get("step"), record.get("steps")
        if step is not None and steps:
            now = self.clock()
            self.first = self.first or (now, step)
            begin, done = self.first
            left = f", about {(now - begin) / (step - done) * (steps - step) / 60:.1f} min left" if step > done else ""
            text.append(f"step {step}/{steps}{left}")
        numbers = [(k, v) for k, v in record.items() if isinstance(v, int | float) and k not in ("step", "steps")]
        return "  ".join(text + [f"{key} {value:.3g}" for key, value in numbers[:4]])


class Terminal:
    """Progress for people: one line drawn over and over on a terminal, one line every half minute in a log."""

    def __init__(self, every_s: float = 30.0) -> None:
        self.stream, self.every_s, self.last, self.live = sys.stderr, every_s, time.monotonic(), sys.stderr.isatty()

    def progress(self, text: str) -> None:
        """Show where things stand."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r\x1b[K" + text[:width])
            self.stream.flush()
        elif time.monotonic() - self.last >= self.every_s:
            self.last = time.monotonic()
            self.line(text)

    def line(self, text: str) -> None:
        """A line that stays."""
        self.stream.write(("\r\x1b[K" if self.live else "") + text + "\n")
        self.stream.flush()


def choose_folder(runs: Path, name: str, fresh: bool) -> Path:
    """The run folder to go on with, or a new one.

    Args:
        runs: the folder of runs.
        name: such as `rao-laptop`; later ones get `-2`, `-3`, ...
        fresh: start anew, unless the newest was itself started so and is not finished.
    """
    numbers = [
        int(rest[1:]) if rest else 1
        for path in runs.glob(f"{name}*")
        if not (rest := path.name[len(name) :]) or (rest[0] == "-" and rest[1:].isdigit())
    ]
    newest = max(numbers, default=0)
    folder = runs / (name if newest <= 1 else f"{name}-{newest}")
    state = folder / "state.json"
    if newest == 0 or not fresh or (state.exists() and json.loads(state.read_text())["fresh_unfinished"]):
        return folder
    return runs / f"{name}-{newest + 1}"


def reproduce(args: argparse.Namespace, command: str, terminal: Terminal, project: Path = ROOT) -> Path:
    """Plan, run what is not finished, and write the page after every unit.

    Args:
        args: the parsed command line.
        command: what the user typed.
        terminal: where progress goes.
        project: the folder of `notebooks/` and `data/`.

    Returns:
        The page.

    Raises:
        UserError: bad parameters, a full disk.
        UnitFailed: a notebook failed.
    """
    sources, shelf = project / "notebooks", project / "data" / "results"
    papers = [paper for paper in PAPERS if args.paper in (paper, "all")]
    if args.paper == "all":  # a paper without an experiment at this scale does not stop the others
        papers = [paper for paper in papers if any((sources / "params" / paper).glob(f"*.{args.scale}.yaml"))] or papers
    units = plan(papers, args.scale, args.seeds, args.ablations, sources)
    folder = choose_folder(args.runs, f"{args.paper}-{args.scale}", args.fresh)
    asked = {"papers": papers, "scale": args.scale, "seeds": args.seeds, "ablations": args.ablations}
    home = Run(folder, asked, command)
    write_atomic(home.path("state.json"), to_json({"fresh_unfinished": args.fresh}))
    take_shipped = (args.seeds > 1 or args.ablations) and not args.fresh
    parts: list[report.Part] = []
    for number, unit in enumerate(units, 1):
        label = f"[{number}/{len(units)}] "
        begin = time.monotonic()
        kept = unit.executed(folder).exists()
        shipped = take_shipped and not kept and unit.results(shelf).exists()
        if kept or shipped:
            record = json.loads(((shelf if shipped else folder) / unit.place / "environment.json").read_bytes())
            commit = (record["code"]["commit"] or "unknown")[:7]
            how = "results ship with the repository" if shipped else "finished before, kept"
            terminal.line(f"{label}{unit.title}: {how} (made at commit {commit}; FRESH=1 makes it anew)")
        else:
            execute(unit, folder, command, lambda text, label=label: terminal.progress(label + text))
            terminal.line(f"{label}{unit.title}: done in {time.monotonic() - begin:.0f} s")
        if args.ship and not shipped:
            ship(unit, folder, shelf)
        parts.append(_part(unit, shelf if shipped else folder, None if shipped else unit.executed(folder)))
        rows = report.judge(papers, args.scale, parts, project / "data")
        title = f"{args.paper.upper()} at {args.scale} scale" + ("" if number == len(units) else f" ({label.strip()})")
        facts = json.loads(home.path("environment.json").read_bytes())
        write_atomic(home.path("index.html"), report.render(title, args.scale, rows, parts, facts, home.folder))
        link_latest(home.folder)
    for row in rows:
        if row.measured is not None:
            terminal.line(f"  {row.verdict:<24} {row.claim.id:<28} {row.measured.value:.3g} (n = {row.measured.n})")
    write_atomic(home.path("state.json"), to_json({"fresh_unfinished": False}))
    return args.runs / "latest" / "index.html"


def _part(unit: Unit, folder: Path, executed: Path | None) -> report.Part:
    results = Results.load(unit.results(folder))
    if executed is None:
        # what that run itself took from shipped checkpoints is measured by those checkpoints' own runs
        own = {name: one for name, one in results.claims.items() if one.source == "live"}
        claims = {name: one.model_copy(update={"source": "shipped"}) for name, one in own.items()}
        results = results.model_copy(update={"claims": claims})
    return report.Part(unit.title, folder / unit.place, results, executed)


def ship(unit: Unit, folder: Path, shelf: Path) -> None:
    """Copy a finished unit's numbers, curves and figures to `data/results`, for those who cannot train for hours."""
    target = shelf / unit.place
    names = ["results.json", "params.yaml", "environment.json", "metrics.jsonl"]
    for name in [*names, *Results.load(unit.results(folder)).figures]:
        source = folder / unit.place / name
        if source.exists():
            write_atomic(target / name, source.read_bytes())


def main(argv: Sequence[str] | None = None, project: Path = ROOT) -> int:
    """Exit status: 0 all ran, 1 a notebook failed, 2 bad input, 130 interrupted; each failure is one sentence."""
    parser = argparse.ArgumentParser(prog="python -m lib.reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("paper", nargs="?", default="all", choices=(*PAPERS, "all"))
    parser.add_argument("--scale", default="laptop", choices=SCALES)
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--ablations", action="store_true", help="run every ablation arm too")
    parser.add_argument("--fresh", action="store_true", help="start a new run folder and use no shipped results")
    parser.add_argument("--ship", action="store_true", help="copy the results to data/results")
    parser.add_argument("--runs", type=Path, default=project / "runs", metavar="DIR")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "lib.reproduce", *(sys.argv[1:] if argv is None else argv)])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # kernels inherit it; threads that spin on few cores are far slower
    terminal = Terminal()
    try:
        if args.seeds < 1:
            raise UserError(f"--seeds is {args.seeds}; it must be 1 or more.")
        index = reproduce(args, command, terminal, project)
    except UserError as error:
        terminal.line(str(error))
        return 2
    except UnitFailed as error:
        terminal.line(str(error))
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        terminal.line("The disk is full; make room and repeat the same command, finished parts are kept.")
        return 2
    except KeyboardInterrupt:
        logging.getLogger("asyncio").disabled = True  # it would report the kernel that was just shut down as a surprise
        terminal.line("Stopped; repeat the same command to go on: finished parts and checkpoints are kept.")
        return 130
    print(f"Open {index} in a browser.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
