"""The deck builds from its sources, fetches nothing, describes its figures, and fits its pages."""

import html
import itertools
import operator
import os
import re
import shlex

import jupytext
import nbformat
import pytest
from shared import HERE, ROOT, load

from llmpar import draw
from llmpar.cli.commands import parse
from llmpar.draw.scene import DECK
from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable

slides = load("slides/build.py")

every_night = lambda test: pytest.mark.nightly(pytest.mark.lessons(test))


def alts(text):
    """What stands in the place of each image."""
    return [html.unescape(alt) for _, alt in re.findall(r"""<img\b[^>]*?\salt=(["'])(.*?)\1""", text)]


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    """Build the real deck, once."""
    out = tmp_path_factory.mktemp("deck")
    return slides.build(out=out)


def parts_of_slides():
    """Split the sources into slides: what is said of each, its notes, and whether it ends the talk."""
    slides = []
    for source in sorted((ROOT / "slides" / "src").glob("*.py")):
        for cell in jupytext.read(source, fmt="py:percent").cells:
            tags = cell.metadata.get("tags", [])
            if {"slide", "subslide"} & set(tags):
                title = cell.source.splitlines()[0].strip("# ")
                slides.append({"title": title, "said": "", "notes": "", "tags": tags, **cell.metadata})
                slides[-1]["tags"] = tags
            if cell.cell_type == "markdown":
                slides[-1]["notes" if "notes" in tags else "said"] += "\n" + cell.source
    return slides


SLIDES = parts_of_slides()


@every_night
def test_the_short_deck_is_an_hour_of_the_whole_one(deck):
    page, short = deck.read_text(), deck.with_name("short.html").read_text()
    assert slides.count_slides(short) == sum("short" in slide["tags"] for slide in SLIDES) == 26
    assert 55 <= sum(slide["minutes"] for slide in SLIDES if "short" in slide["tags"]) <= 60
    assert 120 <= sum(slide["minutes"] for slide in SLIDES) <= 200
    for text, parts in ((page, 16), (short, 12)):
        agenda = re.search(r"What you will be able to do.*?</section>", text, re.S)[0]
        assert len(re.findall(r"<tr>", agenda)) == 1 + (parts + 1) // 2
    of_a_part = r"<strong>3 min</strong>, until 0:0\d of 0:\d\d in this part, \d:\d\d of [123]:\d\d in all"
    assert re.search(rf"<aside[^>]*>.*?{of_a_part}", page, re.S)


def test_the_clock_of_a_part_begins_with_it(tmp_path):
    """An hour of lessons may lie between two parts."""
    tags = '# %% [markdown] tags=["{}"] '
    cell = f'{tags.format("slide")}minutes={{}} section="{{}}"\n# ## A\n\n{tags.format("notes")}\n# B\n\n'
    text = "".join(cell.format(*slide) for slide in ((2, "One"), (4, "Two"), (1, "One")))
    (tmp_path / "00_part.py").write_text(text)
    deck = slides.notebook_builder().read_source(tmp_path / "00_part.py")
    assert slides.minutes_of_parts(tmp_path) == {"One": 3, "Two": 4} and slides.plan_talk(deck) == 7
    said = "".join(cell.source for cell in deck.cells)
    clocks = re.findall(r"until (.*?) in this part, (.*?) in all", said)
    assert clocks == [("0:02 of 0:03", "0:02 of 0:07"), ("0:04 of 0:04", "0:06 of 0:07"),
                      ("0:03 of 0:03", "0:07 of 0:07")]  # fmt: skip


def test_a_slide_points_to_a_lesson_or_a_command_and_commands_are_understood():
    readme = (ROOT / "README.md").read_text()
    for slide in SLIDES:
        (footer,) = re.findall(r"<footer>(.*?)</footer>", slide["said"], re.S)
        lessons = re.findall(r"notebooks/(\w+)", footer)
        assert all(f"`{lesson}`" in readme for lesson in lessons), f"README does not name {lessons}"
        assert lessons or "<code>llmpar " in footer, slide["title"]
    written = re.findall(r"<code>llmpar (.*?)</code>", "".join(slide["said"] for slide in SLIDES))
    assert len(written) > 5
    for command in written:
        parse(shlex.split(command))


def inside(deck):
    """What is in each slide of a page."""
    return re.findall(r"<section\b[^>]*>(?!\s*<section)(.*?)(?=<section|\Z)", deck.read_text(), re.S)


@every_night
def test_every_slide_has_a_heading_and_a_figure_or_a_table(deck):
    for slide, shown in zip(SLIDES, inside(deck), strict=True):
        assert re.search(r"<h[123]\b", shown) and re.search("<(img|table|pre)", shown), slide["title"]


