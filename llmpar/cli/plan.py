"""``llmpar plan``: which mesh for a model on a machine; the model of time held against measured runs."""

import contextlib
import functools
import operator
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import tyro

from llmpar.cli.options import (
    MAX_TOKENS,
    OURS,
    Adapters,
    File,
    NotHeld,
    Number,
    OptionalText,
    Output,
    Real,
    changed,
    check_free,
    check_range,
    give,
    inform,
    notes_of,
    still_at_work,
)
from llmpar.files import Allowed, read_text
from llmpar.inspect.tables import rich_table
from llmpar.plan import schedules
from llmpar.plan.checks import why_not_run
from llmpar.plan.mesh_shape import AXES, POSITIONAL, parse_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS, preset
from llmpar.planner import advice, calibrate, frameworks, planner, service
from llmpar.planner.targets import GPUS, TPUS
from llmpar.predict import hardware, memory, parameters
from llmpar.predict.digits import banded, rounded
from llmpar.predict.time import beside_flops
from llmpar.predict.traffic import EXPERT_LINKS
from llmpar.predict.workload import Run

MAX_DEVICES, _MAX_SEQ_LEN = 1 << 17, 1 << 24
"""Larger than any machine and any context that was published; what is priced grows with both."""
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_KINDS = {"B": "memory", "s": "seconds|step_s|terms"}
_UNITS = {
    "": {"": 1.0, "%": 0.01},
    "s": {"": 1.0, "s": 1.0, "ms": 1e-3},
    "B": {"": 1.0, "B": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30},
}
_OWN_EXCHANGE = 0.2  # of a step: from here on it is said how the exchange of tokens is priced
_CLAIM = re.compile(r"([\w. ]*\w)(?:\s*([<>]=?)\s*(\d+\.?\d*)\s*(%|[A-Za-z]*))?")


