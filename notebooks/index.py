"""Write the index: every lesson with its first picture, question, minutes and prerequisites, three paths
through them, the decks and the sheets, on one page.

    python notebooks/index.py      writes notebooks/_index/index.html, and the sheets and thumbnails beside it

What it says of a lesson is in the lesson's header; `llmpar lab` makes its start page of the same. The page
fetches nothing, and links to files of this checkout. Decks and gallery are linked where they have been made.
"""

from __future__ import annotations

import argparse
import base64
import functools
import html
import importlib.util
import io
import os
from pathlib import Path

from PIL import Image

from llmpar.cli.lessons import Lesson, lessons, notebook

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "notebooks" / "_index"
MADE = {
    "slides/_build/index.html": ("the whole deck", "make slides"),
    "slides/_build/short.html": ("the short deck, one hour", "make slides"),
    "slides/_gallery/index.html": ("every drawing and explorer", "make gallery"),
}
"""Pages that another target makes."""
SHEETS = {"cheatsheet": "the cheat sheet, one page", "handout": "words and arrows, one page"}
PATHS = {
    "I have one hour": (("00", "01"), "Who holds what, and why one GPU is not enough."),
    "I train on 8 GPUs": (
        ("00", "01", "02", "03", "04", "05"),
        "One node: replicas, sharded state, and matmuls that are cut.",
    ),
    "I write JAX": (("00", "02", "05", "12", "13"), "What your program sends, and who tells of a mistake."),
}
"""Who comes: which lessons, in which order, and what for."""
WIDE = 560  # pixels of a thumbnail, twice as many as it is wide
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #565d68; --paper: #fff; --card: #f3f4f6;
  --edge: #dde0e5; --link: #005a9e; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #a8b0ba; --paper: #16191d;
  --card: #23282f; --edge: #3a414b; --link: #5aa5f0; } }
* { box-sizing: border-box; }
body { font: 16px/1.45 system-ui, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1240px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 34px; line-height: 1.15; margin: 0 0 8px; }
h2 { font-size: 22px; margin: 36px 0 12px; }
h3 { font-size: 17px; line-height: 1.25; margin: 0 0 6px; }
p { margin: 0 0 8px; }
a { color: var(--link); }
code { background: var(--card); padding: 1px 5px; border-radius: 4px; }
.soft { color: var(--soft); font-size: 14px; margin: 0; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 16px; margin: 0;
  padding: 0; list-style: none; }
.grid.paths { grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; overflow: hidden;
  display: flex; flex-direction: column; }
.card img { width: 100%; height: 158px; object-fit: contain; background: #fff; padding: 8px; }
.card > div { padding: 12px 14px 14px; display: flex; flex-direction: column; flex: 1; }
.card .soft { margin-top: auto; padding-top: 8px; }
.card a { text-decoration: none; } .card a:hover, .card a:focus { text-decoration: underline; }
.path a { display: inline-block; padding: 4px 10px; margin: 6px 0 0; border-radius: 6px;
  border: 1px solid var(--edge); background: var(--paper); font-weight: 600; }
"""


def link(target: str, words: str, out: Path) -> str:
    """A link to a file of this checkout, relative to the page."""
    return f'<a href="{html.escape(os.path.relpath(ROOT / target, out))}">{html.escape(words)}</a>'


@functools.cache
def first_picture(lesson: Lesson) -> tuple[Image.Image, str]:
    """The first picture that is stored in a lesson, as a thumbnail (of a tall one the top), and its words."""
    for cell in notebook(ROOT / "notebooks" / lesson.file)["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                stored = io.BytesIO(base64.b64decode("".join(output["data"]["image/png"])))
                picture = Image.open(stored).convert("RGB")
                picture = picture.crop((0, 0, picture.width, min(picture.height, 62 * picture.width // 100)))
                high = max(1, round(picture.height * WIDE / picture.width))
                alt = output["metadata"]["image/png"]["alt"]
                return picture.resize((WIDE, high), Image.Resampling.LANCZOS), alt[:160]
    raise ValueError(f"{lesson.file} has no picture; build it: make notebooks")


def card(lesson: Lesson, out: Path) -> str:
    """A lesson: its first picture, its title, its question, and what it takes."""
    alt = html.escape(f"The first picture of lesson {lesson.number}: {first_picture(lesson)[1]}")
    title = link(f"notebooks/{lesson.file}", lesson.title.replace("`", ""), out)
    after = f", after {', '.join(lesson.needs)}" if lesson.needs else ""
    return (
        f'<li class="card"><img src="{lesson.number}.png" alt="{alt}"><div>'
        f"<h3>{title}</h3><p>{html.escape(lesson.question)}</p>"
        f'<p class="soft">{lesson.teaching} minutes, {lesson.minutes} with exercises{after}</p></div></li>'
    )


def path(name: str, known: dict[str, Lesson], out: Path) -> str:
    """A way through the lessons: its lessons in their order, and their minutes."""
    numbers, what = PATHS[name]
    steps = " ".join(link(f"notebooks/{known[number].file}", number, out) for number in numbers)
    minutes = sum(known[number].teaching for number in numbers)
    return (
        f'<li class="card path"><div><h3>{name}</h3><p>{what}</p><p>{steps}</p>'
        f'<p class="soft">{minutes} minutes without exercises</p></div></li>'
    )


def page(out: Path) -> str:
    """Write the page as it will lie in ``out``."""
    known = {lesson.number: lesson for lesson in lessons(ROOT / "notebooks")}
    made = [f'<a href="{name}.html">{words}</a>' for name, words in SHEETS.items()]
    made += [
        link(target, words, out) if (ROOT / target).is_file() else f"{words}: <code>{command}</code>"
        for target, (words, command) in MADE.items()
    ]
    papers = {
        "docs/words.md": "words, letters, layouts",
        "README.md": "README: what it is, commands",
        "INSTRUCTOR.md": "for the teacher: plans by the minute",
    }
    made += [link(target, words, out) for target, words in papers.items()]
    cards = "".join(card(lesson, out) for lesson in known.values())
    paths = "".join(path(name, known, out) for name in PATHS)
    body = [
        "<h1>Learn LLM parallelism in JAX</h1>",
        "<p>Predict, run, read the compiled program, draw, check. Eight simulated devices are in your laptop:"
        " <code>llmpar lab</code> opens your own copies of these lessons.</p>",
        f'<h2>Where to begin</h2><ul class="grid paths">{paths}</ul>',
        f'<h2>Lessons</h2><ul class="grid">{cards}</ul>',
        f"<h2>Sheets, decks and pages</h2><ul>{''.join(f'<li>{item}</li>' for item in made)}</ul>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>llmpar: lessons</title><style>{STYLE}</style>'
    )
    return (
        "<!doctype html><html"
        f' lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>\n'
    )


def build(out: Path = OUT) -> Path:
    """Write the index into a folder, with the thumbnails and the sheets; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    for lesson in lessons(ROOT / "notebooks"):
        first_picture(lesson)[0].quantize(128).save(out / f"{lesson.number}.png", optimize=True)
    spec = importlib.util.spec_from_file_location("handout", ROOT / "slides" / "handout.py")
    assert spec and spec.loader
    handout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(handout)
    for name in SHEETS:
        (out / f"{name}.html").write_text(handout.SHEETS[name](), encoding="utf-8")
    (out / "index.html").write_text(page(out), encoding="utf-8")
    return out / "index.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    print(f"wrote {os.path.relpath(build(parser.parse_args().out.resolve()))}")
