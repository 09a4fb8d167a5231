"""How large TextCraft-Synth episodes are, measured before any training with agents that make no mistakes.

    python -m lib.rao.sizes --tokenizer data/micro/textcraft --out data/results/rao-textcraft-sizes.csv

Three scripted agents: *recursive* delegates every ingredient that takes more than base items; *single* does the same
work depth-first in one context; *planner* is told the frugal plan, looks every recipe up and orders each item once,
which is about the least a single context can hold. Every limit, context size and time budget of the experiment is
derived from this table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from lib.policy import ChatFormat
from lib.rao.agent import AgentConfig, Session, rollout
from lib.rao.crafting import CraftEpisode
from lib.rao.demonstrator import EXPERT, FUNCTIONS, crafter
from lib.rao.experiment import DIFFICULTIES
from lib.rao.recipes import RecipeBook, Task, generate_recipes, generate_tasks
from lib.sampling import run_sync
from lib.sampling.scripted import Script, ScriptedSampler
from lib.sandbox.repl import ReplPool
from lib.tree import Tree

PER_TURN = 4  # items a planner looks up or crafts in one turn


def planner(task: Task) -> Script:
    """A single agent that knows the frugal plan of `task`."""

    def script(prompt: str, rng: np.random.Generator) -> Generator[str, str, None]:
        plan = task.gold_trajectory or []
        functions = [FUNCTIONS]
        for i in range(0, len(plan), PER_TURN):
            names = ",".join(f'"{a.item}"' for a in plan[::-1][i : i + PER_TURN])
            lines = [*functions, f"look([{names}])"]
            yield "<python>" + "\n".join(lines) + "</python>"
            functions = []
        for i in range(0, len(plan), PER_TURN):
            lines = [f'make("{a.item}",{a.result_count})' for a in plan[i : i + PER_TURN]]
            yield "<python>" + "\n".join(lines) + "</python>"
        yield '<python>finish("done")</python>'

    return script


def measure(chat: ChatFormat, book: RecipeBook, tasks: list[Task], agent: str, max_nodes: int = 20_000) -> list[Tree]:
    """Play tasks with one of the three scripted agents, without limits."""
    config = AgentConfig(recursive=agent == "recursive", context=10**7, max_steps=10**6, max_depth=None,
                         max_nodes=max_nodes, max_action=10**6)  # fmt: skip

    async def go() -> list[Tree]:
        trees = []
        for task in tasks:
            sampler = ScriptedSampler(planner(task) if agent == "planner" else crafter(EXPERT), chat)
            session = Session(sampler, chat, pool, config)
            trees.append(await rollout(session, CraftEpisode(book, task), group=task.id, sample=0, seed=0, step=0,
                                       keep_text=False))  # fmt: skip
        return trees

    with ReplPool() as pool:
        return run_sync(go())


def row(agent: str, difficulty: str, trees: list[Tree]) -> dict[str, Any]:
    """One line of the table: means and maxima over tasks."""
    longest = [max(len(n.ids) for n in t) for t in trees]
    return {
        "agent": agent, "difficulty": difficulty, "tasks": len(trees),
        "success": statistics.mean(float(t.root.info["verified"]) for t in trees),
        "nodes_mean": round(statistics.mean(len(t) for t in trees), 1), "nodes_max": max(len(t) for t in trees),
        "depth_max": max(t.depth for t in trees),
        "turns_longest_node": max(n.turns for t in trees for n in t),
        "sampled_tokens_mean": round(statistics.mean(sum(n.tokens_out for n in t) for t in trees)),
        "tokens_mean": round(statistics.mean(sum(len(n.ids) for n in t) for t in trees)),
        "longest_context_mean": round(statistics.mean(longest)), "longest_context_max": max(longest),
    }  # fmt: skip


def main() -> None:
    """Measure and write the table."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=20, help="tasks of each difficulty")
    args = parser.parse_args()
    chat = ChatFormat(AutoTokenizer.from_pretrained(args.tokenizer))
    book = generate_recipes(42)
    val = generate_tasks(book)[1]
    rows = []
    for difficulty in DIFFICULTIES:
        tasks = [t for t in val if t.difficulty == difficulty][: args.tasks]
        for agent in ("recursive", "single", "planner"):
            if difficulty == "extreme" and agent != "planner":
                continue  # thousands of agents or a million tokens a task; extrapolate from hard
            rows.append(row(agent, difficulty, measure(chat, book, tasks, agent)))
            print(rows[-1], flush=True)
    with open(args.out, "w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
