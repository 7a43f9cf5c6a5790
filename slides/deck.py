"""What the parts of the deck share: drawings with the letters of a slide, drawings that build up, curves, and
the mesh that grows."""

from __future__ import annotations

import base64
import dataclasses
import functools
from typing import Any

from IPython.display import display

import llmpar.draw
from llmpar.draw import scene

TAKE_HOME = {
    "data parallel": ("the batch", "2Ψ", "the state fits"),
    "ZeRO-1": ("+ optimizer", "2Ψ", "the rest fits"),
    "ZeRO-3, FSDP": ("+ gradients, weights", "3uΨ", "tokens per GPU > C/β"),
    "tensor parallel": ("each layer", "8bsd per layer", "its links are fast"),
    "+ sequence cut": ("+ norms, residuals", "8bsd per layer", "its links are fast"),
    "ring attention": ("the sequence", "6bskh per layer", "a part's tokens > C/β"),
    "pipeline": ("the stack of layers", "2bsd per hop", "u ≥ 9 (p − 1)"),
    "experts": ("the experts", "4a·bsd per layer", "their load is even"),
}
"""Strategy: what it cuts, what each device sends in a step, and how long it is good. 99_take_home.py holds
the numbers against `llmpar.predict.formulas`."""
LETTERS = (
    "Ψ parameters · u microbatches · p stages · b·s tokens of width d · k·h width of the keys"
    " · a experts per token · C/β FLOP/s over bytes/s"
)
"""The letters of `TAKE_HOME`."""


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
    said = scene.compose(title, blocks, picture.text.partition("\n")[2], margin=4)
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
            dataclasses.replace(item, frame=-1) for item in items
            if item.frame in (-1, number) or (number and item.frame == scene.MOVING)
        )) for number in range(last + 1)
    ] or [picture]  # fmt: skip


AXIS = {
    "data parallel": "dp",
    "ZeRO-1": "fsdp",
    "ZeRO-3, FSDP": "fsdp",
    "tensor parallel": "tp",
    "+ sequence cut": "tp",
    "ring attention": "sp",
    "pipeline": "pp",
    "experts": "ep",
}
"""Strategy: the axis of the mesh that it uses."""
CUT = {"dp": "rows", "fsdp": "state", "tp": "width", "sp": "sequence", "pp": "layers", "ep": "experts"}


def where(*lit: str) -> None:
    """Show what the talk has cut so far, each axis in two, what is left for the first device, and the devices
    that this takes; the axes of the strategies ``lit`` are those of this part."""
    axes, now = list(CUT), {AXIS[name] for name in lit}
    cut = set(axes[: 1 + max(map(axes.index, now))])
    with letters():
        parts = (18, _tokens(cut, now)), (284, _layers(cut, now)), (642, _state(cut, now))
        items = [scene.Group(tuple(part), x) for x, part in parts] + _devices(axes, cut, now)
        scene.show(scene.compose("Where we are", [items], _said(axes, cut, now), margin=8, column=896))


MINE = scene.OTHERS[0]  # the colour of the first device


def _edge(axis: str, now, *points: tuple[float, float]) -> scene.Line:
    """A cut, in the colour of its axis."""
    return scene.Line(points, axis, 6 if axis in now else 3.5)


def _named(axis: str, now, x: float, y: float, anchor: str = "middle") -> scene.Text:
    """The name of a cut, at its end."""
    return scene.Text(x, y, axis, scene.BODY, anchor, f"{axis}-line", axis in now)


def _cells(x: float, y: float, wide: float, high: float, mine: bool) -> scene.Rect:
    return scene.Rect(x, y, wide, high, MINE if mine else "cell", "edge", 0.75)


def _tokens(cut, now) -> list:
    """Eight rows of eight positions, and who cuts them."""
    size, rows, left = 22, 8, 4 if "sp" in cut else 8
    items: list = [scene.Text(0, -40, "tokens of a step", bold=True)]
    for axis in ("dp", "fsdp", "ep"):
        rows //= 2 if axis in cut else 1
    items += [
        _cells(size * k, size * i, size, size, i < rows and k < left) for i in range(8) for k in range(8)
    ]
    for axis, places in (("ep", (1, 3, 5, 7)), ("fsdp", (2, 6)), ("dp", (4,))):
        if axis in cut:
            items += [_edge(axis, now, (-8, size * i), (8 * size + 8, size * i)) for i in places]
            items.append(_named(axis, now, 8 * size + 14, size * places[0], "start"))
    if "sp" in cut:
        items += [
            _edge("sp", now, (4 * size, -8), (4 * size, 8 * size + 8)),
            _named("sp", now, 4 * size, -18),
        ]
    return items


