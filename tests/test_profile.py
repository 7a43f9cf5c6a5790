"""What a profile measured beside the lines of `look`: fresh, recorded (fixtures/traces), and made."""

import dataclasses
import gzip
import json
import re
from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import PartitionSpec as P
from shared import HERE, TABLES

from llmpar.inspect.look import look
from llmpar.inspect.profile import measure_rows, read_profile
from llmpar.predict import hardware

TEXT = (HERE / "fixtures" / "profiled.txt").read_text()
TRACES = HERE / "fixtures" / "traces"
SENT = 4 * 256 * 4  # bytes of one of two devices in a ring


def profile(folder, devices, line, events):
    """Write a profile: on each device events of (name, hlo_op, start and duration in microseconds)."""
    planes = []
    for device, each in zip(devices, events, strict=True):
        names, body = [], []
        for i, (name, op, start, duration) in enumerate(each, 1):
            stats = f'stats {{ metadata_id: 1 str_value: "{op}" }}' if op else ""
            stats += ' stats { metadata_id: 2 str_value: "jit_step" }'
            span = f"offset_ps: {start}000000 duration_ps: {duration}000000"
            body.append(f"events {{ metadata_id: {i} {span} {stats} }}")
            names.append(f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}')
        keys = [f'stat_metadata {{ key: {i} value {{ id: {i} name: "{key}" }} }}'
                for i, key in enumerate(("hlo_op", "hlo_module"), 1)]  # fmt: skip
        lines = f'lines {{ id: 1 name: "{line}" {" ".join(body)} }}'
        planes.append(f'planes {{ name: "{device}" {lines} {" ".join(names + keys)} }}')
    path = folder / "plugins" / "profile" / "2026_01_01" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return folder


def trace_events(folder, devices, line, events):
    """Write the same profile in JSON, as XProf does: the host stands before each device."""
    rows = [{"ph": "M", "pid": 7, "tid": 0, "name": "process_name", "args": {"name": "h /host:CPU"}}, {}]
    for pid, (device, each) in enumerate(zip(devices, events, strict=True)):
        for tid, key, name in ((None, "process_name", f"h {device}"), (1, "thread_name", line)):
            rows.append({"ph": "M", "pid": pid, "tid": tid, "name": key, "args": {"name": name}})
        for name, op, start, duration in each:
            args = {"long_name": name, "hlo_module": "jit_step", **({"hlo_op": op} if op else {})}
            span = {"ts": start, "dur": duration, "args": args}
            rows.append({"ph": "X", "pid": pid, "tid": 1, "name": name.split(" =")[0].strip("%"), **span})
    (folder / "h.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": rows}).encode()))
    return folder


FORMS = pytest.mark.parametrize("profile", [profile, trace_events])


@FORMS
def test_a_kernel_waits_for_the_last_of_its_group(tmp_path, profile):
    kernel, op = "ncclDevKernel_AllGather_RING_LL", "all-gather-start.1"
    late = [(kernel, op, 0, 30), (kernel, op, 100, 10), ("ncclDevKernel_SendRecv", "", 200, 7)]
    early = [(kernel, op, 20, 10), (kernel, op, 100, 10), ("loop_fusion", "fusion.1", 200, 50)]
    gpus = "/device:GPU:0", "/device:GPU:1"
    found = look(TEXT, "X=2", trace=profile(tmp_path, gpus, "Stream #20(Compute)", (late, early)))
    measured = found.rows[0]["measured"]
    assert measured["executions"] == 2 and measured["predicted_s"] is None
    assert measured["seconds"] == pytest.approx(15e-6)
    assert measured["waiting_s"] == pytest.approx(5e-6)  # 20 of the first in one run of two, mean of devices
    assert measured["bytes_per_s"] == pytest.approx(SENT / 10e-6)
    assert "in no line: 7 µs of a device: ncclDevKernel_SendRecv ×1" in str(found)
    assert "×2 measured  15 µs  waiting 5 µs  410 MB/s" in str(found)


