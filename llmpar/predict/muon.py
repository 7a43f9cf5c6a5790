"""What Muon adds to a step (`llmpar.training.muon`): FLOPs, bytes, and the batch at which these bytes are as
many as FSDP's."""

import math

from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import matrix_dims
from llmpar.plan.plan import MOMENTUM, ORTHOGONAL, Resolved
from llmpar.predict.traffic import WEIGHT_LINKS, step_traffic


def newton_schulz_flops(rows: int, columns: int, iterations: int = 5) -> int:
    """Return the FLOPs of the matmuls that make a matrix of r rows and c >= r columns nearly orthogonal. An
    iteration aX + (bA + cA²)X has A = XXᵀ, 2r²c; AA, 2r³; and the product with X, 2r²c."""
    r, c = sorted((rows, columns))
    return iterations * (4 * r * r * c + 2 * r**3)


def muon_flops(plan: Resolved) -> int:
    """Return the FLOPs of a device's orthogonalisations in a step; 0 of another optimizer. With ``gather``
    the devices that share matrices all do the same work, with the other two each does a part."""
    total = 0
    for weight, layouts in plan.layouts_by_path.values():
        matrix = matrix_dims(weight.dims)
        if plan.muon != "none" and matrix and not weight.frozen:
            sizes = dict(zip(parse_layout(weight.dims).letters, weight.shape, strict=True))
            rows, columns = (math.prod(sizes[letter] for letter in part) for part in matrix)
            numbers = math.prod(layouts.whole.shard_shape(weight.shape, plan.mesh.sizes))
            total += numbers // (rows * columns) * newton_schulz_flops(rows, columns)
    return total


def muon_and_fsdp_bytes(plan: Resolved, batch_size: int, seq_len: int) -> tuple[int, int]:
    """Return the bytes that a device sends in a step so that Muon has whole matrices, and those by which FSDP
    gathers the same matrices for their use and reduce-scatters their gradients."""
    messages = [
        (message, row.sent(message.num_bytes) * times)
        for row in step_traffic(plan, batch_size, seq_len).values()
        for message, times in row.messages.items()
    ]
    for_muon = lambda message: message.arrow.startswith((MOMENTUM, ORTHOGONAL))
    used = lambda m: m.term == WEIGHT_LINKS and "->" not in m.arrow and matrix_dims(m.arrow)
    of = lambda chosen: sum(sent for message, sent in messages if chosen(message))
    return of(for_muon), of(used)


def equal_batch_tokens(plan: Resolved, batch_size: int, seq_len: int) -> float:
    """Return the tokens of a step at which Muon sends as many bytes as FSDP for the same matrices; infinite
    where no weight is gathered. From there on a larger batch, of more microbatches of this size, is FSDP's.

    FSDP sends them for each microbatch, Muon once a step. With P parameters on n = fsdp devices FSDP at
    ZeRO 3 sends (g + 1) i P (n-1)/n for a microbatch of t tokens: g gathers (2, or 1 without
    ``reshard_after_forward``) and a reduce-scatter, in numbers of i bytes. Muon moves float32: by ``gather``
    4 P (n-1)/n; by ``owner`` twice 4 P/n (n-1)/n. So they are equal at

        gather   T = 4 t / ((g + 1) i)           in bfloat16 2/3 of a microbatch
        owner    T = 8 t / ((g + 1) i n)         4/(3 n) of one

    Where T is below t, as in bfloat16, FSDP sends more from the first microbatch on. Other axes share
    matrices too (tp, sp): the same division, of all predicted bytes.
    """
    muon, fsdp = muon_and_fsdp_bytes(plan, batch_size, seq_len)
    return batch_size * seq_len * muon / fsdp if fsdp else math.inf
