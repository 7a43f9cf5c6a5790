"""Several processes give what one gives, find one another on every engine, and end together."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from shared import CASES, HERE, program_text
from small_cluster import until

from llmpar.cli.rl import Rl
from llmpar.launch import joined, local
from llmpar.training.checkpoint import Checkpoints

PLANS, MOVES = CASES["plans_of_processes"], CASES["moves_of_processes"]
ENVIRON = os.environ | {"PYTHONPATH": str(HERE.parent)}
RANKS = HERE / "fixtures" / "programs" / "ranks.py"


def ranks(num: int, devices: int, job: str, **variables: str) -> local.Processes:
    """Processes that do one of the jobs of ranks.py."""
    base = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])} | variables
    return local.Processes([sys.executable, str(RANKS), job], num, devices, base)


def answer(num: int, devices: int, job: str, timeout_s: float = 500, **variables: str):
    """What process 0 found."""
    with ranks(num, devices, job, **variables) as processes:
        ended = processes.wait(timeout_s)
    assert ended.status == 0, (ended.statuses, *(words[-3000:] for words in ended.words))
    return json.loads(ended.output.splitlines()[-1])


@pytest.fixture(scope="module")
def two():
    """What two processes of four devices found in several small jobs: starting them is what takes long."""
    return answer(2, 4, "plans:2x4+moved+rows+listens+smaller+stopped+doctor")


def moves_are_right(moved: dict, num: int) -> None:
    """Bits, and each process' bytes, which in all are what receivers lack; refusals."""
    for name in MOVES:
        same, sent, bound = moved[name]
        assert same == [1] * num and all(planned == left for planned, left in sent), name
        assert sum(left for _, left in sent) == bound > 0
    (_, sent, _) = moved["to another process"]
    assert sent[-1] == [0, 0]
    why = f"between devices of processes [0], and of {num} processes these have none .*: {[*range(1, num)]}"
    assert re.search(re.escape(why).replace(r"\.\*", ".*"), moved["idle"])
    assert "differs between processes, as the checksums of their plans say" in moved["another plan"]


@pytest.mark.processes
def test_processes_give_the_answers_of_one_device_and_values_go_between_meshes_bit_for_bit(two):
    """Each kind of collective between processes; no byte is sent twice."""
    assert two["plans"] == dict.fromkeys(PLANS["2x4"], "same")
    moves_are_right(two["moved"], 2)


@pytest.mark.nightly  # by simulated devices: test_plans.py, test_weights.py
@pytest.mark.processes
def test_so_do_four_processes_and_one_writes_a_model_that_all_read(tmp_path):
    found = answer(4, 2, "plans:4x2+moved+handed", HANDED=str(tmp_path))
    assert found["plans"] == dict.fromkeys(PLANS["4x2"], "same")
    moves_are_right(found["moved"], 4)
    for same, files in found["handed on"].values():
        assert same == [1, 1, 1, 1] and files > 3


def learning(devices: int, *words: str) -> local.Processes:
    """`llmpar rl` in two processes."""
    return local.Processes([sys.executable, "-m", "llmpar", "rl", *words], 2, devices, ENVIRON)


@pytest.mark.nightly  # by the same program in one process: test_two_meshes.py
@pytest.mark.processes
@pytest.mark.parametrize("devices, trainer, sampler", [(4, "fsdp=2 tp=2", "tp=4"), (3, "fsdp=4", "tp=2")])
def test_rewards_with_a_sampler_in_another_process_are_those_of_one(devices, trainer, sampler):
    """Each mesh on a process of its own; the trainer on both, one of which has the sampler too."""
    meshes = "--trainer", trainer, "--sampler", sampler
    with learning(devices, *meshes, "--steps", "12", "--json") as processes:
        ended = processes.wait(400)
    assert ended.status == 0, (ended.statuses, *(said[-2000:] for said in ended.words))
    found, rows = json.loads(ended.output), [*Rl(trainer, sampler, 12).learn()]
    assert found["rewards"] == [row["reward"] for row in rows]
    assert found["sent_bytes"] == found["bound_bytes"] == rows[-1]["bound_bytes"] > 0
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(rows[-1][name], rel=1e-4)


@pytest.mark.nightly  # a trainer's process that dies: below
@pytest.mark.processes
def test_a_sampler_that_is_killed_ends_the_trainer_in_a_sentence():
    with learning(4, "--steps", "9999") as processes:
        until(lambda: "step 20: reward" in processes.output_of(0), "20 steps", 400)
        os.kill(processes.running[1].pid, signal.SIGKILL)
        ended = processes.wait(300)
    assert ended.statuses == (joined.FAILED, -signal.SIGKILL)
    assert "llmpar: another process ended, or could not be reached" in ended.words[0]


