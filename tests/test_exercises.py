"""Exercises: their verdict tables, hints in steps, solutions after an attempt, notes, `llmpar progress`."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from jax import lax
from shared import TABLES

from llmpar import lessons
from llmpar.lessons import judge, pages, record
from llmpar.lessons.spread import carried_out
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.predict.hardware import chip
from llmpar.predict.time import step_time

HERE = Path(__file__).parent
NAMES = lessons.names()


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path, monkeypatch):
    """Answers are noted where the learner works: here in a folder that goes away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMPAR_ANSWERS", raising=False)
    for memory in (lessons.GIVEN, lessons.HINTS_GIVEN, lessons.FIRST_ANSWERS):
        memory.clear()


@pytest.fixture
def printed(capsys):
    def printed(f, *given, **more):
        capsys.readouterr()
        f(*given, **more)
        return capsys.readouterr().out

    return printed


LEARNERS = dict(line.split(": ", 1) for line in (HERE / "learners.txt").read_text().splitlines())
"""What learners answer beside the planted answers, as a page would spell it."""


def answers_of(name, exercise):
    texts = LEARNERS[name].split(" | ") if name in LEARNERS else []
    return [judge.read_answer(text, exercise.solution) for text in texts]


varying = lambda x, axis: lax.pcast(x, axis, to="varying")


def test_what_a_function_returns_is_what_real_devices_return():
    """Traced and run for all at once, as on a mesh of simulated devices."""
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    mesh = make_mesh("dp=2 tp=2", jax.devices()[:4])
    whole = np.float32(np.arange(8))

    def function(x):
        part = lax.psum_scatter(varying(x, "dp") * whole, "tp", tiled=True)
        part *= 1.0 + lax.axis_index("dp").astype(x.dtype)
        return lax.all_gather(lax.ppermute(part, "dp", [(0, 1), (1, 0)]), "tp", tiled=True, to="invarying")

    cut = jax.P(("dp", "tp"))
    how = dict(mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    on_devices = jax.shard_map(lambda x: function(x[0])[None], **how)
    found, sent = carried_out(function, "dp=2 tp=2", x)
    np.testing.assert_allclose(np.stack(found), jax.jit(on_devices)(x), rtol=1e-6)
    rows = [[kind, axis, 1, 16] for kind, axis in (("all-gather", "tp"), ("collective-permute", "dp"))]
    assert sent == [*rows, ["reduce-scatter", "tp", 1, 16]]


def test_a_notebook_shows_what_each_device_sends_and_holds(capsys):
    gathers = lambda gradient, parts: sum(lax.all_gather(gradient(p), "fsdp").sum(0)[:2] for p in parts)
    lessons.attempt("04.stage2_accumulated", gathers)
    plain = capsys.readouterr().out
    assert "ranks" not in plain
    InteractiveShell.instance()
    try:
        for answer in (gathers, lambda gradient, parts: 1 / 0, 3):
            lessons.attempt("04.stage2_accumulated", answer)
            lessons.attempt("03.sent", 1)
    finally:
        InteractiveShell.clear_instance()
    shown = capsys.readouterr().out
    assert shown.count("4 ranks, each given 3 × 8 × 2") == 1
    line = "all-gather over fsdp among ranks [0, 1, 2, 3]: 192 B; then 4 × 8 × 2"
    assert shown.count(line) == 3 and "each returns 2 × 2\nEach rank sends 576 B in 3 calls." in shown


def own_sentence(exercise, verdict):
    """Tell whether a verdict is more than the general hint or an exception's text."""
    return not any(hint in verdict for hint in exercise.hints()) and " raised " not in verdict


LONG = {"03.repair", "06.to_heads"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in NAMES])
def test_the_verdict_table(name):
    assert {*LEARNERS} <= set(NAMES)
    exercise = lessons.find(name)
    assert exercise.judge(...) == lessons.NOT_ATTEMPTED
    right = exercise.judge(exercise.solution)
    why = exercise.says["because"]
    assert right == f"{lessons.CORRECT}. {why}" and len(right.split()) > 8, "it says why"
    sentences = [exercise.says[key] for key in exercise.wrong]
    assert len({*sentences, exercise.says.get("hint")}) == len(sentences) + 1 >= 4, "each one of its own"
    for key, answer in exercise.also.items():
        assert exercise.judge(answer) == f"{lessons.CORRECT}. {exercise.says[key]}"
    planted = [exercise.judge(answer) for answer in exercise.wrong.values()]
    assert planted == [f"not yet. {sentence}" for sentence in sentences]
    others = [exercise.judge(answer) for answer in answers_of(name, exercise)]
    assert all(verdict.startswith("not yet. ") for verdict in others)
    helped = [own_sentence(exercise, verdict) for verdict in planted + others]
    assert len(helped) >= 4, "add answers of learners"
    assert np.mean(helped) >= 0.8, "too many answers meet the general hint only"


