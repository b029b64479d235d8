"""Draws docs/images/overview.png from the package and a trained run: `python docs/make_pictures.py runs/dates`.

Left the blocks of the paper's Figure 1 in the colours of the files that hold them; in the middle what the head that
copies digits looks at; at the right the run's loss, and what else there is to do with a model.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

from transformer_jax.attention_maps import attention_maps
from transformer_jax.files import write_whole
from transformer_jax.head_statistics import head_statistics, held_out_dates
from transformer_jax.model import Transformer
from transformer_jax.plots import GREY, ORANGE, RunCurves, new_figure
from transformer_jax.pretrained import Pretrained, load_pretrained
from transformer_jax.run_folder import RunFolder

OUTPUT = Path(__file__).with_name("images") / "overview.png"
SOURCE, TARGET = "1965-05-10", "10 May 1965"
INK, PAPER, FRAME = "#222222", "#ffffff", "#eef1f5"
FILES = {"attention.py": "#f6b26b", "layers.py": "#9fc5e8", "model.py": FRAME, "loss.py": "#b6d7a8"}
"""The files of the paper part, with the colour of their blocks."""

Block = tuple[str, str]
"""What stands on a block, and the file that holds it."""
ADD_NORM: Block = ("add & norm", "layers.py")
EMBEDDING: Block = ("embedding + positions", "layers.py")
ENCODER: tuple[Block, ...] = (("self-attention", "attention.py"), ADD_NORM, ("feed-forward", "layers.py"), ADD_NORM)
DECODER: tuple[Block, ...] = (
    ("masked self-attention", "attention.py"),
    ADD_NORM,
    ("attention to the encoder", "attention.py"),
    ADD_NORM,
    ("feed-forward", "layers.py"),
    ADD_NORM,
)
OUTPUTS: tuple[Block, ...] = (("embedding, transposed", "layers.py"), ("softmax, smoothed loss", "loss.py"))
USES = (
    ("train", "python train.py", "on your text, or from an OPUS-MT model"),
    ("translate", "transformer-jax translate", "files, beams, scores, on any device"),
    ("hand back", "transformer-jax convert", "to transformers, CTranslate2, Marian"),
)


def draw_box(axis: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "", size: int = 14):
    style = "round,pad=0,rounding_size=0.18"
    axis.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=INK, lw=1.1))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def draw_arrow(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": INK, "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    axis.add_patch(FancyArrowPatch(start, end, **style))


def draw_column(
    axis: Any, x: float, width: float, word: str, layer: tuple[Block, ...], top: tuple[Block, ...]
) -> list[float]:
    """A stack from the bottom up. Returns the heights of the middles of its layer's blocks."""
    height, gap, middle = 0.95, 0.3, x + width / 2
    axis.text(middle, 0.0, word, ha="center", va="bottom", fontsize=16, color=INK, family="monospace")
    draw_arrow(axis, (middle, 0.75), (middle, 1.15))
    draw_box(axis, x, 1.15, width, height, FILES[EMBEDDING[1]], EMBEDDING[0])
    y, middles = 2.75, []
    frame = len(layer) * (height + gap) + 0.25
    draw_box(axis, x - 0.25, y - 0.3, width + 0.5, frame, FILES["model.py"])
    draw_arrow(axis, (middle, 2.1), (middle, y))
    for n, (text, file) in enumerate(layer):
        draw_box(axis, x, y, width, height, FILES[file], text)
        middles.append(y + height / 2)
        if n + 1 < len(layer):
            draw_arrow(axis, (middle, y + height), (middle, y + height + gap))
        y += height + gap
    below = y - gap
    for text, file in top:
        draw_arrow(axis, (middle, below), (middle, below + 0.6))
        draw_box(axis, x, below + 0.6, width, height, FILES[file], text)
        below += 0.6 + height
    return middles


