"""README.md keeps its promises: its numbers are those of data/, its code runs, its commands and notebooks exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from lib import evaluate, notebooks, readme, report
from lib.errors import UserError
from lib.runs import ROOT
from tests.micro import policy as random_policy

ENGLISH, KOREAN = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ko.md"))
PAGES = pytest.mark.parametrize("text", [ENGLISH, KOREAN], ids=["en", "ko"])


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_measured_parts_are_up_to_date():
    assert readme.rewritten(ENGLISH) == ENGLISH, "run `python -m lib.readme`"


@PAGES
def test_table_names_every_notebook_and_no_other(text):
    linked = set(re.findall(r"\]\((notebooks/\S+\.ipynb)\)", text))
    lessons = [path for path in notebooks.find() if path.parent.name != "solutions"]
    assert linked == {path.relative_to(ROOT).as_posix() for path in lessons}


def test_python_of_the_readme_runs_from_top_to_bottom(tmp_path, monkeypatch):
    if not (ROOT / "data" / "micro" / "textcraft" / "config.json").is_file():
        pytest.skip("data/micro/textcraft does not ship yet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    room: dict = {}
    for block in blocks(ENGLISH, "python"):
        exec(compile(block, "README.md", "exec"), room)
    assert len((tmp_path / "tasks.jsonl").read_text().splitlines()) == 20
    assert len(room["trees"]) == 4 and all(len(tree) >= 1 for tree in room["trees"])
    episode = room["CountLetters"]("banana")
    assert [episode.verify(episode.root(), answer) for answer in (3, 2, None)] == [1.0, 0.0, 0.0]
    assert room["metrics"]["step"] == 1
    for node in (n for tree in room["trees"] for n in tree):
        assert node.reward == pytest.approx(node.success - 0.001 * node.tokens_out)


@PAGES
def test_commands_exist_and_take_the_options_shown(text):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, re.M)) <= targets
    assert re.findall(r"^make (\w+)", "\n".join(blocks(text, "bash")), re.M)[:2] == ["reproduce", "test"]
    modules = set(re.findall(r"python -m (lib\.[a-z_.]+)", text))
    assert modules and all((ROOT / (name.replace(".", "/") + ".py")).is_file() for name in modules)
    [shown] = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()
               if "lib.evaluate" in line]  # fmt: skip
    args = evaluate._parser().parse_args(shlex.split(shown)[3:])
    assert args.agent == "recursive" and args.context == 1536 and args.json


@PAGES
def test_names_of_files_in_the_text_are_files(text):
    names = re.findall(r"`((?:lib|notebooks|tests|data)/[\w./-]+)`", text)
    assert not [name for name in names if not (ROOT / name).exists()]


def test_pin_of_torch_is_the_one_in_the_constraints():
    [pin] = re.findall(r"^torch==\S+", (ROOT / "constraints" / "cpu.txt").read_text(), re.M)
    assert f"`{pin}`" in ENGLISH


@pytest.fixture
def data(tmp_path):
    """A folder of data as it looks when two seeds of one arm, and another arm, ship."""
    for name in ("claims.yaml", "paper_results.yaml"):
        shutil.copy(ROOT / "data" / name, tmp_path / name)
    for arm, seed, rate in (("recursive", 0, 0.75), ("recursive", 1, 0.5), ("single", 0, 0.0)):
        place = tmp_path / "results" / "rao" / f"03_textcraft_synth.{arm}-seed{seed}-abc"
        place.mkdir(parents=True)
        outcomes = [1.0] * int(rate * 40) + [0.0] * int(40 - rate * 40)
        cell = {"n": 40, "success": rate, "ci95": [0.1, 0.9]}
        claim = {"value": rate, "n": 40, "ci95": [0.1, 0.9], "seeds": [seed], "source": "live", "outcomes": outcomes}
        curves = {
            "evaluations": {arm: {"by_difficulty": {"hard": cell}}}, "outcomes": {arm: {"hard": outcomes}},
            "cold_start": {"greedy": {"by_difficulty": {"hard": {"n": 40, "success": 0.025, "ci95": [0.0, 0.08]}}}},
        }  # fmt: skip
        name = "rao-recursive-small-hard" if arm == "recursive" else "rao-single-small-hard"
        results = {"claims": {name: claim}, "curves": curves, "figures": []}
        (place / "results.json").write_text(json.dumps(results))
        (place / "params.yaml").write_text(yaml.safe_dump({"arm": arm, "seed": seed}))
        made = {"command": "python -m lib.reproduce rao", "code": {"commit": "0123456789abcdef"}}
        (place / "environment.json").write_text(json.dumps(made))
        rows = [{"step": k, "tokens_out_total": 100 * k, "root_success": k / 10} for k in range(1, 11)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def row_of(block, beginning):
    return next(line for line in block.splitlines() if line.startswith(f"| {beginning}"))


def test_block_says_policy_sample_size_seeds_interval_and_verdict(data):
    block = readme.results_block(data)
    assert "**micro policy's**" in block and "1 not reproduced, 1 reported" in block
    row = row_of(block, "A recursive agent with a small context")
    assert "| 0.88 [W] | 0.62 | n = 40 per seed; seeds 0, 1; 95 % [" in row
    assert row.endswith("| **not reproduced** (aim >= 0.85) |")
    assert "n = 40; seed 0; 95 % [0.10, 0.90], tasks only" in row_of(block, "A single agent with the same small")
    assert row_of(block, "One hard task at a time").endswith("| 2.50 [S] | – |  | not tested at this scale |")
    assert row_of(block, "before training, greedy").endswith(" | – | – | 0.03 [0.00, 0.08] n = 40 | – |")
    assert row_of(block, "recursive agent").split(" | ")[3].startswith("0.62 [")
    assert "`python -m lib.reproduce rao` at commit 0123456 (3 runs)" in block


def test_without_results_the_block_says_so_and_claims_nothing(data):
    shutil.rmtree(data / "results")
    assert readme.results_block(data) == readme.NOTHING
    assert readme.picture_block(data) == "" and readme.draw(data) == []


def test_pictures_are_drawn_from_what_ships_and_shown_once_drawn(data, monkeypatch):
    from lib.rao import shipped
    from lib.training.checkpoint import export_policy

    place = data / "trained" / "rao-textcraft" / "recursive"
    made = random_policy(context=160)
    export_policy(made.model, made.tokenizer, place)
    (place / "meta.json").write_text(json.dumps({"context": 160}))
    assert shipped.shipped_policy("recursive", place.parent) is not None
    drawn = readme.draw(data)
    assert [path.name for path in drawn] == ["rao-tree.png", "rao-learning.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 200_000 for path in drawn)
    assert re.findall(r"\]\((.*?)\)", readme.picture_block(data)) == [f"data/figures/{path.name}" for path in drawn]


def test_rewriting_twice_changes_nothing_and_leaves_the_rest_alone(data):
    text = "a\n" + "b\n".join(f"<!-- {x}:begin -->\nold\n<!-- {x}:end -->\n" for x in ("pictures", "results")) + "c\n"
    once = readme.rewritten(text, data)
    assert readme.rewritten(once, data) == once and "old" not in once
    assert [once.startswith("a\n"), "\nb\n" in once, once.endswith("\nc\n")] == [True] * 3


@pytest.mark.parametrize("text", ["", "<!-- x:begin -->", "<!-- x:end --><!-- x:begin -->",
                                  "<!-- x:begin --><!-- x:begin --><!-- x:end -->"])  # fmt: skip
def test_missing_or_doubled_markers_are_refused_in_one_sentence(text):
    with pytest.raises(UserError, match="needs the markers '<!-- x:begin -->'"):
        readme.with_block(text, "x", "new")


def test_command_needs_no_arguments_and_says_what_is_wrong(tmp_path, capsys):
    (tmp_path / "README.md").write_text("no markers")
    assert readme.main([], tmp_path) == 2
    assert capsys.readouterr().err.startswith("README.md needs the markers")
    help_text = subprocess.run([sys.executable, "-m", "lib.readme", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert help_text.returncode == 0 and "measured parts" in help_text.stdout


def test_letters_of_sources_are_explained_where_the_block_points():
    tags = {letter for _, published in report.load_claims(["rao"]) for letter in re.findall(r"[A-Z]", published.tag)}
    legend = (ROOT / "data" / "paper_results.yaml").read_text(encoding="utf-8")
    assert tags and all(re.search(rf"^#.*\b{letter} \w+", legend, re.M) for letter in tags)
