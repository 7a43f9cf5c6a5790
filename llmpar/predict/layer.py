"""One layer of a plan's forward pass in time: what computes, what travels, and what waits for it.

This file has no numbers of its own: `Clock` prices matmuls and messages as it does for a whole step, and
`traffic` lists what the model's arrows send. It is a layer among others: while it computes, the weights of
the next one are gathered. What hides follows the step's law, `Clock.exposed`.
"""

import re
from dataclasses import dataclass

from llmpar.predict.time import Clock
from llmpar.predict.traffic import ATTENTION, MATMULS, WEIGHT_LINKS, WHOLE_PASS, Runs, step_traffic
from llmpar.predict.workload import Run

_ONE_LAYER = Runs(forward=1, matrices=1, vectors=1)
"""One layer, once forward."""
COMPUTED = ("q, k, v", "attention", "output", "feed-forward")
"""What a layer computes, one after the other."""
_ARROWS = {
    "stream b s d -> attention b s d": (0, 0, "gather positions"),
    "attention b s k r h -> queries b s k r h": (1, 1, "queries, by heads"),
    "attention b s k h -> keys b s k h": (1, 1, "keys, values"),
    "keys b t -> the next rank": (1, 1, "keys, values go round"),
    "halo b s -> the next rank": (1, 1, "last positions"),
    "state b -> the next rank": (2, 1, "state goes on"),
    "queries b s k r h -> attention b s k r h": (2, 2, "result, by positions"),
    "attention b s d +n -> stream b s d": (3, 2, "sum over heads"),
    "stream b s e -> tokens b s e": (3, 3, "routers' choices"),
    "tokens b s e -> routing b s e": (3, 3, "routers' choices"),
    "stream b e +s -> stream b e": (3, 3, "routers' choices"),
    "stream b s d -> ffn b s d": (3, 3, "gather positions"),
    "stream b s d -> tokens b s d": (3, 3, "gather positions"),
    "tokens b s d -> ffn b s d": (3, 3, "gather positions"),
    "tokens b e c d -> slots b e c d": (3, 3, "tokens to experts"),
    "slots c d -> experts c d": (3, 3, "gather tokens"),
    "experts c d +m -> slots c d +m": (4, 4, "sum of tokens"),
    "slots b e c d +m -> tokens b e c d +m": (4, 4, "tokens back"),
    "ffn b s d +m -> tokens b s d +m": (4, 3, "sum"),
    "tokens b s d +m -> stream b s d": (4, 3, "sum"),
    "ffn b s d +m -> stream b s d": (4, 3, "sum"),
}
"""The arrows inside a layer in the model's order: the part of `COMPUTED` that waits for each, the part that
it travels beside where it is hidden (a sum: beside the matmul before it), and a name."""
_WEIGHTS = "weights"


