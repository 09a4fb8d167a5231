"""The one style: sizes, colours, fonts, and a figure that needs no pyplot."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from lib.view import INK

WIDTH = 9.6  # inches: a notebook column at 100 dots per inch
SHARP = 1.6  # image dots per screen dot
FAINT, MIDDLE = "#E3E3E3", "#A8A8A8"
# Texts written by a model must not be read as mathematics: an unbalanced "$" would end the drawing with an error.
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "text.parse_math": False, "figure.dpi": 100,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 8,
    "axes.edgecolor": "#888888", "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": FAINT, "legend.frameon": False,
    "legend.fontsize": 8, "legend.title_fontsize": 8, "lines.linewidth": 1.8,
}  # fmt: skip
styled = mpl.rc_context(STYLE)


class Picture(Figure):
    """A figure that a notebook shows as PNG, exactly once and with any backend, because pyplot never sees it."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Sharp on dense screens, yet small: 256 colours are enough for flat areas and a third of the bytes."""
        raw, small = BytesIO(), BytesIO()
        self.savefig(raw, format="png", dpi=SHARP * self.dpi)
        Image.open(raw).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
        return small.getvalue(), {"width": round(self.get_figwidth() * self.dpi)}


def new_axes(height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Picture, np.ndarray]:
    """A picture of standard width and its axes.

    Args:
        height: inches. kwargs: for `Figure.subplots`.

    Returns:
        The figure and its axes, shape (rows, columns).
    """
    figure = Picture(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    for ax in axes.flat:
        # Ticks are made when first drawn, after the style has been left, so they need to be told here.
        ax.tick_params(labelsize=8, labelcolor=INK, length=0)
    return figure, axes
