"""What a measured run of another framework holds on its fullest device, by part: the textbook's sums, stage
by stage (Rajbhandari et al. 2020, section 3; Korthikanti et al. 2022, section 4). Of ours: `memory`."""

from llmpar.predict.workload import Run

_MARGIN = 0.03
"""Of a device's memory that is left free: fragments of the allocator."""


def held_bytes(run: Run, allocated: bool = False) -> dict[str, float]:
    """Bytes on the fullest device, by part. ``allocated``: without what the framework takes itself."""
    parts = max((_stage(run, stage) for stage in range(run.mesh.pp)), key=lambda found: sum(found.values()))
    if not allocated:
        parts["framework"] = run.software.overhead_bytes * (run.chip.link == "switch")
    return parts


def fits(run: Run) -> bool:
    """Whether the run fits its chip's memory, all of which other frameworks than JAX may take."""
    room = run.chip.usable_hbm_gib * 2**30 * (1 - _MARGIN)
    return sum(held_bytes(run).values()) <= room


def _stage(run: Run, stage: int) -> dict[str, float]:
    soft, mesh, s = run.software, run.mesh, run.sizes
    layers = sum(run.chunk_layers[stage :: mesh.pp])
    dense = min(run.dense_layers, layers) if stage == 0 else 0
    first, last = stage == 0, stage == mesh.pp - 1
    body = s["attention"] + s["copies"] + s["vectors"]
    sparse = s["ffn"] + s["router"]
    shared = layers * body + (layers - dense) * sparse + dense * s["dense"]
    shared += first * s["embedding"] + last * (s["head"] or (s["embedding"] if mesh.pp > 1 else 0.0))
    shared /= mesh.tp
    experts = (layers - dense) * s["experts"] / mesh.ep
    weights = grads = state = gathered = 0.0
    for params, apart in ((shared, 1), (experts, mesh.ep)):
        group, ranks = run.zero_group / apart, run.data_ranks * mesh.sp / apart
        cut = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (group, group, group)}[run.zero]
        weights += params * soft.weight_bytes / cut[0]
        grads += params * soft.grad_bytes / cut[1]
        state += params * soft.state_bytes / cut[2]
    if run.zero == 3:
        body = (shared + experts - first * s["embedding"] / mesh.tp) / max(1, layers)
        largest = max(2 * body, first * s["embedding"] / mesh.tp)  # the next layer's travel meanwhile
        gathered = largest * (soft.gathered_bytes + soft.reduced_bytes)
    elif not soft.weight_bytes:  # a cast copy of what is held whole
        gathered = (shared + experts) * soft.gathered_bytes
    kept, working = activation_bytes(run)
    alive = _alive(run, stage)
    logits = run.tokens * run.config.vocab_size / mesh.tp * last
    return {
        "weights": weights,
        "gradients": grads,
        "optimizer": state,
        "gathered weights": gathered,
        "activations": 0.0 if run.offload else kept * layers * alive,
        "messages": 2.0 * soft.messages * run.stream_tokens * run.config.width * alive * (mesh.pp > 1),
        "working set": max(working, logits * soft.logit_bytes),
    }


def _alive(run: Run, stage: int) -> float:
    """Microbatches that a stage holds at once: 1F1B p - i, with v chunks more (Narayanan 2021); GPipe all."""
    p, m, v = run.mesh.pp, run.microbatches, run.virtual_stages
    if run.schedule == "gpipe":
        return m
    if p == 1:
        return 1
    if v > 1:
        return min(m, (2 * (p - stage - 1) + (v - 1) * p + 1) / v)
    return min(m, p - stage)


def activation_bytes(run: Run) -> tuple[float, float]:
    """Bytes that a layer keeps for its backward pass, and works with while it runs there, of a microbatch on
    a device. GPT in 16 bits: sbh(10 + 24/t), and 5as/h of unfused scores (Korthikanti et al. 2022, eq. 2)."""
    c, tp, how = run.config, run.mesh.tp, run.config.experts
    d, t = c.width, run.tokens
    stream = 2.0 * run.stream_tokens * d
    heads = 2.0 * t * (2 * c.num_heads + 2 * run.kv_heads) * c.head_width / tp
    visits = how.top_k + how.num_shared if how else 1
    inner = 2.0 * t * run.ffn_products * c.ffn_width / tp * visits
    if how:
        inner += 2 * how.top_k * 2.0 * t * d
    if c.latent:
        heads += 2.0 * t * (c.latent.q_rank + c.latent.kv_rank + c.latent.rope_width)
    masks = stream if run.gpt and run.software.name.startswith("megatron") else 0.0
    scores = 5.0 * run.score_elements()
    whole = 2.0 * t * d
    full = 2 * stream + 2 * (stream if run.tp_sequence or tp == 1 else whole) + heads + inner + masks + scores
    hidden = 0.0 if how else inner * (run.ffn_products - 1) / run.ffn_products
    some = 2 * stream + heads
    kept = {"none": full, "selective": some + hidden, "ffn": some, "block": stream}
    return kept[run.recompute], full if run.recompute == "block" else full / 2
