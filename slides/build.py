"""Build the slides: run every `src/*.py` (py:percent text, in order of name) and write one offline reveal.js
deck.

    python slides/build.py            writes slides/_build/index.html, short.html; with Chromium, PDFs of both
    python slides/build.py --short    the short deck alone: one hour

A cell's tags say where it goes: `# %% [markdown] tags=["slide"]` begins a slide; `subslide`, `fragment`,
`notes` (shown to the speaker, key S) and `skip` are the others; a cell without one continues the slide. A
slide says how many `minutes` it takes, and is in the short deck too if it is tagged `short`. The first slide
of a part names its `section`; the slide tagged `agenda` gets the table of sections with their minutes, and
every slide's notes begin with the clock. Of a code cell the output is shown, and its text as well where it is
tagged `code`; with `place="beside"` its figure stands right of the text, with
`place="tall"` it may fill what one line of text leaves. The parts run in one kernel, each in
an empty namespace. Every number and figure is computed here: a deck that prints to stderr, raises, or shows a
figure without words is refused. A figure's words are `alt="…"` beside the tags, or its text/plain, or what
its cell prints (`tidy` in notebooks/build.py).

reveal.js comes from the installed sphinx-revealjs (extra `dev`), formulas become MathML: the deck fetches
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import latex2mathml.converter
import nbformat
from nbclient.exceptions import CellExecutionError
from nbconvert.exporters import SlidesExporter
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
PLACES = ("slide", "subslide", "fragment", "notes", "skip")
ROLES = ("code", "short", "agenda", "divider")
SIZE = (1280, 720)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The page is our own: it needs no sandbox.
BROWSER_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
REVEAL_FILES = ("LICENSE", "dist/reveal.css", "dist/reveal.js", "plugin/notes/notes.js")
# Code first, so that a dollar inside it stays a dollar; then $$display$$ and $inline$.
FORMULA = re.compile(
    r"(?P<code>```.*?```|`[^`]*`)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\\\w])\$(?!\s)(?P<inline>[^$`\n]+?)(?<!\s)\$(?!\d)",
    re.S,
)


def notebook_builder() -> ModuleType:
    """Load notebooks/build.py, which reads and runs py:percent text for the lessons."""
    spec = importlib.util.spec_from_file_location("notebooks_build", HERE.parent / "notebooks" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(sources: Sequence[Path]) -> NotebookNode:
    """Execute the parts of a deck in one kernel, and place their cells on slides."""
    builder = notebook_builder()
    parts = []
    with builder.kernel(sources[0].parent.parent) as execute:
        for source in sources:
            print(f"running {source.name}", flush=True)
            try:
                parts.append(builder.tidy(execute(builder.read_source(source))))
            except CellExecutionError as error:
                raise ValueError(f"{source.name}: {error}") from error
            place(parts[-1], source.name, builder)
    deck = parts[0]
    deck.cells = [cell for part in parts for cell in part.cells]
    return deck


def place(part: NotebookNode, name: str, builder: ModuleType) -> None:
    """Place the cells of one part on slides, as their tags say; refuse a part with a fault."""
    number = 0
    for cell in part.cells:
        tags = cell.metadata.get("tags", [])
        unknown = set(tags) - {*PLACES, *ROLES}
        if unknown:
            known = ", ".join((*PLACES, *ROLES))
            raise ValueError(f"{name}: tag {sorted(unknown)[0]!r} means nothing here; use one of {known}")
        cell.metadata["slideshow"] = {"slide_type": next((tag for tag in tags if tag in PLACES), "-")}
        if cell.cell_type == "code":
            number += 1
            if "code" not in tags:
                cell.metadata["tags"] = [*tags, "remove-input"]
            for fault in builder.cell_faults(cell):
                raise ValueError(f"{name}, code cell {number}: {fault}")


def slides_of(deck: NotebookNode) -> list[list[NotebookNode]]:
    """Group the cells of a deck by slide."""
    slides: list[list[NotebookNode]] = []
    for cell in deck.cells:
        if {"slide", "subslide"} & set(cell.metadata.get("tags", [])):
            slides.append([])
        if slides:
            slides[-1].append(cell)
    return slides


def shorten(deck: NotebookNode) -> NotebookNode:
    """Keep the slides that are tagged `short`."""
    short = nbformat.from_dict(deck)
    kept = [cells for cells in slides_of(short) if "short" in cells[0].metadata.tags]
    short.cells = [cell for cells in kept for cell in cells]
    return short


def clock(minutes: float) -> str:
    """Write minutes as on a clock: 75 is 1:15."""
    return f"{int(minutes // 60)}:{int(minutes % 60):02}"


def minutes_of(slides: list[list[NotebookNode]]) -> tuple[list[float], list[str]]:
    """The minutes of each slide, and the part that it belongs to."""
    spent = [float(cells[0].metadata.get("minutes", 0)) for cells in slides]
    named = (cells[0].metadata.get("section") for cells in slides)
    return spent, list(itertools.accumulate(named, lambda last, name: name or last, initial=""))[1:]


def in_all(spent: Sequence[float], parts: Sequence[str]) -> dict[str, float]:
    """The minutes of each part, in their order."""
    return {part: sum(m for m, its in zip(spent, parts, strict=True) if its == part) for part in parts}


def minutes_of_parts(src: Path = HERE / "src", short: bool = False) -> dict[str, float]:
    """The minutes of each part of the whole deck, or of the short one, from its sources."""
    builder, cells = notebook_builder(), list[NotebookNode]()
    for source in sorted(src.glob("*.py")):
        cells += builder.read_source(source).cells
    slides = slides_of(nbformat.v4.new_notebook(cells=cells))
    spent, parts = minutes_of(slides)
    kept = ["short" in cells[0].metadata.tags or not short for cells in slides]
    return in_all([m * keep for m, keep in zip(spent, kept, strict=True)], parts)


def plan_talk(deck: NotebookNode) -> float:
    """Write the agenda and put the clock, of the part and of the talk, into the notes; return the minutes of
    the talk."""
    slides = slides_of(deck)
    spent, names = minutes_of(slides)
    sections, at = in_all(spent, names), dict.fromkeys(names, 0.0)
    for cells, minutes, name in zip(slides, spent, names, strict=True):
        at[name] += minutes
        for cell in cells:
            if "notes" in cell.metadata.get("tags", []) and sum(spent):
                whole = f"{clock(sum(at.values()))} of {clock(sum(spent))}"
                cell.source = (
                    f"**{minutes:g} min**, until {clock(at[name])} of {clock(sections[name])} in this part,"
                    f" {whole} in all.\n\n{cell.source}"
                )
    parts = [f"{name} | {minutes:.0f} |" for name, minutes in sections.items() if name]
    half = (len(parts) + 1) // 2
    lines = [
        f"| {' '.join(pair)}" for pair in itertools.zip_longest(parts[:half], parts[half:], fillvalue="| |")
    ]
    for cells in slides:
        if "agenda" in cells[0].metadata.get("tags", []):
            head = ["| part | minutes | part | minutes |", "|---|--:|---|--:|"]
            cells[0].source += "\n\n" + "\n".join([*head, *lines])
    return sum(spent)


def set_formulas_aside(deck: NotebookNode) -> dict[str, str]:
    """Replace every formula of the deck by a word that Markdown leaves alone; return the words with their
    MathML."""
    formulas: dict[str, str] = {}

    def aside(match: re.Match[str]) -> str:
        if match["code"]:
            return match["code"]
        word = f"FORMULA{len(formulas)}END"
        formulas[word] = latex2mathml.converter.convert(
            match["block"] or match["inline"], display="block" if match["block"] else "inline"
        )
        return word

    for cell in deck.cells:
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(aside, cell.source)
    return formulas


def to_html(deck: NotebookNode) -> str:
    """Render an executed deck as one page."""
    deck = nbformat.from_dict(deck)
    formulas = set_formulas_aside(deck)
    exporter = SlidesExporter(
        template_name="template",
        extra_template_basedirs=[str(HERE)],
        reveal_url_prefix="assets/reveal",
        reveal_theme="llmpar",
        reveal_width=str(SIZE[0]),
        reveal_height=str(SIZE[1]),
        config={"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {"remove-input"}}},
    )
    page, _ = exporter.from_notebook_node(deck, resources={"metadata": {"name": "llmpar"}})
    return re.sub(r"FORMULA\d+END", lambda match: formulas[match[0]], page)


def copy_assets(out: Path) -> None:
    """Copy reveal.js and the theme beside the deck."""
    spec = importlib.util.find_spec("sphinx_revealjs")
    if spec is None or spec.origin is None:
        raise ValueError("reveal.js was not found; it comes with sphinx-revealjs: pip install 'llmpar[dev]'")
    reveal = Path(spec.origin).parent / "_static" / "revealjs"
    for name in REVEAL_FILES:
        copy = out / "assets" / "reveal" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(reveal / name, copy)
    theme = out / "assets" / "reveal" / "dist" / "theme" / "llmpar.css"
    theme.parent.mkdir(exist_ok=True)
    shutil.copyfile(HERE / "template" / "deck.css", theme)


def find_browser() -> str | None:
    """Find a Chromium on this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browse(browser: str, page: Path, *flags: str, query: str = "") -> str:
    """Open a local page in a headless Chromium with a profile of its own; return what it prints."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            *BROWSER_FLAGS,
            f"--user-data-dir={profile}",
            "--virtual-time-budget=10000",
            *flags,
        ]
        done = subprocess.run(
            [*command, page.as_uri() + query],
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode:
        raise RuntimeError(f"{browser} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def count_pages(pdf: Path) -> int:
    """Count the pages of a PDF that Chromium wrote."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))


