"""What several test files read: expectations, published numbers, scripts as modules, a browser."""

import contextlib
import importlib.util
import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
TABLES = tomllib.loads((HERE / "tables.toml").read_text())
NUMBERS = {row["id"]: row for row in json.loads((HERE / "numbers.json").read_text(encoding="utf-8"))}


def load(path: str):
    """A script of the repository, which is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def violations(page) -> list[str]:
    """What the accessibility checker finds on a page: the rule, and the first place."""
    checker = ROOT / "node_modules" / "axe-core" / "axe.min.js"
    if not checker.is_file():
        pytest.skip("axe-core is not installed; run npm install")
    page.evaluate(checker.read_text())
    found = page.evaluate("async () => (await axe.run(document)).violations")
    return [f"{rule['id']}: {rule['nodes'][0]['html'][:90]}" for rule in found]


@contextlib.contextmanager
def chromium(*flags: str):
    """An installed Chromium, driven by playwright; its own download is not used."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    flags = ("--no-sandbox", "--disable-gpu", *flags)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(flags))
        yield browser
        browser.close()