@dataclass
class Segment:
    """A stretch of time in which something is computed, or travels.

    ``lane`` is ``compute``, ``weights`` or the axis whose links carry it. ``exposed_s`` is how long computing
    waits for what travels; of a computing segment, how much slower it is for what travels beside it.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    exposed_s: float = 0.0
    axes: tuple[str, ...] = ()
    kind: str = ""  # the collective's
    group: int = 1  # devices that take part
    times: int = 0  # collectives
    bytes_sent: int = 0  # by a device, in all of them
    arrows: tuple[str, ...] = ()  # of the model's text; of weights their dims

    def begin(self, at_s: float) -> float:
        """Move it to a time; gives when it ends."""
        self.start_s, self.end_s = at_s, at_s + self.end_s - self.start_s
        return self.end_s


def layer_segments(run: Run) -> list[Segment]:
    """Return the segments of a layer's forward pass over a microbatch, by when they begin. Raises ValueError
    for a run that is no plan of ours, and on a chip whose time means nothing."""
    if run.plan is None or run.chip.simulated:
        raise ValueError(
            f"a layer in time needs a plan and a chip with rates; this is on {run.chip.name}"
        )
    clock, counts = Clock(run), [count for count, _ in run.config.blocks]
    kind = counts.index(max(counts))  # of a kind that most are
    projections, ffn = run.layer_matmuls(run.blocks[kind])
    adapters = run.adapter_matmuls(run.blocks[kind])
    thin = lambda *names: [p for path, p in adapters.items() if re.split("[._]", path)[-2] in names]
    terms, price = (
        clock.layer(kind, 0.0)[0].terms,
        lambda matmuls: clock.matmuls(matmuls, run.bits),
    )
    rest = terms["elementwise"] / 2  # norms, rotary embedding, nonlinearity, residual sums
    parts = (
        price(projections[:-1] + thin("q", "k", "v")) + rest,
        terms[ATTENTION],
        price(projections[-1:] + thin("o")),
        price(ffn + thin("gate", "up", "down")) + rest,
    )
    links = _links(clock)
    layer_s = sum(parts) + sum(one.end_s for _, hidden_by, one in links if not hidden_by)
    waits, slower = dict[str, float](), dict[str, float]()  # per second that travels beside each
    for beside in (ATTENTION, MATMULS, WHOLE_PASS):  # weights last: beside all
        if links_s := sum(one.end_s for _, hidden_by, one in links if hidden_by == beside):
            behind_s = terms.get(beside, layer_s)
            waits[beside] = max(0.0, links_s - behind_s) / links_s
            slower[beside] = clock.exposed(links_s, behind_s, True) / links_s - waits[beside]
            layer_s += (waits[beside] + slower[beside]) * links_s

    now, free, out = 0.0, dict[str, float](), [one for *_, one in links]
    gathers = [(one, one.end_s) for *_, one in links if one.lane == _WEIGHTS]
    drag = sum(slower[WHOLE_PASS] * seconds for _, seconds in gathers) / sum(parts)
    for at, name in enumerate([*COMPUTED, ""]):
        for one in (one for part, hidden_by, one in links if part == at and not hidden_by):
            one.exposed_s, now = one.end_s, one.begin(now)
        if name:  # else only the last part's messages are waited for
            hidden = [
                (h, one, one.end_s)
                for part, h, one in links
                if part == at and h and one.lane != _WEIGHTS
            ]
            slow = parts[at] * drag + sum(
                slower[hidden_by] * seconds for hidden_by, _, seconds in hidden
            )
            out.append(Segment("compute", name, now, now + parts[at] + slow, slow))
            begun, now = now, out[-1].end_s
            for hidden_by, one, seconds in hidden:
                one.exposed_s = waits[hidden_by] * seconds
                now += one.exposed_s
                early = now - seconds if waits[hidden_by] else begun
                free[one.lane] = one.begin(max(begun, early, free.get(one.lane, 0.0)))
    # all is computed, these still travel
    late = sum(waits[WHOLE_PASS] * seconds for _, seconds in gathers)
    start = max(0.0, now + late - sum(seconds for _, seconds in gathers)) if late else 0.0
    for one, _ in gathers:
        start = one.begin(start)
    for one, seconds in reversed(gathers):
        one.exposed_s = min(late, seconds)
        late -= one.exposed_s
    return sorted(out, key=lambda one: one.start_s)


def _links(clock: Clock) -> list[tuple[int, str, Segment]]:
    """Return what a layer sends, alike messages together: the part that waits for it or that it travels
    beside, what hides it ('' in the open), and the segment, which begins at 0."""
    run, plan = clock.run, clock.plan
    segments = dict[tuple, tuple[int, str, Segment]]()
    order = list(_ARROWS)
    for (names, kind), row in step_traffic(
        plan, run.batch_size, run.seq_len, run=_ONE_LAYER
    ).items():
        for message, times in row.messages.items():
            arrow, hidden_by = message.arrow, message.hidden_by
            if arrow in _ARROWS:
                waiting, beside, name = _ARROWS[arrow]
                lane, place, part = (
                    row.user_axes[0],
                    order.index(arrow),
                    beside if hidden_by else waiting,
                )
            elif message.term == WEIGHT_LINKS:
                # the latter: of both norms
                first = arrow.startswith("attention ") or arrow == "stream d"
                lane, place, part = _WEIGHTS, -2 + (not first), 0
                name = "next: q, k, v, output" if first else "next: feed-forward"
            else:
                continue  # not of one layer
            one = Segment(lane, name, 0.0, 0.0, 0.0, row.axes, kind, row.group_size)
            one = segments.setdefault(
                (place, name, names, kind, hidden_by), (part, hidden_by, one)
            )[2]
            one.end_s += times * clock.message(row, message)
            one.times += times
            one.bytes_sent += times * row.sent(message.num_bytes)
            one.arrows += (arrow,) * (arrow not in one.arrows)
    return [segments[key] for key in sorted(segments)]
