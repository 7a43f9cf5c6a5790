"""What the site has beside text: live explorers, drawings, lessons, formulas, and what a shared link shows.

    LLMPAR_REPOSITORY   owner/name on GitHub: each lesson says where Colab and Binder open it
    LLMPAR_SITE         the site's address: a shared link shows the picture, and names the page

Explorers and exercises are live (`llmpar.explore.page`); drawings are made while the site is built.
"""

import ast
import base64
import contextlib
import functools
import gzip
import inspect
import io
import json
import os
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import latex2mathml.converter
from docutils import nodes
from docutils.parsers.rst import directives
from markupsafe import Markup
from sphinx.project import Project
from sphinx.util.docutils import SphinxDirective

import llmpar
from llmpar import draw, lessons
from llmpar.cli.lab import read_lessons
from llmpar.draw.scene import to_svg
from llmpar.explore import explorer, page, small, texts

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY, ADDRESS = os.environ.get("LLMPAR_REPOSITORY", ""), os.environ.get("LLMPAR_SITE", "")
LESSONS = {f"notebooks/{Path(one.file).stem}": one for one in read_lessons(ROOT / "notebooks")}
LIVE = ("01", "02", "08")
"""Lessons whose exercises answer on their page: they ask for thought, and not for a device."""
CHECK = "Check", "Hint", "Solution"
ATTEMPT = re.compile(r'^attempt\(\s*"(\d\d\w?\.\w+)"', re.M)
CONSTANT = re.compile(r"[A-Z]+ = [\d_]+")
"""What a cell with an exercise takes from those before it."""
RUN = {
    "Colab": "https://colab.research.google.com/github/{}/blob/main/notebooks/{}",
    "Binder": "https://mybinder.org/v2/gh/{}/main?urlpath=lab/tree/notebooks/{}",
}
NAMES = {"llmpar": llmpar, "explore": small} | vars(small) | vars(explorer) | vars(texts)
"""What an explorer's expression may name."""
PYTHON, PICTURE, CITATION = "_static/llmpar", "_images/explorer.png", "_downloads/CITATION.cff"
FOLD, FOLDED = re.compile(r'<summary aria-label="Toggle.*?</summary>', re.S), "Set-up and checks"
"""What opens a folded cell; its own has paragraphs where HTML allows none."""
MENDED = {
    '<aside class="sidebar-drawer"': '<aside class="sidebar-drawer" aria-label="Site"',
    '<aside class="toc-drawer': '<aside aria-label="On this page" class="toc-drawer',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    '<div id="search-results"': '<h1>Search</h1><div id="search-results"',
}
"""What checkers find in the theme's HTML: focus for what scrolls, names for landmarks."""
LICENCE = "LICENSE-RUNTIME"
COPIED = {PICTURE: "docs/pictures/explorer.png", CITATION: "CITATION.cff"}
MADE = {"slides": "slides/_build", "sheets": "slides/_handout"}
"""Folders of the site that other targets make."""


class Pages(Project):
    """The repository's files as pages; what lies in docs/site is the root of the site."""

    def path2doc(self, filename):
        found = super().path2doc(filename)
        return found and found.removeprefix("docs/site/")


def up(docname: str) -> str:
    """The way from a page to the root of the site."""
    return "../" * docname.count("/")


def raw(text: str) -> list[nodes.Node]:
    return [nodes.raw("", text, format="html")]


class Explorer(SphinxDirective):
    """A live explorer, from an expression; with ``:url:`` its state is in the page's address."""

    has_content, option_spec = True, {"url": directives.flag}

    def run(self):
        made = eval("\n".join(self.content), NAMES)
        return raw(fragment(made, self.env.docname, "url" in self.options))


