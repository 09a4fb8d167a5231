"""Persistent REPL sessions for Python that agents write.

Code runs in `pydantic-monty`, a Python subset interpreted in a separate worker process with no access to the host but
the tools passed in. What it keeps out and what it does not is tested in tests/attacks; it makes no claim against bugs
in the interpreter or the kernel.

A session holds a worker only while its code runs. Between turns, and while the code waits for asynchronous tools such
as `launch_subagent`, its heap is parked as a few kilobytes of bytes (about 0.3 ms a turn). So a handful of workers
serves any number of live sessions, and no depth or width of waiting parents can deadlock.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import pydantic_monty as monty

from lib.sampling import Gate, Parking

NESTED = (list, tuple, set, frozenset)
PLAIN = (bool, int, float, str, bytes, dict, *NESTED)  # what host functions take from a session
NESTING = 100  # levels
BITS = 4096  # of an integer; about 1,200 digits
CLOCK = datetime(2026, 1, 1)  # it stands still in a session, so that runs with equal seeds are equal
STALLED = "a call of an earlier run was awaited; call and await in the same run"


class _Stopped(Exception):
    """A run cannot go on; the message is for the agent."""


class ToolError(Exception):
    """Raised by a tool to tell the agent about the agent's own mistake; anything else a tool raises is a fault of the
    host and ends the rollout."""


@dataclass(frozen=True)
class Limits:
    """Bounds on one `run`.

    Args:
        seconds: time that the code itself may take; time spent waiting for tools does not count.
        memory: bytes of heap. recursion: depth of the call stack. calls: tool calls of one run.
        output: characters of printed text that are kept, and of a value or an error that are shown.
        arguments: characters (16 for anything but text) that one tool call may pass to the host.
    """

    seconds: float = 2.0
    memory: int = 64 << 20
    recursion: int = 200
    calls: int = 500
    output: int = 8000
    arguments: int = 1_000_000


@dataclass(frozen=True)
class Observation:
    """What came of one run: printed text, value of the last expression (None if there is none; cut text if it is longer
    than the output limit), error in one line."""

    stdout: str = ""
    value: Any = None
    error: str | None = None
    timed_out: bool = False

    @property
    def text(self) -> str:
        """The observation as an agent reads it; says so when there is nothing to read."""
        parts = [self.stdout.rstrip("\n")] if self.stdout else []
        if self.value is not None:
            parts.append(self.value if isinstance(self.value, str) else repr(self.value))
        if self.error:
            parts.append(self.error)
        return "\n".join(parts) or "(no output)"


class ReplPool:
    """Owns the worker processes; use as a context manager.

    Args:
        workers: processes kept; one is enough for a lockstep rollout, whose agents run one at a time.
    """

    def __init__(self, workers: int = 1, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._monty = monty.Monty(
            min_processes=1, max_processes=workers, checkout_timeout=60.0, request_timeout=self.limits.seconds + 30
        )

    def __enter__(self) -> Self:
        self._monty.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monty.__exit__(kind, error, trace)

    def session(self, tools: Mapping[str, Callable[..., Any]], gate: Gate | None = None) -> Repl:
        """A fresh session; it costs nothing until it runs.

        Args:
            tools: functions the code may call. One that returns an awaitable is asynchronous: the code awaits it, and
                several run at once under `asyncio.gather`. Wrong arguments and `ToolError` are raised in the code.
            gate: counts running agents (see `lib.sampling.Gate`).
        """
        return Repl(self, tools, gate or Gate())

    @cached_property
    def fresh(self) -> bytes:
        """The heap of a new session: `asyncio` is imported already."""
        with self.checkout() as session:
            session.feed_run("import asyncio")
            return session.dump()

    def checkout(self) -> monty.MontySession:
        """A worker, given back when the `with` block ends."""
        limits = self.limits
        return self._monty.checkout(
            limits=monty.ResourceLimits(
                max_feed_duration_secs=limits.seconds,
                max_memory=limits.memory,
                max_recursion_depth=limits.recursion,
                max_suspensions=2 * limits.calls + 100,
                max_total_sleep_secs=0.0,
            ),
            os_policy=monty.OSPolicy(datetime=CLOCK, sleep="zero", random_start={"seed": 0}),
        )


class _Printer:
    """Collects printed text up to a limit; what is beyond it is counted, not kept."""

    def __init__(self, limit: int):
        self.parts: list[str] = []
        self.left, self.lost = limit, 0

    def __call__(self, stream: str, text: str) -> None:
        if self.left:
            self.parts.append(text[: self.left])
        self.lost += max(0, len(text) - self.left)
        self.left = max(0, self.left - len(text))

    @property
    def text(self) -> str:
        return "".join(self.parts) + (_cut_note(self.lost) if self.lost else "")


class Repl:
    """One session: variables persist between runs. Made by `ReplPool.session`."""

    def __init__(self, pool: ReplPool, tools: Mapping[str, Callable[..., Any]], gate: Gate):
        self._pool, self._tools, self._gate = pool, tools, gate
        self._state = pool.fresh
        self._asked = 0  # tool calls of the present run

    async def run(self, code: str, inputs: Mapping[str, Any] | None = None) -> Observation:
        """Run one cell and say what came of it; nothing that the code does raises here.

        Faults of the host do: an exception of a tool that is not a `ToolError`.

        Args:
            code: source; the value of a last expression is returned.
            inputs: variables bound before it runs.

        A run that is stopped (by the limits of time, memory or calls, or waiting for what cannot come) leaves the
        session as it was before the run.
        """
        printer = _Printer(self._pool.limits.output)
        value, error, timed_out = None, None, False
        try:
            value = await self._feed(code, dict(inputs or {}), printer)
        except monty.MontyCrashedError as crash:
            error, timed_out = f"RuntimeError: the interpreter stopped ({crash})", crash.timed_out
        except (monty.MontySyntaxError, monty.MontyRuntimeError) as failure:
            error = failure.display("type-msg")
            timed_out = _hit_the_clock(error)
            if "asyncio scheduler stalled" in error:
                error = f"RuntimeError: {STALLED}"
        except monty.MontyError as failure:
            error = f"RuntimeError: {failure}"
        except _Stopped as reason:
            error = f"RuntimeError: {reason}"
        limit = self._pool.limits.output
        error = error and _cut(" ".join(error.splitlines()), limit)
        return Observation(printer.text, _showable(value, limit), error, timed_out)

    async def _feed(self, code: str, inputs: dict[str, Any], printer: _Printer) -> Any:
        """Drive one cell: answer tool calls, park the heap while every task of the cell waits."""
        calls: dict[int, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {}  # asked for, not yet awaited
        tasks: dict[int, asyncio.Task[None]] = {}
        answers: dict[int, Any] = {}
        parking = Parking(self._gate)
        self._asked = 0
        parked: bytes | None = None
        try:
            while True:
                with self._pool.checkout() as session:
                    try:
                        if parked is not None:
                            snapshot = session.load_snapshot(parked, print_callback=printer)
                            ready = {i: answers.pop(i) for i in sorted(answers)}
                            snapshot = snapshot.resume(ready)
                        else:
                            session.load_session(self._state)
                            snapshot = session.feed_start(code, inputs=inputs, print_callback=printer)
                        snapshot = self._advance(snapshot, calls)
                    except (monty.MontyRuntimeError, monty.MontySyntaxError) as failure:
                        if not _out_of_bounds(failure.display("type-msg")):
                            self._state = session.dump()
                        raise
                    if isinstance(snapshot, monty.MontyComplete):
                        self._state = session.dump()
                        forgotten = sorted({c[0].__name__ for i, c in calls.items() if i not in tasks})
                        if forgotten:
                            printer("stdout", f"[{', '.join(forgotten)} was called without await and did not run]")
                            return None
                        return snapshot.output
                    waiting = sorted(snapshot.pending_call_ids)
                    if not waiting:
                        raise _Stopped(STALLED)
                    parked = snapshot.dump()
                for i in waiting:
                    if i not in tasks:
                        tasks[i] = self._start(calls[i], i, answers, parking)
                while not answers:
                    await parking.wait()
                for answer in answers.values():
                    if isinstance(answer, Exception):
                        raise answer
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _advance(self, snapshot: Any, calls: dict[int, Any]) -> Any:
        """Answer suspensions until the code is done or waits for asynchronous tools."""
        while not isinstance(snapshot, monty.MontyComplete | monty.FutureSnapshot):
            if isinstance(snapshot, monty.NameLookupSnapshot):
                tool = self._tools.get(snapshot.variable_name) if snapshot.object_id is None else None
                snapshot = snapshot.resume(value=tool) if tool is not None else snapshot.resume()
            elif snapshot.is_os_function:
                snapshot = snapshot.resume_not_handled()
            else:
                snapshot = snapshot.resume(self._call(snapshot, calls))
        return snapshot

    def _call(self, snapshot: monty.FunctionSnapshot, calls: dict[int, Any]) -> Any:
        self._asked += 1
        if self._asked > self._pool.limits.calls:  # counted here, since a parked heap forgets its own count
            raise _Stopped(f"more than {self._pool.limits.calls} tool calls in one run")
        tool = self._tools.get(str(snapshot.function_name))
        if tool is None:
            return {"exc_type": "NameError", "message": f"name '{snapshot.function_name}' is not defined"}
        try:
            inspect.signature(tool).bind(*snapshot.args, **snapshot.kwargs)
        except TypeError as error:
            return {"exc_type": "TypeError", "message": f"{snapshot.function_name}(): {error}"}
        if problem := _problem([*snapshot.args, *snapshot.kwargs.values()], self._pool.limits.arguments):
            return {"exc_type": "ValueError", "message": f"{snapshot.function_name}(): an argument {problem}"}
        if inspect.iscoroutinefunction(tool):
            calls[snapshot.call_id] = (tool, snapshot.args, snapshot.kwargs)
            return {"future": ...}
        try:
            return {"return_value": tool(*snapshot.args, **snapshot.kwargs)}
        except ToolError as error:
            return {"exc_type": "RuntimeError", "message": str(error)}

    def _start(self, call: Any, i: int, answers: dict[int, Any], parking: Parking) -> asyncio.Task[None]:
        """Start an awaited tool. Its task holds a gate token, and wakes the caller before giving it up."""
        tool, args, kwargs = call

        async def run() -> None:
            try:
                answers[i] = {"return_value": await tool(*args, **kwargs)}
            except ToolError as error:
                answers[i] = {"exc_type": "RuntimeError", "message": str(error)}
            except Exception as error:
                answers[i] = error  # raised where the caller waits

        def ended(_: asyncio.Task[None]) -> None:  # also called if the task is cancelled before it begins
            parking.wake()
            self._gate.leave()

        self._gate.enter()
        task = asyncio.get_running_loop().create_task(run())
        task.add_done_callback(ended)
        return task


def _problem(values: list[Any], limit: int) -> str | None:
    """Why arguments from a session are too much for a host function, None if they are not: the host must be able to
    walk, copy and print whatever it is given."""
    stack, size = [(value, 0) for value in values], 0
    while stack:
        value, depth = stack.pop()
        if not (value is None or isinstance(value, PLAIN)):
            return f"is a {type(value).__name__}: pass numbers, text, lists, tuples and dicts"
        if depth > NESTING:
            return f"is nested more than {NESTING} levels deep"
        if isinstance(value, int) and value.bit_length() > BITS:
            return f"is an integer of more than {BITS} bits"
        size += len(value) if isinstance(value, str | bytes) else 16
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, NESTED) else ()
        size += 16 * len(inner)
        if size > limit:
            return f"is larger than {limit} characters"
        stack += [(x, depth + 1) for x in inner]
    return None


def _showable(value: Any, limit: int) -> Any:
    """The value of a cell, or a text in its place where it is too long or cannot be printed."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError) as error:  # an integer too long to print, a value nested too deep
        return f"[a value that cannot be shown: {error}]"
    return value if len(text) <= limit else _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + _cut_note(len(text) - limit)


def _cut_note(lost: int) -> str:
    return f"\n[{lost} more characters were cut]"


def _hit_the_clock(message: str) -> bool:
    return message.startswith("TimeoutError:") and "time limit exceeded" in message


def _out_of_bounds(message: str) -> bool:
    """Whether the interpreter was stopped rather than the code failed: then its heap is not worth keeping."""
    return _hit_the_clock(message) or message.startswith("MemoryError:")
