"""Exercises of `00_start_here` and `rao/04_ablations`: stubs fail, solutions pass, plausible mistakes are caught."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

from lib import notebooks
from lib.exercises import rao_04, report, start

START, ABLATIONS = notebooks.FOLDER / "00_start_here.ipynb", notebooks.FOLDER / "rao" / "04_ablations.ipynb"
SOLUTIONS = notebooks.FOLDER / "rao" / "solutions" / "04_ablations_solutions.ipynb"
COLLAPSED = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)
CHECKS: dict[str, tuple[Any, Callable[..., None]]] = {
    "reward": (START, start.check_reward),
    "advantages": (START, start.check_advantages),
    "first_at": (ABLATIONS, rao_04.check_first_at),
    "share_by_depth": (ABLATIONS, rao_04.check_share_by_depth),
    "standard_errors": (ABLATIONS, rao_04.check_standard_errors),
}
every_exercise = pytest.mark.parametrize("name", CHECKS)


def functions(sources: list[str]) -> dict[str, Callable[..., Any]]:
    """The functions that pieces of code define, without running the rest of a notebook."""
    room: dict[str, Any] = {}
    for source in sources:
        exec(source, room)
    names = [s.name for source in sources for s in ast.parse(source).body if isinstance(s, ast.FunctionDef)]
    return {name: room[name] for name in names}


def tagged(path: Any, tag: str) -> list[str]:
    return [cell.source for cell in notebooks.load(path).cells if tag in notebooks.tags(cell)]


def solutions(path: Any) -> dict[str, Callable[..., Any]]:
    """Of the start page from its collapsed cells, of the ablations from the notebook of solutions."""
    if path == START:
        return functions([code for cell in notebooks.load(START).cells for code in COLLAPSED.findall(cell.source)])
    return functions(tagged(SOLUTIONS, "solution"))


@every_exercise
def test_stub_fails_and_the_notebook_says_so_instead_of_stopping(name):
    path, check = CHECKS[name]
    assert report(check, functions(tagged(path, "exercise"))[name]).startswith(f"{name}: not done yet")


@every_exercise
def test_solution_passes(name):
    path, check = CHECKS[name]
    assert report(check, solutions(path)[name]) == f"{name}: passed"


@pytest.mark.parametrize("path", [START, ABLATIONS], ids=lambda path: path.stem)
def test_every_exercise_has_a_check_and_a_solution(path):
    names = {name for name, (of, _) in CHECKS.items() if of == path}
    assert set(functions(tagged(path, "exercise"))) == names == set(solutions(path))


def summed(own, children, lam):
    return own + lam * sum(children)


def of_all(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]


def part_windows(success, level, window):
    means = [sum(success[max(0, k - window) : k]) / min(k, window) for k in range(1, len(success) + 1)]
    return next((k for k, mean in enumerate(means, 1) if mean >= level), None)


def signed(nodes):
    total = sum(t * w * a for _, t, w, a in nodes)
    return {d: sum(t * w * a for depth, t, w, a in nodes if depth == d) / total for d, *_ in nodes}


def population(a, b):
    def variance(x):
        return sum((v - sum(x) / len(x)) ** 2 for v in x) / len(x)

    paired = [p - q for p, q in zip(a, b, strict=True)]
    return (variance(paired) / len(a)) ** 0.5, ((variance(a) + variance(b)) / len(a)) ** 0.5


@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("reward", summed, "lambda 0.4: expected 1.2, got 1.4"),
        ("advantages", of_all, "one success in four"),
        ("first_at", part_windows, "one lucky step does not count: expected 4, got 1"),
        ("share_by_depth", signed, "signs do not cancel"),
        ("standard_errors", population, "outcomes that mostly agree"),
    ],
)
def test_plausible_mistake_is_caught_and_told(name, mistake, said):
    with pytest.raises(AssertionError, match=said):
        CHECKS[name][1](mistake)
