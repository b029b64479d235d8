"""An explanation as a picture: a panel for every layer and head. matplotlib is imported when something is drawn."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.explain import KINDS, Explanation, Kind, check_choice
from transformer_jax.plots import BLUE, GREY, font_families, legible, one_warning_of_absent_glyphs, widest

TITLES: dict[Kind, str] = {
    "encoder": "Encoder self-attention: source tokens (rows) look at source tokens (columns)",
    "decoder": "Decoder self-attention: the step that writes a token (rows) looks at the tokens read (columns)",
    "cross": "Cross-attention: the step that writes a token (rows) looks at source tokens (columns)",
}
DPI = 110
LARGEST, SMALLEST, PANEL = 0.2, 0.1, 3.0
"""Inches that a token takes in a panel at most and at least, and that a panel takes where it can."""
GAP, TITLE, NAME, EDGE = 0.14, 0.32, 0.2, 0.15
"""Inches between panels, for the title of a block, for the heads' and layers' names, around the picture."""
PAD = 0.03
"""Inches between a label and its panel."""
TITLE_FONT = {"size": 10, "weight": "bold"}
MOST_PIXELS = 60_000_000


def attention_picture(explanation: Explanation, layer: int | None = None, head: int | None = None) -> bytes:
    """A PNG with a block for each kind of attention, in it a row for every layer and a column for every head.

    `layer` and `head`, counted from 1, leave only these. White is 0, the darkest blue is 1.
    """
    with one_warning_of_absent_glyphs(" A page (.html) has them."):
        return _picture(explanation, layer, head)


def _picture(explanation: Explanation, layer: int | None, head: int | None) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(len(labels) for kind in KINDS for labels in explanation.labels(kind))
    cell = float(np.clip(PANEL / longest, SMALLEST, LARGEST))
    blocks = [_Block(explanation, kind, layer, head, cell) for kind in KINDS]
    titles = widest((block.title for block in blocks), dpi=DPI, **TITLE_FONT)
    width = max(titles, *(block.width for block in blocks)) + 2 * EDGE
    height = sum(block.height for block in blocks) + 2 * EDGE
    if width * height * DPI**2 > MOST_PIXELS:
        raise UserError("The picture would be too large; choose a --layer or --head, or write a page (.html).")
    figure = Figure(figsize=(width, height), dpi=DPI)
    canvas, top = FigureCanvasAgg(figure), height - EDGE
    for block in blocks:
        block.draw(figure, top)
        top -= block.height
    content = io.BytesIO()
    canvas.print_png(content)
    return content.getvalue()


class _Block:
    """The panels of one kind of attention. All sizes are in inches, places from the lower left of the picture."""

    def __init__(self, explanation: Explanation, kind: Kind, layer: int | None, head: int | None, cell: float) -> None:
        weights_NHTS = explanation.weights(kind)
        n_layers, n_heads = weights_NHTS.shape[:2]
        check_choice(n_layers, n_heads, layer, head, f"The {'encoder' if kind == 'encoder' else 'decoder'}")
        self.weights_NHTS, self.title = weights_NHTS, TITLES[kind]
        self.rows, self.columns = ([legible(label) for label in labels] for labels in explanation.labels(kind))
        self.layers = range(n_layers) if layer is None else [layer - 1]
        self.heads = range(n_heads) if head is None else [head - 1]
        self.cell, self.families = cell, font_families()
        self.font = min(9.0, 72 * cell * 0.75)
        self.left = NAME + widest(self.rows, self.font, DPI) + 0.08
        # Labels of one character stand upright; the special tokens' among them are turned.
        self.below = max(widest(self.columns, self.font, DPI), cell) + 0.08
        self.panel = (cell * len(self.columns), cell * len(self.rows))
        self.width = self.left + len(self.heads) * (self.panel[0] + GAP)
        self.height = TITLE + NAME + len(self.layers) * (self.panel[1] + GAP) + self.below

    def draw(self, figure: Any, top: float) -> None:
        self._text(figure, EDGE, top - TITLE / 2, self.title, **TITLE_FONT)
        top -= TITLE + NAME
        for row, layer in enumerate(self.layers):
            bottom = top - self.panel[1]
            for column, head in enumerate(self.heads):
                left = EDGE + self.left + column * (self.panel[0] + GAP)
                if row == 0:
                    middle = left + self.panel[0] / 2
                    self._text(figure, middle, top + NAME / 2, f"head {head + 1}", 8, ha="center", color=GREY)
                axes = figure.add_axes(self._place(figure, left, bottom, *self.panel))
                self._panel(axes, self.weights_NHTS[layer, head])
                if row == len(self.layers) - 1:
                    self._name_columns(figure, left, bottom)
            self._name_rows(figure, top)
            middle = (top + bottom) / 2
            name = f"layer {layer + 1}"
            self._text(figure, EDGE + NAME / 2, middle, name, 8, ha="center", rotation=90, color=GREY)
            top = bottom - GAP

    def _panel(self, axes: Any, weights_TS: np.ndarray) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        colours = LinearSegmentedColormap.from_list("weights", ["white", BLUE, "#0b2447"])
        axes.imshow(weights_TS, vmin=0.0, vmax=1.0, cmap=colours, aspect="auto", interpolation="nearest")
        for spine in axes.spines.values():
            spine.set(color=GREY, linewidth=0.5)
        axes.set(xticks=[], yticks=[])

    # Labels are texts of the picture, not ticks of the panels, whose making takes most of a large picture's time.

    def _name_rows(self, figure: Any, top: float) -> None:
        for n, label in enumerate(self.rows):
            y = top - (n + 0.5) * self.cell
            self._text(figure, EDGE + self.left - PAD, y, label, self.font, ha="right", fontfamily=self.families)

    def _name_columns(self, figure: Any, left: float, bottom: float) -> None:
        for n, label in enumerate(self.columns):
            x, turned = left + (n + 0.5) * self.cell, 0 if len(label) == 1 else 90
            how = {"ha": "center", "va": "top", "rotation": turned, "fontfamily": self.families}
            self._text(figure, x, bottom - PAD, label, self.font, **how)

    def _text(self, figure: Any, x: float, y: float, text: str, size: float, **how: Any) -> None:
        x, y, *_ = self._place(figure, x, y)
        figure.text(x, y, text, fontsize=size, parse_math=False, **({"va": "center"} | how))

    @staticmethod
    def _place(figure: Any, x: float, y: float, width: float = 0.0, height: float = 0.0) -> tuple[float, ...]:
        """Inches as shares of the picture."""
        of_width, of_height = figure.get_size_inches()
        return x / of_width, y / of_height, width / of_width, height / of_height
