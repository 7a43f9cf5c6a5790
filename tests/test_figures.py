"""Small live figures: what they answer and draw, held against the model, the planner and the timetable."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from llmpar.draw.strips import lettered, pattern, rounds
from llmpar.explore import small
from llmpar.explore.small import MemoryExplorer, RoutingExplorer, SumExplorer, TimelineExplorer
from llmpar.model import moe
from llmpar.parallel.modes import Solo
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.two_meshes import two_meshes
from llmpar.predict import formulas, memory
from llmpar.predict.ring import pairs_by_step


@pytest.mark.parametrize("kind", [MemoryExplorer, small.OverlapExplorer, SumExplorer, small.RingExplorer])
def test_a_figure_of_one_control_brings_all_its_answers(kind):
    """And the memory calculator those of its first."""
    control = kind.controls[0]
    doc = kind().document()
    asked = [answer["asked"][control["name"]] for answer in (doc["answer"], *doc["stored"])]
    numbers = range(control.get("min", 0), control.get("max", 0) + 1, control.get("step", 1))
    assert sorted(asked) == sorted(control.get("options") or numbers)
    alone = TimelineExplorer(only="microbatches", schedule="gpipe").document()
    assert [control["name"] for control in alone["controls"]] == ["microbatches"]
    assert len(alone["stored"]) == 15
    assert {name for name, *_ in alone["panels"]} == {"picture", "words"} == {*alone["answer"]["panels"]}
    assert TimelineExplorer().stored() == [], "too many states: Python answers"
    routing = RoutingExplorer(only="capacity_percent").document()
    told = [answer["says"] for answer in (routing["answer"], *routing["stored"])]
    sizes = [re.search(r"^(\d+) slots for each", text, re.M)[1] for text in told]
    assert sorted(map(int, sizes)) == [8, 12, 16, 20, 24, 32, 64], "of 64 tokens of a rank"


@pytest.mark.parametrize("kind, ranks", [(kind, n) for kind in SumExplorer.known for n in (2, 4, 5)])
def test_a_ring_hop_by_hop_ends_as_its_collective_does(kind, ranks):
    hops = rounds(kind, ranks)
    assert tuple(lettered(hops[end]["held"]) for end in (0, -1)) == pattern(kind, ranks)
    assert sum(len(hop["sends"]) for hop in hops) == ranks * ranks * formulas.sent_bytes(kind, 1, ranks)
    found = SumExplorer(collective=kind, ranks=ranks).document()["answer"]
    assert len(found["frames"]) == len(hops) == found["panels"]["picture"]["svg"].count("data-frame=")


def test_a_written_order_is_judged():
    explorer = TimelineExplorer(stages=2, microbatches=2)
    order = str(explorer.order(explorer.state))
    explorer.set(order=order)
    same = explorer.answer(explorer.state)
    assert not same["refusal"] and "busy" in same["says"] and same["numbers"]["makespan"] == 9
    assert "back to 1f1b" in same["panels"]["words"]["html"], "without a box of text, too"
    longer = explorer.answer(explorer.state | {"order": "F0 F1 F2 B0 B1 B2"})
    assert (longer["state"]["stages"], longer["state"]["microbatches"]) == (1, 3), "as it is written"
    explorer.set(order=order.replace("B1", "F0", 1))
    assert "twice" in explorer.answer(explorer.state)["refusal"]["why"]
    explorer.set(order="F0 B0 F1 B1\nF1 F0 B0 B1")
    refused = explorer.answer(explorer.state)
    why, picture = refused["refusal"]["why"], refused["panels"]["picture"]["svg"]
    assert "Cycle" in why and "stuck after 1 time units" in picture, "no picture of another order"
    assert "stage 1 waits to run F1 for F1 on stage 0" in picture and "stage 1, B1: has not run" in picture
    assert len([line for line in why.splitlines() if "waits at tick" in line]) == 2, "a wait per line"
    assert refused["refusal"]["steps"] == [{"text": "back to 1f1b", "do": "apply", "set": {"order": ""}}]
    explorer.set(order=order.lower().replace(" ", ", "))
    assert explorer.answer(explorer.state)["panels"] == same["panels"], "lower case and commas are read too"
    explorer.set(order="F0 X0")
    assert "^" in explorer.answer(explorer.state)["refusal"]["why"] and explorer.scene.text


def outlined(svg):
    """The operations of a picture with a thick outline, as `stage:place`."""
    return set(re.findall(r'stroke-width="2.5"[^>]* data-op="(\d+:\d+)"', svg))


def test_a_dragged_operation_is_moved_and_judged_and_can_be_taken_back():
    explorer = TimelineExplorer(schedule="1f1b", stages=3, microbatches=4)
    state = explorer.state | {"move": [2, 4, 2]}  # F2 before F1 on the last stage
    rows = [row.split() for row in str(explorer.order(explorer.state)).splitlines()]
    reply = explorer.answer(state)
    rows[2].insert(2, rows[2].pop(4))
    assert reply["asked"] == state and reply["state"]["move"] is None
    assert [row.split() for row in reply["state"]["order"].splitlines()] == rows
    assert explorer.answer(reply["state"])["panels"] == reply["panels"], "the same picture when asked again"
    stuck = explorer.answer(explorer.state | {"move": [2, 1, 0]})  # B0 before F0 on the last stage
    assert outlined(stuck["panels"]["picture"]["svg"]) == {"2:0", "2:1"}, "they wait for one another"
    assert stuck["numbers"]["goals"] == [False] * 5 and "○ it runs" in stuck["panels"]["goals"]["html"]
    (back,) = stuck["refusal"]["steps"]
    again = explorer.answer(stuck["state"] | back["set"])
    assert again["refusal"] is None and again["panels"] == explorer.answer(explorer.state)["panels"]
    explorer = TimelineExplorer(order="F0 F1 B1 B0\nF0 B0 B1")  # nobody runs F1 on stage 1: no circle
    refused = explorer.answer(explorer.state)
    picture = refused["panels"]["picture"]["svg"]
    assert "stage 1 never runs F1" in refused["refusal"]["why"] and outlined(picture) == set()
    assert "stage 0 waits to run B1 for B1 on stage 1" in picture


@pytest.mark.parametrize("move", [[0, 0, 99], [9, 0, 1], [-1, 0, 1]])
def test_a_move_that_cannot_be_leaves_the_order_and_says_why(move):
    explorer = TimelineExplorer(stages=2, microbatches=2)
    reply = explorer.answer(explorer.state | {"move": move})
    assert reply["state"] == explorer.state and "count from 0" in reply["refusal"]["why"]
    vee = TimelineExplorer(schedule="zb-v").state | {"move": [0, 0, 1]}
    reply = explorer.answer(vee)
    assert "places its chunks" in reply["refusal"]["why"] and "zb-v" in reply["panels"]["picture"]["svg"]


def test_zero_2_differs_from_zero_1_where_gradients_are_added_up():
    def held(count):
        lines = MemoryExplorer(microbatches=count).scene.text.splitlines()[1:5]
        parts = (re.findall(r"([a-z][a-z ]+) ([\d.]+) GiB", line.partition("(")[2]) for line in lines)
        return [{name: float(gib) for name, gib in row} for row in parts]

    grads = lambda row: row["gradients"] + row["unreduced gradients"]
    one, four = held(1), held(4)
    assert "hold the same" in MemoryExplorer(microbatches=1).scene.text
    resolved = Plan("fsdp=8", zero=2, microbatches=4, remat="block").resolve(preset("llama3-8b"), "gpu")
    kept = memory.weights_bytes(resolved)["accumulated"] / 2**30
    assert grads(one[1]) == pytest.approx(grads(one[2]), rel=0.01)
    assert grads(four[2]) - grads(one[2]) == pytest.approx(kept, abs=0.1), "a device's part of the sum"
    assert grads(four[1]) - grads(one[1]) == pytest.approx(8 * kept, rel=0.01), "the whole sum"
    assert four[0]["weights"] == pytest.approx(8 * four[3]["weights"], rel=0.01)


def test_sums_of_gradients_hide_from_the_threshold_on():
    """By hand: 4 FLOPs for each of 0.87 G parameters and tokens; of 4 bytes each a ring of 8 sends 7/8."""
    waits = {}
    for tokens in (512, 2304, 2560, 4096):
        text = small.OverlapExplorer(tokens=tokens).scene.text
        total, waits[tokens] = map(float, re.search(r"by side: (\S+) ms, (\S+) ms", text).groups())
        assert total - waits[tokens] == pytest.approx(4 * 6.98e9 * tokens / 989.4e12 * 1e3, rel=0.02)
    piece = 4 * 6.98e9 / 8 * 7 / 8 / 370e9 * 1e3
    assert waits[2560] == waits[4096] == pytest.approx(piece, rel=0.02), "the last one"
    assert waits[512] > 6 * piece and piece < waits[2304] < 1.3 * piece
    assert "From 2,340 tokens on" in text and "only the last piece's" in text


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_draws_the_pairs_that_it_computes(order, ranks):
    text = small.RingExplorer(order=order, ranks=ranks).scene.text.splitlines()[1:]
    pairs = pairs_by_step(ranks, order, s=16 * ranks)
    for rank, line in enumerate(text[:ranks]):
        blocks = [(n - 8 * (step == 0)) / 256 for step, n in enumerate(pairs[rank])]
        assert line.startswith(f"rank {rank}: " + " ".join(f"{x:.2g}" for x in blocks) + ";")
    time = sum(max(row[t] - 8 * (t == 0) for row in pairs) for t in range(ranks)) / 256
    assert f"The ring takes as long as {time:.3g} full squares" in text[-1]


def test_a_figures_router_chooses_as_the_model_does_and_drops_as_much():
    for heat in (0, 4):
        explorer = RoutingExplorer(heat=heat)
        logits = jnp.asarray(explorer.logits(explorer.state), jnp.float32)
        how = ExpertConfig(8, 2, capacity_factor=1.25)
        _, chosen = moe.choose_experts(how, moe.affinities(how, logits))
        text = explorer.scene.text
        for rank, mine in enumerate(np.asarray(chosen)):
            counts = np.bincount(mine.ravel(), minlength=8)
            said = ", ".join(f"{n} to expert {e}" for e, n in enumerate(counts) if n)
            assert f"rank {rank}: {said}\n" in text
        dropped = int(moe.route(how, Solo(), logits)[2]["tally"][-2])
        assert f"{dropped} of 512 choices are dropped" in text and f"dropped {dropped}," in text
        assert f"{640 - 512 + dropped} of 640 slots travel empty" in text
        assert heat < 4 or dropped == 176


def test_a_transfer_follows_both_layouts():
    figure = small.TransferExplorer()
    for before, after, many in [("d m", "d m/tp", 1), ("d/fsdp m/tp", "d m", 4)]:
        figure.set(before=before, after=after)
        text = figure.scene.text
        plan = two_meshes(f"{before} @t -> {after} @s", {"t": "fsdp=2 tp=2", "s": "tp=4"}, (64, 128))
        assert f"{plan.bound:,} B, rounds: {many}." in text and len(plan.rounds) == many
    third = {"sampler": "tp=3", "after": "d m/tp"}
    assert "is not a multiple of tp = 3" in figure.answer(figure.state | third)["says"]
