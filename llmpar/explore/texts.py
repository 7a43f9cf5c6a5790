"""What is pasted into a page: two layouts of an array, with the moves between them; a compiled program."""

import math
import os.path
from html import escape

from llmpar.draw.layouts import resharded
from llmpar.draw.scene import Scene, size_text
from llmpar.explore.answers import offer
from llmpar.explore.explorer import Explorer
from llmpar.explore.words import html_table, table_row, tagged
from llmpar.inspect.moves import (
    MOST_AXES,
    SPELLINGS,
    Hop,
    cheapest_moves,
    read_layout,
    read_mesh,
    spelled,
)
from llmpar.inspect.pins import TITLES, words_of
from llmpar.inspect.sent import look_at_text
from llmpar.plan.layout import LETTERS, Dim, Layout

_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "float64": 8}
_MOST_DEVICES, _MOST_DIMS = 4096, 4
_SCATTERED = (
    " XLA's partitioner writes a reduce-scatter as an all-reduce, which sends twice as much, and a slice;"
    " back ends for GPUs and TPUs can join the two."
)


class SpecsExplorer(Explorer):
    """Who holds what of an array in two layouts, and what moves between them. ``before`` and ``after`` are
    texts in the spelling of JAX, of torch's DTensor, or ours.

    >>> SpecsExplorer(mesh="X=4 Y=2", shape="8, 16", before="P('X', None)", after="P(None, 'Y')")
    """

    title, kind = "Who holds what, and what moves?", "specs"
    sentence = "On mesh {mesh} an array of {shape} {dtype}\ngoes from {before} to {after}"
    start = {
        "mesh": "X=4 Y=2",
        "shape": "8, 16",
        "dtype": "float32",
        "before": "P('X', None)",
        "after": "P(None, 'Y')",
    }
    controls = [
        {"name": "mesh", "kind": "text", "label": "mesh: each axis with its size"},
        {"name": "shape", "kind": "text", "label": "shape of the whole array"},
        {"name": "dtype", "kind": "choice", "label": "dtype", "options": [*_BYTES]},
        {"name": "before", "kind": "text", "label": f"layout before: {SPELLINGS}"},
        {"name": "after", "kind": "text", "label": "layout after, in any of the spellings"},
    ]
    areas = [
        ["picture", "Who holds what", "middle"],
        ["spellings", "In each spelling", "below"],
        ["code", "In JAX, on explicit axes", "below"],
    ]

    def read(self, state: dict) -> tuple[dict[str, int], tuple[int, ...], list[Layout]]:
        """Return the axes of the mesh, the shape, and the two layouts."""
        sizes = read_mesh(state["mesh"])
        words = state["shape"].strip("()[] ,").split(",")
        words = [word.strip() for word in words if word.strip()]
        shape = tuple(int(word) for word in words if word.isdecimal() and len(word) < 13)
        if len(shape) != len(words) or 0 in shape or len(shape) > _MOST_DIMS:
            raise ValueError(
                f"shape '{state['shape']:.60}' is not read; write up to {_MOST_DIMS} whole numbers, as 8, 16"
            )
        long = sum(n > 1 for n in sizes.values())
        n = math.prod(sizes.values())
        if long > MOST_AXES or n > _MOST_DEVICES:
            raise ValueError(
                f"mesh {sizes} has {n:,} devices on {long} axes longer than 1; at most {_MOST_DEVICES:,} on"
                f" {MOST_AXES} are drawn"
            )
        layouts = [read_layout(state[when], shape, sizes) for when in ("before", "after")]
        if new := [a for a in layouts[1].sums if a not in layouts[0].sums]:
            raise ValueError(
                f"'{state['after']}' is an unfinished sum over {', '.join(new)}, and '{state['before']}' is"
                " none: only computing starts a sum, a matmul over a dim that is cut"
            )
        return sizes, shape, layouts

    def hops(self, state: dict, plain: bool = False) -> tuple[Hop, ...]:
        """Return the cheapest moves; ``plain``: those that gather all that is cut otherwise after, at which
        slices follow that send nothing."""
        sizes, shape, layouts = self.read(state)
        live = {a: n for a, n in sizes.items() if n > 1}
        axes_of = lambda one: (*(dim.axes for dim in one.dims), one.sums)
        before, after = (
            [tuple(a for a in axes if a in live) for axes in axes_of(one)] for one in layouts
        )
        kept = [tuple(os.path.commonprefix(pair)) for pair in zip(before, after, strict=True)]
        goal = [*kept[:-1], after[-1]] if plain else after
        return cheapest_moves(
            tuple(before), tuple(goal), shape, _BYTES[state["dtype"]], tuple(live.items())
        )

    def draw(self, state: dict) -> Scene:
        (sizes, shape, layouts), hops = self.read(state), self.hops(state)
        steps = [(_words(hop), hop.axes[0], hop.bytes_sent) for hop in hops]
        route = [layouts[0], *map(_layout, hops)]
        return resharded(route, steps, shape, sizes, _BYTES[state["dtype"]])

    def completed(self, state: dict, reply: dict) -> dict:
        (sizes, shape, layouts), hops = self.read(state), self.hops(state)
        sent = sum(hop.bytes_sent for hop in hops)
        plain = sum(hop.bytes_sent for hop in self.hops(state, plain=True))
        size = math.prod(shape) * _BYTES[state["dtype"]]
        holds = [size // math.prod(sizes[a] for a in one.axes) for one in layouts]
        head = f"Each device sends {size_text(sent)}" if sent else "Nothing is sent"
        rest = ", then ".join(map(_words, hops)) or "the layouts are the same"
        line = "A device holds {} before and {} after, of {}.".format(
            *map(size_text, (*holds, size))
        )
        line += _SCATTERED * ("reduce-scatter" in rest)
        if plain > sent:
            line += f" Made whole first and sliced then, as XLA often does, it sends {size_text(plain)}."
        back = offer("the other direction", "swap", before=state["after"], after=state["before"])
        words = [spelled(one, sizes) for one in layouts]
        code = lambda name: [f"<code>{escape(one[name])}</code>" for one in words]
        rows = "".join(table_row(name, code(name)) for name in words[0])
        moved = "x"
        for hop in hops:
            moved = f"jax.sharding.reshard({moved}, jax.{spelled(_layout(hop), sizes)['JAX']})"
        reply["panels"] |= {
            "spellings": {"html": html_table(("spelling", "before", "after"), rows)},
            "code": {"html": f"<pre># x is {escape(words[0]['JAX'])}\n{escape(moved)}</pre>"},
        }
        return reply | {
            "verdict": {"tone": "good", "head": f"{head}:", "rest": rest, "line": line}
            | {"steps": [back] * (not layouts[0].sums)},
            "numbers": {"bytes_sent": sent, "gather_first_bytes": plain, "held_bytes": holds},
            "says": f"{head}: {rest}. {line}\n{reply['says']}",
        }


SAMPLE = """HloModule jit_layer, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16,512], up: f32[128,256], down: f32[256,512]) -> f32[16,512] {
  %x = f32[16,512] parameter(0)
  %up = f32[128,256] parameter(1)
  %w = f32[512,256] all-gather(%up), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={source_file="my/model.py" source_line=12}
  %h = f32[16,256] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %down = f32[256,512] parameter(2)
  %y = f32[16,512] dot(%h, %down), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all = f32[16,512] all-reduce(%y), replica_groups=[4,2]<=[8], to_apply=%add, metadata={source_file="my/model.py" source_line=13}
}
"""  # noqa: E501


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
        ["table", "Line by line", "middle"],
        ["picture", "What each line sends", "middle"],
        ["words", "As llmpar.look prints it", "below"],
    ]

    def draw(self, state: dict) -> Scene:
        return look_at_text(state["text"], state["mesh"]).picture()

    def completed(self, state: dict, reply: dict) -> dict:
        seen = look_at_text(state["text"], state["mesh"])
        rows = "".join(f"<tr>{tagged('td', map(escape, row))}</tr>" for row in words_of(seen.rows))
        head, _, rest = str(seen).partition("\n")
        sent = sum(row["bytes_sent"] for row in seen.rows if not row["per_turn"])
        head = head.replace(" sends, per device and run:", f" sends {size_text(sent)} per device")
        reply["panels"] |= {
            "table": {"html": html_table(TITLES, rows)},
            "words": {"html": f"<pre>{escape(rest)}</pre>"},
        }
        return reply | {
            "verdict": {"tone": "good", "head": head, "rest": "", "line": "", "steps": []},
            "numbers": {"bytes_sent": sent, "flops": seen.flops},
            "says": str(seen),
        }


def _layout(hop: Hop) -> Layout:
    return Layout(tuple(map(Dim, LETTERS, hop.cuts[:-1])), hop.cuts[-1])


def _words(hop: Hop) -> str:
    where = "of blocks" if hop.kind == "collective-permute" else f"over {','.join(hop.axes)}"
    return f"{hop.kind} {where}"
