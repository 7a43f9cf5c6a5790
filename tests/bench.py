"""Measure what a change may make slower: `make bench` prints a table, in five minutes on two quiet cores.

A row is one piece of work, by plain JAX (the tests' oracle), torch, this package on one device, and so on:
medians of rounds in turn. "best" divides ours by the fastest of the others, "one" by ours on one device,
"then" by what `--record` wrote to bench.json on this machine; above one is worse.
"""

import argparse
import asyncio
import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
import oracle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llmpar.explore import page as pages
from llmpar.explore.explorer import by_kind
from llmpar.inspect.census import census_hlo, compiled_memory, partitioned_hlo
from llmpar.inspect.look import look
from llmpar.model import attention
from llmpar.parallel.mesh import make_mesh, use_devices
from llmpar.plan import sequence_order
from llmpar.plan.model_config import ExpertConfig, ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.plan.timetable import branch_shares
from llmpar.planner import planner
from llmpar.predict import hardware
from llmpar.serve.engine import Engine
from llmpar.training.step import Step

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE / "bench.json"
COLUMNS = ("plain JAX", "torch", "compiled", "one device", "ours")
USUAL = {"width": 256, "vocab": 2048, "seq": 64, "many": 64, "compiled": 512, "positions": 2048}
USUAL |= {"long": 16_384, "model": "llama3-70b", "devices": (64, 16_384), "tokens": 48, "looked": 50}
LEAST = {"width": 64, "vocab": 64, "seq": 16, "many": 8, "compiled": 8, "positions": 64, "long": 256}
LEAST |= {"model": "llama3.2-1b", "devices": (8, 16), "tokens": 4, "looked": 2}
ROWS = 16
Value = float | str | Callable[[], float]
"""A number, why there is none, or what measures one whenever it is called."""
Row = tuple[str, str, dict[str, Value]]
"""A name, a unit, and values for `COLUMNS`, or for some of them."""


def cpu(run: Callable, scale: float = 1.0) -> Callable[[], float]:
    """Count the CPU seconds that this process takes while a function runs."""

    def seconds() -> float:
        begin = time.process_time()
        run()
        return scale * (time.process_time() - begin)

    return seconds


def python(*words: str) -> Callable[[], float]:
    """Count the CPU seconds of Python, started with these words."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return seconds


def missing(*modules: str) -> str:
    """Which of the libraries that a row needs is not here; nothing where all are."""
    return ", ".join(f"no {name}" for name in modules if not importlib.util.find_spec(name))


def peak() -> float:
    """The most MiB that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start(size: dict) -> Iterator[Row]:
    """What a reader waits for first: imports, the command line, plans."""
    others = {"plain JAX": python("-c", "import jax, optax")}
    others |= {"torch": missing("torch") or python("-c", "import torch")}
    for code in ("import llmpar", "from llmpar.training.step import Step"):
        yield code, "CPU s", others | {"ours": python("-c", code)}
    yield "llmpar --help", "CPU s", {"ours": python("-m", "llmpar", "--help")}
    for devices in size["devices"]:  # these are long enough to be measured once
        words = "plan", "--model", size["model"], "--devices", str(devices)
        yield f"llmpar {' '.join(words)}", "CPU s", {"ours": python("-m", "llmpar", *words)()}
    num = size["devices"][0]
    asked = planner.Question(preset(size["model"]), hardware.chip("h100"), num, num, 8192)
    yield f"rank plans of {size['model']} on {num}", "CPU s", {"ours": cpu(lambda: planner.decide(asked))()}


FAST = dict(unroll=0, attention_block=64)  # a stage of one layer has no loop to unroll
STAGES = dict(zero=0, microbatches=8, attention_block=64)
PLANS = {
    "one": Plan("dp=1", zero=0, microbatches=8, **FAST),
    "dp8": Plan("dp=8", zero=0, **FAST),
    "fsdp8": Plan("fsdp=8", **FAST),
    "fsdp8 remat": Plan("fsdp=8", remat="block", attention_block=64, loss_chunks=4),
    "tp4 dp2": Plan("tp=4 dp=2", zero=0, microbatches=4, **FAST),
    "sp4 dp2": Plan("sp=4 dp=2", zero=0, microbatches=4, unroll=0),
    "pp4 dp2": Plan("pp=4 dp=2", **STAGES),
    "pp4 dp2 saved": Plan("pp=4 dp=2", stage_saves="residuals", **STAGES),
    "one, experts": Plan("dp=1", zero=0, microbatches=2, loss_chunks=4, **FAST),
    "ep4 dp2, experts": Plan("ep=4 dp=2", zero=0, loss_chunks=4, **FAST),
}


