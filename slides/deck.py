"""What the parts of the deck share: drawings with the letters of a slide, curves, and the table that fills
up."""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
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


def curves(lines, ticks, x: str, y: str, **options) -> None:
    """Show `llmpar.draw.curves` as large as the slide lets it be."""
    show(draw.curves(lines, ticks, x, y, **options), options.get("title", ""))