@pytest.mark.processes
def test_each_process_makes_its_own_rows_once_and_one_sees_what_the_devices_of_all_hold(two):
    assert two["same rows"]
    assert two["made"] == [list(range(8 * i, 8 * i + 8)) for i in range(2)]
    seen = two["shardings"]
    assert seen["hosts"] == [0, 0, 0, 0, 1, 1, 1, 1] and seen["sizes"]["dp"] == 4
    for row in seen["tensors"]:
        assert row["holds"] == [0, 0, 1, 1, 2, 2, 3, 3], "one block for two devices, which tp joins"
        assert row["shards"] == [[[4 * i, 4 * i + 4], [0, 32]] for i in range(4)]
    assert {"tokens", "targets"} < {row["name"] for row in seen["tensors"]}


@pytest.mark.processes
def test_processes_listen_on_loopback_stop_together_and_say_who_they_are(two):
    """Neither the coordinator nor Gloo listens beyond loopback; one that is asked to stop stops all."""
    assert all(two["sockets"]) and two["beyond loopback"] == [0, 0]
    assert len(set(two["steps"])) == 1 and two["steps"][0] < 400
    assert two["refusal"].startswith("mesh 'dp=2' takes 2 of 8 devices, and of 2 processes these hold none")
    words = "process 0 of 2 (JAX_* variables), 2 on this host, coordinator 127.0.0.1:"
    assert two["doctor"].startswith(words) and "8 simulated CPU devices of 2 processes" in two["doctor"]


def training(num: int, devices: int, folder: Path, *words: str) -> local.Processes:
    """`llmpar train` in several processes."""
    command = [sys.executable, "-m", "llmpar", "train", "--mesh", "fsdp=2 tp=2", "--checkpoints", str(folder)]
    command += ["--batch-size", "4", "--seq-len", "32", "--limit-bytes", "65536", "--every", "2", "--json"]
    return local.Processes([*command, *words], num, devices, ENVIRON)


def trained(num: int, devices: int, folder: Path, *words: str) -> dict:
    """Its document."""
    with training(num, devices, folder, *words) as processes:
        ended = processes.wait(400)
    assert ended.status == 0, (ended.statuses, *(said[-2000:] for said in ended.words))
    assert ended.output.count("\n") == 1, "one document on stdout, and nothing else"
    return json.loads(ended.output)


def kept(folder: Path) -> dict:
    """Sums over the bits of the newest checkpoint's leaves."""
    return Checkpoints(str(folder)).about()["checksums"]


@pytest.mark.processes
def test_a_killed_process_costs_nothing_and_another_number_of_processes_goes_on(tmp_path):
    """The same command gives the same bits; one process, whose sums have another order, 1e-5."""
    shape, folder = (2, 2), tmp_path / "killed"
    whole = trained(*shape, tmp_path / "whole", "--steps", "12")
    with training(*shape, folder, "--steps", "12") as processes:
        until((folder / "2").is_dir, "a checkpoint of step 2", 400)
        os.kill(processes.running[-1].pid, signal.SIGKILL)
        assert all(processes.wait(400).statuses)
    shutil.copytree(folder, tmp_path / "alone")
    resumed = trained(*shape, folder, "--steps", "12")
    assert 2 <= resumed["start"] < 12 and kept(folder) == kept(tmp_path / "whole")
    one = trained(1, 4, tmp_path / "alone", "--steps", "12", "--devices", "4")
    assert one["start"] == resumed["start"]
    assert np.allclose(one["losses"], whole["losses"][one["start"] :], rtol=1e-5, atol=0)


def test_the_launcher_names_a_killed_process_0_and_gives_the_signals_back(capfd):
    asked = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in asked]
    mine = [signal.getsignal(number) for number in asked]
    program = "import os; os.environ['JAX_PROCESS_ID'] == '0' and os.kill(os.getpid(), 9)"
    try:
        for more in [], ["--checkpoints=kept"]:
            status = local.run_locally([sys.executable, "-c", program, *more], 2, None)
            assert status == 128 + signal.SIGKILL
        assert [signal.getsignal(number) for number in asked] == mine
    finally:
        for number, handler in zip(asked, before, strict=True):
            signal.signal(number, handler)
    line = "llmpar: process 0 was ended by SIGKILL (status 137)"
    assert capfd.readouterr().err == f"{line}\n{line}; the same command goes on from checkpoints\n"


