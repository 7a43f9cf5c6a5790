"""What a model costs to serve (a prompt, a token, the cache, the critical batch), and how to cut it.

The first token waits for a whole forward pass over the prompt, which computes; each further token reads all
weights and all of its sequences' keys and values once, for little computing (Pope et al. 2022; Austin et al.
2025, inference chapter). One copy of the model lies on ``tp`` devices of a node; its rates are training's.

Not modelled: queues, experts that are hotter than others, prompts that share a beginning, tokens guessed
ahead. No constant is fitted to serving: `tests/test_serving.py` holds the formulas against what engines
published.
"""

import math
from collections import Counter

from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.model_config import ModelConfig, Weight
from llmpar.plan.sequence_order import CHUNK
from llmpar.plan.serving import Serving
from llmpar.predict import formulas
from llmpar.predict.hardware import GIB, Chip
from llmpar.predict.time import LATER, Clock
from llmpar.predict.traffic import ATTENTION, ITEMSIZE, MATMULS
from llmpar.predict.workload import Run

_KERNELS = 10
"""Kernels of a layer that a compiled forward pass starts one after the other."""
EIGHT_BITS_AT_LEAST = "h100", "h200", "gh200"
"""GPUs whose tensor cores multiply 8 bits and not 4."""
ENGINE_SHARE = 0.85
"""Of a GPU's memory, what weights and cache may have: vLLM takes 0.92 (``gpu_memory_utilization`` of its
CacheConfig), and the arrays of a forward pass and its recorded graphs are part of that."""


def shared_matrices(config: ModelConfig) -> list[Weight]:
    """Return, of latent attention, the matrices down to what all heads share, which tp does not cut."""
    down = ("attention d c", "attention d z")
    rows = config.block_weights().values() if config.has_latent_attention else ()
    return [weight for weight in rows if weight.dims in down]


def cache_bytes(config: ModelConfig, tokens: int = 1, bits: float = 16) -> float:
    """Return the bytes of the keys and values of so many tokens, once: those of all `cache_cuts` ranks
    together. Latent attention keeps for all heads one vector and its rotary key (DeepSeek-V2 2024, section
    2.1.2)."""
    return tokens * sum(count * block.cache_width for count, block in config.blocks) * bits / 8


def cache_cuts(config: ModelConfig, tp: int) -> int:
    """Return into how many parts ``tp`` ranks cut the cache: no more than there are KV heads. What all heads
    share, as in latent attention, each rank holds whole."""
    return 1 if config.has_latent_attention else min(tp, config.num_kv_heads)


def cache_of_a_rank(config: ModelConfig, tp: int, context: int | None = None) -> float:
    """Return the numbers in a rank's cache of a token; of ``context`` tokens, those that windows leave."""
    seen = lambda block: min(block.window or context, context) if context else 1
    each = lambda block: block.cache_width * seen(block) / cache_cuts(block, tp)
    return sum(count * each(block) for count, block in config.blocks)


def device_cache_bytes(plan: Serving, num_rows: int, length: int) -> int:
    """Return the bytes of the cache of `llmpar.serve` on each device."""
    part = lambda x: plan.place(x.dims).shard_shape(x.shape, plan.mesh.sizes)
    return sum(ITEMSIZE[x.dtype] * math.prod(part(x)) for x in plan.caches(num_rows, length))