def test_a_known_chip_is_predicted_beside_what_was_measured(tmp_path):
    chip = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", process_index=0)
    grid = np.array([SimpleNamespace(**vars(chip), local_hardware_id=i) for i in (1, 0)])
    mesh = SimpleNamespace(axis_names=("X",), shape={"X": 2}, devices=grid)
    spans = [("ncclDevKernel_AllGather_RING_LL", "all-gather-start.1", 0, 20)]
    folder, rows = profile(tmp_path, ["/device:GPU:0"], "Stream #20", [spans]), look(TEXT, "X=2").rows
    assert measure_rows(rows, TEXT, mesh, folder, str) == []
    it, link = rows[0]["measured"], hardware.chip("h100").reached_link_bytes_per_s
    assert it["link_bytes_per_s"] == link and it["waiting_s"] is None  # the other of the group is not in it
    assert it["predicted_s"] >= SENT / link


@FORMS
def test_a_tpu_waits_where_it_awaits(tmp_path, profile):
    spans = [("%all-gather-start.1 = f32[8]", "", 0, 1), ("%all-gather-done.1 = f32[8]", "", 6, 2)]
    found = look(TEXT, "X=2", trace=profile(tmp_path, ["/device:TPU:0"], "XLA Ops", [spans]))
    measured = found.rows[0]["measured"]
    assert measured["seconds"] == pytest.approx(8e-6) and measured["waiting_s"] == pytest.approx(2e-6)
    assert measured["bytes_per_s"] == pytest.approx(SENT / 8e-6)
    notes = [note for note in found.notes if "profile" in note]
    assert ["times are of h.trace.json.gz" in note for note in notes] == [True] * (profile is trace_events)


def test_what_is_no_profile_of_this_program_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*\.xplane\.pb and no .*; give the folder"):
        look(TEXT, "X=2", trace=tmp_path)
    for text in (b"{}", b"[5]", b'{"traceEvents": [{}', gzip.compress(b"{}")[:-9]):
        (tmp_path / "perfetto_trace.json.gz").write_bytes(text)
        (tmp_path / "trace.json").write_bytes(text)
        for given in (tmp_path, tmp_path / "trace.json"):
            with pytest.raises(ValueError, match="is no whole trace with traceEvents"):
                look(TEXT, "X=2", trace=given)
    folder = profile(tmp_path, ["/device:GPU:0"], "Stream #1", [[("k", "all-gather.7", 0, 1)]])
    with pytest.raises(ValueError, match="is of jit_step, and this is other"):
        look(TEXT.replace("jit_step", "jit_other"), "X=2", trace=folder)
    other = look(TEXT, "X=2", trace=folder)
    assert other.rows[0]["measured"] == {}
    assert "not in the profile: 1 of these lines" in other.notes
    assert any("all-gather.7 ×1" in note for note in other.notes)


