"""Draw everything that the package can draw, on one page: every drawing, every explorer, light or dark as the
reader is.

    python slides/gallery.py             writes slides/_gallery/index.html and a page for each explorer
    python slides/gallery.py --pictures  writes the pictures of the README and its pages, docs/pictures

Where Chromium and playwright are found, each explorer is also photographed at 1400 pixels, light and dark,
after a few clicks. The page fetches nothing.
"""

from __future__ import annotations

import argparse
import html
import json
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from llmpar import draw
from llmpar.config import preset
from llmpar.draw.scene import Scene, to_svg
from llmpar.explore import answers, look
from llmpar.explore.explorer import MeshExplorer
from llmpar.explore.page import runtime
from llmpar.explore.small import RoutingExplorer, TimelineExplorer
from llmpar.notation import parse_layout
from llmpar.plan import Plan
from llmpar.predict import layer, traffic, workload
from llmpar.predict.hardware import chip
from llmpar.schedules import make
from llmpar.timetable import timetable

OUT = Path(__file__).resolve().parent / "_gallery"
PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:14px/1.5 DejaVu Sans,Verdana,sans-serif;max-width:1280px;margin:20px auto;padding:0 16px}"
    "img{max-width:100%}section{margin:0 0 40px}pre{white-space:pre-wrap}"
)
EXPLORERS = {
    "mesh-explorer": lambda: MeshExplorer(model="llama3-70b", batch_size=64, mesh="fsdp=8 tp=8"),
    "timeline-explorer": TimelineExplorer,
    "routing-explorer": RoutingExplorer,
}


def sent_in_a_step() -> dict[str, Scene]:
    """What one step of a small Llama sends, as predicted, by collective and by arrow; what was compiled is
    for `llmpar inspect`."""
    plan = Plan("dp=2 fsdp=2 tp=2", tp_sequence=True)
    kinds, arrows = [], []
    for (axes, kind), found in traffic.step_traffic(plan.resolve(preset("tiny")), 16, 64).items():
        row = {"axis": axes, "kind": kind, "direction": ""}  # a prediction counts both passes together
        kinds.append(row | {"count": found.count, "predicted_bytes": found.bytes_sent})
        for text, (count, sent) in found.arrows.items():
            arrows.append(row | {"arrow": text, "count": count, "bytes_sent": sent})
    kinds.sort(key=lambda row: -row["predicted_bytes"])
    return {"collectives": draw.collectives(kinds), "arrows_sent": draw.arrows_sent(arrows)}


def of_a_layer() -> dict[str, Scene]:
    """Who holds what of a weight, and a layer in time."""
    config, h100 = preset("llama3-8b"), chip("h100")
    plan = Plan("fsdp=4 tp=4", dtype="bfloat16")
    segments = layer.forward(workload.of_plan(config, plan, h100, 16, 4096))
    made, name = plan.resolve(config, None), "blocks.ffn.gate"
    (weight, life), sizes = made.lives[name], made.mesh.sizes
    held = draw.tensor_grid(life.stored, weight.shape, sizes, h100.node_size, 5, name=name)
    return {"tensor_grid": held, "layer_lanes": draw.layer_lanes(segments, config.num_layers)}


