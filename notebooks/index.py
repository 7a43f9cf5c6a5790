"""Write the index: every lesson with its question, minutes and prerequisites, the decks and the
gallery, on one page.

    python notebooks/index.py      writes notebooks/_index/index.html

What it says of a lesson is in the lesson's header; `llmpar lab` makes its start page of the same. The page
fetches nothing, and links to files of this checkout. Decks, handout and gallery are linked where they have
been made.
"""

from __future__ import annotations

import argparse
import html
import os
from pathlib import Path

from llmpar.cli.lessons import lessons

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "notebooks" / "_index"
MADE = {
    "slides/_build/index.html": ("the whole deck", "make slides"),
    "slides/_build/short.html": ("the short deck, one hour", "make slides"),
    "slides/_handout/cheatsheet.html": ("the cheat sheet", "make handout"),
    "slides/_handout/handout.html": ("the handout", "make handout"),
    "slides/_gallery/index.html": ("every drawing and explorer", "make gallery"),
}
"""Pages that another target makes."""
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:17px/1.5 DejaVu Sans,Verdana,sans-serif;max-width:1080px;margin:24px auto;padding:0 16px}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:6px 10px;"
    "border-bottom:1px solid #8888}td.n,th.n{text-align:right}"
    "@media (prefers-color-scheme:dark){body{background:#16191d;color:#ececec}a{color:#5aa5f0}}"
)


def rows(lines, numeric=()) -> str:
    """Rows of a table; the first line is its head."""
    out = []
    for i, line in enumerate(lines):
        tag = 'th scope="col"' if i == 0 else "td"
        cells = (
            f"<{tag}{' class=n' if k in numeric else ''}>{cell}</{tag[:2]}>" for k, cell in enumerate(line)
        )
        out.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(out)}</table>"


def link(target: str, words: str, out: Path) -> str:
    """A link to a file of this checkout, relative to the page."""
    return f'<a href="{html.escape(os.path.relpath(ROOT / target, out))}">{html.escape(words)}</a>'


def page(out: Path) -> str:
    """Write the page as it will lie in ``out``."""
    table: list[tuple[str, ...]] = [("lesson", "its question", "minutes", "with exercises", "after")]
    for lesson in lessons(ROOT / "notebooks"):
        name = link(f"notebooks/{lesson.file}", lesson.title, out)
        told = (
            html.escape(lesson.question),
            str(lesson.teaching),
            str(lesson.minutes),
            ", ".join(lesson.needs),
        )
        table.append((name, *told))
    made = [
        link(target, words, out) if (ROOT / target).is_file() else f"{words}: <code>{command}</code>"
        for target, (words, command) in MADE.items()
    ]
    papers = {
        "docs/words.md": "words, letters, layouts",
        "README.md": "README: what it is, commands",
        "INSTRUCTOR.md": "for the teacher: plans by the minute",
    }
    body = [
        "<h1>llmpar: learn LLM parallelism in JAX</h1>",
        "<p><code>llmpar lab</code> opens your own copies. Eight simulated devices are in your laptop.</p>",
        f"<h2>Lessons</h2>{rows(table, numeric=(2, 3))}",
        f"<h2>Decks, sheets and pictures</h2><ul>{''.join(f'<li>{item}</li>' for item in made)}</ul>",
        f"<h2>More</h2><ul>{''.join(f'<li>{link(a, b, out)}</li>' for a, b in papers.items())}</ul>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>llmpar</title><style>{STYLE}</style>'
    )
    return (
        "<!doctype html><html"
        f' lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>\n'
    )


def build(out: Path = OUT) -> Path:
    """Write the index into a folder; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(page(out), encoding="utf-8")
    return out / "index.html"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    print(f"wrote {os.path.relpath(build(parser.parse_args().out.resolve()))}")
