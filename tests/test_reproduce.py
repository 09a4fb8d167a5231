"""lib.reproduce: bad parameters stop it before anything runs, finished units are kept, failures are one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import yaml

from lib import reproduce
from lib.errors import UserError
from lib.reproduce import Pace, choose_folder, main, plan

PARAMETERS = 'seed = 0\nrun_dir = ""\nsteps = 2\nrate = 0.1\nfail = ""'
WORK = """
import os, time
from pathlib import Path
from lib.errors import UserError
from lib.runs import Run
run = Run(run_dir, {"seed": seed, "steps": steps, "rate": rate})
for step in range(1, steps + 1):
    run.log({"step": step, "steps": steps, "success": step / steps})
if fail == "raise":
    raise UserError("the value of fail is 'raise'; leave it empty.")
if fail == "die":
    os._exit(3)
if fail == "wait":
    (Path(run_dir) / "waiting").write_text(str(os.getpid()))
    time.sleep(120)
"""
RESULTS = """
import base64
pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
run.path("curves.png").write_bytes(base64.b64decode(pixel))
run.path("trees", "hard.txt").write_text("root <- child")
claim = {"value": 0.9, "n": 4, "ci95": [0.5, 1.0], "seeds": [seed], "source": "live", "outcomes": [1, 1, 1, 0.6]}
run.save_results({"claims": {"made-up": claim}, "figures": ["curves.png"]});
"""
CLAIMS = [
    {"id": name, "paper": "rao", "text": f"A claim named {name}", "unit": "success rate", "paper_value": "number",
     "threshold": {"op": ">=", "value": 0.85}, "scales": ["laptop", "smoke"]} for name in ("made-up", "unmeasured")
]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one paper, one experiment of three cells, one ablation arm."""
    cells = [nbformat.v4.new_code_cell(text) for text in (PARAMETERS, WORK, RESULTS)]
    cells[0].metadata["tags"] = ["parameters"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    root = tmp_path / "project"
    for folder in ("notebooks/rao", "notebooks/params/rao", "data"):
        (root / folder).mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), root / "notebooks/rao/03_x.ipynb")
    write_parameters(root, "smoke", steps=2)
    write_parameters(root, "smoke.sparse", rate=0.2)
    (root / "data/claims.yaml").write_text(yaml.safe_dump(CLAIMS))
    number = {"value": 0.88, "unit": "success rate", "setting": "at 8K", "source": "a page", "tag": "W"}
    (root / "data/paper_results.yaml").write_text(yaml.safe_dump({"rao": {"number": number}}))
    return root


def write_parameters(root: Path, scale: str, **values: object) -> None:
    (root / f"notebooks/params/rao/03_x.{scale}.yaml").write_text(yaml.safe_dump(values))


def units(root: Path, seeds: int = 1, ablations: bool = False) -> list[reproduce.Unit]:
    return plan(["rao"], "smoke", seeds, ablations, root / "notebooks")


def test_plan_counts_seeds_up_from_the_files_own_and_adds_arms_on_top_of_it(project):
    write_parameters(project, "smoke", steps=2, seed=5)
    planned = units(project, seeds=2, ablations=True)
    assert [(unit.arm, unit.seed) for unit in planned] == [("", 5), ("", 6), ("sparse", 5), ("sparse", 6)]
    assert planned[3].parameters == {"steps": 2, "seed": 6, "rate": 0.2}
    assert len({unit.place for unit in planned}) == 4


def test_other_parameters_get_another_folder_and_the_same_ones_the_same(project):
    before = units(project)[0].place
    assert units(project)[0].place == before
    write_parameters(project, "smoke", steps=3)
    assert units(project)[0].place != before


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stepz": 3}, "'stepz', which .*03_x.ipynb' does not have; it has seed, run_dir, steps, rate, fail"),
        ({"steps": "3"}, "'steps' to '3' \\(str\\), but .* needs int"),
        ({"steps": 2.5}, "'steps' to 2.5 \\(float\\), but .* needs int"),
        ({"steps": True}, "'steps' to True \\(bool\\), but .* needs int"),
    ],
)
def test_parameter_of_unknown_name_or_wrong_type_stops_before_anything_runs(project, values, sentence, capsys):
    write_parameters(project, "smoke", **values)
    with pytest.raises(UserError, match=sentence):
        units(project)
    assert main(["rao", "--scale", "smoke", "--runs", str(project / "runs")], project) == 2
    assert not (project / "runs").exists() and len(capsys.readouterr().err.splitlines()) == 1


def test_whole_numbers_are_fine_where_a_float_is_the_default(project):
    write_parameters(project, "smoke", rate=1)
    assert units(project)[0].parameters["rate"] == 1


def test_damaged_yaml_and_absent_scale_are_one_sentence_each(project, capsys):
    assert main(["rao", "--scale", "paper"], project) == 2
    assert "no experiment of rao has parameters for the scale 'paper'" in capsys.readouterr().err.lower()
    (project / "notebooks/params/rao/03_x.smoke.yaml").write_text("steps: [1")
    assert main(["rao", "--scale", "smoke"], project) == 2
    assert "is not YAML" in capsys.readouterr().err
    (project / "notebooks/params/rao/03_x.smoke.yaml").write_text("- 1")
    assert main(["rao", "--scale", "smoke", "--seeds", "0"], project) == 2
    assert "--seeds is 0" in capsys.readouterr().err


