"""A page of an explorer: one HTML file that works without a kernel, a server and a network.

A whole page brings Python along (`static/python.json`, which ``make runtime`` makes of Pyodide) and the
part of this package that needs nothing else. A worker wakes it behind the first picture, and it answers
every state as a kernel would. A small page, for mail, knows the answers one click away from where it starts.
"""

import ast
import base64
import gzip
import html as markup
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent.parent
WORDS = next(
    path
    for path in (_PACKAGE / "docs/words.md", _PACKAGE.parent / "docs/words.md")
    if path.is_file()
)
"""The glossary: a wheel has it inside the package."""
STATIC = Path(__file__).parent / "static"
MODULE, STYLE = STATIC / "explorer.js", STATIC / "explorer.css"
RUNTIME = STATIC / "python.json"
_FOLDERS = (
    "draw/* explore/* plan/* predict/* planner/* kernels/__init__.py kernels/tiles.py"
    " inspect/__init__.py inspect/census.py inspect/hlo.py inspect/moves.py inspect/pins.py"
    " inspect/letters.py inspect/drawn.py inspect/sent.py".split()
)
NEED_JAX = ("widget.py", "aot.py", "targets.py")
EXERCISES = (
    "__init__.py judge.py number_words.py pages.py record.py 01.py 01.md 02.md 08.py 08.md".split()
)
"""Lessons whose exercises a page judges; of lesson 02 those that no device runs."""
STORED_BYTES = 1_300_000
"""Bytes of stored answers in a small page, packed: with them it takes about 2 MB."""


def runtime() -> str:
    """Return Python for the browser, as JSON; nothing where ``make runtime`` has not run."""
    return RUNTIME.read_text(encoding="ascii") if RUNTIME.is_file() else ""


def sources() -> dict[str, str]:
    """Return the files of the package that need neither JAX nor numpy, by their paths.

    Lessons come as they are, because answers show their source; other code comes without its docstrings.
    """
    paths = [
        _PACKAGE / "__init__.py",
        _PACKAGE / "files.py",
        *(path for folder in _FOLDERS for path in sorted(_PACKAGE.glob(folder))),
        *(_PACKAGE / "lessons" / name for name in EXERCISES),
    ]
    files = [
        path
        for path in paths
        if path.suffix in (".py", ".toml", ".md") and path.name not in NEED_JAX
    ]
    named = {path.relative_to(_PACKAGE.parent).as_posix(): path for path in files}
    named["llmpar/docs/words.md"] = WORDS
    texts = {name: path.read_text(encoding="utf-8") for name, path in named.items()}
    for name, text in texts.items():
        if name.endswith(".py") and not name.startswith("llmpar/lessons/"):
            texts[name] = without_docstrings(text)
    return texts


def without_docstrings(source: str) -> str:
    """Return Python code without the text of its docstrings and comments: what runs of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant("")
    return ast.unparse(tree)


def html(explorer: Any, small: bool = False) -> str:
    """Return the page of an `Explorer`; ``small``: without Python.

    Raises ValueError where Python for the browser is missing: what would bring it, and what needs none.
    """
    doc, python, stored = explorer.document(), "" if small else runtime(), list[dict]()
    if small:
        (doc["answer"], *stored), doc["stored"] = nearby(explorer, doc), []
    elif not python:
        raise ValueError(
            "a page that answers by itself needs Python for the browser, which is not installed"
            " here (in the project's sources 'make runtime' brings it, before a wheel is built);"
            " save(…, small=True) needs none"
        )
    whole = doc | {"given": explorer.given, "live": not small}
    parts = {
        "title": markup.escape(explorer.title),
        "text": markup.escape(explorer.scene.text),
        "light": doc["theme"]["light"]["paper"],
        "dark": doc["theme"]["dark"]["paper"],
        "style": STYLE.read_text(encoding="utf-8"),
        "doc": as_json(whole),
        "stored": packed(stored) if small else "",
        "module": as_script(MODULE),
        "worker": as_script(STATIC / "worker.js"),
        "sources": "" if small else packed(sources()),
        "python": python or "null",
    }
    template = (STATIC / "saved.html").read_text(encoding="utf-8")
    return re.sub(r"\[\[(\w+)\]\]", lambda match: parts[match[1]], template)


def packed(value: Any) -> str:
    """Return a value as JSON for a page to unpack: gzip'd, in letters."""
    return base64.b64encode(gzip.compress(json.dumps(value).encode(), mtime=0)).decode()


def as_json(doc: Any) -> str:
    """Return a document for a script element, which no text in it can end."""
    return json.dumps(doc).replace("<", "\\u003c")


def as_script(path: Path) -> str:
    """Return JavaScript that stays inside its element of a page."""
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def nearby(explorer: Any, doc: dict) -> list[dict]:
    """Return the answer of the start, with all that a reader would wait for, and those one click away, up to
    `STORED_BYTES`: of what it advises, and alternately of what each panel offers."""
    start, first = doc["state"], doc["answer"]
    while first["more"] and (later := explorer.more(start)):
        first = later
    replies, space = [first, *doc["stored"]], STORED_BYTES
    known = [reply["asked"] for reply in replies]
    for patch in offered(first):
        state = start | patch
        if "fields" in patch:  # one by one, as the browser does it; null gives one back
            both = start["fields"] | patch["fields"]
            state["fields"] = {name: value for name, value in both.items() if value is not None}
        if state not in known:
            known.append(state)
            replies.append(explorer.answer(state))
            space -= len(zlib.compress(json.dumps(replies[-1]).encode()))
            if space < 0:
                return replies[:-1]
    return replies


def offered(answer: dict) -> list[dict]:
    """Return all clicks that an answer offers, as patches of its state."""
    advice = [part["steps"] for part in (answer["refusal"], answer["verdict"]) if part]
    panels = [panel.get("svg", "") + panel.get("html", "") for panel in answer["panels"].values()]
    marks = [re.findall(r"""data-set=("[^"]*"|'[^']*')""", panel) for panel in panels]
    clicks = [[json.loads(markup.unescape(mark[1:-1])) for mark in row] for row in marks]
    mixed = [
        patch
        for patches in itertools.zip_longest(*clicks)
        for patch in patches
        if patch is not None
    ]
    return [step["set"] for steps in advice for step in steps if step["do"] == "apply"] + mixed
