"""Published formulas that the package itself has no use for: what tests hold it against."""


def param_counts(
    vocab: float,
    d: float,
    layers: float,
    heads: float = 1,
    kv_heads: float | None = None,
    head_dim: float | None = None,
    ffn: float | None = None,
    glu: bool = False,
    norm: str = "rms",
    bias: bool = False,
    tied: bool = False,
    learned_pos: bool = False,
    ctx: float = 0,
    experts: float = 0,
    topk: float = 0,
) -> dict[str, float]:
    """Exact parameters by part, with total and active (top-k experts only). `heads` may be absent if n h = d.

    `bias` adds one to every linear layer but the router and the unembedding, `norm="ln"` one to every norm.
    """
    q = d if head_dim is None else heads * head_dim
    kv = q if kv_heads is None else q * kv_heads // heads
    m = 4 * d if ffn is None else ffn
    expert = (3 if glu else 2) * d * m + bias * ((2 if glu else 1) * m + d)
    part = {
        "embedding": vocab * d + learned_pos * ctx * d,
        "unembedding": 0 if tied else vocab * d,
        "attention": layers * (2 * d * (q + kv) + bias * (q + 2 * kv + d)),
        "ffn": layers * expert * max(experts, 1),
        "router": layers * d * experts,
        "norms": (2 * layers + 1) * d * {"rms": 1, "ln": 2}[norm],
    }
    total = sum(part.values())
    idle = layers * expert * (experts - topk) if experts else 0
    return part | {"total": total, "active": total - idle}


def gpt_params(h: float, layers: float, vocab: float, seq: float) -> float:
    """12lh^2 (1 + 13/12h + (V+s)/12lh): Narayanan et al. 2021, eq. 2. Leaves out the final norm's 2h."""
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + seq) / (12 * layers * h))


def gpt_step_flops(
    batch: float, seq: float, layers: float, h: float, vocab: float, recompute: str = "full"
) -> float:
    """Matmul FLOPs of a GPT train step, with attention counted in full (not halved for the causal mask).

    "none": 72Bsl h^2 (1 + s/6h + V/12lh) (Korthikanti et al. 2022, eq. 7). "selective": s/3h for s/6h (eq. 8,
    which charges three times the two products recomputed). "full": 96Bsl h^2 (1 + s/6h + V/16lh) (Narayanan
    et al. 2021, eq. 3).
    """
    core = batch * seq * layers * h**2
    if recompute == "full":
        return 96 * core * (1 + seq / (6 * h) + vocab / (16 * layers * h))
    return 72 * core * (1 + seq / ({"none": 6, "selective": 3}[recompute] * h) + vocab / (12 * layers * h))


def flops_per_token(
    params: float,
    layers: float = 0,
    heads: float = 0,
    head_dim: float = 0,
    seq: float = 0,
    attention: str = "full",
    excluded_params: float = 0,
) -> float:
    """Train FLOPs per token: 6N + 12LHQT, the model's own work without recomputation.

    Chowdhery et al. 2022 (PaLM), appendix B. Conventions differ: `attention` is "full" (PaLM, MaxText),
    "causal" (half) or "none"; `excluded_params` leaves out an embedding that is a look-up and not a product.
    """
    share = {"full": 1, "causal": 0.5, "none": 0}[attention]
    return 6 * (params - excluded_params) + share * 12 * layers * heads * head_dim * seq


def decode_seconds(
    batch: float,
    params: float,
    cache_bytes: float,
    devices: float,
    flops_per_s: float,
    hbm_bytes_per_s: float,
    weight_bytes: float = 2,
) -> float:
    """Seconds of a decode step: B cache/W + max(2BP/C, P bytes/W), cache a sequence's (Book, inference
    chapter)."""
    rate = devices * hbm_bytes_per_s
    return batch * cache_bytes / rate + max(
        2 * batch * params / (devices * flops_per_s), params * weight_bytes / rate
    )
