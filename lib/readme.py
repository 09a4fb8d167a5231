"""The measured parts of README.md, so that no number in it is typed by hand.

    python -m lib.readme     draws data/figures and rewrites what stands between the markers, from what ships in data/
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib import report
from lib.errors import UserError
from lib.rao.ablations import held_out, smoothed
from lib.rao.shipped import ShippedRun, shipped_policy, shipped_runs
from lib.runs import ROOT, Measured, Results, write_atomic
from lib.tree import Tree

PAPER, SCALE = "rao", "laptop"
LEVELS = ("easy", "medium", "hard", "extreme")
ARMS = {
    "recursive": "recursive agent", "single": "single agent, same context", "single-5x": "single agent, 5x context",
}  # fmt: skip
PICTURES = {
    "rao-tree.png": "A hard crafting task that training never saw, worked on by the trained micro policy: each node is "
    "one agent, each edge a launch",
    "rao-learning.png": "Training success of the shipped runs: recursive and single agents, micro policy",
}
NOTHING = "*No finished runs ship in `data/results/` yet; `make reproduce` measures on your own machine.*"


def results_block(data: Path = ROOT / "data") -> str:
    """The table of claims, success by difficulty, and how the numbers were made, as Markdown.

    Args:
        data: the folder of `claims.yaml`, `paper_results.yaml` and `results/`.

    Raises:
        UserError: a results file breaks its schema or measured an unknown claim.
    """
    folders = [path.parent for path in sorted((data / "results" / PAPER).glob("*/results.json"))]
    parts = [report.Part(f.name, f, Results.load(f / "results.json"), None) for f in folders]
    if not parts:
        return NOTHING
    rows = report.judge([PAPER], SCALE, parts, data)
    counts = Counter(row.verdict for row in rows)
    verdicts = (report.REPRODUCED, report.NOT_REPRODUCED, report.REPORTED, report.NOT_TESTED)
    summary = ", ".join(f"{counts[word]} {word}" for word in verdicts if counts[word])
    lines = [
        f"Every number is a **{report.POLICY[SCALE]}'s**, on tasks not trained on. Of {len(rows)} claims: {summary}.",
        "",
        "| claim | paper | measured | basis | verdict |",
        "|---|---|---|---|---|",
        *(_claim(row) for row in rows),
        "",
        *_by_difficulty(shipped_runs(folder=data / "results" / PAPER)),
        *_makers(folders),
    ]
    return "\n".join(lines)


def _claim(row: report.Row) -> str:
    claim, published = row.claim, row.published
    paper = _number(published.value) if isinstance(published.value, float | int) else published.value
    goal = "" if claim.threshold.op == report.REPORTED else f" (aim {claim.threshold.op} {claim.threshold.value:g})"
    verdict = f"**{row.verdict}**" if row.verdict in (report.REPRODUCED, report.NOT_REPRODUCED) else row.verdict
    value = _number(row.measured.value) if row.measured else "–"
    cells = f"{claim.text} ({claim.unit})", f"{paper} [{published.tag}]", value, _basis(row.measured), verdict + goal
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _basis(measured: Measured | None) -> str:
    if measured is None:
        return ""
    several = len(measured.seeds) > 1
    text = [f"n = {measured.n}{' per seed' if several else ''}"]
    text.append(f"seed{'s' if several else ''} {', '.join(map(str, measured.seeds))}")
    if measured.ci95:
        text.append(f"95 % {_interval(measured.ci95)}{'' if several else ', tasks only'}")
    return "; ".join(text + ([measured.note] if measured.note else []))


def _by_difficulty(runs: Sequence[ShippedRun]) -> list[str]:
    """Success of every main arm before and after training."""
    table: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    first = next((run for run in runs if run.arm == "recursive"), None)
    for how, summary in (first.results["curves"].get("cold_start", {}) if first else {}).items():
        table[f"before training, {how}"] = summary["by_difficulty"]
    table |= {name: found for arm, name in ARMS.items() if (found := held_out(runs, arm))}
    if not table:
        return []
    seeds = sorted({run.seed for run in runs if run.arm in ARMS})
    lines = [f"Success by difficulty, greedy unless it says otherwise, trained on *medium* only (seeds {seeds}):", ""]
    lines += ["| |" + "|".join(LEVELS) + "|", "|---|" + "---|" * len(LEVELS)]
    for name, row in table.items():
        lines.append(f"| {name} | " + " | ".join(_cell(row.get(level)) for level in LEVELS) + " |")
    return [*lines, ""]


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    return f"{cell['success']:.2f} " + (_interval(cell["ci95"]) if cell["ci95"] else "") + f" n = {cell['n']}"


def _makers(folders: Sequence[Path]) -> list[str]:
    """Commands and commits that made the results."""
    made: dict[tuple[str, str], int] = Counter()
    for folder in folders:
        record = json.loads((folder / "environment.json").read_bytes())
        made[record["command"] or "unknown command", (record["code"]["commit"] or "unknown")[:7]] += 1
    lines = [f"`{command}` at commit {commit} ({n} runs)" for (command, commit), n in sorted(made.items())]
    return [f"Made by {'; '.join(lines)}. Letters in brackets say who states the paper's number, see "
            "[data/paper_results.yaml](data/paper_results.yaml)."]  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.4g}"


def _interval(ci95: Sequence[float]) -> str:
    return f"[{_number(ci95[0])}, {_number(ci95[1])}]"


def picture_block(data: Path = ROOT / "data") -> str:
    """Markdown of the pictures that have been drawn."""
    drawn = [name for name in PICTURES if (data / "figures" / name).is_file()]
    return "\n\n".join(f"![{PICTURES[name]}](data/figures/{name})" for name in drawn)


def draw(data: Path = ROOT / "data") -> list[Path]:
    """Draw the pictures that what ships allows; returns the files written."""
    from lib.plotting import curves, draw_tree

    figures = {}
    tree = example_tree(data / "trained" / "rao-textcraft")
    if tree is not None:
        figures["rao-tree.png"] = draw_tree(tree, color="success", max_nodes=60)
    runs = shipped_runs(folder=data / "results" / PAPER)
    series = {name: [smoothed(r.metrics, "root_success") for r in runs if r.arm == arm] for arm, name in ARMS.items()}
    if series := {name: rows for name, rows in series.items() if rows and all(rows)}:
        figures["rao-learning.png"] = curves(
            series, "step", "root_success", ylabel="success on medium tasks", xlabel="training step", share=True,
            title="Training success, mean of five steps, micro policy",
        )  # fmt: skip
    for name, figure in figures.items():
        write_atomic(data / "figures" / name, figure._repr_png_()[0])
    return [data / "figures" / name for name in figures]


def example_tree(trained: Path) -> Tree | None:
    """The shipped recursive policy on the first held-out hard task; None if it does not ship."""
    from lib.rao.agent import AgentConfig
    from lib.rao.experiment import TaskSet
    from lib.rao.measure import evaluate_arm

    found = shipped_policy("recursive", trained)
    if found is None:
        return None
    policy, meta = found
    tasks = TaskSet.generate([42], "val", ["hard"]).take(1)
    return evaluate_arm(policy, tasks, AgentConfig(context=meta["context"], max_steps=100)).trees[0]


def with_block(text: str, name: str, block: str) -> str:
    """A README with what stands between its markers `name:begin` and `name:end` replaced.

    Raises:
        UserError: it does not have both markers, each once and in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found or begin in rest or end in before + after:
        raise UserError(f"README.md needs the markers '{begin}' and '{end}', each once and in this order.")
    return f"{before}{begin}\n{block}\n{end}{after}"


def rewritten(text: str, data: Path = ROOT / "data") -> str:
    """README.md with its measured parts up to date."""
    return with_block(with_block(text, "pictures", picture_block(data)), "results", results_block(data))


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Draw and rewrite; exit status 2 and one sentence where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m lib.readme", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    path = root / "README.md"
    try:
        drawn = draw(root / "data")
        write_atomic(path, rewritten(path.read_text(encoding="utf-8"), root / "data"))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path} is up to date; pictures: {', '.join(p.name for p in drawn) or 'none, nothing to draw ships yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
