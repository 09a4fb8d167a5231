"""The scripted crafter: without flaws it solves what it is given; with flaws it errs as often as its `Skill` says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lib.rao.agent import AgentConfig, Session, rollouts
from lib.rao.crafting import CraftEpisode, CraftEpisodes
from lib.rao.demonstrator import EXPERT, Skill, crafter
from lib.rao.recipes import Recipe, RecipeBook, Task, generate_recipes, generate_tasks, goal_text
from lib.sampling import run_sync
from lib.sampling.scripted import ScriptedSampler
from lib.sandbox.repl import ReplPool
from lib.tree import Tree
from tests.micro import chat


@pytest.fixture(scope="module")
def pool() -> Iterator[ReplPool]:
    with ReplPool() as made:
        yield made


def perform(
    pool: ReplPool, skill: Skill, book: RecipeBook, tasks: Sequence[Task], make: Any = None, **config: Any
) -> list[Tree]:
    """One tree for every task."""
    agent = AgentConfig(**{"context": 100_000, "max_steps": 400, "max_depth": None, "max_action": 4000} | config)
    session = Session(ScriptedSampler(crafter(skill), chat()), chat(), pool, agent)
    jobs = [((0, task), f"{k}/{task.id}", 0) for k, task in enumerate(tasks)]
    return run_sync(rollouts(session, make or CraftEpisodes({0: book}), jobs, seed=0, step=0))


# --- without flaws ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world_42() -> tuple[RecipeBook, list[Task]]:
    book = generate_recipes(42)
    return book, generate_tasks(book, 42, train_size=1)[1]


@pytest.mark.parametrize("recursive", [True, False])
def test_expert_solves_easy_and_medium_validation_tasks(pool: ReplPool, world_42, recursive: bool):
    book, tasks = world_42
    chosen = [[t for t in tasks if t.difficulty == d][:n] for d, n in (("easy", 12), ("medium", 6))]
    trees = perform(pool, EXPERT, book, [*chosen[0], *chosen[1]], recursive=recursive)
    assert [tree.root.info["verified"] for tree in trees] == [1.0] * 18
    assert all(node.info["verified"] == 1.0 for tree in trees for node in tree), "children succeed as well"
    assert (max(map(len, trees)) > 1) is recursive
    assert not any(node.info.get("errors") for tree in trees for node in tree)


class Watched(CraftEpisode):
    """Keeps the lowest count that any item ever had."""

    def __init__(self, book: RecipeBook, task: Task):
        super().__init__(book, task)
        self.lowest = dict(self.world.inventory)
        craft = self.world.craft

        def watched(*args: Any) -> str:
            said = craft(*args)
            for item in self.lowest:
                self.lowest[item] = min(self.lowest[item], self.world.inventory.get(item, 0))
            return said

        self.world.craft = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("recursive", [True, False])
def test_expert_never_relies_on_stock(pool: ReplPool, world_42, recursive: bool):
    """Five pieces of every craftable item are held; none of these is ever touched, though they would do."""
    book, tasks = world_42
    stocked = []
    for task in [t for t in tasks if t.difficulty == "medium"][:3]:
        stock = {item: 5 for item in book.recipes}
        stocked.append(Task(task.id, task.goal, task.target_items, task.initial_inventory | stock, "medium", 4, None))
    episodes: list[Watched] = []

    def make(job: tuple[int, Task]) -> Watched:
        episodes.append(Watched(book, job[1]))
        return episodes[-1]

    trees = perform(pool, EXPERT, book, stocked, make, recursive=recursive)
    assert [tree.root.info["verified"] for tree in trees] == [1.0] * 3
    for episode in episodes:
        assert min(episode.lowest[item] for item in book.recipes) == 5


def test_expert_launches_independent_children_together(pool: ReplPool, world_42):
    book, tasks = world_42
    trees = perform(pool, EXPERT, book, [t for t in tasks if t.difficulty == "medium"][:6])
    by_turn: dict[tuple, list[bool]] = {}
    for k, tree in enumerate(trees):
        for node in tree:
            if node.parent:
                by_turn.setdefault((k, node.parent, node.info["turn"]), []).append(bool(node.info.get("parallel")))
    assert any(len(flags) > 1 for flags in by_turn.values())
    assert all(all(flags) == (len(flags) > 1) for flags in by_turn.values())


# --- with flaws -------------------------------------------------------------------------------------------------------

BOOK = RecipeBook(
    {
        "m1_i1": Recipe({"m0_ore": 1}, 1, 1, "metal"),
        "c1_i1": Recipe({"c0_ore": 1}, 1, 1, "crystal"),
        "o1_i1": Recipe({"raw_o0": 1}, 1, 1, "organic"),
        "c2_i2": Recipe({"c1_i1": 1}, 1, 2, "crystal"),
        "o2_i2": Recipe({"o1_i1": 1}, 1, 2, "organic"),
        "t1_i3": Recipe({"m1_i1": 1, "c2_i2": 1, "o2_i2": 1}, 1, 3, "tech"),  # one simple part, two complex ones
    }
)
BASE = {"m0_ore": 99, "c0_ore": 99, "raw_o0": 99}
STOCK = {item: 99 for item in BOOK.recipes}
SKILL = Skill(look=0.6, simple=0.7, retry=0.4, delegate=0.5, wrong=0.2, open=0.55, parallel=0.5, early=0.1)


def transcripts(pool: ReplPool, skill: Skill, stock: dict[str, int], n: int = 300, **config: Any) -> list[list[str]]:
    """The actions of the root in n episodes; launches are refused, so that only the root's choices are seen."""
    task = Task("t", goal_text({"t1_i3": 1}), {"t1_i3": 1}, BASE | stock, "easy", 3, None)
    trees = perform(pool, skill, BOOK, [task] * n, max_depth=0, **config)
    return [[s.text for s in tree.root.segments if s.trainable] for tree in trees]