def llama(size: dict, experts: bool = False) -> ModelConfig:
    """The model of the steps; with experts it has as many active parameters."""
    width = size["width"]
    dims = dict(num_layers=4, vocab_size=size["vocab"], width=width, head_width=width // 8)
    config = dataclasses.replace(preset("small"), ffn_width=3 * width, **dims)
    mixture = dict(experts=ExpertConfig(8, 2), ffn_width=3 * width // 2)
    return dataclasses.replace(config, **mixture) if experts else config


def batch_of(vocab: int, batch: int, seq: int) -> dict:
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq + 1)).astype(np.int32)
    positions = np.tile(np.arange(seq, dtype=np.int32), (batch, 1))
    ids = {"positions": positions, "segments": np.ones_like(positions)}
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **ids}


def drawn(config: ModelConfig) -> dict:
    """Weights for plain JAX and for torch."""
    draw = np.random.default_rng(0)
    one = lambda w: np.ones(w.shape) if w.is_vector else 0.02 * draw.standard_normal(w.shape)
    return {path: one(w).astype(np.float32) for path, w in config.weights().items()}


def repeated(step: Callable, state) -> Callable[[], float]:
    """A function that does a step, from where the last one ended, and gives its loss."""
    held = [state]

    def run() -> float:
        held[0], loss = step(held[0])
        return float(loss)

    return run


def plain(config: ModelConfig, batch: dict, axis: str = "", cut: bool = False) -> Callable[[], float]:
    """The step in plain JAX; over an ``axis`` of 8 rows are cut, and, if asked, weights: by the compiler."""
    params, optimizer = jax.tree.map(jax.numpy.asarray, drawn(config)), optax.adamw(1e-3)
    if axis:
        mesh = make_mesh(f"{axis}=8")
        batch = jax.device_put(batch, NamedSharding(mesh, P(axis)))
        last = lambda w: NamedSharding(mesh, P(*[None] * (w.ndim - 1), axis if cut else None))
        params = {path: jax.device_put(w, last(w)) for path, w in params.items()}

    @jax.jit  # the batch is an argument: as a constant of the program it would lie whole on each device
    def step(state, batch):
        params, moments = state
        loss = lambda params: oracle.loss(params, batch, config, None)[0]
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return repeated(lambda state: step(state, batch), (params, optimizer.init(params)))


def in_torch(config: ModelConfig, batch: dict) -> dict[str, Value]:
    """The same step in torch, as it is and compiled."""
    if why := missing("torch"):
        return {"torch": why, "compiled": why}
    import torch

    ids = {name: torch.tensor(x, dtype=torch.int64) for name, x in batch.items()}

    def stepping(loss: Callable) -> Callable[[], float]:
        params = {path: torch.tensor(w) for path, w in drawn(config).items()}
        layered = {path: w.unbind() if "blocks" in path else (w,) for path, w in params.items()}
        params = {path: [x.clone().requires_grad_() for x in w] for path, w in layered.items()}
        optimizer = torch.optim.AdamW(itertools.chain(*params.values()), 1e-3, weight_decay=1e-4, fused=True)

        def run() -> float:
            optimizer.zero_grad()
            (value := loss(params, ids)).backward()
            optimizer.step()
            return value.item()

        return run

    loss = functools.partial(torch_loss, config)
    return {"torch": cpu(stepping(loss)), "compiled": cpu(stepping(torch.compile(loss)))}


