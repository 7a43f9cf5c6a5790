"""The explorers in headless Chromium: the bare module, the offline page, and one JupyterLab session.

No page may write to its console or ask the network for anything."""

import contextlib
import itertools
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest
import shared
import told
from shared import HERE, ROOT, violations
from test_page import arrays

from llmpar.explore.explorer import MeshExplorer, by_kind
from llmpar.explore.texts import SAMPLE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
expect = playwright.expect
pytestmark = pytest.mark.browser
STATIC = ROOT / "llmpar" / "explore" / "static"
FRONT, STYLE = STATIC / "explorer.js", STATIC / "explorer.css"


def test_axe_sees_a_fault(tab):
    tab.set_content('<html lang="en"><head><title>x</title></head><body><main><input></main></body></html>')
    assert any(rule.startswith("label") for rule in violations(tab))


FIXTURES = HERE / "fixtures"
PAGE, MODEL = (FIXTURES / name for name in ("told_page.html", "told_model.js"))
"""The page as Python writes it, and what stands for JupyterLab's model."""


def saved(path, doc):
    """A page as Python writes it, with the told model behind."""
    parts = {"STYLE": STYLE.read_text(), "MODULE": FRONT.read_text()}
    parts["DOC"] = json.dumps(doc).replace("<", "\\u003c")
    text = re.sub("STYLE|MODULE|DOC", lambda found: parts[found[0]], PAGE.read_text())
    path.write_text(text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module", autouse=True)
def behind(one_tab):
    """What answers the page's questions, by their names. From now on time is what a test says, too."""
    page, answers = one_tab[0], {}
    page.clock.install()
    for name in ("ask", "more"):
        page.expose_function(name, lambda state, name=name: answers[name](state))
    return answers


@pytest.fixture
def told_behind(behind):
    behind |= {"ask": told.answer, "more": lambda state: told.answer(state, True)}


@pytest.fixture
def told_page(tab, told_behind, tmp_path):
    tab.goto(saved(tmp_path / "page.html", told.document()))
    expect(tab.locator('[data-panel="map"]')).to_be_visible()
    return tab


@contextlib.contextmanager
def redrawn(page):
    """Do something, and wait until a picture of the new state is in place."""
    root = page.locator(".lpx").first
    before = root.get_attribute("data-revision")
    yield
    expect(root).not_to_have_attribute("data-revision", before)
    expect(root).not_to_have_class(re.compile("waiting"))


def notebook(page, values, dead=False, views=1):
    """The module as a notebook mounts it."""
    places = "<main></main>" + "<aside></aside>" * (views - 1)
    head = f"<title>x</title><style>{STYLE.read_text()}</style>"
    page.set_content(f'<html lang="en"><head>{head}</head><body>{places}</body></html>')
    page.evaluate(MODEL.read_text(), [FRONT.read_text(), values, dead])


def traits(**state):
    doc = told.document(**state)
    return {"doc": doc, "state": doc["state"], "answer": doc["answer"]}


def focus(page):
    return page.evaluate(
        "(({ dataset: d, ariaLabel: a }) => d.set || d.op || d.name || d.do || a)(document.activeElement)"
    )


def test_everything_works_by_keys_alone(told_page):
    """Sentence, pictures, tables, folded fields and keys; a picture is one stop; a redraw keeps the focus."""
    page, seen = told_page, []
    page.keyboard.press("?")  # wherever the focus is
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    with redrawn(page):
        page.keyboard.press("ArrowUp")  # devices: 16 cannot be, the told mesh says how many
    assert page.evaluate("window.asked.some((s) => s.devices === 16)")
    while '{"device": 0}' not in seen[-1:] and len(seen) < 40:
        page.keyboard.press("Tab")
        seen.append(focus(page))
    assert seen[:5] == ["chip", "mesh", "device", "order", "link"]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert focus(page) == '{"device": 3}', "one to the right, one down in rows of two"
    assert page.locator('[data-panel="grid"] .note').inner_text() == "device 3"
    with redrawn(page):
        page.keyboard.press("Enter")
    assert page.evaluate("window.asked.at(-1).device") == 3 and focus(page) == '{"device": 3}'
    grid = page.locator('[data-panel="grid"]')
    assert grid.locator("svg").get_attribute("aria-label") == "8 devices, device 3 chosen"
    for key, device in (("Home", 0), ("End", 7)):
        page.keyboard.press(key)
        assert focus(page) == json.dumps({"device": device})
    assert grid.locator('[tabindex="0"]').count() == 1
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert focus(page) == "play"


def test_a_number_is_typed_or_stepped_and_what_is_none_is_said(told_page):
    page = told_page
    with redrawn(page):
        page.locator('[data-name="device"]').fill("5")
    expect(page.locator('[data-panel="map"]')).to_be_visible()
    assert page.locator('[data-panel="grid"] svg').get_attribute("aria-label").endswith("5 chosen")
    box, said = page.locator('[data-name="devices"]'), page.locator(".said")
    box.fill("1,0x")
    assert "write a whole number" in said.inner_text() and box.get_attribute("aria-invalid")
    box.fill("8")
    assert said.inner_text() == "", "as before, and nothing is to be mended"
    page.locator(".rest summary").click()
    with redrawn(page):
        page.locator('[data-field="microbatches"]').fill("4")
    assert page.evaluate("window.asked.at(-1).fields.microbatches") == 4
    assert "1 set by you" in page.locator(".rest summary").inner_text()
    with redrawn(page):
        page.keyboard.press("ArrowUp")
    assert page.evaluate("window.asked.at(-1).fields.microbatches") == 8
    assert page.evaluate("document.activeElement.dataset.field") == "microbatches"
    with redrawn(page):
        page.locator(".yours button[data-set]").click()
    assert "microbatches" not in page.evaluate("window.asked.at(-1).fields")
    assert page.locator(".yours").count() == 0


def test_a_refusal_says_why_and_what_works_and_keeps_the_last_picture(told_page):
    page, kept = told_page, told_page.locator(".lpx.kept")
    grid = page.locator('[data-panel="grid"] .pic').inner_html()
    with redrawn(page):
        page.locator('[data-name="mesh"]').fill("qq=3")
    assert "mesh 'qq=3' cannot be read\n  qq=3\n  ^" in page.locator(".why").inner_text()
    assert "last that could be answered" in page.locator(".verdict").inner_text()
    assert page.locator('[data-panel="grid"] .pic').inner_html() == grid and kept.count() == 1
    assert page.evaluate("document.activeElement.dataset.name") == "mesh", "typing goes on"
    with redrawn(page):
        page.locator(".step").click()
    assert page.locator(".verdict .good").count() == 1 and kept.count() == 0
    assert page.locator('[data-name="mesh"]').input_value() == "fsdp=8 tp=1", "in Python's spelling"


def test_only_the_last_question_counts_and_the_picture_is_dimmed_meanwhile(told_page):
    page = told_page
    page.evaluate("window.gate = new Promise((open) => { window.open_gate = open; }); window.asked = []")
    with redrawn(page):
        for mesh in ("fsdp=2 tp=4", "fsdp=1 tp=8", "fsdp=8 tp=1"):
            page.locator('[data-name="mesh"]').fill(mesh)
            page.keyboard.press("Enter")
            page.clock.run_for(50)
        assert page.locator(".lpx.waiting").get_attribute("aria-busy") == "true"
        page.evaluate("window.open_gate()")
    assert [state["mesh"] for state in page.evaluate("window.asked")] == ["fsdp=2 tp=4", "fsdp=8 tp=1"]
    assert page.locator('[data-panel="code"]').inner_text().endswith("Plan('fsdp=8 tp=1')")
    page.locator('[data-panel="grid"] svg').evaluate("(svg) => { svg.dataset.mark = 1; }")
    expect(page.locator('[data-panel="map"]')).to_be_visible()
    assert page.locator("[data-mark]").count() == 1, "what is equal is not touched"


def test_frames_play_step_and_scrub_in_all_pictures(told_page):
    page, words = told_page, told_page.locator(".player > span")
    drawn = page.locator('[data-panel="layer"] [data-frame][display=inline]')

    def shows(frame):
        assert drawn.get_attribute("data-frame") == str(frame) and words.inner_text() == f"instant {frame}"

    shows(0)
    page.locator('[data-do="forth"]').click()
    shows(1)
    page.locator(".player input").fill("2")
    shows(2)
    with redrawn(page):
        page.locator('[data-name="device"]').fill("4")
    shows(2)  # another answer does not rewind
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 60)
    page.locator('[data-do="play"]').click()
    for lasts, frame in ((399, 0), (1, 1), (1499, 1), (1, 2), (599, 2)):
        page.clock.run_for(lasts)
        shows(frame)
        assert page.locator("[aria-label=pause]").count() == 1
    page.clock.run_for(5000)
    page.clock.resume()
    shows(2)  # it ends, and does not begin by itself
    assert page.locator("[aria-label=play]").count() == 1