@every_night
def test_a_timetable_is_what_the_command_below_it_gives(deck):
    drawn = 0
    for slide, shown in zip(SLIDES, inside(deck), strict=True):
        alt = (alts(shown) or [""])[-1]  # what builds up ends with all of it
        command = re.search(r"<code>llmpar (schedule .*?)</code>", slide["said"])
        if " time units, " in alt and command:
            given = parse(shlex.split(command[1]))
            made = make(given.name, given.stages, given.microbatches, given.virtual_stages)
            of_command = draw.timeline(timetable(made, tuple(map(float, given.costs.split(",")))))
            assert alt.endswith(" ".join(of_command.text.split())), slide["title"]
            drawn += 1
    assert drawn == 5


def part(tmp_path, text, name="00_part.py"):
    """The source of a part."""
    source = tmp_path / "src" / name
    source.parent.mkdir(exist_ok=True)
    source.write_text(text)
    return source


TITLE = '# %% [markdown] tags=["slide"]\n# # Title\n#\n'
PARTS = (HERE / "fixtures" / "slide_parts.txt").read_text().replace("@ROOT@", str(ROOT)).split("\n=====\n")


@pytest.mark.lessons
def test_parts_share_a_kernel_and_no_names_and_each_thing_goes_where_it_belongs(tmp_path):
    texts = [text.replace("# # Title", f"# # Title {i}") for i, text in enumerate(PARTS)]
    deck = slides.run([part(tmp_path, text, f"0{i}_part.py") for i, text in enumerate(texts)])
    pids = [cell.outputs[0].text for cell in deck.cells if "pid" in cell.source]
    assert pids[0] == pids[1] != f"pid {os.getpid()}\n"
    page = slides.to_html(deck)
    text = re.sub(r"<[^>]+>", "", page)
    assert "Costs $5, not $6, is $x$" in text and "FORMULA" not in page
    assert page.count("<math") == 3 and "<mfrac>" in page
    assert re.search(r'<aside class="notes">.*?Say.*?</aside>', page, re.S)
    assert "42" in text and "hidden = " not in text and "shown = hidden + 1" in text
    assert slides.count_slides(page) == 6
    steps = [f"Step {number} of 3. A a box t" for number in (1, 2, 3)]
    want = ["A line from one to two", 'A line, as "printed"', *steps]
    assert [alt[:22] for alt in alts(page)] == want
    assert re.findall(r'class="figure *(step.*?)"', page) == ["step", "step fragment", "step fragment"]


PICTURE = {"output_type": "display_data", "data": {"image/png": ""}, "metadata": {}}
REFUSALS = {
    "text on stderr": ("", {"output_type": "stream", "name": "stderr", "text": "careful"}),
    "a picture without words": ("", PICTURE),
    "tag 'slides' means nothing here": ('tags=["slides"]', {}),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_a_part_with_a_fault_is_refused(tmp_path, sentence):
    (tags, output), builder = REFUSALS[sentence], slides.notebook_builder()
    ran = builder.read_source(part(tmp_path, f"{TITLE}\n# %% {tags}\n1\n"))
    ran.cells[-1].outputs = [nbformat.from_dict(output)] if output else []
    with pytest.raises(ValueError, match=f"00_part.py.*{sentence}"):
        slides.place(builder.tidy(ran), "00_part.py", builder)


SIDES = ("left", "right", "top", "bottom")


def misplaced(boxes):
    """List what leaves the slide, and pairs that lie on one another; a step covers the one before."""
    width, height = slides.SIZE
    out = [b for b in boxes if b["left"] < -1 or b["right"] > width + 1 or b["bottom"] > height]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            covers = a["step"] and b["step"] and all(abs(a[side] - b[side]) < 1 for side in SIDES)
            out += [(a, b)] if min(across, down) > 1 and not covers else []
    return out


def illegible(boxes):
    """List what is too small on a slide 720 px high. A picture has twice the pixels of its drawing."""
    letters = 2 * min(DECK.values())
    is_small = lambda box: letters * box["shrunk"] < 20 if box["kind"] == "IMG" else box["type"] < 18
    return [*filter(is_small, boxes)]


@every_night
def test_slides_are_laid_out_offline_without_overlaps_and_legibly(deck, tab):
    """In print, all of them. The tab fails for any address elsewhere, and for a file that is missing."""
    tab.goto(f"{deck.as_uri()}?print-pdf")
    tab.wait_for_load_state("networkidle")
    tab.wait_for_function("Reveal.isReady() && document.fonts.status === 'loaded'")
    slide_of = operator.itemgetter("slide")
    boxes = sorted(tab.evaluate((HERE / "fixtures" / "measure_slides.js").read_text()), key=slide_of)
    measured = {title: [*found] for title, found in itertools.groupby(boxes, slide_of)}
    assert len(measured) == len(SLIDES)
    for faults in misplaced, illegible:
        assert {title: found for title, boxes in measured.items() if (found := faults(boxes))} == {}


@every_night
def test_reveal_starts_from_a_local_file(deck, tab):
    tab.goto(deck.as_uri())
    tab.locator("section.present").first.wait_for()
    assert tab.locator(".slide-number-b").inner_text() == str(len(SLIDES))