def torch_loss(config: ModelConfig, w: dict, batch: dict):
    """The mean loss of a Llama in torch; ``w`` has a list of weights, one for each layer."""
    import torch

    f, width = torch.nn.functional, config.head_width
    norm = lambda x, scale: f.rms_norm(x, scale.shape, scale, config.norm_eps)
    rates = config.rope_theta ** (-2 * torch.arange(width // 2) / width)
    angles = batch["positions"][:, None, :, None] * rates
    sin, cos = angles.sin(), angles.cos()
    rotated = lambda a, b: torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    x = f.embedding(batch["tokens"], w["embedding"][0])
    for i in range(config.num_layers):
        of = lambda name, i=i: w[f"blocks.{name}"][i]
        y = norm(x, of("attention_norm.scale"))
        q, k, v = (torch.einsum("bsd,dnh->bnsh", y, of(f"attention.{name}")) for name in "qkv")
        q, k = rotated(*q.chunk(2, -1)), rotated(*k.chunk(2, -1))
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bnsh,nhd->bsd", y, of("attention.o"))
        y = norm(x, of("ffn_norm.scale"))
        x = x + (f.silu(y @ of("ffn.gate")) * (y @ of("ffn.up"))) @ of("ffn.down")
    logits = norm(x, w["norm.scale"][0]) @ w["head"][0].T
    return f.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def ours(config: ModelConfig, plan: Plan, rows: int, seq: int) -> tuple[Callable[[], float], dict]:
    """The step here, and of its program MiB of temporaries and MiB sent, a device."""
    plan.resolve(config, None, rows, seq)
    step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3), clip=None)
    program = step.lower(rows, seq).compile()
    batch = jax.device_put(batch_of(config.vocab_size, rows, seq), step.batch_sharding)
    shares = branch_shares(plan.pipeline, config.layer_kinds)[0]
    sent = sum(one.bytes_sent for one in census_hlo(program.as_text(), step.mesh, shares))
    facts = {"temporaries": compiled_memory(program)["temp_bytes"] / 2**20, "sent": sent / 2**20}

    def once(state):
        state, metrics = program(state, batch)
        return state, metrics["loss"]

    return repeated(once, step.init(0)), facts


def steps(size: dict) -> Iterator[Row]:
    use_devices(8)
    seq, one, config = size["seq"], dict[bool, Value](), llama(size)
    batch = batch_of(config.vocab_size, ROWS, seq)
    alone = plain(config, batch)
    for name, plan in PLANS.items():
        mixed, begin = "experts" in name, time.process_time()
        run, facts = ours(llama(size, mixed), plan, ROWS, seq)
        run()
        taken = {"ours": time.process_time() - begin} | ({} if one else {"plain JAX": cpu(alone)()})
        others = {"one device": one.get(mixed, one.get(False))} if one else {}
        if not one:
            others = {"plain JAX": cpu(alone)} | in_torch(config, batch)
        elif name in ("dp8", "fsdp8"):
            others |= {"plain JAX": cpu(plain(config, batch, name[:-1], cut=name == "fsdp8"))}
        yield f"step, {name}", "CPU s", others | {"ours": cpu(run)}
        yield f"compile and first step, {name}", "CPU s", taken
        yield from ((f"{fact}, {name}", "MiB", {"ours": mib}) for fact, mib in facts.items() if mib)
        if "one" in name:
            one[mixed] = cpu(run)


def many(size: dict) -> Iterator[Row]:
    """The same step on eight simulated devices and on more."""
    num, rows = size["many"], max(ROWS, size["many"])
    use_devices(num)
    plans = (Plan(f"fsdp={n}", attention_block=64) for n in (8, num))
    few, more = (ours(llama(size), plan, rows, size["seq"] * ROWS // rows)[0] for plan in plans)
    yield f"step, fsdp{num} over fsdp8", "×", {"ours": lambda: cpu(more)() / cpu(few)()}


def compiled(size: dict) -> Iterator[Row]:
    """Compile a step for more devices than a machine has."""
    num = size["compiled"]
    use_devices(num)
    step = Step(llama(size), Plan(f"dp={num}", zero=0), make_mesh(f"dp={num}"), optax.adamw(1e-3), clip=None)
    taken = cpu(lambda: step.lower(num, size["seq"]).compile())()
    yield f"compile, dp{num}", "CPU s", {"ours": taken}
    yield f"compile, dp{num}: peak memory", "MiB", {"ours": peak()}


def looks(size: dict) -> Iterator[Row]:
    """Read what a training step of some 200 collectives sends: what that takes beside compiling."""
    use_devices(8)
    mesh = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    on = lambda shape, *cut: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*cut)))
    weights = [(on((8, 16), None, "Y"), on((16, 8), "Y")) for _ in range(size["looked"])]

    def step(weights, x):
        hidden = lambda x, w: jax.numpy.tanh(jax.numpy.tanh(x @ w[0]) @ w[1])
        loss = lambda weights: (functools.reduce(hidden, weights, x) ** 2).sum()
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    given = weights, on((32, 8), "X")
    count = sum(row["count"] for row in look(step, *given).rows)

    def alone() -> None:
        jax.clear_caches()
        partitioned_hlo(jax.jit(step).lower(*given))

    def looked() -> None:
        jax.clear_caches()
        look(step, *given)

    yield f"look at {count} collectives", "CPU s", {"plain JAX": cpu(alone), "ours": cpu(looked)}


