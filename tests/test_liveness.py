"""What a traced step holds at its fullest moment: by hand for small programs, and against what real compilers
said."""

import functools
import json
import statistics

import compare_memory
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from llmpar.inspect.liveness import LAWS, TARGETS, Liveness, traced_peak
from llmpar.mesh import abstract_mesh
from llmpar.plan import Plan
from llmpar.predict import memory
from llmpar.predict.hardware import chip
from llmpar.step import Step

RECORD = json.loads(compare_memory.RECORD.read_text())
H100, V5E, V5P = "h100:8x8", "v5e:4x8", "v5p:4x4x4"
GIB = 2**30
KB = 1024
SQUARE = jnp.zeros((16, 16))  # one kilobyte


# ------------------------------------------------------------------------------------------- by hand


def held(f, *args, laws=()):
    """The peak of a function's program in kilobytes; a few bytes of indices are left out."""
    peak = Liveness(frozenset(laws)).fullest(jax.make_jaxpr(f)(*args).jaxpr).bytes
    return round(peak / KB, 1)


def test_a_chain_of_products_holds_two():
    assert held(lambda x: x @ x, SQUARE) == 1
    assert held(lambda x: x @ x @ x @ x, SQUARE) == 2


def test_what_is_cheap_exists_only_where_it_is_wanted():
    """A product wants the sine, a sum reads it as it comes."""
    assert held(lambda x: jnp.sin(x) @ x, SQUARE) == 2
    assert held(lambda x: jnp.sin(x * x + x).sum(), SQUARE) == 0
    assert held(lambda x: jnp.sin(x) @ x, SQUARE, laws=["prologue"]) == 1


def test_a_result_takes_the_place_of_what_is_read_last():
    """The sine takes the product's memory; a transpose cannot."""
    assert held(lambda x: jnp.sin(x @ x) @ x, SQUARE) == 2
    assert held(lambda x: jnp.sin(x @ x).T @ x, SQUARE) == 2
    assert held(lambda x: lax.dynamic_update_index_in_dim(x @ x, x[0], 0, 0), SQUARE) == 1
    assert (
        held(lambda x: lax.dynamic_update_index_in_dim(x, x[0], 0, 0), SQUARE) == 1
    )  # the input is not ours


def test_a_loop_holds_what_it_stacks_its_carry_once_and_its_body():
    turn = lambda carry, x: (carry @ x, jnp.sin(carry))
    # Four slices stacked, the carry, and the new carry beside the old one.
    assert held(lambda x, xs: lax.scan(turn, x @ x, xs), SQUARE, jnp.zeros((4, 16, 16))) == 6


def test_of_branches_the_largest_counts_and_a_state_is_changed_in_place():
    change = lambda state, x: lax.cond(
        x[0, 0] > 0, lambda s: lax.dynamic_update_index_in_dim(s, x, 1, 0), lambda s: s, state
    )
    many = lambda x: change(jnp.stack([x @ x] * 8), x)
    assert held(many, SQUARE) == 9  # the product, of which eight copies are made
    assert held(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x), SQUARE) == 2


def test_what_only_the_end_waits_for_runs_last():
    """Its operand lives on, through all that others wait for."""

    def f(x):
        y = x @ x
        gradient = y @ x  # only the result waits
        for _ in range(3):
            y = y @ x
        return y, gradient

    assert held(f, SQUARE) == 3
    assert held(f, SQUARE, laws=["late"]) == 3
    big = lambda x: (jnp.sin(x @ x.T @ x), (x @ x.T).sum(), x @ x.T @ x @ x.T)
    assert held(big, SQUARE, laws=["late"]) >= held(big, SQUARE)


def test_a_loop_that_nothing_waits_for_runs_last_but_in_a_loop():
    """What it reads is held beside all that runs before it."""

    def value_beside(x):
        y = x @ x
        value, _ = lax.scan(lambda total, row: (total + (row[None] @ y).sum(), None), 0.0, y)
        return value, (x.T @ x) @ (x @ x.T)

    assert held(value_beside, SQUARE) == 3 and held(value_beside, SQUARE, laws=["loops"]) == 4
    twice = lambda x: lax.scan(lambda total, _: (total + value_beside(x)[0], None), 0.0, None, length=2)
    assert held(twice, SQUARE) == held(twice, SQUARE, laws=["loops"])


