"""lib.rao.ablations: finished runs, curves on a common grid, differences and shares, with values worked by hand."""

from __future__ import annotations

import json

import pytest
import yaml

from lib import notebooks
from lib.rao import ablations
from lib.rao.ablations import (
    differences,
    finished_runs,
    gradient_share,
    held_out,
    on_token_grid,
    outcomes_of,
    smoothed,
)
from lib.rao.shipped import ShippedRun, shipped_runs
from lib.tree import Node, Segment, Tree


def metrics(success, tokens=100):
    return [{"step": k + 1, "tokens_out_total": tokens * (k + 1), "root_success": s} for k, s in enumerate(success)]


def run(arm, seed, outcomes, keep=True, success=(0.1, 0.5, 0.9)):
    rate = sum(outcomes) / len(outcomes)
    row = {"n": len(outcomes), "success": rate, "ci95": [0.0, 1.0]}
    curves = {"evaluations": {arm: {"by_difficulty": {"hard": row}}}}
    if keep:
        curves["outcomes"] = {arm: {"hard": outcomes}}
    return ShippedRun(arm, seed, {"arm": arm, "seed": seed}, metrics(success), {"curves": curves})


def store(folder, made, name):
    place = folder / f"03_textcraft_synth-{name}"
    place.mkdir(parents=True)
    (place / "params.yaml").write_text(yaml.safe_dump(made.params))
    (place / "results.json").write_text(json.dumps(made.results))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.metrics))


def test_own_runs_take_the_place_of_shipped_ones_unless_they_are_shorter(tmp_path, monkeypatch):
    shelf, here = tmp_path / "shelf", tmp_path / "runs"
    for k, arm in enumerate(["recursive", "sparse", "lambda"]):
        store(shelf, run(arm, 0, [1.0]), str(k))
    store(here, run("recursive", 0, [0.0], success=(0.2, 0.4, 0.6)), "a")
    store(here, run("sparse", 0, [0.0], success=(0.2, 0.4)), "b")
    store(here, run("gamma", 1, [0.0]), "c")
    load = shipped_runs
    monkeypatch.setattr(ablations, "shipped_runs", lambda folder=shelf: load(folder=folder))
    runs, live = finished_runs(here)
    assert [(r.arm, r.seed) for r in runs] == [("gamma", 1), ("lambda", 0), ("recursive", 0), ("sparse", 0)]
    assert live == {("recursive", 0), ("gamma", 1)}
    assert outcomes_of(runs[2], "hard") == [0.0] and outcomes_of(runs[3], "hard") == [1.0]
    assert finished_runs()[1] == set() and len(finished_runs()[0]) == 3


def test_smoothing_averages_full_windows_and_leaves_gaps_out():
    history = [*metrics([0.0, 1.0, 0.5]), {"step": 4, "tokens_out_total": 400}]
    assert smoothed(history, "root_success", 2) == [
        {"step": 2, "tokens_out_total": 200, "root_success": 0.5},
        {"step": 3, "tokens_out_total": 300, "root_success": 0.75},
    ]
    assert smoothed(history, "root_success", 5) == []


def test_token_grid_is_shared_and_linear_between_steps():
    fast, slow = metrics([0.0, 1.0, 1.0], tokens=100), metrics([0.0, 0.5, 1.0], tokens=200)
    a, b = on_token_grid([fast, slow], "root_success", points=3)
    assert [row["tokens_out_total"] for row in a] == [row["tokens_out_total"] for row in b] == [200, 250, 300]
    assert [row["root_success"] for row in a] == [1.0, 1.0, 1.0]
    assert [row["root_success"] for row in b] == pytest.approx([0.0, 0.125, 0.25])


def test_runs_without_common_tokens_give_no_curve():
    assert on_token_grid([metrics([0.0], 100), metrics([0.0], 900)], "root_success") == [[], []]
    assert on_token_grid([metrics([0.0]), []], "root_success") == [[], []]


def test_held_out_success_is_the_mean_over_seeds_with_an_interval_over_seeds_and_tasks():
    runs = [run("sparse", 0, [1.0] * 30 + [0.0] * 10), run("sparse", 1, [0.0] * 30 + [1.0] * 10), run("x", 0, [1.0])]
    row = held_out(runs, "sparse")["hard"]
    assert row["success"] == 0.5 and row["n"] == 40
    low, high = row["ci95"]
    assert low < 0.26 and high > 0.74  # the two seeds alone are 0.25 and 0.75
    assert held_out(runs, "gamma") == {}


def test_several_seeds_without_single_outcomes_have_no_interval():
    runs = [run("sparse", seed, [1.0, 0.0], keep=False) for seed in (0, 1)]
    assert held_out(runs, "sparse")["hard"] == {"n": 2, "success": 0.5, "ci95": None}
    assert held_out(runs[:1], "sparse")["hard"]["ci95"] == [0.0, 1.0]
    assert differences(runs[0], runs[1], "hard") == []


def test_differences_are_task_by_task():
    a, b = run("lambda", 0, [1.0, 1.0, 0.0]), run("recursive", 0, [1.0, 0.0, 1.0])
    assert differences(a, b, "hard") == [0.0, 1.0, -1.0]
    assert differences(a, b, "easy") == []


def node(name, tokens, advantage, weight=1.0):
    segments = [Segment([0] * 7, False, None, ""), Segment([1] * tokens, True, [0.0] * tokens, "")]
    return Node(name, "t", segments, "finished", advantage=advantage, weight=weight)


def test_share_of_the_update_counts_sampled_tokens_weights_and_sizes_of_advantages():
    tree = Tree("t", "t")
    for made in (node("0", 10, 1.0), node("0.0", 10, -1.0), node("0.1", 20, 1.0)):
        tree.add(made)
    assert gradient_share([tree]) == {0: 0.25, 1: 0.75}
    for made, weight in zip(tree, (1.5, 0.75, 0.75), strict=True):  # Eq. 4: N / (D * N_d) = 3/2 and 3/4
        made.weight = weight
    assert gradient_share([tree]) == pytest.approx({0: 0.4, 1: 0.6})
    for made in tree:
        made.advantage = 0.0
    assert gradient_share([tree]) == {} == gradient_share([])


def test_switches_of_the_notebook_are_those_of_the_parameter_files():
    """The credit shown in 04 is that of the arms which 03 trains."""
    notebook = notebooks.load(notebooks.FOLDER / "rao" / "04_ablations.ipynb")
    [cell] = [c for c in notebook.cells if "ARMS = {" in c.source]
    room: dict = {}
    exec(cell.source, room)
    files = {p.name.split(".")[-2]: p for p in (notebooks.FOLDER / "params" / "rao").glob("03_*.laptop.*.yaml")}
    switches = {"lam", "proxy", "depth_mode", "gamma", "estimator"}
    for arm in set(files) & set(room["ARMS"]):
        given = yaml.safe_load(files[arm].read_text())
        assert given["arm"] == arm
        assert {name: value for name, value in given.items() if name in switches} == room["ARMS"][arm], arm
