"""Which mesh serves a model, and how many requests at once: what each user sees against what a device yields.

A copy of the model lies on tp devices, or with experts on tp·ep, each of whose ep data ranks answers its own
requests (data-parallel attention). More requests at once share the reading of weights, and each waits longer.
Prefill runs on the same devices, between tokens, or apart from them: then the cache of a prompt travels.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

from llmpar.files import Allowed, CheckedFields
from llmpar.plan.mesh_shape import divisors
from llmpar.plan.model_config import ModelConfig
from llmpar.predict import digits, serving
from llmpar.predict.hardware import GIB, Chip

HALF_WITHIN = 0.13
"""By how much half of the published runs of engines are off (`tests/test_serving.py`); no constant was fitted
to them."""


@dataclasses.dataclass(frozen=True)
class Service(CheckedFields):
    """What is to be served.

    Attributes:
        prompt, answer: tokens of a request.
        bits: of a weight.
        cache_bits: of a number that is kept in the cache.
    """

    config: ModelConfig
    chip: Chip
    num_devices: int
    prompt: int
    answer: int
    bits: Annotated[int, Allowed(int, choices=(4, 8, 16))] = 16
    cache_bits: Annotated[int, Allowed(int, choices=(8, 16))] = 16


def data_ranks(s: Service, tp: int) -> int:
    """Return how many groups of tp devices have room, each within a node. What is left over stays idle."""
    node = s.chip.per_device().node_size
    nodes, rest = divmod(s.num_devices, node)
    return nodes * (node // tp) + rest // tp


def request_bytes(s: Service, tp: int, tokens: int) -> float:
    """Return the bytes that a rank keeps of a request: keys and values that windows leave, and whatever the
    length, of recurrent layers the float32 states, and of a gated delta net the last inputs of its
    convolutions, in 16 bits."""
    of_a_layer = lambda x: 4 * x.state_size + 2 * x.positions_before * x.convolved
    states = sum(count * of_a_layer(block) for count, block in s.config.blocks)
    return serving.cache_of_a_rank(s.config, tp, tokens) * s.cache_bits / 8 + states / tp


def cuts(s: Service) -> Iterator[tuple[int, int, float]]:
    """Yield tp, ep and the requests that have room on each data rank: tp within a node, ep over any."""
    experts = s.config.experts
    free = serving.ENGINE_SHARE * s.chip.usable_hbm_gib * GIB
    for tp in range(1, min(s.num_devices, s.chip.per_device().node_size) + 1):
        if not serving.cuts_evenly(s.config, tp):
            continue
        for ep in divisors(experts.num_experts) if experts else (1,):
            if ep <= data_ranks(s, tp):
                weights = serving.weights_of_a_rank(s.config, tp, ep) * s.bits / 8
                yield tp, ep, (free - weights) / request_bytes(s, tp, s.prompt + s.answer)


def price(s: Service, tp: int, ep: int, batch: int) -> dict[str, Any]:
    """Price one mesh with so many requests on each data rank at once. As many prompts arrive as answers
    end, so that a token takes its own step and its share of their prefill."""
    sizes = {"tp": tp, "ep": ep}
    prompt = serving.prefill_seconds(s.config, s.chip, s.prompt, weight_bits=s.bits, **sizes)
    prompts = serving.prefill_seconds(
        s.config, s.chip, s.prompt, weight_bits=s.bits, batch=batch, **sizes
    )
    mean = s.prompt + s.answer // 2
    token = serving.decode_seconds(
        s.config, s.chip, batch, mean, weight_bits=s.bits, cache_bits=s.cache_bits, **sizes
    )
    prefill_s = sum(prompts.values()) / s.answer
    token_s = sum(token.values())
    copies = data_ranks(s, tp) // ep
    return {
        **sizes,
        "copies": copies,
        "batch": batch,
        "first_token_s": sum(prompt.values()),
        "tokens_per_s_user": 1 / (token_s + prefill_s),
        "tokens_per_s_user_apart": 1 / token_s,
        "tokens_per_s_device": copies * ep * batch / (token_s + prefill_s) / s.num_devices,
        "prefill_share": prefill_s / (token_s + prefill_s),
        "cache_sent_bytes": request_bytes(s, 1, s.prompt),
        "terms": token,
    }


def serve(s: Service, keep: int = 8) -> dict[str, Any]:
    """Return the document of ``llmpar plan --serve``: the meshes and batches that no other beats both for a
    user and for a device; of more than ``keep``, as many from end to end. Raises ValueError where no copy of
    the model fits, with what is missing."""
    rows, most = list[dict[str, Any]](), dict[tuple[int, int], float]()
    for tp, ep, requests in cuts(s):
        most[tp, ep] = requests
        batches = [2**i for i in range(24) if 2**i <= requests]
        rows += [price(s, tp, ep, batch) for batch in batches]
    if not rows:
        tp, ep = max(most, key=lambda one: (most[one], one))
        weights_gib = serving.weights_of_a_rank(s.config, tp, ep) * s.bits / 8 / GIB
        whole = serving.ENGINE_SHARE * s.chip.usable_hbm_gib
        raise ValueError(
            f"'{s.config.name}' in {s.bits} bits does not fit with one request of"
            f" {s.prompt + s.answer:,} tokens in {s.cache_bits}: with tp={tp} ep={ep} its weights take"
            f" {weights_gib:.1f} GiB a device of the {whole:.1f} GiB that engines give to weights and"
            " cache; use more devices or fewer bits"
        )
    rates = "tokens_per_s_user", "tokens_per_s_device"
    rows.sort(key=lambda row: tuple(-row[rate] for rate in rates))
    best = itertools.accumulate((row[rates[1]] for row in rows), max, initial=0.0)
    shown = [row for row, before in zip(rows, best, strict=False) if row[rates[1]] > before]
    if len(shown) > keep:
        step = (len(shown) - 1) / max(1, keep - 1)
        shown = [shown[round(i * step)] for i in range(keep)]
    return {
        "model": s.config.name,
        "chip": s.chip.name,
        "devices": s.num_devices,
        "prompt": s.prompt,
        "answer": s.answer,
        "bits": s.bits,
        "cache_bits": s.cache_bits,
        "error": HALF_WITHIN,
        "plans": shown,
    }


SERVING = "a copy", "copies", "requests", "TTFT, s", "a user", "apart", "a device", "prefill"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a mesh that serves as the cells of `SERVING`, with the two digits that its error leaves."""
    few = lambda name: f"{digits.rounded(row[name], HALF_WITHIN):,g}"
    return (
        " ".join(f"{axis}={row[axis]}" for axis in ("tp", "ep") if row[axis] > 1) or "tp=1",
        str(row["copies"]),
        str(row["batch"]),
        few("first_token_s"),
        few("tokens_per_s_user"),
        few("tokens_per_s_user_apart"),
        few("tokens_per_s_device"),
        f"{row['prefill_share']:.0%}",
    )


def explained(document: dict[str, Any]) -> str:
    """Return what the cells mean, and how far they may be off."""
    sent = document["plans"][0]["cache_sent_bytes"]
    return (
        "requests: at once, on each data rank of a copy. TTFT: time to the first token, without a queue. a"
        " user, apart, a device: tokens/s of one request beside others' prefill, of one with prefill"
        " elsewhere, and of a device. prefill: its share of the devices, or of their time.\n"
        "No other mesh and number of requests is better both for a user and for a device. Where prefill runs"
        f" apart, each prompt's cache, {sent / 1e9:.2g} GB in {document['cache_bits']} bits, is sent once,"
        " which is not timed. Of published runs of engines half are within"
        f" {document['error']:.0%} of these formulas, and the worst is 2.2 times slower."
    )