def device_flops(
    plan: Serving, rows: int, length: int, width: int = 1, echo: bool = False
) -> dict[str, int]:
    """Count the FLOPs of a device's matmuls in a step of `llmpar.serve`, idle rows and positions too. Experts
    multiply each token's chosen ones; their load is taken to be even."""
    config, sizes, experts = plan.config, plan.mesh.sizes, plan.config.experts
    local_size = lambda dims, *shape: math.prod(plan.place(dims).shard_shape(shape, sizes))
    tokens, weights = local_size("data b s", rows, width), 0
    for path, weight in config.weights().items():
        if path.startswith("blocks.") and not weight.is_vector:
            size = local_size(weight.dims, *weight.shape)
            routed = experts if " e " in weight.dims else None
            weights += size * routed.top_k * plan.mesh.ep // routed.num_experts if routed else size
    heads = states = 0
    for count, block in config.blocks:
        kept = block.cache_width if block.has_latent_attention else block.head_width
        if block.state_size:
            states += count * tokens // width * _delta_flops(block, width) // plan.mesh.tp
        else:
            heads += count * local_size("attention n h", block.num_heads, kept)
    logits = local_size("data b s", rows, width if echo else 1)
    logits *= local_size("vocab v d", config.vocab_size, config.width)
    attention = 4 * tokens * heads * -(-length // plan.mesh.sp)
    parts = {"weights": 2 * tokens * weights, "attention": attention, "logits": 2 * logits}
    return parts | ({"states": states} if states else {})


def _delta_flops(config: ModelConfig, num: int) -> int:
    """Count the FLOPs of a gated delta net's matmuls for so many positions of a row, in chunks: three with
    the state, and those of a chunk's positions with one another (`llmpar.model.gated_delta`)."""
    i, n, w = min(CHUNK, num), config.num_heads, config.head_width
    keys, h = config.block_weights()["mixer.q_conv"].shape[:2]
    among = i**2 * (2 * keys * h + n * (h + 2 * w)) + 2 * n * i**3 * (i - 1).bit_length()
    return -(-num // i) * 2 * (3 * i * n * h * w + among)


def balance_batch(config: ModelConfig, chip: Chip, bits: int = 16) -> float:
    """Return the sequences at which a token's matmuls compute as long as they read their weights of so many
    bits, by what the chip reaches; with k of E experts, E/k times as many, at which theirs do. Caches take no
    part."""
    clock, experts = _clock(config, chip), config.experts
    few = (experts.num_experts, experts.top_k) if experts else (1, 1)
    return formulas.critical_batch(_flops_per_s(clock), clock.bytes_per_s, bits / 8, *few)


def prefill_seconds(
    config: ModelConfig,
    chip: Chip,
    prompt: int,
    tp: int = 1,
    weight_bits: float = 16,
    ep: int = 1,
    batch: int = 1,
) -> dict[str, float]:
    """Return the seconds to take ``batch`` prompts in at once, by term: as many on each of ``ep`` data ranks,
    which cut the experts among them."""
    clock = _clock(config, chip, tp, batch, prompt, ep)
    matmuls = _matmul_seconds(clock, batch * prompt, weight_bits)
    scores = sum(count * clock.run.attention_flops(block) for count, block in config.blocks)
    attention = scores / (clock.device.flops_per_s * clock.rates.attention)
    return {MATMULS: matmuls, ATTENTION: attention} | _besides(clock)


def decode_seconds(
    config: ModelConfig,
    chip: Chip,
    batch: int,
    context: int,
    tp: int = 1,
    weight_bits: float = 16,
    cache_bits: int = 16,
    ep: int = 1,
) -> dict[str, float]:
    """Return the seconds of the next token of ``batch`` sequences, each with ``context`` tokens behind it, by
    term. Each of ``ep`` data ranks has as many, and they cut the experts among them.

    Ranks of tp that are more than the KV heads hold copies of keys and values (`cache_cuts`). Of experts
    those are read that some token chose, if all are equally likely. What heads of latent attention share is
    read once, as it is kept; "attention" is what computing with all of them takes longer.
    """
    clock = _clock(config, chip, tp, batch, 1, ep)
    matmuls = _matmul_seconds(clock, batch, weight_bits)
    states = sum(count * block.state_size for count, block in config.blocks)
    kept = cache_of_a_rank(config, tp, context) * cache_bits / 8
    keys = batch * (kept + 8.0 * states / tp) / clock.bytes_per_s
    terms = {MATMULS: matmuls, "keys and values read": keys}
    if latent := [(count, block) for count, block in config.blocks if block.has_latent_attention]:
        widths = sum(
            count
            * block.num_heads
            / tp
            * _absorbed_width(block)
            * min(block.window or context, context)
            for count, block in latent
        )
        rate = clock.device.flops_per_s * clock.rates.attention
        terms[ATTENTION] = max(0.0, 2.0 * batch * widths / rate - keys)
    return terms | _besides(clock)


def _matmul_seconds(clock: Clock, tokens: int, bits: float) -> float:
    """Return the seconds of a forward pass's matmuls: as long as they compute, or read their weights. GPUs
    multiply 8 bits from H100 on and 4 from B200 on; other weights they convert as they read them."""
    config, tp, family = clock.run.config, clock.run.mesh.tp, clock.run.chip.family
    least = 16 if family not in LATER else 8 if family in EIGHT_BITS_AT_LEAST else 4
    multiplied = bits if bits >= least else 16
    computing = 2.0 * tokens * _on_a_rank(config, config.active_params, tp) / _flops_per_s(clock)
    computing /= clock.rates.eight_bit ** math.log2(16 / multiplied)
    read = weights_of_a_rank(config, tp, clock.run.mesh.ep, tokens)
    return max(computing, read * bits / 8 / clock.bytes_per_s)


def weights_of_a_rank(config: ModelConfig, tp: int, ep: int, tokens: int | None = None) -> float:
    """Return the parameters that a rank holds; with ``tokens`` on each of ``ep`` data ranks, those that it
    reads: of experts the ones that some token chose, if all are equally likely."""
    if not (experts := config.experts):
        return _on_a_rank(config, config.num_params, tp)
    share = experts.top_k / experts.num_experts
    routed = (config.num_params - config.active_params) / (1 - share)
    chosen = 1.0 if tokens is None else 1 - (1 - share) ** (tokens * ep)
    return _on_a_rank(config, config.num_params - routed, tp) + routed * chosen / (ep * tp)


def cuts_evenly(config: ModelConfig, tp: int) -> bool:
    """Tell whether tp divides heads and the width of feed-forwards, and KV heads or is divided by them."""
    return all(
        c.num_heads % tp
        == c.ffn_width % tp
        == max(tp, c.num_kv_heads) % min(tp, c.num_kv_heads)
        == 0
        for _, c in config.blocks
    )


def cut(
    config: ModelConfig,
    chip: Chip,
    nodes: int,
    gpus: int,
    tokens: int,
    bits: float = 16,
    cache_bits: int | None = None,
) -> tuple[int, int, int]:
    """tp, pp, and the tokens whose keys and values have room: the fewest GPUs of a node that hold the weights
    and a cache of ``tokens``, or else the fewest nodes, each of them a stage of the pipeline (vLLM's guide,
    Parallelism and Scaling). vLLM wants tp to divide heads and the width of feed-forwards, and KV heads to
    divide tp or be divided. Keys and values have the weights' ``bits`` unless ``cache_bits`` says others.
    Raises ValueError where nothing fits, with what would.
    """
    if any(block.has_latent_attention for _, block in config.blocks):
        what = f"'{config.name}' has latent attention, whose cache each rank of tp holds whole"
        raise ValueError(
            f"{what}; engines cut its requests instead, which is not counted; use serving.decode_seconds"
        )
    layers, edge = config.num_layers, config.vocab_size * config.width
    ends = edge if config.tied else 2 * edge
    free = ENGINE_SHARE * chip.usable_hbm_gib * GIB

    def left(tp: int, pp: int) -> tuple[int, int, int]:
        share = math.ceil(layers / pp) / layers  # of the layers, in the longest stage
        params = (config.num_params - ends) * share + (ends if pp == 1 else edge)
        kept = cache_of_a_rank(config, tp) * (cache_bits or bits) / 8 * share
        return tp, pp, int((free - params * bits / 8 / tp) // kept)

    legal = [tp for tp in range(1, gpus + 1) if cuts_evenly(config, tp)]
    cuts = [left(tp, 1) for tp in legal] + [left(legal[-1], pp) for pp in range(2, layers + 1)]
    first = next((one for one in cuts if one[2] >= tokens), None)
    if first and first[1] <= nodes:
        return first
    tp, pp, most = max((one for one in cuts if one[1] <= nodes), key=lambda one: one[2])
    need = (cache_bytes(config, tokens, cache_bits or bits) + config.num_params * bits / 8) / 1e9
    use = f"{first[1]} nodes" if first else "GPUs with more memory"
    fewer = f", or a cache of at most {most:,} tokens" if most > 0 else ""
    what = (
        f"'{config.name}' in {bits:.3g} bits and the keys and values of {tokens:,} tokens take"
        f" {need:,.0f} GB"
    )
    raise ValueError(
        f"{what}, and {tp * pp} {chip.name} have room for {tp * pp * free / 1e9:,.0f} GB; use"
        f" {use}{fewer}"
    )


def _clock(
    config: ModelConfig, chip: Chip, tp: int = 1, rows: int = 1, seq_len: int = 1, ep: int = 1
) -> Clock:
    if config.lora:
        raise ValueError(
            f"'{config.name}' has adapters, and what is served is priced without them; leave lora_rank out:"
            " `llmpar export` adds adapters to their weights"
        )
    return Clock(Run(config, chip, MeshShape(tp=tp, ep=ep), seq_len, rows, zero=0))


def _on_a_rank(config: ModelConfig, params: float, tp: int) -> float:
    """Return the parameters of one rank: tp does not cut the matrices down to what heads of latent attention
    share."""
    shared = sum(
        count * math.prod(weight.shape)
        for count, block in config.blocks
        for weight in shared_matrices(block)
    )
    return shared + (params - shared) / tp


def _absorbed_width(config: ModelConfig) -> int:
    """Return the numbers that a head multiplies for each token of a shared cache: all of it for a score, and
    what values are made from (DeepSeek-V2 2024, section 2.1.2)."""
    rows = config.block_weights()
    up = rows.get("attention.kv_up")  # none: what is kept is both key and value (DeepSeek-V4)
    return config.cache_width + (up.shape[0] if up else config.value_width)


def _flops_per_s(clock: Clock) -> float:
    """Return what one device reaches in matmuls (of experts, where there are some)."""
    share = clock.rates.grouped if clock.run.config.experts else clock.rates.matmuls
    return clock.device.flops_per_s * share


def _besides(clock: Clock) -> dict[str, float]:
    """Return the seconds of two all-reduces over tp in each layer, and the starts of its kernels."""
    config, links = clock.run.config, Counter[str]()
    for kind, (count, _) in enumerate(config.blocks):
        links.update({name: count * ahead for name, (ahead, _) in clock.inside(kind, 0.0).items()})
    return {"starting kernels": config.num_layers * _KERNELS * clock.rates.kernel_s} | links
