"""`look` on programs of others, against counts by hand: rows are (arrow, collective, axes, count, bytes)."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counted import calls
from jax import P, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from shared import HERE, TABLES

from llmpar.inspect.census import partitioned_hlo
from llmpar.inspect.look import look

DEVICES = np.array(jax.devices())
AUTO, EXPLICIT = (
    Mesh(DEVICES.reshape(4, 2), ("X", "Y"), axis_types=(kind,) * 2) for kind in list(AxisType)[:2]
)
PERMUTED = Mesh(DEVICES[[3, 1, 7, 0, 5, 2, 6, 4]].reshape(4, 2), ("X", "Y"))
RING = [(i, (i + 1) % 4) for i in range(4)]


def on(mesh, shape, *cuts):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*cuts)))


def lie(shape, *cuts):
    return on(AUTO, shape, *cuts)


def manual(f, given, gives, mesh=AUTO):
    return jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)


def held(x, *cuts):
    return lax.with_sharding_constraint(x, NamedSharding(AUTO, P(*cuts)))


X, ROW = lie((16, 4), "X"), ("f32[4]{U:X} -> f32[4]", "all-reduce", "X", 1, 2 * 3 * 16 // 4)
total = lambda x: x.sum(0)


@functools.partial(jax.jit, static_argnames="rows")
def blocks(x, *, rows):
    return x.reshape(rows, -1)[:, :4].sum(0)


def twice(x, n):
    once = lambda i, x: lax.ppermute(x, "X", RING) @ jnp.ones((4, 4))
    return lax.scan(lambda x, _: (lax.fori_loop(0, n[0], once, x), None), x, None, length=5)[0]


def branches(x, n):
    more = lambda x: lax.psum(lax.psum(x, "X"), "Y")
    return lax.cond(n[0] > 0, lambda x: lax.psum(x, "X"), more, x)


COUNT = jnp.array([3])
TWO = P("X"), P()
in_own = jax.jit(total, in_shardings=NamedSharding(AUTO, P("X")))
scattered = lambda x: lax.psum_scatter(x, "X", scatter_dimension=1, tiled=True)
some = lambda x: lax.psum(x, "X", axis_index_groups=[[0, 1], [2, 3]])
counted = lambda x: x + lax.while_loop(lambda i: i < 5, lambda i: i + 1, 0)  # one value is carried
pmapped = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")


def blocks_of(f, gives=TWO[0]):
    return manual(f, P("X"), gives), X


ONE = "f32[4]{U:X} -> f32[4]; all-reduce X 1 24"
PROGRAMS = {  # a program, and its rows: the arrow; the collective, its axes, how often, the bytes
    "plain function": ((total, X), ONE),
    "keyword arguments": ((lambda *, f, args: f.sum(0), {"f": X, "args": 3}), ONE),
    "static of a jitted one": ((blocks, X, {"rows": 16}), ONE),
    "unused argument": ((lambda x, unused: x.sum(0), X, lie((3,))), ONE),
    "shardings of jit's own": ((in_own, jnp.ones((16, 4))), ONE),
    "devices in another order": ((total, on(PERMUTED, (16, 4), "X")), ONE),
    "traced": ((jax.jit(total).trace(X),), ONE),
    "lowered": ((jax.jit(total).lower(X),), ONE),
    "compiled": ((jax.jit(total).lower(X).compile(),), ONE),
    "gather": ((held, lie((16, 4), ("Y", "X"))), "f32[16@(Y,X),4] -> f32[16,4]; all-gather X,Y 1 224"),
    "from dim to dim": (
        (lambda x: held(2 * x, None, None, "X"), lie((16, 32, 8), "X")),
        "f32[16@X,32,8] -> f32[16,32,8@X]; all-to-all X 1 3072",
    ),
    "scattered sum": (
        blocks_of(scattered, P(None, "X")),
        "f32[4,4]{U:X} -> f32[4,4@X]; reduce-scatter X 1 48",
    ),
    "largest": (blocks_of(lambda x: lax.pmax(counted(x), ("X", "Y")), P()), "; all-reduce X,Y 1 112"),
    "part of an axis": (blocks_of(some), "among 2 of X's 4; all-reduce other 1 64"),
    "unknown trip count": ((manual(twice, TWO, P("X")), X, COUNT), "hop along X; collective-permute X 5 320"),
    "branches": (  # the last row is the other branch's
        (manual(branches, TWO, P()), X, COUNT),
        "f32[4,4]{U:X} -> f32[4,4]; all-reduce X 1 96 | f32[4,4]{U:Y} -> f32[4,4]; all-reduce Y 1 64"
        " | f32[4,4]{U:X} -> f32[4,4]; all-reduce X 0 0",
    ),
    "pmap": ((pmapped, jnp.ones((8, 4))), "f32[4]{U:i} -> f32[4]; all-reduce i 1 28"),
    "one device": ((lambda x: x @ x, jnp.ones((8, 8))), ""),
}


@pytest.mark.parametrize("given, rows", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_send_what_is_counted_by_hand(given, rows):
    keywords = given[-1] if len(given) == 2 and type(given[-1]) is dict else {}
    static = {"rows": 16} if given[0] is blocks else {}
    found = look(*given[: 1 if keywords else 2 if static else None], **keywords, **static)
    expected = [row.split("; ") for row in rows.split(" | ") if row]
    assert [[arrow, " ".join(map(str, row))] for arrow, *row in sends(found)] == expected
    text = str(found)
    assert all(f"{row['bytes_sent']:,} B" in text for row in found.rows)
    assert all(re.match(r"tests/test_look.py:\d+$|argument x$", row["source"]) for row in found.rows), text
    assert (found._repr_html_().count("<svg") > 1) == bool(rows) and len(text.split("\n")[0]) < 90
    assert json.loads(json.dumps(found.document()))["mesh"] == found.mesh


def sends(found):
    return [
        (r["arrow"], r["collective"], ",".join(r["axes"]), r["count"], r["bytes_sent"]) for r in found.rows
    ]


def test_what_a_device_holds_and_could_hold_less_of():
    found = look(lambda x, w: x @ w, on(AUTO, (64, 32), "Y", "X"), lie((32, 16), "X"))
    assert sends(found) == [("f32[32,16]{U:X} -> f32[32,16]", "all-reduce", "X", 1, 2 * 3 * 4 * 32 * 16 // 4)]
    assert found.flops == 2 * 32 * 8 * 16 and found.memory["argument_bytes"] == 4 * (32 * 8 + 8 * 16)
    assert found.links == dict.fromkeys("XY", "simulated: shared memory")
    rows = [(r["name"], r["bytes"], r["axes"], r["saved"]) for r in found.replicated]
    assert rows == [("out", 2048, ("X",), 1536), ("in [1]", 512, ("Y",), 256)]
    f = lambda s, x: {k: v + x.sum() for k, v in s.items()}
    state = look(f, {c: lie((8,)) for c in "abc"}, lie((4096,)))
    names = {r["name"]: (r["bytes"], r["saved"]) for r in state.replicated}
    expected = {"in [1]": (4 * 4096, 4 * 4096 * 7 // 8), "3 small ones": (96, 84)}
    assert names == expected, "not again as outputs"


def test_a_loop_with_an_unknown_trip_count_is_in_no_sum():
    found = look(*PROGRAMS["unknown trip count"][0])
    (row,) = found.rows
    assert row["per_turn"].startswith("tests/test_look.py:") and row["count"] == 5, "one of each of 5 loops"
    assert "×5 per iteration" in str(found) and f"the loop at {row['per_turn']}" in str(found)
    assert "in all" in str(found) and str(found).split("in all")[1].split()[:2] == ["0", "B"]
    assert found.flops == 5 * 2 * 4 * 4 * 4 and any("FLOPs are of one iteration" in n for n in found.notes)
    rows = look(*PROGRAMS["branches"][0]).rows  # of the branch that sends most, and of the other
    assert all(r["conditional"] for r in rows) and [r["count"] for r in rows] == [1, 1, 0]


def test_types_and_jaxprs_say_where_things_lie():
    """Of explicit axes; a mesh without devices gets simulated ones; of automatic axes a jaxpr is silent."""
    move = lambda x: jax.sharding.reshard(x, P(None, "X"))
    rows = [
        ("f32[8@X,16] -> f32[8,16@X]", "all-to-all", "X", 1, 96),
        ("f32[2,16@Y] -> f32[2,16]", "all-gather", "Y", 1, 64),
    ]
    abstract = AbstractMesh((4, 2), ("X", "Y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(EXPLICIT):
        jaxpr = jax.make_jaxpr(move)(jnp.zeros((8, 16), out_sharding=P("X", "Y")))
        assert sends(look(move, on(EXPLICIT, (8, 16), "X", "Y"))) == rows
    with jax.sharding.use_abstract_mesh(abstract):
        assert sends(look(move, on(abstract, (8, 16), "X", "Y"))) == rows
    assert sends(look(jaxpr)) == rows and "a jaxpr has no shardings" in str(look(jaxpr))
    by_hand = jax.make_jaxpr(manual(lambda x: lax.psum(x, "X"), P("X"), P()))(jnp.ones((16, 4)))
    assert sends(look(by_hand.jaxpr)) == [("f32[4,4]{U:X} -> f32[4,4]", "all-reduce", "X", 1, 96)]


TEXT = partitioned_hlo(jax.jit(total).lower(X))
BIG = on(AbstractMesh((64,), ("X",), axis_types=(AxisType.Explicit,)), (64,), "X")
OF_A, OTHERWISE = on(Mesh(DEVICES, "A"), (16, 4), "A"), on(PERMUTED, (16, 4), "X")
REFUSED = {
    "argument .0. has mesh {'X': 4, 'Y': 2}, argument .1. has mesh {'A': 8}; use one": (jnp.add, X, OF_A),
    "has mesh {'X': 4, 'Y': 2} of other devices": (jnp.add, X, OTHERWISE),
    "mesh {'Y': 2, 'X': 4} is not the program's: groups of the all-reduce at tests/": (TEXT, "Y=2 X=4"),
    "mesh {'X': 4} has 4 devices, and the program has 8": (TEXT, {"X": 4}),
    "a text does not name its mesh, and the program has 8": (TEXT,),
    "no line of it begins with ENTRY": (jax.jit(total).lower(X).as_text(), AUTO),
    "look takes a function .* this is of type int": (3,),
    "a traced program has its arguments": (jax.jit(total).trace(X), X),
    "needs 64 devices, but JAX has 8; llmpar.use_devices.64. simulates": (jax.make_jaxpr(jnp.sin)(BIG),),
}


@pytest.mark.parametrize("says, given", REFUSED.items(), ids=range(len(REFUSED)))
def test_refusals_name_the_mesh_and_what_would_work(says, given):
    with pytest.raises(ValueError, match=says):
        look(*given)


def test_text_is_read_with_the_axes_that_its_reader_names():
    final = jax.jit(total).lower(X).compile().as_text()
    for text, mesh in ((TEXT, AUTO), (TEXT, {"X": 4, "Y": 2}), (final, "X=4, Y=2")):
        assert sends(look(text, mesh)) == [ROW]
    assert "merged" in str(look(final, AUTO)) and "merged" not in str(look(TEXT, AUTO))
    a, b = look(TEXT, "A=2 B=2 Y=2").rows[0]["axes"]  # the same devices, in two axes
    assert (a, b) == ("A", "B")


def test_many_collectives_are_read_one_by_one_with_work_that_grows_as_their_number():
    def step(weights, x):
        def loss(weights):
            y = x
            for up, down in weights:
                y = jnp.tanh(jnp.tanh(y @ up) @ down)
            return (y**2).sum()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    work = []
    for layers in (6, 12):
        weights = [(lie((8, 16), None, "Y"), lie((16, 8), "Y")) for _ in range(layers)]
        text = partitioned_hlo(jax.jit(step).lower(weights, lie((32, 8), "X")))
        work.append(calls(lambda text=text: look(text, AUTO)))
    assert work[1] < 2.2 * work[0]
    found = look(text, AUTO)
    # a layer: two gradients over X, one sum over Y each way; backward the first layer's input needs none
    assert sum(row["count"] for row in found.rows) == layers * 4 - 1
    assert found.flops == layers * 3 * 2 * 2 * 8 * 8 * 8 - 2 * 8 * 8 * 8


def test_pairs_that_no_data_orders_are_named():
    both = lambda x, y: (lax.psum(x, "X"), lax.psum(y, "Y"))
    found = look(manual(both, (P("X"), P("Y")), P()), X, lie((16, 4), "Y"))
    ((a, b),) = found.unordered
    assert {a.split()[-1], b.split()[-1]} == {"X", "Y"}
    assert f"no data dependency orders {a} and {b}" in str(found)
    assert not look(manual(lambda x: lax.psum(lax.psum(x, "X"), "Y"), P("X"), P()), X).unordered


def test_the_command_looks_at_what_a_function_makes_and_at_text(tmp_path, monkeypatch, call, document):
    monkeypatch.chdir(HERE / "fixtures" / "mine")
    for name in ("text.hlo", "drawn.svg"):
        monkeypatch.setenv(name.partition(".")[0].upper(), str(tmp_path / name))
    named = ["--dims", "x = b d; params['up'] = d m; params['down'] = m d"]
    more = ["--program", "train:look_at", "--svg", str(tmp_path / "drawn.svg"), *named]
    found = document("inspect", *more)
    assert {row["letters"] for row in found["rows"][:2]} == {"d m +data -> d m", "m d +data -> m d"}
    assert found["mesh"] == {"data": 4, "model": 2}
    assert found["rows"][0]["bytes_sent"] == 3145728
    assert "mine/train.py" in (tmp_path / "drawn.svg").read_text()
    (tmp_path / "text.hlo").write_text(TEXT)
    status, out, _ = call("inspect", "--hlo", str(tmp_path / "text.hlo"), "--mesh", "X=4,Y=2")
    assert status == 0 and "all-reduce X" in out
    for line, says in TABLES["inspect_refuses"]:
        status, out, err = call("inspect", *line.replace("TEXT", str(tmp_path / "text.hlo")).split())
        assert (status, out) == (1, "") and says in err, line


def test_a_helper_that_jax_keeps_names_the_lines_of_each_program():
    """What takes a loop's turns out of an array has the lines of the loop that was lowered first."""
    turns = lambda x: lax.scan(lambda c, x: (c + x, None), jnp.zeros(4), x)[0]
    first = lambda x: turns(x) + 1
    loop = lambda x: lax.scan(lambda c, x: (c + x, None), jnp.zeros(4), x)[0]
    found = [look(f, X) for f in (first, loop, loop)]
    sources = [{row["source"] for row in one.rows} for one in found]
    assert sources == [{known(turns)}, {known(loop)}, {known(loop)}]
    assert not any("may stand for" in note for one in found for note in one.notes)
    two = look(lambda x: loop(x) + turns(2 * x), X).notes  # which of them, no text shows
    both = itertools.permutations(map(known, (loop, turns)))
    assert any(f"{a} may stand for {b}" in str(two) for a, b in both)


