"""What is pasted into a page: layouts in three spellings with the moves between them, and HLO texts."""

import itertools
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shared import CASES

from llmpar.cli import main
from llmpar.draw.geometry import holders
from llmpar.explore.explorer import MeshExplorer, by_kind
from llmpar.explore.texts import SAMPLE
from llmpar.inspect.look import look
from llmpar.inspect.moves import read_layout, spelled

SPECS, HLO = by_kind("specs"), by_kind("hlo")
SIZES, SHAPE = {"data": 2, "Y": 2, "tp": 2}, (8, 16, 8)
MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(SIZES), axis_types=(AxisType.Explicit,) * 3)


def why(explorer, **changes):
    """Why a state is refused; '' where it is answered."""
    refusal = explorer.answer(dict(explorer.state) | changes)["refusal"]
    return refusal["why"] if refusal else ""


@pytest.mark.parametrize("seed", range(8))
def test_a_layout_is_the_same_in_each_spelling_and_its_owners_are_jaxs(seed):
    rng = random.Random(seed)
    cuts, sums = [[] for _ in SHAPE], []
    for axis in rng.sample([*SIZES], 3):
        rng.choice([*cuts, sums, []]).append(axis)
    spec = P(*(tuple(axes) or None for axes in cuts), unreduced={*sums})
    layout = read_layout(str(spec), SHAPE, SIZES)
    words = spelled(layout, SIZES)
    again = spelled(read_layout(words["JAX"], SHAPE, SIZES), SIZES)
    assert eval(f"jax.{words['JAX']}") == eval(f"jax.{again['JAX']}")
    for text in (words["JAX"], words["llmpar"], words["torch"]):
        if not text.startswith("no words"):
            assert read_layout(text, SHAPE, SIZES) == layout, text
    slices = NamedSharding(MESH, P(*(tuple(axes) or None for axes in cuts))).devices_indices_map(SHAPE)
    blocks = [slices[device] for device in MESH.devices.flat]
    for devices in holders(layout, SIZES).values():
        assert devices == [i for i, block in enumerate(blocks) if block == blocks[devices[0]]]


def test_torchs_placements_cut_in_the_order_of_the_mesh():
    """DTensor cuts a dim by the first axis of the mesh outermost; `Shard(0)` twice is ('data', 'tp')."""
    layout = read_layout("[Shard(0), Replicate(), Shard(dim=0)]", SHAPE, SIZES)
    assert layout.dims[0].axes == ("data", "tp")
    assert spelled(read_layout("b/tp,data s d", SHAPE, SIZES), SIZES)["torch"].startswith("no words")


@pytest.mark.parametrize("after", ["P()", "P('Y', 'tp')", "P(None, ('tp', 'data'), 'Y')"])
def test_an_unfinished_sum_goes_the_cheapest_way_as_compiled(after):
    before = P(None, "Y", unreduced={"data", "tp"})
    state = SPECS.state | {"mesh": "data=2 Y=2 tp=2", "shape": "8,16,8"}
    state |= {"before": str(before), "after": after}
    answer = SPECS.answer(state)
    code = answer["panels"]["code"]["html"].partition("\n")[2].removesuffix("</pre>").replace("&#x27;", "'")
    with jax.set_mesh(MESH):
        x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(MESH, before))
        found = look(jax.jit(eval(f"lambda x: {code}")), x)
    hops = SPECS.hops(state)  # the partitioner writes a scattered sum as an all-reduce and a slice
    as_xla_writes = sum(hop.bytes_sent * (1 + (hop.kind == "reduce-scatter")) for hop in hops)
    assert sum(row["bytes_sent"] for row in found.rows) == as_xla_writes
    assert answer["numbers"]["bytes_sent"] == sum(hop.bytes_sent for hop in hops) > 0
    assert answer["numbers"]["bytes_sent"] <= answer["numbers"]["gather_first_bytes"]


REFUSED = CASES["specs_refused"] | {"x" * 10_000: "is not read"}


def test_every_wrong_input_is_a_sentence():
    for text, says in REFUSED.items():
        assert says in why(SPECS, before=text), text
    assert "use 4 or 8" in why(SPECS, shape="6, 16")
    assert "name each axis once" in why(SPECS, mesh="X=4 X=2") and "X=0" in why(SPECS, mesh="X=0")
    assert "5 axes longer than 1" in why(SPECS, mesh="a=2 b=2 c=2 d=2 e=2")
    assert "only computing starts a sum" in why(SPECS, after="P(unreduced={'Y'})")
    assert "up to 4 whole numbers" in why(SPECS, shape="2,2,2,2,2") and why(SPECS, shape="8, -1")
    assert not why(SPECS, shape="", before="P()", after="whole")


def test_a_pasted_text_is_read_as_look_reads_it():
    answer = HLO.answer(dict(HLO.state))
    assert answer["says"] == str(look(SAMPLE, "X=4 Y=2"))
    assert "my/model.py:13" in answer["panels"]["table"]["html"]
    assert "its own: look(text" in why(HLO, mesh="") and "fill no whole axes" in why(HLO, mesh="X=8")
    assert "this is StableHLO" in why(HLO, text="module @jit_f { stablehlo.add }")
    assert "is cut off, inside computation main" in why(HLO, text=SAMPLE[:-60])
    assert "no line of it begins with ENTRY" in why(HLO, text="hello")


def test_a_damaged_text_is_read_or_refused_by_a_sentence():
    folder = Path(__file__).parent / "fixtures" / "hlo"
    texts = [SAMPLE, *(path.read_text() for path in sorted(folder.glob("*.hlo")))]
    rng, answered = random.Random(0), 0
    for text, _ in itertools.product(texts, range(60)):
        at, lines = rng.randrange(len(text)), text.splitlines()
        gone = rng.randrange(len(lines))
        for broken in (text[:at], text[:at] + text[at + 9 :], "\n".join(lines[:gone] + lines[gone + 1 :])):
            for mesh in ("X=4 Y=2", ""):
                answered += not why(HLO, text=broken, mesh=mesh)
    assert answered  # of what is read the table stays


def test_a_sharding_with_a_shape_is_drawn():
    where = NamedSharding(MESH, P("data", "tp"))
    explorer = MeshExplorer.of(where, shape=(8, 16), dtype="bfloat16")
    (row,) = explorer.given["tensors"]
    assert row["shape"] == [8, 16] and row["itemsize"] == 2 and row["blocks"] == 4
    assert MeshExplorer.of(where).given["tensors"][0]["dtype"] is None
    with pytest.raises(ValueError):
        MeshExplorer.of(MESH, shape=(8, 16))


ASSERTED = CASES["asserted"]


def test_a_plan_is_held_to_what_is_asserted_with_a_status_of_its_own(capsys):
    line = "plan --devices 8 --mesh fsdp=8 --keep 1 --json --assert".split()
    for text, (status, says) in ASSERTED.items():
        assert main([*line, text]) == status, text
        out, err = capsys.readouterr()
        assert says in err and (status == 1 or json.loads(out)["plans"]), text
    assert main("plan --model llama3-70b --devices 2 --assert fits".split()) == 3
    assert "'llama3-70b' fits on no mesh" in capsys.readouterr().err