def _layers(cut, now) -> list:
    """Four layers of attention and feed-forward, and who cuts them."""
    items: list = [scene.Text(0, -40, "layers", bold=True)]
    parts = [(0, 110)] + ([(130 + 54 * e, 46) for e in range(4)] if "ep" in cut else [(130, 208)])
    for layer in range(4):
        y = 46 * layer
        for k, (x, wide) in enumerate(parts):
            here = not ("pp" in cut and layer > 1) and not ("ep" in cut and k > 2)
            share = wide / 2 if "tp" in cut else wide
            items += [_cells(x, y, wide, 36, False)] + [_cells(x, y, share, 36, True)] * here
            word = "attention" if not k else f"e{k - 1}" if "ep" in cut else "feed-forward"
            if "tp" not in cut:
                items.append(scene.small_text(x + wide / 2, y + 18, word, fill="ink"))
            elif not layer:
                items.append(scene.small_text(x + wide / 2, -14, word, fill="ink"))
    if "tp" in cut:
        middles = [x + wide / 2 for x, wide in parts]
        items += [_edge("tp", now, (x, 46 * k - 3), (x, 46 * k + 39)) for k in range(4) for x in middles]
        items.append(_named("tp", now, middles[0], 4 * 46 + 8))
    if "ep" in cut:
        items += [_edge("ep", now, (234, -24), (234, 4 * 46)), _named("ep", now, 234, 4 * 46 + 8)]
    if "pp" in cut:
        items += [_edge("pp", now, (-8, 87), (350, 87)), _named("pp", now, -14, 87, "end")]
    return items


def _state(cut, now) -> list:
    """The 2 + 2 + 12 bytes of state per parameter, and who cuts them."""
    items: list = [scene.Text(0, -40, "state of their weights", bold=True)]
    for k, (name, wide) in enumerate((("weights", 40), ("gradients", 40), ("optimizer", 236))):
        y, share = 62 * k, wide / 2 if "fsdp" in cut else wide
        items += [_cells(0, y, wide, 36, False), _cells(0, y, share, 36, True)]
        items.append(
            scene.small_text(wide + 8 if wide < 99 else 0, y + (18 if wide < 99 else 50), name, "start")
        )
        if "fsdp" in cut:
            items.append(_edge("fsdp", now, (wide / 2, y - 5), (wide / 2, y + 41)))
    if "fsdp" in cut:
        items.append(_named("fsdp", now, 118, 62 * 2 + 52))
    return items


def _devices(axes, cut, now) -> list:
    """The axes with what they cut, and below them their devices."""
    items: list = []
    for k, axis in enumerate(axes):
        fill, ink = (axis, scene.text_color_on(axis)) if axis in cut else ("paper", "soft")
        edge = ("ink", 4) if axis in now else ("grid", 1)
        items.append(scene.Rect(148 * k, 204, 138, 30, fill, *edge, dash=axis not in cut))
        words = f"{axis}=2: {CUT[axis]}" if axis in cut else CUT[axis]
        items.append(scene.Text(148 * k + 69, 219, words, scene.SMALL, "middle", ink, axis in now))
    num, step = 2 ** len(cut), 878 / 64
    items += [scene.Rect(step * k, 241, 12, 16, MINE if not k else "cell", "edge", 0.75) for k in range(num)]
    items.append(scene.Text(0, 271, f"{num} devices. Filled is what the first of them has."))
    return items


def _said(axes, cut, now) -> str:
    """The same in words."""
    done = "; ".join(f"{axis} = 2 cuts {CUT[axis]}" for axis in axes if axis in cut)
    later = ", ".join(CUT[axis] for axis in axes if axis not in cut) or "nothing"
    return f"{done}: {2 ** len(cut)} devices. This part: {', '.join(sorted(now))}. Not cut yet: {later}."


def curves(lines, ticks, x: str, y: str, **options) -> None:
    """Show `llmpar.draw.curves` as large as the slide lets it be."""
    show(draw.curves(lines, ticks, x, y, **options), options.get("title", ""))
