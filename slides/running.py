"""Drawings for the part on running: processes that meet, a pool of machines, what a pass waits for.

A picture that builds up takes a ``step``; its pictures are all of one size.
"""

from __future__ import annotations

from deck import letters

from llmpar.draw.scene import OTHERS, Group, Line, Rect, Scene, Text, compose, legend, small_text

WIDE = 880  # a drawing that fills the width of a slide
WHO = OTHERS[:4]  # hosts and processes, the first of them first
ARROW = {"width": 2.5, "head": True}


def canvas(title: str, high: float, items: list, text: str) -> Scene:
    """Items on a ground of fixed size."""
    return compose(title, [[Rect(0, 0, WIDE, high), *items]], text)


def box(x: float, y: float, wide: float, high: float, *lines: str, fill: str = "cell", **style) -> Group:
    """A box with lines of text in its middle; the first is bold where there are several."""
    style = {"stroke": "edge", "radius": 4} | style
    middle = y + high / 2 - 9.5 * (len(lines) - 1)
    words = [
        Text(
            x + wide / 2,
            middle + 19 * i,
            line,
            "small" if i else "body",
            "middle",
            bold=not i and len(lines) > 1,
        )
        for i, line in enumerate(lines)
    ]
    return Group((Rect(x, y, wide, high, fill, **style), *words))


# ------------------------------------------------------------------------------------------------- processes


@letters()
def processes(step: int, coordinator: str) -> Scene:
    """How the processes of a job find one another: started (0), met (1), one mesh (2)."""
    said = (
        "1. A launcher starts a program on each host, and tells it three things",
        "2. All connect to the first one's coordinator, and learn of each other",
        "3. Each one sees the devices of all hosts: one mesh, one program",
    )
    items: list = [box(290, 0, 300, 34, "srun, mpirun, torchrun, Ray", fill="paper")] if not step else []
    for host in range(3):
        x = 310 * host
        items += [
            Rect(x, 62, 260, 190, "paper", "edge", 1.5, radius=8),
            small_text(x + 250, 77, f"host {host}", "end"),
        ]
        lit = {"stroke": "ink", "width": 2.5} if not step else {}
        items.append(
            box(x + 14, 92, 232, 80, f"process {host}", f"{coordinator}", f"number {host} of 3", **lit)
        )
        if not step:
            items.append(Line(((440, 34), (x + 130, 60)), "ink", **ARROW))
        for k in range(4):
            device = str(4 * host + k if step == 2 else k)
            items.append(box(x + 20 + 56 * k, 196, 50, 36, device, fill=WHO[host] if step == 2 else "cell"))
    if step == 1:
        items += [
            box(14, 0, 232, 34, "coordinator", fill=WHO[0]),
            Line(((130, 90), (130, 36)), "ink", **ARROW),
        ]
        items += [Line(((310 * h + 130, 90), (310 * h + 130, 17), (248, 17)), "ink", **ARROW) for h in (1, 2)]
    if step == 2:
        items.append(Rect(6, 188, 868, 52, "", "ink", 3, dash=True, radius=6))
        items.append(
            Text(WIDE / 2, 40, "jax.devices(): 12 devices in every process", "body", "middle", bold=True)
        )
    ends = (
        "Arrows lead from the launcher to each process.",
        "Arrows lead from each process to the coordinator.",
        "A frame holds the devices 0 to 11 of all hosts.",
    )
    hosts = f"Three hosts, each with a process and four devices; told are {coordinator} and a number of 3."
    return canvas(said[step], 256, items, f"{hosts} {ends[step]}")


@letters()
def ranks() -> Scene:
    """A program per rank, which calls each collective, beside one program, whose collectives are compiled."""
    items: list = [
        Text(0, 10, "MPI, Horovod: a program per rank", bold=True),
        Text(470, 10, "A mesh: one program", bold=True),
    ]
    for k in range(4):
        items.append(box(102 * k, 34, 94, 76, f"rank {k}", "gradient", "Allreduce", fill=WHO[k]))
        items.append(Line(((102 * k + 47, 110), (102 * k + 47, 150)), "ink", 2.5))
        items.append(box(470 + 102 * k, 134, 94, 40, f"device {k}", fill=WHO[k]))
        items.append(Line(((517 + 102 * k, 90), (517 + 102 * k, 132)), "ink", **ARROW))
    items.append(Line(((47, 150), (353, 150)), "ink", 2.5))
    items.append(small_text(200, 166, "each rank calls it, in the same order", fill="ink"))
    items.append(box(470, 34, 400, 56, "d m +dp -> d m", "the compiler writes the all-reduce", fill="paper"))
    text = "Left, four ranks, each of which computes a gradient and calls Allreduce. Right, one arrow,"
    return canvas(
        "", 176, items, f"{text} d m +dp -> d m, from which a compiler writes one program for four devices."
    )


