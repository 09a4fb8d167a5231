"""The widget player shows the step it stands at; the pure functions under it are tested with the player."""

from __future__ import annotations

import ipywidgets
import pytest
from trees import example_tree

from lib import widgets
from lib.errors import UserError
from lib.player import episode_steps


def parts(box: ipywidgets.VBox) -> dict[str, ipywidgets.Widget]:
    bar, page = box.children
    return dict(zip(("choice", "play", "back", "slider", "forward", "place"), bar.children, strict=True)) | {
        "page": page
    }


def test_step_marks_the_acting_node_and_what_has_not_happened_yet():
    tree = example_tree(1, 2, gather=False)
    steps = episode_steps(tree)
    first_child = next(k for k, s in enumerate(steps) if s.node == "0.0")
    shown = widgets.step_html(tree, first_child)
    assert '<g class="node live current" data-id="0.0">' in shown
    assert '<g class="node live" data-id="0">' in shown
    assert '<g class="node future" data-id="0.1">' in shown
    assert '<article data-id="0.0">' in shown and '<article data-id="0">' not in shown
    assert '<g class="node  current" data-id="0">' in widgets.step_html(tree, len(steps) - 1)


def test_player_steps_in_time_order_and_stops_at_both_ends():
    tree = example_tree(1, 2)
    ui = parts(widgets.tree_player([tree]))
    steps = episode_steps(tree)
    assert ui["slider"].max == ui["play"].max == len(steps) - 1
    ui["back"].click()
    assert ui["slider"].value == 0
    for _ in range(len(steps) + 3):
        ui["forward"].click()
    assert ui["slider"].value == len(steps) - 1
    ui["slider"].value = 2
    assert ui["place"].value == f"3 of {len(steps)}, node {steps[2].node}"
    assert ui["page"].value == widgets.step_html(tree, 2)


def test_choosing_another_episode_starts_it_at_its_first_step():
    trees = [example_tree(2, 2), example_tree(0, 0)]
    ui = parts(widgets.tree_player(trees, ["long", "short"]))
    ui["slider"].value = 20
    ui["choice"].value = 1
    assert (ui["slider"].value, ui["slider"].max) == (0, 2)
    assert ui["page"].value == widgets.step_html(trees[1], 0)
    ui["choice"].value = 0
    assert ui["slider"].max == 23


def test_untrusted_text_is_escaped():
    tree = example_tree(0, 0)
    tree.root.task = "<img src=x onerror=alert(1)>"
    for s in tree.root.segments:
        s.text = f"\x1b[31m<script>alert(1)</script>{s.text}"
    shown = parts(widgets.tree_player([tree]))["page"].value
    assert "<img" not in shown and "<script" not in shown and "\x1b" not in shown
    assert "&lt;script&gt;alert(1)" in shown


def test_compare_shows_two_players_with_equal_titles():
    box = widgets.compare([example_tree(1, 1)], [example_tree(1, 2)], ["task 3"])
    labels = [side.children[0].value for side in box.children]
    choices = [parts(side.children[1])["choice"].options[0][0] for side in box.children]
    assert labels == ["before", "after"]
    assert choices == ["task 3", "task 3"]


def test_a_player_without_trees_says_so():
    with pytest.raises(UserError, match="at least one tree"):
        widgets.tree_player([])
