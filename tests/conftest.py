"""A harsher environment than the user's: 8 devices, strict promotion, shapes checked, warnings errors.

LLMPAR_TEST_PLATFORM=cuda (or tpu) runs the tests marked `accelerator` there, LLMPAR_TEST_ROUNDING=bf16 (or
tf32) rehearses that on CPUs (rounding.py).
"""

import collections
import functools
import gc
import importlib.metadata
import itertools
import json
import operator
import os
import re
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = os.environ.get("LLMPAR_TEST_PLATFORM", "cpu")
ROUNDING = os.environ.get("LLMPAR_TEST_ROUNDING", "")
DEVICES = 8
SIMULATED = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    # Eight device threads on two busy cores wait long for one another: by default XLA aborts after a minute.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
    # Most programs here run once or twice: half of the time to compile, the same values.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if importlib.metadata.version("jax") < "0.11":  # later ones have no other emitters
    SIMULATED += ("--xla_cpu_use_fusion_emitters=false",)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *SIMULATED)).strip()
# as llmpar.parallel.mesh.use_devices does: no deadlock of simulated devices
os.environ |= dict.fromkeys(("NPROC", "PJRT_NPROC"), str(4 * DEVICES))
os.environ["JAX_PLATFORMS"] = PLATFORM
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("LLMPAR_TEST_CACHE", str(ROOT / ".jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("LLMPAR_TEST_DAY", time.strftime("%Y%m%d", time.gmtime()))  # of all workers one

import costs
import jax
import pytest
import shared
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook
from tyro import _docstrings

# A process of a user parses once: to read the sources of all classes anew takes a third of each parse.
_docstrings._ClassTokenization.make = staticmethod(functools.cache(_docstrings._ClassTokenization.make))
if ROUNDING:
    from rounding import round_products

    round_products(ROUNDING)
if PLATFORM != "cpu" or ROUNDING:  # what tests compare, they compare in float32
    jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Modules that annotate shapes are checked at run time, LLMPAR_TEST_TYPES=all checks every module,
# which makes the planner five times as slow; mypy has read those. As for mypy, an int will do for a float.
check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))
SHAPED = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "llmpar").rglob("*.py"))
    if "from jaxtyping import" in file.read_text()
]
everything = os.environ.get("LLMPAR_TEST_TYPES") == "all"
install_import_hook("llmpar" if everything else SHAPED, "conftest.check_types")

from llmpar.parallel import _jax

_jax.install_channels()  # as use_devices does, for the tests that make meshes by themselves

SPLIT = {"notebooks:lessons": 99, "compile:compilers": 4}
"""Files whose tests share little: they are dealt to the workers in at most so many groups."""
TOGETHER = {"trackers": "train"}
"""Files that run what others have compiled."""
BY_MODEL = "plans", "plans:long"
"""Files whose tests share what one device answers for a model, the first word of their parameters."""
UNKNOWN_S = 60.0
"""Seconds that a file takes of which none are recorded."""

BARE = "plans random_plans tolerance same_answer moe explicit census".split()
BARE += "pipeline sequence lora attention flash decode train weights hf".split()
"""Nobody asks the programs of these files for their lines, which take a third of the time to compile."""


@pytest.fixture(autouse=True)
def lines_of_operations(request):
    """Whether programs know the lines of their operations, as users' do."""
    if request.path.stem.removeprefix("test_") not in BARE:
        yield
        return
    usual = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    yield
    jax.config.update("jax_traceback_in_locations_limit", usual)


