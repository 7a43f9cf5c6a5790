"""A small grammar of pictures: rectangles, texts and lines on a scene, which is drawn as SVG or as PNG.

A scene is data: it can be compared, tested for overlaps and drawn again elsewhere. Colours are named by their
role, so that one drawing serves a light and a dark page. Every scene carries a text that says the same as the
picture, for screen readers, GitHub and nbval. Coordinates are pixels, y grows downwards, a text's ``y`` is
its middle. No matplotlib until a PNG is asked for. What a picture means is not known here.
"""

import base64
import functools
import html
import io
import itertools
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from llmpar.predict.digits import rounded

TITLE, BODY, SMALL = "title", "body", "small"  # sizes of type, by role as colours are
PAGE = {TITLE: 15, BODY: 13, SMALL: 11}
"""The type scale of a page or a notebook, in pixels."""
DECK = {TITLE: 17, BODY: 15, SMALL: 14}
"""The type scale of a slide. A drawing is shown there at 1.43 times its size or more: 20 pixels of 720."""
_type_scale: ContextVar[dict[str, int]] = ContextVar("type_scale", default=PAGE)
PLAIN_EM, BOLD_EM = 0.6, 0.66  # the assumed width of a character, in sizes of its text
BASELINE = 0.35  # how far a text's baseline lies below its middle, in sizes of the text

COLOURS = tomllib.loads(
    resources.files(__package__).joinpath("colours.toml").read_text(encoding="utf-8")
)
LIGHT: dict[str, str] = COLOURS["light"]
DARK = LIGHT | COLOURS["dark"]
OTHERS = ("other1", "other2", "other3", "other4", "other5")
"""Colours for what has no role: the devices of a slide, the curves of a figure."""


def text_color_on(fill: str) -> str:
    """Return the role of text that is legible on a fill."""
    if fill in ("", "paper", "cell") or fill.endswith("-ground"):
        return "ink"
    return "white" if fill in COLOURS["white_on"] else "black"


@contextmanager
def type_scale(scale: dict[str, int]) -> Iterator[None]:
    """Draw inside this block with another type scale: ``with type_scale(DECK):`` for a slide."""
    token = _type_scale.set(scale)
    try:
        yield
    finally:
        _type_scale.reset(token)


def pixels(size: float | str) -> float:
    """Return the size of a text in pixels: a number, or a role in the type scale that is in force."""
    return _type_scale.get()[size] if isinstance(size, str) else size


MOVING = -2
Box = tuple[float, float, float, float]  # left, top, right, bottom
Items = list[Any]  # rectangles, texts, lines and groups


@dataclass(frozen=True, kw_only=True)
class _Item:
    """What every item has: its ``frame`` (see `Group`), and whether it is ``live``: part of a button of a
    form, which a saved picture lacks."""

    frame: int = -1
    live: bool = False


@dataclass(frozen=True)
class Rect(_Item):
    """A rectangle; ``hatch`` is ``"/"`` or ``"."``, drawn in the stroke's colour; ``tip`` shows when hovered.
    ``act`` is what a click sets in an explorer's state, as JSON; then the tip is the name of a button. ``op``
    names an operation of a timetable that can be dragged: its stage, and its place in the stage's row."""

    x: float
    y: float
    w: float
    h: float
    fill: str = ""
    stroke: str = ""
    width: float = 1
    hatch: str = ""
    radius: float = 0
    dash: bool = False
    tip: str = ""
    act: str = ""
    op: str = ""

    @property
    def box(self) -> Box:
        return self.x, self.y, self.x + self.w, self.y + self.h


@dataclass(frozen=True)
class Text(_Item):
    """One line of text; ``anchor``: ``start``, ``middle``, ``end``. A ``size`` is kept in pixels."""

    x: float
    y: float
    text: str
    size: Any = BODY
    anchor: str = "start"
    fill: str = "ink"
    bold: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pixels(self.size))

    @property
    def box(self) -> Box:
        """Return the place that it takes, at 0.6 em per character (0.66 when bold)."""
        w = text_width(self.text, self.size) * (1.1 if self.bold else 1)
        left = self.x - w * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]
        return left, self.y - self.size / 2, left + w, self.y + self.size / 2


@dataclass(frozen=True)
class Line(_Item):
    """A line through points; a closed area when it has a ``fill``; an arrow when it has a ``head``."""

    points: tuple[tuple[float, float], ...]
    stroke: str = "ink"
    width: float = 1.5
    dash: bool = False
    head: bool = False
    fill: str = ""

    @property
    def box(self) -> Box:
        xs, ys = zip(*self.points, strict=True)
        return min(xs), min(ys), max(xs), max(ys)


