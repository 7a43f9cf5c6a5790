# %% [markdown] tags=["slide"]
# ## Tensor parallelism: cut the columns
#
# `s d` times `d m/tp` gives `s m/tp`: every device computes its own columns. Nothing moves.
#
# <footer>Shoeybi et al. 2019 (Megatron-LM), section 3 · lesson <code>notebooks/05_tensor_parallelism</code></footer>

# %%
import dataclasses
import math

from llmpar.mesh import make_mesh, use_devices

use_devices()

import optax
from IPython.display import Markdown

from llmpar import draw
from llmpar.config import preset
from llmpar.draw import scene
from llmpar.draw.scene import Group, Rect, Text, compose, legend, small_text
from llmpar.inspect.census import census_hlo, census_table, partitioned_hlo
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.notation import parse_arrow, parse_layout
from llmpar.plan import Plan
from llmpar.predict import formulas, traffic
from llmpar.predict.hardware import chip
from llmpar.step import Step

TP = 4
WHERE = scene.SERIES[:TP]  # a colour of its own for each device; the axes' colours mean axes


def matrix(text, wide, high):
    """A matrix as the blocks that its layout makes of it, each named by the devices that hold it."""
    layout = parse_layout(text)
    held = draw.holders(layout, {"tp": TP})
    rows, columns = (TP if dim.axes else 1 for dim in layout.dims)
    w, h, items = wide / columns, high / rows, [Text(wide / 2, -34, text, 17, "middle", bold=True)]
    items.append(
        small_text(
            wide / 2,
            -13,
            (
                "an unfinished sum"
                if layout.sums
                else "on every device"
                if rows * columns == 1
                else "cut over tp"
            ),
        )
    )
    for (i, j), devices in held.items():
        # Devices that hold the same numbers share one sheet; the addends of a sum are a sheet each.
        sheets = [[d] for d in devices] if layout.sums else [devices]
        for k, who in reversed(list(enumerate(sheets))):
            tint = "cell" if len(who) > 1 else WHERE[who[0]]
            x, y = j * w + 16 * k, i * h + 20 * k
            at = y + (h - 10 if k else h / 2)
            items.append(Rect(x, y, w, h, tint, "ink", 1))
            if layout.sums:
                items += [
                    Rect(x, y, w, h, "", "tp-line", hatch="/"),
                    Rect(x + w / 2 - 16, at - 9, 32, 18, tint),
                ]
            if len(who) == 1:
                words = "+ " * (k > 0) + str(who[0])
                items.append(Text(x + w / 2, at, words, anchor="middle", fill=scene.text_color_on(tint)))
    return Group(tuple(items))


def product_of(x, w, y, note):
    """Draw x @ w = y."""
    size = {"s": 150, "d": 140, "m": 220}
    parts = [
        matrix(text, *(size[dim.name] for dim in reversed(parse_layout(text).dims))) for text in (x, w, y)
    ]
    signs = [Text(0, 0, sign, 26, "middle", bold=True) for sign in ("×", "=")]
    line = [[parts[0]], [signs[0]], [parts[1]], [signs[1]], [parts[2]]]
    out, at = [], 0.0
    for block in line:
        x0, y0, x1, y1 = scene.bounds(block)
        middle = (y0 + 50 + y1) / 2 if len(block) == 1 and isinstance(block[0], Group) else 0
        out.append(Group(tuple(block), at - x0, -middle))
        at += x1 - x0 + 26
    key = legend(
        [(tint, f"device {i}") for i, tint in enumerate(WHERE)]
        + [("tp", "unfinished sum over tp", "/")] * ("+" in y),
        760,
    )
    return compose("", [out, key], note)


layouts = ("s d", "d m/tp", "s m/tp")
assert parse_layout(layouts[1]).shard_shape((4096, 14336), {"tp": TP}) == (4096, 3584)
assert str(Plan("tp=4").place("ffn d m")) == "d m/tp" and not parse_arrow("s d -> s d").moves
scene.show(
    product_of(
        *layouts,
        "columns: the input on every device, the weight and the result cut by columns over 4 devices",
    )
)

