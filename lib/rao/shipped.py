"""Results and checkpoints that ship with the repository, for readers who do not train for hours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lib.policy import Policy, load_policy
from lib.runs import ROOT, load_metrics

RESULTS = ROOT / "data" / "results" / "rao"
TRAINED = ROOT / "data" / "trained" / "rao-textcraft"
COLD_START = ROOT / "data" / "micro" / "textcraft"


@dataclass(frozen=True)
class ShippedRun:
    """One finished training run: which arm and seed, its parameters, its metrics by step, its results."""

    arm: str
    seed: int
    params: dict[str, Any]
    metrics: list[dict[str, Any]]
    results: dict[str, Any]


def shipped_runs(notebook: str = "03_textcraft_synth", folder: Path = RESULTS) -> list[ShippedRun]:
    """Every shipped run of an experiment notebook, ordered by arm and seed; empty if none ships."""
    runs = []
    for place in sorted(folder.glob(f"{notebook}*")):
        if not all((place / name).is_file() for name in ("metrics.jsonl", "params.yaml", "results.json")):
            continue  # still running, or stopped
        params = yaml.safe_load((place / "params.yaml").read_text(encoding="utf8"))
        results = json.loads((place / "results.json").read_text(encoding="utf8"))
        runs.append(ShippedRun(params["arm"], params["seed"], params, load_metrics(place), results))
    return sorted(runs, key=lambda r: (r.arm, r.seed))


def by_arm(runs: list[ShippedRun], arms: list[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """Metrics of the named arms, one list per seed, in the form that `lib.plotting.curves` draws."""
    return {arm: found for arm in arms if (found := [r.metrics for r in runs if r.arm == arm])}


def shipped_policy(arm: str, folder: Path = TRAINED) -> tuple[Policy, dict[str, Any]] | None:
    """The shipped checkpoint of an arm with its `meta.json`, None if the repository has none."""
    place = folder / arm
    if not (place / "config.json").is_file():
        return None
    return load_policy(place), json.loads((place / "meta.json").read_text(encoding="utf8"))
