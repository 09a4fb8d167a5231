"""One look for every static picture. Functions return a figure and save nothing."""

from lib.plotting.charts import bars_by_difficulty, curves, histogram, reward_terms, stacked_failures
from lib.plotting.trees import draw_growth, draw_timeline, draw_tree, gallery

__all__ = [
    "bars_by_difficulty", "curves", "draw_growth", "draw_timeline", "draw_tree", "gallery", "histogram", "reward_terms",
    "stacked_failures",
]  # fmt: skip