def attends(size: dict) -> Iterator[Row]:
    """Causal attention of 8 heads × 64, output and gradients: whole, and in a ring of 8."""
    use_devices(8)
    length, mesh, cut = size["positions"], make_mesh("sp=8"), P(None, "sp")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, length, 8, 64)).astype(np.float32) for _ in range(4)]
    whole = lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, is_causal=True)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut)
    def ring(q, k, v, at):
        everywhere = jax.lax.all_gather(at, "sp", axis=1, tiled=True)
        ids = attention.Ids(at, 0, everywhere, 0)
        return attention.ring_attention(q[..., None, :], k, v, ids, axis="sp")[0][..., 0, :]

    runs, memory, values = dict[str, Value](), dict[str, Value](), []
    for who, f, order in (("plain JAX", whole, "contiguous"), ("ours", ring, "zigzag")):
        places = np.array(sequence_order.sequence_permutation(order, length, 8))
        given = [x[:, places] for x in arrays] + [places[None].astype(np.int32)]
        given = jax.device_put(given, NamedSharding(mesh, cut) if f is ring else None)

        def both(q, k, v, grad, at, f=f):
            out, pull = jax.vjp(lambda q, k, v: f(q, k, v, at), q, k, v)
            return out, *pull(grad)

        program = jax.jit(both).lower(*given).compile()
        values.append([np.asarray(x)[:, np.argsort(places)] for x in program(*given)])
        runs[who] = cpu(lambda program=program, given=given: jax.block_until_ready(program(*given)))
        memory[who] = compiled_memory(program)["temp_bytes"] / 2**20
    assert all(np.allclose(a, b, atol=1e-4 * np.abs(b).max()) for a, b in zip(*values, strict=True))
    runs["torch"] = missing("torch")
    if not runs["torch"]:
        import torch

        q, k, v, grad = (torch.tensor(x).transpose(1, 2) for x in arrays)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        f = torch.nn.functional.scaled_dot_product_attention
        runs["torch"] = cpu(lambda: torch.autograd.grad(f(*leaves, is_causal=True), leaves, grad))
    yield f"attention, {length:,} positions", "CPU s", runs
    yield f"attention, {length:,} positions: temporaries", "MiB", memory


def long(size: dict) -> Iterator[Row]:
    """Gradients of one block over a long sequence, on 8 devices."""
    use_devices(8)
    length, heads = size["long"], dict(num_heads=2, num_kv_heads=2, head_width=64)
    config = dataclasses.replace(preset("tiny"), num_layers=1, width=128, ffn_width=384, **heads)
    plan = Plan("sp=8", loss_chunks=16, attention_block=512)
    step = Step(config, plan, make_mesh(plan.mesh), optax.sgd(1e-3))
    program, state = step.lower(1, length).compile(), step.init(0)
    places = np.array(sequence_order.sequence_permutation(plan.sequence_order, length, 8))
    batch = {name: x[:, places] for name, x in batch_of(config.vocab_size, 1, length).items()}
    batch = jax.device_put(batch, step.batch_sharding)
    taken = cpu(lambda: jax.block_until_ready(program(state, batch)))()
    yield f"a block, {length:,} positions", "CPU s", {"ours": taken}
    yield f"a block, {length:,} positions: peak memory", "MiB", {"ours": peak()}


