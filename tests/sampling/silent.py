"""Rollout workers that misbehave, for tests of time-outs. They import nothing heavy, so they start at once."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def never_answers(pipe: Connection, init: bytes) -> None:
    """Take every request and say nothing."""
    while True:
        pipe.recv()


def never_reads(pipe: Connection, init: bytes) -> None:
    """Leave requests in the pipe until it is full."""
    time.sleep(60)


def dies(pipe: Connection, init: bytes) -> None:
    """End as if killed for memory."""
    pipe.recv()


def answers_late(pipe: Connection, init: bytes) -> None:
    """Answer the first request only together with the second."""
    first = pipe.recv()
    second = pipe.recv()
    pipe.send((first[0], True, ["stale"]))
    pipe.send((second[0], True, ["fresh"]))
    pipe.recv()
