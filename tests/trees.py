"""Synthetic trees for tests and pictures: the shape and texts of a crafting episode, without a model."""

from __future__ import annotations

import random

from lib.tree import Node, Segment, Tree

SECONDS_PER_ACTION = 0.5


def segment(text: str, trainable: bool = False) -> Segment:
    """A segment whose token ids are the bytes of its text; sampled tokens get log-probability -0.25."""
    ids = list(text.encode())
    return Segment(ids, trainable, [-0.25] * len(ids) if trainable else None, text)


def example_node(node_id: str, task: str, turns: list[tuple[str, str]], **fields: object) -> Node:
    """A node with a prompt and one action and observation per turn; an empty observation is left out."""
    segments = [segment(f"You are a crafting agent.\nGoal: {task}\n")]
    for action, observation in turns:
        segments += [segment(action, trainable=True)] + ([segment(observation)] if observation else [])
    return Node(node_id, task, segments, **{"status": "finished", **fields})  # type: ignore[arg-type]


def example_tree(
    depth: int = 2, width: int = 2, *, seed: int = 0, gather: bool = True, timed: bool = True, skill: float = 0.7
) -> Tree:
    """A crafting episode as a full tree: every agent looks, launches `width` children, crafts, finishes.

    Args:
        depth: edges from the root to the leaves. width: children per inner node.
        seed: chooses items, successes and the leaves that run out of steps.
        gather: True runs siblings at the same time, False one after the other.
        timed: False leaves all time stamps at 0.
        skill: probability that a leaf succeeds.
    """
    rng = random.Random(seed)
    tree = Tree(task_id="val.17", group="val.17", seed=seed)

    def grow(node_id: str, level: int, now: float) -> float:
        """Add the subtree that begins at `now`; returns its end in seconds."""
        item = f"{rng.choice('mcoat')}{rng.randint(0, 9)}_i{rng.randint(1, 25)}"
        task = f"Craft the following items: {rng.randint(1, 3)}x {item}"
        code = [f'info = get_info(["{item}"])\nprint(info[0]["recipes"])  # look first']
        launch = ", ".join(f'launch_subagent({{"{item}_part{k}": {k + 1}}})' for k in range(width))
        if level < depth:
            together, in_turn = (
                f"done = await asyncio.gather({launch})\nprint(done)",
                f"for job in [{launch}]:\n    print(await job)",
            )
            code.append(together if gather else in_turn)
        code += [f'craft({{"{item}_part0": 1}}, ("{item}", 1))', f'finish("made {item}")']
        seen = [f"[{{'ingredients': {{'{item}_part0': 1}}}}]", *["ok"] * (len(code) - 3), "crafted 1", ""]
        actions = [f"<thought>I need {item}.</thought>\n<python>\n{line}\n</python>" for line in code]
        node = tree.add(example_node(node_id, task, list(zip(actions, seen, strict=True)), started=now))
        times = []
        for turn in range(len(code)):
            now += SECONDS_PER_ACTION
            times.append(now)
            if level < depth and turn == 1:
                begin = now
                for k in range(width):
                    end = grow(f"{node_id}.{k}", level + 1, begin if gather else now)
                    now = max(now, end)
                    tree.nodes[f"{node_id}.{k}"].info["turn"] = 2
                    if gather and width > 1:
                        tree.nodes[f"{node_id}.{k}"].info["parallel"] = True
        kids = [tree.nodes[f"{node_id}.{k}"] for k in range(width)] if level < depth else []
        node.success = float(all(k.success for k in kids)) if kids else float(rng.random() < skill)
        if not kids and not node.success:
            node.status = rng.choice(["out_of_steps", "context_full", "finished"])
        bonus = 0.4 * sum(k.success or 0.0 for k in kids) / len(kids) if kids else 0.0
        node.info |= {"times": times, "reward_terms": {"success": node.success, "delegation": bonus}}
        node.reward, node.ended = node.success + bonus, now
        node.advantage = node.reward - 0.5
        return now

    grow("0", 0, 0.0)
    if not timed:
        for node in tree:
            node.started = node.ended = 0.0
            del node.info["times"]
    tree.check()
    return tree
