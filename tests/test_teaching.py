"""What a teacher is given: plans that add up, sheets of one page, live links, a quiz that scores itself."""

import ast
import functools
import io
import json
import re
import tomllib

import pytest
from shared import ROOT, load, violations

from llmpar.cli import lab as lessons
from llmpar.cli.commands import command_class
from llmpar.lessons import quiz
from llmpar.lessons.judge import CORRECT

LESSONS = {lesson.number: lesson for lesson in lessons.read_lessons(ROOT / "notebooks")}
GUIDE = (ROOT / "INSTRUCTOR.md").read_text()
BESIDE = ("00b", "12", "13", "14", "15", "16", "17", "18", "19")  # for some of the learners
PLANS = re.findall(r"^\| from \| minutes \| what \|\n\|[-:|]+\n((?:\|.*\n)+)", GUIDE, re.M)


def rows_of(plan):
    """The rows of a plan: when it begins in minutes, how long it takes, what it is."""
    for row in plan.splitlines():
        begins, minutes, what = (cell.strip() for cell in row.strip("|").split("|"))
        hours, rest = begins.split(":")
        yield 60 * int(hours) + int(rest), int(minutes), what


def faults_of(plan, lessons=LESSONS, seen=()):
    """What is wrong with a plan; lessons were ``seen`` before it."""
    at, seen = 0, [*seen]
    for begins, minutes, what in rows_of(plan):
        if begins != at:
            yield f"'{what}' begins at {begins}, and {at} minutes have gone"
        at += minutes
        kind, _, number = what.partition(" ")
        if kind in ("lesson", "exercises", "tell") and number not in lessons:
            yield f"there is no lesson {number}"
        elif kind == "lesson":
            if minutes != lessons[number].teaching:
                yield f"lesson {number} takes {lessons[number].teaching} minutes to teach, not {minutes}"
            if missing := set(lessons[number].needs) - {*seen}:
                yield f"lesson {number} needs {' '.join(sorted(missing))}, neither taught nor told before it"
        elif kind == "exercises" and (minutes > lessons[number].exercises or number not in seen):
            yield f"exercises {number} come before their lesson, or take more than all of them"
        elif kind == "tell" and (told := f"**{number}, in {minutes} minutes.**") not in GUIDE:
            yield f"what to tell is not said: {told}"
        seen += [number] * (kind in ("lesson", "tell"))
        for short, part in re.findall(r"^(short )?slides: (.*)", what):
            if (takes := minutes_of_parts(short=bool(short)).get(part)) != minutes:
                yield f"the {short}slides of '{part}' take {takes} minutes, not {minutes}"


minutes_of_parts = functools.cache(load("slides/build.py").minutes_of_parts)


def test_the_plans_add_up_and_name_what_exists():
    first_day = re.findall(r"\| lesson (\d+)", PLANS[3])
    before = {PLANS[4]: first_day}  # the last plan is a second day
    assert [fault for plan in PLANS for fault in faults_of(plan, seen=before.get(plan, ()))] == []
    lasts = [sum(minutes for _, minutes, _ in rows_of(plan)) for plan in PLANS]
    assert len(lasts) == 5 and lasts[:2] == [60, 210] and all(450 <= last <= 480 for last in lasts[2:])
    two_days = " ".join(what for plan in PLANS[3:] for *_, what in rows_of(plan))
    in_plans = [n for n in LESSONS if f"lesson {n}" in two_days]
    assert in_plans == [n for n in LESSONS if n not in BESIDE] and all(f"Lesson {n}" in GUIDE for n in BESIDE)


def test_no_lesson_is_claimed_to_take_less_than_the_driver_takes():
    """The rows are those of `notebooks/pilot.py`; words in view are counted again here."""
    pilot = load("notebooks/pilot.py")
    rows = re.findall(r"^\| (\d\d\w?) \|" + r" ([\d,]+) \|" * 5 + "$", GUIDE, re.M)
    assert [row[0] for row in rows] == list(LESSONS) and "**No person was timed.**" in GUIDE
    cores = map(pilot.core_of, pilot.build.sources())
    for (notebook, least), (number, words, exercises, _, driver, claimed) in zip(cores, rows, strict=True):
        told = sum(bool(pilot.ATTEMPT.search(cell.source)) for cell in notebook.cells)
        assert least < int(words.replace(",", "")) < 4 * least and told == int(exercises), number
        assert int(driver) < int(claimed) == LESSONS[number].teaching, number


