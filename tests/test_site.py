"""lib.site and lib.notebooks: links are checked before anything is written; stored outputs do not change by chance."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib import notebooks, site
from lib.errors import UserError
from lib.runs import ROOT


@pytest.fixture
def root(tmp_path):
    (tmp_path / "notebooks" / "rao").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "tree.py").write_text("x = 1\n")
    (tmp_path / "README.md").write_text("# Start\n\n[first](notebooks/rao/01_a.ipynb)\n")
    write(tmp_path, "# First steps\n\n[code](../../lib/tree.py) [back](../../README.md) [here](#First-steps)")
    return tmp_path


def write(root, text, source="'<a href=\"nowhere\">'"):
    cells = [new_markdown_cell(text), new_code_cell(source)]
    nbformat.write(new_notebook(cells=cells), root / "notebooks" / "rao" / "01_a.ipynb")


def test_site_mirrors_the_project_and_leads_from_page_to_page(root):
    out = root / "site"
    pages = site.build(out, root)
    names = [page.relative_to(out).as_posix() for page in pages]
    assert names == ["README.html", "notebooks/rao/01_a.html", "index.html"]
    assert 'href="notebooks/rao/01_a.html"' in (out / "README.html").read_text()
    assert 'href="../../README.html"' in (out / "notebooks/rao/01_a.html").read_text()
    assert (out / "lib/tree.py").read_text() == "x = 1\n"
    assert "First steps" in (out / "index.html").read_text()


@pytest.mark.parametrize("link", ["02_b.ipynb", "../../lib/none.py", "#no-such", "../../README.md#none", "../../lib"])
def test_link_that_leads_nowhere_is_named_and_nothing_is_written(root, link):
    write(root, f"# First steps\n\n[x]({link})")
    with pytest.raises(UserError, match="01_a.ipynb -> " + link.replace(".", r"\.")):
        site.build(root / "site", root)
    assert not (root / "site").exists()


def test_executing_in_place_stores_the_same_bytes_twice_and_no_machine_paths(tmp_path):
    path = tmp_path / "n.ipynb"
    source = f"import sys\nsys.stderr.write('\\r10%')\nprint('{ROOT}/lib/tree.py')"
    cell = new_code_cell(source, metadata={"tags": ["x"], "collapsed": True})
    metadata = {"widgets": {"state": 1}, "kernelspec": {"name": "other", "display_name": "Other"}}
    nbformat.write(new_notebook(cells=[cell], metadata=metadata), path)
    notebooks.execute(path)
    once = path.read_bytes()
    notebooks.execute(path)
    assert path.read_bytes() == once
    stored = notebooks.load(path)
    assert [output.text for output in stored.cells[0].outputs] == ["lib/tree.py\n"]
    assert stored.cells[0].metadata == {"tags": ["x"]} and stored.metadata.kernelspec.name == "python3"
    assert "widgets" not in stored.metadata
    assert notebooks.normalise(notebooks.load(path)) == stored


def test_failed_execution_names_the_cell_and_leaves_the_file_alone(tmp_path):
    path = tmp_path / "n.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1"), new_code_cell("1 / 0")]), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="failed in cell 2: ZeroDivisionError: division by zero"):
        notebooks.execute(path)
    assert path.read_bytes() == before


def test_widget_views_go_and_their_static_twins_stay():
    view = new_output("display_data", data={notebooks.WIDGET: {"model_id": "1"}, "text/plain": "interactive(...)"})
    twin = new_output("display_data", data={"image/png": "iVBO"}, metadata={"needs_background": "light"})
    cell = new_code_cell("draw(0)", outputs=[view, twin])
    stored = notebooks.normalise(new_notebook(cells=[cell])).cells[0].outputs
    assert [list(output.data) for output in stored] == [["image/png"]] and stored[0].metadata == {}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("seed = 1 + 1", "holds 'seed = 1 \\+ 1'"),
        ("import os", "holds 'import os'"),
        ("a, b = 1, 2", "holds 'a, b = \\(1, 2\\)'"),
        ("seed: int", "holds 'seed: int'"),
    ],
)
def test_parameters_must_be_literals(tmp_path, source, sentence):
    path = tmp_path / "n.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source, metadata={"tags": ["parameters"]})]), path)
    with pytest.raises(UserError, match=sentence):
        notebooks.parameters(path)


def test_parameters_are_read_with_their_types_and_must_be_in_one_cell(tmp_path):
    path = tmp_path / "n.ipynb"
    source = "seed: int = 3  # why\nrate = -0.5\nwords = ['a',\n 'b']\nnone = None"
    cell = new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[cell]), path)
    assert notebooks.parameters(path) == {"seed": 3, "rate": -0.5, "words": ["a", "b"], "none": None}
    again = new_code_cell("seed = 4", metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[cell, again]), path)
    with pytest.raises(UserError, match="has 2 cells tagged 'parameters'"):
        notebooks.parameters(path)
    with pytest.raises(UserError, match="does not exist"):
        notebooks.parameters(tmp_path / "absent.ipynb")
    (tmp_path / "bad.ipynb").write_text("{")
    with pytest.raises(UserError, match="not a notebook"):
        notebooks.parameters(tmp_path / "bad.ipynb")
