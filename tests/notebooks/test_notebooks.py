"""Every notebook keeps the promises that readers and the reproduction rely on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lib import notebooks
from lib.runs import ROOT

PATHS = notebooks.find()
PARAMS = notebooks.FOLDER / "params"
SCALES = {"smoke", "laptop", "smol", "paper"}
MACHINERY = re.compile(r"^\s*(?:[%!]\s*(?:pip|cd|conda|apt|wget|curl)\b|import subprocess.*pip|os\.chdir)", re.M)
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(notebooks.FOLDER).as_posix())


def code_cells(path: Path) -> list:
    return [cell for cell in notebooks.load(path).cells if cell.cell_type == "code"]


@every_notebook
def test_one_parameters_cell_holds_literals_only(path):
    assert notebooks.parameters(path)


@every_notebook
def test_defaults_are_the_smoke_scale(path):
    files = list((PARAMS / path.parent.name).glob(f"{path.stem}.*.yaml"))
    if not files:
        return  # a method notebook: it has one scale
    smoke = PARAMS / path.parent.name / f"{path.stem}.smoke.yaml"
    assert smoke in files, "an experiment needs its smoke file"
    defaults = notebooks.parameters(path)
    assert defaults.pop("run_dir") == ""
    assert yaml.safe_load(smoke.read_text()) == defaults


@pytest.mark.parametrize("file", sorted(PARAMS.rglob("*.yaml")), ids=lambda file: file.relative_to(PARAMS).as_posix())
def test_parameter_file_fits_its_notebook(file):
    stem, scale, *arm = file.name.removesuffix(".yaml").split(".")
    assert scale in SCALES and len(arm) <= 1
    notebook = notebooks.FOLDER / file.parent.name / f"{stem}.ipynb"
    notebooks.check_parameters(notebook, yaml.safe_load(file.read_text()), file)


@every_notebook
def test_outputs_are_stored_and_none_is_an_error(path):
    cells = code_cells(path)
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        assert cell.execution_count or not cell.source.strip(), f"never executed:\n{cell.source}"
        if "raises-exception" not in notebooks.tags(cell):
            assert not [output for output in cell.outputs if output.output_type == "error"], cell.source


@every_notebook
def test_code_cells_are_short(path):
    assert not [cell.source for cell in code_cells(path) if len(cell.source.splitlines()) > 40]


@every_notebook
def test_stored_form_is_the_normalised_one(path):
    stored = notebooks.load(path)
    assert stored == notebooks.normalise(notebooks.load(path)), "run `make notebooks`"


@every_notebook
def test_it_runs_top_to_bottom_in_any_folder_without_installing_anything(path):
    for cell in code_cells(path):
        assert not MACHINERY.search(cell.source), cell.source
    counts = [cell.execution_count for cell in code_cells(path) if cell.execution_count]
    assert counts == list(range(1, len(counts) + 1))


@every_notebook
def test_it_ends_with_summary_exercises_and_what_comes_next(path):
    prose = "\n".join(cell.source for cell in notebooks.load(path).cells if cell.cell_type == "markdown")
    headings = [heading.lower() for heading in re.findall(r"^#+ +(.+)$", prose, re.M)]
    wanted = ("summary", "exercises", "next")
    assert [word for heading in headings[-12:] for word in wanted if heading.startswith(word)] == list(wanted)


def test_every_paper_room_has_a_readme_that_names_its_notebooks():
    for room in {path.parent for path in PATHS} - {notebooks.FOLDER}:
        text = (room / "README.md").read_text()
        assert all(path.name in text for path in PATHS if path.parent == room), room.relative_to(ROOT)
