"""Read, check, execute and normalise notebooks, so that their stored outputs are made by one command and never by hand.

    python -m lib.notebooks [NOTEBOOK ...]     execute in place at the defaults and store normalised outputs
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from lib.errors import UserError
from lib.runs import ROOT, to_json, write_atomic

FOLDER = ROOT / "notebooks"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
QUIET = ["--log-level=CRITICAL"]  # a kernel's remarks about its sockets would break up the progress line
KEPT_CELL_METADATA = {"tags", "jupyter", "slideshow"}


def find(folder: str | Path = FOLDER) -> list[Path]:
    """All notebooks below a folder in reading order: the start page first, then paper by paper."""
    paths = [path for path in Path(folder).rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    return sorted(paths, key=lambda path: (len(path.parts), path.parts))


def load(path: str | Path) -> NotebookNode:
    """Read a notebook as format 4.

    Raises:
        UserError: the file is missing or not a notebook.
    """
    try:
        return nbformat.read(str(path), as_version=4)
    except FileNotFoundError:
        raise UserError(f"The notebook '{path}' does not exist.") from None
    except Exception as error:  # nbformat answers damaged files with many kinds of exception
        raise UserError(f"'{path}' is not a notebook that can be read: {error}") from error


def tags(cell: NotebookNode) -> list[str]:
    """A cell's tags."""
    return cell.metadata.get("tags", [])


def parameters(path: str | Path) -> dict[str, Any]:
    """The parameters a notebook accepts, with their defaults.

    Args:
        path: the notebook; exactly one of its cells is tagged `parameters` and assigns literals only.

    Returns:
        Default values by name, in the order of the cell.

    Raises:
        UserError: there is not exactly one such cell, or it holds something else than `name = literal`.
    """
    cells = [cell for cell in load(path).cells if "parameters" in tags(cell)]
    if len(cells) != 1:
        raise UserError(f"'{path}' has {len(cells)} cells tagged 'parameters'; it needs exactly one.")
    found: dict[str, Any] = {}
    for statement in ast.parse(cells[0].source).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        try:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
                raise ValueError
            found[target.id] = ast.literal_eval(statement.value)
        except ValueError:
            line = ast.unparse(statement)
            raise UserError(f"'{path}': the parameters cell holds '{line}'; write 'name = literal' only.") from None
    return found


def check_parameters(path: str | Path, given: dict[str, Any], origin: str | Path) -> None:
    """Refuse parameters that the notebook would silently ignore or misread.

    Args:
        path: the notebook.
        given: parameters by name.
        origin: the file they come from, for the message.

    Raises:
        UserError: a name that the notebook has not, or a value of another type than its default.
    """
    known = parameters(path)
    for name, value in given.items():
        if name not in known:
            raise UserError(f"'{origin}' sets '{name}', which '{path}' does not have; it has {', '.join(known)}.")
        default = known[name]
        wanted = (int, float) if isinstance(default, float) else type(default)
        if default is None or value is None:
            continue
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            raise UserError(
                f"'{origin}' sets '{name}' to {value!r} ({type(value).__name__}), but '{path}' needs "
                f"{type(default).__name__}, as in its default {default!r}."
            )


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Take out all that changes from one execution to the next without meaning anything.

    Kept are tags and outputs; dropped are widget state and views (each has a static twin), time stamps, progress bars
    and cell metadata of editors. Cell ids are their position, so that re-execution gives small differences.

    Args:
        notebook: changed in place.

    Returns:
        The same notebook.
    """
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNELSPEC), language_info=NotebookNode(name="python"))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in KEPT_CELL_METADATA if cell.metadata.get(key)})
        if cell.cell_type == "code":
            cell.outputs = [_without_paths(output) for output in cell.outputs if _lasting(output)]
    return notebook


def _lasting(output: NotebookNode) -> bool:
    """False for widget views, which need a live kernel, and for bars that a terminal would have drawn over."""
    if output.output_type == "stream":
        return not (output.name == "stderr" and "\r" in output.text)
    return WIDGET not in output.get("data", {})


def _without_paths(output: NotebookNode) -> NotebookNode:
    """Tracebacks name files of this machine; shorten them to what a reader elsewhere can find."""
    if "metadata" in output:
        output.metadata = NotebookNode()
    text = nbformat.v4.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))
    for prefix, short in ((str(ROOT), ""), (sys.prefix, "<environment>/"), (str(Path.home()), "~/")):
        text = text.replace(prefix.rstrip("/") + "/", short)
    return nbformat.v4.reads(text).cells[0].outputs[0]


def execute(path: str | Path, timeout_s: float = 600) -> float:
    """Run a notebook at its defaults in a fresh kernel and store the normalised outputs in it.

    Args:
        path: the notebook; it is replaced only when every cell ran.
        timeout_s: longest time for one cell.

    Returns:
        Seconds it took.

    Raises:
        UserError: a cell failed; names it and its error.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    path = Path(path)
    notebook = load(path)
    begin = time.monotonic()
    where = {"cell": 0}
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        extra_arguments=QUIET,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=lambda cell, cell_index: where.update(cell=cell_index + 1),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise UserError(f"'{path}' failed in cell {where['cell']}: {error.ename}: {error.evalue}") from error
    except (CellTimeoutError, DeadKernelError) as error:
        raise UserError(f"'{path}' failed in cell {where['cell']}: {str(error).splitlines()[0]}") from error
    seconds = time.monotonic() - begin
    write_atomic(path, nbformat.writes(normalise(notebook)) + "\n")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Execute notebooks in place; prints the seconds each took, as JSON last."""
    parser = argparse.ArgumentParser(prog="python -m lib.notebooks", description="Execute notebooks in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    chosen = parser.parse_args(argv).notebooks or find()
    took = {}
    try:
        for path in chosen:
            print(f"{path.parent.name}/{path.name} ...", end=" ", flush=True)
            took[path.name] = round(execute(path), 1)
            print(f"{took[path.name]} s")
    except UserError as error:
        print(f"\n{error}", file=sys.stderr)
        return 2
    print(to_json(took))
    return 0


if __name__ == "__main__":
    sys.exit(main())
