"""Write the lessons as other courses build them: a sphinx-lesson tree (MyST Markdown) and a Carpentries
Workbench tree; and as pages to read, in HTML.

    python notebooks/export.py      writes sphinx, workbench and html into notebooks/_exports

Question, objectives, key points and minutes come from a lesson's header; an exercise becomes a challenge with
its hints, and its solution, with the reason, is folded beneath it. Pictures are copied with their alt text.
A live figure is live there too: a page of its own, which brings its answers along, in a frame; its picture is
beside it for where no frame is shown. Code that only sets up or checks (`plumbing`) is folded everywhere.

Tests check the form of the Workbench tree. Its own builder has not been run on it: the R packages sandpaper,
pegboard and varnish come from the Carpentries' r-universe, and are not in Debian.
"""

from __future__ import annotations

import argparse
import base64
import functools
import html
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import latex2mathml.converter
import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter

from llmpar import exercises
from llmpar.cli.lessons import Lesson, lessons
from llmpar.explore.explorer import by_kind
from llmpar.explore.page import html as page_of

HERE = Path(__file__).resolve().parent
OUT = HERE / "_exports"
TITLE = "LLM parallelism in JAX"
ATTEMPT = re.compile(r'attempt\(\s*"(\d\d\w?\.\w+)"')
FORMULA = re.compile(r"\$\$(.+?)\$\$", re.S)
PLUMBING, PICTURE = "Set-up and checks", "The figure as a picture"
NO_ANSWER = "(It depends on what you found in the lesson.)"


@dataclass(frozen=True)
class System:
    """What differs between the two: how a box is written, where episodes lie, and what stands around them."""

    name: str
    box: Callable[[str, str, str, int], str]
    episodes: str
    names: dict[str, str]
    fold: Callable[[str, str], str]
    files: str


def myst(kind: str, title: str, body: str, depth: int) -> str:
    """A directive of MyST; the outer one has more backticks."""
    fence = "`" * (6 - depth)
    return f"{fence}{{{kind}}}{f' {title}' * bool(title)}\n{body.strip()}\n{fence}\n"


def fenced(kind: str, title: str, body: str, depth: int) -> str:
    """A fenced division of Pandoc, as the Workbench has it."""
    head = f"### {title}\n\n" if title else ""
    colons = ":" * (12 - 3 * depth)
    return f"{colons} {kind}\n\n{head}{body.strip()}\n\n{colons}\n"


SPHINX = System(
    "sphinx",
    myst,
    "content",
    {"challenge": "exercise"},
    lambda title, body: myst("admonition", title, f":class: dropdown\n\n{body}", 1),
    "live/files",
)
WORKBENCH = System(
    "workbench", fenced, "episodes", {}, lambda title, body: fenced("spoiler", title, body, 1), "files"
)
PAGE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock html_head_js -%}
{%- block html_head_js_mathjax -%}{%- endblock html_head_js_mathjax -%}
{%- block html_head_js_mermaidjs -%}{%- endblock html_head_js_mermaidjs -%}
{%- block input -%}
{%- if 'plumbing' in cell.metadata.get('tags', []) -%}
<details><summary>TITLE</summary>{{ super() }}</details>
{%- else -%}{{ super() }}{%- endif -%}
{%- endblock input -%}""".replace("TITLE", PLUMBING)
"""nbconvert's page, with plumbing folded; it fetches no scripts."""


def bullets(lines) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def code_block(language: str, text: str) -> str:
    """Code or output, fenced with more backticks than are in it."""
    return f"```{language}\n{text.rstrip()}\n```\n"


@functools.cache
def small_page(about: str) -> tuple[str, str, int]:
    """A live figure, told as JSON, as a page; its title, and how high a frame shows it."""
    explorer = by_kind(**json.loads(about))
    return page_of(explorer, small=True), explorer.title, round(explorer.scene.height) + 220