@dataclass(frozen=True)
class Group:
    """Items moved together. Those of a ``frame`` are an instant of what moves: a still picture shows frame 0,
    an explorer one after the other; -1 is there all the time, and `MOVING` in all frames but 0."""

    items: tuple
    dx: float = 0
    dy: float = 0
    frame: int = -1


def text_width(text: str, size: float | str = BODY) -> float:
    """Return the approximate width of a text."""
    return PLAIN_EM * pixels(size) * len(text)


def flatten(items, dx: float = 0, dy: float = 0, frame: int = -1) -> list:
    """Return the primitives inside groups, in drawing order, at their final places and in their frames."""
    out: list = []
    for item in items:
        own = item.frame if frame == -1 else frame
        if isinstance(item, Group):
            out += flatten(item.items, dx + item.dx, dy + item.dy, own)
            continue
        at: dict[str, Any] = {"frame": own}
        if isinstance(item, Line):
            at["points"] = tuple((x + dx, y + dy) for x, y in item.points)
        else:
            at |= {"x": item.x + dx, "y": item.y + dy}
        placed = object.__new__(type(item))  # several times as quick as `dataclasses.replace`
        vars(placed).update(vars(item), **at)
        out.append(placed)
    return out


def bounds(items) -> Box:
    """Return the box around ``items``; zeros for nothing."""
    left, top, right, bottom = zip(
        *([item.box for item in flatten(items)] or [(0, 0, 0, 0)]), strict=True
    )
    return min(left), min(top), max(right), max(bottom)


def stack(blocks, gap: float = 12, across: bool = False) -> list[Group]:
    """Return blocks of items below one another from the left, or ``across`` with their middles on one
    line."""
    out, offset = [], 0.0
    for block in blocks:
        x0, y0, x1, y1 = bounds(block)
        out.append(
            Group(tuple(block), offset * across - x0, -(y0 + y1) / 2 if across else offset - y0)
        )
        offset += gap + (x1 - x0 if across else y1 - y0)
    return out


def small_text(x: float, y: float, text: str, anchor: str = "middle", fill: str = "soft") -> Text:
    """Return a label in small type."""
    return Text(x, y, text, SMALL, anchor, fill)


def on_paper(text: Text) -> list:
    """Return a text on a piece of paper, which hides what it would cross."""
    x0, y0, x1, y1 = text.box
    return [Rect(x0 - 2, y0 - 2, x1 - x0 + 4, y1 - y0 + 4, "paper", radius=3), text]


def fitting_text(
    x: float, y: float, wide: float, *texts: str, on: str = "", fill: str = ""
) -> list[Text]:
    """Return the first of ``texts`` that fits into ``wide`` pixels around ``x``; nothing if none does.

    Its colour is ``fill``, or what is legible ``on`` a ground."""
    fits = [text for text in texts if text and text_width(text, SMALL) <= wide]
    return [small_text(x, y, text, fill=fill or text_color_on(on)) for text in fits[:1]]


def boxed(box: Rect, *texts: str, margin: float = 0) -> list:
    """Return a box, and in its middle the first of ``texts`` that leaves a ``margin`` of its width."""
    x, y = box.x + box.w / 2, box.y + box.h / 2
    return [box, *fitting_text(x, y, box.w - margin, *texts, on=box.fill)]


def titled(box: Rect, text: str, size: str = BODY) -> list:
    """Return a box with a text in its middle."""
    x, y = box.x + box.w / 2, box.y + box.h / 2
    return [box, Text(x, y, text, size, "middle", text_color_on(box.fill))]


def style_of(role: str) -> tuple[str, str, str]:
    """Return the fill, the stroke and the hatch of a role: its colour, or with ``/`` or ``.`` behind it paper
    hatched in it."""
    name, hatch = (role[:-1], role[-1]) if role[-1] in "/." else (role, "")
    stroke = f"{name}-line" if f"{name}-line" in LIGHT else "edge"
    return "paper" if hatch else name, stroke, hatch


def legend(entries, wide: float = 640) -> list:
    """Return swatches with their meaning, on as many lines as needed: (role, meaning) or (role, meaning,
    hatch)."""
    out: list = []
    x = y = 0.0
    for role, meaning, *hatched in entries:
        w = 20 + text_width(meaning, SMALL)
        if x and x + w > wide:
            x, y = 0, y + 20
        fill, stroke, hatch = style_of(role + "".join(hatched))
        out += [Rect(x, y, 14, 14, fill, stroke, hatch=hatch), Text(x + 20, y + 7, meaning, SMALL)]
        x += w + 22
    return out


