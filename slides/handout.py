"""Write the sheets for learners: a cheat sheet (notation, what is sent, formulas) and a handout (words,
letters, strategies), each on one page of A4.

    python slides/handout.py    writes slides/_handout/{cheatsheet,handout}.html; with Chromium, PDFs of both

Tables come from docs/words.md, the take-home table from the deck, numbers from `llmpar.predict`.
"""

from __future__ import annotations

import argparse
import html
import importlib.util
import os
import re
import sys
from pathlib import Path

from llmpar import draw
from llmpar.draw.scene import to_svg
from llmpar.plan.mesh_shape import AXES
from llmpar.predict import formulas
from llmpar.predict.hardware import chip

HERE = Path(__file__).resolve().parent
WORDS = HERE.parent / "docs" / "words.md"
OUT = HERE / "_handout"
STYLE = (
    "@page{size:A4;margin:8mm 11mm}*{box-sizing:border-box}"
    "body{font:8.2pt/1.17 Helvetica,Arial,Liberation Sans,DejaVu Sans,sans-serif;"
    "color:#1a1a1a;background:#fff;"
    "max-width:190mm;margin:0 auto}h1{font-size:15pt;margin:0 0 1mm;color:#005a9e}"
    "h2{font-size:10.5pt;margin:1.8mm 0 .8mm;border-bottom:.3mm solid #0072b2}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.3mm 1.5mm;"
    "border-bottom:.15mm solid #bbb}p{margin:.8mm 0}"
    "code{font:7.7pt Liberation Mono,DejaVu Sans Mono,monospace}"
    "svg{display:block}td:has(svg){padding:.3mm 1.5mm}"
    "footer{margin-top:2mm;font-size:8pt;color:#595959}"
)


def load(name: str):
    """Load a file beside this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(text: str) -> str:
    """Markdown of a cell, which here is code, bold or plain; a drawing stays."""
    if text.startswith("<svg"):
        return text
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text.strip()))
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)


def table(lines) -> str:
    """A table of rows of Markdown; the first row is its head."""
    head, *body = lines
    out = "".join(f'<th scope="col">{cell(word)}</th>' for word in head)
    return (
        f"<table><tr>{out}</tr>"
        + "".join(f"<tr>{''.join(f'<td>{cell(word)}</td>' for word in row)}</tr>" for row in body)
        + "</table>"
    )


def from_page(page: Path, first: str) -> list[list[str]]:
    """A page's table whose head begins with ``first``."""
    found = re.search(
        rf"^\| {re.escape(first)}.*\n\|[-|: ]+\n(?:\|.*\n)+", page.read_text(encoding="utf-8"), re.M
    )
    if found is None:
        raise ValueError(f"{page.name} has no table whose head begins with '{first}'")
    lines = [line.strip("|").split("|") for line in found[0].splitlines()]
    return [lines[0], *lines[2:]]


def letters() -> str:
    """The paragraph on letters."""
    found = re.search(r"^Letters mean one thing.*?(?=\n\n)", WORDS.read_text(encoding="utf-8"), re.M | re.S)
    if found is None:
        raise ValueError("words.md has no paragraph that begins with 'Letters mean one thing'")
    return cell(" ".join(found[0].split()))


