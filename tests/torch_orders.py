"""Make tests/fixtures/torch_orders.json: orders of torch.distributed.pipelining, in its own CSV.

    python tests/torch_orders.py

in an environment with torch (dependency group `parity`). A key is the schedule, p, m and v of `ORDERS`; a
value the file that torch's `_dump_csv` writes (Schedule1F1B and ScheduleGPipe have no such method, so their
`_get_pipeline_order` is written in its form), or the sentence with which the schedule refuses the sizes.
"""

import csv
import io
import json
import pathlib

OURS = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved-zb",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}
"""LoopedBFS takes the microbatches of a backward in the opposite order: its cells are not breadth-first's."""
REFUSED = "the number of microbatches is no multiple of the number of rounds"
INTERLEAVED = ["Interleaved1F1B", "InterleavedZeroBubble"]
ORDERS = [
    *((name, *sizes) for name in INTERLEAVED for sizes in ((4, 8, 2), (4, 10, 2), (4, 3, 2), (3, 7, 3))),
    *((name, 4, 9, 2) for name in INTERLEAVED),
    *((name, 3, 5, 1) for name in ("GPipe", "1F1B")),
    *((name, p, m, 2) for name, p, m in (("ZBVZeroBubble", 3, 4), ("ZBVZeroBubble", 2, 5))),
    *((name, p, m, 2) for name, p, m in (("DualPipeV", 4, 9), ("DualPipeV", 2, 4), ("LoopedBFS", 2, 3))),
]


def order(name, p, m, v, lowered=False):
    """torch's order as CSV text; lowered, with the communication that torch adds."""
    from torch.distributed.pipelining import schedules as theirs

    made = object.__new__(theirs.get_schedule_class(name))  # no process group: only the order is asked for
    made.pp_group_size, made._n_microbatches, made.n_local_stages = p, m, v
    made._num_stages, made.num_stages, made._stages = p * v, p * v, [None] * v
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    if name in INTERLEAVED and m % made.number_of_rounds:  # `__init__` says so
        return REFUSED
    if hasattr(made, "_get_pipeline_order") and v == 1:
        rows = made._get_pipeline_order()
    else:
        rows = {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}
    if name == "InterleavedZeroBubble":
        made.pipeline_order = rows
        rows = made._add_bubbles_to_actions(p * v)
    if lowered:
        rank_of = {action.stage_index: rank for rank, row in rows.items() for action in row if action}
        rows = {rank: theirs._add_unshard_reshard(row) for rank, row in rows.items()}
        rows = theirs._add_send_recv(rows, rank_of.__getitem__, p * v)
    text = io.StringIO()
    csv.writer(text).writerows(rows.values())
    return text.getvalue()


if __name__ == "__main__":
    import torch

    found = {" ".join(map(str, sizes)): order(*sizes) for sizes in ORDERS}
    found["lowered InterleavedZeroBubble 2 4 2"] = order("InterleavedZeroBubble", 2, 4, 2, lowered=True)
    path = pathlib.Path(__file__).parent / "fixtures" / "torch_orders.json"
    path.write_text(json.dumps({"torch": torch.__version__, "orders": found}, indent=1) + "\n")
