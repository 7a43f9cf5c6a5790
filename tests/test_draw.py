"""Drawings: nothing overlaps, words say what is shown, colours differ, shards are where JAX puts them."""

import functools
import io
import itertools
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from PIL import Image
from shared import CASES as SAMPLES
from shared import ROOT, TABLES, load

from llmpar import draw
from llmpar.draw import charts, columns
from llmpar.draw import scene as scenes
from llmpar.draw.columns import MeshPoint, Part, SentBar
from llmpar.draw.scene import DARK, LIGHT, MOVING, OTHERS, Line, Rect, Scene, Text, flatten, time_text, to_svg
from llmpar.explore.explorer import MeshExplorer
from llmpar.plan import schedules, timetable
from llmpar.plan.layout import parse_layout
from llmpar.plan.mesh_shape import AXES, MeshShape, parse_mesh  # noqa: F401 - drawings.txt
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.two_meshes import two_meshes  # noqa: F401 - drawings.txt
from llmpar.predict import layer, workload
from llmpar.predict.goodput import FailingRun  # noqa: F401 - drawings.txt
from llmpar.predict.hardware import chip

GIB = 2**30
COLUMNS = "axis", "kind", "count", "predicted_bytes", "compiled_bytes"
ROWS = ("fsdp", "all-gather", 32, 3 << 20, 3 << 20), ("tp", "reduce-scatter", 8, 1 << 20, 3 << 19)
ROWS += ("dp,ep", "all-reduce", 1, 1 << 18, None), ("?", "all-to-all", 1, 0, 512)
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
ARROW_ROWS = TABLES["arrow_rows"]
ORDERS = {"in order": [[0, 1], [2, 3], [4, 5], [6, 7]], "zigzag": [[0, 7], [1, 6], [2, 5], [3, 4]]}
op = schedules.Op


def pipeline(name, p, m, **costs):
    return timetable.timetable(schedules.make(name, p, m), **costs)


def tensor(mesh, name, device, **more):
    """A weight of a Llama on a mesh of H100s."""
    plan = Plan(mesh).resolve(preset("llama3-8b"), None)
    weight, layouts = next(plan.layouts_by_path[key] for key in plan.layouts_by_path if key.startswith(name))
    sizes = plan.mesh.sizes
    return draw.tensor_grid(layouts.stored, weight.shape, sizes, 8, device, name=name, **more)


def layer_of(mesh="fsdp=512 tp=8", model="llama3-8b", **fields):
    plan = Plan(mesh, dtype="bfloat16", **fields).resolve(preset(model), None).effective
    batch = plan.mesh.dp * plan.mesh.fsdp * plan.mesh.ep
    return layer.layer_segments(workload.of_plan(preset(model), plan, chip("h100"), batch, 4096))


TWO_LEVELS = {"dp": 2, "tp": 2}, [(8,)], [("reduce-scatter", ["tp"], 1, 16, (4,))], (8,)
TWO_LEVELS[2].extend([("all-reduce", ["dp"], 1, 16, (4,)), ("all-gather", ["tp"], 1, 16, (8,))])
PIPES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
AXES_OF_CACHES = {"dp": 1, "sp": 1, "tp": 1, "kv": 1}
CACHES = {text: (parse_layout(x), AXES_OF_CACHES | sizes) for text, x, sizes in SAMPLES["drawn_caches"]}
ACT = json.dumps({"explain": "weights"})
BYTES = [Part(name, gib * GIB, says, ACT * acts) for name, gib, says, acts in SAMPLES["drawn_bytes"]]
SECONDS = dict(SAMPLES["drawn_seconds"])
TERMS = [Part(name, seconds, act=ACT) for name, seconds in SECONDS.items()]
SENT = [SentBar(*row[:2], row[2] * GIB, *row[3:6], ACT * row[6]) for row in SAMPLES["drawn_sent"]]
HERE, BEST = MeshPoint("fsdp=8 tp=8", 65.4 * GIB, 6.13, "tp"), MeshPoint("fsdp=64", 30 * GIB, 4.29, "fsdp")
LONG = MeshPoint("pp=16 dp=2 fsdp=16 ep=2 sp=2 tp=2", 50 * GIB, 3e3, "pp")
_rng = random.Random(0)
WAYS = [
    MeshPoint(
        f"dp={i}", 2 ** _rng.gauss(36, 1.2), 10 ** _rng.gauss(0.95, 0.2), _rng.choice([*AXES]), "slow", ACT
    )
    for i in range(187)
]
CUT = {"pp": 1, "dp": 3, "fsdp": 8, "ep": 1, "sp": 1, "tp": 8}
MOVES = {"fsdp": (('{"mesh": "a"}', "fsdp 4, tp 16"), None), "tp": (None, ('{"mesh": "b"}', "tp 16, fsdp 4"))}
DRAWN = [line.split(" ; ") for line in (ROOT / "tests" / "drawings.txt").read_text().splitlines()[1:]]
CASES = {name: lambda made=made: eval(made, globals()) for name, made in DRAWN}
WORDS = TABLES["drawn"]
"""What the text twin of each must have."""
for _name in schedules.SCHEDULES:
    CASES[f"timetable {_name}"] = lambda name=_name: draw.timeline(pipeline(name, 4, 8))
    WORDS[f"timetable {_name}"] = ["stage 3: ", "held", "busy"]


