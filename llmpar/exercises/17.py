"""Exercises of lesson 17: what leaves a host, whose rows are whose, where a killed run goes on, a sum in two
levels, and who sends what to whom."""

import jax
import numpy as np
from jax import lax

from llmpar.exercises import Exercise, hosts
from llmpar.inspect.census import census_table
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.mesh import abstract_mesh, spec
from llmpar.notation import parse_layout
from llmpar.predict.hosts import sends


def leaves() -> Exercise:
    """Ask how many bytes leave a host in a step, if dp crosses and if tp does."""
    right = {name: hosts.leaving(name)[0] for name in ("dp across", "tp across")}
    dp, tp = right["dp across"], right["tp across"]
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (right | {"dp across": dp / 2}, "dp: that is one device. Two of a host send, each its half."),
            (
                right | {"tp across": tp / 2},
                "tp: that is half: one device of two, or the forward pass alone, which has five of ten sums.",
            ),
            (
                right | {"dp across": 2 * dp},
                "dp: an all-reduce sends 2 (N - 1)/N of the message, and N is 2 here: once, not twice.",
            ),
            (
                right | {"tp across": 2 * tp},
                "tp: that is twice as much. A device has half of the 32 rows, because dp cuts them.",
            ),
            (
                right | {"tp across": 8 / 10 * tp},
                "tp: the layers alone. Embedding and head have a sum each: ten, not eight.",
            ),
            ({"dp across": tp, "tp across": dp}, "It is the other way round: activations are larger here."),
            (
                right | {"dp across": 0},
                "dp: the two replicas are on different hosts, and their gradients must be summed.",
            ),
            (right | {"tp across": 4 * tp}, "tp: b s d once per sum and device: 16 · 64 · 144 · 4 bytes."),
        ],
        nudges=[
            "Which message does an all-reduce over dp carry, and which one over tp? How often in a step?",
            "Over two devices each sends its message once; a host has two devices.",
        ],
        hint=(
            "dp: all weights once, 4 bytes each, half by each device. tp: ten sums of 16 · 64 · 144 numbers"
            " by each device."
        ),
        because=(
            "Over two devices an all-reduce sends the message once. dp: both halves of the gradients, once a"
            " step. tp: b s d of 16 rows, ten times, by two devices."
        ),
        tolerance=0.03,
        unit="bytes",
    )


def _slice(batch, process, num):
    each = len(batch) // num
    return batch[process * each : (process + 1) * each]