def test_a_page_counts_with_what_the_lesson_gives():
    facts = {"given": "devices=8", "answer": "2 * (devices - 1)", "hint": "Add.", "because": "Two."}
    facts |= {"`2 * devices`": "One stays.", "`* 2`": "Twice."}
    assert judge.stated("it", facts).solution == 14
    told = judge.stated("it", facts, devices=4)
    assert told.solution == 6 and list(told.wrong.values()) == [8, 12]
    with pytest.raises(ValueError, match="it is not given device but devices"):
        judge.stated("it", facts, device=4)
    with pytest.raises(ValueError, match="sentences for `2 [*] ranks`, which mean nothing"):
        judge.stated("it", facts | {"`2 * ranks`": "Of ranks."})


SAYS = {"hint": "Add.", "because": "Two.", "one": "That is one."}


@pytest.mark.parametrize("change, fault", TABLES["sentences"])
def test_a_key_without_a_sentence_and_a_sentence_without_a_key_are_refused(change, fault):
    exercise = lessons.Exercise("core", 2, dict(one=1))
    says = {key: sentence for key, sentence in (SAYS | change).items() if sentence}
    if not fault:
        told = exercise.with_sentences("it", says)
        assert told.wrong == {"one": 1, "`3`": 3, "`* 2`": 4} and told.hints() == ["Think.", "Add."]
        return
    with pytest.raises(ValueError, match=fault):
        exercise.with_sentences("it", says)


@pytest.mark.parametrize("line", ["- no sentence", "- hint: once\n- hint: twice", "words", "- `4: open"])
def test_a_page_out_of_its_form_is_refused(line, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "pages.py"))
    (tmp_path / "99.md").write_text(f"# Lesson 99\n\n## sent\n\n{line}\n")
    with pytest.raises(ValueError, match="cannot read the page of .*99.md': line [56] is no '- key"):
        pages.sentences("99")


def nonsense(solution):
    """An answer of the right kind that nobody plants."""
    if isinstance(solution, dict):
        return {name: nonsense(part) for name, part in solution.items()}
    if isinstance(solution, list | tuple):
        return [nonsense(part) for part in solution]
    if callable(solution):
        return lambda *given: (lambda out: out if isinstance(out, dict) else nonsense(out))(solution(*given))
    if isinstance(solution, str):
        return "nonsense"
    return 1234.5678 if solution is None or isinstance(solution, int) else solution * 1.2345678 + 0.1234


@pytest.mark.parametrize("name", NAMES)
def test_a_first_miss_is_answered_by_no_formula_and_by_no_solution(name):
    """What nobody foresaw gets the first hint; who asks gets the next one."""
    exercise = lessons.find(name)
    steps = 3 if exercise.level == "core" else 2  # a question, a smaller case or a picture, the formula
    assert len(set(exercise.hints())) == len(exercise.hints()) >= steps
    formula, right = exercise.says.get("hint", "none"), lessons.spelt_out(exercise.solution).strip()
    number = isinstance(exercise.solution, int | float)
    assert not any(number and right in hint.split() for hint in exercise.hints())
    own = [] if name == "13.cure" else [nonsense(exercise.solution)]  # what is laid right there is right
    for answer in (*own, 1234.5678, "nonsense", [7, 7, 7], None, {}):
        verdict = exercise.judge(answer)
        assert verdict.startswith("not yet. ") and formula not in verdict, verdict
        assert right not in verdict.split() and f" {right} " not in f"{verdict} ", verdict
    assert formula not in map(exercise.nudge, range(5))