@letters()
def chains(heads: list[str], rows: list[tuple[str, ...]]) -> Scene:
    """Rows of boxes, each of which leads to the next, under what the boxes of a column are; the first of a
    row is its name."""
    wides = [max(map(len, column)) * 8.6 + 22 for column in zip(heads, *rows, strict=True)]
    gap = (WIDE - sum(wides)) / (len(wides) - 1)
    lefts = [sum(wides[:k]) + gap * k for k in range(len(wides))]
    items: list = [small_text(x, 0, head, "start") for x, head in zip(lefts, heads, strict=True)]
    for i, row in enumerate(rows):
        y = 16 + 40 * i
        for k, (x, wide, text) in enumerate(zip(lefts, wides, row, strict=True)):
            fill, middle = "cell" if k else WHO[1], x + wide / 2
            ground = Rect(x, y, wide, 32, fill, "edge", radius=4)
            items += [ground, small_text(middle, y + 16, text, fill="ink" if k else "black")]
            items += [Line(((x - gap + 3, y + 16), (x - 4, y + 16)), "ink", **ARROW)] * bool(k)
    return canvas("", 16 + 40 * len(rows), items, "; ".join(", ".join(row) for row in rows))


PAST = 13  # the hours that the drawing of an elastic job spans


@letters()
def elastic() -> Scene:
    """A job of two hosts that loses one, goes on with half of the devices, and grows again."""
    unit, left = 53, 116
    items: list = []
    runs = (
        (0, 0, 3.5, "both hosts"),
        (1, 0, 3.5, "both hosts"),
        (0, 4.7, 8.7, "half of the devices"),
        (0, 9.7, PAST, "both hosts"),
        (1, 9.7, PAST, "both hosts"),
    )
    for host in (0, 1):
        items.append(Text(left - 14, 40 + 60 * host, f"host {host}", anchor="end"))
    for host, begin, end, what in runs:
        items.append(
            box(left + unit * begin, 20 + 60 * host, unit * (end - begin), 40, what, fill=WHO[host], radius=0)
        )
    for host in (0, 1):  # what was computed since the last checkpoint is lost
        items.append(Rect(left + unit * 3, 20 + 60 * host, unit * 0.5, 40, "", "ink", 1, "/"))
    items.append(Text(left + unit * 6.6, 100, "power lost", "small", "middle", "bad", True))
    for at, words in ((4.1, "who is left?"), (9.2, "host 1 is back")):
        items += [Line(((left + unit * at, 8), (left + unit * at, 20)), "soft", 1.5)]
        items.append(small_text(left + unit * at, 0, words, fill="ink"))
    for at in (1.5, 3, 6.7, 8.7, 11.7):
        x = left + unit * at
        items.append(Line(((x - 6, 138), (x + 6, 138), (x, 126)), "ink", 1, fill="dp"))
    saved, again = left + unit * 3, left + unit * 4.7
    items.append(Line(((saved, 146), (saved, 156), (again, 156), (again, 62)), "dp-line", **ARROW))
    items.append(small_text(left + unit * 4.8, 160, "back to the last checkpoint", "start", "ink"))
    items.append(small_text(left - 14, 134, "checkpoints", "end", "ink"))
    text = """Two hosts run. Host 1 loses power; what was computed since the last checkpoint is lost. Those
who are left agree on that, and go on with half of the devices. Host 1 is back; all save, and go on."""
    return canvas("", 172, items, text)


# ------------------------------------------------------------------------------------------------------- Ray