def drawings() -> dict[str, Scene]:
    """One example of every drawing, from the package's own numbers."""
    step = answers.answer(look.START)["numbers"]
    zeros = [look.look(look.START | {"fields": {"zero": zero}}) for zero in range(4)]
    held = [(f"ZeRO {zero}", seen.one.parts) for zero, seen in enumerate(zeros)]
    compiled = json.loads((Path(__file__).parent / "recorded" / "llama3-8b_h100.json").read_text())
    return {
        "mesh": draw.mesh("dp=2 fsdp=2 tp=4", devices_per_host=8, highlight_axis="fsdp"),
        **of_a_layer(),
        "ring": draw.ring("all-gather", [0, 1, 2, 3], "fsdp"),
        "links": draw.links("dp=2 fsdp=4 tp=4", chip("h100")),
        "wired": draw.wired([["0123", "4567"]] * 2, ["wire"]),
        "growing": draw.growing(["dp=2", "dp=2 fsdp=2", "dp=2 fsdp=2 tp=2"], "An axis at a time"),
        "table": draw.table(
            [
                (f"a sum is {how}", [("refused", "good-ground"), ("wrong", "bad-ground")])
                for how in ("forgotten", "doubled")
            ]
        ),
        "layout": draw.layout("b/dp,fsdp s d/tp", (32, 16, 8), "dp=2 fsdp=2 tp=2", itemsize=4),
        "arrow": draw.arrow("b s d +tp -> b s/tp d", (8, 16, 32), "tp=4", 2),
        **sent_in_a_step(),
        "program": draw.program(
            ["y = x @ w", "y.sum()"],
            {
                "before": {0: [("all-gather", 6 << 20)], 1: [("all-reduce", 6)]},
                "after": {1: [("all-reduce", 6)]},
            },
            "A program, line by line",
        ),
        "matmul": draw.matmul("s d × d m/tp = s m/tp × m/tp d = s d +tp -> s d"),
        "causal": draw.causal({"in order": [[0, 1], [2, 3]], "zigzag": [[0, 3], [1, 2]]}),
        "before_after": draw.before_after(),
        "ring_sums": draw.ring_sums(),
        "traced": draw.traced(
            {"dp": 2, "tp": 2},
            [(8,)],
            [("reduce-scatter", ["tp"], 1, 16, (4,)), ("all-reduce", ["dp"], 1, 16, (4,))],
            (4,),
        ),
        "cube": draw.cube("dp=2 fsdp=2 tp=2", 8, ("dp", "fsdp"), 5, lit=True),
        "ring_steps": draw.ring_steps([(i, (i + 1) % 4) for i in range(4)]),
        "dispatch": draw.dispatch(
            [[(0, 1), (0, 2)], [(1, 2), (2, 0)], [(0, 1), (1, 2)]], 2, weights=(0.7, 0.3)
        ),
        "expert_loads": draw.expert_loads([[40, 0, 20, 10], [10, 10, 90, 0]], 30),
        "step_memory": draw.step_memory(
            {"selective": [{"weights": 4e9, "activations": x} for x in (0, 2.4e10, 0)]}, [("", 2)], 6e10
        ),
        "timeline": draw.timeline(timetable(make("zb-h1", 4, 16))),
        "passes": draw.passes("Who wrote Faust ?".split(), "Goethe , in 1808".split()),
        "slots": draw.slots({"batch by batch": [("slot 0", "AAA//D"), ("slot 1", "BBBBBE")]}, "Slots"),
        "cache": draw.cache(
            {
                "dp=4": (parse_layout("b/dp t k"), {"dp": 4}),
                "tp=4, of them 2 copies": (parse_layout("b t k/tp,kv"), {"tp": 2, "kv": 2}),
                "sp=4": (parse_layout("b t/sp k"), {"sp": 4}),
            }
        ),
        "replicas": draw.replicas(),
        "messages": draw.messages(
            [("by weight", [2**16] * 2 + [2**18] * 7), ("in buckets", [2**20, 917_504])]
        ),
        "zero_strips": draw.zero_strips(),
        "gather_use_forget": draw.gather_use_forget(),
        "timelines": draw.timelines(
            {name: timetable(make(name, 4, 8)) for name in ("1f1b", "zb-h1", "zb-v")}
        ),
        "bubbles": draw.bubbles(timetable(make("zb-h2", 4, 6))),
        "overlap": draw.overlap([3e-3] * 5, [1e-3] * 5, [f"layer {i}" for i in range(5)]),
        "two_lanes": draw.two_lanes(compiled["turns"], f"One turn of each loop on {compiled['target']}"),
        "memory_bars": draw.memory_bars(held, zeros[0].question.capacity_bytes),
        "time_bars": draw.time_bars([("a step", step["terms"])]),
        "curves": draw.curves(
            [
                ("measured", [1.22, 1.64, None, 1.79, 1.86], "measured", "o", False),
                ("model", [1.16, 1.45, 1.59, 1.66, 1.69], "ink", "s", True),
            ],
            [8, 16, 32, 64, 128],
            "GPUs",
            "seconds a step",
            marks=((0.5, "beyond the node"),),
        ),
        "loss_curve": draw.loss_curve([5.5 * 0.97**i + 1 for i in range(60)], [2.0] * 60),
        "explorer without a browser": MeshExplorer(mesh="fsdp=8").scene,
    }