@pytest.mark.parametrize("folder", ["notebooks", "slides"])
def test_what_lessons_and_slides_import_is_there(folder):
    """Most lessons run in a job of their own; a name that went is seen here."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.ImportFrom) and found.module and found.module.startswith("llmpar"):
                exec(ast.unparse(found), {})


def test_a_notebook_that_does_not_say_what_a_course_needs_is_refused(tmp_path):
    bare = {"metadata": {}, "cells": [{"cell_type": "markdown", "source": ["# Title\n"]}]}
    (tmp_path / "00_bare.ipynb").write_text(json.dumps(bare))
    with pytest.raises(ValueError, match="does not say its question, teaching, exercises; build it: make"):
        lessons.read_lessons(tmp_path)


def test_the_sheets_are_one_page_each_and_say_what_the_pages_say(tmp_path):
    handout = load("slides/handout.py")
    made = handout.build(tmp_path)  # refuses a sheet that needs two pages
    pages = {page.stem: page.read_text() for page in made if page.suffix == ".html"}
    cheat, words = pages["cheatsheet"], pages["handout"]
    assert cheat.count("<svg ") == 5 and "u microbatches" in cheat
    assert "<td>14 MB</td>" in cheat and "2,200 in a node of H100s" in cheat and "all-to-all, x to y" in cheat
    assert "<code>d +fsdp -&gt; d/fsdp</code>" in words and "Letters mean one thing" in words
    namespace = 'xmlns="http://www.w3.org/2000/svg"'  # a name, not an address
    assert not re.search(r"https?://", (cheat + words).replace(namespace, ""))


@pytest.mark.browser
def test_the_pages_are_accessible(tab, tmp_path):
    for name, scheme in {"cheatsheet": "light", "handout": "dark"}.items():
        (tmp_path / "page.html").write_text(load("slides/handout.py").SHEETS[name]())
        tab.emulate_media(color_scheme=scheme)
        tab.goto((tmp_path / "page.html").as_uri())
        assert violations(tab) == [], name


def right_answers():
    """The answers of someone who knows it all."""
    return {lesson: exercise.solution for lesson, (_, exercise) in quiz.QUESTIONS.items()}


def test_the_quiz_has_a_question_for_each_lesson_and_judges_it():
    assert list(quiz.QUESTIONS) == [number for number in LESSONS if number.isdigit()]
    for question, exercise in quiz.QUESTIONS.values():
        assert "?" in question or question.endswith("fraction."), question
        assert exercise.judge(exercise.solution).startswith(f"{CORRECT}. ")
        for key, wrong in exercise.wrong.items():
            assert exercise.judge(wrong) == f"not yet. {exercise.says[key]}", question
        assert len(set(exercise.wrong.values())) == len(exercise.wrong) >= 1


def test_a_quiz_is_scored_and_its_effect_computed():
    before = quiz.score("before", {"00": 4, "02": 14}, {"explain": 2})
    after = quiz.score("after", right_answers(), {"explain": 4, "run": 3})
    assert (before["score"], after["score"], after["max_score"]) == (1, 20, 20)
    assert "That is the number of parts." in before["items"][0]["verdict"]
    found = quiz.effect([before, after, before])
    assert found["num"] == {"before": 2, "after": 1} and found["explain"] == {"before": 2, "after": 4}
    assert found["run"] == {"before": None, "after": 3} and found["score"]["after"] == 1
    assert json.loads(json.dumps(found)) == found


def test_a_quiz_that_cannot_be_is_refused():
    for sentence, given in {
        "before or after": ("during", {}, {}),
        "no question '99'": ("before", {"99": 1}, {}),
        "no rating; use 1 to 5": ("before", {}, {"explain": 6}),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            quiz.score(*given)


def test_the_command_asks_notes_and_compares(tmp_path, monkeypatch, capsys):
    file = tmp_path / "quiz.jsonl"
    ask = command_class("quiz")
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n\n1\n4\nsixteen\n14\nnan" + 18 * "\n"))
    ask(file=str(file)).run()
    said = capsys.readouterr().err
    assert "2 of 20 right" in said and "number of parts" not in said, "before, the answers are not told"
    last = json.loads(file.read_text())["items"][-1]["verdict"]
    assert last == f"left out. {quiz.QUESTIONS['19'][1].says['because']}"
    typed = {"02": "14 MB", "04": "5 messages", "07": "3/15", "11": "49,5", "14": "309,000"}
    numbers = [f"{answer}\n" for answer in (right_answers() | typed).values()]
    monkeypatch.setattr("sys.stdin", io.StringIO("5\n4\n4\n" + "".join(numbers)))
    ask(file=str(file), after=True, json=True).run()
    out, said = capsys.readouterr()
    assert json.loads(out)["score"] == 20 and "20 of 20 right" in said and "Four parts, and each" in said
    ask(file=str(file), effect=True).run()
    assert re.search(r"^explain +2\.00 -> 5\.00$", capsys.readouterr().out, re.M)
    noted = file.read_text()
    assert [json.loads(line)["when"] for line in noted.splitlines()] == ["before", "after"]
    for given, sentence in (
        ("7\n", "a rating is 1 to 5"),
        ("", "nothing is noted"),
        ("1\n2\n3\n4\n", "input ended"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        with pytest.raises(ValueError, match=sentence):
            ask(file=str(file)).run()
    assert file.read_text() == noted


def test_containers_install_the_project_s_own_extras_and_copy_what_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    image = (ROOT / "llmpar.def").read_text()
    used = re.search(r"^ +extras=(.*)$", image, re.M)[1].split(",")
    assert {*used, "lab", "cuda12"} <= set(extras)
    copied = dict(re.findall(r"^ +(\S+) (/opt/llmpar/\S+)$", image, re.M))
    assert all((ROOT / source).exists() and target.endswith(source) for source, target in copied.items())
    assert {*"pyproject.toml constraints.txt README.md LICENSE llmpar docs notebooks".split()} <= {*copied}


def test_binder_deals_the_lessons(tmp_path, monkeypatch):
    """The second line of binder/postBuild, in a folder that has the notebooks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    (code,) = re.findall(r"^python -c '(.*)'$", (ROOT / "binder" / "postBuild").read_text(), re.M)
    exec(code, {})
    assert (tmp_path / "lessons" / "start.ipynb").is_file()
