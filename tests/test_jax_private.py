"""What llmpar takes from JAX without a public name: one file has it, and each piece still is what it was.

Here is what no other test uses; test_channels.py has its channels, test_check.py, test_given.py and
test_pipeline.py run the rest."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo

import llmpar
from llmpar.parallel import _jax

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


def test_cudnn_s_attention_has_the_name_that_remat_looks_for():
    """By the primitive itself: to trace it JAX looks for cuDNN."""
    assert fused_attention_stablehlo._dot_product_attention_fwd_p_wrapper.name == _jax.ATTENTION_KERNEL


def test_a_traced_function_has_its_equations_and_constants():
    closed = jax.make_jaxpr(lambda x: x + np.arange(3.0))(jnp.ones(3))
    (y,) = jax.core.eval_jaxpr(*_jax.equations(closed), jnp.ones(3))
    assert y.tolist() == [1, 2, 3]


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
