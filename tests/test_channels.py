"""Loops and branches of simulated devices have their own channels; one file has JAX's private names."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P
from soak import beside_a_loop, local_mesh, over_devices
from test_mesh import in_a_fresh_process

import llmpar
from llmpar.inspect.sent import unordered
from llmpar.parallel import _jax
from llmpar.parallel.mesh import abstract_mesh

SOAK = str(Path(__file__).parent / "soak.py")


def soak(*words: str, **variables: str) -> dict:
    code = (
        f"import runpy, sys; sys.argv = {['soak.py', *words]}; runpy.run_path({SOAK!r}, run_name='__main__')"
    )
    done = in_a_fresh_process(code, **variables)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def numbers(text: str) -> list[str]:
    return re.findall(r"channel_(?:handle<handle = |id=)(\d+)", text)


@pytest.fixture
def as_jax_lowers(monkeypatch):
    """JAX without the package's change."""
    assert _jax.install_channels(), "this JAX lowers in another way: see llmpar/parallel/_jax.py"
    monkeypatch.setattr(mlir, "lower_jaxpr_to_module", mlir.lower_jaxpr_to_module.__wrapped__)


def lowered(platform: str = ""):
    """The program of the reproducer, lowered afresh."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (8, 16), (12, 64, 64))]
    if not platform:
        program, _ = over_devices(lambda *args: beside_a_loop(*args), local_mesh())
        return program.lower(shapes[:2], shapes[2])
    far = abstract_mesh("dp=2 fsdp=2 tp=2")
    f = jax.shard_map(lambda x: lax.psum(x, "tp"), mesh=far, in_specs=P("tp"), out_specs=P())
    where = {"gpu": "cuda"}.get(platform, platform)
    return jax.jit(f).trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower(lowering_platforms=(where,))


def test_a_loop_of_collectives_with_others_beside_it_ends_well_each_time():
    """Without channels each of these crashes, hangs or errs (`soak.py --without`)."""
    said = soak("--runs", "4", "--steps", "20")
    assert said["ends"] == {"ended": 4} and said["answers"] == {"0 wrong": 4}


def test_jax_gives_all_collectives_one_channel(as_jax_lowers):
    """Else JAX has mended it, and `llmpar.parallel._jax` can go."""
    program = lowered()
    assert set(numbers(program.as_text())) == {"1"}
    assert len(unordered(program.compile().as_text(), local_mesh(), one_channel=True)) == 6


def test_a_loop_has_channels_of_its_own_and_the_compiled_program_is_the_same_otherwise(request):
    ours = lowered()
    assert Counter(Counter(numbers(ours.as_text())).values()) == {6: 1, 1: 1}  # beside the loop; in it
    text = ours.compile().as_text()
    assert not unordered(text, local_mesh(), one_channel=True) and len(unordered(text, local_mesh())) == 6
    request.getfixturevalue("as_jax_lowers")
    bare = lambda text: re.sub(r"channel_id=\d+|, metadata=\{.*?\}|stack_frame_id=\d+", "", text)
    plain = lowered().compile().as_text()
    assert plain != text and bare(plain[: plain.index("FileNames")]) == bare(text[: text.index("FileNames")])


def test_a_function_that_is_called_twice_brings_its_channels_once_each():
    """Its loop in two copies; the compiler still joins the sums that stand side by side."""

    @jax.jit
    def twice(x):
        x = lax.psum(x, "a")
        return lax.scan(lambda c, _: (lax.psum(jnp.sin(c), "b"), None), x, None, length=3)[0]

    program, _ = over_devices(lambda x, w: (twice(x), twice(x * 2), lax.psum(x, "a"), w[:1]), local_mesh())
    found = program.lower(jnp.ones(8), jnp.ones(8))
    assert sorted(Counter(numbers(found.as_text())).values()) == [1, 1, 3]
    sums = [line for line in found.compile().as_text().splitlines() if " all-reduce(" in line]
    assert len(sums) == 3 and not unordered(found.compile().as_text(), local_mesh(), one_channel=True)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_accelerators_keep_what_jax_lowers_for_them(platform, request):
    ours = lowered(platform).as_text()
    request.getfixturevalue("as_jax_lowers")
    assert ours == lowered(platform).as_text() and set(numbers(ours)) == {"1"}


def test_another_process_finds_the_compiled_program_in_the_cache(tmp_path):
    cache = dict(JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    cache |= dict(JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
    found = []
    for _ in range(2):
        soak("--runs", "1", "--steps", "1", **cache)
        found.append({name for name in os.listdir(tmp_path) if name.endswith("-cache")})
    assert found[0] and found[0] == found[1]


def test_a_jax_that_lowers_elsewhere_is_said():
    code = "from jax._src.interpreters import mlir; del mlir.lower_jaxpr_to_module\n"
    code += "from llmpar.parallel import _jax; assert not _jax.install_channels()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "lowers in another way than llmpar knows" in done.stderr and not done.returncode


PACKAGE = Path(llmpar.__file__).parent
PUBLIC = {"_replace", "_asdict", "_exit"}
"""Of named tuples and of `os`: documented, whatever they begin with."""


def private_names(sources):
    """Name what is private and not ours: a module with such a part, or an attribute that no file here has."""
    own = set(PUBLIC)
    for tree in sources.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(getattr(node, "id", None) or node.attr)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
    for name, tree in sources.items():
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if not module.startswith(("llmpar", "__future__")) and "._" in module:
                    yield name, node.lineno, module
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "jax._src" in node.value:
                yield name, node.lineno, node.value
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                if not node.attr.startswith("__") and node.attr not in own:
                    yield name, node.lineno, node.attr


def test_one_file_has_all_private_names_of_jax():
    sources = {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}
    assert [row for row in private_names(sources) if row[0] != "parallel/_jax.py"] == []


def test_gloo_can_be_made_to_listen_on_an_address(monkeypatch):
    made = []
    make = lambda *args, **options: made.append(options)
    monkeypatch.setattr(xla_bridge._jax, "make_gloo_tcp_collectives", make)
    _jax.let_gloo_listen("127.0.0.1")
    xla_bridge._jax.make_gloo_tcp_collectives(distributed_client=None)
    assert made == [{"hostname": "127.0.0.1", "distributed_client": None}]


def test_xla_reads_its_flags_in_a_program_without_devices():
    environ = {"XLA_FLAGS": "--xla_no_such_flag=1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", _jax.PARSE_FLAGS], env=environ, capture_output=True, text=True
    )
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag" in done.stderr
