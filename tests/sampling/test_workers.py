"""Rollouts in this process and in workers: equal results, weights that really arrive, and waits that end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lib.errors import UserError
from lib.policy import Policy
from lib.rao.agent import AgentConfig, Play
from lib.sampling import workers
from lib.sampling.torch_engine import TorchEngine
from lib.sampling.workers import RolloutPool, Setup
from tests.micro import WordEpisode, policy
from tests.sampling import silent

AGENT = AgentConfig(context=200, max_steps=2, max_action=6, temperature=1.0)
JOBS = [(f"goal {k}", f"g{k}", 0) for k in range(5)]


def roll(pool: RolloutPool, jobs: list[Any] = JOBS, **options: Any) -> list[list[int]]:
    trees = pool.rollouts(jobs, **{"config": AGENT, "seed": 0, "step": 0} | options)
    assert [tree.group for tree in trees] == [group for _, group, _ in jobs]
    return [tree.root.ids for tree in trees]


def nudge(made: Policy, seed: int = 1) -> None:
    """What an optimiser step does to the weights, only more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)


def test_pitfall_10_weights_arrive_in_this_process_and_the_probe_proves_it():
    made = policy(context=256)
    with RolloutPool(made, Setup(Play(WordEpisode), 200)) as pool:
        before = roll(pool)
        assert roll(pool) == before
        nudge(made)
        assert roll(pool) == before, "nothing changes without a sync"
        pool.sync()
        after = roll(pool)
        assert after != before
        assert pool.rollouts(JOBS[:1], config=AGENT, seed=0, step=0)[0].versions == [1]
    with RolloutPool(made, Setup(Play(WordEpisode), 200)) as pool:
        assert roll(pool) == after


def test_pitfall_10_an_engine_that_keeps_its_old_weights_is_found_out(monkeypatch):
    made = policy(context=256)
    with RolloutPool(made, Setup(Play(WordEpisode), 200)) as pool:
        pool.sync()
        monkeypatch.setattr(TorchEngine, "_set_weights", lambda *_: None)
        nudge(made)
        with pytest.raises(RuntimeError, match="weight sync: log-probabilities of the engine and the policy differ by"):
            pool.sync()


def test_user_errors_come_out_of_a_rollout_as_they_are():
    with (
        RolloutPool(policy(context=256), Setup(Play(WordEpisode), 200)) as pool,
        pytest.raises(UserError, match="context=3 is smaller than the prompt of"),
    ):
        roll(pool, config=AgentConfig(context=3))


def test_models_the_engine_cannot_run_are_refused_before_workers_start():
    made = policy(context=256)
    with pytest.raises(UserError, match="max_len=300 exceeds"):
        RolloutPool(made, Setup(Play(WordEpisode), 300), workers=1)
    made.model.config.model_type = "mamba"
    with pytest.raises(UserError, match="not 'mamba'"):
        RolloutPool(made, Setup(Play(WordEpisode), 200), workers=1)


class Fault:
    """An episode whose world is broken for one goal."""

    def __init__(self, goal: str):
        if goal == "goal 3":
            raise ZeroDivisionError("the world has a hole")
        self.inner = WordEpisode(goal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[Policy, RolloutPool]]:
    made = policy(context=256)
    with RolloutPool(made, Setup(Play(Fault), 200), workers=2) as pool:
        yield made, pool


SOUND = [job for job in JOBS if job[0] != "goal 3"]


def test_workers_sample_what_this_process_samples(two_workers):
    made, pool = two_workers
    with RolloutPool(made, Setup(Play(WordEpisode), 200)) as local:
        assert roll(pool, SOUND) == roll(local, SOUND)
        assert roll(pool, SOUND[:1]) == roll(local, SOUND[:1]), "fewer jobs than workers"
        nudge(made, seed=2)
        pool.sync()
        local.sync()
        assert roll(pool, SOUND) == roll(local, SOUND)


def test_faults_in_a_worker_are_told_and_the_pool_goes_on(two_workers):
    _, pool = two_workers
    before = roll(pool, SOUND)
    with pytest.raises(RuntimeError, match=r"rollout: rollout-[01] failed:\n[\s\S]*the world has a hole"):
        roll(pool, JOBS)
    with pytest.raises(UserError, match="context=3 is smaller than the prompt"):
        roll(pool, SOUND, config=AgentConfig(context=3))
    assert roll(pool, SOUND) == before, "answers that nobody read are not taken for these"


@pytest.fixture
def pool_of(monkeypatch) -> Iterator[Callable[[Any], RolloutPool]]:
    pools = []

    def make(target: Any, **sizes: int) -> RolloutPool:
        monkeypatch.setattr(workers, "_serve", target)
        made = policy(context=256, **sizes)
        pools.append(RolloutPool(made, Setup(Play(WordEpisode), 200), workers=1, timeout=1.0))
        return pools[-1]

    yield make
    for pool in pools:
        for process, _ in pool._workers:
            process.kill()
        pool.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("ask", "phase"), [(lambda pool: pool.sync(), "weight sync"), (lambda pool: roll(pool), "rollout")]
)
def test_pitfall_11_a_worker_that_never_answers_is_a_timeout_that_names_the_phase(pool_of, ask, phase: str):
    pool = pool_of(silent.never_answers)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"{phase}: no answer from rollout-0 in 1 s"):
        ask(pool)
    assert time.monotonic() - began < 2


def test_pitfall_11_a_worker_that_does_not_even_read_is_a_timeout_too(pool_of):
    """The pipe is full long before the weights are through."""
    pool = pool_of(silent.never_reads, hidden_size=256)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="weight sync: rollout-0 took no request in 1 s"):
        pool.sync()
    assert time.monotonic() - began < 2


def test_a_worker_that_died_is_named(pool_of):
    pool = pool_of(silent.dies)
    pool.timeout = 20
    with pytest.raises(RuntimeError, match="rollout: rollout-0 died"):
        roll(pool)
    with pytest.raises(RuntimeError, match="rollout: rollout-0 died"):
        roll(pool)


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_request(pool_of):
    pool = pool_of(silent.answers_late)
    with pytest.raises(TimeoutError):
        pool.rollouts([1])
    pool.timeout = 20
    assert pool.rollouts([2]) == ["fresh"]


def test_probe_scores_are_those_of_the_policy():
    made = policy(context=256)
    with RolloutPool(made, Setup(Play(WordEpisode), 200)) as pool:
        probe = pool._probe()
        assert len(probe) == 24
        assert np.allclose(pool._local.engine.logprobs(probe), pool._score(probe), atol=1e-4)
