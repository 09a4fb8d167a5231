"""Train and evaluate a policy on TextCraft-Synth: the loop that joins rollouts, rewards, advantages and the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lib.errors import UserError
from lib.policy import Policy
from lib.rao.agent import AgentConfig, Play
from lib.rao.coldstart import GRAPHS
from lib.rao.crafting import CraftEpisodes
from lib.rao.recipes import RecipeBook, Task, generate_recipes, generate_tasks
from lib.rao.rewards import Proxy, node_rewards
from lib.rao.stats import describe
from lib.runs import Run
from lib.sampling.workers import RolloutPool, Setup
from lib.training.advantages import DepthMode, Estimator, assign
from lib.training.checkpoint import load_latest, save_checkpoint
from lib.training.trainer import Trainer, TrainerConfig
from lib.tree import Tree

DIFFICULTIES = ("easy", "medium", "hard", "extreme")


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    Args:
        agent: bounds and mode of the agent.
        steps: optimiser steps. tasks_per_step, group_size: root tasks a step and trees of each (paper: 16 and 8).
        difficulty: of the training tasks (paper: medium).
        graphs: seeds of the recipe graphs that tasks come from; never the evaluation graph.
        lam, proxy: see `lib.rao.rewards`. estimator, depth_mode, gamma: see `lib.training.advantages`.
        trainer: see `TrainerConfig`.
        seed: of task choice and sampling.
        save_every: steps between checkpoints.
    """

    agent: AgentConfig
    steps: int = 40
    tasks_per_step: int = 8
    group_size: int = 8
    difficulty: str = "medium"
    graphs: Sequence[int] = tuple(GRAPHS)
    lam: float = 0.0
    proxy: Proxy = "exact"
    estimator: Estimator = "leave_one_out"
    depth_mode: DepthMode = "inverse"
    gamma: float = 1.0
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    seed: int = 0
    save_every: int = 10


@dataclass(frozen=True)
class TaskSet:
    """Tasks with the recipe graphs they belong to."""

    books: Mapping[int, RecipeBook]
    items: list[tuple[int, Task]]

    @classmethod
    def generate(cls, graphs: Sequence[int], split: str, difficulties: Sequence[str] = DIFFICULTIES) -> TaskSet:
        """Tasks of a split ("train" or "val") of generated graphs.

        Raises:
            UserError: an unknown difficulty or split.
        """
        unknown = set(difficulties) - set(DIFFICULTIES)
        if unknown or split not in ("train", "val"):
            raise UserError(f"{unknown or split}: difficulties are {DIFFICULTIES}, splits are 'train' and 'val'")
        books = {g: generate_recipes(g) for g in graphs}
        items = []
        for g, book in books.items():
            tasks = generate_tasks(book, g)[split == "val"]
            items += [(g, t) for t in tasks if t.difficulty in difficulties]
        return cls(books, items)

    def take(self, per_difficulty: int | Mapping[str, int]) -> TaskSet:
        """The first so many tasks of each difficulty; task order is random already."""
        left = dict(per_difficulty) if isinstance(per_difficulty, Mapping) else {}
        chosen = []
        for item in self.items:
            name = item[1].difficulty
            if left.setdefault(name, per_difficulty if isinstance(per_difficulty, int) else 0) > 0:
                left[name] -= 1
                chosen.append(item)
        return TaskSet(self.books, chosen)


def make_pool(policy: Policy, tasks: TaskSet, max_len: int, workers: int, style: str = "short") -> RolloutPool:
    """A rollout pool that can play any task of a set."""
    return RolloutPool(policy, Setup(Play(CraftEpisodes(tasks.books, style)), max_len), workers)