def test_operations_are_dragged_moved_by_keys_and_picked_in_the_text(told_page):
    page = told_page
    op = lambda name: page.locator(f'[data-op="{name}"]')
    words = lambda: [op(f"0:{i}").get_attribute("aria-label").split(", ")[1] for i in range(4)]
    chosen = "(({ value, selectionStart: a, selectionEnd: b }) => value.slice(a, b))(document.activeElement)"
    text = page.locator("textarea")
    assert text.input_value() == ""
    op("1:1").click()
    page.clock.run_for(500)
    assert page.evaluate(chosen) == "B0", "the text of an order that has a name, and it stays"
    with redrawn(page):
        op("0:0").drag_to(op("0:2"))
    assert page.evaluate("window.asked.at(-1).move") == [0, 0, 2] and words() == ["F1", "B0", "F0", "B1"]
    expect(text).to_have_value("F1 B0 F0 B1\nF0 B0 F1 B1")
    op("0:1").drag_to(op("1:1"))
    page.clock.run_for(500)
    assert words() == ["F1", "B0", "F0", "B1"], "not into another row"
    assert focus(page) == "0:1", "nor is it a click there"
    op("0:2").focus()
    with redrawn(page):
        page.keyboard.press("Shift+ArrowLeft")
    assert page.evaluate("window.asked.at(-1).move") == [0, 2, 1]
    assert words() == ["F1", "F0", "B0", "B1"] and focus(page) == "0:1", "the focus goes along"
    op("1:2").click()
    assert page.evaluate(chosen) == "F1"
    op("0:2").focus()
    with redrawn(page):
        page.keyboard.press("Shift+ArrowLeft")
    op("1:3").click()
    assert page.evaluate(chosen) == "B1"
    assert text.input_value().startswith("F1 B0 F0"), "at once of after the move"


