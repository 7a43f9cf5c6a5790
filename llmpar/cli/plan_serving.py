"""The tables of ``llmpar plan --serve``."""

from __future__ import annotations

from rich.table import Table

GIB = 2**30


def tables(document: dict) -> list:
    """The answer as tables: meshes that do both phases, both apart, one token by term, and the batch."""
    what = f"{document['model']} on {document['devices']:,} {document['chip']}"
    what += f", {document['prompt']:,} tokens in, {document['output']:,} out"
    names = "mesh", "batch", "TTFT ms", "TPOT ms", "requests/s", "tokens/s", "GiB", "why"
    found = []
    if document["plans"]:
        plans = Table(*names, title=what)
        for row in document["plans"]:
            plans.add_row(
                row["mesh"],
                str(row["batch"]),
                f"{row['first_token_s'] * 1e3:.4g}",
                f"{row['per_token_s'] * 1e3:.4g}",
                f"{row['requests_per_s']:.3g}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['memory_bytes']['total'] / GIB:.1f}",
                row["why"],
            )
        found += [plans, _terms(document["plans"][0])]
    found.append(_apart(document) if document["apart"] else Table(f"apart: {document['why_not_apart']}"))
    curve = Table("batch", "ms a step", "tokens/s, prompts not counted")
    for row in document["curve"]:
        curve.add_row(f"{row['batch']:,.0f}", f"{row['decode_s'] * 1e3:.4g}", f"{row['tokens_per_s']:,.0f}")
    found.append(curve)
    if document["rejected"]:
        rejected = Table("cannot be", "why")
        for row in document["rejected"]:
            rejected.add_row(row["mesh"], row["why"])
        found.append(rejected)
    return [*found, _sums(document)]


def _terms(row: dict) -> Table:
    both = Table("of the first, ms", "a prompt", "a token")
    for name in dict.fromkeys([*row["decode_terms"], *row["prefill_terms"]]):
        cells = [row[key].get(name) for key in ("prefill_terms", "decode_terms")]
        both.add_row(name, *("" if s is None else f"{s * 1e3:.4g}" for s in cells))
    return both


def _apart(document: dict) -> Table:
    """Prompts and tokens on instances of their own."""
    row = document["apart"]
    apart = Table("apart", "mesh", "instances", "batch", "ms")
    first, then = row["prefill"], row["decode"]
    apart.add_row("prompts", first["mesh"], str(first["instances"]), "", f"{first['prefill_s'] * 1e3:.4g}")
    apart.add_row("tokens", then["mesh"], str(then["instances"]), str(then["batch"]),
                  f"{then['decode_s'] * 1e3:.4g}")  # fmt: skip
    apart.add_row("cache handed over", "", "", "", f"{row['handover_s'] * 1e3:.4g}")
    apart.caption = (
        f"prompts : tokens = {row['balanced_ratio']:.2f} : 1 would keep both busy; here"
        f" {row['requests_per_s']:.3g} requests/s, {row['tokens_per_s']:,.0f} tokens/s"
        f" on {row['devices_used']:,} devices"
    )
    return apart


def _sums(document: dict) -> Table:
    sums = Table("all", "")
    cache, critical = document["cache_bytes"], document["critical_batch"]
    sums.add_row("keys and values of a token", f"{cache['token'] / 1024:,.1f} KiB")
    sums.add_row("keys and values of a request", f"{cache['sequence'] / GIB:,.3f} GiB")
    sums.add_row("critical batch by the data sheet", f"{critical['data_sheet']:,.0f}")
    sums.add_row("critical batch as reached", f"{critical['reached']:,.0f}")
    for row in [*document["plans"][:1], *filter(None, [document["apart"]])]:
        if cost := row.get("cost_per_million_tokens"):
            sums.add_row("cost of a million tokens" + " apart" * ("handover_s" in row), f"{cost:,.3g}")
    return sums