class Drawing(SphinxDirective):
    """A drawing, from code that ends with it: what its docstring says first, the picture, code, words."""

    has_content = True

    def run(self):
        code, known = "\n".join(self.content), dict[str, Any]()
        body: list[Any] = ast.parse(code).body
        *before, last = body
        exec(compile(ast.Module(before, []), "gallery", "exec"), known)
        scene = eval(compile(ast.Expression(last.value), "gallery", "eval"), known)
        name = last.value.func.attr
        about = inspect.getdoc(getattr(draw, name)) or ""
        says = " ".join(about.partition("\n\n")[0].split()).replace("`", "")
        own = framed(to_svg(scene).replace('label=""', f'label="{name}"'), scene.width, name)
        words = f'<pre tabindex="0">{escape(scene.text)}</pre>'
        box = nodes.container(classes=["drawing"], ids=[name.replace("_", "-")])
        box += raw(f"<h3>{name.replace('_', ' ').capitalize()}</h3><p>{escape(says)}</p>{own}")
        box += raw("<details><summary>The code</summary>")
        box += nodes.literal_block(code, code, language="python")
        box += raw(f"</details><details><summary>In words</summary>{words}</details>")
        return [box]


class Run(SphinxDirective):
    """Code that a reader can change and run on the page, and what it prints."""

    has_content = True

    def run(self):
        code, said = "\n".join(self.content), io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(code, {})
        return raw(code_cell("code to run", code, [], self.env.docname, ("Run",), said.getvalue()))


class Lessons(SphinxDirective):
    """A card for each lesson: its first picture, its question, and what it takes."""

    def run(self):
        root, cards = up(self.env.docname), []
        for where, one in LESSONS.items():
            image = f'<img src="{root}{card(where)}" alt="" loading="lazy">'
            title = f"<strong>{escape(one.title.replace('`', ''))}</strong>"
            after = f", after {', '.join(one.needs)}" if one.needs else ""
            takes = f"{one.teaching} minutes, {one.minutes} with exercises{after}"
            cards.append(f'<li><a href="{root}{where}.html">{image}{title}</a>')
            cards.append(f"<p>{escape(one.question)}</p><p>{takes}</p></li>")
        return raw(f'<ul class="cards">{"".join(cards)}</ul>')


def on_site(what: str, doc: dict, inner: str, docname: str) -> str:
    """What `site.js` wakes on a page: its document, and what is there before."""
    python = up(docname) + PYTHON
    head = f'<link rel="stylesheet" href="{python}/explorer.css">'
    head += f'<script type="module" src="{python}/site.js"></script>'
    told = f'<script type="application/json">{page.as_json(doc)}</script>'
    return f'{head}<div data-llmpar="{what}">{told}{inner}</div>'


def fragment(made: explorer.Explorer, docname: str, url: bool = False) -> str:
    """An explorer on a page; its words are there until the browser draws it."""
    doc = made.document() | {"given": made.given, "live": True, "address": url}
    return on_site("explorer", doc, f"<pre>{escape(made.scene.text)}</pre>", docname)


def code_cell(name: str, source: str, known: list[str], docname: str, words=CHECK, said: str = "") -> str:
    """A cell on a page, such as an exercise: code, which runs there after the lines that are ``known``, the
    words on its buttons, and what it ``said`` where the site was built."""
    ask = "".join(f'<button type="button" disabled>{word}</button> ' for word in words)
    text = escape(source).replace("\n", "&#10;")  # Markdown would end at an empty line
    code = f'<textarea rows="{source.count(chr(10)) + 2}" spellcheck="false" aria-label="{name}">{text}'
    inner = f'{code}</textarea><p>{ask}</p><pre role="status">{escape(said)}</pre>'
    return on_site("cell", {"name": name, "known": "\n".join(known)}, inner, docname)


def shared_files() -> dict[str, bytes]:
    """What all pages share: scripts, a style, Python in gzip'd parts. ValueError without Python."""
    if not (python := page.runtime()):
        raise ValueError("a site needs Python for the browser; make it with 'make runtime' (npm is needed)")
    parts = json.loads(python) | {"sources": page.packed(page.sources())}
    files = page.MODULE, page.STYLE, page.STATIC / "worker.js", ROOT / "docs/site/site.js", ROOT / LICENCE
    made = {path.name: path.read_bytes() for path in files}
    return made | {f"{name}.bin": base64.b64decode(text) for name, text in parts.items() if name != "licence"}