def share(flags: Sequence[bool]) -> float:
    assert len(flags) > 80, "enough to compare"
    return sum(flags) / len(flags)


def near(probability: float) -> Any:
    return pytest.approx(probability, abs=0.1)


def test_shares_of_behaviours_of_a_delegating_agent_match_its_skill(pool: ReplPool):
    """With everything in stock no craft fails, so each choice is made once."""
    episodes = transcripts(pool, SKILL, STOCK)
    begun = [acts for acts in episodes if len(acts) > 1]
    assert share([len(acts) == 1 for acts in episodes]) == near(0.1)
    looked = [acts for acts in begun if 'look(["m1_i1","c2_i2","o2_i2"])' in acts[1]]
    assert len(looked) / len(begun) == near(0.6)
    texts = ["\n".join(acts) for acts in looked]
    assert share(['x="m1_i1"\nmake(x,n0[x])' in text for text in texts]) == near(0.7)
    parts = [(text, part) for text in texts for part in ("c2_i2", "o2_i2")]
    order = r'x="{}"\n(?:j\.append\(|await )launch_subagent\(\{{x:n0\[x\]\}}\)'
    assert share([bool(re.search(order.format(part), text)) for text, part in parts]) == near(0.5)
    wrong = sum(text.count("launch_subagent({x:1})") for text in texts)
    assert wrong / len(parts) == near(0.2)
    several = [text for text in texts if text.count("launch_subagent") > 1]
    assert len(several) > 30 and sum("gather" in text for text in several) / len(several) == pytest.approx(0.5, abs=0.2)


def test_shares_of_behaviours_of_a_single_agent_match_its_skill(pool: ReplPool):
    texts = ["\n".join(acts) for acts in transcripts(pool, SKILL, STOCK, recursive=False) if len(acts) > 2]
    texts = [text for text in texts if 'look(["m1_i1","c2_i2","o2_i2"])' in text]
    opened = [f'x="{part}"\nt1=(x,n0[x])' in text for text in texts for part in ("c2_i2", "o2_i2")]
    assert share(opened) == near(0.55) and not any("launch_subagent" in text for text in texts)


def test_share_of_retries_after_a_failed_craft_matches_its_skill(pool: ReplPool):
    """Nobody looks first and nothing is in stock, so the first craft fails."""
    episodes = transcripts(pool, Skill(look=0.0, retry=0.4), {})
    assert all("make(*t0)" in acts[1] for acts in episodes)
    assert share(["look(" in acts[2] for acts in episodes]) == near(0.4)


def test_equal_seeds_play_equal_episodes(pool: ReplPool):
    first = transcripts(pool, SKILL, STOCK, 20)
    assert first == transcripts(pool, SKILL, STOCK, 20) and len(set(map(str, first))) > 5
