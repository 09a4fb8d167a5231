"""How actions are sampled: one protocol, several engines (`scripted`, `torch_engine`)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from lib.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingParams:
    """What to sample.

    Args:
        temperature: 0 means greedy.
        max_tokens: upper bound on new tokens.
        stop_ids: sampling ends after one of these; it belongs to the completion.
        top_p, top_k: only the full distribution (1.0, 0) is accepted, because truncating it renormalises the
            log-probabilities and biases every importance ratio (pitfall 6).
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.top_p != 1.0 or self.top_k != 0:
            raise UserError(
                f"top_p={self.top_p}, top_k={self.top_k}: truncated sampling has other log-probabilities than the "
                "policy, which biases importance ratios; use top_p=1.0 and top_k=0"
            )
        if not 0 <= self.temperature < math.inf or self.max_tokens < 1:
            raise UserError(f"temperature={self.temperature}, max_tokens={self.max_tokens}: need >= 0 and >= 1")


@dataclass(frozen=True, order=True)
class RngKey:
    """Names one action of one node, so that scheduling order never chooses the random numbers.

    Keys sort by step, task, sample and then by path in the tree; that order is the row order of the lockstep schedule.
    `task` is the tree's group, which tells equal task ids of different recipe graphs apart.
    """

    seed: int
    step: int
    task: str
    sample: int
    path: tuple[int, ...]
    turn: int = 0

    @property
    def node(self) -> tuple[Any, ...]:
        """The key without the turn: names the node."""
        return (self.seed, self.step, self.task, self.sample, self.path)

    def generator(self) -> np.random.Generator:
        """A private random number generator that depends on nothing but the key."""
        digest = hashlib.blake2b(repr((self.node, self.turn)).encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@dataclass(frozen=True)
class Completion:
    """Sampled ids with the log-probabilities of the distribution that sampled them (temperature included).

    Args:
        ids: shape (T,). logprobs: shape (T,).
        finish_reason: "stop" (a stop id was sampled) or "length".
        version: policy version that sampled.

    Raises:
        ValueError: ids are missing, or there is not one log-probability for each; text is never encoded in their place
            (pitfall 30).
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    version: int = 0

    def __post_init__(self) -> None:
        ids, logprobs = (len(x) if x is not None else 0 for x in (self.ids, self.logprobs))
        if ids == 0 or ids != logprobs:
            raise ValueError(f"an engine returned {ids} sampled ids and {logprobs} log-probabilities; both are needed")


class Gate:
    """Counts the agents that are running right now; a lockstep engine ticks only when nobody runs.

    A token passes from hand to hand: an agent holds one while its code runs, gives it up when it parks (waiting for the
    engine or for children) and is given a new one by whoever wakes it. So there is no moment between "the child is
    done" and "the parent runs again" at which the count is zero.
    """

    def __init__(self) -> None:
        self.running = 0
        self._waiting: list[asyncio.Future[None]] = []  # no Event: that would tie the gate to one event loop

    def enter(self) -> None:
        """An agent starts or is woken."""
        self.running += 1

    def leave(self) -> None:
        """An agent parks or ends."""
        self.running -= 1
        if self.running == 0:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def idle(self) -> None:
        """Wait until nobody runs."""
        while self.running > 0:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


class Parking:
    """Where one agent waits; `wake` hands it a gate token at once, before it is scheduled."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Give up the token and sleep until `wake`; a sleeper that is cancelled takes a token back to unwind with."""
        self._future = asyncio.get_running_loop().create_future()
        self._gate.leave()
        try:
            await self._future
        except asyncio.CancelledError:
            if self._future is not None:  # not woken yet
                self._future = None
                self._gate.enter()
            raise

    def wake(self, error: BaseException | None = None) -> None:
        """Let the sleeper go on (or raise `error` in it); does nothing if nobody sleeps here."""
        future, self._future = self._future, None
        if future is not None and not future.done():
            self._gate.enter()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class Sampler(Protocol):
    """What the agent loop needs of an engine.

    `deterministic` says whether equal keys give equal completions whatever else runs; an engine that cannot honour keys
    says False. `gate` is entered by every running agent.
    """

    deterministic: bool
    version: int
    gate: Gate

    async def sample(self, ids: list[int], params: SamplingParams, key: RngKey) -> Completion:
        """Continue `ids`."""
        ...

    def release(self, key: RngKey) -> None:
        """The node has ended; whatever is cached for it may go."""
        ...

    async def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the policy's weights."""
        ...


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run async code from sync code, inside a notebook kernel (whose loop is busy) as well as outside.

    The coroutine runs in a thread of its own. Ctrl-C (or the kernel's stop button) cancels it, waits until it has
    unwound, and raises KeyboardInterrupt here.
    """
    result: list[T] = []
    failure: list[BaseException] = []
    started, ended = threading.Event(), threading.Event()  # no Thread.join: Ctrl-C in it marks a live thread as dead
    handle: dict[str, Any] = {}

    async def main() -> None:
        handle["loop"], handle["task"] = asyncio.get_running_loop(), asyncio.current_task()
        started.set()
        result.append(await coroutine)

    def target() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # handed to the caller's thread below
            failure.append(error)
        finally:
            started.set()
            ended.set()

    threading.Thread(target=target, name="run_sync", daemon=True).start()
    try:
        while not ended.wait(0.1):
            pass
    except KeyboardInterrupt:
        started.wait()
        if not ended.is_set():
            with contextlib.suppress(RuntimeError):  # the loop closes just now
                handle["loop"].call_soon_threadsafe(handle["task"].cancel)
        ended.wait(10)
        raise
    if failure:
        raise failure[0]
    return result[0]