# %% [markdown] tags=["notes"]
# **Ask:** which device needs which part of x? All of x, every device: that is why it must be whole before.
#
# **Misunderstanding:** that the results must be gathered now. Only if somebody needs whole rows; an activation function works on
# numbers one by one and is content with a piece.
#
# **Source:** Shoeybi et al. 2019. In attention the columns are heads: n and k are cut, h is whole.

# %% [markdown] tags=["slide"]
# ## Then cut the rows
#
# `s m/tp` times `m/tp d` gives `s d +tp`: every device has addends for the whole result. **One all-reduce** finishes the sum.
#
# <footer>Shoeybi et al. 2019 (Megatron-LM), section 3 · lesson <code>notebooks/05_tensor_parallelism</code></footer>

# %%
layouts = ("s m/tp", "m/tp d", "s d +tp")
plan = Plan("tp=4")
assert str(plan.place("ffn m d")) == "m/tp d"
assert [str(move) for move in plan.resolve("ffn b s d +m -> stream b s d").moves] == ["all-reduce over tp"]
scene.show(
    product_of(
        *layouts,
        "row: the input cut by columns, the weight by rows over 4 devices, the result four addends for the"
        " whole of it, one on each device",
    )
)

# %% [markdown] tags=["notes"]
# **Ask:** what if we forget the all-reduce? In most frameworks nothing crashes: every device continues with its own addends, and
# the loss is wrong. A test of ours plants exactly this fault and sees it caught.
#
# **Misunderstanding:** that each device has "a part of the result". It has a part of the *sum*, for all of the result.
#
# **Source:** Shoeybi et al. 2019. In the model's text: `par.move(y @ down, "ffn b s d +m -> stream b s d")`.

# %% [markdown] tags=["slide"]
# ## Why column, then row
#
# Sent per token by a Llama 3 8B feed-forward (gate and up, then down), forward, 8 devices, bf16:
#
# <footer>Shoeybi et al. 2019 · lesson <code>notebooks/05_tensor_parallelism</code> · <code>llmpar inspect --mesh tp=8</code></footer>

# %%
CONFIG = preset("llama3-8b")
WAYS = {
    "column, then row": ["s d +tp -> s d"],
    "column, then column": ["s m/tp -> s m", "s d/tp -> s d"],
    "row, then row": ["s m +tp -> s m/tp", "s d +tp -> s d"],
    "row, then column": ["s m +tp -> s m", "s d/tp -> s d"],
}


def times(arrow):
    """Gate and up are two products: an unfinished sum of width m occurs twice, what comes after their
    elementwise product once."""
    return sum(w.dims == "ffn l d m" for w in CONFIG.weights().values()) if "m +tp" in arrow else 1


def kib_per_token(arrows):
    total = 0
    for text in arrows:
        shape = (1, CONFIG.ffn_width if "m" in text else CONFIG.width)
        total += times(text) * sum(sent for _, sent in draw.moved(parse_arrow(text), shape, {"tp": 8}, 2))
    return total / 1024


# a gathered value starts cut: the arrow's own shape is the whole, so one token of width d or m is enough
kib = {way: kib_per_token(arrows) for way, arrows in WAYS.items()}
assert (
    min(kib, key=kib.__getitem__) == "column, then row"
    and kib["column, then row"] == 2 * 2 * 4096 * 7 / 8 / 1024
)
assert (
    (kib["row, then row"], kib["row, then column"])
    == (2 * 2 * 14_336 * 7 / 8 / 1024 + 14, 2 * 4 * 14_336 * 7 / 8 / 1024 + 7)
    == (63, 105)
)
shown = {
    way: "; ".join("2 × " * (times(arrow) == 2) + f"`{arrow}`" for arrow in arrows)
    for way, arrows in WAYS.items()
}
lines = [f"| {way} | {shown[way]} | {n:.0f} KiB |" for way, n in kib.items()]

LLAMA, BATCH, SEQ = dataclasses.replace(preset("tiny"), num_layers=2), 16, 32
plan = Plan("tp=8")
step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
census = census_hlo(partitioned_hlo(step.lower(BATCH, SEQ)), step.mesh)
stream = 4 * BATCH * SEQ * LLAMA.width
large = [c for c in census if c.bytes_sent >= c.count * formulas.sent_bytes("all-reduce", stream, 8)]
assert {c.kind for c in census} == {"all-reduce"} and sum(c.count for c in large) == 4 * LLAMA.num_layers + 2
assert sum(c.bytes_sent for c in large) == 4 * (
    formulas.tp_elements(BATCH, SEQ, LLAMA.width, 8, LLAMA.num_layers)
    + 2 * 2 * BATCH * SEQ * LLAMA.width * 7 / 8
)
Markdown("\n".join(["| first, then second | what moves | per token |", "|---|---|--:|", *lines]))