def test_a_state_is_an_address_and_back_is_undo(told_page):
    page, mesh = told_page, told_page.locator('[data-name="mesh"]')
    assert "#" not in page.url
    mesh.fill("fsdp=2 tp=4")
    page.wait_for_url("**#mesh=fsdp=2+tp=4")
    page.locator('[data-name="chip"]').select_option(label="a100-40")
    page.wait_for_url("**#chip=a100-40&mesh=fsdp=2+tp=4")
    with redrawn(page):
        page.go_back()
    expect(page.locator('[data-name="chip"]')).to_have_value('"h100"')
    page.clock.run_for(1000)
    page.go_back()
    expect(mesh).to_have_value("fsdp=4 tp=2")
    page.goto(page.url.partition("#")[0] + '#mesh=fsdp%3D8&fields={"zero":3}&devices=x&what=1')
    page.reload()
    expect(mesh).to_have_value("fsdp=8 tp=1")
    assert "1 set by you" in page.locator(".rest summary").inner_text()
    more = (
        "const ask = window.ask; window.ask = window.more = async (s) => ({ ...(await ask(s)), more: true })"
    )
    page.evaluate(f"() => {{ {more} }}")  # also while more of an answer is still to come
    mesh.fill("fsdp=2 tp=4")
    page.wait_for_url("**mesh=fsdp=2+tp=4**")