def test_run_writes_the_page_then_keeps_what_is_finished_until_told_to_start_anew(project, capsys):
    runs = project / "runs"
    command = ["rao", "--scale", "smoke", "--runs", str(runs)]
    assert main(command, project) == 0
    page = (runs / "latest" / "index.html").read_text()
    assert (runs / "latest").resolve() == runs / "rao-smoke"
    for text in ("0.88", "0.90", "n = 4", "[0.50, 1.00] tasks only", ">reproduced<", "not tested at this scale"):
        assert text in page
    assert "data:image/png;base64," in page and "root &lt;- child" in page and "micro policy" in page
    place = runs / "rao-smoke" / units(project)[0].place
    assert f'href="{place.relative_to(runs / "rao-smoke")}/03_x.html"' in page
    assert {"03_x.ipynb", "03_x.html", "params.yaml", "metrics.jsonl", "results.json"} <= set(os.listdir(place))
    assert "lib.reproduce rao --scale smoke" in json.loads((place / "environment.json").read_text())["command"]
    assert yaml.safe_load((place / "params.yaml").read_text())["steps"] == 2

    written = (place / "results.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(command, project) == 0
    assert "finished before, kept" in capsys.readouterr().err
    assert (place / "results.json").stat().st_mtime_ns == written

    assert main([*command, "--fresh", "--ship"], project) == 0
    assert (runs / "latest").resolve() == runs / "rao-smoke-2"
    shelf = project / "data" / "results" / units(project)[0].place
    assert {"results.json", "metrics.jsonl", "curves.png", "environment.json"} <= set(os.listdir(shelf))


def test_shipped_results_stand_in_only_when_more_than_the_default_is_asked_for(project, capsys):
    runs = project / "runs"
    for unit in units(project, 2):
        shelf = project / "data" / "results" / unit.place
        shelf.mkdir(parents=True)
        claim = {"value": 0.8, "n": 2, "ci95": None, "seeds": [unit.seed], "source": "live", "outcomes": [1, 0.6]}
        (shelf / "results.json").write_text(json.dumps({"claims": {"made-up": claim}}))
        (shelf / "environment.json").write_text(json.dumps({"code": {"commit": "abcdef0123", "dirty": False}}))
    assert main(["rao", "--scale", "smoke", "--seeds", "2", "--runs", str(runs)], project) == 0
    said = capsys.readouterr().err
    assert said.count("results ship with the repository (made at commit abcdef0") == 2
    page = (runs / "latest" / "index.html").read_text()
    assert "from what ships" in page and "n = 2 per seed" in page and "not reproduced" in page
    assert not list(runs.rglob("*.ipynb"))


@pytest.mark.parametrize(("fail", "sentence"), [("raise", "cell 3: UserError: the value of fail"), ("die", "died")])
def test_failure_in_a_notebook_is_one_sentence_and_the_evidence_stays(project, fail, sentence, capsys):
    write_parameters(project, "smoke", fail=fail)
    assert main(["rao", "--scale", "smoke", "--runs", str(project / "runs")], project) == 1
    said = capsys.readouterr().err
    assert "rao/03_x, seed 0 failed in" in said and sentence in said and "Traceback" not in said
    kept = project / "runs" / "rao-smoke" / units(project)[0].place / "03_x.ipynb"
    assert str(kept) in said and kept.exists()
    assert (kept.parent / "metrics.jsonl").read_text().count("\n") == 2
    assert not (kept.parent / "03_x.html").exists()


def test_ctrl_c_ends_with_130_and_one_sentence_leaves_no_kernel_and_can_go_on(project):
    write_parameters(project, "smoke", fail="wait")
    runs = project / "runs"
    asked = ["rao", "--scale", "smoke", "--runs", str(runs)]
    code = f"import sys, pathlib, lib.reproduce as r; sys.exit(r.main({asked}, pathlib.Path({str(project)!r})))"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    waiting = runs / "rao-smoke" / units(project)[0].place / "waiting"
    deadline = time.monotonic() + 60
    while not (waiting.exists() and waiting.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    kernel = int(waiting.read_text())
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("Stopped; repeat the same command") and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
    assert (waiting.parent / "metrics.jsonl").read_text().count("\n") == 2


def test_fresh_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    (tmp_path / "rao-laptop").mkdir()
    assert choose_folder(tmp_path, "rao-laptop", fresh=False) == tmp_path / "rao-laptop"
    started = choose_folder(tmp_path, "rao-laptop", fresh=True)
    assert started == tmp_path / "rao-laptop-2"
    started.mkdir()
    (started / "state.json").write_text('{"fresh_unfinished": true}')
    assert choose_folder(tmp_path, "rao-laptop", fresh=True) == started
    (started / "state.json").write_text('{"fresh_unfinished": false}')
    assert choose_folder(tmp_path, "rao-laptop", fresh=True) == tmp_path / "rao-laptop-3"
    assert choose_folder(tmp_path, "rao-laptop", fresh=False) == started


def test_time_left_counts_only_steps_seen_since_watching_began():
    now = iter([0.0, 60.0])
    pace = Pace(lambda: next(now))
    assert pace.describe({"step": 10, "steps": 30, "loss": 1.0}) == "step 10/30  loss 1"
    assert pace.describe({"step": 15, "steps": 30, "loss": 0.5}) == "step 15/30, about 3.0 min left  loss 0.5"
    assert pace.describe({}) == ""
