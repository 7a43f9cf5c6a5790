"""Every number explains itself: what is filled into its formula gives the number."""

import random
import re
from pathlib import Path

import pytest
from shared import CASES

import llmpar
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.planner.measured import read_runs
from llmpar.planner.planner import memory_verdict
from llmpar.planner.terms import FORMULAS, LINES, terms
from llmpar.predict.hardware import chip
from llmpar.predict.traffic import LATE, most_traffic

ROOT = Path(__file__).parent
CASES = CASES["explained"]


def computed(filled):
    """The value of arithmetic with units in it."""
    text = re.sub(r"(?<=[\d)]) (FLOP/s|FLOP|GB/s|GB|B/s|B|s)(?=[ )]|$)", "", filled)
    text = text.replace("×", "*").replace(",", "")
    assert re.fullmatch(r"[\d.e+*/() -]+", text), filled
    return eval(text)


@pytest.fixture(scope="module")
def explained():
    rng, found = random.Random(8), []
    for name, row, devices, batch, seq, fixed in CASES:
        q = planner.Question(preset(name), chip(row), devices, batch, seq, fixed, name)
        legal = [mesh for mesh, why in planner.every_mesh(q) if not why]
        for mesh in rng.sample(legal, 5):
            one = planner.on_mesh(q, mesh)
            found.append((q, one, terms(q, one)))
    return found


def test_what_is_filled_in_gives_the_number(explained):
    for _, one, found in explained:
        for term in found:
            near = pytest.approx(term.value, rel=2e-5, abs=1 if term.unit == "B" else 1e-12)
            if " " in term.name and term.unit == "B":  # pieces of a byte are rounded up, message by message
                near = pytest.approx(term.value, rel=1e-6, abs=500)
            assert computed(term.filled) == near, (one.plan, term)


def test_the_numbers_are_those_of_the_plan(explained):
    for q, one, found in explained:
        value = {term.name: term.value for term in found}
        assert len(value) == len(found)
        assert {name: value[name] for name in one.parts} == one.parts and value["total"] == one.total_bytes
        assert {name: value[name] for name in one.time.terms} == one.time.terms
        assert value["a step"] == one.time.step_s and value["MFU"] == one.time.mfu(q.run(one.plan))
        sent = most_traffic(one.plan.resolve(q.config, q.platform), q.batch_size, q.seq_len)
        of_links = {f"{axes} {kind}": row.bytes_sent for (axes, kind), row in sent.items()}
        assert {term.name: term.value for term in found if term.arrow} == of_links


def test_lessons_and_files_that_are_named_exist():
    lessons = {path.stem for path in (ROOT.parent / "notebooks" / "src").glob("*.py")}
    assert {row["lesson"] for row in FORMULAS.values()} <= lessons
    for arrow, name in LINES.items():
        text = (Path(llmpar.__file__).parent / name).read_text()
        assert arrow in text or arrow.rpartition(" -> the ")[0] in text, arrow


def test_summands_have_their_words_and_add_up(explained):
    names = set()
    for _, one, found in explained:
        for term in found:
            if not term.summands:
                continue
            names.add(term.name)
            whole = sum(part.value for part in term.summands) * float(term.times or 1)
            assert whole == pytest.approx(term.value, rel=2e-5, abs=1), (one.plan, term)
            for part in term.summands:
                assert computed(part.filled) == pytest.approx(part.value, rel=2e-5, abs=1e-9), part
    assert {"activations", "optimizer", "weights and gradients on links"} <= names


def test_the_page_of_collectives_says_why_a_network_is_not_free(capsys):
    """By data sheets alone 64 H100s gather as fast as 8: what is reached of links differs."""
    text = (ROOT.parent / "docs/site/calculators/collectives.md").read_text()
    exec(re.search(r"```\{run\}\n(.*?)```", text, re.S)[1], {})
    rows = re.findall(r"^(\S+) +(\d+) devices +(\S+) ms: (.*)$", capsys.readouterr().out, re.M)
    took = {(kind, int(n)): (float(ms), levels) for kind, n, ms, levels in rows}
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert took[kind, 64][0] > 1.5 * took[kind, 8][0], kind
        assert "between nodes" in took[kind, 64][1] and "between" not in took[kind, 8][1]


def test_runs_that_people_know_are_answered_beside_what_was_published():
    cases = [case for name in ("published", "measured") for case in read_runs(ROOT / f"{name}.json")[0]]
    errors = {}
    for row, q, mesh in planner.published_runs():
        one = planner.on_mesh(q, mesh)
        assert one.plan.mesh == mesh and memory_verdict(q, one).words != "does not fit"
        if "step_s" in row:
            (step_s,) = {
                case.measured["step_s"]
                for case in cases
                if row["source"] in case.source
                and case.run.bits == 16
                and (case.run.mesh, case.run.batch_size, case.run.seq_len) == (mesh, q.batch_size, q.seq_len)
            }
            assert row["step_s"] == pytest.approx(step_s, rel=1e-3)
            errors[row["name"]] = one.time.step_s / row["step_s"] - 1
        else:
            assert "2407.21783" in row["source"]
            errors[row["name"]] = one.time.mfu(q.run(one.plan)) / row["mfu"] - 1
            without = one.time.step_s - one.time.terms["recomputation"] - one.time.terms[LATE]
            assert one.time.mfu(q.run(one.plan)) * one.time.step_s / without > row["mfu"], row["differs"]
        if "differs" not in row:
            assert abs(errors[row["name"]]) <= planner.ERROR
    assert len(errors) >= 8 and max(map(abs, errors.values())) < 0.25, errors
    assert sum(abs(error) for error in errors.values()) / len(errors) < 0.15