def count_slides(page: str) -> int:
    """Count the slides of a rendered deck: in reveal.js, the sections inside sections."""
    return len(re.findall(r"<section\b", page)) - len(re.findall(r"<section\b[^>]*>\s*<section\b", page))


def build(
    src: Path = HERE / "src", out: Path = HERE / "_build", decks: Sequence[str] = ("index", "short")
) -> Path:
    """Run the sources once, write the decks and, where Chromium is found, their PDFs; return the last page's
    path. `index` is the whole deck, `short` what is tagged so."""
    sources = sorted(src.glob("*.py"))
    if not sources:
        raise ValueError(f"there are no slides in {os.path.relpath(src)}: write one as NN_name.py")
    whole = run(sources)
    out.mkdir(parents=True, exist_ok=True)
    copy_assets(out)
    for name in decks:
        deck = shorten(whole) if name == "short" else nbformat.from_dict(whole)
        if not deck.cells:
            continue  # nothing is tagged short
        minutes = plan_talk(deck)
        page = out / f"{name}.html"
        page.write_text(to_html(deck), encoding="utf-8")
        slides = count_slides(page.read_text(encoding="utf-8"))
        print(f"{slides} slides, {minutes:.0f} minutes, in {os.path.relpath(page)}")
        write_pdf(page, slides)
    return out / f"{decks[0]}.html"


