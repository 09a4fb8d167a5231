"""Score any policy on any task file of a benchmark's original schema.

    python -m lib.evaluate rao-textcraft --tasks TASKS.jsonl --recipes RECIPES.jsonl --checkpoint DIR \
        --agent recursive --context 1536 --json

Progress goes to standard error; with --json the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from lib.errors import UserError

if TYPE_CHECKING:
    from lib.policy import Policy
    from lib.rao.experiment import TaskSet
    from lib.tree import Tree


def interval(outcomes: Sequence[Sequence[float]], draws: int = 4000, seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of a mean over training seeds and tasks.

    Args:
        outcomes: one list of per-task outcomes for each training seed. With several seeds the bootstrap is hierarchical
            (seeds, then tasks within each); with one it covers tasks only.

    Returns:
        [low, high]; None without outcomes. If all outcomes are equal a bootstrap says nothing: then Wilson's interval
        of the pooled successes, for outcomes of 0 or 1.
    """
    from scipy.stats import binomtest

    runs = [np.asarray(x, float) for x in outcomes if len(x)]
    if not runs:
        return None
    pooled = np.concatenate(runs)
    if (pooled == pooled[0]).all() and pooled[0] in (0.0, 1.0):
        ci = binomtest(int(pooled.sum()), len(pooled)).proportion_ci(method="wilson")
        return [float(ci.low), float(ci.high)]
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(draws):
        picked = [runs[i] for i in rng.integers(len(runs), size=len(runs))]
        means.append(np.mean([x[rng.integers(len(x), size=len(x))].mean() for x in picked]))
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]


def summarise(trees: Sequence[Tree]) -> dict[str, Any]:
    """What an evaluation reports about a list of finished trees, each with `info["difficulty"]`."""
    from lib.rao.stats import failure_kind, parallel_launch_share

    def outcome(tree: Tree) -> float:
        return float(tree.root.success or 0.0)

    def row(group: Sequence[Tree]) -> dict[str, Any]:
        outcomes = [outcome(t) for t in group]
        return {"n": len(group), "success": float(np.mean(outcomes)), "ci95": interval([outcomes])}

    found = {t.info["difficulty"] for t in trees}
    names = [d for d in ("easy", "medium", "hard", "extreme") if d in found]
    names += sorted(found - set(names))
    failures: dict[str, int] = {}
    for tree in trees:
        if kind := failure_kind(tree):
            failures[kind] = failures.get(kind, 0) + 1
    return {
        **row(trees),
        "by_difficulty": {d: row([t for t in trees if t.info["difficulty"] == d]) for d in names},
        "nodes_mean": float(np.mean([len(t) for t in trees])),
        "depth_max": max(t.depth for t in trees),
        "parallel_launch_share": parallel_launch_share(trees),
        "tokens": sum(n.tokens_out for t in trees for n in t),
        "failures": failures,
        "timed_out": sum(bool(t.info.get("timed_out")) for t in trees),
    }


def check_prompts(policy: Policy, tasks: TaskSet, context: int, recursive: bool, style: str) -> None:
    """Refuse a context that some task's prompt does not fit, before anything runs.

    Raises:
        UserError: names the task.
    """
    from lib.rao.crafting import CraftEpisodes

    if context > policy.context:
        raise UserError(f"--context {context} exceeds the {policy.context} tokens that the checkpoint was built for")
    make = CraftEpisodes(tasks.books, style)
    for item in tasks.items:
        episode = make(item)
        need = len(policy.chat.prompt(episode.prompt(episode.root(), recursive))[0])
        if need >= context:
            raise UserError(f"--context {context} is too small: the prompt of task {item[1].id} has {need} tokens")