def test_processes_that_lose_another_end_with_one_sentence_and_without_the_stack_of_jax():
    why = "cannot be reached: its own output says why; the same command goes on from checkpoints"
    line = f"llmpar: ends, because process {{}} is gone or {why}"
    with local.Processes([sys.executable, "-c", program_text("loses")], 3, 1, ENVIRON) as processes:
        lines = lambda: [processes.output_of(i).splitlines() for i in range(3)]
        until(lambda: lines() == [["in"]] * 3, "all are in")
        processes.running[0].kill()
        assert processes.wait(300).first == 0
        until(lambda: lines() == [["in"], *[["in", line.format(0)]] * 2], "both say why", said=lines)
    with open(HERE / "fixtures" / "native_words.txt") as words:
        shown = subprocess.run(["sed", "-nuE", joined._SED], stdin=words, capture_output=True, text=True)
    assert shown.stdout.splitlines() == ["the words of another library", line.format("2, 1")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_the_launcher_hands_every_request_to_stop_on_and_ends_with_it(number, tmp_path):
    """Its processes are asked by SIGTERM, or by Ctrl-C's signal, and leave with what that says."""
    handed = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    program = [sys.executable, "-c", program_text("leaves"), f"{handed:d}", str(tmp_path)]

    def ask():
        until(lambda: len(list(tmp_path.iterdir())) == 2, "both processes run")
        os.kill(os.getpid(), number)

    usual = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored
    try:
        threading.Thread(target=ask, daemon=True).start()
        assert local.run_locally(program, 2, None) == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, usual)


def test_a_killed_launcher_leaves_no_process_behind():
    environ = {joined.LAUNCHER: str(os.getppid())}
    joined.initialize(environ)
    assert not environ, "initialize() does what is seen below, and what we start is not the launcher's"
    gone_after_a_kill(program_text("launches"), 2)


def gone_after_a_kill(program: str, num: int) -> None:
    """Kill a program that prints the numbers of processes; they must end."""

    def alive(pid):
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().split()[2] != "Z"

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=ENVIRON) as one:
        pids = [int(pid) for pid in one.stdout.readline().split()]
        assert len(pids) == num and all(map(alive, pids))
        one.kill()
    until(lambda: not any(map(alive, pids)), f"processes {pids} end")


def test_an_exception_in_one_process_ends_all():
    """JAX would wait minutes at a barrier, and the other process for ever."""
    with local.Processes([sys.executable, "-c", program_text("raises")], 2, 1, ENVIRON) as processes:
        ended = processes.wait(300)
    assert all(ended.statuses) and ended.first is not None
    assert "ends, because process 1 failed: KeyError: 'planted'" in ended.words[0]


@pytest.mark.nightly  # test_engines.py counts the signs of life
@pytest.mark.processes
def test_a_stopped_process_gives_no_sign_of_life_and_is_named_by_the_other():
    """JAX would end it later (its own limit is 100 s), in native code, with 40 lines and status 134."""
    with ranks(2, 1, "sleeps", HEARTBEAT_S="12") as processes:
        until(lambda: all("ready" in processes.output_of(i) for i in (0, 1)), "both are ready", 200)
        os.kill(processes.running[1].pid, signal.SIGSTOP)
        ended = processes.wait(300)
    assert (ended.first, *ended.statuses) == (0, 76, -signal.SIGKILL)
    said = ended.words[0]
    assert "llmpar: ends, because process 1 gave no sign of life for" in said and "stack trace" not in said


@pytest.mark.processes
def test_processes_that_do_not_agree_are_refused_in_one_sentence_on_every_process(tmp_path):
    """Otherwise they would hang in a collective of two meshes."""
    words = "--mesh dp=$((2 - JAX_PROCESS_ID))"
    line = f"cd {tmp_path}; exec {sys.executable} -m llmpar train --steps 2 --checkpoints kept {words}"
    with local.Processes(["sh", "-c", line], 2, 1, ENVIRON) as processes:
        ended = processes.wait(300)
    assert ended.statuses == (1, 1), ended.words
    sentence = 'this job do not agree: step.mesh is "dp=2" on process 0 and "dp=1" on process 1; start all'
    assert all(sentence in said for said in ended.words)
    assert not (tmp_path / "kept").exists()


def test_launch_local_runs_a_command_and_gives_its_status(tmp_path):
    """Process 0 speaks; a refusal of all is said once."""
    words = [sys.executable, "-m", "llmpar", "launch", "local", "--processes", "2", "--devices", "2", "--"]
    words += ["train", "--mesh", "dp=4", "--data", str(tmp_path / "none"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=ENVIRON)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("llmpar: ") == done.stderr.count("matches no file") == 1, done.stderr