def test_a_miss_goes_on_where_the_hints_were(printed):
    said = lambda ask, *given: " ".join(printed(ask, "03.bucket", *given).split())
    first, second, formula = lessons.find("03.bucket").hints()
    miss = '03.bucket (stretch): not yet. {} hint("03.bucket") says more.'
    assert said(lessons.attempt, 5) == miss.format(first)
    assert said(lessons.hint) == f"03.bucket, hint 2 of 3: {second}"
    assert said(lessons.attempt, 7) == miss.format(second)
    assert f"hint 3 of 3: {formula}" in said(lessons.hint)
    assert formula not in said(lessons.attempt, 9) and formula in said(lessons.hint)
    assert said(lessons.attempt, 2).startswith("03.bucket (stretch): correct. ")


@pytest.mark.parametrize("line", ["  mpirun --map 'a b' " + 9 * "--mesh 'dp=2 tp=2' ", "echo -n short"])
def test_what_is_said_fits_a_notebook_and_a_broken_command_is_the_same_command(printed, line):
    said = printed(lessons.say, "Why: " + "an all-reduce " * 20 + "\n    code = 1").splitlines()
    assert max(map(len, said)) <= lessons.COLUMNS and said[-1] == "    code = 1"
    said = printed(lessons.say_command, line)
    assert max(map(len, said.splitlines())) <= lessons.COLUMNS
    joined = said.replace("\\\n", "")  # as a shell does
    assert shlex.split(joined) == shlex.split(line)


def test_a_solution_is_told_to_those_who_have_tried(printed):
    lessons.attempt("03.sent", ..., params=1000, devices=4)
    assert "answer first" in printed(lessons.solution, "03.sent")
    lessons.attempt("03.sent", 4000, params=1000, devices=4)
    said = printed(lessons.solution, "03.sent")
    assert re.search(r"^03\.sent: 6,000\nWhy: .* a ring goes around twice", said, re.M)
    assert printed(lessons.solution, "07.uneven").startswith("07.uneven: answer first")
    lessons.attempt("07.uneven", lambda costs, u: 0)
    assert "return sum(costs) + (u - 1) * max(costs)" in printed(lessons.solution, "07.uneven")


def test_a_prediction_is_met_again(printed, monkeypatch):
    with monkeypatch.context() as stored_page:
        stored_page.setenv("LLMPAR_OPEN", "1")
        found = "compiled 754,880 (a running copy asks first)\n"
        assert printed(lessons.met, "03.sent", 754_880) == found
    asked = "answer 03.sent first, then run this cell again: it compares your answer with the result\n"
    assert printed(lessons.met, "03.sent", 754_880) == asked
    blank = f'03.sent (core): {lessons.NOT_ATTEMPTED}; hint("03.sent") helps\n'
    assert printed(lessons.attempt, "03.sent", ...) == blank
    assert printed(lessons.met, "03.sent", 754_880) == asked, "a blank is no answer"
    lessons.attempt("03.sent", 862_720)
    lessons.attempt("03.sent", 754_880)
    assert printed(lessons.met, "03.sent", 754_880) == "you said 862,720; compiled 754,880\n"
    lessons.FIRST_ANSWERS.clear()  # the kernel is restarted
    assert printed(lessons.met, "03.sent", 754_880, "sent") == "you said 862,720; sent 754,880\n"
    assert "03.sent: 754,880" in printed(lessons.solution, "03.sent"), "it knows who has tried"
    parts = {"dp=16": 90, "fsdp=16": "5000 GB"}, {"dp=16": 89.7531, "fsdp=16": 5.61}
    for name, given, found, said in (
        ("07.idle_share", 0.27, 3 / 11, "0.27; drawn 0.2727"),
        ("11.replicas", *parts, "dp=16 90, fsdp=16: 5000 GB; drawn dp=16 89.75, fsdp=16 5.61"),
        ("12.unfinished", "b/dp s d", "b/dp s d +tp", "b/dp s d; drawn b/dp s d +tp"),
    ):
        lessons.attempt(name, given)
        assert printed(lessons.met, name, found, "drawn") == f"you said {said}\n"