def test_gradients_of_turns_that_are_written_out_come_after_all():
    """The first turn's sine is held while the second turn runs."""

    def loop(unroll):
        def turn(carry, x):
            y = jnp.sin(carry @ x)
            return y @ x, y.T @ y

        return lambda xs: lax.scan(turn, xs[0], xs, unroll=unroll)

    xs = jnp.zeros((4, 16, 16))
    assert held(loop(1), xs, laws=["turns"]) == held(loop(1), xs)
    assert held(loop(2), xs, laws=["turns"]) == held(loop(2), xs) + 1


def test_what_only_products_read_is_computed_inside_them():
    """In each of them, if there are two; not if the end wants it."""
    two = lambda x: (x @ x, jnp.sin(x @ x) @ x, x @ jnp.sin(x @ x))
    assert held(two, SQUARE, laws=["prologue"]) == held(two, SQUARE) == 4
    assert held(two, SQUARE, laws=["operands"]) == 3
    wanted = lambda x: (jnp.sin(x @ x), *two(x))
    assert held(wanted, SQUARE, laws=["operands"]) == held(wanted, SQUARE) == 4


def test_a_product_is_written_into_what_it_is_added_to():
    two = lambda x, y: x @ x + y @ x
    assert held(two, SQUARE, SQUARE) == 2 and held(two, SQUARE, SQUARE, laws=["added"]) == 1
    both = lambda x: (x @ x, x @ x + x @ x @ x)  # the first is wanted as it is
    assert held(both, SQUARE, laws=["added"]) == held(both, SQUARE) == 2


def test_what_a_loop_sums_over_devices_is_whole_until_it_has_ended():
    """A sixteenth of a square is carried, and its sixteen sixteenths are added up."""

    def turns(x, xs):
        scatter = lambda y: lax.psum_scatter(y, "i", tiled=True)
        return lax.scan(lambda total, row: (total + scatter(row @ x), None), x[:1], xs)[0]

    step = jax.make_jaxpr(turns, axis_env=[("i", 16)])(SQUARE, jnp.zeros((4, 16, 16))).jaxpr
    bytes_held = lambda *laws: Liveness(frozenset(laws)).fullest(step).bytes
    assert bytes_held("sums") - bytes_held() == 15 * KB / 16


def test_a_product_is_written_in_the_type_that_is_read():
    half = jnp.zeros((16, 16), jnp.bfloat16)
    product = lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32).astype(jnp.bfloat16) @ x
    assert held(product, half) == 1.5 and held(product, half, laws=["narrow"]) == 1


def test_equal_equations_are_one_and_what_is_recomputed_is_not():
    assert held(lambda x: (x @ x) + (x @ x), SQUARE) == 1
    again = jax.checkpoint(lambda x: x @ x, prevent_cse=True)
    assert held(lambda x: again(x) + again(x), SQUARE) == 2  # the sum takes the place of one
    assert held(lambda x: again(x).T @ again(x), SQUARE) == 3


def test_a_stack_that_a_loop_converts_is_held_in_both_types():
    """Where the law holds: four slices of half a kilobyte each, beside the carry and its new value."""
    turn = lambda carry, w: (carry @ w.astype(jnp.bfloat16), None)
    step = jax.make_jaxpr(lambda x, ws: lax.scan(turn, x @ x, ws)[0])
    jaxpr = step(jnp.zeros((16, 16), jnp.bfloat16), jnp.zeros((4, 16, 16))).jaxpr
    held = lambda *laws: Liveness(frozenset(laws)).whole(jaxpr)
    assert held("converted").bytes - held().bytes == 2 * KB
    assert held("converted").held[0][1].startswith("converted float32[4,16,16]")


