"""What the parts of the deck share: drawings with the letters of a slide, curves, and the table that fills
up."""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import io
from typing import Any

from IPython.display import HTML, display

import llmpar.draw
from llmpar.draw import scene

TAKE_HOME = {
    "data parallel": ("the batch", "2Ψ", "the state fits"),
    "ZeRO-1": ("+ optimizer", "2Ψ", "the rest fits"),
    "ZeRO-3, FSDP": ("+ gradients, weights", "3uΨ", "tokens per GPU > C/β"),
    "tensor parallel": ("each layer", "8bsd per layer", "it stays in a node"),
    "+ sequence cut": ("+ norms, residuals", "8bsd per layer", "it stays in a node"),
    "ring attention": ("the sequence", "6bskh per layer", "a part's tokens > C/β"),
    "pipeline": ("the stack of layers", "2bsd per hop", "u ≥ 9 (p − 1)"),
    "experts": ("the experts", "4a·bsd per layer", "their load is even"),
}
"""Strategy: what it cuts, what each device sends in a step, and how long it is good. 99_take_home.py holds
the numbers against `llmpar.predict.formulas`."""


class _Draw:
    """`llmpar.draw` with the type scale of a slide."""

    def __getattr__(self, name: str) -> Any:
        made = getattr(llmpar.draw, name)

        @functools.wraps(made)
        def drawn(*args, **options):
            with scene.type_scale(scene.DECK):
                return made(*args, **options)

        return drawn


draw = _Draw()
letters = functools.partial(scene.type_scale, scene.DECK)
"""``with letters():`` around what a part draws itself."""


def bare(picture: scene.Scene, title: str = "") -> scene.Scene:
    """The drawing without the title and the small print of `scene.compose`; its words stay."""
    blocks = []
    for part in picture.items[0].items:
        texts = [item for item in part.items if isinstance(item, scene.Text)]
        only_text = len(texts) == len(part.items)
        is_title = only_text and " ".join(text.text for text in texts) == picture.title
        if not is_title and not (only_text and {text.fill for text in texts} == {"soft"}):
            blocks.append([part])
    said = scene.compose(title, blocks, picture.text.partition("\n")[2], margin=8)
    return dataclasses.replace(said, title=title or picture.title, text=picture.text)


def show(picture: scene.Scene, title: str = "") -> None:
    """Show a drawing as large as the slide lets it be; its title and small print are said by the slide."""
    with letters():
        scene.show(bare(picture, title))


def steps(*pictures: scene.Scene, title: str = "") -> None:
    """Show drawings of one size in one place, each with the next press of a key; printed, the last one.

    A drawing that moves is a step for each of its frames. Above the steps stands ``title``, or the title of
    each drawing where they differ.
    """
    differ = not title and len({picture.title for picture in pictures}) > 1
    with letters():
        plain = [bare(picture, picture.title if differ else title) for picture in pictures]
    shown = [frame for picture in plain for frame in frames(picture)]
    sizes = sorted({(picture.width, picture.height) for picture in shown})
    if len(shown) < 2 or len(sizes) > 1:
        raise ValueError(f"steps need two drawings or more, all of one size; these are {len(shown)}: {sizes}")
    for number, picture in enumerate(shown):
        said = f"Step {number + 1} of {len(shown)}. {picture.text}"
        png = base64.b64encode(scene.to_png(picture)).decode()
        display({"image/png": png, "text/plain": said}, raw=True, metadata={"step": number})


def frames(picture: scene.Scene) -> list[scene.Scene]:
    """The instants of a drawing that moves, one after the other; a drawing that does not is one."""
    items = scene.flatten(picture.items)
    last = max(item.frame for item in items)
    return [
        dataclasses.replace(picture, items=tuple(
            dataclasses.replace(item, frame=-1) for item in items if item.frame in (-1, number)
        )) for number in range(last + 1)
    ] or [picture]  # fmt: skip


def where(*lit: str) -> HTML:
    """The take-home table as far as the talk has come, with the rows of this part lit."""
    names = list(TAKE_HOME)
    reached = max(map(names.index, lit))
    rows = []
    for i, (name, cells) in enumerate(TAKE_HOME.items()):
        words = [name, *(cells if i <= reached else ("", "", ""))]
        mark = ' class="lit"' if name in lit else "" if i <= reached else ' class="later"'
        rows.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(word)}</td>" for word in words) + "</tr>")
    head = "".join(f"<th>{word}</th>" for word in ("strategy", "cuts", "each device sends", "good while"))
    return HTML(f'<table class="where"><tr>{head}</tr>{"".join(rows)}</table>')


def curves(lines, ticks, x: str, y: str, *, low: float = 0, high: float | None = None, percent: bool = False,
           levels=None, marks=(), title: str = "") -> None:  # fmt: skip
    """Draw curves over equally spaced ``ticks``, large enough for the back row.

    A line is (name, values, colour's role, marker, dashed); a value may be None. ``marks`` are (position,
    text) of dashed uprights. The name stands at the end of its line, in its colour.
    """
    import matplotlib.pyplot as plt

    colors = scene.LIGHT
    figure, axes = plt.subplots(figsize=(9.6, 3.7), dpi=150)
    said, ends = [], list[tuple[float, str, str, int]]()
    for name, values, color, marker, dashed in lines:
        at = [i for i, value in enumerate(values) if value is not None]
        known = [values[i] for i in at]
        style = "--" if dashed else "-"
        axes.plot(at, known, style, color=colors[color], marker=marker, markersize=9, linewidth=3)
        ends.append((known[-1], name, color, at[-1]))
        words = "{:.0%}" if percent else "{:.3g}"
        said.append(f"{name}: " + ", ".join(f"{ticks[i]}: {words.format(values[i])}" for i in at))
    bottom, top = low, high or axes.get_ylim()[1]
    down = max(ends)[0] > (bottom + top) / 2  # a mark's text stands where no line ends
    for place, text in marks:
        axes.axvline(place, color=colors["soft"], linestyle=":", linewidth=2)
        axes.annotate(
            text, (place, 1 - down), (8, 6 if down else -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="bottom" if down else "top", fontsize=14, color=colors["soft"],
        )  # fmt: skip
    apart = 0.085 * (top - bottom)
    at_least = bottom + apart / 2
    for value, name, color, end in sorted(ends):  # names of lines that end together stand above one another
        at_least = max(value, at_least)
        axes.annotate(
            name, (end, value), (end + 0.025 * len(ticks), at_least), va="center", fontsize=15,
            color=colors[color], weight="bold",
        )  # fmt: skip
        at_least += apart
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set(xlim=(-0.2, len(ticks) - 1 + 0.34 * len(ticks)), ylim=(low, high))
    if levels:
        axes.set_yticks(levels)
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(x, fontsize=15)
    axes.set_ylabel(y, fontsize=15)
    axes.tick_params(labelsize=15)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, fontsize=15, loc="left", weight="bold")
    figure.savefig(png := io.BytesIO(), format="png", bbox_inches="tight")
    plt.close(figure)
    text = "\n".join([f"{y} over {x}", *said])
    display({"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": text}, raw=True)