def known(f):
    return f"tests/test_look.py:{f.__code__.co_firstlineno}"


STATE = {"w": on(EXPLICIT, (8, 8)), "n": on(EXPLICIT, (4,))}
CUT = lambda w: jax.sharding.reshard(w, P("X", "Y"))
RETURNED = {  # what is returned in another layout than its argument has
    "of a tuple": ((lambda p, m: (CUT(p) - m, m), STATE["w"], on(EXPLICIT, (8, 8), "X", "Y")), ["out [0]"]),
    "of a state": ((lambda s, x: ({**s, "w": CUT(s["w"])}, x.sum()), STATE, STATE["w"]), ["out [0].w"]),
    "the state alone": ((lambda s: {**s, "w": CUT(s["w"])}, STATE), ["out w"]),
    "as it was": ((lambda s: {k: 2 * v for k, v in s.items()}, STATE), []),
    "no state": ((lambda x: CUT(x), STATE["w"]), []),
    "many": (
        (lambda s: {k: CUT(v) for k, v in s.items()}, dict.fromkeys("abcdefghij", STATE["w"])),
        ["out"] * 8,
    ),
}


@pytest.mark.parametrize("given, names", RETURNED.values(), ids=RETURNED)
def test_a_state_that_is_returned_in_another_layout_is_noted(given, names):
    with jax.set_mesh(EXPLICIT):
        notes = [note for note in look(*given).notes if "another layout" in note or "is returned as" in note]
    assert len(notes) == len(names) + (len(names) == 8)
    for name, note in zip(names, notes, strict=False):
        assert note.startswith(f"{name} ") and "is f32[8,8]: passed in again" in note
        assert "is returned as f32[8@X,8@Y]" in note
    assert len(names) < 8 or "2 more results" in notes[-1]


