"""What llmpar takes from JAX without a public name: one file has it, and each piece still is what it was.

A test here that fails on a new JAX names the function of `llmpar.parallel._jax` to mend.
test_channels.py asks the same of its channels."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import distributed, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

import llmpar
from llmpar.parallel import _jax
from llmpar.parallel.collectives import WEIGHT
from llmpar.parallel.mesh import make_mesh, spec
from llmpar.parallel.remat import _all_but_gathered_weights
from llmpar.plan.layout import parse_layout

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


@pytest.mark.parametrize(
    "text", ["from jax._src import core", "import jax._src.core", "x._executable", "'jax._src'"]
)
def test_a_private_name_is_seen(text):
    assert len(list(private_names({"a": ast.parse(text)}))) == 1


def test_primitives_have_the_names_that_remat_policies_look_for():
    """A weight that is gathered, in both modes and with its barriers, is not kept; a matmul is."""
    mesh, seen = make_mesh("fsdp=2"), {}
    policy = lambda prim, *_, **params: seen.setdefault(
        prim.name, _all_but_gathered_weights(prim, *_, **params)
    )

    def block(w, x):
        w = checkpoint_name(lax.optimization_barrier(lax.all_gather(w, "fsdp", tiled=True)), WEIGHT)
        return jnp.sin(x @ w)

    def loss(w, x):
        return lax.psum(jax.checkpoint(block, policy=policy)(w, x).sum(), "fsdp")

    cut, whole = spec(parse_layout("d/fsdp m")), spec(parse_layout("whole"))
    run = jax.shard_map(loss, mesh=mesh, in_specs=(cut, spec(parse_layout("b/fsdp d"))), out_specs=whole)
    jax.make_jaxpr(jax.grad(run))(jnp.ones((4, 2)), jnp.ones((2, 4)))
    assert seen.pop("all_gather") is False and seen.pop("optimization_barrier") is False
    assert seen["dot_general"] and not seen["name"]


def test_what_explicit_does_to_a_weight_has_the_names_too():
    mesh = make_mesh("fsdp=2").update(axis_types=(jax.sharding.AxisType.Explicit,) * 6)
    with jax.set_mesh(mesh):
        f = lambda w: jax.sharding.reshard(w, NamedSharding(mesh, PartitionSpec()))
        program = jax.make_jaxpr(f)(jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec("fsdp"))))
    assert any(eqn.primitive.name.startswith(_jax.OF_SHARDS) for eqn in program.eqns)


def test_cudnn_s_attention_has_the_name_that_remat_looks_for():
    """By the primitive itself: to trace it JAX looks for cuDNN."""
    assert fused_attention_stablehlo._dot_product_attention_fwd_p_wrapper.name == _jax.ATTENTION_KERNEL


def test_a_compiled_program_tells_its_shardings():
    mesh = make_mesh("dp=2")
    cut = NamedSharding(mesh, PartitionSpec("dp"))
    constant = jax.device_put(jnp.arange(4.0), cut)
    f = jax.jit(lambda x, unused, y: (x + constant, y * 2))
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=cut)
    arguments, captured, results = _jax.program_shardings(f.lower(x, x, x).compile())
    assert [pair and pair[1].spec for pair in arguments] == [cut.spec, None, cut.spec]
    assert all(pair[1].is_equivalent_to(cut, 1) for pair in captured + results) and len(results) == 2


def test_a_type_tells_its_unreduced_kind():
    assert _jax.unreduced_kind(PartitionSpec(None, unreduced={"a"})) == "sum"


def test_equations_of_a_traced_function_can_be_cut_out_and_run():
    constant = np.arange(3.0)
    closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x) + constant, y * 2))(jnp.ones(3), jnp.ones(3))
    jaxpr, consts = _jax.equations(closed)
    assert {type(v) for eqn in jaxpr.eqns for v in eqn.invars if hasattr(v, "val")} == {core.Literal}
    last = [eqn for eqn in jaxpr.eqns if jaxpr.outvars[1] in eqn.outvars]
    part = _jax.part_of(jaxpr, last, jaxpr.invars[1:], jaxpr.outvars[1:])
    (y,) = jax.core.eval_jaxpr(part, consts, jnp.ones(3))
    np.testing.assert_array_equal(y, 2 * np.ones(3))


def test_what_jax_knows_of_processes_has_the_fields_that_launch_reads():
    assert _jax.processes() is distributed.global_state
    assert {"client", "process_id", "num_processes"} <= set(dir(_jax.processes()))


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


def test_a_shard_map_can_be_traced_on_a_mesh_of_ones_and_afterwards_on_its_own():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    body = lambda x: x.reshape(-1, 2) * lax.axis_size("i")
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))
    shapes = lambda: jax.make_jaxpr(lambda x: f(x))(jnp.ones((16, 2))).pretty_print()
    before = shapes()
    with _jax.on_one_device():
        alone = shapes()
    assert before == shapes()
    assert "'i': 8" in before and "'i': 1" in alone and "f32[2,2]" not in alone


def test_a_scan_tells_how_many_operands_are_constants_and_how_many_are_carried():
    def f(w, x, c):
        return lax.scan(lambda c, row: (c + w @ row, row), c, x)

    (eqn,) = jax.make_jaxpr(f)(jnp.ones((3, 3)), jnp.ones((4, 3)), jnp.ones(3)).eqns
    assert _jax.scan_parts(eqn) == (1, 1)
