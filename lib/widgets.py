"""Interactive players for a live kernel. They add to static pictures and to `lib.player`, and carry nothing alone."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from lib.player import asset, episode_steps, episode_titles, node_html, tree_html
from lib.tree import Tree
from lib.view import ColorBy


def step_html(tree: Tree, k: int, color: ColorBy = "reward") -> str:
    """What the player shows at step k of an episode: the tree so far, the acting node haloed, and its transcript.

    Args:
        k: index into `lib.player.episode_steps`.
    """
    steps = episode_steps(tree)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        first.setdefault(step.node, index)
        last[step.node] = index
    now = steps[k]
    states = {i: "future" if k < first[i] else "live" if k < last[i] else "" for i in first}
    states[now.node] += " current"
    picture, text = tree_html(tree, color, states), node_html(tree.nodes[now.node], now.turn)
    return (
        f'<div class="tp"><style>{asset("player.css")}</style>'
        f'<div class="episode inline">{picture}<div class="text">{text}</div></div></div>'
    )


def tree_player(
    trees: Sequence[Tree], titles: Sequence[str] | None = None, *, color: ColorBy = "reward"
) -> widgets.VBox:
    """Choose an episode and step through it in time order with a slider, buttons or play.

    Args:
        trees: episodes to choose from. titles: one per episode; task, sample and success if None.

    Raises:
        UserError: no trees, or another number of titles.
    """
    names = episode_titles(trees, titles)
    choice = widgets.Dropdown(options=list(zip(names, range(len(trees)), strict=True)), layout={"width": "320px"})
    play = widgets.Play(interval=900)
    back, forward = (widgets.Button(description=sign, tooltip=tip, layout={"width": "40px"})
                     for sign, tip in (("◀", "one step back"), ("▶", "one step on")))  # fmt: skip
    slider = widgets.IntSlider(description="step", readout=False, layout={"width": "260px"})
    place = widgets.Label()
    page = widgets.HTML()

    def show(_: object = None) -> None:
        tree = trees[choice.value]
        now = episode_steps(tree)[slider.value]
        place.value = f"{slider.value + 1} of {slider.max + 1}, node {now.node}"
        page.value = step_html(tree, slider.value, color)

    def open_episode(_: object = None) -> None:
        slider.value = 0
        slider.max = play.max = len(episode_steps(trees[choice.value])) - 1
        show()

    def move(by: int) -> None:
        slider.value = min(max(slider.value + by, 0), slider.max)

    back.on_click(lambda _: move(-1))
    forward.on_click(lambda _: move(1))
    slider.observe(show, "value")
    choice.observe(open_episode, "value")
    widgets.jslink((play, "value"), (slider, "value"))
    open_episode()
    return widgets.VBox([widgets.HBox([choice, play, back, slider, forward, place]), page])


def compare(
    before: Sequence[Tree], after: Sequence[Tree], titles: Sequence[str] | None = None, *, color: ColorBy = "reward"
) -> widgets.HBox:
    """Two players side by side, such as the same tasks before and after training.

    Args:
        before, after: episodes of the two policies. titles: for both sides.
    """
    half = {"width": "50%"}
    sides = [widgets.VBox([widgets.Label(name), tree_player(trees, titles, color=color)], layout=half)
             for name, trees in (("before", before), ("after", after))]  # fmt: skip
    return widgets.HBox(sides)
