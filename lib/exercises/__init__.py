"""Checks of the notebooks' exercises, a module each; a check takes a reader's function and raises if it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def report(check: Callable[..., None], solution: Callable[..., Any], *context: Any) -> str:
    """Say how an exercise stands, so that a notebook with open exercises still runs to its end.

    Args:
        check: raises AssertionError, saying what was expected, for a wrong solution.
        solution: the reader's function.
        context: what else the check needs.

    Returns:
        One sentence. An error of a started solution is raised, not reported.
    """
    try:
        check(solution, *context)
    except NotImplementedError as stub:
        return f"{solution.__name__}: not done yet ({stub})"
    return f"{solution.__name__}: passed"


def expect(got: Any, wanted: Any, case: str) -> None:
    """Compare one result, numbers to 1e-9.

    Raises:
        AssertionError: they differ; names the case and both values.
    """
    assert _same(got, wanted), f"{case}: expected {wanted!r}, got {got!r}"


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(got, dict) and got.keys() == wanted.keys() and all(_same(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(got) == len(wanted) and all(_same(g, w) for g, w in zip(got, wanted, strict=True))
    if isinstance(wanted, float):
        return abs(float(got) - wanted) <= 1e-9 * max(1.0, abs(wanted))
    return bool(got == wanted)