@letters()
def pool(step: int) -> Scene:
    """Ray's pool: machines (0), a placement group (1), actors in it (2)."""
    said = (
        "1. A pool of machines: one head, and workers that have joined it",
        "2. A placement group: GPUs that are had together, or not at all",
        "3. An actor on each bundle; they call jax.distributed.initialize, and train",
    )
    items: list = []
    for host, name in enumerate(("head", "worker 1", "worker 2")):
        x = 300 * host
        items += [Rect(x, 30, 270, 190, "paper", "edge", 1.5, radius=8), Text(x + 14, 48, name, bold=True)]
        items += [box(x + 20 + 60 * k, 160, 52, 40, "GPU") for k in range(4)] if host else []
        items.append(box(x + 14, 66, 110, 30, "CPU tasks"))
        if host:
            items.append(Line(((x + 135, 30), (x + 135, 12), (135, 12), (135, 28)), "soft", **ARROW))
            if step:
                items.append(
                    Rect(
                        x + 12,
                        108 if step > 1 else 148,
                        246,
                        104 if step > 1 else 64,
                        "",
                        "ink",
                        3,
                        dash=True,
                        radius=6,
                    )
                )
                items.append(small_text(x + 14, 234, f"bundle {host - 1}: 4 GPUs", "start", "ink"))
            if step > 1:
                items.append(box(x + 20, 114, 230, 36, f"actor {host - 1}: a process", fill=WHO[host]))
    items.append(box(14, 116, 242, 36, "driver: your script", fill=WHO[0]))
    if step > 1:
        items.append(Line(((520, 214), (520, 250), (820, 250), (820, 214)), "ink", 2.5, True))
        items.append(small_text(670, 264, "tensors travel by NCCL, not by Ray", fill="ink"))
    text = "A head that runs the script, and two workers with four GPUs each."
    more = (
        "",
        " A placement group holds both bundles of four GPUs.",
        " In each bundle an actor is a process of the job.",
    )
    return canvas(said[step], 276, items, text + "".join(more[: step + 1]))


@letters()
def nested() -> Scene:
    """What stands in what: SLURM's job, its nodes, the container, Ray, and the program."""
    items: list = [Rect(0, 0, WIDE, 158, "paper", "edge", 1.5, dash=True, radius=8)]
    items.append(small_text(12, 14, "SLURM: one job, two nodes", "start", "ink"))
    for k, (node, ray) in enumerate(
        (("head node", "ray start --head"), ("the other", "ray start --address=head:6379"))
    ):
        x = 14 + 436 * k
        items += [
            Rect(x, 28, 416, 120, "cell", "edge", 1.5, radius=6),
            small_text(x + 12, 42, node, "start", "ink"),
        ]
        items += [Rect(x + 12, 54, 392, 86, "paper", "dp", 2, radius=6)]
        items.append(small_text(x + 392, 68, "container", "end", "dp-line"))
        items.append(box(x + (214 if not k else 24), 82, 180 if not k else 270, 46, ray, fill=WHO[k]))
    items.append(box(38, 82, 156, 46, "train_with_ray.py", fill="paper"))
    items += [Line(((472, 105), (410, 105)), "ink", **ARROW), Line(((194, 105), (226, 105)), "ink", **ARROW)]
    text = """One SLURM job of two nodes. In each a container, in it Ray: a head, and a worker that joins it
at port 6379. The program runs beside the head."""
    return canvas("", 158, items, text)


# --------------------------------------------------------------------------------------------------- serving


@letters()
def bound(rows: list[tuple[str, float, float, float]], title: str) -> Scene:
    """Passes through a model: name, and the seconds that computing takes, reading weights, and reading keys
    and values. What takes longer, computing or reading, has a thick edge."""
    scale = 480 / max(max(computes, weights + keys) for _, computes, weights, keys in rows)
    items, said = list[Group | Line | Rect | Text](), []
    for k, (name, computes, weights, keys) in enumerate(rows):
        y, (head, _, rest) = 84 * k, name.partition(", ")
        items += [Text(200, y + 20, head, anchor="end", bold=True), Text(200, y + 40, rest, "small", "end")]
        for row, parts in enumerate(({"matmuls": computes}, {"weights": weights, "activations": keys})):
            x, took, top = 214.0, sum(parts.values()), y + 30 * row
            lit = took == max(computes, weights + keys)
            for role, seconds in parts.items():
                items.append(Rect(x, top, scale * seconds, 25, role, "edge", 0.75))
                x += scale * seconds
            items.append(Rect(214, top, max(2.0, x - 214), 25, "", "ink", 3 if lit else 0.75))
            words = ("reads" if row else "computes") + f" {1e3 * took:.2g} ms"
            items.append(Text(x + 10, top + 12, words, "small", bold=lit))
            said.append(f"{name} {words}")
    key = legend((("matmuls", "computing"), ("weights", "weights"), ("activations", "keys and values")))
    items.append(Group(tuple(key), 214, 84 * len(rows) - 8))
    return canvas(title, 84 * len(rows) + 10, items, "; ".join(said))