def test_a_run_is_measured_line_by_line_and_shown_as_a_page(tmp_path):
    mesh = jax.make_mesh((4, 2), ("X", "Y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inside = lambda x: jax.lax.psum(jax.lax.all_gather(x, "X", tiled=True), "Y")
    step = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("X", "Y"), out_specs=P(), check_vma=False))
    x = jax.device_put(jnp.ones((8, 128)), jax.NamedSharding(mesh, P("X", "Y")))
    step(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            step(x).block_until_ready()
    found = look(step, x, trace=tmp_path)
    times = {row["collective"]: row["measured"]["executions"] for row in found.rows}
    assert times == {"all-gather": 2, "all-reduce": 2}
    for row in found.rows:
        assert 0 <= row["measured"]["waiting_s"] < row["measured"]["seconds"]
    assert not [note for note in found.notes if "profile" in note]
    next(tmp_path.rglob("*.xplane.pb")).unlink()
    again = look(step, x, trace=tmp_path)  # by the JSON that JAX writes beside it, in microseconds
    numbers = lambda look: [x for row in look.rows for x in row["measured"].values() if x is not None]
    assert numbers(found) == pytest.approx(numbers(again), rel=1e-3)
    assert "times are of" in str(again) and "for there is no *.xplane.pb" in str(again)
    page = found.html(tmp_path / "step.html") and (tmp_path / "step.html").read_text()
    assert not re.search(r'\b(?:src|href)="|url\((?!#)|@import', page), "a page asks for nothing"
    assert page.count("<details") == len(found.rows) == page.count("measured")
    fewer = dataclasses.replace(found, rows=found.rows[:1])
    assert (fewer - found)._repr_html_().count("<mark>") == 1
    assert "both send the same" in (found - found)._repr_html_()


def recorded(folder, name):
    """Write a recorded profile as JAX wrote it."""
    text = (TRACES / f"{name}.xplane.txt").read_text()
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return folder


def program(name, devices, ops):
    """Write a program of operations as a TPU's profile names them, with a parameter for what each takes."""
    takes = [re.search(r"\((\S+) (%[\w.]+)\)", op).groups() for op in ops]
    given = [f"{value} = {type_} parameter({i})" for i, (type_, value) in enumerate(takes)]
    lines = [f"HloModule jit_{name}, num_partitions={devices}", "ENTRY %main () -> f32[] {", *given, *ops]
    return "\n".join([*lines, "ROOT %zero = f32[] constant(0)", "}"])


def test_what_two_tpus_recorded_stands_beside_the_lines_that_the_trace_names():
    file, ops, took = TRACES / "tpu_two.trace.json", {}, defaultdict(list)
    for event in json.loads(file.read_text())["traceEvents"]:
        if event["name"].startswith("all-reduce"):
            source, line = event["args"]["source"].split(":")
            took[f"{source}:{line}"].append(event["dur"] * 1e-6)
            where = f'metadata={{source_file="{source}" source_line={line}}}'
            ops[event["name"]] = f"{event['args']['long_name']}, {where}"
    found = look(program("step_fun", 2, ops.values()), "X=2", trace=file)
    measured = {row["source"]: row["measured"] for row in found.rows}
    assert measured.keys() == took.keys()
    for line, it in measured.items():
        assert it["executions"] == len(took[line]) / 2
        assert it["seconds"] == pytest.approx(np.mean(took[line]))
        assert 380e9 < it["bytes_per_s"] < 420e9
    late, last = took["ops/jaten.py:583"]  # the first: one device came 40 µs before
    assert measured["ops/jaten.py:583"]["waiting_s"] == pytest.approx((late - last) / 2)
    assert measured["attention/layer.py:399"]["waiting_s"] < 1e-6
    assert not [note for note in found.notes if "in no line" in note], "what jit_sample gathers is not of it"
    other = look(program("sample", 2, ops.values()), "X=2", trace=file)
    assert "no line: 3.98 µs of a device: all-gather.3 ×1 2.18 µs, all-gather.2 ×1 1.81 µs" in str(other)
    with pytest.raises(ValueError, match="is of jit_sample, jit_step_fun, and this is other"):
        look(program("other", 2, ops.values()), "X=2", trace=file)


def test_a_recorded_all_reduce_of_a_host_waits_for_another_host_that_is_not_in_the_profile(tmp_path):
    folder = recorded(tmp_path, "tpu_v6e")
    (op,) = {*re.findall(r'"(%all-reduce = .*?)"', (TRACES / "tpu_v6e.xplane.txt").read_text())}
    found = look(program("_psum", 8, [op]), "Y=2 X=4", trace=folder)
    measured = found.rows[0]["measured"]
    assert measured["executions"] == 3 and measured["waiting_s"] is None
    assert measured["seconds"] == pytest.approx(121.6982e-3, rel=1e-5)  # picoseconds in the file
    assert measured["bytes_per_s"] == pytest.approx(5 * 2**30 / 121.6982e-3, rel=1e-5)


def test_a_gpus_operation_is_all_of_its_kernels_and_programs_of_one_name_are_apart(tmp_path):
    (name, ops), *none = read_profile([recorded(tmp_path, "gpu_mi350") / "host.xplane.pb"]).items()
    runs = {op: each["host.xplane.pb ", 0] for op, each in ops.items()}
    assert name == "jit_loss_fn(17)" and not none
    assert {len(each) for each in runs.values()} == {2}, "of attention's backward an execution is 5 kernels"
    took = {op: sum(seconds for _, seconds in each) for op, each in runs.items()}
    assert took["te_fused_attn_backward_ffi.12"] == 937_848
    every = re.findall(r"duration_ps:(\d+)000", (TRACES / "gpu_mi350.xplane.txt").read_text())
    assert sum(took.values()) == sum(map(int, every)) and len(every) == 60
    folder = recorded(tmp_path, "gpu_mi300")
    programs = read_profile([folder / "host.xplane.pb"])
    assert {name: len(each["host.xplane.pb ", 0]) for name, ops in programs.items()
            for op, each in ops.items() if op == "custom-call.1"} == {
        "jit_matmul(19)": 12, "jit_matmul(32)": 3, "jit_matmul(73)": 3, "jit_matmul(98)": 3}  # fmt: skip
    (note,) = [n for n in look(program("matmul", 2, []), "X=2", trace=folder).notes if "programs" in n]
    assert note.startswith("5 programs named matmul are in the profile: times are of 5 of them")


def test_kernels_of_a_graph_that_hides_their_operation_are_in_no_line(tmp_path):
    """The program is as the compiler for an H100 wrote it, its trace is made: no public one has NCCL."""
    text, devices = (TRACES / "h100.hlo").read_text(), [f"/device:GPU:{i}" for i in range(4)]
    gather, scatter = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    spans = [("MemcpyD2D", "all-gather-start", 0, 5), (gather, "all-gather-start", 5, 30)]
    spans += [(gather, "command_buffer_3", 90, 20), (scatter, "reduce-scatter-start", 200, 10)]
    found = look(text, "X=4", trace=profile(tmp_path, devices, "Stream #20(Compute)", [spans] * 4))
    seconds = {row["source"]: row["measured"].get("seconds") for row in found.rows}
    assert seconds == {"small.py:15": pytest.approx(35e-6), "small.py:16": None, "": pytest.approx(10e-6)}
    assert [row["measured"].get("executions") for row in found.rows] == [1, None, 1]
    assert "not in the profile: 1 of these lines" in found.notes
    assert f"no line: 20 µs of a device: {gather} in command_buffer_3 ×1" in str(found)
    assert "profile once without them: XLA_FLAGS=--xla_gpu_enable_command_buffer=" in str(found)


@pytest.mark.parametrize("name, mesh, spans, times", TABLES["tpu_gathers"])
def test_a_tpu_gathers_in_fusions_or_on_its_sparse_cores(tmp_path, name, mesh, spans, times):
    """Programs as the TPU compiler wrote them; the traces are made of their operations' names."""
    events = [(f"%{op.rstrip('.')} = bf16[8]", "", *span) for op, span in spans.items()]
    devices = [f"/device:TPU:{i}" for i in range(int(mesh[2:]))]
    folder = profile(tmp_path, devices, "XLA Ops", [events] * len(devices))
    found = look((TRACES / f"{name}.hlo").read_text(), mesh, trace=folder)
    measured = {row["source"] or row["collective"]: row["measured"] for row in found.rows if row["measured"]}
    assert measured.keys() == times.keys()
    for line, it in measured.items():
        assert (it["seconds"] * 1e6, it["waiting_s"] * 1e6) == pytest.approx(times[line])
    assert "no line:" not in str(found)
    assert not [note for note in found.notes if "Async" in note], "what is counted is not called uncounted"
