"""The text of a compiled program: what it sends, line by line. It is pasted into a page, and stays there."""

import contextlib
from html import escape

from llmpar.draw.scene import Scene
from llmpar.explore.answers import offer
from llmpar.explore.explorer import Explorer
from llmpar.explore.words import html_table, tagged
from llmpar.inspect.pins import TITLES, words_of
from llmpar.inspect.sent import fitting_meshes, look_at_text

SAMPLE = """HloModule jit_layer, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16,512], up: f32[512,256], down: f32[256,512]) -> f32[16,512] {
  %x = f32[16,512] parameter(0)
  %up = f32[512,256] parameter(1)
  %h = f32[16,256] dot(%x, %up), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %down = f32[256,512] parameter(2)
  %y = f32[16,512] dot(%h, %down), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all = f32[16,512] all-reduce(%y), replica_groups=[4,2]<=[8], to_apply=%add, metadata={source_file="my/model.py" source_line=13}
}
"""  # noqa: E501
"""A program to begin with: a layer under tensor parallelism."""


class HloExplorer(Explorer):
    """What a compiled program sends, as `llmpar.look` reads its ``text``, on a ``mesh`` of any names."""

    title, kind = "What does this compiled program send?", "hlo"
    start = {"mesh": "X=4 Y=2", "text": SAMPLE}
    controls = [
        {"name": "mesh", "kind": "text", "label": "its mesh, as X=4 Y=2"},
        {"name": "text", "kind": "lines", "rows": 12, "own": True}
        | {
            "label": "HLO text, as jax.jit(f).lower(…).compile().as_text() has it: paste it, or drop a file"
        },
    ]
    areas = [
        ["table", "Line by line", "below"],
        ["picture", "What each line sends", "middle"],
        ["words", "As llmpar.look prints it", "below"],
    ]

    def draw(self, state: dict) -> Scene:
        return look_at_text(state["text"], state["mesh"]).picture()

    def answer(self, state: dict) -> dict:
        reply = super().answer(state)
        if reply["refusal"]:
            with contextlib.suppress(ValueError):
                fits = fitting_meshes(state["text"])
                reply["refusal"]["steps"] += [offer(f"it fits {x}", "use it", mesh=x) for x in fits]
            return reply
        seen = look_at_text(state["text"], state["mesh"])
        rows = "".join(f"<tr>{tagged('td', map(escape, row))}</tr>" for row in words_of(seen.rows))
        head, _, rest = str(seen).partition("\n")
        reply["verdict"] = {
            "tone": "good",
            "head": head.rstrip(":"),
            "rest": "",
            "line": "",
            "steps": [],
        }
        reply["panels"] |= {"table": {"html": html_table(TITLES, rows)}}
        reply["panels"] |= {"words": {"html": f"<pre>{escape(rest)}</pre>"}}
        return reply | {"numbers": seen.document(), "says": str(seen)}
