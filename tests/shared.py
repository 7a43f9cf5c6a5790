"""What several test files read: expectations, published numbers, scripts as modules, a browser."""

import contextlib
import functools
import importlib.util
import json
import queue
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
TABLES = tomllib.loads((HERE / "tables.toml").read_text())
CASES = tomllib.loads((HERE / "cases.toml").read_text())
NUMBERS = {row["id"]: row for row in json.loads((HERE / "numbers.json").read_text(encoding="utf-8"))}


def program_text(name: str) -> str:
    """The text of a program that a test runs in a process of its own."""
    return (HERE / "fixtures" / "programs" / f"{name}.py").read_text()


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


WAIT_MS = 60_000
"""How long a page may take for one thing, on a busy machine too."""
LOCAL = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:", "ws://127.0.0.1:")


@contextlib.contextmanager
def chromium():
    """An installed Chromium, driven by playwright; its own download is not used."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    api.expect.set_options(timeout=WAIT_MS)
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


@contextlib.contextmanager
def tab(browser, **context):
    """A page of its own, and what it has said or asked of others than this machine: that must stay empty."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context)
    context.set_default_timeout(WAIT_MS)
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(LOCAL) else faults.append(one.url))
    try:
        yield page, faults
    finally:
        context.close()


MOST = 100_000
"""Bytes of stored answers in a small page of the tests: each takes a fifth of a second."""


@functools.cache
def small_page(kind: str) -> str:
    """The small page of an explorer as it starts, with fewer answers than usual."""
    from llmpar.explore import page
    from llmpar.explore.explorer import by_kind

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "STORED_BYTES", MOST)
        return page.html(by_kind(kind), small=True)


@contextlib.contextmanager
def started(command, says: str, **how):
    """A process, when it has written to stderr what matches ``says``: the match. It is ended afterwards."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how)
    lines, heard = [], queue.Queue()

    def listen():
        with process.stderr:
            for line in process.stderr:
                heard.put(line)
        heard.put(None)

    threading.Thread(target=listen, daemon=True).start()
    try:
        while not lines or not (found := re.search(says, lines[-1])):
            assert (line := heard.get(timeout=300)) is not None, "".join(lines[-50:])
            lines.append(line)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