def outs(cell: dict) -> list[dict]:
    """The outputs of a notebook's cell."""
    return cell.get("outputs", [])


def picture(where: str, cell: int, output: int) -> str:
    """Where a picture of a lesson lies on the site."""
    return f"_images/{where.partition('/')[2]}-{cell}-{output}.png"


def card(where: str) -> str:
    """Where the picture of a lesson's card lies on the site."""
    return f"_images/{where.partition('/')[2]}.png"


def first_picture(where: str) -> bytes:
    """What the card of a lesson shows: the first picture that it stores."""
    cells = json.loads((ROOT / f"{where}.ipynb").read_text(encoding="utf-8"))["cells"]
    stored = (found.get("data", {}) for cell in cells for found in outs(cell))
    return png(next(data for data in stored if "image/png" in data))


def png(data: dict) -> bytes:
    """A picture, of what an output stores."""
    return base64.b64decode("".join(data["image/png"]))


def framed(svg: str, width: float, name: str) -> str:
    """A drawing that a phone scrolls. An id stands once on a page."""
    svg = re.sub(r"llmpar-(lines|dots)", rf"llmpar-\1-{name}", svg)
    return f'<div class="picture" tabindex="0" style="--wide:{width}px">{svg}</div>'


def shown(app, where: str, number: int, cell: dict) -> None:
    """What a cell stored, as the site shows it: a figure with controls is live, any other has its words."""
    for i, output in enumerate(outs(cell)):
        data, about = output.get("data", {}), output.get("metadata", {}).get("image/png", {})
        if "image/png" not in data:
            continue
        if "svg" in about:
            svg = gzip.decompress(base64.b64decode(about["svg"])).decode()
            text = framed(svg, about["width"], f"{number}-{i}")
        elif found := about.get("explorer"):
            text = fragment(explorer.by_kind(**found), where)
        else:
            path = Path(app.outdir) / picture(where, number, i)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(data))
            size = "".join(f' {side}="{round(about[side])}"' for side in ("width", "height") if side in about)
            said = f'alt="{escape(about["alt"])}"{size} loading="lazy"'
            text = f'<img src="{up(where)}{picture(where, number, i)}" {said}>'
        output["data"], output["metadata"] = {"text/html": text}, {}


