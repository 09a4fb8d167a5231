"""Rollouts in worker processes: on a CPU two processes of one thread do twice the work of one, two threads do not.

Trees are dealt out in turn (tree i to worker i mod n) and each worker runs a lockstep engine of its own, so results
depend on the number of workers at most through rounding, never on timing.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from lib.errors import UserError
from lib.policy import ChatFormat, Policy
from lib.sampling import Sampler, run_sync
from lib.sampling.torch_engine import TorchEngine, slots_within
from lib.sandbox.repl import Limits, ReplPool
from lib.tree import Tree


class Play(Protocol):
    """How a batch of jobs becomes trees, given a sampler, a conversation format and a REPL pool; must pickle."""

    def __call__(
        self, sampler: Sampler, chat: ChatFormat, repl: ReplPool, jobs: list[Any], **options: Any
    ) -> Coroutine[Any, Any, list[Tree]]:
        """Trees in the order of the jobs."""
        ...


@dataclass(frozen=True)
class Setup:
    """What every worker needs to know once.

    Args:
        play: see `Play`.
        max_len: longest context of any rollout. slots, kv_bytes: see `TorchEngine`.
        limits: of the agents' code.
    """

    play: Play
    max_len: int
    slots: int = 96
    kv_bytes: int = 1 << 30
    limits: Limits = field(default_factory=Limits)


class _Engine:
    """One engine with its REPL workers; lives in this process or in a worker."""

    def __init__(self, model: Any, chat: ChatFormat, setup: Setup):
        self.engine = TorchEngine(model, max_len=setup.max_len, slots=setup.slots, kv_bytes=setup.kv_bytes)
        self.chat, self.setup = chat, setup
        self.repl = ReplPool(1, setup.limits).__enter__()

    def run(self, jobs: list[Any], options: dict[str, Any]) -> list[Tree]:
        try:
            return run_sync(self.setup.play(self.engine, self.chat, self.repl, jobs, **options))
        finally:
            self.engine.forget_nodes()

    def load(self, state: dict[str, Any], version: int) -> None:
        run_sync(self.engine.load_weights(state, version))

    def close(self) -> None:
        self.repl.__exit__(None, None, None)


class RolloutPool:
    """Samples trees with the current weights of a policy; use as a context manager.

    Args:
        policy: whose model and tokenizer to use.
        setup: see `Setup`.
        workers: processes; 0 samples in this process.
        timeout: seconds after which a batch of rollouts raises TimeoutError.
    """

    def __init__(self, policy: Policy, setup: Setup, workers: int = 0, timeout: float = 3600.0):
        self.policy, self.setup, self.timeout, self.version = policy, setup, timeout, 0
        slots_within(setup.kv_bytes, policy.model, setup.max_len)  # refused here rather than in every worker
        self._local = _Engine(policy.model, policy.chat, setup) if workers == 0 else None
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._asked = 0
        context = mp.get_context("spawn")
        for i in range(workers):
            ours, theirs = context.Pipe()
            config = policy.model.config.to_dict()
            init = pickle.dumps((config, policy.tokenizer, _pack(policy.model.state_dict()), setup))
            process = context.Process(target=_serve, args=(theirs, init), name=f"rollout-{i}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._local:
            self._local.close()
        for process, pipe in self._workers:
            pipe.close()  # a worker ends when its pipe does
            process.join(2)
            if process.is_alive():
                process.kill()

    def sync(self) -> None:
        """Give the policy's present weights to every engine, and prove on a probe that they really run them.

        Raises:
            RuntimeError: an engine scores the probe differently from the policy (pitfall 10).
            TimeoutError: a worker does not answer (pitfall 11).
        """
        self.version += 1
        state = self.policy.model.state_dict()
        if self._local:
            self._local.load(state, self.version)
            scores = [self._local.engine.logprobs(self._probe())]
        else:
            packed = _pack(state)
            scores = self._ask([("load", packed, self.version, self._probe())] * len(self._workers), "weight sync")
        expected = self._score(self._probe())
        for got in scores:
            worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
            if not worst < 1e-2:
                raise RuntimeError(f"weight sync: log-probabilities of the engine and the policy differ by {worst:.3g}")

    def _probe(self) -> list[int]:
        vocabulary = self.policy.model.config.vocab_size
        return [(7 * i + 3) % vocabulary for i in range(min(24, self.setup.max_len))]

    def _score(self, ids: list[int]) -> list[float]:
        import torch

        with torch.inference_mode():
            logp = self.policy.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        return logp[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()

    def rollouts(self, jobs: Sequence[Any], **options: Any) -> list[Tree]:
        """Run jobs and return their trees in the order of the jobs.

        Args:
            jobs, options: passed to `Setup.play`.

        Raises:
            RuntimeError: a worker failed; its own traceback is in the message.
            TimeoutError: a worker does not answer.
        """
        if self._local:
            return self._local.run(list(jobs), options)
        n = len(self._workers)
        parts = self._ask([("run", list(jobs[i::n]), options) for i in range(n)], "rollout")
        trees: list[Any] = [None] * len(jobs)
        for i, part in enumerate(parts):
            trees[i::n] = part
        return trees

    def _ask(self, requests: list[tuple[Any, ...]], phase: str) -> list[Any]:
        """Put one request to every worker. Requests are numbered, so that an answer to an earlier one, which an error
        or Ctrl-C kept from being read, is not taken for an answer to this one."""
        self._asked += 1
        deadline = time.monotonic() + self.timeout
        for (process, pipe), request in zip(self._workers, requests, strict=True):
            self._send(process, pipe, (self._asked, *request), deadline, phase)
        return [self._answer(process, pipe, deadline, phase) for process, pipe in self._workers]

    def _send(self, process: Any, pipe: Connection, request: Any, deadline: float, phase: str) -> None:
        """Send from a thread of its own: a pipe that nobody reads blocks for ever once it is full."""
        failures: list[Exception] = []

        def send() -> None:
            try:
                pipe.send(request)
            except (OSError, TypeError) as error:  # TypeError: closed meanwhile by the pool's end
                failures.append(error)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(max(0.0, deadline - time.monotonic()))
        if sender.is_alive():
            raise TimeoutError(f"{phase}: {process.name} took no request in {self.timeout:g} s")
        if failures:
            raise RuntimeError(f"{phase}: {process.name} died (out of memory?)") from failures[0]

    def _answer(self, process: Any, pipe: Connection, deadline: float, phase: str) -> Any:
        number = 0
        while number != self._asked:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{phase}: no answer from {process.name} in {self.timeout:g} s")
            try:
                number, ok, answer = pipe.recv()
            except (EOFError, OSError):
                raise RuntimeError(f"{phase}: {process.name} died (out of memory?)") from None
        if ok:
            return answer
        if isinstance(answer, UserError):
            raise answer
        raise RuntimeError(f"{phase}: {process.name} failed:\n{answer}")


def _pack(state: dict[str, Any]) -> bytes:
    from safetensors.torch import save

    return save({k: v.detach().contiguous().clone() for k, v in state.items()})


def _serve(pipe: Connection, init: bytes) -> None:
    """The life of a worker: build the engine, answer requests until the pipe closes."""
    import torch
    from safetensors.torch import load
    from transformers import AutoModelForCausalLM, LlamaConfig

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    config, tokenizer, weights, setup = pickle.loads(init)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(config))
    model.load_state_dict(load(weights))
    engine = _Engine(model.eval(), ChatFormat(tokenizer), setup)
    try:
        while True:
            try:
                number, what, *request = pipe.recv()
            except EOFError:
                return
            try:
                if what == "load":
                    weights, version, probe = request
                    engine.load(load(weights), version)
                    answer = (number, True, engine.engine.logprobs(probe))
                else:
                    answer = (number, True, engine.run(*request))
            except UserError as error:
                answer = (number, False, error)
            except Exception:
                answer = (number, False, traceback.format_exc())
            try:
                pipe.send(answer)
            except OSError:  # nobody is there any more
                return
    finally:
        engine.close()