def rows() -> Exercise:
    """Ask for the rows of a batch that a process hands over."""

    def observe(function):
        whole = lambda n: np.arange(2.0 * n).reshape(n, 2)
        calls = ((8, 0, 2), (8, 1, 2), (12, 3, 4), (6, 0, 1))
        return [np.asarray(function(whole(n), process, num)) for n, process, num in calls]

    return Exercise(
        level="core",
        solution=_slice,
        observe=observe,
        wrong=[
            (
                lambda batch, process, num: batch,
                "That is the whole batch: each row would be there once for every process, and nothing fails.",
            ),
            (
                lambda batch, process, num: batch[process::num],
                (
                    "Each row is there once, but not in its place: process 0's devices hold the first block"
                    " of the batch."
                ),
            ),
            (
                lambda batch, process, num: batch[: len(batch) // num],
                "All processes hand over the same rows, the first ones; the others are never seen.",
            ),
            (
                lambda batch, process, num: batch[process : process + 1],
                "That is one row. A process hands over all rows of its devices, len(batch) // num.",
            ),
            (
                lambda batch, process, num: batch[process * num : (process + 1) * num],
                "A block begins at process · rows per process; num is the number of processes, not of rows.",
            ),
            (
                lambda batch, process, num: batch[process * len(batch) // num :],
                "It begins in the right place, and goes on to the end: rows of later processes come twice.",
            ),
            (
                lambda batch, process, num: batch[len(batch) - (process + 1) * len(batch) // num :][
                    : len(batch) // num
                ],
                "Blocks in reverse: process 0 holds the first block, not the last.",
            ),
        ],
        nudges=["How many rows does each process hand over, and with which row does process 1 begin?"],
        hint="Blocks of len(batch) // num rows, in the order of the processes.",
        because=(
            "Devices count process by process, and dp cuts the batch into blocks in their order. So process i"
            " holds block i."
        ),
    )


def goes_on() -> Exercise:
    """Ask from which step a killed run goes on."""
    return Exercise(
        level="core",
        solution=4,
        wrong=[
            (7, "What was only in memory is gone, on all processes: the newest checkpoint counts."),
            (8, "Step 8 was never reached, so nothing was kept there."),
            (0, "A checkpoint was kept on the way; the same command finds it."),
            (6, "Checkpoints come every 4 steps: after 4, 8 and 12."),
            (3, "4 steps are done in the checkpoint, numbers 0 to 3. The next one has the number 4."),
            (5, "Steps count from 0: after 4 of them the next number is 4."),
            (12, "The run had not got there when process 1 died."),
        ],
        nudges=["After which steps was something kept before process 1 died?"],
        hint="The newest checkpoint before the end, and its number of finished steps.",
        because=(
            "Weights in memory died with process 1's half of them. The newest checkpoint has 4 steps; 3 are"
            " done again."
        ),
    )


def _two_level(x):
    part = lax.psum_scatter(x, "tp", tiled=True)
    return lax.all_gather(lax.psum(part, "dp"), "tp", tiled=True)


def two_level() -> Exercise:
    """Ask for an all-reduce over two hosts of two devices, of which less crosses."""
    layout = spec(parse_layout("b/dp,tp"))
    mesh = abstract_mesh("dp=2 tp=2")
    parts = np.arange(32, dtype=np.float32).reshape(2, 2, 8) ** 2

    def observe(function):
        on_mesh = jax.shard_map(function, mesh=mesh, in_specs=layout, out_specs=layout, check_vma=False)
        sent = census_table(census_jaxpr(jax.make_jaxpr(on_mesh)(parts.reshape(-1)), mesh.shape))
        across = sum(row["bytes_sent"] for (axes, _), row in sent.items() if "dp" in axes)
        inside = jax.vmap(function, axis_name="tp")
        return [jax.vmap(inside, axis_name="dp")(parts), across]

    return Exercise(
        level="stretch",
        solution=_two_level,
        observe=observe,
        wrong=[
            (
                lambda x: lax.psum(x, ("dp", "tp")),
                "The sum is right, in one ring over all four: 3/2 of x leaves each host, and 1 is enough.",
            ),
            (
                lambda x: lax.psum(lax.psum(x, "tp"), "dp"),
                "The sum is right, but both devices of a host send a whole x across. Scatter inside first.",
            ),
            (lambda x: lax.psum(x, "tp"), "That is each host's own sum. Nothing has crossed yet."),
            (
                lambda x: lax.psum(x, "dp"),
                "That adds over the hosts alone; the two devices of a host still differ.",
            ),
            (
                lambda x: lax.psum(lax.psum_scatter(x, "tp", tiled=True), "dp"),
                "The sum of each shard is right, and half as long as x: gather the shards in the end.",
            ),
            (
                lambda x: lax.all_gather(
                    lax.pmean(lax.psum_scatter(x, "tp", tiled=True), "dp"), "tp", tiled=True
                ),
                "That is half of the sum: pmean divides by the number of hosts.",
            ),
        ],
        nudges=[
            "Which axis is the wire? Let only half of x cross it from each device.",
            "lax.psum_scatter, lax.psum and lax.all_gather, each once.",
        ],
        hint="Scatter the sum inside the host, add the shards across, gather them inside again.",
        because=(
            "After the scatter a device holds half of its host's sum, and only this half crosses: 1 x leaves"
            " a host in place of 3/2. With more devices in a host each sends still less."
        ),
    )


def law() -> Exercise:
    """Ask which share of a message leaves each of two hosts of four devices."""
    right = {
        kind: float(sum(share for one, other, share in sends(kind, 8) if one < 4 <= other))
        for kind in ("all-reduce", "reduce-scatter", "all-to-all")
    }
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (
                right | {"all-reduce": 7},
                "all-reduce: that is what four devices send. On a ring only the last of a host sends across.",
            ),
            (
                right | {"all-reduce": 7 / 8},
                "all-reduce: that is one lap. An all-reduce makes two: it scatters, then it gathers.",
            ),
            (right | {"all-reduce": 2}, "all-reduce: nobody sends its own piece: two laps of 7/8."),
            (
                right | {"reduce-scatter": 1 / 2},
                (
                    "reduce-scatter: that is the last halving. The pieces still go to their owners: 1 and 3"
                    " change places with 4 and 6."
                ),
            ),
            (
                right | {"reduce-scatter": 7 / 8},
                "reduce-scatter: that would be a ring. Gloo halves: the large halves stay inside the host.",
            ),
            (
                right | {"reduce-scatter": 1 / 8},
                "reduce-scatter: that is one device's last halving. Four devices send across then.",
            ),
            (
                right | {"all-to-all": 7 / 2},
                "all-to-all: that counts the pieces for the three others of the same host as well.",
            ),
            (
                right | {"all-to-all": 1 / 2},
                "all-to-all: that is one device. Four of a host send four pieces each.",
            ),
        ],
        nudges=["Number the devices 0 to 7. Which pairs lie on two hosts, and what does each of them send?"],
        hint=(
            "Ring: one pair crosses in each direction. Halving: half to the neighbour, a quarter to the next"
            " but one, an eighth to the fourth; then reversed bits. All-to-all: an eighth to each."
        ),
        because=(
            "A ring crosses once each way: 2 · 7/8. Halving crosses in its last step, 4 · 1/8, and when"
            " pieces 1 and 3 go home, 2 · 1/8. All-to-all: 4 · 4 · 1/8."
        ),
    )