def draw_blocks(axis: Any) -> None:
    """Figure 1."""
    axis.set(xlim=(-0.6, 12.9), ylim=(-1.6, 14.1))
    axis.axis("off")
    encoder = draw_column(axis, 0.3, 5.3, SOURCE, ENCODER, ())
    decoder = draw_column(axis, 7.2, 5.3, "<s> " + TARGET[:6] + "…", DECODER, OUTPUTS)
    axis.text(0.05, 9.6, "2 layers each here,\n6 in the paper", ha="left", va="bottom", fontsize=15, color=GREY)
    # What the encoder gives goes up, over to the decoder and into its second attention.
    top, between = encoder[-1] + 1.5, 6.35
    axis.plot((2.95, 2.95, between, between), (encoder[-1] + 0.5, top, top, decoder[2]), color=INK, lw=1.5)
    draw_arrow(axis, (between, decoder[2]), (7.2, decoder[2]))
    x = -0.3
    for file, colour in FILES.items():
        draw_box(axis, x, -1.35, 0.55, 0.55, colour)
        axis.text(x + 0.7, -1.08, file, va="center", fontsize=14, color=INK, family="monospace")
        x += 1.25 + 0.245 * len(file)


def draw_map(axis: Any, trained: Pretrained) -> str:
    """The map of the head that copies digits best; returns which that is."""
    model, tokenizer = Transformer(trained.config), trained.tokenizer
    statistics = head_statistics(model, trained.params, tokenizer, held_out_dates(200))
    layer, head = statistics.best("digits")
    ids = tokenizer.encode_source(SOURCE), tokenizer.encode_target(TARGET)
    maps = attention_maps(model, trained.params, *ids)
    axis.imshow(maps.cross_NHTS[layer, head], cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(range(len(SOURCE) + 1), [*SOURCE, "end"], fontsize=17, family="monospace")
    axis.set_yticks(range(len(TARGET) + 1), [*TARGET.replace(" ", "␣"), "end"], fontsize=17, family="monospace")
    axis.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    axis.set_ylabel("writes", fontsize=16)
    axis.set_xlabel("looks at", fontsize=16)
    return f"layer {layer + 1}, head {head + 1}"


def draw_loss(axis: Any, curves: RunCurves) -> None:
    found = [(r["step"], r["loss"]) for r in curves.records if r["kind"] == "train"]
    axis.plot(*zip(*found, strict=True), color=ORANGE, lw=2.5)
    if curves.lowest_loss is not None:
        axis.axhline(curves.lowest_loss, color=GREY, linestyle=":", lw=2)
        axis.text(found[-1][0], curves.lowest_loss + 0.1, "lowest possible", ha="right", fontsize=14, color=GREY)
    axis.set_xlabel("step", fontsize=14)
    axis.set_ylabel("loss", fontsize=14)
    axis.tick_params(labelsize=13)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)


def draw_uses(axis: Any) -> None:
    axis.set(xlim=(0, 10), ylim=(0, 6.3))
    axis.axis("off")
    for n, (verb, command, what) in enumerate(USES):
        y = 4.3 - 2.1 * n
        draw_box(axis, 0.05, y, 9.9, 1.75, FRAME)
        axis.text(0.35, y + 1.2, verb, va="center", fontsize=16, weight="bold", color=INK)
        axis.text(9.65, y + 1.2, command, ha="right", va="center", fontsize=14, family="monospace", color=INK)
        axis.text(0.35, y + 0.5, what, va="center", fontsize=15, color=INK)


def overview(run: Path) -> Any:
    """The picture, 1600 by 760 pixels."""
    trained, curves = load_pretrained(run), RunFolder(run).curves()
    figure = new_figure(16, 7.6)
    figure.set_layout_engine("none")
    figure.set_facecolor(PAPER)
    draw_blocks(figure.add_axes((0.005, 0.0, 0.40, 0.90)))
    where = draw_map(figure.add_axes((0.45, 0.09, 0.235, 0.70)), trained)
    draw_loss(figure.add_axes((0.765, 0.60, 0.225, 0.27)), curves)
    draw_uses(figure.add_axes((0.71, 0.01, 0.287, 0.46)))
    titles = ((0.205, "the paper, part by part"), (0.567, f"what {where} looks at"), (0.878, "how fast it learns"))
    for x, title in titles:
        figure.text(x, 0.945, title, ha="center", va="center", fontsize=19, weight="bold", color=INK)
    return figure


def few_colours(figure: Any) -> bytes:
    """A figure as a PNG of 200 colours, less than half the size of one of all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    small = io.BytesIO()
    Image.open(content).convert("RGB").quantize(200).save(small, format="png", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument("run", type=Path, help="the folder of a finished run of the dates task")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    write_whole(options.output, few_colours(overview(options.run)))


if __name__ == "__main__":
    main()
