"""Data parallelism and ZeRO: replicas and their all-reduce, one sum in several messages, what a device holds
over a step, and how FSDP gathers a layer, uses it and forgets it."""

from llmpar.draw.charts import bar_part, count_noun
from llmpar.draw.scene import (
    OTHERS,
    SMALL,
    Items,
    Line,
    Rect,
    Scene,
    Text,
    boxed,
    compose,
    legend,
    size_text,
    small_text,
    text_color_on,
    text_width,
    titled,
)


def replicas(devices: int = 4, rows: int = 4, together: bool = True) -> Scene:
    """Draw a step of data parallelism: each device has the same weights, ``rows`` of its own and a gradient
    of its own; an all-reduce makes one sum of them. Not ``together``, each updates alone, and they drift
    apart. A square in a device's colour: its rows are in this gradient, or in these weights."""
    if not 1 <= devices <= len(OTHERS):
        raise ValueError(
            f"{devices} replicas have no colours of their own; draw 1 to {len(OTHERS)}"
        )
    high, side, everyone = 30, 12, range(devices)
    wide = text_width("same weights") + devices * (side + 3) + 24
    pitch, y, items = wide + 14, 46.0, Items()
    for r in everyone:
        words = f"rows {r * rows}–{(r + 1) * rows - 1}"
        items += [
            Text(r * pitch + wide / 2, -16, f"device {r}", anchor="middle", bold=True),
            *titled(Rect(r * pitch, 0, wide, high, OTHERS[r], "edge"), words),
            *titled(Rect(r * pitch, high + 4, wide, high, "weights", "edge"), "weights"),
        ]
    boxes = [("gradients", "own gradient", False), ("weights", "own weights", False)]
    if together:
        boxes[1:] = [
            ("dp", "", True),
            ("gradients", "the sum", True),
            ("weights", "same weights", True),
        ]
    for fill, words, summed in boxes:
        y += high + 16 if y > 46 else high + 4
        for r in everyone:
            x = r * pitch
            items.append(
                Line(((x + wide / 2, y - 15), (x + wide / 2, y - 1)), "edge", 2, head=True)
            )
            if words:
                items += [
                    Rect(x, y, wide, high, fill, "edge"),
                    Text(x + 9, y + high / 2, words, fill=text_color_on(fill)),
                ]
                for k in everyone:
                    own, left = (
                        OTHERS[k] if summed or k == r else "paper",
                        (devices - k) * (side + 3) + 8,
                    )
                    items.append(
                        Rect(x + wide - left, y + (high - side) / 2, side, side, own, "ink", 0.75)
                    )
        if not words:
            whole = Rect(0, y, devices * pitch - 14, high, fill, "dp-line")
            items += titled(whole, "all-reduce over dp: add up, and give the sum to all")
    key = legend(
        [(OTHERS[0], "coloured: this device's rows are in it"), ("paper", "empty: they are not")]
    )
    ends = "an all-reduce gives each the sum of all gradients; all make the same update: one model"
    ends = ends if together else f"each updates alone, by its own: {count_noun(devices, 'model')}"
    text = f"each device has the same weights, {rows} rows of its own, and a gradient of its own;\n{ends}"
    title = f"One step of {count_noun(devices, 'replica')}" + ", without messages" * (not together)
    return compose(title, [items, key], text)


def messages(rows) -> Scene:
    """Draw what a device sends as the messages it is cut into: ``rows`` of (name, bytes of each message)."""
    rows = [(name, list(sizes)) for name, sizes in rows]
    left, wide, most = (
        max(text_width(name) for name, _ in rows) + 14,
        480,
        max(sum(s) for _, s in rows) or 1,
    )
    items, lines = Items(), []
    for i, (name, sizes) in enumerate(rows):
        x, y = left, 46 * i
        for size in sizes:
            items.append(bar_part("gradients", x, y, wide * size / most, 30, size_text(size)))
            x += wide * size / most
        text = f"{count_noun(len(sizes), 'message')}, {size_text(sum(sizes))}"
        items += [Text(left - 12, y + 15, name, anchor="end"), Text(left + wide + 12, y + 15, text)]
        lines.append(f"{name}: {text}")
    return compose("One sum, in so many messages", [items], "\n".join(lines))


# and their colours
_PARTS = {"weights": "weights", "gradients": "gradients", "optimizer": "moments"}


def _share(stage: int, part: str, layer: int, tick: int, layers: int, devices: int) -> float:
    """Return how much of a layer's weights, gradient or optimizer a device holds at a ZeRO stage: 1, a share
    or 0.

    Ticks: a layer's forward each, then a layer's backward each, from the last layer on, then the update.
    """
    backward, share = 2 * layers - 1 - layer, 1 / devices
    if part == "weights":
        return 1 if stage < 3 or tick in (layer, backward) else share
    if part == "optimizer":
        return 1 if stage == 0 else share
    cut = tick > backward if stage > 1 else tick == 2 * layers and stage == 1
    return 0 if tick < backward else share if cut else 1


