"""How processes join, which JAX has no public names for (`llmpar.parallel._jax` has the package's other such
names).

    function                             what it is                       why it is needed
    processes                            JAX's record of a job            no public state before devices start
    let_gloo_listen                      an option of Gloo                no public option
"""

import functools
from typing import Any


def processes() -> Any:
    """Return JAX's record of a job's processes, also before a device has started: its ``client`` is None
    where this process has joined none."""
    from jax._src import distributed

    return distributed.global_state


def let_gloo_listen(address: str) -> None:
    """Let Gloo, by which CPU processes exchange data, listen on this address, where this JAX has it. By
    itself it takes what the host's name resolves to, 127.0.1.1 or one that is open to others."""
    from jax._src import xla_bridge

    library: Any = getattr(xla_bridge, "_jax", None)
    if make := getattr(library, "make_gloo_tcp_collectives", None):
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
