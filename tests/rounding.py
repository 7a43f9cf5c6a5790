"""A rehearsal on CPUs of accelerators' products: those that state no precision get rounded operands.

LLMPAR_TEST_ROUNDING=bf16 python -m pytest -m accelerator     as on a TPU; tf32: as on a GPU
python tests/rounding.py bf16 notebooks/src/03_*.py           a lesson or another script; exact: unrounded"""

import os
import runpy
import sys

import jax
from jax import lax
from jax.interpreters import mlir

MANTISSA_BITS = {"bf16": 7, "tf32": 10}


def round_products(to: str) -> None:
    """Round what every product multiplies that is compiled for CPUs and states no precision."""
    bits = MANTISSA_BITS[to]

    def product(x, y, **how):
        x, y = (lax.reduce_precision(z, 8, bits) if z.dtype == "float32" else z for z in (x, y))
        return lax.dot_general_p.bind(x, y, precision=(lax.Precision.HIGHEST,) * 2, **how)

    rounded = mlir.lower_fun(product, multiple_results=False)
    exact = mlir._platform_specific_lowerings["cpu"][lax.dot_general_p].rule  # the one private name

    def lower(context, x, y, *, precision, **how):
        if precision in (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2):
            return rounded(context, x, y, **how)
        return exact(context, x, y, precision=precision, **how)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")
    jax.clear_caches()  # a folder of compiled programs may stay: there the rounding is part of the program


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    name, script, *sys.argv[1:] = sys.argv[1:]
    if name != "exact":
        round_products(name)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(script))))  # as a kernel in notebooks/
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