def zero_strips(stages=range(4), layers: int = 4, devices: int = 4) -> Scene:
    """Draw what one device holds in the course of a step at each ZeRO stage: a cell per layer and moment of
    time, full where it has all of it, low where it has its share, empty where it has nothing."""
    beside, high = text_width("stage 0") + 14, 19
    wide = max(19, (text_width("backward", SMALL) + 4) / layers)
    left, last = (
        beside + text_width("layer 0", SMALL) + 6,
        max(text_width("update", SMALL) + 6, wide),
    )
    times, pitch, items, lines = range(2 * layers + 1), layers * high + 14, Items(), []
    panel, bottom = 2 * layers * wide + last, pitch * len(stages) - 6
    spans = (("forward", 0, layers), ("backward", layers, 2 * layers), ("update", 2 * layers, 0))
    for k, (part, fill) in enumerate(_PARTS.items()):
        x0 = left + k * (panel + 24)
        items.append(Text(x0 + panel / 2, -16, part, anchor="middle", bold=True))
        for i, stage in enumerate(stages):
            for layer, tick in ((layer, tick) for layer in range(layers) for tick in times):
                x, y, w = (
                    x0 + tick * wide,
                    i * pitch + layer * high,
                    wide if tick < times[-1] else last,
                )
                full = high * _share(stage, part, layer, tick, layers, devices)
                items += [
                    Rect(x, y, w, high, "paper", "grid", 0.75),
                    *[Rect(x, y + high - full, w, full, fill, "ink", 0.5)] * (full > 0),
                ]
        for name, first, end in spans:
            x, x1 = x0 + first * wide, x0 + end * wide if end else x0 + panel
            items += [
                Line(((x + 2, bottom), (x1 - 2, bottom)), "edge", 2, head=True),
                small_text((x + x1) / 2, bottom + 15, name, fill="ink"),
            ]
    for i, stage in enumerate(stages):
        y = i * pitch
        items += [
            Text(beside - 14, y + layers * high / 2, f"stage {stage}", anchor="end", bold=True),
            *(
                small_text(left - 6, y + (n + 0.5) * high, f"layer {n}", "end")
                for n in range(layers)
            ),
        ]
        amount = lambda part, t, s=stage: sum(
            _share(s, part, n, t, layers, devices) for n in range(layers)
        )
        most = [f"{part} {max(amount(part, t) for t in times) / layers:.3g}" for part in _PARTS]
        lines.append(f"stage {stage}, the most at any time, of all: {', '.join(most)}")
    low = f"; low: this device's 1/{devices} of it" * any(stages)
    key = [("weights", "full: all of a layer" + low), ("paper", "nothing")]
    title = f"What 1 of {devices} devices holds over a step"
    return compose(title, [items, legend(key)], "\n".join(lines))


def gather_use_forget(layers: int = 3, devices: int = 4, takes=(1.3, 1.6, 3.0)) -> Scene:
    """Draw FSDP's layers in time: a layer's weights are gathered, used and forgotten, in the forward pass and
    in the backward pass again, which scatters its gradient. One layer is fetched ahead. A message, a forward
    and a backward take as long as ``takes`` says, in any unit."""
    message, link, done, lines, low, tall = takes[0], 0.0, [0.0, 0.0], [], 36 / devices, 36
    uses = [(n, takes[1]) for n in range(layers)] + [(n, takes[2]) for n in reversed(range(layers))]
    # a layer, and its weights: on their way, there, in use
    lives: list[tuple[int, float, float, float]] = []
    sums: dict[int, float] = {}  # when a layer's gradient goes
    # the last two turns are for what is left over
    for k, (layer, lasts) in enumerate([*uses, *uses[:2]]):
        # There is room once the last use but one is over; the last layer is forgotten, too, before it turns.
        start = link = max(link, done[k + (k == layers)])
        if k < len(uses):
            lives.append((layer, start, link := start + message, max(link, done[k + 1])))
            done.append(lives[-1][3] + lasts)
        if k >= layers + 2:
            sums[uses[k - 2][0]], link = link, link + message
    left, pitch = text_width("layer 0") + 14, 66
    scale = max(40, 1.05 * text_width("gather", SMALL) / message)
    span, items, x_of = link + message, Items(), lambda time: left + scale * time
    middle = done[layers + 1]
    for name, a, b in (("forward", 0, middle), ("backward", middle, link), ("update", link, span)):
        items += [
            Line(((x_of(a) + 2, -14), (x_of(b) - 2, -14)), "edge", 2, head=True),
            Text(x_of((a + b) / 2), -30, name, anchor="middle", bold=True),
        ]

    def box(y: float, a: float, b: float, fill: str, words: str = "", high: float = tall) -> None:
        items.extend(boxed(Rect(x_of(a), y, scale * (b - a), high, fill, "ink", 0.5), words))

    for n in range(layers):
        y = n * pitch
        items.append(Text(left - 14, y + tall / 2, f"layer {n}", anchor="end", bold=True))
        box(y + tall - low, 0, span, "weights", high=low)
        whole = []
        for (layer, sent, arrived, begins), (_, lasts) in zip(lives, uses, strict=True):
            if layer == n:
                box(y, sent, arrived, "fsdp", "gather")
                box(y, arrived, begins, "weights", "waits")
                box(y, begins, begins + lasts, "weights", "use")
                whole.append(f"whole from {arrived:.3g} to {begins + lasts:.3g}")
        box(y, sums[n], sums[n] + message, "fsdp", "reduce")
        box(y + tall + 3, sums[n] + message, span, "gradients", high=low)
        lines.append(
            f"layer {n}: {', '.join(whole)}; its gradient is scattered by {sums[n] + message:.3g}"
        )
    ends = [begins + lasts for (*_, begins), (_, lasts) in zip(lives, uses, strict=True)]
    most = max(
        sum(life[1] <= at[1] < end for life, end in zip(lives, ends, strict=True)) for at in lives
    )
    key = [
        (
            "weights",
            f"low: this device's 1/{devices} of a layer's weights; tall: all of them, waiting or in use",
        ),
        ("fsdp", "on the links, one message at a time; reduce: a reduce-scatter"),
        ("gradients", f"1/{devices} of the finished gradient"),
    ]
    lines.append(f"At most {count_noun(most, 'layer')} whole, or on the way, at a time.")
    return compose("Gather a layer, use it, forget it", [items, legend(key, 700)], "\n".join(lines))