def train(
    policy: Policy,
    settings: TrainSettings,
    run: Run,
    *,
    workers: int = 0,
    style: str = "short",
    tasks: TaskSet | None = None,
    on_step: Callable[[dict[str, Any], list[Tree]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train in place; writes metrics line by line and checkpoints, and goes on where an earlier call in the same run
    folder was stopped.

    Args:
        policy: changed in place. run: where metrics and checkpoints go.
        workers: rollout processes, 0 for none. style: of the prompts.
        tasks: what to train on; by default generated from `settings`.
        on_step: called with the metrics and the trees of every step.

    Returns:
        The metrics of all steps, earlier sessions included.
    """
    tasks = tasks or TaskSet.generate(settings.graphs, "train", [settings.difficulty])
    trainer = Trainer(policy.model, settings.trainer)
    first, history = _resume(run, trainer)
    with make_pool(policy, tasks, settings.agent.context, workers, style) as pool:
        pool.sync()
        for step in range(first, settings.steps):
            started = time.perf_counter()
            trees = sample_step(pool, tasks, settings, step)
            sampled = time.perf_counter() - started
            for tree in trees:
                node_rewards(tree, settings.lam, settings.proxy)
            kept, report = assign(trees, settings.estimator, settings.depth_mode, settings.gamma)
            metrics = trainer.step(kept, report)
            pool.sync()
            row = {"step": step + 1, "steps": settings.steps, **describe(trees), **_prefixed(metrics),
                   "seconds_rollout": sampled, "seconds": time.perf_counter() - started}  # fmt: skip
            row["tiers"] = success_by_tier(trees, tasks.books)
            row["mean_reward"] = float(np.mean([t.root.reward for t in trees]))
            row["tokens_out_total"] = row["tokens_out"] + (history[-1]["tokens_out_total"] if history else 0)
            history.append(row)
            run.log(row)
            if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                save_checkpoint(run.path("checkpoints"), trainer, {"step": step + 1})
            if on_step is not None:
                on_step(row, trees)
    return history


def sample_step(pool: RolloutPool, tasks: TaskSet, settings: TrainSettings, step: int) -> list[Tree]:
    """The rollouts of one training step: `group_size` trees of each of `tasks_per_step` random tasks."""
    rng = np.random.default_rng([settings.seed, step])
    chosen = rng.choice(len(tasks.items), settings.tasks_per_step, replace=False)
    jobs = [
        (tasks.items[i], f"{tasks.items[i][0]}/{tasks.items[i][1].id}", sample)
        for i in chosen
        for sample in range(settings.group_size)
    ]
    return pool.rollouts(jobs, config=settings.agent, seed=settings.seed, step=step)


def play(
    pool: RolloutPool, tasks: TaskSet, agent: AgentConfig, seed: int = 0, batch: int = 64,
    on_done: Callable[[list[Tree]], None] | None = None,
) -> list[Tree]:  # fmt: skip
    """One tree for every task, for evaluation.

    Args:
        batch: trees at once; bounds memory. on_done: called with each batch of finished trees.
    """
    trees: list[Tree] = []
    for i in range(0, len(tasks.items), batch):
        jobs = [(item, f"{item[0]}/{item[1].id}", 0) for item in tasks.items[i : i + batch]]
        done = pool.rollouts(jobs, config=agent, seed=seed, step=0, keep_text=True)
        for tree, (_, task) in zip(done, tasks.items[i : i + batch], strict=True):
            tree.info["difficulty"] = task.difficulty
            node_rewards(tree)
        trees += done
        if on_done is not None:
            on_done(done)
    return trees


def for_evaluation(agent: AgentConfig, temperature: float = 0.0, max_depth: int | None = None) -> AgentConfig:
    """The same agent as evaluated: greedy and without a depth cap."""
    return replace(agent, temperature=temperature, max_depth=max_depth)


def success_by_tier(trees: Sequence[Tree], books: Mapping[int, RecipeBook]) -> dict[str, list[int]]:
    """Which sub-tasks the agents gave themselves, and which they solved: for each tier of a non-root node's hardest
    target, [launched, successful]. Over training this is the curriculum that delegation makes by itself."""
    tiers: dict[str, list[int]] = {}
    for tree in trees:
        book = books[int(tree.group.partition("/")[0])]
        for node in tree:
            if node.parent is not None:
                items = [x.partition("x ")[2] for x in node.task.partition(": ")[2].split("\n")[0].split(", ")]
                counts = tiers.setdefault(str(max(book.tier(x) for x in items)), [0, 0])
                counts[0] += 1
                counts[1] += bool(node.info.get("verified"))
    return tiers


def _resume(run: Run, trainer: Trainer) -> tuple[int, list[dict[str, Any]]]:
    """Steps done and their metrics, after restoring the newest checkpoint of the run folder, if there is one."""
    found = load_latest(run.path("checkpoints"))
    if found is not None:
        found.restore(trainer)
    step = found.cursor["step"] if found else 0
    return step, run.keep_metrics(step)


def _prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{k}": v for k, v in metrics.items() if k not in ("step",)}
