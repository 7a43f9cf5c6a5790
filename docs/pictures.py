"""Write the pictures of the README and its pages: the mesh explorer's first screen, and a timetable.

python docs/pictures.py      needs Chromium and playwright
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from llmpar import MeshExplorer, draw
from llmpar.draw.scene import Scene, to_svg
from llmpar.plan.schedules import make
from llmpar.plan.timetable import timetable

PICTURES = Path(__file__).resolve().parent / "pictures"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def timetable_picture() -> Scene:
    """Four stages, eight microbatches."""
    return draw.timeline(timetable(make("zb-h1", 4, 8)))


def explorer() -> MeshExplorer:
    """What the README shows."""
    return MeshExplorer(model="llama3-70b", batch_size=64, mesh="fsdp=8 tp=8")


def photograph(browser: Any, shown: MeshExplorer, path: Path) -> None:
    """Write an explorer's first screen, 1400 by 900 pixels, with its words inside the file."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    with tempfile.TemporaryDirectory() as there:
        shown.save(Path(there) / "page.html", small=True)
        page.goto((Path(there) / "page.html").as_uri())
        page.wait_for_selector(".lpx svg")
        page.screenshot(path=path)
    said = PngInfo()
    said.add_itxt("Description", shown.scene.text)
    with Image.open(path) as shot:
        shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=said)


if __name__ == "__main__":
    (PICTURES / "timetable.svg").write_text(to_svg(timetable_picture()), encoding="utf-8")
    if (program := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        raise FileNotFoundError("the explorer's picture needs Chromium, which was not found")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        photograph(browser, explorer(), PICTURES / "explorer.png")