def write_pdf(page: Path, slides: int) -> None:
    """Print a deck, index to slides.pdf; refuse it when a slide runs over its page."""
    browser = find_browser()
    if browser is None:
        print("no PDF was written: that takes a Chromium, and none of " + ", ".join(BROWSERS) + " was found")
        return
    pdf = page.with_name("slides.pdf" if page.stem == "index" else f"{page.stem}.pdf")
    browse(browser, page, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", query="?print-pdf")
    pages = count_pages(pdf)
    if pages != slides:
        drawn = browse(browser, page, "--dump-dom", query="?print-pdf")
        heights = [int(height) for height in re.findall(r'class="pdf-page[^>]*?height: (\d+)', drawn)]
        over = ", ".join(str(number) for number, height in enumerate(heights, 1) if height > min(heights))
        raise ValueError(
            f"{slides} slides became {pages} PDF pages: too much on slide {over or 'unknown'}; shorten it"
        )
    print(f"{pages} pages in {os.path.relpath(pdf)}")


def main(argv: list[str] | None = None) -> int:
    """Build the decks; 0 when they are written, 1 with one sentence otherwise."""
    parser = argparse.ArgumentParser(description="Build the slides from slides/src into slides/_build.")
    parser.add_argument("--short", action="store_true", help="the short deck alone")
    try:
        build(decks=("short",) if parser.parse_args(argv).short else ("index", "short"))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