@dataclass(frozen=True)
class PlanCommand(Adapters, Output):
    """Choose the mesh and the plan for a model on a machine: enumerate, price by time and memory, rank, and
    say why the others lost. No device is needed, and no JAX.

    llmpar plan --model llama3-70b --chip h100 --devices 512 --batch-tokens 4M --seq-len 8192

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json.
        chip: a chip's name, or the path of a TOML file with your own figures (h100 where no cluster is
            named).
        cluster: a machine's name in place of a chip: its nodes and ports.
        node_link: GB/s that one device sends inside a node, one way, in place of the chip's (of a torus, of
            each link).
        network: GB/s of one device's port beyond its node. Steps reach a share of both rates, which is said.
        node_size: devices of a node.
        hbm: GiB of a device; what programs may take of it is said in the answer.
        devices: JAX devices (64; all of a cluster that is no larger than 256).
        batch_tokens: tokens per step, as 4M (K and M are 1024 and 1024 squared).
        batch_size: sequences per step in its place; one per device where neither is given.
        seq_len: tokens per sequence.
        mesh: axes that are given, as 'tp=8 pp=4'; the others are chosen.
        versus: another mesh, whole: why one of the two is slower, by signed seconds that add up.
        fix: other fields of the plan that are given, as 'remat=block zero=1'.
        local_steps: as of `train`: the ranks of dp are workers, joined once in so many steps (0: no workers).
            What they hold is counted; seconds are of a step that sums all gradients.
        from_flags: price the plan of a launch line (--from-flags="…"), or of a configuration's file, of
            torchtitan, Megatron-LM, NeMo, MaxText, DeepSpeed, accelerate, vLLM or SGLang, and say what would
            make it fit.
        export: write the first plan in the words of torchtitan, megatron, nemo, maxtext, deepspeed or
            accelerate.
        serve: plan for serving in place of training: tokens of a prompt and of an answer, as 2048+256.
        bits: of a weight that is served: 16, 8 or 4 (16).
        cache_bits: of a key's or value's number that is kept while serving: 16 or 8 (16).
        tokens: a budget to train on, as 15T: days, energy and cost are printed.
        price: of a chip and hour, for the cost.
        keep: how many meshes to print.
        claims: what must hold of the first plan, else status 3: "fits, seconds < 3, mfu > 0.4, memory < 60
            GiB", by the keys of plans[0] of --json.
        html: a page to write: the mesh explorer opened on the first plan, the others one click away.
        measured: a TOML file of steps that were measured here, a table [[step]] each with mesh, batch_size,
            seq_len and seconds (docs/plan.md). The rates of the chip and its links are fitted to them.
        against: hold the model of time and memory against the measured runs of this file instead.
    """

    model: str = "llama3-8b"
    chip: OptionalText = None
    cluster: OptionalText = None
    node_link: Annotated[Real, Allowed(float, 1e-3, 1e6)] = None
    network: Annotated[Real, Allowed(float, 1e-3, 1e6)] = None
    node_size: Annotated[Number, Allowed(int, 1, 1_000_000)] = None
    hbm: Annotated[Real, Allowed(float, 1e-3, 1e6)] = None
    devices: Number = None
    batch_tokens: OptionalText = None
    batch_size: Number = None
    seq_len: int = 8192
    mesh: OptionalText = None
    versus: OptionalText = None
    fix: OptionalText = None
    local_steps: Annotated[int, Allowed(int, 0, MAX_TOKENS)] = 0
    from_flags: OptionalText = None
    export: OptionalText = None
    serve: OptionalText = None
    bits: Number = None
    cache_bits: Number = None
    tokens: OptionalText = None
    price: Annotated[Real, Allowed(float, 1e-9, 1e9)] = None
    keep: Annotated[int, Allowed(int, 1, 100)] = 5
    claims: Annotated[OptionalText, tyro.conf.arg(name="assert")] = None
    html: File = None
    measured: File = None
    against: File = None

    def run(self) -> dict:
        """Plan a training step, or compare the model with measurements."""
        if self.against is not None:
            names = {field.name for field in fields(self)} - {"against", "chip", "json"}
            if idle := changed(self, sorted(names)):
                raise ValueError(
                    f"--against compares the runs of a file; {', '.join(idle)} has no effect on that,"
                    " leave it out"
                )
            return hold_against(self.against, self.chip, self.json)
        if self.serve is not None:
            return self.served(self.serve)
        self.check()
        if self.versus is not None:
            return self.compare()
        return self.trained()

    def check(self) -> None:
        """Refuse options that cannot be, before any plan is priced."""
        if idle := changed(self, ("bits", "cache_bits")):
            raise ValueError(f"{idle[0]} is of what is served; add --serve, as 2048+256")
        if self.price is not None and self.tokens is None:
            raise ValueError("--price needs a number of tokens to train on; add --tokens, as 15T")
        if self.html is not None:
            if not self.html.endswith(".html"):
                raise ValueError(f"a page is saved as .html, and '{self.html}' is not; rename it")
            check_free(self.html, OURS[".html"])
            if self.measured is not None:
                raise ValueError("--html knows no measured steps; leave out --measured, or --html")
        if self.local_steps and (self.html or self.export):
            raise ValueError(
                "--html and --export know no local steps; leave out --local-steps, or these two"
            )
        if self.export not in (None, *frameworks.EXPORTS):
            raise ValueError(f"--export '{self.export}' is none of {', '.join(frameworks.EXPORTS)}")
        own = changed(self, ("mesh", "fix", "batch_size", "batch_tokens"))
        if self.from_flags is not None and own:
            raise ValueError(
                f"--from-flags has the mesh, the plan and the batch; leave out {', '.join(own)}"
            )

    def trained(self) -> dict:
        """Plan a training step."""
        budget = None if self.tokens is None else _count(self.tokens, "tokens", 1000)
        try:
            with still_at_work(
                "pricing plans", "seconds are usual; fix axes by --mesh to price fewer"
            ):
                answer, unread = (
                    self.launched(self.from_flags)
                    if self.from_flags
                    else (planner.decide(self.question(), self.keep), [])
                )
        except planner.NoMeshFits as error:
            if self.claims:
                raise NotHeld(f"--assert '{self.claims}' does not hold: {error}") from None
            raise
        document = planner.document(answer, budget, self.price)
        document["notes"] = [*parameters.notes_on(answer.question.config), *notes(answer), *unread]
        if self.measured:
            document["measured"] = self.calibration.document()
            document["notes"].append(str(self.calibration))
        if self.export is not None:
            document["export"] = frameworks.export(
                answer.question, answer.plans[0].plan, self.export
            )
        if document["chip"] not in {*GPUS, *TPUS}:  # no compiler that could be asked
            for row in document["plans"]:
                row["compile"] = None
        if self.html is not None:
            self.save_page(answer.question, answer.plans[0].plan)
        if not self.json:
            plans = "plan" if document["priced"] == 1 else "plans"
            inform(f"{document['priced']:,} {plans} priced; {document['room_is']}")
        inform(*document["notes"])
        broken = broken_claims(self.claims or "", document["plans"][0])
        if self.export is None or self.json:
            give(document, self.json, tables_of(document))
        else:  # stdout has the framework's keys alone
            with contextlib.redirect_stdout(sys.stderr):
                give(document, False, tables_of(document))
            give(document, False, [document["export"]])
        if broken:
            raise NotHeld(f"--assert does not hold: {'; '.join(broken)}")
        return document

    def launched(self, text: str) -> tuple[Any, list[str]]:
        """Return the answer with the plan of another framework's launch line or configuration alone: why it
        does not fit, and the best change that cures it; and what of the text is not priced."""
        folders = ("", os.path.dirname(text)) if " " not in text.strip() else ("",)
        text = text if " " in text.strip() else read_text(text, "configuration")
        name, known, unread = frameworks.facts_in(text, folders=folders)
        if changed(self, ["model"]) and known.get("model") not in (None, *PRESETS):
            unread.append(f"model={known.pop('model')}")  # a name that says nothing to us
        if twice := changed(self, [x for x in ("model", "seq_len") if x in known]):
            raise ValueError(f"{name}'s own are priced; leave out {', '.join(twice)}")
        sizes, plan = frameworks.sized(known, self.model, self.devices, self.seq_len)
        if self.devices not in (None, sizes["devices"]):
            raise ValueError(
                f"{name} says {sizes['devices']} devices, not {self.devices}; leave out --devices"
            )
        q = replace(self, **sizes, batch_tokens=None).question()
        fixed = frameworks.fixed_by(name, q.resolved(plan, None))
        q = replace(q, fixed=fixed)
        one, cures = planner.on_mesh(q, plan.mesh), list[dict[str, str]]()
        if one.why_not:
            changes = [x for x in advice.advice(q, plan.mesh, one) if x]
            changes.sort(key=lambda x: (len(x.patch.get("fields", "1")), x.sequence_s))
            best = next((x.text for x in changes), planner.rescue(q, one))
            cures = [{"mesh": str(plan.mesh), "why": one.why_not, "change": best}]
        sized = known if self.devices is None else known | {"each": self.devices}
        return planner.Answer(q, [one], cures, 1), frameworks.assumptions(
            name, sized, unread, q, one.plan
        )

    def served(self, text: str) -> dict:
        """Plan for requests of so many tokens."""
        used = {
            "serve",
            "bits",
            "cache_bits",
            "model",
            "chip",
            "cluster",
            "devices",
            "keep",
            "json",
        }
        names = {field.name for field in fields(self)} - used - set(hardware.MACHINE)
        if idle := changed(self, sorted(names)):
            raise ValueError(f"--serve plans for requests; leave out {', '.join(idle)}")
        if not (sizes := re.fullmatch(r"(\d+)\+(\d+)", text.strip())):
            raise ValueError(
                f"--serve '{text}' is no prompt and answer; write their tokens as 2048+256"
            )
        prompt, answer = map(int, sizes.groups())
        check_range("serve", prompt + answer, 2, _MAX_SEQ_LEN)
        chip, devices = self.machine()
        given = {name: getattr(self, name) or 16 for name in ("bits", "cache_bits")}
        request = service.Service(preset(self.model), chip, devices, prompt, answer, **given)
        document = service.serve(request, self.keep)
        document["notes"] = notes = parameters.notes_on(request.config)
        if (tokens := prompt + answer) > (most := request.config.context_length or tokens):
            notes.append(
                f"'{document['model']}' was made for {most:,} tokens, and these are {tokens:,}"
            )
        inform(*notes)
        return give(document, self.json, tables_serve(document))

    def compare(self) -> dict:
        """Compare --mesh, or the best mesh, with that of --versus."""
        if idle := changed(self, ("tokens", "price", "html", "claims", "export")):
            raise ValueError(f"--versus compares two meshes; leave out {', '.join(idle)}")
        at = lambda q, text: planner.on_mesh(q, parse_mesh(text, q.num_devices))
        if self.from_flags is not None:
            answer, unread = self.launched(self.from_flags)
            q, one = answer.question, answer.plans[0]
            own = {x: v for x, v in q.fixed.items() if x != "microbatches"}
            q = replace(q, fixed=own)  # microbatches are of one mesh
        else:
            q, unread = self.question(), []
            own = {name: value for name, value in q.fixed.items() if name not in AXES}
            q = replace(q, fixed=own)
            one = at(q, self.mesh) if self.mesh else planner.decide(q, 1).plans[0]
        document = planner.versus(q, one, at(q, self.versus or ""))
        document["notes"] = [*unread, *([str(self.calibration)] if self.measured else [])]
        inform(*document["notes"])
        return give(document, self.json, tables_versus(document))

    def save_page(self, q: planner.Question, best: Plan) -> None:
        """Write the mesh explorer, opened on a plan; without live Python if its runtime is missing."""
        from llmpar.explore import page
        from llmpar.explore.explorer import MeshExplorer

        chosen = {
            "model": q.model,
            "chip": q.chip.name if self.cluster else self.chip or "h100",
            "mesh": str(best.mesh),
            "fields": {name: value for name, value in q.fixed.items() if name not in AXES},
        }
        figures = {name: getattr(self, name) or 0 for name in hardware.MACHINE}
        if self.cluster:
            figures |= {name: planner.machine(q.chip)[name] for name in ("network", "node_size")}
        small = not page.runtime()
        explorer = MeshExplorer(**chosen, **figures, batch_size=q.batch_size, seq_len=q.seq_len)
        explorer.save(self.html or "", small)
        part = ": without Python for the browser, it has the plans that are one change away"
        inform(f"wrote {self.html}{part if small else ''}")

    def question(self) -> planner.Question:
        """Return what is asked; refuse options that contradict each other."""
        model, (chip, devices) = self.model + self.adapter_dims, self.machine()
        config = parameters.with_further(preset(model))
        if not 1 <= self.seq_len <= _MAX_SEQ_LEN:
            raise ValueError(f"seq-len is {self.seq_len}; use 1 to {_MAX_SEQ_LEN:,} tokens")
        chip = self.calibration.chip if self.measured else chip
        batch_size = self.batch(devices)
        if batch_size < 1 or batch_size * self.seq_len > MAX_TOKENS:
            raise ValueError(
                f"batch {batch_size} of {self.seq_len:,} tokens: use 1 to {MAX_TOKENS:,} tokens"
            )
        return planner.Question(
            config,
            chip,
            devices,
            batch_size,
            self.seq_len,
            self.fixed(),
            model,
            local_steps=self.local_steps,
        )

    @functools.cached_property
    def calibration(self) -> calibrate.Calibration:
        """The chip with its rates fitted to the steps of ``--measured``."""
        runs = list[tuple[Run, float]]()
        for step in calibrate.read_steps(self.measured or ""):
            q = replace(
                self,
                measured=None,
                model=step.model or self.model,
                devices=parse_mesh(step.mesh).size,
                mesh=step.mesh,
                batch_tokens=None,
                batch_size=step.batch_size,
                seq_len=step.seq_len,
                fix=step.fix or None,
            ).question()
            chosen = {name: value for name, value in q.fixed.items() if name not in AXES}
            runs.append((q.run(Plan(step.mesh, **chosen)), step.seconds))
        return calibrate.calibrate(self.machine()[0], runs, q.time_error)

    def machine(self) -> tuple[hardware.Chip, int]:
        """Return the chip as it is in the machine, and the number of devices."""
        if self.cluster is None:
            chip = hardware.chip("h100" if self.chip is None else self.chip)
            devices = 64 if self.devices is None else self.devices
            if chip.simulated:
                raise ValueError(
                    "simulated devices have no step time to predict; name a chip, as --chip h100"
                )
        else:
            chip, num_chips = hardware.cluster(self.cluster)
            most = (num_chips or MAX_DEVICES) * chip.devices_per_chip
            name = self.cluster.lower()
            if self.chip is not None and hardware.chip(self.chip).name != chip.name:
                raise ValueError(
                    f"cluster {name} has {chip.name}, not {self.chip}; leave --chip out"
                )
            usual = most if most <= 256 else 64
            devices = usual if self.devices is None else self.devices
            if devices > most:
                raise ValueError(f"cluster {name} has {most:,} devices, not {devices:,}")
        check_range("devices", devices, 1, MAX_DEVICES)
        figures = {name: getattr(self, name) for name in hardware.MACHINE}
        return hardware.in_machine(chip, **figures), devices

    def batch(self, devices: int) -> int:
        """Return the sequences of a step."""
        if self.batch_tokens is None:
            return devices if self.batch_size is None else self.batch_size
        if self.batch_size is not None:
            raise ValueError("--batch-tokens and --batch-size both set the batch; give one of them")
        tokens = _count(self.batch_tokens, "batch-tokens", 1024)
        if tokens % self.seq_len:
            near = max(1, round(tokens / self.seq_len)) * self.seq_len
            raise ValueError(
                f"a batch of {tokens:,.0f} tokens is no whole number of sequences of {self.seq_len:,};"
                f" use --batch-tokens {near}"
            )
        return int(tokens // self.seq_len)

    def fixed(self) -> dict[str, Any]:
        """Return the fields of the plan that are given, by name and value."""
        given: dict[str, Any] = {} if self.mesh is None else named_axes(self.mesh)
        known = {f.name: f for f in fields(Plan) if f.name != "mesh"}
        for pair in (self.fix or "").replace(",", " ").split():
            name, _, text = pair.partition("=")
            name = name.replace("-", "_")
            if name not in known or not text:
                raise ValueError(
                    f"--fix '{pair}' is no field=value of a plan; fields are {', '.join(known)}"
                )
            if name in given:
                raise ValueError(f"--fix: '{name}' is given twice")
            value: Any = {"true": True, "false": False, "none": None}.get(text.lower(), text)
            if value is None and isinstance(known[name].default, str):
                value = text  # remat has a policy of that name
            given[name] = int(text) if re.fullmatch(r"\d+", text) else value
        # refuses values
        plan = Plan(**{name: value for name, value in given.items() if name not in AXES})
        if "\n" not in plan.schedule:
            schedules.make(plan.schedule, 1, 1)  # refuses a name that is none
        if plan.unroll > (layers := preset(self.model).num_layers):
            raise ValueError(
                f"unroll={plan.unroll} of a model of {layers} layers; use 0, which is all of them"
            )
        return given


def broken_claims(text: str, row: dict[str, Any]) -> list[str]:
    """Return which claims about a plan, "fits, mfu > 0.4", do not hold of a row of the document, with what
    does. Raises ValueError for a key that a row has not, so that no claim holds by a misprint."""
    numbers = {name: x for name, x in row.items() if isinstance(x, int | float)}
    for key in ("memory_bytes", "terms"):
        numbers |= {f"{key}.{name}": x for name, x in row[key].items()}
    numbers |= {"seconds": row["step_s"], "memory": row["memory_bytes"]["total"]}
    broken = list[str]()
    for claim in filter(None, map(str.strip, text.split(","))):
        match = _CLAIM.fullmatch(claim)
        name, sign, limit, unit = match.groups("") if match else ("",) * 4
        kind = next((k for k, words in _KINDS.items() if re.match(words, name)), "")
        if name not in numbers or unit not in _UNITS[kind] or bool(sign) == (name == "fits"):
            raise ValueError(
                f"--assert '{claim}' is not read; write fits, or a number and its limit, as memory < 60 GiB;"
                f" numbers are {', '.join(numbers)}"
            )
        if not (
            _SIGNS[sign](numbers[name], float(limit) * _UNITS[kind][unit]) if sign else row["fits"]
        ):
            broken.append(f"{claim}: it is {numbers[name]:,.6g}" if sign else claim)
    return broken


def notes(answer: Any) -> list[str]:
    """Return the lines about fields given by --fix that change nothing in the first plan, on why it does not
    run here, where another of its model does, and on the exchange of tokens, where other software's is
    several times as fast."""
    q, best = answer.question, answer.plans[0]
    first = best.plan
    on_links = best.time.terms.get(EXPERT_LINKS, 0.0) / best.time.step_s
    own = {name: value for name, value in q.fixed.items() if name not in AXES}
    plan = q.resolved(replace(first, **own), None)
    lines = [line for line in notes_of(plan, own) if line.partition("=")[0] in own]
    why = why_not_run(q.resolved(first, None)) if q.config.runs else ""
    lines += [f"the first plan is priced, and does not run here: {why}"] * bool(why)
    lines += [
        "seconds are of steps that sum gradients over dp; with local steps one in"
        f" {q.local_steps} sums what weights moved, so they are less"
    ] * (q.local_steps > 0)
    if on_links > _OWN_EXCHANGE:
        lines.append(
            f"{on_links:.0%} of the step are tokens on their way to experts: here a copy for each expert, and"
            " nothing computes meanwhile; software that sends a token once to a node and computes beside it"
            " may be several times as fast (docs/plan.md)"
        )
    return lines


def named_axes(text: str) -> dict[str, int]:
    """Return the sizes of the axes that a mesh's text names; of numbers, all that they stand for."""
    tokens = re.findall(r"[^\s,!]+", text)
    if any(re.fullmatch(r"(\w+[:=])?-1", token) for token in tokens):
        raise ValueError(
            f"--mesh '{text}' leaves an axis open by -1, as `plan` does with all axes that it does not"
            " name: name the others alone, as 'tp=8 pp=4'"
        )
    shape = parse_mesh(text)
    named = [re.split("[:=]", token.replace("mp", "tp"))[0] for token in tokens]
    axes = named if named[0] in AXES else POSITIONAL[len(tokens)]
    return {axis: shape.sizes[axis] for axis in axes}


def _count(text: str, name: str, base: int) -> float:
    """Read a count such as 4M or 15T."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", text.strip().upper())
    if not match or not float(match[1]):
        raise ValueError(f"--{name} '{text}' is no count; write it as 4000000, 4M or 15T")
    return float(match[1]) * base ** {"": 0, "K": 1, "M": 2, "B": 3, "G": 3, "T": 4}[match[2]]


def tables_of(document: dict) -> Iterator[Any]:
    """Yield the answer as tables, then the command lines of the first plan."""
    error, best = document["time_error"], document["plans"][0]
    few = lambda value: rounded(value, error)
    title = (
        f"{document['model']} on {document['devices']:,} {document['chip']},"
        f" {document['tokens_per_step']:,} tokens; {banded('s and MFU', error)}, less between rows"
    )
    caption = (
        "{device}, {device_gib:.4g} GiB; {node_link:g} GB/s{each} in nodes of {node_size},"
        " {network:g} beyond; a step reaches {links_reached:.0%} and {network_reached:.0%} of them"
    ).format(**document | document["machine"])

    def plan_row(row: dict) -> tuple[str, ...]:
        why = "; ".join(filter(None, (row["near"], row["why"], row["change"])))
        gib = f"{row['memory_bytes']['total'] / 2**30:.1f}"
        return (
            row["mesh"],
            f"{few(row['step_s']):g}",
            f"{few(row['mfu']):.0%}",
            gib,
            row["verdict"],
            why,
        )

    columns = ("mesh", "s", "MFU", "GiB", "", "why")
    numbers = ("s", "MFU", "GiB")
    plans = map(plan_row, document["plans"])
    yield rich_table(title, columns, numbers, plans, caption=caption)
    step = banded(f"{few(best['step_s']):g} s", error)
    title = f"{best['attention_kernel']} attention, a step {step}"
    terms = sorted(best["terms"].items(), key=lambda item: -item[1])
    seconds = ((name, f"{few(s):g}") for name, s in terms)
    yield rich_table(title, ("of the first", "s"), ("s",), seconds)
    if measured := document.get("measured"):
        kinds = "measured", "predicted", "calibrated"
        rows = (
            (x["mesh"], *(f"{x[f'{kind}_s']:.3g}" for kind in kinds)) for x in measured["steps"]
        )
        yield rich_table("seconds of measured steps", ("mesh", *kinds), kinds, rows)
    parts = memory.named(best["memory_bytes"]).items()
    sizes = ((name, f"{size / 2**30:.2f}") for name, size in parts)
    yield rich_table(None, ("of the first", "GiB a device"), ("GiB a device",), sizes)
    if rejected := [(row["mesh"], row["why"], row["change"]) for row in document["rejected"]]:
        yield rich_table(None, ("cannot be", "why", "one change"), rows=rejected)
    changes = document["sensitivity"]
    rates = ((x["what"], f"{few(x['tokens_per_s']):,.0f}", f"x {x['ratio']:.2f}") for x in changes)
    yield rich_table(None, ("if there were", "tokens/s", ""), ("tokens/s",), rates)
    if budget := document.get("budget"):
        names = {"chip_hours": "chip hours", "energy_mwh": f"MWh ({planner.PUE:g} × the chips')"}
        sums = ((names.get(name, name), few(value)) for name, value in budget.items())
        rows = ((name, f"{value:,.0f}" if value >= 10 else f"{value:g}") for name, value in sums)
        title = f"for {budget['tokens']:,.0f} tokens"
        yield rich_table(None, (title, ""), ("",), list(rows)[1:])
    yield from filter(None, map(best.get, ("train", "compile", "launch")))


def tables_serve(document: dict) -> Iterator[Any]:
    """Yield the meshes that serve as a table, from the fastest for a user to the one with most tokens."""
    title = (
        f"{document['model']} in {document['bits']} bits on {document['devices']:,} {document['chip']},"
        f" {document['prompt']:,} tokens in and {document['answer']:,} out"
    )
    columns = service.SERVING
    yield rich_table(title, columns, columns[1:], map(service.cells, document["plans"]))
    yield service.explained(document)


def tables_versus(document: dict) -> Iterator[Any]:
    """Yield two plans and the terms of their difference as a table, then which is better and why."""
    one, other = document["plans"]
    row = lambda name, a, b, more: (
        name,
        f"{1000 * a:,.1f}",
        f"{1000 * b:,.1f}",
        f"{1000 * more:+,.1f}",
    )
    terms = (
        row(name, one["terms"].get(name, 0.0), other["terms"].get(name, 0.0), more)
        for name, more in document["terms"].items()
    )
    last = row("a step", one["step_s"], other["step_s"], document["difference_s"])
    numbers = one["mesh"], other["mesh"], "difference"
    yield rich_table(None, ("milliseconds", *numbers), numbers, [*terms, last])
    gib = " and ".join(f"{x['memory_bytes']['total'] / 2**30:.1f}" for x in (one, other))
    yield f"they hold {gib} GiB a device: {one['verdict']}, {other['verdict']}"
    yield document["says"]


def hold_against(path: str, chip: str | None, as_json: bool) -> dict:
    """Print predicted, measured and error of each run, and each sweep's rank correlation. ``chip``: a file
    whose measured rates replace those of its base chip."""
    from llmpar.planner.measured import against

    own = {}
    if chip is not None:
        row = hardware.chip(chip)
        if row.reached is None:
            raise ValueError(
                f"--against takes each run's own chip; --chip '{chip}' has no measured rates"
            )
        own = {row.family: row.reached}
    document = against(path, own)
    if own and not any(row["chip"] in own for row in document["rows"]):
        raise ValueError(f"'{path}' has no run on {row.family}, of which '{chip}' is")
    return give(document, as_json, tables_against(document))


def tables_against(document: dict) -> Iterator[Any]:
    """Yield the document as tables: single rows and short sweeps, sweeps, the worst rows, the sums."""
    from llmpar.planner.measured import tell_tale

    numbers = "predicted", "measured", "error", "fits"
    long = {group["id"] for group in document["groups"] if group["runs"] > 40}
    short = [row for row in document["rows"] if row["id"].rpartition("/")[0] not in long]
    yield rich_table(None, ("run, chip, mesh", *numbers), numbers, map(cells_against, short))

    def sweep_row(group: dict) -> tuple[str, ...]:
        choice = group["choice_over_best"]
        over_best = "" if choice is None else f"{choice:.3f}"
        error = f"{group['step_mean_abs_error']:.1%}"
        return group["id"], str(group["runs"]), f"{group['spearman']:.3f}", over_best, error

    numbers = "runs", "Spearman", "choice over best", "mean abs. error"
    yield rich_table(None, ("sweep", *numbers), numbers, map(sweep_row, document["groups"]))
    timed = [row for row in document["rows"] if "step_s" in row["error"]]
    worst = sorted(timed, key=lambda row: -abs(row["error"]["step_s"]))[:12]
    error = lambda row: percent(row["error"]["step_s"])
    rows = ((x["id"], error(x), tell_tale(x), beside_flops(x["terms"])) for x in worst)
    names = "worst runs", "error", "the term that could be off", "predicted, and no useful FLOPs"
    yield rich_table(None, names, ("error",), rows)
    text = lambda value: f"{value:.1%}" if isinstance(value, float) else str(value)
    sums = [(key.replace("_", " "), text(value)) for key, value in document["summary"].items()]
    left_out = [(f"left out: {run['id']}", run["why"]) for run in document["left_out"]]
    yield rich_table(None, ("all runs", ""), rows=sums + left_out)


def percent(error: float | None) -> str:
    """Write an error with its sign."""
    return "" if error is None else f"{100 * error:+.1f} %"


def cells_against(row: dict) -> list[str]:
    """Return a row of the table: seconds and bytes below one another."""
    predicted, error, units = row["predicted"], row["error"], {"step_s": "s", "memory_gb": "GB"}
    cells = [f"{row['id']}\n{row['chip']}, {row['mesh']}"]
    for numbers in (predicted, row["measured"]):
        each = (
            f"{numbers[key]:,.4g} {unit}" if key in numbers else "" for key, unit in units.items()
        )
        cells.append("\n".join(each))
    fits = ("yes" if predicted["fits"] else "no") + " (wrong)" * error.get("fits", False)
    return [*cells, "\n".join(percent(error.get(key)) for key in units), fits]