# %% [markdown]
# With attention the same way: **4 all-reduces per layer and step**, counted in our compiled program.

# %% [markdown] tags=["notes"]
# Two forward (attention, feed-forward) and two backward; the program has 4L + 2, one more for the embedding's look-up and one for
# the logits, and a few numbers per token for the loss.
#
# **Ask:** why not finish the sum after the first product? Between the two lies SiLU times a gate, which is not linear: it needs
# finished numbers. Columns give it finished numbers of some features.
#
# **Misunderstanding:** that all-reduces can be saved by cutting "smarter". The layer's output depends on all features; something
# has to cross once per product pair.
#
# **Source:** Shoeybi et al. 2019, figure 4: two all-reduces forward, two backward. Volume 8bsd(N-1)/N: Narayanan et al. 2021.

# %% [markdown] tags=["slide"]
# ## Sequence parallelism
#
# Norms and residuals are the same work on every device. Cut their sequence: all-reduce becomes reduce-scatter and
# all-gather. **Same bytes sent, less memory held.**
#
# <footer>Korthikanti et al. 2022, table 2 · lesson <code>notebooks/05_tensor_parallelism</code> · <code>llmpar inspect --mesh tp=8 --tp-sequence</code></footer>

# %%
GPT3 = dict(b=1, s=2048, h=12288, heads=96)
rows = []
for t in (4, 8):
    total, cut = (formulas.gpt_activation_bytes(**GPT3, tp=t, sequence_parallel=sp) for sp in (False, True))
    whole = 10 * 2048 * 12288
    rows += [
        (f"N = {t}", {"cut by tp": total - whole, "the same on every device": whole}),
        (f"N = {t}, sequence cut", {"cut by tp": cut}),
    ]
assert [sum(row.values()) for _, row in rows[2:]] == [578813952, 358612992]  # Korthikanti et al. 2022, GPT-3


def jaxpr_bytes(tp_sequence):
    """What a traced step sends over tp for activations, by kind."""
    step = Step(
        LLAMA, (plan := Plan("tp=8", tp_sequence=tp_sequence)), make_mesh(plan.mesh), optax.adamw(1e-3)
    )
    traced = census_jaxpr(
        step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr, step.mesh.shape
    )
    found = census_table(traced)
    assert found == {
        key: {"count": p.count, "bytes_sent": p.bytes_sent}
        for key, p in traffic.step_traffic(LLAMA, plan, BATCH, SEQ).items()
    }
    return {
        kind: sum(c.bytes_sent for c in traced if c.kind == kind and c.bytes_sent >= c.count * stream * 7 / 8)
        for _, kind in found
    }


without, with_it = jaxpr_bytes(False), jaxpr_bytes(True)
assert (
    without["all-reduce"] == with_it["reduce-scatter"] + with_it["all-gather"] and not with_it["all-reduce"]
)
scene.show(draw.memory_bars(rows, title="Activations of one GPT-3 layer, one sequence of 2,048, per device"))

# %% [markdown] tags=["notes"]
# **Ask:** the grey part does not shrink from N = 4 to N = 8. What is in it? Two norms, two dropouts, the inputs of the products:
# 10bsd bytes, whole on every device.
#
# **Misunderstanding:** that this is context parallelism. It cuts the sequence over the *tp* devices and only outside of the
# products; attention still sees whole sequences. Ring attention is another axis (our `sp`).
#
# **Source:** Korthikanti et al. 2022: 10 + 24/N becomes 34/N, times b·s·d (without the scores; the paper writes h for d and t for N). It is the GPT block with dropout and
# stored scores; ours keeps less. Equal bytes are asserted on the traced step of a small Llama.

# %% [markdown] tags=["slide"]
# ## The 8→16 cliff
#
# Products shrink with $N$; the all-reduces do not. Beyond the node they also meet **slower links**. How steep the cliff is depends
# on the node's ports.
#
# <footer>Narayanan et al. 2021, takeaway 1 · a model, not a measurement · lesson <code>notebooks/05_tensor_parallelism</code></footer>

