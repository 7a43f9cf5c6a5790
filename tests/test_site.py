"""The site, built once as `make site` does: links lead somewhere, nothing is fetched, people can read it."""

import functools
import http.server
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image
from shared import ROOT, load, violations

from llmpar import draw
from llmpar.draw.scene import Scene, to_svg
from llmpar.explore.page import runtime

SITE = ROOT / "docs" / "site"
TEN = """index api gallery calculators/planner docs/plan docs/words notebooks/01_memory_and_flops
    notebooks/08_pipeline_schedules tests/compiled search""".split()
every_night = lambda test: pytest.mark.nightly(pytest.mark.browser(test))


def test_every_drawing_is_in_the_gallery():
    functions = dict(inspect.getmembers(draw, inspect.isfunction))
    scenes = {name for name, f in functions.items() if f.__annotations__.get("return") in (Scene, "Scene")}
    blocks = re.findall(r"```\{drawing\}\n(.*?)```", (SITE / "gallery.md").read_text(), re.S)
    assert scenes == {re.findall(r"^draw\.(\w+)\(", block, re.M)[-1] for block in blocks}
    assert len(scenes) == len(blocks)
    for block in blocks:
        exec(compile(block, "gallery", "exec"), {})


def test_every_page_is_on_the_site_and_paths_through_the_lessons_keep_their_order():
    text = (SITE / "index.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f"\ndocs/{path.stem}\n" in text, path.name
    known = {one.number: one for one in load("docs/pages.py").LESSONS.values()}
    paths = re.findall(r"^- \*\*(.*?)(?=\n- |\n\n)", text, re.M | re.S)
    assert len(paths) == 3
    for numbers in (re.findall(r"\[(\d\d)\]", path) for path in paths):
        assert all({*known[number].needs} <= {*numbers[:place]} for place, number in enumerate(numbers))


def test_the_pictures_of_the_pages_are_what_the_package_draws():
    pictures = load("docs/pictures.py")
    drawn = to_svg(pictures.timetable_picture())
    assert drawn == (pictures.PICTURES / "timetable.svg").read_text(), "make pictures"


def of_picture():
    """The explorer that the README shows, and what its picture says: pixels depend on fonts, words do not."""
    pictures = load("docs/pictures.py")
    with Image.open(pictures.PICTURES / "explorer.png") as picture:
        assert picture.size == (1400, 900)
        return pictures, pictures.explorer(), picture.text["Description"]


def test_the_explorer_s_picture_says_what_it_says_at_once():
    _, explorer, said = of_picture()
    words = [line for line in explorer.scene.text.splitlines() if not line.endswith("so far.")]
    assert len(words) > 3 and [line for line in words if line not in said.splitlines()] == [], "make pictures"


@every_night
def test_the_explorer_s_picture_is_what_it_shows_with_advice(chromium, tmp_path):
    pictures, explorer, said = of_picture()
    while explorer.more(dict(explorer.state))["more"]:  # the next steps are part of what it says
        pass
    assert said == explorer.scene.text, "make pictures"
    pictures.photograph(chromium, explorer, tmp_path / "explorer.png")
    with Image.open(tmp_path / "explorer.png") as made:
        assert made.size == (1400, 900) and made.text["Description"] == said


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, below a folder, as a server shows it: its folder and its address."""
    if not runtime():
        pytest.skip("Python for the browser is not here: make runtime (npm)")
    out = tmp_path_factory.mktemp("served") / "below" / "site"
    trees = "-d", str(out.parent.parent / "doctrees")
    flags = "--quiet", "--fail-on-warning", "--keep-going", "--jobs", "2"
    command = [sys.executable, "-m", "sphinx", *flags, "-c", ROOT / "docs", *trees, ROOT, out]
    where = {"LLMPAR_REPOSITORY": "owner/name", "LLMPAR_SITE": "https://example.org/site"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | where)
    assert done.returncode == 0, done.stdout + done.stderr
    handler = functools.partial(Quiet, directory=out.parent.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield out, f"http://127.0.0.1:{server.server_port}/below/site/"
        server.shutdown()


@pytest.fixture
def at(site, tab):
    """Open a page of the site; it asks nobody else, and says nothing."""

    def open_page(name):
        tab.goto(f"{site[1]}{name}")
        return tab

    return open_page


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Page(HTMLParser):
    """What a page says of itself: ids, where it leads, its head; and pictures without words."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.leads, self.meta, self.faults = [], [], {}, []
        text = path.read_text(encoding="utf-8")
        self.title = re.search(r"<title>(.*?)</title>", text, re.S)[1]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.ids += [known["id"]] if "id" in known else []
        self.leads += [(tag, known[name]) for name in ("href", "src") if known.get(name)]
        if tag == "meta" and "content" in known:
            self.meta[known.get("name") or known.get("property")] = known["content"]
        if tag == "img" and "alt" not in known:
            self.faults.append(f"a picture without words: {known.get('src')}")


@pytest.fixture(scope="module")
def pages(site):
    apart = {"_static", "slides", "sheets"}
    every = [p for p in site[0].rglob("*.html") if not apart & {*p.relative_to(site[0]).parts}]
    found = {path: Page(path) for path in every}
    assert len(found) > 50
    return found


@every_night
def test_no_link_is_dead_and_nothing_leads_outside_but_links(site, pages):
    dead, out = [], site[0]
    made = ("slides", "sheets")  # by targets of their own, which `make site` runs first
    for path, page in pages.items():
        for tag, target in page.leads:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                assert tag == "a" or parts.scheme == "data", (path.name, tag, target)
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if out in there.parents and there.relative_to(out).parts[0] in made:
                continue
            anchors = pages[there].ids if there in pages else None
            good = not parts.fragment or anchors is None or unquote(parts.fragment) in anchors
            good = good and there.is_file()
            dead += [] if good or (tag == "a" and target == "#") else [f"{path.relative_to(out)}: {target}"]
    assert dead == []


@every_night
def test_pages_are_whole_and_say_what_they_are(site, pages):
    assert "Pyodide" in (site[0] / "_static" / "llmpar" / "LICENSE-RUNTIME").read_text()
    twice = {path.name: [n for n in {*page.ids} if page.ids.count(n) > 1] for path, page in pages.items()}
    assert {name: ids for name, ids in twice.items() if ids} == {}
    assert {str(path.name): page.faults for path, page in pages.items() if page.faults} == {}
    for path, page in pages.items():
        assert page.title and page.meta["viewport"] and len(page.meta["description"]) > 5, path.name
        assert any(target.endswith("CITATION.cff") for _, target in page.leads), path.name
        assert page.meta["og:title"] and page.meta["og:url"].endswith(path.name)
        assert page.meta["og:image"].endswith("/site/_images/explorer.png"), path.name
    assert len({page.title for page in pages.values()}) == len(pages)


@every_night
def test_lessons_keep_what_they_show(site):
    out = site[0]
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        text = (out / "notebooks" / f"{path.stem}.html").read_text()
        cells = json.loads(path.read_text())["cells"]
        for where in ("https://colab.research.google.com/github/owner/name/blob/main/",
                      "https://mybinder.org/v2/gh/owner/name/main?urlpath=lab/tree/"):  # fmt: skip
            assert f'href="{where}notebooks/{path.name}"' in text
        plumbing = sum("plumbing" in cell["metadata"].get("tags", ()) for cell in cells)
        assert text.count("Set-up and checks") == plumbing
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        assert text.count("<math ") >= sum(source.count("$$") // 2 for source in sources) and "$$" not in text
        shown = [found["metadata"]["image/png"] for cell in cells for found in cell.get("outputs", ())
                 if "image/png" in found.get("data", {})]  # fmt: skip
        assert text.count('class="picture"') == sum("explorer" not in about for about in shown), path.name


@every_night
def test_ten_pages_are_silent_accessible_and_fit(at):
    found = []
    for scheme, wide in (("light", 1400), ("dark", 390)):
        for name in TEN:
            page = at(f"{name}.html")
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": wide, "height": 900})
            page.wait_for_load_state("networkidle")
            page.wait_for_function("document.documentElement.scrollWidth <= innerWidth + 1")
            found += [(name, scheme, fault) for fault in violations(page)]
    assert found == [], "\n".join(map(str, found))


@every_night
def test_a_calculator_shows_its_picture_before_python_wakes_and_has_an_address(at):
    page = at("calculators/memory.html#microbatches=8")
    shown = "document.querySelector('.lpx svg') && [document.documentElement.dataset.python]"
    assert page.wait_for_function(shown).json_value() != ["awake"]
    page.wait_for_function("document.querySelector('.lpx select').value === '8'")
    page.select_option(".lpx select", "2")
    page.wait_for_url("**#microbatches=2")
    page.wait_for_function("document.documentElement.dataset.python === 'awake'")
    page = at("calculators/collectives.html")
    page.locator("[data-llmpar=explorer]").nth(1).scroll_into_view_if_needed()
    page.locator("[data-llmpar=explorer] svg").nth(1).wait_for()
    assert page.get_by_role("button", name="copy link").count() == 1


@every_night
@pytest.mark.parametrize("name", ["planner", "collectives"])
def test_code_on_a_page_prints_there_what_it_printed_here(at, name):
    box = at(f"calculators/{name}.html").locator("[data-llmpar=cell]")
    box.scroll_into_view_if_needed()
    before = box.locator("pre").text_content()
    assert len(before.splitlines()) > 3 and "Error" not in before
    box.get_by_role("button", name="Run").click()
    box.locator("button:enabled").wait_for()
    assert box.locator("pre").text_content() == before


@every_night
def test_search_finds_pages_without_a_server_that_answers(at):
    page = at("search.html?q=reduce-scatter")
    for part in ("words.html", "notebooks/"):  # they come one after the other
        page.locator(f"#search-results li a[href*='{part}']").first.wait_for()


@every_night
def test_an_exercise_is_answered_on_its_page(at):
    page = at("notebooks/01_memory_and_flops.html")
    names = page.evaluate("[...document.querySelectorAll('textarea')].map((one) => one.ariaLabel)")
    assert " ".join(names) == "01.state_gb 01.fits 01.policies 01.again 01.days 01.crossover 01.keep_every"

    def answered(text, button="Check"):
        box = page.locator("[data-llmpar=cell]").first
        if text:
            box.locator("textarea").fill(text)
        box.get_by_role("button", name=button).click()
        box.locator("button:enabled").first.wait_for()
        return box.locator("pre").inner_text()

    cell = 'attempt("01.state_gb", {})'
    assert "replace the dots" in answered("")
    assert "not yet" in answered(cell.format(16)) and "answer first" not in answered("", "Solution")
    assert "correct" in answered(cell.format("8.03 * 16"))
    assert "hint 1 of" in answered("", "Hint")
    assert "line 2: NameError" in answered("1\nspam")
    page.evaluate("window.setTimeout = ((own) => (does, ms) => own(does, ms / 10))(window.setTimeout)")
    assert "does a loop never end" in answered("while True: pass")
    assert "correct" in answered(cell.format("8.03 * 16"))
