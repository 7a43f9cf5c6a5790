"""Exercises of lesson 10 that are computed: the least traffic that fits."""

import dataclasses

from llmpar.lessons import Exercise
from llmpar.plan.mesh_shape import divisors, parse_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import memory, traffic

LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
_ROWS, _SEQ, _DEVICES, _MOST_BYTES = 16, 32, 16, 240_000


def price(text: str) -> tuple[int, int]:
    """Return a mesh's bytes of arguments per device, and the bytes that a device sends per step."""
    plan = Plan(text).resolve(LLAMA, "cpu", _ROWS, _SEQ)
    sizes = memory.argument_bytes(plan, _ROWS, _SEQ)
    return sum(sizes.values()), traffic.step_traffic(plan, _ROWS, _SEQ).total_bytes


def cheapest() -> Exercise:
    """Ask for the mesh of dp, fsdp and tp over 16 devices that fits and sends least."""
    cuts = [
        (dp, fsdp, _DEVICES // dp // fsdp)
        for dp in divisors(_DEVICES)
        for fsdp in divisors(_DEVICES // dp)
    ]
    # as many as KV heads
    meshes = [f"dp={dp} fsdp={fsdp} tp={tp}" for dp, fsdp, tp in cuts if tp <= 8]
    priced = {text: price(text) for text in meshes}
    fits = {text: sent for text, (kept, sent) in priced.items() if kept <= _MOST_BYTES}
    best = min(fits, key=lambda text: fits[text])

    def observe(text):
        mesh = parse_mesh(text)
        if mesh.size != _DEVICES:
            return f"a mesh of {mesh.size} devices"
        if mesh.pp * mesh.ep * mesh.sp > 1:
            return "an axis that is not asked for: use dp, fsdp and tp only"
        kept, sent = price(text)
        return (
            f"{'fits' if kept <= _MOST_BYTES else 'does not fit'}, {kept:,} B held, {sent:,} B sent"
        )

    wrong = dict(most_cut=min(fits, key=lambda text: priced[text][0]))
    hints = dict(
        yours=lambda seen: dict(seen=seen, best=fits[best], fit=len(fits), all=len(priced))
    )
    return Exercise("expert", best, wrong, observe, counts=hints)
