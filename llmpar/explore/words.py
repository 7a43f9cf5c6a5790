"""The mesh explorer's texts: a number explained, a word, meshes that are left out, published runs."""

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from llmpar.draw.scene import attribute, size_text, time_text
from llmpar.explore.look import View
from llmpar.explore.page import WORDS
from llmpar.planner import planner
from llmpar.planner.terms import Term, terms
from llmpar.predict.digits import banded, digits_of, rounded

_UNITS = {"B": size_text, "s": time_text, "1/s": lambda x: f"{rounded(x):,.0f} a second"}
_UNITS["1"] = lambda x: f"{100 * rounded(x):.0f} %"
_MOST_TERMS = 5
STEP = ("total", "a step", "MFU", "tokens per second")
"""The numbers of the verdict."""


def estimated(seen: View) -> contextlib.AbstractContextManager:
    """Write times and rates with the digits that their error leaves them."""
    return digits_of(seen.question.time_error)


def act(**patch: Any) -> str:
    """Return the fields that a click sets, as JSON."""
    return json.dumps(patch)


def button(text: str, **patch: Any) -> str:
    """Return a button of a table."""
    return f'<button type="button" data-set={attribute(act(**patch))}>{escape(text)}</button>'


def tagged(tag: str, texts: Iterable[str]) -> str:
    """Return each text in an element of its own."""
    return "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def table_row(name: str, cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"<tr><th scope='row'>{name}</th>{tagged('td', cells)}</tr>"


def html_table(head: Iterable[str], rows: str) -> str:
    """Return a table of rows below the names of its columns."""
    columns = "".join(f"<th scope='col'>{word}</th>" for word in head)
    return f"<table><thead><tr>{columns}</tr></thead>{rows}</table>"


def signed_terms(row: dict[str, Any]) -> str:
    """Return why two plans differ (`planner.versus`): signed terms that add up to the difference."""
    most = max(map(abs, row["terms"].values()))
    per, unit = (1, "s") if most >= 2 else (1000, "ms")
    digits = 0 if per * most >= 10 else 1
    whole, *shown = (
        round(per * s, digits)
        for s in (row["difference_s"], *list(row["terms"].values())[:_MOST_TERMS])
    )
    named = [*zip(row["terms"], shown, strict=False), ("the rest", whole - sum(shown))]
    signed = lambda value: f"{value:+,.{digits}f}".replace("-", "−")
    terms = (
        tagged("span", [f"{signed(s)} {escape(name)}"]) for name, s in named if round(s, digits)
    )
    total = f"<b>You take {signed(whole)} {unit}</b>"
    return f"<p>{escape(row['says'])}.</p><p class='sum'>{total} = {' '.join(terms)}</p>"


@functools.cache
def glossary() -> dict[str, str]:
    """Return the words and axes of `docs/words.md`, each with its line."""
    rows = re.findall(
        r"^\| [*`]*(.+?)[*`]* \| (.+) \|$", WORDS.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {word.strip(): line for names, line in rows for word in names.split(",")}


def explanation(seen: View) -> str:
    """Return an explanation of what was clicked: a number with its formula filled in, a glossary word, why
    meshes are left out."""
    clicked = seen.state["explain"] or "total"
    known = terms(seen.question, seen.one)
    if clicked.startswith("word "):
        word = clicked.removeprefix("word ")
        text = (
            f"<p><b>{escape(word)}</b>: {escape(glossary().get(word, 'not in the glossary'))}</p>"
        )
    elif clicked == "left out":
        reasons, num = (
            Counter(seen.around.refused.values()).most_common(12),
            len(seen.around.meshes),
        )
        rows = tagged("li", (f"{count} of {num}: {escape(why)}" for why, count in reasons))
        text = f"<p><b>Meshes that are left out</b></p><ul>{rows}</ul>"
    else:
        term = next((term for term in known if term.name == clicked), known[0])
        text = _term(term, seen.question.time_error)
    names = [term.name for term in known if term.name in STEP]
    more = [button(name, explain=name) for name in names] + [
        button("meshes left out", explain="left out")
    ]
    return f"{text}<p>{' '.join(more)}</p>"


def _term(term: Term, error: float) -> str:
    value = _UNITS[term.unit](term.value)
    if term.name in STEP[1:]:
        value = banded(value, error)
    name = f"<b>{escape(term.name)}, {value}{' (an estimate)' * term.estimate}</b>"
    where = [
        f"arrow <code>{escape(term.arrow)}</code>" if term.arrow else "",
        f"in <code>{escape(term.line)}</code>" if term.line else "",
        f"lesson {escape(term.lesson)}" if term.lesson else "",
        escape(term.paper) if term.paper else "",
    ]
    rows = [
        f"{_UNITS[term.unit](value)}: {escape(f'{what}: {filled}')}"
        for what, filled, value in term.summands
    ]
    shown = f"<ul>{tagged('li', rows)}</ul>" if rows else tagged("p", [f"= {escape(term.filled)}"])
    shown += tagged("p", [f"all of it × {term.times}"] * bool(term.times))
    return (
        tagged("p", [f"{name}: {escape(term.formula)}"])
        + shown
        + tagged("p", [" · ".join(filter(None, where))])
    )


def published_runs(seen: View) -> str:
    """Return a table of published runs, each a click away: what was measured, and what is predicted once that
    is known."""
    rows = []
    for run, q, mesh in planner.published_runs():
        start = {
            "model": q.model,
            "chip": run["chip"],
            "devices": q.num_devices,
            "agreed": q.num_devices,
            "config": "",
            "batch_size": q.batch_size,
            "seq_len": q.seq_len,
            "mesh": str(mesh),
            "fields": dict.fromkeys(seen.state["fields"]),  # back to the planner
        }
        one, published, ours = (
            seen.around.runs.get(run["name"]),
            f"{run.get('mfu', 0):.0%} MFU",
            "…",
        )
        if "step_s" in run:
            published = time_text(run["step_s"])
        if one:
            ours = (
                f"{one.time.mfu(q.run(one.plan)):.0%} MFU"
                if "mfu" in run
                else time_text(one.time.step_s)
            )
        cells = published, ours, run["source"], run.get("differs", "")
        rows.append(table_row(button(run["name"], **start), map(escape, cells)))
    head = "run", "published", "ours", "source", "why ours differs"
    return html_table(head, f"<tbody>{''.join(rows)}</tbody>")