def server(size: dict) -> Iterator[Row]:
    """Tokens a second that clients get of the server's application, in this process."""
    if why := missing("httpx", "starlette", "uvicorn"):
        yield from ((f"server, {n} clients", "tokens/s", {"ours": why}) for n in (1, 16))
        return
    import httpx

    from llmpar.serve import server
    from llmpar.training.chat import Chat
    from llmpar.training.tokenizers import ByteTokenizer

    use_devices(8)
    config, plan, text = preset("tiny"), Plan("dp=1", zero=0), ByteTokenizer()
    mesh = make_mesh(plan.mesh)
    params = jax.device_get(Step(config, plan, mesh, optax.sgd(1e-3)).init(0).params)
    engine = Engine(config, plan, mesh, params, slots=16, length=128)
    engine.warm_up()
    about = {"model": config.name, "mesh": str(plan.mesh)}
    api = server.Api(server.EngineThread(engine), text, Chat(text), about, 128)
    api.thread.start()

    async def clients(num: int) -> int:
        across, asked = httpx.ASGITransport(server.app(api)), {"prompt": "Once", "max_tokens": size["tokens"]}
        async with httpx.AsyncClient(transport=across, base_url="http://127.0.0.1", timeout=60) as client:
            posts = (client.post("/v1/completions", json=asked | {"seed": i}) for i in range(num))
            answers = [post.raise_for_status().json() for post in await asyncio.gather(*posts)]
        return sum(answer["usage"]["completion_tokens"] for answer in answers)

    def rate(num: int) -> float:
        begin = time.perf_counter()
        return asyncio.run(clients(num)) / (time.perf_counter() - begin)

    try:
        yield from (
            (f"server, {n} clients", "tokens/s", {"ours": functools.partial(rate, n)}) for n in (1, 16)
        )
    finally:
        api.close()


PAGE = [("a saved page's Python wakes", "s"), ("a saved page answers a choice and draws it", "ms")]
PAGE += [("a saved page's redraw alone", "ms"), ("a saved page names the best of 210 meshes", "s")]
REDRAWS = "performance.getEntriesByName('llmpar redraw')"


def page(size: dict) -> Iterator[Row]:
    """The mesh explorer: what Python answers to a choice, here and in a saved page, which draws it."""
    explorer, chips = by_kind("mesh"), itertools.cycle(["h100", "a100", "b200", "h200"])
    for num in size["devices"]:
        choice = {"mesh": f"fsdp={num // 8} tp=8", "devices": num, "agreed": num, "batch_size": num}
        answer = lambda choice=choice: explorer.answer({**explorer.state, **choice, "chip": next(chips)})
        yield f"the explorer answers, {num:,} devices", "CPU ms", {"ours": cpu(answer, 1000)}
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    why = missing("playwright") or "" if program else "no Chromium"
    if why := why or ("" if pages.runtime() else "no make runtime"):
        yield from ((*row, {"ours": why}) for row in PAGE)
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        explorer.save(path := pathlib.Path(folder) / "mesh.html")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        shown = browser.new_page(viewport={"width": 1280, "height": 900})

        def wakes() -> float:
            begin = time.perf_counter()
            shown.goto(path.as_uri())
            shown.wait_for_function("document.documentElement.dataset.python === 'awake'", timeout=90_000)
            return time.perf_counter() - begin

        drawing = [0.0]

        def answers() -> float:
            num, box = shown.evaluate(f"{REDRAWS}.length"), shown.locator('[data-name="mesh"]').first
            begin = shown.evaluate("performance.now()")
            box.fill(f"fsdp={8 << num % 3} tp={2 << num % 2}")
            box.press("Enter")
            shown.wait_for_function(f"{REDRAWS}.length > {num}", timeout=30_000)
            began, drawing[0] = shown.evaluate(f"[{REDRAWS}[{num}].startTime, {REDRAWS}[{num}].duration]")
            return began + drawing[0] - begin

        for row, measure in zip(PAGE, (wakes(), answers, lambda: (answers(), drawing[0])[1]), strict=False):
            yield *row, {"ours": measure}
        batches, named = itertools.count(128, 64), "/Best of 210 meshes/.test(document.body.textContent)"

        def best() -> float:
            begin = time.perf_counter()
            shown.locator('[data-name="batch_size"]').first.fill(str(next(batches)))
            shown.keyboard.press("Enter")
            for what in (f"!{named}", named):
                shown.wait_for_function(what, timeout=60_000)
            return time.perf_counter() - begin

        explorer.set(model="llama3-70b", chip="h100", devices=64, batch_size=64, mesh="fsdp=64")
        explorer.save(path)
        wakes()
        yield *PAGE[-1], {"ours": best}
        browser.close()


GROUPS = {"start": start, "steps": steps, "many": many, "compiled": compiled, "looks": looks}
GROUPS |= {"attention": attends, "long": long, "server": server, "page": page}
LIMIT_S = 480
"""Seconds in which a group's process has to end."""


