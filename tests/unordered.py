"""Which collectives of a program no data orders: what simulated devices may take for one another."""

import functools
import itertools
import operator
import re
from typing import Any

from llmpar.inspect.census import Collective, _collective
from llmpar.inspect.hlo import CALLS, Module, integers


def unordered(text: str, mesh: Any, one_channel: bool = False) -> list[tuple[Collective, Collective]]:
    """Lists the pairs of collectives in HLO text that no path of data orders, those in loops and branches
    too. A device may enter such a pair in either order while another does the opposite.

    With ``one_channel`` only those pairs that simulated devices may take for one another: of one channel, one
    of them in a loop or a branch that the other is not in. `llmpar.channels` leaves none; what remains wants
    threads, for each blocks one (`llmpar.mesh.THREADS_PER_DEVICE`).
    """
    module, pairs = Module(text), list[tuple[Collective, Collective]]()

    @functools.cache
    def inside(comp: str) -> list[tuple[Collective, list[int], bool]]:
        """Lists a computation's collectives, their channels, and whether they are in a loop or branch of it;
        notes its unordered pairs."""
        before, found = dict[str, int](), dict[int, list]()  # sets of places as bits; place to what is there
        # an operand stands before its users
        for place, (name, op) in enumerate(module.computations[comp].items()):
            waits = re.findall(r"control-predecessors=\{(.*?)\}", op.attrs)
            needs = [n for n in re.findall(r"%([\w.\-]+)", " ".join((op.inside, *waits))) if n in before]
            before[name] = functools.reduce(operator.or_, (before[n] for n in needs), 0) | 1 << place
            callees = op.called(*CALLS[op.kind]) if op.kind in CALLS else []
            here = [(c, n, True) for i in callees if i in module.computations for c, n, _ in inside(i)]
            if one := _collective(module, op, mesh):
                here.append((one, integers(op.attrs, "channel_id="), False))
            if not here:
                continue
            loose = [c for other, theirs in found.items() if not before[name] >> other & 1 for c in theirs]
            for (a, one_of, a_deep), (b, other_of, b_deep) in itertools.product(loose, here):
                if not one_channel or one_of == other_of and (a_deep or b_deep):
                    pairs.append((a, b))
            found[place] = here
        return [c for here in found.values() for c in here]

    inside(module.entry)
    return pairs