def summed(w, x):
    return lax.psum(jnp.tanh(x @ w).sum(), "X")


def gathered(x):
    return lax.scan(lambda c, x: (c + lax.psum(x, "X"), None), jnp.zeros(4), x)[0]


VARIES = {  # what nothing makes equal along X, though out_specs say so
    "its gradient": ((manual(jax.grad(summed), (P(), P("X")), P()), lie((4,)), X), "X"),
    "the sum": ((manual(summed, (P(), P("X")), P()), lie((4,)), X), ""),
    "sums in a loop": ((manual(gathered, P("X"), P()), X), ""),
    "a turn of a loop": (
        (manual(lambda x: lax.fori_loop(0, 2, lambda i, c: c + x.sum(), 0.0), P("X"), P()), X),
        "X",
    ),
    "a branch": ((manual(branches, (P("X"), P()), P()), X, COUNT), ""),
    "its place": ((manual(lambda x: jnp.where(lax.axis_index("Y") > 0, x, 2 * x), P(), P()), lie((4,))), "Y"),
    "jitted": ((manual(jax.jit(lambda x: x.sum()), P(("X", "Y")), P()), X), "X,Y"),
    "blocks": ((manual(lambda x: 2 * x, P("X"), P("X")), X), ""),
}


@pytest.mark.parametrize("given, axes", VARIES.values(), ids=VARIES)
def test_what_check_vma_would_refuse_is_noted(given, axes):
    notes = [note for note in look(*given).notes if "check_vma" in note]
    assert len(notes) == bool(axes)
    assert all(f"is equal on all devices along {axes}, as out_specs say" in note for note in notes)


