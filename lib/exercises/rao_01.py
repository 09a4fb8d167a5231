"""Checks for `rao/01_recursive_agents`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib.exercises import expect
from lib.policy import ChatFormat
from lib.rao.agent import AgentConfig, Session, rollout
from lib.rao.crafting import CraftEpisode
from lib.rao.demonstrator import EXPERT, Skill, crafter
from lib.rao.recipes import RecipeBook, Task, goal_text
from lib.sampling import run_sync
from lib.sampling.scripted import Script, ScriptedSampler
from lib.sandbox.repl import ReplPool
from lib.tree import Node, Segment, Tree


def check_read_action(read_action: Callable[[str], tuple[str | None, str | None]]) -> None:
    """Exercise 1."""
    cases = {
        "<thought>a</thought><python>b</python>": ("a", "b"),
        "<thought>\n two\nlines </thought>\n<python>\nx = 1\nprint(x)\n</python>": ("two\nlines", "x = 1\nprint(x)"),
        "<python>if x:\n    y</python>": (None, "if x:\n    y"),
        "<thought>only this</thought>": ("only this", None),
        "<python>first</python><python>second</python>": (None, "first"),
        "<python>never closed": (None, None),
        "": (None, None),
    }
    for text, wanted in cases.items():
        expect(tuple(read_action(text)), wanted, repr(text))


def _tree(nodes: dict[str, tuple[list[int], int | None, bool]]) -> Tree:
    """A tree from node id -> (tokens of each action, turn of the launch, ran together with siblings)."""
    tree = Tree("exercise", "exercise")
    for name, (actions, turn, parallel) in nodes.items():
        node = tree.add(Node(name, "t", [Segment([0] * 5, False, None, "")], "finished"))
        for tokens in actions:
            node.segments += [Segment([1] * tokens, True, [0.0] * tokens, ""), Segment([0] * 2, False, None, "")]
        if turn is not None:
            node.info |= {"turn": turn, "parallel": parallel}
    return tree


def check_critical_path(critical_path: Callable[[Tree, Node], int]) -> None:
    """Exercise 2, with values worked by hand."""
    alone = _tree({"0": ([4, 3], None, False)})
    expect(critical_path(alone, alone.root), 7, "one agent with actions of 4 and 3 tokens")
    together = _tree({"0": ([10], None, False), "0.0": ([5], 1, True), "0.1": ([8], 1, True)})
    expect(critical_path(together, together.root), 18, "10 tokens, then children of 5 and 8 together")
    in_turn = _tree({"0": ([10], None, False), "0.0": ([5], 1, False), "0.1": ([8], 1, False)})
    expect(critical_path(in_turn, in_turn.root), 23, "10 tokens, then children of 5 and 8 one after the other")
    mixed = _tree({
        "0": ([10, 10], None, False), "0.0": ([5], 1, True), "0.1": ([8], 1, True), "0.2": ([7], 2, True),
        "0.3": ([1], 2, True), "0.4": ([2], 2, False), "0.2.0": ([3], 1, False),
    })  # fmt: skip
    # turn 1: max(5, 8); turn 2: max(7 + 3, 1) + 2
    expect(critical_path(mixed, mixed.root), 40, "20 tokens; turn 1: 5, 8 together; turn 2: 7+3, 1 together, then 2")
    expect(critical_path(mixed, mixed.nodes["0.2"]), 10, "the same tree from node 0.2 down")


def check_attention_pairs(attention_pairs: Callable[[Tree], int]) -> None:
    """Exercise 3: a node of n tokens has n (n + 1) / 2 pairs."""
    one = _tree({"0": ([3], None, False)})  # 5 + 3 + 2 tokens
    expect(attention_pairs(one), 55, "one node of 10 tokens")
    two = _tree({"0": ([3], None, False), "0.0": ([], 1, False)})
    expect(attention_pairs(two), 70, "nodes of 10 and 5 tokens")


def check_careful(careful: Script, book: RecipeBook, chat: ChatFormat) -> None:
    """Exercise 4: the policy works the root of `1x axle`, a script its child.

    Args:
        careful: the reader's policy. book, chat: recipes and chat format of the notebook.
    """
    for child, skill in {"honest": EXPERT, "lying": Skill(early=1.0)}.items():
        tree, inventory = _play(careful, skill, book, chat)
        case = f"with an {child} child" if child == "honest" else f"with a {child} child"
        expect(tree.root.info["verified"], 1.0, f"success of the root {case}")
        expect(len(tree), 2, f"agents {case}")
        if child == "honest":
            expect(inventory.get("stick", 0), 0, "sticks left over although the child had made them")


def _play(careful: Script, skill: Skill, book: RecipeBook, chat: ChatFormat) -> tuple[Tree, dict[str, int]]:
    task = Task("axle", goal_text({"axle": 1}), {"axle": 1}, {"raw_wood": 2, "iron_ore": 2}, "easy", 3, None)
    episode = CraftEpisode(book, task)

    def script(prompt: str, rng: Any) -> Any:
        return careful(prompt, rng) if "1x axle" in prompt else crafter(skill)(prompt, rng)

    with ReplPool() as pool:
        session = Session(ScriptedSampler(script, chat), chat, pool, AgentConfig(context=8192, max_action=2048))
        tree = run_sync(rollout(session, episode, group="exercise", sample=0, seed=0, step=0))
    return tree, episode.world.view_inventory()
