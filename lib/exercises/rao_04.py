"""Checks for `rao/04_ablations`, with values worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lib.exercises import expect


def check_first_at(first_at: Callable[[Sequence[float], float, int], int | None]) -> None:
    """Exercise 1: a running mean, so that one lucky step does not count."""
    expect(first_at([0.0, 0.5, 1.0], 0.5, 1), 2, "window 1: the first value that is large enough")
    expect(first_at([0.9, 0.1, 0.9, 0.9], 0.8, 2), 4, "window 2: one lucky step does not count")
    expect(first_at([0.5, 0.5, 0.5, 0.5], 0.5, 3), 3, "not before the window is full")
    expect(first_at([0.1, 0.2, 0.3], 0.8, 2), None, "never reached")


def check_share_by_depth(share_by_depth: Callable[[Sequence[tuple[int, int, float, float]]], dict[int, float]]) -> None:
    """Exercise 2."""
    one = [(0, 10, 1.0, 1.0), (1, 10, 1.0, -1.0), (1, 20, 1.0, 1.0)]
    expect(share_by_depth(one), {0: 0.25, 1: 0.75}, "weights 1: depth 1 has 30 of 40 tokens; signs do not cancel")
    two = [(0, 10, 1.5, 1.0), (1, 10, 0.75, -1.0), (1, 20, 0.75, 1.0)]
    expect(share_by_depth(two), {0: 0.4, 1: 0.6}, "Eq. 4's weights of one root and two children: 15 against 22.5")
    expect(share_by_depth([(0, 10, 1.0, 0.5), (1, 50, 1.0, 0.0)]), {0: 1.0, 1: 0.0}, "no advantage, no share")


def check_standard_errors(standard_errors: Callable[[Sequence[float], Sequence[float]], tuple[float, float]]) -> None:
    """Exercise 3: (paired, unpaired) standard error of a difference of means, with n - 1 in the variances."""
    a, b = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    # differences 0 1 0 0: variance 1/4; variances of a and b: 1/3 and 1/4
    wanted = ((1 / 4 / 4) ** 0.5, ((1 / 3 + 1 / 4) / 4) ** 0.5)
    expect(tuple(standard_errors(a, b)), wanted, "outcomes that mostly agree")
    expect(tuple(standard_errors(a, a)), (0.0, (2 / 3 / 4) ** 0.5), "an arm against itself")
    opposite = [1 - x for x in a]
    expect(tuple(standard_errors(a, opposite)), ((4 / 3 / 4) ** 0.5, (2 / 3 / 4) ** 0.5), "outcomes that disagree")
