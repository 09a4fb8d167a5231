"""The cold start of the micro policy for TextCraft-Synth: imitation of a deliberately flawed demonstrator.

    python -m lib.rao.coldstart --out data/micro/textcraft

`meta.json` in that folder names the commands that made what is there.

Only shallow tasks (tiers 1 to 3), from recipe graphs no evaluation uses. Every demonstration renames its items at
random and asks for a random count, so the policy must copy what it reads instead of knowing names. Sequences are
stretched by random gaps in their positions, so every distance within the context has been seen. One policy serves both
modes: half of the demonstrations can delegate, half cannot.

Training begins with tasks of tier 1, then 2, whose transcripts are short and hold little but copying: attention that
copies forms there in a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lib.policy import ChatFormat, Policy, load_policy, make_micro_policy, train_micro_tokenizer
from lib.rao.agent import AgentConfig, Session, rollout
from lib.rao.crafting import CraftEpisode
from lib.rao.demonstrator import EXPERT, Skill, crafter
from lib.rao.recipes import (
    Recipe,
    RecipeBook,
    Task,
    difficulty_of,
    generate_recipes,
    goal_text,
    item_name,
    naive_requirement,
)
from lib.sampling import run_sync
from lib.sampling.scripted import ScriptedSampler
from lib.sandbox.repl import ReplPool
from lib.tree import Tree

GRAPHS = range(100, 110)  # seeds of the recipe graphs that cold start and training use
# A name is one token (`c7_i3`, `a2_i11_11`), or two with the index that later items carry (`_17`), so that copying
# seldom has to choose between equal beginnings. Digits of counts stay single; `t0` and `n0` are variables.
HEAD = r"[mcoat]\d_i(?:6_6|7_7|8_8|9_9|10_10|11_11|12_12|[1-5](?!\d))"
ATOMS = rf"{HEAD}|raw_[a-z]\d|[a-z]\d_ore|_\d+|[tn]\d|\d"
PIECES = [
    *(item_name(x, tier, d) for x in "mcoat" for tier in range(13) for d in range(10)),
    *(f"_{d}" for d in range(10, 25)), *(f"{x}{d}" for x in "tn" for d in range(10)),
]  # fmt: skip
TIERS = (0.05, 0.2, 0.75)  # shares of tiers 1, 2, 3 in the demonstrations: the deeper, the more there is to decide
FLAWED = Skill(look=0.48, simple=0.92, retry=0.3, delegate=0.5, wrong=0.15, open=0.7, parallel=0.6, early=0.04)
WIDE = 0.5  # share of recipes of a task and of its parts that get more ingredients, up to five as deeper ones have


@dataclass(frozen=True)
class ColdStart:
    """Recipe of a cold start.

    Args:
        seed: of demonstrations, initial weights and gaps.
        first, second, updates: optimiser steps on tasks of tier 1, then mostly of tier 2, then on all shallow tasks.
        batch: sequences of each step.
        lr: peak learning rate; the last quarter of `updates` runs at a tenth of it.
        vocab: entries of the tokenizer. context: longest node, in tokens.
        gaps: share of sequences with gaps in their positions.
        max_count: largest count that a goal asks for (log-uniform from 1).
        start: folder of a cold start to go on from, with its tokenizer; empty: begin with random weights.
    """

    seed: int = 0
    first: int = 150
    second: int = 150
    updates: int = 1300
    batch: int = 32
    lr: float = 3e-3
    vocab: int = 1536
    context: int = 7680
    gaps: float = 0.1
    max_count: int = 400
    start: str = ""


def renamed(book: RecipeBook, item: str, rng: np.random.Generator) -> tuple[RecipeBook, str]:
    """The part of a recipe graph that `item` needs, with random names of the generator's form and random
    tiers, so that neither tells what an item is made of."""
    names: dict[str, str] = {}
    recipes: dict[str, Recipe] = {}

    # items of one task mostly share a domain and a few tiers, so their names are easily confused
    home, height = "mcoat"[rng.integers(5)], rng.integers(1, 13)

    def fresh(base: bool) -> str:
        while True:
            letter = home if rng.random() < 0.85 else "mcoat"[rng.integers(5)]
            tier = 0 if base else int(max(1, height - rng.integers(4)))
            name = item_name(letter, tier, int(rng.integers(10 if base else 25)))
            if name not in names.values():
                return name

    def visit(x: str) -> None:
        if x in names:
            return
        names[x] = fresh(book.is_base(x))
        if not book.is_base(x):
            recipe = book.recipes[x]
            for part in recipe.ingredients:
                visit(part)
            parts = {names[p]: n for p, n in recipe.ingredients.items()}
            recipes[names[x]] = replace(recipe, ingredients=parts, tier=int(rng.integers(1, 13)))

    visit(item)
    return RecipeBook(recipes), names[item]


def widened(book: RecipeBook, item: str, rng: np.random.Generator) -> RecipeBook:
    """The book with one to three more ingredients, of lower tiers, in some recipes: that of `item` and of its parts."""
    recipes = dict(book.recipes)

    def widen(x: str) -> None:
        recipe = recipes[x]
        if rng.random() < WIDE:
            spare = [y for y in sorted(recipes) if recipes[y].tier < recipe.tier and y not in recipe.ingredients]
            spare += [y for y in book.base_items if y not in recipe.ingredients]
            extra = rng.choice(spare, min(1 + rng.integers(3), 5 - len(recipe.ingredients)), replace=False)
            parts = recipe.ingredients | {str(y): int(rng.integers(1, 3)) for y in extra}
            recipes[x] = replace(recipe, ingredients={str(y): parts[y] for y in rng.permutation(list(parts))})

    widen(item)
    for part in recipes[item].ingredients:
        if part in recipes:
            widen(part)
    return RecipeBook(recipes)


def shallow_task(
    books: list[RecipeBook], rng: np.random.Generator, name: str, max_count: int, tiers: Sequence[float]
) -> tuple[RecipeBook, Task]:
    """A task of tier 1 to 3, drawn with the probabilities `tiers`, with its own renamed recipe book."""
    book = books[rng.integers(len(books))]
    tier = int(rng.choice([1, 2, 3], p=tiers))
    pool = sorted(x for x, r in book.recipes.items() if r.tier == tier)
    item = pool[rng.integers(len(pool))]
    book, item = renamed(widened(book, item, rng), item, rng)
    count = int(np.exp(rng.uniform(0, np.log(max_count + 1))))
    targets = {item: count}
    inventory = {x: 2 * n + int(rng.integers(10)) for x, n in naive_requirement(book, targets).items()}
    return book, Task(name, goal_text(targets), targets, inventory, difficulty_of(tier), tier, None)


def demonstrations(
    chat: ChatFormat,
    seed: int,
    count: int,
    skill: Skill = FLAWED,
    recipe: ColdStart | None = None,
    tiers: Sequence[float] = TIERS,
) -> list[Tree]:
    """Trees played by the demonstrator, alternating between both modes."""
    recipe = recipe or ColdStart()
    rng = np.random.default_rng(seed)
    books = [generate_recipes(s) for s in GRAPHS]
    sampler = ScriptedSampler(crafter(skill), chat)

    async def play() -> list[Tree]:
        trees = []
        for i in range(count):
            book, task = shallow_task(books, rng, f"demo.{seed}.{i}", recipe.max_count, tiers)
            config = AgentConfig(recursive=i % 2 == 0, context=recipe.context, max_steps=100, max_depth=None,
                                 max_action=2000)  # fmt: skip
            session = Session(sampler, chat, pool, config)
            trees.append(await rollout(session, CraftEpisode(book, task), group=task.id, sample=0, seed=seed, step=0))
        return trees

    with ReplPool() as pool:
        return run_sync(play())


def text_of(tree: Tree) -> list[str]:
    """The transcripts of a tree's nodes."""
    return ["".join(s.text for s in node.segments) for node in tree]