def test_a_link_that_cannot_be_read_says_so_and_the_first_explorer_alone_has_the_address(
    tab, told_behind, tmp_path
):
    tab.goto(saved(tmp_path / "page.html", told.document()) + "#devices=x&what=1")
    expect(tab.locator(".said")).to_have_text(re.compile("devices=x, what=1$"))
    more = """async ([source, doc]) => {
      const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
      module.start(doc, null, document.body.appendChild(document.createElement("aside")));
    }"""
    tab.evaluate(more, [FRONT.read_text(), told.document()])
    expect(tab.locator("aside .panel svg").first).to_be_visible()
    assert tab.get_by_role("button", name="copy link").count() == 1


def test_pictures_pages_and_code_are_taken_along(told_page, tmp_path):
    page, found = told_page, {}
    with redrawn(page):
        page.locator('[data-name="mesh"]').fill("fsdp=2 tp=4")
    for do, start in (("svg", b"<svg"), ("png", b"\x89PNG"), ("html", b"<!doctype html>")):
        page.locator(".menu summary").click()
        with page.expect_download() as download:
            page.locator(f'[data-do="{do}"]').click()
        found[do] = Path(download.value.path()).read_bytes()
        assert found[do].startswith(start)
    svg = found["svg"].decode()
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    words = " ".join("".join(text.itertext()) for text in texts)
    assert "var(" not in svg and "<style" not in svg and f'fill="{told.LIGHT["ink"]}"' in svg
    facts = "Does not fit. 6.13 s a step|Train a model on 8 h100, as fsdp=2 tp=4|llmpar 0|fsdp 4|Block of up"
    assert all(fact in words for fact in facts.split("|"))
    assert "data-live" not in svg and "+" not in words, "no button of the form"
    assert page.locator('[data-panel="axes"] [data-live]').count() == 2
    known = found["html"].replace(b'"version":"0"', b'"version":"0","site":"https://a.example/mesh.html"')
    (tmp_path / "again.html").write_bytes(known)
    page.goto((tmp_path / "again.html").as_uri())
    expect(page.locator(".verdict .bad")).to_be_visible()
    assert page.locator('[data-name="mesh"]').input_value() == "fsdp=2 tp=4"
    assert page.locator(".lpx").count() == 1
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for do, text in (
        ("code", "Plan('fsdp=2 tp=4')"),
        ("cite", "llmpar 0, A told explorer: Train a model on 8 h100"),
        ("link", "https://a.example/mesh.html#devices=8&chip=h100&mesh=fsdp=2+tp=4"),
    ):
        page.locator(f'[data-do="{do}"]').click()
        copied = "async (text) => (await navigator.clipboard.readText()).startsWith(text)"
        page.wait_for_function(copied, arg=text)
        expect(page.locator(".said")).to_have_text("copied")
    (tmp_path / "file.html").write_bytes(found["html"])  # the site's address is not known
    page.goto((tmp_path / "file.html").as_uri())
    page.locator('[data-do="link"]').click()
    expect(page.locator(".said")).to_contain_text("holds this choice: send the file")


def test_paper_has_everything_and_no_controls(told_page):
    page = told_page
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".strip svg").count() == 3, "the first instants beside one another"
    for name in ("axes", "grid", "map", "holds", "code"):
        assert page.locator(f'[data-panel="{name}"]').is_visible()
    assert page.locator(".fields").is_visible()
    assert not page.locator(".tools, .player, .tabs").locator("visible=true").count()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator(".strip").count() == 0


def fits(page, width, height=900):
    """Wait until nothing is wider than a screen."""
    page.set_viewport_size({"width": width, "height": height})
    wide = "(width) => innerWidth === width && document.documentElement.scrollWidth <= width"
    page.wait_for_function(wide, arg=width)


# One on the gate, all of them at night: what fails in one of them has failed in most.
OTHERS = itertools.product((1400, 900, 390), ("light", "dark"))
OTHERS = [pytest.param(*way, marks=pytest.mark.nightly) for way in OTHERS if way != (390, "dark")]