def test_answers_are_noted_once_and_blanks_are_not():
    for answer in (..., 862_720, 862_720, 754_880, 862_720, 1234, 1234):  # 1234 gets two hints
        lessons.attempt("03.sent", answer)
    noted = record.answers()
    rows = [("862720", False), ("754880", True), ("862720", False), ("1234", False)]
    assert [(a.exercise, a.answer, a.correct) for a in noted] == [("03.sent", *row) for row in rows]
    lessons.attempt("05.ring_permutes", lambda tp: 8 * tp)
    assert "8 * tp" in record.answers()[-1].answer, "a function is noted by its text"


@pytest.mark.parametrize("where", ["missing/answers.jsonl", "no_answers.jsonl", "fifo"])
def test_where_nothing_can_be_noted_the_verdict_is_still_given(where, tmp_path, capsys, monkeypatch):
    (tmp_path / "no_answers.jsonl").write_text("no answers\n")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("LLMPAR_ANSWERS", str(tmp_path / where))
    lessons.attempt("03.sent", 754_880)
    lessons.solution("03.sent")
    lessons.met("03.sent", 754_880)
    said = " ".join(capsys.readouterr().out.split())
    assert "03.sent (core): correct. " in said and "(This answer was not noted: " in said and "Why: " in said
    assert said.endswith(" you said 754,880; compiled 754,880")


def test_progress_sums_up_and_exports(call, document):
    said = call("progress")[1]
    assert said.endswith(f"0 of {len(NAMES)} correct; the next one is {NAMES[0]}\n")
    for name, answer in (("03.sent", 862_720), ("03.sent", 754_880), ("07.microbatches", 70)):
        lessons.attempt(name, answer)
    lines = call("progress")[1].splitlines()
    assert len(lines) == len(NAMES) + 1 and lines[-1].startswith(f"1 of {len(NAMES)} correct")
    assert re.search(r"^03\.sent +core +2 tries +correct$", "\n".join(lines), re.M)
    assert re.search(r"^07\.microbatches +core +1 try +not yet$", "\n".join(lines), re.M)
    exported = document("progress")
    assert exported["score"] == 1 and exported["max_score"] == len(NAMES)
    (sent,) = [test for test in exported["tests"] if test["name"] == "03.sent"]
    assert (sent["score"], sent["max_score"], sent["status"]) == (1.0, 1.0, "passed")
    assert sent["output"].startswith("correct. ") and not sent["extra_data"]["first_correct"]


