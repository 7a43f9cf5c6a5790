"""One layer of a plan's forward pass in time: what computes, what travels, and what waits for it.

Nothing here has numbers of its own: `Clock` prices products and messages as it does for a whole step, and
`traffic` says which arrows of the model send what. It is a layer among others: while it computes, the weights
of the next one are gathered. What hides follows the step's law, `Clock.exposed`.
"""

from dataclasses import dataclass

from llmpar.predict.time import BESIDE, Clock
from llmpar.predict.traffic import Runs, step_traffic
from llmpar.predict.workload import Run

ONE = Runs(0, 0, forward=1, again=0, attention=0, backward=0, matrices=1, vectors=1, attended=0)
"""One layer, once forward."""
PARTS = ("q, k, v", "attention", "output", "feed-forward")
"""What a layer computes, one after the other."""
ARROWS = {
    "stream b s d -> attention b s d": (0, "gather positions"),
    "attention b s k r h -> queries b s k r h": (1, "queries, by heads"),
    "attention b s k h -> keys b s k h": (1, "keys, values"),
    "keys b t -> the next rank": (1, "keys, values go round"),
    "queries b s k r h -> attention b s k r h": (2, "result, by positions"),
    "attention b s d +n -> stream b s d": (3, "sum over heads"),
    "stream b s e -> ffn b s e": (3, "routers' choices"),
    "ffn b s e -> routing b s e": (3, "routers' choices"),
    "stream b e +s -> stream b e": (3, "routers' choices"),
    "stream b s d -> ffn b s d": (3, "gather positions"),
    "ffn b e c d -> experts b e c d": (3, "tokens to experts"),
    "experts b e c d +m -> ffn b e c d +m": (4, "tokens back"),
    "ffn b s d +m -> stream b s d": (4, "sum"),
}
"""The arrows inside a layer in the model's order: the part that each leads to, and a name."""
WEIGHTS = "weights"


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
    kind: str = ""  # of collective
    group: int = 1  # devices that take part
    times: int = 0  # collectives
    bytes_sent: int = 0  # by a device, in all of them
    arrows: tuple[str, ...] = ()  # of the model's text; of weights their dims

    def begin(self, at_s: float) -> float:
        """Move it to a time; gives when it ends."""
        self.start_s, self.end_s = at_s, at_s + self.end_s - self.start_s
        return self.end_s


def forward(run: Run) -> list[Segment]:
    """The segments of a layer's forward pass over a microbatch, by when they begin. Raises ValueError for a
    run that is no plan of ours, and on a chip whose time means nothing."""
    if run.plan is None or run.chip.simulated:
        raise ValueError(f"a layer in time needs a plan and a chip with rates; this is on {run.chip.name}")
    clock, (projections, ffn) = Clock(run), run.layer_products()
    terms, price = clock.layer(False, 0.0)[0].terms, lambda products: clock.products(products, run.bits)
    rest = terms["elementwise"] / 2  # norms, rotary embedding, nonlinearity, residual sums
    parts = (price(projections[:-1]) + rest, terms["attention"], price(projections[-1:]), price(ffn) + rest)
    found = _travels(clock)
    layer_s = sum(parts) + sum(one.end_s for _, term, one in found if not term)
    waits, slower = dict[str, float](), dict[str, float]()  # by term, per second that travels beside
    for term in sorted({term for _, term, _ in found if term}):  # weights last: beside all
        links_s = sum(one.end_s for _, other, one in found if other == term)
        behind_s = terms.get(BESIDE.get(term, ""), layer_s)
        waits[term] = max(0.0, links_s - behind_s) / links_s
        slower[term] = clock.exposed(links_s, behind_s, True) / links_s - waits[term]
        layer_s += (waits[term] + slower[term]) * links_s

    now, free, out = 0.0, dict[str, float](), [one for _, _, one in found]
    gathers = [(term, one, one.end_s) for _, term, one in found if one.lane == WEIGHTS]
    drag = sum(slower[term] * seconds for term, _, seconds in gathers) / sum(parts)
    for at, name in enumerate([*PARTS, ""]):
        for one in (one for step, term, one in found if step == at and not term):
            one.exposed_s, now = one.end_s, one.begin(now)
        beside = [(t, one, one.end_s) for step, t, one in found if step == at and t and one.lane != WEIGHTS]
        if name:
            slow = parts[at] * drag + sum(slower[term] * seconds for term, _, seconds in beside)
            out.append(Segment("compute", name, now, now + parts[at] + slow, slow))
            begun, now = now, out[-1].end_s
            for term, one, seconds in beside:
                one.exposed_s = waits[term] * seconds
                now += one.exposed_s
                early = now - seconds if waits[term] else begun
                free[one.lane] = one.begin(max(begun, early, free.get(one.lane, 0.0)))
    late = sum(waits[term] * seconds for term, _, seconds in gathers)  # all is computed, they are not there
    start = max(0.0, now + late - sum(seconds for *_, seconds in gathers)) if late else 0.0
    for _, one, _ in gathers:
        start = one.begin(start)
    for _, one, seconds in reversed(gathers):
        one.exposed_s = min(late, seconds)
        late -= one.exposed_s
    return sorted(out, key=lambda one: one.start_s)


def _travels(clock: Clock) -> list[tuple[int, str, Segment]]:
    """What a layer sends, alike messages together: the part that it leads to or travels beside, the term of
    what hides ('' in the open), and the segment, which begins at 0."""
    run, plan = clock.run, clock.plan
    found, order = dict[tuple, tuple[int, str, Segment]](), list(ARROWS)
    for (names, kind), row in step_traffic(plan, run.batch_size, run.seq_len, run=ONE).items():
        axes = tuple(names.split(","))
        for (_, text, size), times in row.messages.items():
            term, hides, took = clock.message([*axes], row, text, size)
            if text in ARROWS:
                lane, place, (part, name) = axes[0], order.index(text), ARROWS[text]
                part -= hides and " +" in text.partition("->")[0]  # a sum on its way beside its products
            elif "->" in text or not hides or text.startswith("updated "):
                continue  # not of one layer
            else:
                first = text.startswith("attention ") or text == "stream d"  # the latter: of both norms
                lane, place, part = WEIGHTS, -2 + (not first), 0
                name = "next: q, k, v, output" if first else "next: feed-forward"
            lane = {"kv": "tp", "ul": "sp"}.get(lane, lane)
            one = Segment(lane, name, 0.0, 0.0, 0.0, axes, kind, row.group_size)
            one = found.setdefault((place, name, names, kind, hides), (part, term * hides, one))[2]
            one.end_s += times * took
            one.times += times
            one.bytes_sent += times * row.sent(size)
            one.arrows += (text,) * (text not in one.arrows)
    return [found[key] for key in sorted(found)]
