"""The evaluate command: what it prints, what it refuses, and the intervals it reports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from lib.evaluate import interval, main, summarise
from lib.rao.recipes import Recipe, RecipeBook, Task, goal_text
from lib.rao.textcraft import save_tasks
from lib.runs import ROOT
from lib.tree import Node, Segment, Tree, load_trees
from tests.micro import chat, policy

BOOK = RecipeBook(
    {"m1_i1": Recipe({"m0_ore": 2}, 2, 1, "metal"), "m2_i2": Recipe({"m1_i1": 1, "m0_ore": 1}, 1, 2, "metal")}
)


def task(k: int, count: int, difficulty: str) -> Task:
    targets = {"m2_i2": count}
    return Task(f"t.{k}", goal_text(targets), targets, {"m0_ore": 9}, difficulty, 2, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """recipes.jsonl, tasks.jsonl (two easy, one hard), and a random micro policy in checkpoint/."""
    folder = tmp_path_factory.mktemp("evaluate")
    BOOK.save(folder / "recipes.jsonl")
    save_tasks([task(0, 1, "easy"), task(1, 2, "hard"), task(2, 1, "easy")], folder / "tasks.jsonl")
    made = policy(context=256)
    made.model.save_pretrained(folder / "checkpoint")
    made.tokenizer.save_pretrained(folder / "checkpoint")
    (folder / "checkpoint" / "meta.json").write_text(json.dumps({"prompt_style": "short"}))
    return folder


def arguments(files: Path, **changes: Any) -> list[str]:
    """A complete command line; None leaves an option out, True makes it a flag."""
    options: dict[str, Any] = {
        "tasks": files / "tasks.jsonl", "recipes": files / "recipes.jsonl", "checkpoint": files / "checkpoint",
        "agent": "recursive", "context": 200, "max_steps": 2, "workers": 0, "json": True,
    } | changes  # fmt: skip
    words = ["rao-textcraft"]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


# --- results ----------------------------------------------------------------------------------------------------------


def test_last_line_of_standard_output_is_one_json_object(files: Path, capsys: pytest.CaptureFixture[str], tmp_path):
    assert main(arguments(files, trees=tmp_path / "trees.jsonl")) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.strip().split("\n")[-1])
    wanted = "n success ci95 by_difficulty nodes_mean depth_max parallel_launch_share tokens wall_s"
    assert set(wanted.split()) <= set(result)
    assert result["n"] == 3 and list(result["by_difficulty"]) == ["easy", "hard"]
    assert result["by_difficulty"]["easy"].keys() == {"n", "success", "ci95"}
    assert (result["by_difficulty"]["easy"]["n"], result["by_difficulty"]["hard"]["n"]) == (2, 1)
    assert result["success"] == 0.0 and result["nodes_mean"] == 1.0 and result["depth_max"] == 0
    assert result["parallel_launch_share"] is None and result["wall_s"] > 0 and result["failures"] == {"overflow": 3}
    assert "3/3 tasks" in err and "left" in err
    trees = load_trees(tmp_path / "trees.jsonl")
    assert [t.task_id for t in trees] == ["t.0", "t.1", "t.2"] and result["tokens"] == sum(
        n.tokens_out for t in trees for n in t
    )
    for tree in trees:
        tree.check()
        assert tree.root.segments[0].text == chat().prompt(f"{tree.root.task}\nDelegation: yes")[1]


def test_two_runs_with_one_seed_are_equal_and_the_mode_is_in_the_prompt(files: Path, capsys, tmp_path):
    saved = []
    for name in ("one", "two", "single"):
        agent = "single" if name == "single" else "recursive"
        assert main(arguments(files, trees=tmp_path / name, agent=agent, temperature=1.0, limit=2)) == 0
        saved.append([tree.root.ids for tree in load_trees(tmp_path / name)])
    assert saved[0] == saved[1] != saved[2] and len(saved[0]) == 2
    assert "Delegation: no" in load_trees(tmp_path / "single")[0].root.segments[0].text


def test_without_json_a_table_is_printed(files: Path, capsys):
    assert main(arguments(files, json=None, limit=1)) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("all        n=1     success 0.000  95 % [0.000, 0.793]\neasy ")


def test_checkpoint_without_meta_gets_the_full_prompt(files: Path, capsys, tmp_path):
    made = policy(context=2000)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    assert main(arguments(files, checkpoint=tmp_path, context=2000, limit=1, max_steps=1, trees=tmp_path / "t")) == 0
    assert "You are an agent in a crafting game" in load_trees(tmp_path / "t")[0].root.segments[0].text


# --- bad input --------------------------------------------------------------------------------------------------------


def unknown_item(files: Path, folder: Path) -> dict[str, Any]:
    raw = json.loads((files / "tasks.jsonl").read_text().split("\n")[0])
    raw["misc"]["target_items"] = {"x9_i9": 1}
    (folder / "tasks.jsonl").write_text(json.dumps(raw))
    return {"tasks": folder / "tasks.jsonl"}


def other_architecture(files: Path, folder: Path) -> dict[str, Any]:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 500, "n_positions": 256}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    chat().tokenizer.save_pretrained(folder)
    shutil.copy(files / "checkpoint" / "meta.json", folder)
    return {"checkpoint": folder}


def broken_meta(files: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(files / "checkpoint", folder / "c")
    (folder / "c" / "meta.json").write_text("{")
    return {"checkpoint": folder / "c"}


def not_json(files: Path, folder: Path) -> dict[str, Any]:
    (folder / "tasks.jsonl").write_text("hello\n")
    return {"tasks": folder / "tasks.jsonl"}


def empty(files: Path, folder: Path) -> dict[str, Any]:
    (folder / "recipes.jsonl").write_text("")
    return {"recipes": folder / "recipes.jsonl"}


BAD = [
    ({"tasks": "nowhere.jsonl"}, "Cannot read the task file 'nowhere.jsonl'"),
    ({"recipes": "nowhere.jsonl"}, "Cannot read the recipe file 'nowhere.jsonl'"),
    ({"checkpoint": "./nowhere"}, "no policy at ./nowhere: the folder does not exist"),
    ({"checkpoint": "@folder@"}, "the folder has no config.json"),
    ({"context": 20}, "--context 20 is too small: the prompt of task t.0 has"),
    ({"context": 257}, "--context 257 exceeds the 256 tokens that the checkpoint was built for"),
    ({"context": 0}, "argument --context: '0' is not a whole number of at least 1"),
    ({"context": "many"}, "argument --context: 'many' is not a whole number of at least 1"),
    ({"context": None}, "the following arguments are required: --context"),
    ({"temperature": -0.5}, "argument --temperature: '-0.5' is not a number of at least 0"),
    ({"temperature": "nan"}, "argument --temperature: 'nan' is not a number of at least 0"),
    ({"temperature": "hot"}, "argument --temperature: 'hot' is not a number of at least 0"),
    ({"max_depth": -1}, "argument --max-depth: '-1' is not a whole number of at least 0 or none"),
    ({"limit": 0}, "argument --limit: '0' is not a whole number of at least 1"),
    ({"agent": "team"}, "argument --agent: invalid choice: 'team'"),
    ({"surprise": 1}, "unrecognized arguments: --surprise 1"),
    ({"trees": "nowhere/trees.jsonl"}, "--trees nowhere/trees.jsonl: the folder nowhere does not exist"),
    (unknown_item, "unknown item 'x9_i9'"),
    (other_architecture, "torch_engine runs Llama-architecture models, not 'gpt2'"),
    (broken_meta, "meta.json is not JSON"),
    (not_json, "line 1: not valid JSON"),
    (empty, "is empty"),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("changes", "words"), BAD, ids=[str(k) for k in range(len(BAD))])
def test_bad_input_is_one_line_and_status_two(files: Path, tmp_path, capsys, changes, words: str, workers: int):
    if callable(changes):
        changes = changes(files, tmp_path)
    changes = {name: tmp_path if value == "@folder@" else value for name, value in changes.items()}
    capsys.readouterr()  # what making the files has printed
    assert main(arguments(files, workers=workers, **changes)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and words in err


def test_bad_input_on_a_real_command_line(files: Path):
    """No traceback, no help text, nothing on standard output."""
    command = [sys.executable, "-m", "lib.evaluate", *arguments(files, tasks="nowhere.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().split("\n") == [
        "error: Cannot read the task file 'nowhere.jsonl' (No such file or directory): give the path of a JSONL file."
    ]


def test_trees_that_cannot_be_saved_do_not_cost_the_result(files: Path, capsys, tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    assert main(arguments(files, limit=1, trees=full)) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["n"] == 1
    assert err.strip().split("\n")[-1] == "error: cannot save the trees to /dev/full: No space left on device"


def test_ctrl_c_is_told_in_one_line(files: Path, capsys, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lib.rao.experiment.play", interrupted)
    assert main(arguments(files)) == 130
    assert capsys.readouterr().err.strip().split("\n")[-1] == "interrupted: nothing was written"


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_interval_of_one_seed_is_that_of_a_binomial_mean():
    """100 tasks, 70 successes: about 0.7 +- 1.96 * sqrt(0.21 / 100)."""
    low, high = interval([[1.0] * 70 + [0.0] * 30])
    assert low == pytest.approx(0.61, abs=0.015) and high == pytest.approx(0.79, abs=0.015)


def test_interval_over_seeds_is_wider_where_seeds_differ():
    """Three seeds at 0.2, 0.5, 0.8: their spread, which pooling the tasks would hide."""
    runs = [[1.0] * k + [0.0] * (100 - k) for k in (20, 50, 80)]
    low, high = interval(runs)
    pooled_low, pooled_high = interval([sum(runs, [])])
    assert low < 0.3 < pooled_low < 0.5 < pooled_high < 0.7 < high


@pytest.mark.parametrize(
    ("n", "value", "expected"),
    [(100, 1.0, [0.963, 1.0]), (100, 0.0, [0.0, 0.037]), (40, 1.0, [0.912, 1.0]), (1, 0.0, [0.0, 0.793])],
)
def test_interval_of_equal_outcomes_is_wilsons(n: int, value: float, expected: list[float]):
    """Known values: n / (n + 1.96 ** 2) for all successes."""
    assert interval([[value] * n]) == pytest.approx(expected, abs=1e-3)
    if value == 1.0:
        assert interval([[value] * n])[0] == pytest.approx(n / (n + 1.959964**2), abs=1e-6)


def test_interval_of_nothing_and_of_partial_credit():
    assert interval([]) is None and interval([[]]) is None
    assert interval([[0.5] * 9]) == [0.5, 0.5]
    assert interval([[0.0, 1.0] * 20]) == interval([[0.0, 1.0] * 20]), "the bootstrap has a seed of its own"
    low, high = interval([np.linspace(0, 1, 101).tolist()])
    assert low < 0.5 < high and high - low == pytest.approx(2 * 1.96 * np.sqrt(1 / 12) / np.sqrt(101), abs=0.02)


def finished(difficulty: str, success: float, parallel: tuple[bool, ...] = ()) -> Tree:
    tree = Tree("t", "g", info={"difficulty": difficulty})
    action = [Segment([0], False, None, ""), Segment([1, 2], True, [-1.0, -1.0], "")]
    tree.add(Node("0", "t", list(action), "finished", success=success, info={"verified": success}))
    for k, flag in enumerate(parallel):
        tree.add(Node(f"0.{k}", "t", list(action), "finished", success=1.0, info={"verified": 1.0, "parallel": flag}))
    return tree


def test_summary_by_hand():
    trees = [finished("hard", 0.0), finished("easy", 1.0, (True, True)), finished("easy", 0.0)]
    trees.append(finished("weird", 1.0, (False,)))
    seen = summarise(trees)
    assert (seen["n"], seen["success"], seen["nodes_mean"], seen["depth_max"], seen["tokens"]) == (4, 0.5, 7 / 4, 1, 14)
    assert list(seen["by_difficulty"]) == ["easy", "hard", "weird"] and seen["by_difficulty"]["easy"]["success"] == 0.5
    assert seen["parallel_launch_share"] == pytest.approx(2 / 3) and seen["failures"] == {"gave up": 2}
    assert json.loads(json.dumps(seen)) == seen