def scaled(value: float, units: tuple[str, ...], base: float) -> str:
    """Return a value with three significant digits in the one of ``units`` (ascending by ``base``) that
    suits: ``1.5 GiB``."""
    power = 0
    while power + 1 < len(units) and abs(value) >= 0.9995 * base:
        value, power = value / base, power + 1
    value *= 1 + 1e-12  # ties are rounded up, as browsers do it; Python rounds them to even
    number = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {units[power]}"


def size_text(num_bytes: float) -> str:
    """Return bytes as text for people, in powers of 1024."""
    return scaled(num_bytes, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def time_text(seconds: float) -> str:
    """Return seconds as text for people: minutes from 10 minutes on, hours from 2."""
    seconds = rounded(seconds)
    if seconds >= 600:
        return (
            scaled(seconds / 60, ("min",), 1)
            if seconds < 7200
            else scaled(seconds / 3600, ("h",), 1)
        )
    return "0 s" if not seconds else scaled(seconds * 1e9, ("ns", "µs", "ms", "s"), 1000)


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """Return round numbers in [low, high], about ``num`` of them."""
    unit = 10.0 ** math.floor(math.log10(rough := (high - low) / num or 1.0))
    step = next(s * unit for s in (1, 2, 5, 10) if s * unit >= 0.999 * rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True, repr=False)
class Scene:
    """A finished drawing. In a notebook it shows itself; ``text`` says it to those who do not see it."""

    width: float
    height: float
    title: str
    text: str
    items: tuple

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return to_svg(self)

    def _repr_png_(self) -> bytes:
        return to_png(self)

    def save(self, path: str | Path) -> None:
        """Write the drawing as the path's suffix says: ``.svg`` or ``.png``."""
        suffix = Path(path).suffix
        if suffix not in (".svg", ".png"):
            raise ValueError(
                f"a drawing is saved as .svg or .png, and '{path}' ends in '{suffix}'; rename it"
            )
        Path(path).write_bytes(
            to_svg(self).encode() if suffix == ".svg" else to_png(self, "llmpar")
        )


def paragraph(texts, wide: float, role: str, fill: str, bold: bool = False) -> list[Text]:
    """Return texts in lines that are at most so ``wide``, each from a line of its own on."""
    size = pixels(role)
    letters = int(wide / size / (BOLD_EM if bold else PLAIN_EM))
    lines = [line for text in texts for line in textwrap.wrap(text, letters)]
    return [
        Text(0, 1.45 * size * i, line, size, fill=fill, bold=bold) for i, line in enumerate(lines)
    ]


def compose(
    title: str, blocks, text: str, notes=(), margin: float = 16, column: float = 0
) -> Scene:
    """Draw a scene of blocks below one another, between a title above and notes below; as large as it needs
    to be. In a ``column`` of so many pixels the title is left to the page around it."""

    wide = (
        column - 2 * margin
        if column
        else max([520, *(bounds(b)[2] - bounds(b)[0] for b in blocks)])
    )
    head = [] if column else paragraph([title], wide, TITLE, "ink", True)
    parts = [head, *blocks, paragraph(notes, wide, SMALL, "soft")]
    items = stack([part for part in parts if part], 8 if column else 14)
    x0, y0, x1, y1 = bounds(items)
    placed = Group(tuple(items), margin - x0, margin - y0)
    wide = column or math.ceil(x1 - x0 + 2 * margin)
    high = math.ceil(y1 - y0 + 2 * margin)
    return Scene(wide, high, title, f"{title}\n{text}", (placed,))


def show(scene: Scene) -> None:
    """Display a drawing: SVG, which follows the reader's theme, and PNG and text where no SVG is shown, on
    GitHub and in untrusted notebooks."""
    from IPython.display import display

    png = base64.b64encode(to_png(scene)).decode()
    data = {"image/svg+xml": to_svg(scene), "image/png": png, "text/plain": scene.text}
    display(data, raw=True, metadata={"image/png": {"width": scene.width}})


def _head(line: Line) -> tuple[tuple[float, float], ...]:
    """Return the triangle at the end of an arrow."""
    (x0, y0), (x1, y1) = line.points[-2:]
    size = 4 + 1.5 * line.width
    length = math.hypot(x1 - x0, y1 - y0) or 1
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    bx, by = x1 - size * ux, y1 - size * uy
    return (
        (x1, y1),
        (bx - size / 2 * uy, by + size / 2 * ux),
        (bx + size / 2 * uy, by - size / 2 * ux),
    )


def _n(*numbers: float) -> str:
    return " ".join(f"{x:.2f}".rstrip("0").rstrip(".") for x in numbers)


# As xml.sax has them, which brings half a network along.
escape = functools.partial(html.escape, quote=False)
attribute = lambda text: f'"{html.escape(text)}"'


class _Svg:
    """Write items as elements of an SVG, and keep the roles and the hatches that they use."""

    def __init__(self) -> None:
        self.used = {"paper"}
        self.patterns: dict[str, str] = {}

    def paint(self, fill: str, stroke: str = "", width: float = 0, dash: bool = False) -> str:
        """Return the attributes of a fill and a stroke, by their roles."""
        # The plain attribute is for readers without CSS variables; the class wins elsewhere.
        self.used.update(role for role in (fill, stroke) if role)
        classes = " ".join(
            f"{prefix}-{role}" for prefix, role in (("f", fill), ("s", stroke)) if role
        )
        line = f' stroke="{LIGHT[stroke]}" stroke-width="{_n(width)}"' if stroke else ""
        line += ' stroke-dasharray="6 4"' if stroke and dash else ""
        return f'class="{classes}" fill="{LIGHT[fill] if fill else "none"}"{line}'

    def text(self, item: Text) -> str:
        """Return a line of text."""
        attributes = [
            f'x="{_n(item.x)}" y="{_n(item.y + BASELINE * item.size)}" text-anchor="{item.anchor}"',
            f'font-size="{_n(item.size)}"',
            'font-weight="600"' if item.bold else "",
            'data-live=""' if item.live else "",
            self.paint(item.fill),
        ]
        return f"<text {' '.join(filter(None, attributes))}>{escape(item.text)}</text>"

    def rect(self, item: Rect) -> str:
        """Return a rectangle, and over it its hatch."""
        position = f'x="{_n(item.x)}" y="{_n(item.y)}" width="{_n(item.w)}" height="{_n(item.h)}"'
        position += f' rx="{_n(item.radius)}"' + ' data-live=""' * item.live
        button = (
            f'pointer-events="all" role="button" tabindex="-1" aria-label={attribute(item.tip)}'
        )
        attributes = [
            position,
            self.paint(item.fill, item.stroke, item.width, item.dash),
            f'data-op="{item.op}"' if item.op else "",
            f"data-set={attribute(item.act)}" if item.act else "",
            button if item.act or item.op else "",
        ]
        tip = f"<title>{escape(item.tip)}</title>" if item.tip else ""
        drawn = f"<rect {' '.join(filter(None, attributes))}>{tip}</rect>"
        if item.hatch:
            drawn += f'\n<rect {position} fill="url(#{self.pattern(item.hatch, item.stroke)})"/>'
        return drawn

    def pattern(self, hatch: str, stroke: str) -> str:
        """Return the name of a hatch in a colour."""
        name = f"llmpar-{'dots' if hatch == '.' else 'lines'}-{stroke}"
        line = f'<path d="M-1,7 7,-1" {self.paint("", stroke, 1.6)}'
        mark = f'<circle cx="3" cy="3" r="1.4" {self.paint(stroke)}' if hatch == "." else line
        size = 'width="6" height="6" patternUnits="userSpaceOnUse"'
        self.patterns[name] = f'<pattern id="{name}" {size}>{mark}/></pattern>'
        return name

    def line(self, item: Line) -> str:
        """Return a line or an area, and the head of an arrow."""
        tag = "polygon" if item.fill else "polyline"
        style = self.paint(item.fill, item.stroke, item.width, item.dash)
        drawn = f'<{tag} points="{_n(*sum(item.points, ()))}" {style}/>'
        if item.head:
            drawn += f'\n<polygon points="{_n(*sum(_head(item), ()))}" {self.paint(item.stroke)}/>'
        return drawn

    def style_sheet(self) -> str:
        """Return the rules of the roles that are used, in the light theme and in the dark one."""
        roles = sorted(self.used)
        light, dark = ("".join(f"--lp-{r}:{theme[r]};" for r in roles) for theme in (LIGHT, DARK))
        rule = ".llmpar .f-{0}{{fill:var(--lp-{0})}}.llmpar .s-{0}{{stroke:var(--lp-{0})}}"
        return (
            f".llmpar{{{light}}}@media (prefers-color-scheme:dark){{.llmpar{{{dark}}}}}"
            f":is([data-jp-theme-light=true],[data-theme=light]) .llmpar{{{light}}}"
            f":is([data-jp-theme-light=false],[data-theme=dark]) .llmpar{{{dark}}}"
            f"{''.join(map(rule.format, roles))}"
        )


def to_svg(scene: Scene, live: bool = False) -> str:
    """Return the scene as one self-contained SVG, which follows the reader's light or dark setting or theme.

    The buttons of a form are in it where it is ``live``."""
    svg, elements = _Svg(), list[str]()
    write: dict[type, Callable[[Any], str]] = {Text: svg.text, Rect: svg.rect, Line: svg.line}
    items = [item for item in flatten(scene.items) if live or not item.live]
    by_frame = lambda item: item.frame
    for frame, group in itertools.groupby(sorted(items, key=by_frame), by_frame):
        drawn = [write[type(item)](item) for item in group]
        name = "moving" if frame == MOVING else frame
        hidden = ' display="none"' * (frame != 0)
        moves = [f'<g data-frame="{name}"{hidden}>', *drawn, "</g>"]
        elements += drawn if frame == -1 else moves
    w, h = _n(scene.width), _n(scene.height)
    acts = any(isinstance(item, Rect) and (item.act or item.op) for item in items)
    role = "group" if acts else "img"
    font = 'font-family="DejaVu Sans, Verdana, system-ui, sans-serif"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="llmpar" role="{role}"'
        f" aria-label={attribute(scene.title)} "
        f'width="{w}" height="{h}" viewBox="0 0 {w} {h}" style="max-width:100%;height:auto" {font}>'
        f"<title>{escape(scene.title)}</title><desc>{escape(scene.text)}</desc>"
        f"<style>{svg.style_sheet()}</style><defs>{''.join(svg.patterns.values())}</defs>"
        f'<rect width="{w}" height="{h}" {svg.paint("paper")}/>' + "\n".join(elements) + "</svg>"
    )


