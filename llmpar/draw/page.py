"""Write tables and drawings as HTML: a part for a notebook, or a page in one file that asks for nothing."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """.llmpar-page{font:14px/1.5 system-ui,sans-serif;max-width:76rem}
.llmpar-page h1{font-size:1.35rem;line-height:1.3;margin:0 0 .25rem}
.llmpar-page h2{font-size:1rem;margin:1.6rem 0 .3rem}
.llmpar-page p{margin:.2rem 0;max-width:60rem;overflow-wrap:anywhere}
.llmpar-page table{border-collapse:collapse;width:100%;table-layout:fixed;font-variant-numeric:tabular-nums}
.llmpar-page th,.llmpar-page td{text-align:left;vertical-align:top;padding:.4rem .7rem .4rem 0;
border-top:1px solid color-mix(in srgb,currentColor 18%,transparent);background:none}
.llmpar-page th{font-weight:600;font-size:.85em;opacity:.75;border-top:0}
.llmpar-page .number{text-align:right;white-space:nowrap}
.llmpar-page code,.llmpar-page summary{overflow-wrap:anywhere;
font:.92em/1.5 ui-monospace,Menlo,Consolas,monospace}
.llmpar-page summary{cursor:pointer}.llmpar-page summary svg{height:2.2em;width:auto;vertical-align:middle;
margin-right:.5em;border-radius:3px}
.llmpar-page details>svg{margin:.5rem 0;border-radius:6px}
.llmpar-page mark{display:block;color:inherit;padding:.15rem .5rem;border-left:4px solid Highlight;
background:color-mix(in srgb,Highlight 16%,transparent)}
.llmpar-page .scroll{overflow-x:auto;margin:.5rem 0}.llmpar-page .scroll>svg{max-width:none!important;
border-radius:6px}
.llmpar-page tr:has(.line:empty) td{border-top:0;padding-top:0}
.llmpar-page .half{width:50%}.llmpar-page .line{width:17%}.llmpar-page .wide{width:46%}
@media(max-width:700px){.llmpar-page thead{display:none}.llmpar-page tr{display:block;padding:.5rem 0;
border-top:1px solid color-mix(in srgb,currentColor 18%,transparent)}
.llmpar-page td,.llmpar-page .number{display:inline-block;border:0;padding:0 .8rem 0 0;text-align:left}
.llmpar-page td:empty{display:none}.llmpar-page .line{width:auto}
.llmpar-page tr:has(.line:empty){border:0;padding:0}
.llmpar-page td.wide{display:block;width:auto;padding:.2rem 0}
.llmpar-page tr:has(.half){display:grid;grid-template-columns:1fr 1fr}
.llmpar-page td.half,.llmpar-page td.half:empty{display:block;width:auto}}"""


def page_table(titles: Sequence[str], rows: Iterable[Sequence[str]], kinds: Sequence[str]) -> str:
    """Write rows of cells, which are HTML, under titles, if any; ``kinds`` are the classes of the columns."""
    names = "".join(
        f'<th class="{k}">{escape(t)}</th>' for t, k in zip(titles, kinds, strict=False)
    )
    cells = lambda row: (f'<td class="{k}">{x}</td>' for x, k in zip(row, kinds, strict=True))
    body = "".join(f"<tr>{''.join(cells(row))}</tr>" for row in rows)
    return (
        f"<table>{f'<thead><tr>{names}</tr></thead>' * bool(titles)}<tbody>{body}</tbody></table>"
    )


def html_part(title: str, *parts: str) -> str:
    """Return parts of HTML below a title, with their style."""
    words = f"<h1>{escape(title)}</h1>{''.join(parts)}"
    return f'<div class="llmpar-page"><style>{_STYLE}</style>{words}</div>'


def html_page(title: str, part: str) -> str:
    """Return a whole page around a part, light or dark as its reader's."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
    )
    style = "<style>:root{color-scheme:light dark}body{margin:1.2rem}</style>"
    return f"{head}<title>{escape(title)}</title>{style}</head><body>{part}</body></html>\n"