def checkpoint_meta(path: str | Path) -> dict[str, Any]:
    """The `meta.json` beside a shipped checkpoint, {} if there is none.

    Raises:
        UserError: it is not JSON.
    """
    file = Path(path) / "meta.json"
    if not file.is_file():
        return {}
    try:
        meta = json.loads(file.read_text(encoding="utf8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); restore it or remove it") from error
    if not isinstance(meta, dict):
        raise UserError(f"{file} holds no JSON object; restore it or remove it")
    return meta


def _textcraft(args: argparse.Namespace) -> tuple[list[Tree], dict[str, Any]]:
    """The trees of an evaluation and what it reports."""
    from lib.rao.recipes import RecipeBook
    from lib.rao.textcraft import load_tasks

    if args.trees and not args.trees.parent.is_dir():
        raise UserError(f"--trees {args.trees}: the folder {args.trees.parent} does not exist; make it first")
    book = RecipeBook.load(args.recipes)
    tasks = load_tasks(args.tasks, book)[: args.limit]

    from lib.policy import load_policy  # here, since they take seconds: a wrong file name is told at once
    from lib.rao.agent import AgentConfig
    from lib.rao.experiment import TaskSet, make_pool, play

    policy = load_policy(args.checkpoint)
    style = checkpoint_meta(args.checkpoint).get("prompt_style", "full")
    items = TaskSet({0: book}, [(0, t) for t in tasks])
    agent = AgentConfig(recursive=args.agent == "recursive", context=args.context, max_steps=args.max_steps,
                        max_depth=args.max_depth, max_nodes=args.max_nodes, temperature=args.temperature)  # fmt: skip
    check_prompts(policy, items, args.context, agent.recursive, style)
    started, done = time.time(), 0

    def show(trees: list[Tree]) -> None:
        nonlocal done
        done += len(trees)
        spent = time.time() - started
        left = spent / done * (len(tasks) - done)
        print(f"{done}/{len(tasks)} tasks, {spent:.0f} s gone, about {left:.0f} s left", file=sys.stderr, flush=True)

    with make_pool(policy, items, args.context, args.workers, style) as pool:
        trees = play(pool, items, agent, seed=args.seed, batch=16 * max(1, args.workers), on_done=show)
    return trees, {
        **summarise(trees), "wall_s": round(time.time() - started, 2), "agent": args.agent, "context": args.context,
        "temperature": args.temperature, "max_depth": args.max_depth, "checkpoint": str(args.checkpoint),
    }  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _number(kind: type, least: int, also: Mapping[str, Any] | None = None) -> Callable[[str], Any]:
    """An argparse type: a finite number of at least `least`, or one of the words in `also`."""
    what = f"a {'whole ' if kind is int else ''}number of at least {least}"

    def parse(text: str) -> Any:
        if also and text in also:
            return also[text]
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(" or ".join([f"{text!r} is not {what}", *(also or {})]))
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    count, natural, depth = _number(int, 1), _number(int, 0), _number(int, 0, {"none": None})
    parser = _Parser(prog="python -m lib.evaluate", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="task", required=True)
    craft = commands.add_parser("rao-textcraft", help="TextCraft-Synth with recursive or single agents")
    craft.add_argument("--tasks", type=Path, required=True, help="JSON lines in the original schema")
    craft.add_argument("--recipes", type=Path, required=True, help="JSON lines in the original schema")
    craft.add_argument("--checkpoint", required=True, help="a Hugging Face directory or hub id")
    craft.add_argument("--agent", choices=["recursive", "single"], required=True)
    craft.add_argument("--context", type=count, required=True, help="most tokens of one agent")
    craft.add_argument("--max-depth", type=depth, default=None, help="deepest agent, or none (default)")
    craft.add_argument("--max-steps", type=count, default=100, help="most actions of one agent")
    craft.add_argument("--max-nodes", type=count, default=1024, help="most agents of one task; overrun is a failure")
    craft.add_argument("--temperature", type=_number(float, 0), default=0.0)
    craft.add_argument("--limit", type=count, default=None, help="only the first N tasks")
    craft.add_argument("--seed", type=natural, default=0)
    craft.add_argument("--trees", type=Path, default=None, help="where to save the trees")
    craft.add_argument("--workers", type=natural, default=min(2, os.cpu_count() or 1), help="processes, 0 for none")
    craft.add_argument("--json", action="store_true", help="print one JSON object last")
    return parser


def _table(result: Mapping[str, Any]) -> str:
    rows = {"all": {k: result[k] for k in ("n", "success", "ci95")}, **result["by_difficulty"]}
    lines = [f"{name:10} n={r['n']:<5} success {r['success']:.3f}  95 % [{r['ci95'][0]:.3f}, {r['ci95'][1]:.3f}]"
             for name, r in rows.items()]  # fmt: skip
    lines.append(f"nodes per tree {result['nodes_mean']:.1f}, deepest {result['depth_max']}, {result['tokens']} tokens "
                 f"sampled, {result['wall_s']} s, failures {result['failures']}")  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    from lib.tree import save_trees

    try:
        args = _parser().parse_args(argv)
        trees, result = _textcraft(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(result) if args.json else _table(result))
    if args.trees:
        try:
            save_trees(trees, args.trees)
        except OSError as error:
            print(f"error: cannot save the trees to {args.trees}: {error.strerror}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