def test_what_only_products_read_is_gathered_in_their_precision():
    """Half of four squares, unless a precision is asked for."""

    def bytes_held(precision, *laws):
        product = lambda x: jnp.matmul(lax.all_gather(x, "i", tiled=True), x, precision=precision)
        step = jax.make_jaxpr(product, axis_env=[("i", 4)])(SQUARE)
        return Liveness(frozenset(laws)).whole(step.jaxpr).bytes

    assert bytes_held(None) - bytes_held(None, "rounded") == 2 * KB
    assert bytes_held("highest", "rounded") == bytes_held("highest")


def test_another_reading_is_not_traced():
    case = compare_memory.cases(H100)[0]
    plan = Plan("fsdp=64", reading="auto")
    step = Step(case.config, plan, abstract_mesh(plan.mesh), __import__("optax").sgd(0.1))
    assert traced_peak(step, 64, 128) is None


# -------------------------------------------------------------------- against what compilers have said


@functools.cache
def peak(target, name, without=None):
    """The temporaries that the traced program of a recorded case has, with all laws or less one; None where
    it can only be traced beside cuDNN."""
    case = next(c for c in compare_memory.cases(target) if c.name == name)
    platform = "gpu" if target == H100 else "tpu"
    try:
        return compare_memory.traced(case, platform, without).bytes
    except (RuntimeError, ValueError) as error:
        assert "cudnn" in str(error).lower()
        return None


def errors(target, without=None, names=None):
    """Relative errors of the traced estimate, by name."""
    rows = RECORD[target]["plans"]
    found = {name: peak(target, name, without) for name in names or rows if not rows[name]["refused"]}
    return {name: size / rows[name]["temp"] - 1 for name, size in found.items() if size}


ROOM = 1.5 * chip("h100").usable_bytes
COMPARED = [name for name, row in RECORD[H100]["plans"].items() if row["temp"] < ROOM]
"""What is too large by a half is left out: there the compiler computes again what the program keeps."""


def test_temporaries_on_a_gpu():
    """Within 15 % of what the compiler for H100s plans, half of them within 3 %."""
    found = errors(H100, names=COMPARED)
    assert not {n: f"{e:+.1%}" for n, e in found.items() if abs(e) > 0.15} and len(found) >= 34
    assert statistics.median(map(abs, found.values())) <= 0.03


@pytest.mark.parametrize("target", [V5E, V5P])
def test_temporaries_on_a_tpu(target):
    """Within 15 % of what their compiler plans but for one plan, half of them within 6 %."""
    found = errors(target)
    late = found.pop("fsdp-tp8-sequence")  # v5e makes the vocabulary's gradient last there, v5p does not
    assert abs(late) <= 0.2 and not {n: f"{e:+.1%}" for n, e in found.items() if abs(e) > 0.15}
    assert len(found) >= 12 and statistics.median(map(abs, found.values())) <= 0.06


WITNESSES = {
    "late": (H100, "fsdp-tp8-sequence"),
    "loops": (V5E, "fsdp-unroll"),
    "turns": (V5E, "fsdp-unroll"),
    "narrow": (H100, "pp4-1f1b"),
    "added": (V5E, "pp4-interleaved"),
    "prologue": (H100, "pp4-zb-h1"),
    "operands": (V5E, "fsdp-xla"),
    "prefetch": (H100, "fsdp"),
    "stacks": (H100, "405b-fsdp-tp8"),
    "converted": (V5E, "dp2-fsdp-tp4"),
    "rounded": (V5P, "fsdp-float32"),
    "scatters": (H100, "fsdp-zero1"),
    "sums": (V5P, "dp-fsdp8-microbatches"),
    "copies": (H100, "pp4-zb-h1"),
}


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_needed(law):
    """Without it, one of the compiled plans is worse by at least three hundredths."""
    target, name = WITNESSES[law]
    (true,) = errors(target, names=[name]).values()
    (less,) = errors(target, law, [name]).values()
    assert abs(less) >= abs(true) + 0.03