@pytest.mark.parametrize("width, scheme", [(390, "dark"), *OTHERS])
def test_it_is_accessible(told_page, width, scheme):
    told_page.emulate_media(color_scheme=scheme)
    told_page.locator(".rest summary").click()
    fits(told_page, width)
    assert violations(told_page) == []


def test_it_fits_a_laptop_and_a_phone(told_page):
    page = told_page
    page.locator(".rest summary").click()
    for width in (900, 1400, 390):  # of a laptop's first screen: the mesh explorer below
        fits(page, width)
    expect(page.locator(".panel:visible")).to_have_count(1)
    page.locator('[data-tab="layer"]').click()
    assert page.locator(".panel:visible h2").inner_text() == "One layer"
    assert page.locator(".player").is_visible()
    sizes = """(pick) => [...document.querySelectorAll(pick)].filter((e) => e.getClientRects().length)
        .map((e) => [e, e.getBoundingClientRect().height, parseFloat(getComputedStyle(e).fontSize)])
        .map(([e, ...sizes]) => [e.outerHTML.slice(0, 80), ...sizes])"""
    for tab in page.locator("[data-tab]").all():
        tab.click()
        for text, height, _ in page.evaluate(sizes, "button, select, input:not([type=range]), summary"):
            assert height >= 32, text
        for text, height, size in page.evaluate(sizes, "text, p, td, th, label, button, summary, span"):
            assert size >= 10 and (height >= 9 or not height), text


def test_a_notebooks_two_views_follow_each_other_and_python(tab, told_behind):
    notebook(tab, traits(), views=2)
    tab.locator('main [data-name="mesh"]').fill("fsdp=2 tp=4")
    for place in ("main", "aside"):
        expect(tab.locator(f"{place} .verdict .bad")).to_be_visible()
        expect(tab.locator(f'{place} [data-panel="map"]')).to_be_visible()
    assert tab.locator('aside [data-name="mesh"]').input_value() == "fsdp=2 tp=4"
    tab.locator("aside .step").click()
    expect(tab.locator("main .verdict .good")).to_be_visible()
    tab.evaluate(
        "([state, answer]) => { model.set('state', state); model.set('answer', answer); }",
        [(s := told.START | {"device": 6}), told.answer(s)],
    )
    for place in ("main", "aside"):
        assert tab.locator(f'{place} [aria-label="8 devices, device 6 chosen"]').count() == 1


def test_a_reopened_notebook_shows_all_that_it_showed(tab):
    """Its JSON has sorted keys, and nobody answers; three seconds after a click that is said."""
    notebook(tab, json.loads(json.dumps(traits(mesh="fsdp=2 tp=4"), sort_keys=True)), dead=True)
    said, waiting = tab.locator(".said"), tab.locator(".lpx.waiting")
    assert waiting.count() == 0 and "Does not fit. 6.13 s a step" in tab.locator(".verdict").inner_text()
    for name in ("axes", "grid", "layer", "times"):
        assert tab.locator(f'[data-panel="{name}"] svg').is_visible()
    tab.clock.run_for(5000)
    assert said.inner_text() == "", "nobody was asked anything"
    tab.locator('[data-panel="grid"] [data-set]').nth(5).click()
    assert waiting.count() == 1
    tab.clock.run_for(3500)
    assert "Python does not answer" in said.inner_text()
    assert tab.locator('[data-panel="grid"] svg').is_visible()


def test_a_redraw_lays_the_page_out_once(tab, tmp_path, devices=512):
    """As the browser counts: asking for a size in between costs as much as the pictures."""
    start = {"mesh": f"fsdp={devices // 8} tp=8", "devices": devices}
    stored = [told.answer(told.START | start | {"device": i}) for i in range(9)]
    tab.goto(saved(tmp_path / "page.html", told.document(**start) | {"live": False, "stored": stored}))
    redraw = (FIXTURES / "redraw.js").read_text()
    tab.evaluate(redraw, [0, 1])
    sizes = tab.locator(".pic").evaluate_all("(all) => all.map((pic) => pic.innerHTML.length)")
    assert sum(sizes) <= 300_000
    browser = tab.context.new_cdp_session(tab)
    browser.send("Performance.enable")
    counted = lambda: {x["name"]: x["value"] for x in browser.send("Performance.getMetrics")["metrics"]}
    before, revision = counted(), int(tab.locator(".lpx").get_attribute("data-revision"))
    tab.evaluate(redraw, [1, 9])
    assert int(tab.locator(".lpx").get_attribute("data-revision")) == revision + 8
    assert counted()["LayoutCount"] - before["LayoutCount"] <= 8


