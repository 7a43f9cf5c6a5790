"""The gallery shows every drawing and explorer, and fetches nothing."""

import inspect
import re
from pathlib import Path

import pytest
from PIL import Image
from shared import load

from llmpar import draw
from llmpar.draw.scene import Scene

ROOT = Path(__file__).resolve().parent.parent
gallery = load("slides/gallery.py")


def test_every_drawing_is_in_the_gallery():
    functions = dict(inspect.getmembers(draw, inspect.isfunction))
    drawn = gallery.drawings()
    scenes = {name for name, f in functions.items() if f.__annotations__.get("return") in (Scene, "Scene")}
    assert scenes == set(drawn) - {"explorer without a browser"}
    assert all(isinstance(scene, Scene) and len(scene.text) > 40 for scene in drawn.values())


def test_the_page_is_whole_without_a_browser(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "photograph", lambda folder: [])
    monkeypatch.setattr(gallery, "EXPLORERS", {"routing-explorer": gallery.EXPLORERS["routing-explorer"]})
    text = gallery.build(tmp_path).read_text()
    assert all(re.fullmatch(r"[\w-]+\.(png|html)", path.name) for path in tmp_path.iterdir()), (
        "names without quotes or spaces"
    )
    for name in re.findall(r'(?:src|href)="([^"]*)"', text):
        assert (tmp_path / name).is_file()
    assert text.count("<section>") == len(gallery.drawings()) + len(gallery.EXPLORERS)


@pytest.mark.browser
def test_explorers_are_photographed(tmp_path, monkeypatch):
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    monkeypatch.setattr(gallery, "EXPLORERS", {"routing-explorer": gallery.EXPLORERS["routing-explorer"]})
    gallery.EXPLORERS["routing-explorer"]().save(tmp_path / "routing-explorer.html")
    shots = gallery.photograph(tmp_path)
    if not shots:
        pytest.skip("no Chromium is installed")
    assert len(shots) == 2 and all(shot.stat().st_size > 10_000 for shot in shots)


def test_the_timetable_of_the_pages_is_what_the_package_draws():
    drawn = gallery.to_svg(gallery.timetable_picture())
    assert drawn == (gallery.PICTURES / "timetable.svg").read_text(), "make pictures"


@pytest.mark.browser
def test_the_explorer_s_picture_shows_what_it_says_now():
    """Pixels depend on fonts, so the picture is compared by the words that it carries."""
    with Image.open(gallery.PICTURES / "explorer.png") as picture:
        said = picture.text["Description"]
    explorer = gallery.EXPLORERS["mesh-explorer"]()
    while explorer.more(dict(explorer.state))["more"]:  # the next steps are part of what it says
        pass
    assert said == explorer.scene.text, "make pictures"