def test_a_target_has_known_laws():
    assert all(laws <= set(LAWS) for laws in TARGETS.values())


def test_what_is_alive_is_told():
    """The list of what is held adds up to the peak, and starts with the largest."""
    case = next(c for c in compare_memory.cases(H100) if c.name == "fsdp")
    found = compare_memory.traced(case, "gpu")
    sizes = [size for size, _ in found.held]
    assert sum(sizes) == found.bytes and sizes == sorted(sizes, reverse=True)
    assert "8192,128256" in found.held[0][1]  # the logits, until their weight's gradient is made


# ------------------------------------------------------------------------------------------ the formula


def formula(target):
    return lambda case: compare_memory.formula(case, "gpu" if target == H100 else "tpu")


@pytest.mark.parametrize("target", [H100, V5E, V5P])
def test_the_formula(target):
    """Nine of ten within 15 % of what the compiler plans, half of them within 5 %, none beyond 18 %."""
    rows = RECORD[target]["plans"]
    cases = [c for c in compare_memory.cases(target) if c.name in rows and not rows[c.name]["refused"]]
    cases = [c for c in cases if target != H100 or c.name in COMPARED]
    found = {case.name: formula(target)(case) / rows[case.name]["temp"] - 1 for case in cases}
    assert not {name: f"{e:+.1%}" for name, e in found.items() if abs(e) > 0.18}
    assert statistics.median(map(abs, found.values())) <= 0.05
    assert sum(abs(e) <= 0.15 for e in found.values()) >= 0.9 * len(found)


def test_arguments_are_exact():
    for target, kept in RECORD.items():
        for case in compare_memory.cases(target):
            row = kept["plans"].get(case.name, {})
            if "arguments" in row:
                parts = memory.argument_bytes(case.config, case.plan, case.batch_size, case.seq_len)
                padding = 0 if target == H100 else 1e-3  # TPUs pad vectors to whole tiles
                assert row["arguments"] == pytest.approx(sum(parts.values()), rel=padding, abs=0), case.name


def test_bytes_are_exact():
    """Per axis, collective and arrow, in every program that a compiler took."""
    rows = {
        name: row for kept in RECORD.values() for name, row in kept["plans"].items() if not row["refused"]
    }
    assert len(rows) >= 37 and not [name for name, row in rows.items() if not row["as_predicted"]]


def verdicts(target, capacity, guess):
    """Cases that are called feasible and are not, and those that are called too large and fit with 10 % to
    spare."""
    rows, wrong = RECORD[target]["plans"], []
    for case in compare_memory.cases(target):
        if (row := rows.get(case.name)) is None or (temp := guess(case)) is None:
            continue
        given = sum(memory.argument_bytes(case.config, case.plan, case.batch_size, case.seq_len).values())
        needs = row["total"] if row["refused"] else given + row["temp"]
        if given + temp <= capacity and needs > capacity:
            wrong.append(f"{case.name} is called feasible")
        if given + temp > capacity and needs <= 0.9 * capacity:
            wrong.append(f"{case.name} is refused")
    return wrong


@pytest.mark.parametrize("gib", [59.3, 75.1, 79.1])  # what JAX takes by default, at .95, and all there is
def test_verdicts_on_a_gpu(gib):
    """Nothing that does not fit is called feasible, and nothing refused that fits with room."""
    assert not verdicts(H100, gib * GIB, lambda case: peak(H100, case.name))
    assert not verdicts(H100, gib * GIB, formula(H100))


@pytest.mark.parametrize("target", [V5E, V5P])
def test_verdicts_on_a_tpu(target):
    """The compiler refuses there itself."""
    capacity = chip(target.partition(":")[0]).usable_bytes
    rows = RECORD[target]["plans"].values()
    assert len(rows) >= 20 and all(row["total"] > capacity for row in rows if row["refused"])
    assert not verdicts(target, capacity, lambda case: peak(target, case.name))
    assert not verdicts(target, capacity, formula(target))