def test_what_a_backend_lacks_is_said():
    sizes = [jnp.zeros(4, jnp.int32)] * 4
    ragged = lambda x: lax.ragged_all_to_all(x[:, 0], jnp.zeros(4), *sizes, axis_name="X")
    for f, says in (
        (ragged, "ragged-all-to-all exists"),
        (lambda x: lax.pbroadcast(x, "X", 0), "pbroadcast exists"),
    ):
        with pytest.raises(Exception) as raised:
            look(manual(f, P("X"), P("X")), X)
        assert any(f"llmpar: {says}, but not for" in note for note in raised.value.__notes__)


def test_a_token_holds_nothing_and_look_is_not_for_the_inside_of_a_program():
    found = look(lambda token, x: (token, x + 1), jax.lax.create_token(), jnp.ones(4))
    assert not found.rows and found.memory["argument_bytes"] == 16
    with pytest.raises(ValueError, match="call it outside"):
        jax.jit(lambda x: look(jnp.sin, x))(1.0)


def test_a_program_that_jax_refuses_carries_the_missing_arrow():
    mesh = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), pytest.raises(Exception, match="[Cc]ontracting") as raised:
        look(lambda x: x @ x.T, jax.device_put(jnp.ones((8, 8)), P(None, "Y")))
    assert any("llmpar: " in note and "all-reduce over Y" in note for note in raised.value.__notes__)