def photograph(folder: Path, **options) -> list[Path]:
    """Screenshots of the explorers' pages, light and dark; none without Chromium and playwright. What is not
    the whole page is an option of playwright's."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        return []
    out = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
            for name in EXPLORERS:
                if not (saved := folder / f"{name}.html").is_file():
                    continue
                page.goto(saved.as_uri())
                page.wait_for_selector(".lpx svg")
                out.append(folder / f"{name}-{scheme}.png")
                page.screenshot(path=out[-1], **(options or {"full_page": True}))
        browser.close()
    return out


def timetable_picture() -> Scene:
    """The pipeline of the README: four stages, eight microbatches."""
    return draw.timeline(timetable(make("zb-h1", 4, 8)))


def pictures(folder: Path = PICTURES) -> list[Path]:
    """Write the pictures of the README and its pages: the explorer's first screen, with its words, and a
    timetable."""
    explorer, made = EXPLORERS["mesh-explorer"](), [folder / "timetable.svg", folder / "explorer.png"]
    folder.mkdir(parents=True, exist_ok=True)
    made[0].write_text(to_svg(timetable_picture()), encoding="utf-8")
    with tempfile.TemporaryDirectory() as there:
        explorer.save(Path(there) / "mesh-explorer.html", small=True)
        if not photograph(Path(there), clip={"x": 0, "y": 0, "width": 1400, "height": 900}):
            raise ValueError(f"{made[1]} needs Chromium and playwright, and one of them was not found")
        said = PngInfo()
        said.add_itxt("Description", explorer.scene.text)
        with Image.open(Path(there) / "mesh-explorer-light.png") as shot:
            shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
                made[1], optimize=True, pnginfo=said
            )
    return made


def build(folder: Path = OUT) -> Path:
    """Write the gallery into ``folder``; returns its page."""
    folder.mkdir(parents=True, exist_ok=True)
    body = []
    for name, scene in drawings().items():
        scene.save(folder / f"{name.replace(' ', '-')}.png")
        words = f"<details><summary>in words</summary><pre>{html.escape(scene.text)}</pre></details>"
        body.append(f"<section><h2>{html.escape(name)}</h2>{to_svg(scene)}{words}</section>")
    explorers = {name: made() for name, made in EXPLORERS.items()}
    for name, explorer in explorers.items():
        explorer.save(folder / f"{name}.html", small=not runtime())
        explorer.save(folder / f"{name}.png")
    shots = {path.name for path in photograph(folder)}
    for name, explorer in explorers.items():
        picture = f"{name}-light.png" if f"{name}-light.png" in shots else f"{name}.png"
        alt = html.escape(explorer.scene.text.partition("\n")[0], quote=True)
        link = f'<p><a href="{name}.html">Open it</a>; it needs no kernel and no network.</p>'
        body.append(f'<section><h2>{explorer.title}</h2>{link}<img src="{picture}" alt="{alt}"></section>')
    head = f'<meta charset="utf-8"><title>llmpar: gallery</title><style>{STYLE}</style>'
    main = f"<main><h1>Gallery</h1>{''.join(body)}</main>"
    text = f'<!doctype html><html lang="en"><head>{head}</head><body>{main}</body></html>'
    (folder / "index.html").write_text(text, encoding="utf-8")
    return folder / "index.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pictures", action="store_true")
    asked = parser.parse_args()
    print("wrote", *(pictures() if asked.pictures else [build(asked.out)]))