def pytest_pycollect_makeitem(collector, name, obj):
    """A test marked ``full`` is not even made where ``-m`` does not ask for what others sample."""
    asked = re.search(r"(?<!not )\bfull\b", collector.config.getoption("-m").partition("not (")[0])
    is_full = any(mark.name == "full" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_full and not asked else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Cases that are made one by one become a list, of tests that are made."""
    parametrize = metafunc.parametrize
    metafunc.parametrize = lambda names, cases, *args, **how: parametrize(names, [*cases], *args, **how)


@functools.cache
def group(item) -> str:
    """The tests that one worker runs: those of a file, which share caches and fixtures, or of the browser."""
    name = costs.name_of(item)
    if item.get_closest_marker("browser"):
        return "browser"
    if name in BY_MODEL:
        return f"{name} {item.name.partition('[')[2].partition(' ')[0]}"
    name, parts = TOGETHER.get(name, name), SPLIT.get(name, 1)
    return name if parts == 1 else f"{name} {zlib.crc32(item.nodeid.encode()) % parts}"


def pytest_collection_modifyitems(items, config=None):
    """On an accelerator run what is marked for it; the long come first; ``--part 2/8`` keeps an eighth."""
    if config and (part := config.getoption("--part")):
        number, parts = map(int, part.split("/"))
        mine = [zlib.crc32(item.nodeid.encode()) % parts == number - 1 for item in items]
        config.hook.pytest_deselected(items=list(itertools.compress(items, map(operator.not_, mine))))
        items[:] = itertools.compress(items, mine)
    recorded, seconds = costs.read(costs.FILE.read_text()), collections.Counter()
    shares = collections.Counter((costs.name_of(item), group(item)) for item in items)
    tests = collections.Counter(costs.name_of(item) for item in items)
    for (name, where), share in shares.items():
        whole = recorded[name][0].seconds if name in recorded else UNKNOWN_S
        seconds[where] += whole * share / tests[name]
    items.sort(key=lambda item: (-seconds[group(item)], group(item)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
        if PLATFORM == "cpu" and not ROUNDING:
            continue
        if not item.get_closest_marker("accelerator"):
            item.add_marker(pytest.mark.skip(reason="counts on 8 simulated devices and exact products"))
        plan = getattr(item, "callspec", None) and item.callspec.params.get("plan")
        if hasattr(plan, "mesh") and plan.mesh.size > len(jax.devices()):  # of one device no plan is left
            item.add_marker(pytest.mark.skip(reason=f"needs {plan.mesh.size} devices"))


def pytest_collection_finish():
    """Modules and tests stay: without them, and more rarely, Python looks for what is unreachable."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_configure(config):
    config.pluginmanager.register(costs.Costs(config))


def pytest_addoption(parser):
    parser.addoption("--record-costs", metavar="WHY", help="write tests/costs.txt, and why costs grew")
    parser.addoption("--part", metavar="K/N", help="the K-th of N equal parts of the tests, such as 2/8")
    parser.addoption("--record-engines", action="store_true", help="keep times of test_real_engines.py")
    group = parser.getgroup("random plans (test_random_plans.py)")
    group.addoption("--plans", type=int, help="how many; by default those of SEEDS")
    group.addoption("--seed", type=int, help="the first one's seed; the others count on from it")
    group.addoption("--plans-log", help="a JSON line per plan; what has passed there is not run again")


@pytest.fixture
def standard_promotion():
    """Let ints and floats mix, for tests that call Optax themselves: its step counters do."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def call(capsys):
    """Run a command here: its status, and what it wrote."""
    from llmpar.cli import main

    def call(*words: str):
        capsys.readouterr()
        with jax.numpy_dtype_promotion("standard"):
            try:
                status = main(list(words))
            except SystemExit as usage:  # how tyro leaves: 2 for bad usage, 0 for --help
                status = usage.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def document(call):
    """The document of a command with --json, all of its stdout."""

    def document(*words: str) -> dict:
        status, out, err = call(*words, "--json")
        assert status == 0, err
        assert out.endswith("\n") and out.count("\n") == 1
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    return document


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests of a worker."""
    with shared.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def one_tab(chromium):
    with shared.tab(chromium) as found:
        yield found


@pytest.fixture
def tab(one_tab):
    """A page as good as new, that must stay silent and offline: a new process of a browser costs a second."""
    page, faults = one_tab
    page.goto("about:blank")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(media="screen", color_scheme="light")
    faults.clear()
    yield page
    assert faults == []