SIZES = {"b": 24, "s": 40, "d": 56, "n": 8, "h": 88, "m": 104, "v": 136, "l": 2}
WHERE = {
    "table": ("v d", "Y", "X"),
    "q": ("l d n h", None, "X", "Y"),
    "o": ("l n h d", None, "Y", None, "X"),
    "up": ("l d m", None, "X", "Y"),
    "down": ("l m d", None, "Y", "X"),
}


def decoder(weights, tokens):
    def layer(x, w):
        q = jnp.einsum("bsd,dnh->bsnh", x, w["q"])
        scores = jax.nn.softmax(jnp.einsum("bsnh,btnh->bnst", q, q))
        x += jnp.einsum("bnst,btnh,nhd->bsd", scores, q, w["o"])
        return x + jax.nn.gelu((x / (1 + (x**2).mean(-1, keepdims=True))) @ w["up"]) @ w["down"], None

    table = weights.pop("table")
    return (lax.scan(layer, table[tokens], weights)[0] @ table.T).mean()


def test_moves_are_in_the_letters_of_the_arguments_only_where_those_are_certain():
    """Each letter has a size of its own, so that a type says which dims it has."""
    weights = {k: lie(tuple(SIZES[x] for x in dims.split()), *cut) for k, (dims, *cut) in WHERE.items()}
    tokens = jax.ShapeDtypeStruct((24, 40), jnp.int32, sharding=NamedSharding(AUTO, P("X")))
    dims = {"weights": {k: letters for k, (letters, *_) in WHERE.items()}, "tokens": "b s"}
    found = look(jax.grad(decoder), weights, tokens, dims=dims)
    lettered = [row for row in found.rows if row["letters"]]
    assert len(lettered) > 6 and len(lettered) < len(found.rows)
    assert {"n b s h +X -> n b s h", "b s d +Y -> b s d"} <= {row["letters"] for row in lettered}
    for row in lettered:
        one, other = row["letters"].split(" -> ")
        shape = re.findall(r"(\d+)[^,]*", row["arrow"].split("[")[1].split("]")[0])
        names = [word[0] for word in one.split() if word[0] != "+"]
        whole = [SIZES[x] / int(n) for x, n in zip(names, shape, strict=True)]
        assert all(n in (1, 2, 4, 8) for n in whole) and names == [w[0] for w in other.split()], row
        assert row["letters"] in str(found)
    found.sends("b s d +Y -> b s d", "Y").forbids("b s/X d -> b s d")
    read = found.schedule  # of the same program: its two loops, and what is alive beside what is reserved
    assert [span["name"] for span in read["spans"]].count("loop ×2") == 2
    assert abs(read["peak"]["bytes"] / found.memory["peak_bytes"] - 1) < 0.1
    assert read["argument_bytes"] == found.memory["argument_bytes"]
    page = found._repr_html_() + found._repr_html_()  # two cells may show it
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len({*ids}) > 4 and "loop ×2" in page and "than the" in page


