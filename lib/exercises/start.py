"""Checks for `00_start_here`, with values worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lib.exercises import expect


def check_reward(reward: Callable[[float, Sequence[float], float], float]) -> None:
    """Exercise 1: `rao-eq1`."""
    expect(reward(1.0, [0.0, 1.0], 0.4), 1.2, "success, one of two children succeeded, lambda 0.4")
    expect(reward(0.0, [1.0, 1.0, 0.0, 1.0], 0.4), 0.3, "failure, three of four children succeeded, lambda 0.4")
    expect(reward(1.0, [], 0.4), 1.0, "no children, no bonus")
    expect(reward(0.0, [1.0] * 50, 0.4), 0.4, "many children earn no more than one")


def check_advantages(advantages: Callable[[Sequence[float]], Sequence[float]]) -> None:
    """Exercise 2: `rao-eq3` at the roots."""
    expect(list(advantages([1.0, 0.0, 0.0, 0.0])), [1.0, -1 / 3, -1 / 3, -1 / 3], "one success in four")
    expect(list(advantages([1.0, 0.0])), [1.0, -1.0], "a group of two")
    expect(list(advantages([0.7, 0.7, 0.7])), [0.0, 0.0, 0.0], "equal rewards")