# %%
import base64
import io

import matplotlib.pyplot as plt
from IPython.display import display

from llmpar.draw.scene import LIGHT

h100, llama70, TOKENS, DEGREES = chip("h100"), preset("llama3-70b"), 8192, (1, 2, 4, 8, 16, 32)
block = (
    sum(math.prod(w.shape) for path, w in llama70.weights().items() if path.startswith("blocks."))
    // llama70.num_layers
)


def efficiency(node, t):
    """Share of a layer's time, forward and backward, that is spent in matrix products."""
    compute_s = 6 * block * TOKENS / t / node.flops_per_s
    return compute_s / (
        compute_s + 4 * formulas.collective_seconds(node, "all-reduce", 2 * TOKENS * llama70.width, t)
    )


nodes = {
    "8 ports of 400 Gb/s per node": h100,
    "1 port of 400 Gb/s per node": dataclasses.replace(h100, dcn_bytes_per_s=h100.dcn_bytes_per_s / 8),
}
curves = {name: [efficiency(node, t) for t in DEGREES] for name, node in nodes.items()}
eight, one = curves.values()
assert eight[:4] == one[:4] and one[4] < 0.5 * one[3] and eight[4] < eight[3]
figure, axes = plt.subplots(figsize=(9.6, 3.9), dpi=150)
axes.plot(range(4), eight[:4], color=LIGHT["ink"], marker="o", markersize=9, linewidth=3, zorder=3)
for (name, curve), (color, marker) in zip(
    curves.items(), ((LIGHT["dp"], "o"), (LIGHT["s4"], "s")), strict=True
):
    axes.plot(range(3, len(DEGREES)), curve[3:], color=color, marker=marker, markersize=9, linewidth=3)
    axes.annotate(f"{name}", (4, curve[4]), (4.12, curve[4] + 0.05), fontsize=14, color=color, weight="bold")
axes.axvline(3.5, color=LIGHT["soft"], linestyle="--")
axes.text(3.42, 1.02, "one node", ha="right", fontsize=14, color=LIGHT["soft"])
axes.text(3.58, 1.02, "several", ha="left", fontsize=14, color=LIGHT["soft"])
axes.set_xticks(range(len(DEGREES)), DEGREES)
axes.set(
    ylim=(0, 1.12),
    xlim=(-0.2, 6.6),
    yticks=[0, 0.25, 0.5, 0.75, 1],
    yticklabels=["0", "25 %", "50 %", "75 %", "100 %"],
)
axes.set_xlabel("devices N that share each layer", fontsize=14)
axes.set_title(
    "Llama 3 70B on H100: share of a layer's time in matrix products", fontsize=15, loc="left", weight="bold"
)
axes.tick_params(labelsize=14)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(png := io.BytesIO(), format="png", bbox_inches="tight")
plt.close(figure)
said = [
    f"{name}: " + ", ".join(f"N = {t} {x:.0%}" for t, x in zip(DEGREES, curve, strict=True))
    for name, curve in curves.items()
]
display({"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "\n".join(said)}, raw=True)

# %% [markdown] tags=["notes"]
# **Ask:** both curves fall already inside the node. Why? Twice the devices halve the product, and the all-reduce of b·s·d stays.
#
# **Misunderstanding:** that the cliff is a law. It is the ratio of the links: a node with as many fast ports as GPUs has hardly
# any, a node with one port has a wall. The model lets a hierarchical all-reduce use all ports at once; real ones reach less.
#
# **Source:** `llmpar.predict.formulas.collective_seconds`, 8,192 tokens, bf16, products at peak, no overlap. Narayanan et al. 2021: use
# tensor parallelism up to the node, then pipelines. The curves are times, at 370 GB/s as reached. The limit m / (C/β) (Austin et al.
# 2025) is a threshold, at the published 450 GB/s: 13 for 70B in a node, as in lesson 05.

# %%
assert int(formulas.tp_max_degree(llama70.ffn_width, h100.flops_per_s, h100.link_bytes_per_s)) == 13
assert (h100.link_bytes_per_s, h100.reached_link_bytes_per_s) == (450e9, 370e9)
