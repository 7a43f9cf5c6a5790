"""The options with which XLA compiles a step, so that more of its communication overlaps on GPUs."""

import jax

from llmpar.plan import backend
from llmpar.plan.plan import Resolved

AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
EARLY = "xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_analytical_latency_estimator"


def compiler_options(plan: Resolved) -> dict[str, bool | int]:
    """Return XLA's options for more overlap on GPUs, where a plan has rings or ragged all-to-alls.

    How many collectives run at a time: XLA's default is one. With one, the two hops
    of a ring's backward pass (the keys, and the sum of their gradients) wait for
    each other, and gathers of weights from other hosts wait for the all-to-alls of
    experts within a host. Allow 4 with rings, else 2.

    When collectives start: in a program with a ragged all-to-all, whose time XLA
    cannot estimate, its default scheduler starts no collective early. Use the
    latency-hiding scheduler and, where JAX's compiler does not abort with it, the
    analytical estimator."""
    ragged = plan.mesh.ep > 1 and plan.dispatch == "ragged"
    if plan.platform != "gpu" or not (ragged or plan.rings):
        return {}
    # With the analytical estimator JAX's compiler aborts: since 0.11 on all GPUs,
    # in 0.10 on Blackwell and newer.
    card = (plan.devices or "").partition(" ")[2]  # the compute capability, such as 9.0
    aborts = jax.__version_info__ >= (0, 11) or backend.since(backend.BLACKWELL, card)
    early = EARLY[: 1 if aborts else 2] if ragged else ()
    return {AT_ONCE: 4 if plan.rings else 2} | dict.fromkeys(early, True)