def frame(output: dict, folder: Path, name: str) -> str:
    """The frame of a live figure, whose page is written into ``folder``; nothing for other outputs."""
    about = output.get("metadata", {}).get("image/png", {}).get("explorer")
    if about is None:
        return ""
    text, title, high = small_page(json.dumps(about))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.html").write_text(text, encoding="utf-8")
    style = f"width:100%;height:{high}px;border:0;resize:vertical"
    source = f'src="files/{name}.html" title="{html.escape(title)}"'
    return f'<iframe {source} style="{style}" loading="lazy"></iframe>'


def outputs(system: System, cell: dict, folder: Path, stem: str) -> Iterator[str]:
    """What a cell printed and drew; pictures are written into fig/ beside the episode."""
    for i, output in enumerate(cell.get("outputs", [])):
        data = output.get("data", {})
        text = "".join(output.get("text", []) or data.get("text/plain", []))
        if "image/png" in data:
            picture = folder / "fig" / f"{stem}-{i}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(base64.b64decode("".join(data["image/png"])))
            alt = output["metadata"]["image/png"]["alt"].replace("[", "(").replace("]", ")")
            link = f"![{alt}](fig/{picture.name})\n"
            live = frame(output, folder / system.files, picture.stem)
            yield f"{live}\n\n{system.fold(PICTURE, link)}" if live else link
        elif "text/markdown" in data:
            yield "".join(data["text/markdown"]) + "\n"
        elif text.strip():
            yield code_block("output", text)