def overlaps(scene: Scene) -> list[str]:
    """The faults of a drawing: texts over one another, or anything over the edge."""
    boxes = [(t.text, t.frame, t.box) for t in flatten(scene.items) if isinstance(t, Text)]
    faults = [
        f"'{a}' and '{b}' overlap"
        for (a, at, (l0, t0, r0, b0)), (b, then, (l1, t1, r1, b1)) in itertools.combinations(boxes, 2)
        if (at == then or -1 in (at, then) or MOVING in (at, then) and 0 not in (at, then))
        and max(l0, l1) < min(r0, r1) - 0.01
        and max(t0, t1) < min(b0, b1) - 0.01
    ]
    for item in flatten(scene.items):
        left, top, right, bottom = item.box
        if left < 0 or top < 0 or right > scene.width or bottom > scene.height:
            faults.append(f"{item} is cut off by the edge of {scene.width} by {scene.height}")
    return faults


@functools.cache
def wide(text: str, bold: bool) -> float:
    """How wide a text of size 100 is in the PNG's own font."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return TextPath((0, 0), text.replace("$", "S"), size=100, prop=font).vertices[:, 0].max()


@pytest.mark.parametrize("name", CASES)
def test_a_picture_is_whole_told_in_words_the_same_each_time_and_legible(name):
    scene, svg = CASES[name](), to_svg(CASES[name]())
    items = flatten(scene.items)
    assert overlaps(scene) == [] and repr(scene) == scene.text
    assert [w for w in WORDS[name] if w not in scene.text] == [], "the text twin has the numbers"
    root = ET.fromstring(svg)
    assert svg == to_svg(scene)
    rects = [item for item in items if isinstance(item, Rect)]
    acts = any((item.act or item.op) and not item.live for item in rects)
    assert root.get("role") == ("group" if acts else "img"), "a still picture has no buttons of a form"
    assert root.get("aria-label") == scene.title
    assert [child.tag.split("}")[1] for child in root[:2]] == ["title", "desc"]
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    patterns = {f"url(#{p.get('id')})" for p in root.iter("{http://www.w3.org/2000/svg}pattern")}
    assert patterns == {e.get("fill") for e in root.iter() if e.get("fill", "").startswith("url")}
    # The rule of 0.6 em is what keeps texts apart, so it must not promise too little.
    for text in [t for t in items if isinstance(t, Text) and len(t.text) > 6][:20]:
        assert wide(text.text, text.bold) * text.size / 100 <= 1.12 * (text.box[2] - text.box[0]), text
    for (fill, stroke), theme in itertools.product({(r.fill, r.stroke) for r in rects}, (LIGHT, DARK)):
        # a surface is seen on paper by its fill or by its edge (WCAG 2.1, 1.4.11)
        if fill in FILLS and contrast(theme[fill], theme["paper"]) < 3:
            assert contrast(theme[stroke or "paper"], theme["paper"]) >= 3, (fill, stroke)


def test_on_a_slide_letters_are_larger_and_still_do_not_overlap():
    with scenes.type_scale(scenes.DECK):
        drawn = [
            draw.mesh("pp=2 dp=2 tp=4", 4, "tp"),
            draw.links("pp=4 fsdp=4 tp=8", chip("h100")),
            draw.timeline(pipeline("zb-h1", 4, 4), facts=False),
            draw.memory_bars([("one", {"weights": GIB, "optimizer": 3 * GIB})], 2 * GIB, wide=340),
            draw.expert_loads([[40, 0, 20, 10], [10, 10, 90, 0]], 30),
            draw.timelines({name: pipeline(name, 4, 8) for name in PIPES}, letters=False),
            *(CASES[name]() for name in ("ring", "step memory", "causal orders", "three bubbles", "cache")),
        ]
    for scene in drawn:
        sizes = {text.size for text in flatten(scene.items) if isinstance(text, Text)}
        assert not overlaps(scene) and sizes <= {*scenes.DECK.values(), 16}
        assert min(sizes) == scenes.DECK["small"]


def test_a_bare_drawing_keeps_its_words_and_loses_title_and_small_print():
    whole = CASES["ring"]()
    plain = load("slides/deck.py").bare(whole)
    texts = {text.text for text in flatten(plain.items) if isinstance(text, Text)}
    assert plain.text == whole.text and plain.title == whole.title and plain.height < whole.height
    assert whole.title not in texts and "rank 0" in texts
    assert not any(text.startswith("Filled") for text in texts)


def test_png_has_the_size_of_the_scene_and_is_the_same_each_time(tmp_path, monkeypatch):
    parts = [CASES[name]().items for name in ("layout 3", "arrow scatter", "loss lost")]
    scene = scenes.compose("all", parts, "x")
    scene.save(tmp_path / "x.png")
    saved, shown = Image.open(tmp_path / "x.png"), Image.open(io.BytesIO(scenes.to_png(scene)))
    assert saved.text == {"Software": "llmpar"} and scenes.to_png(scene) == scene._repr_png_()
    assert saved.convert("RGB").tobytes() == shown.convert("RGB").tobytes()
    assert shown.format == "PNG" and shown.size == (2 * scene.width, 2 * scene.height)
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda data, **kwargs: displayed.append(data))
    scenes.show(scene)
    assert list(displayed[0]) == ["image/svg+xml", "image/png", "text/plain"]


def test_a_small_area_keeps_its_colour_in_a_png():
    """A PNG has a palette; a swatch of gradients must not be shown in the colour of tp."""
    swatches = [Rect(30.0 * i, 20 + 10.0 * (i % 3), 8, 8, role) for i, role in enumerate(FILLS)]
    words = [Text(0, 60 + 20 * i, "Many words on a page " * 5, fill="soft") for i in range(20)]
    large = [Rect(0, 480, 900, 30, role) for role in AXES]
    image = Image.open(
        io.BytesIO(scenes.to_png(Scene(900, 520, "", "", (*swatches, *words, *large))))
    ).convert("RGB")
    for rect in swatches:
        seen = image.getpixel((int(2 * rect.x + 8), int(2 * rect.y + 8)))
        told = [int(LIGHT[rect.fill][i : i + 2], 16) for i in (1, 3, 5)]
        assert max(abs(a - b) for a, b in zip(seen, told, strict=True)) <= 3, rect.fill


def linear(color: str) -> list[float]:
    """Red, green and blue of sRGB in proportion to light."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(a: str, b: str) -> float:
    """Contrast ratio (WCAG 2), of relative luminances."""
    low, high = sorted(sum(m * v for m, v in zip(WHITE[1], linear(color), strict=True)) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


STATE = ("weights", "moments", "gradients", "activations", "batch")
COMPUTING = ("matmuls", "attention", "elementwise", "again", "rest")
FILLS = (*AXES, *STATE, *COMPUTING, *"FBW", "links", "network", *OTHERS)


EYES, WHITE = TABLES["eyes"], TABLES["white"]
"""What eyes see of linear red, green and blue: Machado, Oliveira and Fernandes 2009, severity 1."""
INVENTED = re.compile(
    r"""(?<![&\w])#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b|\brgba?\(|color=["'](?!none)[a-z]+["']"""
)


def lab(color: str, eyes: str = "normal") -> list[float]:
    """A colour's place in CIELAB (D65), as such eyes see it."""
    seen = linear(color)
    for matrix in (EYES[eyes], WHITE):
        seen = [max(0.0, sum(m * v for m, v in zip(row, seen, strict=True))) for row in matrix]
    white = [sum(row) for row in WHITE]
    ratios = [v / w for v, w in zip(seen, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in ratios)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("eyes", EYES)
def test_colours_of_one_kind_are_told_apart_by_all_eyes_and_in_grey(eyes):
    """Nor is a colour of what is held or computed taken for an axis'."""
    rows = (AXES, 12, 6), (STATE, 13, 12), ("FBW", 10, 12), (COMPUTING, 5, 5), (OTHERS, 0, 6)
    for roles, least, in_grey in rows:
        places = [lab(LIGHT[role], eyes) for role in roles]
        assert min(math.dist(a, b) for a, b in itertools.combinations(places, 2)) >= least, roles
        lightness = sorted(place[0] for place in places)
        assert eyes != "normal" or min(b - a for a, b in itertools.pairwise(lightness)) >= in_grey, roles
    axes = [lab(LIGHT[axis]) for axis in AXES]
    for roles, least in ((STATE, 30), ((*COMPUTING, *"FBW"), 14)):
        assert min(math.dist(lab(LIGHT[role]), axis) for role in roles for axis in axes) >= least, roles


def test_words_of_charts_have_roles_and_dark_pages_no_others():
    assert scenes.COLOURS["dark"].keys() <= LIGHT.keys() == DARK.keys()
    for word, role in (charts.MEMORY | charts.TIME).items():
        assert role.rstrip("/.") in LIGHT, word
        assert word not in LIGHT or charts.MEMORY.get(word, role) == role, word
    assert scenes.style_of("tp/") == ("paper", "tp-line", "/")
    assert scenes.style_of("weights") == ("weights", "edge", "")


def painted(path) -> list[str]:
    """The colours that a file names itself."""
    return INVENTED.findall(path.read_text())


def test_no_drawing_lesson_slide_or_script_invents_a_colour(tmp_path):
    kinds = ("llmpar/**/*.py", "llmpar/**/*.js", "llmpar/**/*.css", "llmpar/**/*.html", "notebooks/src/*.py")
    kinds += ("slides/src/*.py", "slides/deck.py", "docs/*.py")
    files = [path for kind in kinds for path in ROOT.glob(kind)]
    assert len(files) > 100 and {str(f.relative_to(ROOT)): painted(f) for f in files if painted(f)} == {}
    assert MeshExplorer().document()["theme"] == {"light": LIGHT, "dark": DARK}, "scripts read the same table"
    for path in (ROOT / "llmpar/explore/static").iterdir():
        text = path.read_text()
        named = {*re.findall(r"var\(--([\w-]+)", text)} - {*re.findall(r"--([\w-]+)\s*:", text)}
        assert named <= LIGHT.keys(), path.name
    (tmp_path / "x.py").write_text("axes.plot(x, color='red'); Rect(fill='#fe0'); '#0072b2' and 'item #35'")
    assert painted(tmp_path / "x.py") == ["color='red'", "#fe0", "#0072b2"]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_strokes_can_be_read(theme):
    words = ("ink", "soft", "good", "unsure", "bad", "accent", "measured")
    for role in (*words, *(f"{a}-line" for a in AXES)):
        assert contrast(theme[role], theme["paper"]) >= 4.5, role
        assert contrast(theme[role], theme["cell"]) >= 4.5, role
    assert contrast(theme["edge"], theme["paper"]) >= 3
    shades = [role for role in LIGHT if role[-2:-1] == "-"]
    assert len(shades) == 35
    for fill in ("cell", *FILLS, *shades, "good-ground", "unsure-ground", "bad-ground"):
        assert contrast(theme[scenes.text_color_on(fill)], theme[fill]) >= 4.5, fill
    for tone in ("good", "unsure", "bad"):
        assert contrast(theme[tone], theme[f"{tone}-ground"]) >= 4.5, tone


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_an_arrow_is_seen_on_every_fill(theme):
    """By a halo of paper, 2 pixels wider than itself, at 3 : 1 or more (WCAG 2.1, 1.4.11)."""
    moving = [item for item in flatten(MeshExplorer().scene.items) if isinstance(item, Line) and item.head]
    for item in moving:
        assert item.stroke == "paper" or contrast(theme[item.stroke], theme["paper"]) >= 3
        halos = [x for x in moving if x.points == item.points and x.stroke == "paper"]
        assert halos and (item in halos or halos[0].width >= item.width + 2)
    for frame in {item.frame for item in moving}:
        strokes = [item.stroke for item in moving if item.frame == frame]
        assert strokes == sorted(strokes, key=lambda stroke: stroke != "paper"), "no halo over another's head"
    assert moving


def test_a_rank_fills_as_much_of_the_causal_square_as_it_computes():
    for name, shares in (("in order", (1, 3, 5, 7)), ("zigzag", (4, 4, 4, 4))):
        areas = Counter[str]()
        for line in flatten(draw.causal({name: ORDERS[name]}).items):
            if isinstance(line, Line) and line.fill:
                corners = itertools.pairwise(line.points)
                areas[line.fill] += sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in corners) / 240**2
        assert [areas[tint] for tint in OTHERS[:4]] == pytest.approx([share / 16 for share in shares])
    closed = draw.causal({"in order": ORDERS["in order"]}, step=0, counts=False).text
    assert "rank 3: parts 6 7\n" in closed + "\n" and "squares" not in closed, "a bet's answer is in no words"


def test_the_same_part_has_the_same_colour_in_every_chart():
    """Whatever stands before it: colours follow meaning, not position."""
    looks = []
    for parts in (
        {"weights": 3.0, "optimizer": 2.0},
        {"batch": 1.0, "activations": 1.0, "optimizer": 2.0, "weights": 3.0},
    ):
        bars = [r for r in flatten(draw.memory_bars([("x", parts)]).items) if isinstance(r, Rect) and r.tip]
        looks.append({r.tip.partition(" ")[0]: r.fill for r in bars})
        assert len(set(looks[-1].values())) == len(parts)
    assert looks[0].items() <= looks[1].items()
    seven = dict(zip("abcdefg", (*OTHERS, "fsdp/", "paper/"), strict=True))
    scene = draw.memory_bars([("x", dict.fromkeys(seven, 5.0 * 2**20))], roles=seven)
    rects = [(r, (r.fill, r.stroke * bool(r.hatch))) for r in flatten(scene.items) if isinstance(r, Rect)]
    bars = [look for r, look in rects if r.tip]
    assert len(set(bars)) == 7 and bars == [look for r, look in rects if r.w == 14], "and in the legend"


@pytest.mark.parametrize(
    "name, p, m",
    [("zb-h1", 4, 16), ("interleaved", 8, 16), ("gpipe", 2, 32), ("1f1b", 4, 4), ("1f1b", 4, 24)],
)
def test_a_long_timetable_goes_on_below_and_stays_legible(name, p, m):
    table = pipeline(name, p, m)
    scene = draw.timeline(table)
    assert scene.width <= 1300 and scene.height <= 1300 and overlaps(scene) == []
    cells = [r for r in flatten(scene.items) if isinstance(r, Rect) and r.tip]
    drawn = {}
    for cell in cells:
        drawn[cell.tip] = drawn.get(cell.tip, 0) + cell.w
    assert len(drawn) == sum(map(len, table.schedule.rows)) <= len(cells)
    start_end = {tip: [float(x.split()[0]) for x in tip.partition(": ")[2].split(" to ")] for tip in drawn}
    per = [drawn[tip] / (end - start) for tip, (start, end) in start_end.items()]
    assert max(per) - min(per) < 1e-6, "what a fold cuts in two keeps its length"
    beside = {"it": table, "split": pipeline("zb-h1", p, m)}
    for scene in (draw.timeline(table, half=0.5), draw.timelines(beside, until=9)):
        halves = [x for x in flatten(scene.items) if isinstance(x, Line) and x.fill == "W"]
        wide = [line.box[2] - line.box[0] for line in halves] or [0]
        same = max(wide) - min(wide) < 1e-6 or name == "interleaved"  # a fold cuts a W of it, too
        assert same, "W is half of a whole backward, also of one that is cut"


def buttons(scene) -> list[Rect]:
    return [item for item in flatten(scene.items) if isinstance(item, Rect) and item.act]


def segments(scene, tall) -> list[Rect]:
    return [r for r in flatten(scene.items) if isinstance(r, Rect) and r.tip and r.h == tall]


def test_the_parts_of_a_bar_are_as_long_as_they_are_and_end_at_its_number():
    for name, tall, values, total in (
        ("memory bar", 26, [part.value for part in BYTES], 65.4 * GIB),
        ("time bar", 26, [*SECONDS.values()][:7], 6.5),
    ):
        bar = segments(CASES[name](), tall)
        per = bar[0].w / values[0]
        assert [r.w / per for r in bar[:-1]] == pytest.approx(values), name
        assert sum(r.w for r in bar) / per == pytest.approx(total) and bar[-1].tip.startswith("rest"), name
        ends = list(itertools.accumulate([bar[0].x, *(r.w for r in bar)]))
        assert [r.x for r in bar] == pytest.approx(ends[:-1]), "side by side"
    assert {r.tip for r in buttons(CASES["memory bar"]())} == {"weights: 4.11 GiB, 70.6 G × 4 B / 64"}


def test_waiting_has_the_colour_of_its_axis_wherever_it_is_drawn():
    waits = {"tensor-parallel links": "tp", "sequence links": "sp", "expert links": "ep"}
    waits |= {"pipeline sends": "pp"}
    waits |= dict.fromkeys(("gradients at the end", "weights and gradients on links"), "fsdp")
    for name, axis in waits.items():
        bars = segments(columns.time_bar([Part(name, 1.0)]), 26)
        bars += segments(draw.time_bars([("x", {name: 1.0})]), 28)
        bars += segments(columns.sent_bars([SentBar(axis, "rows", 1.0, 0, 1.0)]), 15)
        assert [bar.fill for bar in bars] == [axis] * 3, name


def test_much_that_is_sent_is_told_and_the_smallest_added_up():
    scene = CASES["sent, much"]()
    bars = segments(scene, 15)
    looks = [("tp", "tp-line"), ("paper", "fsdp-line"), ("fsdp", "fsdp-line"), ("paper", "fsdp-line")]
    assert [(r.fill, r.stroke) for r in bars[:4]] == looks, "what hides is hollow, what waits is filled"
    assert [r.w / bars[0].w * 1.41 for r in bars[:4]] == pytest.approx([1.41, 0.42, 0.19, 0.31])
    assert sum(r.w for r in bars) == pytest.approx(bars[0].w / 1.41 * (1.41 + 0.61 + 0.31 + 5 * 0.3))
    assert "4 more 293 KiB" in [t.text for t in flatten(scene.items) if isinstance(t, Text)]
    long = columns.sent_bars([SentBar("tp", "activations and their gradients " * 3, 5 * GIB, 0.0114, 0.0299)])
    assert any(t.text.endswith("… 5 GiB") for t in flatten(long.items) if isinstance(t, Text))
    assert "not predicted" in columns.sent_bars([SentBar("tp", "rows", 1.0, 0.0, 0.0)]).text


def test_a_map_puts_a_mesh_where_its_numbers_are():
    scene = CASES["map"]()
    dots = {r.tip.partition(":")[0]: r for r in segments(scene, 8)}
    near = [way for way in WAYS if way.bytes <= columns.MAP_CAPACITIES * HERE.bytes]
    assert len(dots) == len(near) + 2 and len(buttons(scene)) == len(near) < len(WAYS)
    assert f"Beyond 105 GiB: {len(WAYS) - len(near)}." in scene.text
    x, y = ({way.mesh: getattr(dots[way.mesh], axis) for way in near} for axis in "xy")
    (edge,) = (line.points[0][0] for line in flatten(scene.items) if isinstance(line, Line) and line.dash)
    for a, b in itertools.pairwise(near):
        ratio = (x[a.mesh] - x[b.mesh]) / math.log(a.bytes / b.bytes)
        assert ratio == pytest.approx((edge - 4 - x[b.mesh]) / math.log(59.3 * GIB / b.bytes))
        assert (y[a.mesh] < y[b.mesh]) == (a.seconds > b.seconds), "slower is higher"
    assert dots[HERE.mesh].fill == "tp" and dots[BEST.mesh].fill == "fsdp"
    rings = [r for r in flatten(scene.items) if isinstance(r, Rect) and r.radius == 7]
    centres = {(round(r.x + 7, 6), round(r.y + 7, 6)) for r in rings}
    assert centres == {(round(dots[w.mesh].x + 4, 6), round(dots[w.mesh].y + 4, 6)) for w in (HERE, BEST)}
    (beyond,) = (r for r in flatten(scene.items) if isinstance(r, Rect) and r.fill == "bad-ground")
    assert beyond.x == edge
    assert all((dots[way.mesh].x + 4 > edge) == (way.bytes > 59.3 * GIB) for way in near)
    last = BEST._replace(seconds=1.08 * 4.29)
    tied = columns.mesh_map([HERE, BEST, last], HERE, BEST, 59.3 * GIB, tie=0.08)
    (band,) = (r for r in flatten(tied.items) if isinstance(r, Rect) and r.fill == "good-ground")
    ys = {r.tip: r.y + 4 for r in segments(tied, 8)}
    assert [band.y, band.y + band.h] == pytest.approx(sorted(ys.values())[1:]), "8 % above the best"


def test_the_ten_fastest_that_fit_are_numbered_and_named_without_overlaps():
    ways = [way._replace(note="does not fit" * (way.bytes > 60 * GIB)) for way in WAYS]
    scene = columns.mesh_map(ways, HERE, BEST, 60 * GIB)
    first = sorted((way for way in [*ways, HERE, BEST] if not way.note), key=lambda way: way.seconds)
    first = [BEST, *(way for way in first if way != BEST)][: columns.MAP_NAMES]
    texts = [t for t in flatten(scene.items) if isinstance(t, Text)]
    assert [t.text for t in texts if ", " in t.text] == [f"{x.mesh}, {time_text(x.seconds)}" for x in first]
    ranks = [t for t in texts if t.text.isdigit()]
    assert [t.text for t in ranks] == [*map(str, range(1, 11))] * 2, "at the dots, and in the list"
    labels = [t.box for t in [*ranks[:10], *(t for t in texts if t.text in ("you", "best"))]]
    for a, b in itertools.combinations(labels, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_a_trace_has_a_bar_for_each_group_and_a_box_for_each_rank():
    """Groups that interleave stand beside one another, over the lanes of their ranks."""
    items = flatten(draw.traced(*TWO_LEVELS).items)
    bars = [r for r in items if isinstance(r, Rect) and r.fill in AXES and not r.radius]
    lanes = sorted(item.y for item in items if isinstance(item, Text) and item.text.startswith("rank "))
    spans = [(r.fill, lanes.index(r.y), lanes.index(r.y + r.h)) for r in bars]
    assert spans == [("tp", 0, 1), ("tp", 2, 3), ("dp", 0, 2), ("dp", 1, 3), ("tp", 0, 1), ("tp", 2, 3)]
    assert bars[2].x + bars[2].w < bars[3].x
    boxes = [r for r in items if isinstance(r, Rect) and r.tip]
    assert [r.tip for r in boxes[:4]] == [f"rank {i}: 8 numbers" for i in range(4)]
    widths = [r.w for r in boxes[::4]]
    assert widths[0] == 2 * widths[1] == 2 * widths[2] == widths[3] == widths[4]
    assert CASES["traced, much"]().width < 760, "it fits below a cell"