def to_png(scene: Scene, software: str = "") -> bytes:
    """Return the scene as a PNG through matplotlib, at twice its size; of a wide one at 1,900 pixels.

    It may name the ``software`` that wrote it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyBboxPatch, Polygon
        from PIL import Image, PngImagePlugin
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a PNG is drawn by {error.name}, which is not installed; save an SVG, or pip install"
            " 'llmpar[lab]'"
        ) from error

    dpi = min(192, max(96, 96 * 1900 / scene.width))
    point, color = 0.75, {"": "none"} | LIGHT  # a CSS pixel is 3/4 of a typographic point
    figure = Figure(
        figsize=(scene.width / 96, scene.height / 96), dpi=dpi, facecolor=color["paper"]
    )
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.set_axis_off()
    still = (item for item in flatten(scene.items) if item.frame in (-1, 0) and not item.live)
    for z, item in enumerate(still):
        style: dict[str, Any] = {"zorder": z, "clip_on": False}
        if isinstance(item, Text):
            style |= {
                "ha": {"start": "left", "middle": "center", "end": "right"}[item.anchor],
                "size": item.size * point,
                "weight": "bold" if item.bold else "normal",
                "color": color[item.fill],
                "parse_math": False,
            }
            axes.text(
                item.x, item.y + BASELINE * item.size, item.text, family="DejaVu Sans", **style
            )
            continue
        stroke: dict[str, Any] = {
            "edgecolor": color[item.stroke],
            "linewidth": item.width * point * bool(item.stroke),
            "linestyle": (0, (6 / item.width, 4 / item.width)) if item.dash else "-",
        }
        if isinstance(item, Rect):
            style |= {
                "xy": (item.x, item.y),
                "width": item.w,
                "height": item.h,
                "boxstyle": f"round,pad=0,rounding_size={item.radius}",
            }
            axes.add_patch(FancyBboxPatch(facecolor=color[item.fill], **stroke, **style))
            if item.hatch:
                style |= {
                    "hatch": {"/": "//////", ".": "..."}[item.hatch],
                    "edgecolor": color[item.stroke],
                }
                axes.add_patch(FancyBboxPatch(facecolor="none", linewidth=0, **style))
        else:
            area: dict[str, Any] = {
                "closed": bool(item.fill),
                "facecolor": color[item.fill],
                "joinstyle": "round",
            }
            axes.add_patch(Polygon(item.points, **area, **stroke, **style))
        if isinstance(item, Line) and item.head:
            axes.add_patch(Polygon(_head(item), facecolor=color[item.stroke], linewidth=0, **style))
    (canvas := FigureCanvasAgg(figure)).draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE)  # small areas keep their colours
    info = PngImagePlugin.PngInfo()
    if software:
        info.add_text("Software", software)
    # at a third of the bytes, or less
    few.save(buffer := io.BytesIO(), "PNG", optimize=True, pnginfo=info)
    return buffer.getvalue()