def make_tokenizer(seed: int, vocab: int, count: int = 600) -> Any:
    """Train the micro tokenizer on transcripts of skilled and flawed demonstrators."""
    seedling = ChatFormat(train_micro_tokenizer([""], 300, ATOMS))
    half = count // 2
    trees = demonstrations(seedling, seed + 1, half, EXPERT) + demonstrations(seedling, seed + 2, half)
    return train_micro_tokenizer((text for tree in trees for text in text_of(tree)), vocab, ATOMS, PIECES)


def make_cold_start(recipe: ColdStart, on_update: Callable[[dict[str, float]], None] | None = None) -> Policy:
    """Train a micro policy.

    Args:
        recipe: see `ColdStart`.
        on_update: called with the metrics of every update.
    """
    import torch

    from lib.training.batch import MicroBatch, token_logprobs
    from lib.training.trainer import Trainer, TrainerConfig

    if recipe.start:
        policy = load_policy(recipe.start)
    else:
        policy = make_micro_policy(make_tokenizer(recipe.seed, recipe.vocab), recipe.context, recipe.seed)
    rng = np.random.default_rng([recipe.seed, 7])

    def gapped_logprobs(model: torch.nn.Module, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """`token_logprobs` with a random gap in the positions wherever the host begins to speak."""
        starts = torch.zeros_like(batch.ids)
        starts[:, 1:] = (batch.mask[:, :-1] & ~batch.mask[:, 1:]).long()
        spare = recipe.context - batch.ids.shape[1] - 1
        scale = torch.from_numpy(rng.uniform(0, spare, len(batch.ids)) * (rng.random(len(batch.ids)) < recipe.gaps))
        share = torch.from_numpy(rng.random(starts.shape)) * starts
        gaps = (share / share.sum(1, keepdim=True).clamp_min(1e-9) * scale[:, None]).long()
        positions = torch.arange(batch.ids.shape[1]) + gaps.cumsum(1)
        return token_logprobs(model, batch, temperature, positions)

    done = 0

    def phase(lr: float, updates: int, tiers: Sequence[float]) -> None:
        nonlocal done
        config = TrainerConfig(
            loss="reinforce", lr=lr, warmup=20, check_ratio=False, weight_decay=0.01, micro_batch=8, cpu=True
        )
        trainer = Trainer(policy.model, config, logprobs=gapped_logprobs)
        pool: list[Tree] = []
        for _ in range(updates):
            if len(pool) < recipe.batch:  # every demonstration is used twice
                start = recipe.seed * 100_000 + done
                fresh = demonstrations(policy.chat, start, 16 * recipe.batch, FLAWED, recipe, tiers)
                pool = [fresh[i] for i in rng.permutation(2 * len(fresh)) % len(fresh)]
            batch, nodes = [], 0
            while nodes < recipe.batch and pool:
                batch.append(pool.pop())
                nodes += len(batch[-1])
            for node in (n for tree in batch for n in tree):
                node.advantage = 1.0
            metrics = trainer.step(batch)
            done += 1
            if on_update is not None:
                on_update(metrics | {"update": done})

    last = recipe.updates // 4
    phase(recipe.lr, recipe.first, (1.0, 0.0, 0.0))
    phase(recipe.lr, recipe.second, (0.2, 0.8, 0.0))
    phase(recipe.lr, recipe.updates - last, TIERS)
    phase(recipe.lr / 10, last, TIERS)
    return policy


def main() -> None:
    """Make a cold start and export it with the record of how it was made."""
    from lib.runs import code_version
    from lib.training.checkpoint import export_policy

    parser = argparse.ArgumentParser(description=make_cold_start.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    for f in fields(ColdStart):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    args = vars(parser.parse_args())
    out: Path = args.pop("out")
    recipe, started = ColdStart(**args), time.time()

    def show(m: dict[str, float]) -> None:
        spent = time.time() - started
        total = recipe.first + recipe.second + recipe.updates
        left = spent / m["update"] * (total - m["update"])
        done = f"update {m['update']:.0f}/{total}"
        print(f"{done}  loss {m['loss']:.3f}  {spent:.0f} s, {left:.0f} s left", flush=True)

    policy = make_cold_start(recipe, show)
    export_policy(policy.model, policy.tokenizer, out)
    earlier = json.loads((Path(recipe.start) / "meta.json").read_text()) if recipe.start else None
    recipe = replace(recipe, start=Path(recipe.start).name)  # the record names the folder, not where it was
    changed = [f for f in fields(ColdStart) if getattr(recipe, f.name) != f.default]
    options = [f"--{f.name.replace('_', '-')} {getattr(recipe, f.name)}" for f in changed]
    command = " ".join(["python -m lib.rao.coldstart", *options])
    meta = {"command": command, "went_on_from": earlier, "recipe": asdict(recipe),
            "skill": asdict(FLAWED), "prompt_style": "short", "context": recipe.context,
            "seconds": round(time.time() - started), "code": code_version()}  # fmt: skip
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


if __name__ == "__main__":
    main()