def test_a_report_repeats_answers_gives_none_away_and_overwrites_nothing(tmp_path, call, document):
    lessons.attempt("16.cache_bytes", "</script><b>1")
    lessons.attempt("16.cache_bytes", 131_072)
    lessons.attempt("16.guessed", 4.2)
    (one,) = document("progress", "--report", "anna", "--lesson", "16")["reports"]
    page = (tmp_path / "anna.html").read_text()
    assert record.read_page("anna.html") == one and page.count("</script>") == 1
    rows = {row["exercise"]: row for row in one["exercises"]}
    assert list(rows) == lessons.names("16") and (one["num_given"], one["num_correct"]) == (2, 1)
    given = [(a["answer"], a["correct"]) for a in rows["16.cache_bytes"]["answers"]]
    assert given == [("</script><b>1", False), ("131072", True)] and rows["16.guessed"]["tries"] == 1
    for name in rows:  # what is said of answers stays with the learner
        said = [text for key, text in lessons.find(name).says.items() if key != "question"]
        assert not any(line in page for text in said for line in text.splitlines()), name
    assert "3.3616" not in page
    for again in ("anna", "anna.html", "nowhere/x"):
        assert f"cannot write the report '{again}'" in call("progress", "--report", again)[2]
    assert (tmp_path / "anna.html").read_text() == page
    assert re.fullmatch(r"anna +2 answered +1 correct\n", call("progress", "--report", ".")[1])
    (tmp_path / "other.html").write_text("<p>")
    assert "cannot read the report 'other.html'" in call("progress", "--report", ".")[2]


@pytest.mark.parametrize("text, why", TABLES["no_answers"])
def test_a_file_of_something_else_is_refused(text, why, tmp_path, call):
    (tmp_path / record.FILE).write_text(text)
    said = call("progress")[2]
    assert "is no file of answers" in said and why in said and "Attempt(" not in said
    lessons.attempt("03.sent", 1)
    assert (tmp_path / record.FILE).read_text() == text, "nothing of the learner's is overwritten"


def test_a_lone_notebook_can_ask(tmp_path):
    """Far from the repository's folders, as on a hosted notebook: the package is enough."""
    code = 'from llmpar.lessons import attempt, hint\nhint("00.held")\nattempt("00.held", "512 bytes")\n'
    code += "from jax import lax\nattempt('02.ring_gather', lambda x, n, a: lax.all_gather(x, a, tiled=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hint 1 of " in done.stdout and "00.held (core): correct. " in done.stdout
    assert "but lax.all_gather does it" in done.stdout, "four devices, where one is"


def test_lesson_11_repeats_the_planners_seconds():
    """Hints and verdicts have numbers that the lesson computes; they were stale once."""
    a100, terms, buy = chip("a100-80"), pages.sentences("11")["terms"], pages.sentences("11")["buy"]
    asked = planner.Question(preset("llama3-70b"), a100, 64, 64, 8192, share=a100.memory_share)
    fixed = lambda mesh: dataclasses.replace(asked, fixed=parse_mesh(mesh).sizes)
    rule, best = (planner.decide(fixed(m), keep=1).plans[0] for m in ("pp=8 tp=8", "fsdp=16 tp=4"))
    computing = sum(rule.time.terms[x] for x in ("matmuls", "attention", "elementwise", "recomputation"))
    assert all(f" {computing:.1f} s" in terms[x] for x in ("question", "because", "`bubble=0.0546875`"))
    assert lessons.find("11.terms").solution["bubble"] == pytest.approx(7 / 128 * round(computing, 1))
    both = best.time, step_time(dataclasses.replace(asked.run(best.plan), chip=chip("h100")))
    shares = (sum(s for t, s in x.terms.items() if "links" in t) / x.step_s for x in both)
    assert "{:.0%} of the step on A100s, is {:.0%} on".format(*shares).replace("%", " %") in buy["because"]


def test_teachers_see_the_solutions(call, document):
    """Of one lesson or of all, in order; of no lesson that is not there."""
    found = document("solutions", "--lesson", "03")["solutions"]
    assert list(found) == [f"03.{name}" for name in lessons.exercises("03")]
    assert found["03.sent"].startswith("03.sent: 754,880\nWhy: 4 bytes per parameter")
    told = call("solutions")[1]
    assert told.count("\nWhy: ") == sum(len(lessons.exercises(lesson)) for lesson in lessons.lesson_numbers())
    for written in (lessons.spelt_out(lessons.find(name).solution) for name in NAMES):
        assert max(map(len, written.splitlines())) <= lessons.COLUMNS, "code would be broken inside"
    status, _, err = call("solutions", "--lesson", "99")
    assert status == 1 and "there are 00, 00b, 01" in err
