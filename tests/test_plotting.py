"""Pictures say what they show: values, counts, intervals and omissions are read back from the drawn artists."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from trees import example_tree

from lib import plotting, view
from lib.errors import UserError
from lib.tree import Node, Tree

HOSTILE = "</script> $x_{ \x1b[31m \u202e \ud800 \x00 %s {} \\frac"


def texts(ax: Axes) -> list[str]:
    return [t.get_text() for t in ax.texts]


def discs(ax: Axes) -> list[PathCollection]:
    return [c for c in ax.collections if isinstance(c, PathCollection) and len(c.get_offsets())]


def legend(ax: Axes) -> list[str]:
    return [t.get_text() for t in ax.get_legend().get_texts()]


def every_picture(tree: Tree) -> list[Figure]:
    cell = {"success": 0.5, "ci95": [0.4, 0.6], "n": 10}
    return [
        plotting.draw_tree(tree),
        plotting.draw_timeline(tree),
        plotting.gallery([tree, tree]),
        plotting.draw_growth(view.snapshots(tree, 3)),
        plotting.reward_terms(tree),
        plotting.curves({tree.task_id: [[{"step": 0, "s": 1.0}]]}, "step", "s", ylabel="s"),
        plotting.bars_by_difficulty({tree.task_id: {"easy": cell}}),
        plotting.stacked_failures({tree.task_id: {"overflow": 1}}),
        plotting.histogram({tree.task_id: [1, 2]}, xlabel="depth"),
    ]


# -- all pictures -----------------------------------------------------------------------------------------------------


def test_pictures_leave_no_trace(tmp_path, monkeypatch):
    """No file, no changed setting, no figure that pyplot would show a second time; equal input gives equal bytes."""
    monkeypatch.chdir(tmp_path)
    before = dict(mpl.rcParams)
    tree = example_tree()
    first = [f._repr_png_() for f in every_picture(tree)]
    assert first[:2] == [plotting.draw_tree(tree)._repr_png_(), plotting.draw_timeline(tree)._repr_png_()]
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []
    assert list(tmp_path.iterdir()) == []
    assert all(data.startswith(b"\x89PNG") and size == {"width": 960} for data, size in first)


@pytest.mark.filterwarnings("error")
def test_untrusted_texts_cannot_break_a_picture():
    """An unbalanced "$" is no mathematics, and characters without a glyph are gone."""
    tree = example_tree(1, 2)
    tree.task_id = HOSTILE
    for n in tree:
        n.task = HOSTILE + n.id
        n.info["reward_terms"] = {HOSTILE: 0.5}
    for figure in [plotting.draw_tree(tree), plotting.draw_timeline(tree), plotting.reward_terms(tree)]:
        assert figure._repr_png_()
    assert plotting.gallery([tree])._repr_png_()


# -- trees ------------------------------------------------------------------------------------------------------------


def test_draw_tree_shows_every_node_edge_and_value():
    tree = example_tree(seed=3)
    ax = plotting.draw_tree(tree).axes[0]
    drawn = {
        tuple(o): to_hex(c).upper() for d in discs(ax) for o, c in zip(d.get_offsets(), d.get_facecolors(), strict=True)
    }
    scale = view.color_scale([tree], "reward")
    assert drawn == {spot: view.shade(tree.nodes[i].reward, scale) for i, spot in view.tree_layout(tree).items()}
    assert len(ax.collections[0].get_paths()) == 6
    title = ax.get_title(loc="left")
    assert "7 nodes" in title
    assert f"{sum(n.tokens_out for n in tree):,} sampled tokens" in title
    for n in tree:
        assert f"{view.node_labels(tree)[n.id]}\n{n.tokens_out} tokens" in texts(ax)
    assert legend(ax) == ["finished (5)", "context full (2)"]
    assert "0.2" in texts(ax)  # the reward of node 0.1, written into its disc


def test_pitfall_29_the_picture_shows_every_level_of_a_tree_whose_children_have_children():
    ax = plotting.draw_tree(example_tree(3, 2)).axes[0]
    levels = [y for d in discs(ax) for _, y in d.get_offsets()]
    assert [levels.count(y) for y in range(4)] == [1, 2, 4, 8]
    assert len(ax.collections[0].get_paths()) == 14
    assert "depth 3" in ax.get_title(loc="left")


def test_draw_tree_tells_statuses_apart_by_their_rims():
    tree = Tree("t", "t")
    for k, status in enumerate(view.STATUS_EDGE):
        tree.add(Node("0" + ".0" * k, "task", status=status))  # type: ignore[arg-type]
    rims = [(d.get_linewidths()[0], d.get_linestyles()[0][1], to_hex(d.get_edgecolors()[0]))
            for d in discs(plotting.draw_tree(tree).axes[0])]  # fmt: skip
    assert len({str(r) for r in rims}) == 6


def test_draw_tree_of_a_large_tree_says_what_it_leaves_out():
    figure = plotting.draw_tree(example_tree(3, 3), max_nodes=13)
    assert "showing 13 of 40 nodes" in figure.axes[0].get_title(loc="left")
    assert sum("+3 hidden" in t for t in texts(figure.axes[0])) == 9
    assert figure._repr_png_()


@pytest.mark.parametrize("tree", [example_tree(0, 0), example_tree(7, 1), example_tree(1, 70), example_tree(4, 3)])
def test_draw_tree_keeps_its_width_and_fits_labels_for_any_shape(tree: Tree):
    figure = plotting.draw_tree(tree)
    figure.draw_without_rendering()
    assert figure.get_figwidth() == 9.6
    ax = figure.axes[0]
    level = [t for t in ax.texts if "tokens" in t.get_text()]
    boxes = [t.get_window_extent() for t in level]
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_draw_tree_without_rewards_is_grey_and_draws_into_given_axes():
    tree = example_tree()
    for n in tree:
        n.reward = None
    figure = Figure()
    ax = figure.subplots()
    assert plotting.draw_tree(tree, ax=ax) is figure
    assert {to_hex(c).upper() for d in discs(ax) for c in d.get_facecolors()} == {view.UNKNOWN}


def test_draw_tree_names_a_wrong_colour():
    with pytest.raises(UserError, match="color='size'.*reward, success, advantage"):
        plotting.draw_tree(example_tree(), color="size")  # type: ignore[arg-type]


@pytest.mark.parametrize("gather", [True, False])
def test_timeline_shows_siblings_side_by_side_or_as_a_staircase(gather: bool):
    tree = example_tree(1, 3, gather=gather)
    ax = plotting.draw_timeline(tree).axes[0]
    solid = [p for p in ax.patches if p.get_alpha() is None]
    starts = [p.get_x() for p in solid][1:]
    assert starts == ([1.0, 1.0, 1.0] if gather else [1.0, 2.5, 4.0])
    assert [p.get_width() for p in solid] == [tree.nodes[i].ended - tree.nodes[i].started for i in tree.nodes]
    pale = [(p.get_x(), p.get_width()) for p in ax.patches if p.get_alpha() is not None]
    assert pale == [(1.0, 1.5 if gather else 4.5)]
    assert ax.get_xlabel() == "seconds"


def test_timeline_in_tokens_and_without_time_stamps():
    assert (
        plotting.draw_timeline(example_tree(), unit="tokens").axes[0].get_xlabel()
        == "sampled tokens on the critical path"
    )
    tree = example_tree(1, 2, timed=False)
    assert plotting.draw_timeline(tree).axes[0].get_xlabel() == "sampled tokens on the critical path"
    tree.nodes["0.1"].info.clear()
    assert "not recorded" in plotting.draw_timeline(tree).axes[0].get_xlabel()
    assert "showing 5 of 13" in plotting.draw_timeline(example_tree(2, 3), max_nodes=5).axes[0].get_title(loc="left")


def test_gallery_has_one_scale_and_counts_in_titles():
    trees = [example_tree(1, 2, skill=1.0), example_tree(2, 2, skill=0.0), example_tree(3, 3)]
    figure = plotting.gallery(trees, ["before", "middle", "after"], max_nodes=10)
    titles = [ax.get_title(loc="left") for ax in figure.axes[:3]]
    assert titles == ["before\n3 nodes, s̃ = 1", "middle\n7 nodes, s̃ = 0", "after\nshowing 10 of 40 nodes, s̃ = 0"]
    assert len(figure.axes) == 4  # one colour bar for all
    with pytest.raises(UserError, match="3 trees and 1 titles"):
        plotting.gallery(trees, ["one"])
    with pytest.raises(UserError, match="0 trees"):
        plotting.gallery([])


def test_growth_keeps_places_and_marks_new_nodes():
    tree = example_tree(1, 2, gather=False)
    figure = plotting.draw_growth(view.snapshots(tree, 4))
    assert [ax.get_title(loc="left") for ax in figure.axes[:4]] == [
        "1 node, 1 new", "2 nodes, 1 new", "3 nodes, 1 new", "3 nodes, 0 new",
    ]  # fmt: skip
    final = set(view.tree_layout(tree).values())
    for ax in figure.axes[:4]:
        assert {tuple(o) for d in discs(ax) for o in d.get_offsets()} <= final
    with pytest.raises(UserError, match="largest last"):
        plotting.draw_growth([tree, view.snapshots(tree, 2)[0]])


# -- numbers ----------------------------------------------------------------------------------------------------------


def runs(*values: float) -> list[list[dict[str, float]]]:
    """One run per value, which it reaches at step 1 from 0 at step 0."""
    return [[{"step": 0, "s": 0.0}, {"step": 1, "s": v}] for v in values]


def band(ax: Axes, step: float) -> tuple[float, float]:
    at = [y for x, y in ax.collections[0].get_paths()[0].vertices if x == step]
    return min(at), max(at)


def test_curves_band_is_the_range_for_three_seeds_and_says_so():
    ax = plotting.curves({"rao": runs(0.2, 0.4, 0.9)}, "step", "s", ylabel="success", lines={"paper": 0.88}).axes[0]
    assert ax.lines[0].get_ydata()[1] == pytest.approx(0.5)
    assert band(ax, 1) == pytest.approx((0.2, 0.9))
    assert legend(ax) == ["rao\n3 seeds, band: min–max", "paper: 0.88"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "success")


def test_curves_band_is_students_interval_for_five_seeds():
    """Values 1..5: mean 3, standard error 0.7071, t(0.975, 4) = 2.776, half width 1.963."""
    ax = plotting.curves({"rao": runs(1, 2, 3, 4, 5)}, "step", "s", ylabel="s").axes[0]
    assert band(ax, 1) == pytest.approx((3 - 1.963, 3 + 1.963), abs=1e-3)
    assert legend(ax) == ["rao\n5 seeds, band: 95 % interval"]


def test_curves_of_one_seed_have_no_band():
    ax = plotting.curves({"rao": runs(1.0)}, "step", "s", ylabel="s", share=True).axes[0]
    assert len(ax.collections) == 0
    assert legend(ax) == ["rao\n1 seed"]
    assert ax.get_ylim()[0] == 0


def test_curves_never_mix_different_numbers_of_seeds():
    longer = [[{"step": 0, "s": 1.0}], [{"step": 0, "s": 3.0}, {"step": 1, "s": 9.0}, {"step": 2, "loss": 1.0}]]
    ax = plotting.curves({"rao": longer}, "step", "s", ylabel="s").axes[0]
    assert list(ax.lines[0].get_xdata()) == [0]
    assert list(ax.lines[0].get_ydata()) == [2.0]


def test_curves_name_what_is_missing():
    with pytest.raises(UserError, match="'rao'.*'reward'.*its rows have s, step"):
        plotting.curves({"rao": runs(1.0)}, "step", "reward", ylabel="R")
    with pytest.raises(UserError, match="share no value"):
        plotting.curves({"rao": [[{"step": 0, "s": 1}], [{"step": 1, "s": 1}]]}, "step", "s", ylabel="s")
    with pytest.raises(UserError, match="has no rows|have nothing"):
        plotting.curves({"rao": []}, "step", "s", ylabel="s")


def test_bars_show_success_interval_n_and_published_value():
    cells = {"easy": {"success": 0.9, "ci95": [0.8, 0.95], "n": 100}, "hard": {"success": 0.5, "ci95": None, "n": 30}}
    single = {"hard": {"success": 0.0, "ci95": [0.0, 0.1], "n": 100}}
    ax = plotting.bars_by_difficulty({"rao": cells, "single": single}, published={"rao": {"hard": 0.88}}).axes[0]
    assert [p.get_height() for p in ax.patches] == [0.9, 0.5, 0.0]
    assert [tuple(line.get_ydata()) for line in ax.lines] == [(0.8, 0.95), (0.0, 0.1)]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["easy\nn = 100", "hard\nn = 30–100"]
    assert [d.get_offsets()[0][1] for d in discs(ax)] == [0.88]
    assert texts(ax) == ["0.90", "0.50", "0.00"]
    with pytest.raises(UserError, match="lacks ci95, n"):
        plotting.bars_by_difficulty({"rao": {"hard": {"success": 1.0}}})
    with pytest.raises(UserError, match="no results"):
        plotting.bars_by_difficulty({})


def test_failures_are_shares_with_counts():
    ax = plotting.stacked_failures({"rao": {"overflow": 1, "gave up": 3}, "single": {"overflow": 8}, "ideal": {}}).axes[
        0
    ]
    assert [p.get_width() for p in ax.patches] == [0.25, 1.0, 0.0, 0.75, 0.0, 0.0]
    assert ax.patches[3].get_x() == 0.25
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rao\nn = 4", "single\nn = 8", "ideal\nn = 0"]
    assert texts(ax) == ["1", "8", "3"]
    assert legend(ax) == ["overflow", "gave up"]
    with pytest.raises(UserError, match="not negative"):
        plotting.stacked_failures({"rao": {"overflow": -1}})


def test_histogram_shows_shares_of_each_group():
    figure = plotting.histogram({"easy": [0, 0, 1, 3], "hard": [5]}, xlabel="depth", title="Depth")
    easy, hard = figure.axes
    assert {p.get_x() + p.get_width() / 2: p.get_height() for p in easy.patches} == {0: 0.5, 1: 0.25, 3: 0.25}
    assert texts(easy) == ["easy\nn = 4\nmean 1"]
    assert texts(hard) == ["hard\nn = 1\nmean 5"]
    assert np.all(np.array(hard.get_xlim()) == [-0.6, 5.6])
    with pytest.raises(UserError, match="no values"):
        plotting.histogram({"easy": []}, xlabel="depth")


def test_reward_terms_stack_up_to_the_reward_and_penalties_hang_down():
    tree = example_tree(1, 1)
    tree.root.info["reward_terms"] = {"success": 1.0, "delegation": 0.4, "cost": -0.3}
    tree.nodes["0.0"].info["reward_terms"] = {"success": 0.5}
    tree.root.reward, tree.nodes["0.0"].reward = 1.1, 0.5
    ax = plotting.reward_terms(tree).axes[0]
    bars = [(p.get_y(), p.get_height()) for p in ax.patches]
    stacked = [(0, 1.0), (0, 0.5), (1.0, 0.4), (0.5, 0.0), (0, -0.3), (0.5, 0.0)]
    assert np.array(bars) == pytest.approx(np.array(stacked))
    assert [tuple(o) for o in discs(ax)[0].get_offsets()] == [(0, 1.1), (1, 0.5)]
    assert legend(ax) == ["reward R", "success", "delegation", "cost"]
    for n in tree:
        n.info.clear()
    with pytest.raises(UserError, match="apply a reward function"):
        plotting.reward_terms(tree)
