"""The explorers without a browser: state, traits, static twins, saved pages, and what is pasted into one."""

import base64
import html.parser
import itertools
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shared
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shared import CASES, HERE, ROOT

from llmpar.draw.geometry import holders
from llmpar.draw.scene import Text, flatten
from llmpar.explore import page
from llmpar.explore.explorer import CALCULATORS, EXPLORERS, Explorer, MeshExplorer, by_kind
from llmpar.explore.texts import SAMPLE
from llmpar.inspect.look import look
from llmpar.inspect.moves import read_layout, spelled

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MADE = [kind for kind in EXPLORERS if kind != "given"]


@pytest.mark.parametrize("kind", MADE)
def test_an_output_has_a_live_front_and_a_static_twin(kind):
    data, metadata = by_kind(kind)._repr_mimebundle_()
    assert set(data) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG") and metadata["image/png"]["width"] > 300
    lines = data["text/plain"].splitlines()
    assert data["text/plain"] == repr(by_kind(kind)) and len(lines) > 3
    assert lines[0] != lines[1] and not [line for line in lines if line.startswith(":")]


class Attributes(html.parser.HTMLParser):
    """Every attribute of a text by its tag, and the tags that are open."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len({*names}), (tag, names)
        self.found += [(tag, name, value) for name, value in attrs]
        self.open += [tag] * (tag not in ("input", "br", "meta", "link"))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


STATES = [{}, {"mesh": "fsdp=8", "explain": "fsdp all-gather"}]
STATES += [{"mesh": "pp=2 dp=2 tp=2", "explain": "activations"}]
STATES += [{"model": "tiny-moe", "mesh": "ep=2 tp=2", "devices": 4, "explain": "left out", "device": 1}]


@pytest.mark.parametrize("kind", MADE)
def test_a_page_needs_no_network_and_no_kernel(kind):
    text = shared.small_page(kind)
    addresses = set(re.findall(r"https?://[^\"'`\s)\\]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://page.invalid/"}, "names, and no requests"
    read = Attributes(text)
    assert not read.open and {name for _, name, _ in read.found} <= {*shared.TABLES["attributes"]}, read.found
    assert not any(name in ("src", "href") for _, name, _ in read.found)
    assert "import " not in page.MODULE.read_text()
    doc = json.loads(re.search(r'id="doc">(.*?)</script>', text, re.S)[1])
    assert doc["answer"]["asked"] == doc["state"] == dict(by_kind(kind).state) and len(text) < 2_500_000
    assert doc["answer"]["panels"] and not doc["live"]


ANSWERED = {"asked", "state", "refusal", "verdict", "fields", "panels", "numbers", "says", "more", "frames"}


@pytest.mark.parametrize("kind", MADE)
def test_an_answer_follows_the_contract_and_no_attribute_of_its_panels_ends_early(kind):
    """An apostrophe in a label did: of `label='the optimizer's …'` s, two and moments are attributes."""
    explorer, found = by_kind(kind), []
    for more in STATES if kind == "mesh" else [{}]:
        reply = explorer.answer(dict(explorer.state) | more)
        assert json.loads(json.dumps(reply)) == reply and ANSWERED <= {*reply}
        assert reply["refusal"] is None and reply["says"]
        assert {*reply["panels"]} <= {name for name, *_ in explorer.areas}
        for panel in reply["panels"].values():
            assert (texts := [panel[form] for form in ("svg", "html") if form in panel])
            for read in map(Attributes, texts):
                assert not read.open
                found += read.found
    assert {name for _, name, _ in found} <= {*shared.TABLES["attributes"]}, found
    assert {place for *_, place in explorer.areas} <= {"over", "left", "middle", "right", "below"}
    labels = [value for tag, _, value in found if tag == "optgroup"]
    assert kind != "mesh" or "the optimizer's two moments (float32)" in labels


def test_the_front_end_moves_the_state_and_python_answers():
    explorer = MeshExplorer(model="tiny", seq_len=64)
    widget = explorer.rich
    assert widget.answer == explorer.answer(dict(explorer.state))
    widget.state = explorer.state | {"mesh": "dp=4 tp=2"}  # as a click in the browser does
    assert explorer.state["mesh"] == "dp=4 tp=2" and widget.answer["state"]["mesh"] == "dp=4 tp=2"
    widget.state = explorer.state | {"model": "gpt5"}
    assert widget.answer["panels"] == {} and "unknown model" in widget.answer["refusal"]["why"]
    explorer.set(batch_size=16, mesh="tp=8", model="tiny")
    assert widget.state["mesh"] == "tp=8" and widget.answer["refusal"] is None
    before = widget.answer
    while widget.answer["more"]:
        widget._handle_custom_msg({"more": True}, [])
    assert widget.answer != before and widget.answer["asked"] == before["asked"]


def test_fields_of_a_plan_and_own_files_are_set_by_hand(tmp_path):
    explorer = MeshExplorer(mesh="fsdp=8", remat="block", zero=1)
    assert explorer.state["fields"] == {"remat": "block", "zero": 1}
    explorer.set(remat="none")
    assert explorer.state["fields"] == {"remat": "none", "zero": 1}
    chosen = {f["name"]: (f["value"], f["yours"]) for f in explorer.answer(explorer.state)["fields"]}
    assert chosen["zero"] == (1, True) and chosen["microbatches"][1] is False
    (tmp_path / "mine.toml").write_text('base = "h100"\nnode_size = 4\n')
    own = MeshExplorer(chip=str(tmp_path / "mine.toml"), mesh="tp=8")
    (tmp_path / "mine.toml").unlink()
    found, usual = (one.answer(one.state)["numbers"] for one in (own, MeshExplorer(mesh="tp=8")))
    assert found["step_s"] > usual["step_s"], "tp crosses its nodes of four; the file is not read again"


def test_a_state_is_changed_by_set_only():
    explorer = MeshExplorer()
    with pytest.raises(TypeError, match=r"use|set\(mesh='tp=8'\)"):
        explorer.state["mesh"] = "tp=8"
    explorer.set(mesh="tp=8")
    assert explorer.state["mesh"] == "tp=8" and explorer.rich.state["mesh"] == "tp=8"
    with pytest.raises(NotImplementedError):
        Explorer().draw({})


def test_a_saved_picture_names_its_tensor_and_has_no_buttons(tmp_path):
    explorer = MeshExplorer(mesh="fsdp=4 tp=2", tensor="weight head")
    drawn = {item.text for item in flatten(explorer.scene.items) if isinstance(item, Text)}
    assert {"−", "+"} <= drawn, "those of the form, on a page"
    explorer.save(tmp_path / "mesh.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)", (tmp_path / "mesh.svg").read_text())
    assert "Who holds what of weight head" in texts and not {"−", "+"} & {*texts}


def test_a_page_that_was_saved_knows_the_sites_address(monkeypatch):
    assert by_kind("mesh").document()["site"] == ""
    monkeypatch.setenv("LLMPAR_SITE", "https://a.example/llmpar/")
    assert by_kind("sum").document()["site"] == "https://a.example/llmpar/calculators/collectives.html"
    pages = {path.stem for path in (ROOT / "docs" / "site" / "calculators").glob("*.md")}
    assert {*CALCULATORS.values()} <= pages and by_kind("ring").document()["site"] == ""


SPECS, HLO = by_kind("specs"), by_kind("hlo")
SIZES, SHAPE = {"data": 2, "Y": 2, "tp": 2}, (8, 16, 8)
PASTED_ON = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(SIZES), axis_types=(AxisType.Explicit,) * 3)


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
    slices = NamedSharding(PASTED_ON, P(*(tuple(axes) or None for axes in cuts))).devices_indices_map(SHAPE)
    blocks = [slices[device] for device in PASTED_ON.devices.flat]
    for devices in holders(layout, SIZES).values():
        assert devices == [i for i, block in enumerate(blocks) if block == blocks[devices[0]]]


@pytest.mark.parametrize("after", ["P()", "P('Y', 'tp')", "P(None, ('tp', 'data'), 'Y')"])
def test_an_unfinished_sum_goes_the_cheapest_way_as_compiled(after):
    before = P(None, "Y", unreduced={"data", "tp"})
    state = SPECS.state | {"mesh": "data=2 Y=2 tp=2", "shape": "8,16,8"}
    state |= {"before": str(before), "after": after}
    answer = SPECS.answer(state)
    code = answer["panels"]["code"]["html"].partition("\n")[2].removesuffix("</pre>").replace("&#x27;", "'")
    with jax.set_mesh(PASTED_ON):
        x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(PASTED_ON, before))
        found = look(jax.jit(eval(f"lambda x: {code}")), x)
    hops = SPECS.hops(state)  # the partitioner writes a scattered sum as an all-reduce and a slice
    as_xla_writes = sum(hop.bytes_sent * (1 + (hop.kind == "reduce-scatter")) for hop in hops)
    assert sum(row["bytes_sent"] for row in found.rows) == as_xla_writes
    assert answer["numbers"]["bytes_sent"] == sum(hop.bytes_sent for hop in hops) > 0
    assert answer["numbers"]["bytes_sent"] <= answer["numbers"]["gather_first_bytes"]


def test_a_damaged_text_is_read_or_refused_by_a_sentence():
    folder = HERE / "fixtures" / "hlo"
    texts = [SAMPLE, *(path.read_text() for path in sorted(folder.glob("*.hlo")))]
    rng, answered = random.Random(0), 0
    for text, _ in itertools.product(texts, range(60)):
        at, lines = rng.randrange(len(text)), text.splitlines()
        gone = rng.randrange(len(lines))
        for broken in (text[:at], text[:at] + text[at + 9 :], "\n".join(lines[:gone] + lines[gone + 1 :])):
            for mesh in ("X=4 Y=2", ""):
                answered += not why(HLO, text=broken, mesh=mesh)
    assert answered  # of what is read the table stays


def test_a_plan_is_held_to_what_is_asserted_with_a_status_of_its_own(call):
    line = "plan --devices 8 --mesh fsdp=8 --keep 1 --json --assert".split()
    for text, (status, says) in CASES["asserted"].items():
        found, out, err = call(*line, text)
        assert found == status and says in err and (status == 1 or json.loads(out)["plans"]), text
    status, _, err = call(*"plan --model llama3-70b --devices 2 --assert fits".split())
    assert status == 3 and "'llama3-70b' fits on no mesh" in err
