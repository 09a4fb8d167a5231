"""lib.runs: what a run writes survives kills and full disks, and nothing half-written is ever read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from lib import runs
from lib.errors import UserError
from lib.runs import Run, link_latest, load_metrics, write_atomic

CLAIM = {"value": 0.5, "n": 4, "ci95": [0.1, 0.9], "seeds": [0], "note": "", "source": "live"}


def in_process(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120)


def test_params_and_environment_are_on_disk_before_anything_runs(tmp_path):
    run = Run(tmp_path / "a" / "b", {"seed": 7, "name": "é", "run_dir": "here"}, command="make it")
    assert yaml.safe_load((run.folder / "params.yaml").read_text()) == {"seed": 7, "name": "é"}
    record = json.loads((run.folder / "environment.json").read_text())
    assert record["seed"] == 7 and record["command"] == "make it" and record["cpus"] == os.cpu_count()
    assert record["versions"]["torch"].startswith("2.") and set(record["code"]) == {"commit", "dirty"}


def test_a_notebook_that_opens_the_folder_again_keeps_the_command(tmp_path):
    Run(tmp_path, {"seed": 1}, command="first")
    Run(tmp_path, {"seed": 1})
    assert json.loads((tmp_path / "environment.json").read_text())["command"] == "first"


def test_no_folder_named_means_a_new_temporary_one_each_time():
    one, other = Run(), Run()
    assert one.folder != other.folder and one.folder.is_dir()


def test_folder_that_is_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="run folder '.*x' cannot be made"):
        Run(tmp_path / "x")


def test_metrics_come_back_as_logged_scalars_of_numpy_and_torch_included(tmp_path):
    import numpy as np
    import torch

    run = Run(tmp_path)
    run.log({"step": 1, "loss": torch.tensor(0.25)})
    run.log({"step": np.int64(2), "loss": np.float32(0.5), "hist": np.arange(2)})
    assert load_metrics(run.folder) == [{"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.5, "hist": [0, 1]}]


def test_each_line_survives_a_kill_right_after_log(tmp_path):
    code = "import os, sys; from lib.runs import Run; r = Run(sys.argv[1]); r.log({'step': 1}); os.kill(os.getpid(), 9)"
    assert in_process(code, tmp_path).returncode == -9
    assert load_metrics(tmp_path) == [{"step": 1}]


def test_line_cut_by_a_crash_is_left_out_and_the_next_one_is_not_glued_to_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert load_metrics(tmp_path) == [{"step": 1}]
    Run(tmp_path).log({"step": 2})
    assert load_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_damage_in_the_middle_is_named_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        load_metrics(tmp_path)
    with pytest.raises(UserError, match="is missing"):
        load_metrics(tmp_path / "nowhere")


def test_full_disk_takes_back_the_half_line_and_keeps_the_rest(tmp_path):
    """A file size limit makes the kernel cut a write in two, as a full disk does."""
    code = """
import resource, signal, sys
from lib.errors import UserError
from lib.runs import Run, load_metrics, write_atomic
run = Run(sys.argv[1])
run.log({"step": 1})
write_atomic(run.path("kept.json"), "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
said = []
long = "x" * 100
for attempt in (lambda: run.log({"step": 2, "text": long}), lambda: write_atomic(run.path("kept.json"), long)):
    try:
        attempt()
    except UserError as error:
        said.append(str(error))
assert len(said) == 2 and all("disk is full" in text for text in said), said
assert run.path("kept.json").read_text() == "old"
run.log({"step": 2})
assert load_metrics(run.folder) == [{"step": 1}, {"step": 2}]
assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]
"""
    done = in_process(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_atomic_write_leaves_the_old_file_when_it_fails_midway(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomic(path, "old")
    monkeypatch.setattr(runs.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_results_round_trip_and_wrong_ones_name_the_field(tmp_path):
    run = Run(tmp_path)
    run.path("c.png").write_bytes(b"")
    path = run.save_results({"claims": {"a": CLAIM}, "curves": {"x": [1, 2]}, "figures": ["c.png"]})
    assert runs.Results.load(path).claims["a"].ci95 == (0.1, 0.9)
    for wrong, named in (
        ({"claims": {"a": CLAIM | {"n": -1}}}, "claims.a.n"),
        ({"claims": {"a": CLAIM | {"value": float("nan")}}}, "claims.a.value"),
        ({"claims": {"a": CLAIM | {"source": "typed in"}}}, "claims.a.source"),
        ({"claims": {"a": {"value": 1.0}}}, "claims.a.n"),
        ({"figures": ["absent.png"]}, "absent.png"),
        ({"verdicts": {}}, "verdicts"),
    ):
        with pytest.raises(UserError, match=named):
            run.save_results(wrong)
    assert runs.Results.load(path).claims["a"].value == 0.5


def test_latest_moves_to_the_newest_run_and_never_replaces_a_real_folder(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        link_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
    assert not os.path.isabs(os.readlink(tmp_path / "latest"))
    (tmp_path / "other" / "latest").mkdir(parents=True)
    (tmp_path / "other" / "run").mkdir()
    with pytest.raises(UserError, match="not a link"):
        link_latest(tmp_path / "other" / "run")


def test_progress_shows_step_of_total_time_and_numbers(capsys):
    with runs.Progress(4, "train") as progress:
        progress.update(2, success=0.5)
        progress.update(2)
    shown = capsys.readouterr().err
    assert "train" in shown and "4/4" in shown and "success=0.5" in shown and "<" in shown


def test_importing_runs_does_not_import_torch():
    assert in_process("import lib.runs, sys; sys.exit('torch' in sys.modules)").returncode == 0
