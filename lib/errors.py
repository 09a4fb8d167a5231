"""Errors that a user can cause, told in one sentence."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input from outside: names the thing, its value and the remedy in one sentence.

    Command-line entries print the sentence and exit with status 2 instead of showing a traceback.
    """