def measured(row: Row, rounds: int) -> dict:
    """Measure a row: once to warm up, and then in turn."""
    name, unit, cells = row
    runs, times = {who: value for who, value in cells.items() if callable(value)}, {}
    for number in range(rounds + 1):
        for who, run in list(runs.items()):
            try:
                times[who] = [*times.get(who, []), run()]
            except Exception as error:
                cells[who] = f"{type(error).__name__}: {error}"
                del runs[who]
                times.pop(who, None)
        if number == 0:
            times = dict.fromkeys(runs, [])
    times |= {who: [value] * rounds for who, value in cells.items() if isinstance(value, float)}
    values = cells | {who: statistics.median(found) for who, found in times.items()}
    for what, names in (("best", COLUMNS[:3]), ("one", COLUMNS[3:4])):
        others = [times[who] for who in names if who in times]
        if "ours" in times and others:
            each = zip(times["ours"], map(min, zip(*others, strict=True)), strict=True)
            values[what] = statistics.median(worse(unit, *pair) for pair in each)
    return {"name": name, "unit": unit} | values


def worse(unit: str, now: float, then: float) -> float:
    """A ratio that is above one where ``now`` is worse."""
    return then / now if unit.endswith("/s") else now / then


def rows_of(group: str, words: list[str]) -> Iterator[dict]:
    """Measure a group in a process of its own; its last row says what that took."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TF_CPP_MIN_LOG_LEVEL": "2"}  # who waits takes no CPU seconds
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)}
    words, begin = [sys.executable, __file__, *words, "--child", group], time.perf_counter()
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    late = threading.Timer(LIMIT_S, run.kill)
    late.start()
    try:
        yield from map(json.loads, run.stdout or ())
        _, status, used = os.wait4(run.pid, 0)
        run.returncode, taken = os.waitstatus_to_exitcode(status), time.perf_counter() - begin
    finally:
        late.cancel()
        run.kill()
    if run.returncode:
        why = f"over {LIMIT_S} s" if taken >= LIMIT_S else "see stderr"
        yield {"name": f"{group}: what is left", "unit": "", "ours": why}
    words = f"{taken:.0f} s, {used.ru_utime + used.ru_stime:.0f} CPU s, {used.ru_maxrss / 2**20:.1f} GiB"
    yield {"name": f"({group}: {words})", "unit": ""}


def machine() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


def line(name: str, unit: str, cells: list) -> str:
    number = lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"
    short = lambda x: number(x) if isinstance(x, float) else x or ""
    return f"{name:<46} {unit:<8}" + "".join(f"{short(cell)[:11]:>12}" for cell in cells)


def main() -> None:
    """Measure the groups that are named, or all; print the table; keep it, if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"some of {', '.join(GROUPS)}; by default all"
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--positions", type=int, help="of attention and of long")
    parser.add_argument("--record", action="store_true", help="keep the table in tests/bench.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:  # prints rows alone on stdout
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        longer = {"positions": args.positions, "long": args.positions} if args.positions else {}
        for row in GROUPS[args.child](USUAL | longer):
            print(json.dumps(measured(row, args.rounds)), file=out, flush=True)
        return
    if unknown := sorted({*args.groups} - {*GROUPS}):
        parser.error(f"no group is called {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    kept = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    then = kept["rows"] if kept.get("machine") == machine() else {}
    words = ["--rounds", str(args.rounds)] + (["--positions", str(args.positions)] if args.positions else [])
    print(line("", "", [*COLUMNS, "best", "one", "then"]))
    found = dict[str, dict]()
    for row in itertools.chain.from_iterable(rows_of(group, words) for group in args.groups or GROUPS):
        name, unit = row.pop("name"), row["unit"]
        pair = row.get("ours"), then.get(name, {}).get("ours")
        last = worse(unit, *pair) if all(isinstance(x, float) for x in pair) else None
        print(line(name, unit, [*map(row.get, (*COLUMNS, "best", "one")), last]), flush=True)
        short = {who: float(f"{x:.4g}") if isinstance(x, float) else x for who, x in row.items()}
        found |= {name: short} if unit else {}
    where = kept.get("machine", "none") + (" (another machine: not compared)" if kept and not then else "")
    print(f"the record: {kept.get('date', '')} {where}")
    if args.record:
        about = {"date": str(datetime.date.today()), "machine": machine(), "jax": jax.__version__}
        about |= {"python": platform.python_version(), "rows": then | found}
        RECORD.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