EXPLORERS = "mesh timeline routing memory overlap ring specs hlo".split()


def mount(page, behind, explorer):
    """Show an explorer as a notebook does; behind it the real widget answers."""
    widget = explorer.rich

    def ask(state):
        widget.state = state
        return widget.answer

    def more(state):
        widget._message(None, {"more": True}, None)
        return widget.answer

    behind |= {"ask": ask, "more": more}
    values = {"doc": widget.doc, "state": widget.state, "answer": widget.answer}
    notebook(page, json.loads(json.dumps(values)))


def test_a_pin_and_a_machine_are_part_of_the_address(tab, tmp_path):
    """Of a small page, too, which stores what a click on a pin shows."""
    explorer = MeshExplorer(model="tiny", seq_len=64, mesh="fsdp=8", batch_size=64, network=12.5)
    small(tab, tmp_path, explorer)
    tab.locator('[data-panel="beside"] button', has_text="pin").first.click()
    tab.wait_for_url("**#pinned=fsdp=8")
    expect(tab.locator(".card").last).to_contain_text("Pinned fsdp=8")
    assert tab.locator('[data-name="network"]').input_value() == "12.5"


def test_what_is_asked_and_unknown_is_shown_and_refused(tab, behind):
    mount(tab, behind, MeshExplorer(model="gpt5", mesh="dp=2"))
    assert tab.locator('[data-name="config"]').input_value() == "gpt5"
    assert "gpt5" in tab.locator(".why").inner_text()
    assert tab.locator(".panel:visible").count() == 0 and "last that" not in tab.locator("main").inner_text()


def test_the_first_screen_fits_a_laptop(tab, behind):
    explorer = MeshExplorer(model="llama3-70b", mesh="fsdp=8 tp=8", chip="h100", batch_size=64)
    tab.set_viewport_size({"width": 1400, "height": 900})
    mount(tab, behind, explorer)
    expect(tab.locator(".step").first).to_be_visible()  # advice comes last, and takes room
    bottoms = "(all) => all.map((e) => e.getBoundingClientRect().bottom).filter(Boolean)"
    decides = '.card, [data-panel="axes"] svg, [data-panel="memory"] svg, [data-panel="grid"] svg'
    found = tab.locator(f'{decides}, [data-panel="map"] svg').evaluate_all(bottoms)
    assert len(found) >= 5 and max(found) <= 900
    tops = tab.locator(".panels .pic svg").evaluate_all(bottoms.replace("bottom", "top"))
    assert len(tops) >= 6 and max(tops) <= 900, "every picture begins on it"
    wide = tab.locator(".panels .pic").evaluate_all("(all) => all.map((e) => e.scrollWidth - e.clientWidth)")
    assert max(wide) <= 1, "no picture is cut"
    tab.evaluate("scrollTo(0, 2000)")
    assert tab.locator(".verdict").bounding_box()["y"] == 0, "the verdict stays in sight"


def small(page, folder, explorer):
    """Open a small page as a file: no kernel, no server, no network."""
    path = folder / "page.html"
    if isinstance(explorer, str):
        path.write_text(shared.small_page(explorer), encoding="utf-8")
    else:
        explorer.save(path, small=True)
    page.goto(path.as_uri())
    expect(page.locator(".panel :is(svg, table):visible").first).to_be_visible()
    assert page.locator("h1").count() == 1