def plain_links(text: str) -> str:
    """Links between lessons follow the new names; those to other files of this checkout become words."""
    text = re.sub(r"\]\((\d\d\w+)\.ipynb\)", r"](\1.md)", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#|\d\d\w?_)[^)]*\)", r"\1", text)


def challenge(system: System, name: str, source: str) -> str:
    """An exercise, its hints, and its folded solution with the reason."""
    task = exercises.find(name)
    body = code_block("python", source)
    hints = task.hints()
    if hints:
        body += "\n" + system.box("hint", "", bullets(hints), 2)
    told = exercises.spelt_out(task.solution) if task.solution is not None else NO_ANSWER
    told = code_block("python", told) if "\n" in told else told + "\n"
    body += "\n" + system.box("solution", "", f"{told}\n{task.because}", 2)
    return system.box(system.names.get("challenge", "challenge"), f"{name} ({task.level})", body, 1)


def episode(system: System, lesson: Lesson, folder: Path) -> str:
    """One lesson as an episode."""
    cells = json.loads((HERE / lesson.file).read_text(encoding="utf-8"))["cells"]
    head = f"---\ntitle: {json.dumps(lesson.title, ensure_ascii=False)}\nteaching: {lesson.teaching}\n"
    parts = [f"{head}exercises: {lesson.exercises}\n---\n"]
    if system is SPHINX:
        parts.append(f"# {lesson.title}\n")
    parts.append(system.box("questions", "", bullets([lesson.question]), 1))
    parts.append(system.box("objectives", "", bullets(lesson.objectives), 1))
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = source.lstrip().partition("\n")[2] if source.lstrip().startswith("# ") else source
            parts.append(plain_links(text).strip() + "\n")
        elif name := ATTEMPT.search(source):
            parts.append(challenge(system, name[1], source))
        else:
            code = code_block("python", source)
            folded = "plumbing" in cell["metadata"].get("tags", [])
            parts.append(system.fold(PLUMBING, code) if folded else code)
            parts += outputs(system, cell, folder, f"{lesson.number}-{number}")
    parts.append(system.box("keypoints", "", bullets(lesson.keypoints), 1))
    return "\n".join(part for part in parts if part.strip())


def surroundings(system: System, found: list[Lesson]) -> dict[str, str]:
    """The files around the episodes."""
    names = [Path(lesson.file).stem for lesson in found]
    about = (
        "How weights, data and activations of a large language model are cut over devices, and what is sent."
    )
    if system is SPHINX:
        toctree = myst("toctree", "", "\n".join([":maxdepth: 1", "", *names]), 1)
        conf = f'project = "{TITLE}"\nextensions = ["sphinx_lesson"]\nhtml_theme = "sphinx_rtd_theme"\n'
        conf += 'html_extra_path = ["live"]\n'
        needs = myst("prereq", "", "Python, NumPy, and an idea of a gradient.", 1)
        index = f"# {TITLE}\n\n{about}\n\n{needs}\n{toctree}"
        return {"content/conf.py": conf, "content/index.md": index, "requirements.txt": "sphinx-lesson\n"}
    config = {
        "carpentry": "incubator", "title": TITLE, "created": "2025-01-01", "life_cycle": "alpha",
        "license": "CC-BY 4.0", "source": "ADDRESS", "branch": "main", "contact": "ADDRESS",
        "keywords": "jax, parallel training", "episodes": [f"{name}.md" for name in names],
        "learners": ["setup.md"], "instructors": ["instructor-notes.md"],
    }  # fmt: skip
    lines = []
    for key, value in config.items():
        lines += [f"{key}:", *(f"- {v}" for v in value)] if isinstance(value, list) else [f"{key}: '{value}'"]
    setup = "---\ntitle: Setup\n---\n\n```bash\npip install 'llmpar[lab]'\nllmpar doctor\n```\n"
    guide = (HERE.parent / "INSTRUCTOR.md").read_text(encoding="utf-8").partition("\n")[2]
    return {
        "config.yaml": "\n".join(lines) + "\n",
        "index.md": f"---\nsite: sandpaper::sandpaper_site\n---\n\n{about}\n",
        "learners/setup.md": setup,
        "instructors/instructor-notes.md": f"---\ntitle: Instructor notes\n---\n{plain_links(guide)}",
        "LICENSE.md": "---\ntitle: Licenses\n---\n\nTexts: CC BY 4.0. Code: Apache License 2.0.\n",
        "CODE_OF_CONDUCT.md": (HERE.parent / "CODE_OF_CONDUCT.md").read_text(encoding="utf-8"),
    }


def page(exporter: HTMLExporter, file: Path, folder: Path) -> str:
    """Render a lesson. Its formulas become MathML, which a browser draws by itself; until then a word that
    Markdown leaves alone stands for each. The pages of its live figures are written into ``folder``."""
    notebook, formulas = nbformat.read(file, as_version=4), []

    def aside(found: re.Match[str]) -> str:
        formulas.append(latex2mathml.converter.convert(found[1].strip(), display="block"))
        return f"FORMULA{len(formulas) - 1}END"

    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(aside, cell.source)
        for i, output in enumerate(cell.get("outputs", [])):
            if live := frame(output, folder, f"{file.stem.partition('_')[0]}-{number}-{i}"):
                png, alt = output.data["image/png"], html.escape(output.metadata["image/png"]["alt"])
                still = f'<noscript><img src="data:image/png;base64,{png}" alt="{alt}"></noscript>'
                output.data["text/html"] = live + still
    text, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": file.stem}})
    return re.sub(r"FORMULA(\d+)END", lambda word: formulas[int(word[1])], text)


def pages(out: Path, found: list[Lesson]) -> Path:
    """Write each lesson as one HTML page; returns their folder."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"folded.html.j2": PAGE})], template_file="folded.html.j2"
    )
    folder = out / "html"
    folder.mkdir(parents=True, exist_ok=True)
    for one in found:
        text = re.sub(
            r'href="(\d\d\w+)\.ipynb"', r'href="\1.html"', page(exporter, HERE / one.file, folder / "files")
        )
        (folder / f"{Path(one.file).stem}.html").write_text(text, encoding="utf-8")
    return folder


def build(out: Path = OUT) -> list[Path]:
    """Write both trees and the pages; returns their folders."""
    found = lessons(HERE)
    for system in (SPHINX, WORKBENCH):
        folder = out / system.name / system.episodes
        files = {f"{system.episodes}/{Path(one.file).stem}.md": episode(system, one, folder) for one in found}
        for name, text in (surroundings(system, found) | files).items():
            path = out / system.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return [*(out / system.name for system in (SPHINX, WORKBENCH)), pages(out, found)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    print("wrote " + ", ".join(os.path.relpath(path) for path in build(parser.parse_args().out.resolve())))