def lesson(app, docname: str, source: list[str]) -> None:
    """A lesson as a page: plumbing folded, figures and exercises live, and where it can be run."""
    if docname not in LESSONS:
        return
    one, notebook = LESSONS[docname], json.loads(source[0])
    where = [f"{{download}}`the notebook <{one.file}>`"]
    where += [f"[{name}]({link.format(REPOSITORY, one.file)})" for name, link in RUN.items() if REPOSITORY]
    takes = f"{one.teaching} minutes, {one.minutes} with exercises. To run it: `llmpar lab`"
    known = ["N = 8"]  # the devices of every stored output
    for number, cell in enumerate(notebook["cells"]):
        tags, text = cell["metadata"].setdefault("tags", []), "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r"(?<=\]\()([^)#\s]*#[^)]+)(?=\))", lambda link: link[1].lower(), text)
            text = re.sub(r"\A# .*", lambda title: f"{title[0]}\n\n{takes}, or {', or '.join(where)}.", text)
            cell["source"] = text
        elif (name := ATTEMPT.search(text)) and one.number in LIVE and answers_here(name[1]):
            answered = code_cell(name[1], text, known, docname)
            cell |= {"cell_type": "markdown", "source": answered}
            del cell["outputs"], cell["execution_count"]
        else:
            tags += ["hide-input"] * ("plumbing" in tags)
            shown(app, docname, number, cell)
            known += [line for line in text.splitlines() if CONSTANT.fullmatch(line)]
    source[0] = json.dumps(notebook)


def answers_here(name: str) -> bool:
    """Whether an exercise is judged without devices: those of lesson 02 that are stated on its page."""
    return name.partition(".")[0] != "02" or not callable(lessons.find(name).solution)


def plain(app, what, name, obj, options, lines: list[str]) -> None:
    """A docstring is text: sentences, then sections, or what stands in columns, which stays as it is."""
    lines[:] = [re.sub(r"(`+)([^`]+)\1(?=\w)", r"\1\2\1\\ ", line) for line in lines]
    if any(re.match(r"(Attributes|Args|Returns|Raises):$", line) for line in lines):
        return
    says, _, rest = "\n".join(lines).strip().partition("\n\n")
    says = re.sub(r"(?<!`)([*|\\]+|\b_+\B)(?!`)", r"\\\1", " ".join(says.split()))
    lines[:] = [says, "", *(["::", "", *(f"    {line}" for line in rest.splitlines()), ""] if rest else [])]


def mathml(display: str):
    """Formulas as MathML, which a browser draws by itself."""

    def visit(writer, node):
        writer.body.append(latex2mathml.converter.convert(node.astext().strip(), display=display))
        raise nodes.SkipNode

    return visit, None


def head(app, pagename, templatename, context, doctree) -> None:
    """What a search engine and a shared link say of a page: its title, its question or first sentence."""
    link = f'<a href="{up(pagename)}{CITATION}">CITATION.cff</a>'
    context["copyright"] = Markup(f"the llmpar authors. To cite it: {link}")
    first = next(iter(doctree.findall(nodes.paragraph)), None) if doctree else None
    says = LESSONS[pagename].question if pagename in LESSONS else first.astext() if first else "Search llmpar"
    says = escape(" ".join(says.split())[:200])
    title = escape(re.sub(r"<[^>]*>", "", context.get("title") or "llmpar"))
    base = f"{ADDRESS.rstrip('/')}/" if ADDRESS else up(pagename)
    known = {"title": title, "description": says, "type": "article", "image": base + PICTURE}
    known |= {"url": f"{base}{quote(pagename)}.html"} if ADDRESS else {}
    tags = [f'<meta property="og:{name}" content="{text}">' for name, text in known.items()]
    tags.append(f'<meta name="description" content="{says}">')
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
    context["metatags"] = context.get("metatags", "") + "".join(tags)


def finished(app, error) -> None:
    """What is no page: Python for the explorers, the picture of links, the citation, decks and sheets."""
    out = Path(app.outdir)
    if error:
        return
    for path in out.rglob("*.html"):
        text = re.sub(FOLD, f"<summary>{FOLDED}</summary>", path.read_text(encoding="utf-8"))
        path.write_text(
            functools.reduce(lambda text, pair: text.replace(*pair), MENDED.items(), text), encoding="utf-8"
        )
    for name, found in shared_files().items():
        (out / PYTHON / name).parent.mkdir(parents=True, exist_ok=True)
        (out / PYTHON / name).write_bytes(found)
    for name, source in COPIED.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, out / name)
    for where in LESSONS:
        (out / card(where)).write_bytes(first_picture(where))
    for name, folder in MADE.items():
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, out / name, dirs_exist_ok=True)


def setup(app):
    app.connect("builder-inited", lambda app: setattr(app.project, "__class__", Pages))
    for name, made in {"explorer": Explorer, "drawing": Drawing, "run": Run, "lessons": Lessons}.items():
        app.add_directive(name, made)
    app.add_html_math_renderer("mathml", mathml("inline"), mathml("block"))
    app.connect("source-read", lesson)
    app.connect("autodoc-process-docstring", plain, priority=400)
    app.connect("html-page-context", head, priority=900)
    app.connect("build-finished", finished)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