def test_small_pages_fit_a_laptop_and_a_phone(tab, tmp_path):
    each = """(width) => [...document.querySelectorAll(".tabs button, h1")].flatMap((tab) => {
      if (tab.getClientRects().length) tab.click();
      const texts = [...document.querySelectorAll(".panel svg text")];
      return document.documentElement.scrollWidth > width ? [tab.textContent]
        : texts.map((e) => e.getBoundingClientRect().height).filter((high) => high && high < 9);
    })"""
    for kind in EXPLORERS:
        small(tab, tmp_path, kind)
        for width in (1280, 390):
            fits(tab, width, 800)
            assert tab.evaluate(each, width) == [], "a picture scrolls, its words do not shrink"


def test_a_pasted_text_stays_in_the_page_and_out_of_its_link(tab, tmp_path):
    """A dropped file is pasted, too; without Python the page says that it has no answer stored."""
    small(tab, tmp_path, "hlo")
    tab.locator('[data-name="mesh"]').fill("A=4 B=2")
    tab.evaluate((FIXTURES / "drop.js").read_text(), SAMPLE.replace("model.py", "other.py"))
    expect(tab.locator("textarea")).to_have_value(re.compile("other.py"))
    expect(tab.locator(".said")).to_contain_text("none for this choice")
    tab.locator('[data-do="link"]').click()
    expect(tab.locator(".said")).to_contain_text("#mesh=A=4+B=2")
    assert "other.py" not in tab.locator(".said").inner_text()


@pytest.mark.parametrize(
    "kind", ["mesh", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in EXPLORERS[1:])]
)
def test_a_small_page_is_accessible_and_shows_what_is_one_click_away(tab, tmp_path, kind, request):
    small(tab, tmp_path, kind)
    every = request.node.get_closest_marker("nightly")
    for width, scheme in itertools.product((1280, 390), ("light", "dark")) if every else [(1280, "light")]:
        fits(tab, width, 800)
        tab.emulate_media(color_scheme=scheme)
        assert violations(tab) == []
    if kind == "mesh":
        assert tab.evaluate("llmpar.doc.stored.length") > 2
        assert not any(name in tab.evaluate("llmpar") for name in ("ask", "more"))
        with redrawn(tab):
            tab.locator("main svg [data-set]").first.click()