def sheet(title: str, parts: dict[str, str]) -> str:
    """A page of parts under their headings."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{part}" for name, part in parts.items())
    foot = "<footer>llmpar · texts CC BY 4.0 · made from docs/words.md, the deck and llmpar.predict</footer>"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    # The drawings are light whatever the reader's page is: the sheet is paper.
    main = f'<body data-jp-theme-light="true"><main><h1>{html.escape(title)}</h1>{body}</main>{foot}</body>'
    return f'<!doctype html><html lang="en"><head>{head}</head>{main}</html>\n'


def cheat_sheet() -> str:
    """Notation, collectives, what each strategy sends, memory, time, and the numbers to know."""
    sent = [["collective", "before, after", "each of N devices sends, of V bytes", "8 devices, 8 MB"]]
    share = {"all-gather": "V (N − 1)/N", "reduce-scatter": "V (N − 1)/N", "all-reduce": "2 V (N − 1)/N",
             "all-to-all": "V (N − 1)/N", "permute": "V"}  # fmt: skip
    icon = lambda kind: to_svg(draw.before_after((kind,), icon=True))
    sent += [
        [kind, icon(kind), form, f"{formulas.sent_bytes(kind, 8, 8):g} MB"] for kind, form in share.items()
    ]
    h100 = chip("h100")
    threshold = formulas.dp_min_tokens(h100.flops_per_s, h100.link_bytes_per_s)
    numbers = [
        ["what", "how much"],
        ["training state, mixed precision and Adam", "16 bytes per parameter: 2 + 2 + 12"],
        ["the same under ZeRO 1, 2, 3 over N", "4 + 12/N, 2 + 14/N, 16/N"],
        ["FLOPs per parameter and token", "6: 2 forward, 4 backward"],
        [
            "gradients hide above C/β tokens per GPU (FLOP/s over bytes/s)",
            f"{round(threshold, -2):,.0f} in a node of H100s",
        ],
        [
            "idle in a pipeline of p stages with u microbatches, GPipe and 1F1B",
            "(p − 1)/(u + p − 1) of the total, (p − 1)/u of the ideal",
        ],
        ["keys and values per token, of k heads of width h", "2 · layers · k · h · bytes"],
        [
            "a message's time, of α seconds to start and β bytes/s",
            "α · starts + bytes/β, on the slowest link crossed",
        ],
    ]
    arrows = from_page(WORDS, "in the layout before")
    axes = [["axis", "what it is"], *([f"`{name}`", meaning] for name, meaning in AXES.items())]
    deck = load("deck")
    strategies = [["strategy", "cuts", "each device sends", "good while"]]
    strategies += [[name, *row] for name, row in deck.TAKE_HOME.items()]
    said = cell(
        "`b/dp,fsdp s/sp d +tp`: dim b cut by dp and fsdp, s by sp, d whole, an unfinished sum over tp."
    )
    return sheet("LLM parallelism: cheat sheet", {
        "A layout": f"<p>{said}</p>", "Arrow: what moves": table(arrows),
        "Axes, slow links first": table(axes),
        "Collectives": table(sent), "Strategies": f"{table(strategies)}<p>{deck.LETTERS}</p>",
        "Numbers to know": table(numbers),
    })  # fmt: skip


def handout() -> str:
    """Words, letters, each strategy as arrows, and the commands."""
    commands = [
        ["command", "what it does"],
        ["`llmpar lab`", "your own copies of the lessons; `llmpar progress` shows what is answered"],
        ['`llmpar inspect --mesh "dp=2 fsdp=2 tp=2"`', "predicted beside compiled: bytes, memory, FLOPs"],
        ["`llmpar plan --devices 64 --model llama3-70b`", "which mesh, and why not another"],
        ["`llmpar schedule zb-h1 --stages 4 --microbatches 8`", "a pipeline's timetable, bubble and memory"],
        ['`llmpar train --mesh "dp=2 fsdp=2 tp=2"`', "train, on 8 simulated devices or on accelerators"],
        ['`llmpar launch slurm --nodes 2 -- train --mesh "dp=2 fsdp=8"`', "the job file of a cluster"],
    ]
    return sheet("LLM parallelism: words and arrows", {
        "Words": table(from_page(WORDS, "word")), "Letters": f"<p>{letters()}</p>",
        "Strategies as arrows": table(from_page(WORDS, "strategy")), "Commands": table(commands),
    })  # fmt: skip


SHEETS = {"cheatsheet": cheat_sheet, "handout": handout}


def build(out: Path = OUT) -> list[Path]:
    """Write the sheets into a folder; returns what was written. A sheet that needs two pages is refused."""
    builder, made = load("build"), list[Path]()
    out.mkdir(parents=True, exist_ok=True)
    browser = builder.find_browser()
    for name, make in SHEETS.items():
        page = out / f"{name}.html"
        page.write_text(make(), encoding="utf-8")
        made.append(page)
        if browser is None:
            continue
        pdf = page.with_suffix(".pdf")
        builder.browse(browser, page, "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
        if (pages := builder.count_pages(pdf)) != 1:
            raise ValueError(f"{name} takes {pages} pages; it must be one: shorten it")
        made.append(pdf)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    try:
        print(
            "wrote " + ", ".join(os.path.relpath(path) for path in build(parser.parse_args().out.resolve()))
        )
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