def test_a_dim_that_may_be_another_has_no_letter():
    """A square weight is added to its transpose; heads of which each device has one are joined."""
    both = lambda x, w: (lax.psum(x.reshape(4, -1), "Y"), lax.psum(w + w.T, "X"), lax.psum(2 * w, "Y"))
    inner = manual(both, (P(None, "X"), P()), P())
    found = look(inner, lie((4, 4, 32), None, "X"), lie((8, 8)), dims={"x": "b n h", "w": "d m"})
    letters = {row["arrow"]: row["letters"] for row in found.rows}
    assert letters == {
        "f32[4,32]{U:Y} -> f32[4,32]": "",
        "f32[8,8]{U:X} -> f32[8,8]": "",
        "f32[8,8]{U:Y} -> f32[8,8]": "d m +Y -> d m",
    }


@pytest.mark.parametrize("dims, says", TABLES["letters_refused"])
def test_letters_that_do_not_fit_are_refused(dims, says):
    with pytest.raises(ValueError, match=says):
        look(total, X, dims=dims)


def test_a_schedule_is_read_in_its_order_with_what_is_alive_counted_by_hand():
    read = look((HERE / "fixtures" / "hlo" / "scheduled.hlo").read_text(), {"X": 2}).schedule
    steps = [(s["lane"], s["name"], s["begin"], s["end"], s["exposed"], s["count"]) for s in read["steps"]]
    assert steps == [
        ("X", "all-gather", 0, 1, False, 1),  # beside the first matmul
        ("compute", "matmul", 0, 1, False, 1),
        ("compute", "matmul", 1, 2, False, 1),
        ("X", "all-gather", 2, 3, True, 1),
        ("X", "all-reduce", 3, 4, True, 1),
        ("compute", "other operations", 4, 5, False, 2),
    ]
    given, gathered, small = 2 * 4 * 8 * 4, 8 * 8 * 4, 4 * 8 * 4
    alive = [gathered + 4 * 4 * 4, gathered + small, gathered + small, 2 * small, 3 * small]
    assert read["live_bytes"] == [given + n for n in alive] and read["argument_bytes"] == given
    assert read["peak"]["at"] == 1 and read["peak"]["bytes"] == given + gathered + small
    assert not look(TEXT, AUTO).schedule, "a text before it is scheduled has no order"