def test_a_saved_page_of_arrays_is_explored_without_a_kernel(tab, tmp_path):
    small(tab, tmp_path, by_kind("given", arrays()))
    assert violations(tab) == [] and tab.locator("h1").inner_text() == "Shardings"
    told = lambda text: expect(tab.locator("svg text", has_text=text)).to_be_visible()
    tab.get_by_role("button", name="device 5:").click()
    told("Device 5 (data 2, model 1) holds [8:12, 4:8] of w.")
    expect(tab.get_by_text("Device 5 (data 2, model 1): 80 B in all.")).to_be_visible()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("Enter")
    told("Device 3 (data 1, model 1) holds [4:8, 4:8] of w.")
    tab.get_by_role("button", name="b", exact=True).click()  # two clicks from where it starts
    expect(tab.get_by_text("none for this choice")).to_be_visible()
    fits(tab, 390, 800)


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab of its own: free port, private folders, one notebook."""
    cells = [
        "import llmpar\nexplorer = llmpar.MeshExplorer(model='tiny', seq_len=64, batch_size=64)\nexplorer",
        "state, verdict = explorer.state, explorer.rich.answer['verdict']\n"
        "print(state['mesh'], state['device'], state['chip'], verdict['head'])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "x.ipynb")
    settings = tmp_path / "config" / "labconfig"
    settings.mkdir(parents=True)
    off = {"@jupyterlab/apputils-extension:announcements": True}
    (settings / "page_config.json").write_text(json.dumps({"disabledExtensions": off}))
    folders = {f"JUPYTER_{name.upper()}_DIR": str(tmp_path / name) for name in ("config", "data", "runtime")}
    env = os.environ | folders | {"IPYTHONDIR": str(tmp_path / "ipython")}
    env |= {"JUPYTER_CONFIG_PATH": str(ROOT / "llmpar" / "cli")}  # as `llmpar lab` does
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    options = "--no-browser --allow-root --port=0 --ip=127.0.0.1 "
    options += "--IdentityProvider.token=t --LabApp.expose_app_in_browser=True"
    command = [sys.executable, "-m", "jupyterlab", *options.split(), f"--ServerApp.root_dir={tmp_path}"]
    command += [f"--LabServerApp.workspaces_dir={tmp_path / 'ws'}"]
    with shared.started(command, r"(http://127.0.0.1:\d+)/lab", env=env, cwd=tmp_path) as found:
        yield f"{found[1]}/lab/tree/x.ipynb?token=t&reset"


def test_jupyterlab_session(chromium, lab, tmp_path):
    """Type a mesh, choose chip and device; Python reads what hands did; reopened, the numbers are there."""
    faults: list[str] = []

    def opened():
        """JupyterLab brings no widget back where two pages share something."""
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(5 * shared.WAIT_MS)  # a server, a kernel and JAX start
        page.on("request", lambda one: None if one.url.startswith(shared.LOCAL) else faults.append(one.url))
        return page

    page, book = opened(), "window.jupyterapp.shell.currentWidget"
    # What JupyterLab says, by either way, of a message whose topic it reads as JSON.
    early = re.compile(r'"(stream|kernel)\.\w+"(\.\.\.)? is not valid JSON')
    page.on("pageerror", lambda error: None if early.search(str(error)) else faults.append(str(error)))
    page.on("console", lambda m: None if m.type != "error" or early.search(m.text) else faults.append(m.text))
    page.goto(lab)
    page.wait_for_function(f"window.jupyterapp && {book}?.sessionContext")
    page.evaluate(f"{book}.sessionContext.ready")
    page.wait_for_function(f"{book}.sessionContext.session?.kernel?.status === 'idle'")
    page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    cell = page.locator('[data-panel="grid"] [data-set]')
    expect(cell.first).to_be_visible(timeout=5 * shared.WAIT_MS)
    with redrawn(page):
        page.locator('[data-name="mesh"]').fill("dp=2 fsdp=4")
    expect(page.locator('[data-panel="code"]')).to_contain_text("dp=2 fsdp=4")
    with redrawn(page):
        page.locator('[data-name="chip"]').select_option(label="a100-40")
    cell.nth(3).click()
    expect(page.locator('[data-panel="holds"]')).to_contain_text("Device 3")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("x")  # would cut the user's cell but for data-lm-suppress-shortcuts
    page.keyboard.press("Enter")
    expect(page.locator('[data-panel="holds"]')).to_contain_text("Device 2")
    assert page.evaluate("document.activeElement.dataset.set") == '{"device": 2}'
    assert page.evaluate(f"{book}.content.widgets.length") == 2
    page.evaluate(f"""async () => {{ {book}.content.activeCellIndex = 1;
        await window.jupyterapp.commands.execute('notebook:run-cell'); }}""")
    explorer = MeshExplorer(model="tiny", seq_len=64, batch_size=64, mesh="dp=2 fsdp=4", chip="a100-40")
    head = explorer.answer(dict(explorer.state))["verdict"]["head"]
    expect(page.locator(".jp-Notebook")).to_contain_text(f"dp=2 fsdp=4 2 a100-40 {head}")
    expect(page.locator(".lpx.waiting")).to_have_count(0)
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function(f"!{book}.context.model.dirty")
    assert "jupyter.widget-state+json" in (tmp_path / "x.ipynb").read_text(), "saved with its explorer"
    page.evaluate(f"{book}.sessionContext.shutdown()")
    page.close()
    # one's own notebook with a new kernel: not "model not found", but the explorer as it was left
    page = opened()
    cell = page.locator('[data-panel="grid"] [data-set]')
    for tolerated in (AssertionError, AssertionError, ()):  # busy, JupyterLab may give up until reloaded
        page.goto(lab)
        with contextlib.suppress(tolerated):
            expect(cell).to_have_count(8, timeout=2 * shared.WAIT_MS)
            break
    assert page.locator("text=model not found").count() == 0
    assert head in page.locator(".verdict").inner_text() and not page.locator(".lpx.waiting").count()
    for panel in ("memory", "step", "sent", "grid"):
        assert page.locator(f'[data-panel="{panel}"] svg').count() == 1
    page.close()
    assert faults == []
