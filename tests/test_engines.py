"""Which engine started a process, what its cluster hides, and the job files for it. No process is started."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import engines_table
import pytest
import yaml
from shared import CASES, TABLES

from llmpar.cli.weights import from_folder
from llmpar.launch import joined
from llmpar.launch.engines import Place, detect
from llmpar.launch.jobs import ENGINES, Job, Site, job_file
from llmpar.plan.config_json import QUANTIZED
from llmpar.plan.presets import preset, to_hugging_face


def env(words: str) -> dict[str, str]:
    """NAME=value NAME=value; a name alone is an engine's, and stands for all that it sets."""
    found: dict[str, str] = {}
    for name, given, value in (word.partition("=") for word in words.split()):
        found |= {name: value} if given else env(TABLES["engine_sets"][name])
    return found


def place(number=1, coordinator="127.0.0.1:1", num=2, **more):
    return Place("SLURM", num, number, coordinator, **more)


def refusal(place, wait_s=0.3):
    with pytest.raises(ValueError) as found:
        joined.check_coordinator(place, wait_s)
    return str(found.value)


def test_an_address_is_checked_before_jax_ends_the_process(monkeypatch):
    """Debian's /etc/hosts gives a host's own name 127.0.1.1."""
    assert "no host:port" in refusal(place(coordinator="n1"))
    assert "'no.such.invalid' (SLURM) has no address" in refusal(place(coordinator="no.such.invalid:9"))
    free = f"127.0.0.1:{joined.free_port()}"
    words = refusal(place(coordinator=free, num_local=2))
    assert f"process 1 of 2 (SLURM) could not connect to {free} for 0.3 s (Connection refused)" in words
    assert joined.check_coordinator(place(0, free, num_local=2), 1) == ("127.0.0.1", free)
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = refusal(place(0, f"127.0.0.1:{other.getsockname()[1]}", num_local=2))
    assert "is taken by another program; set JAX_COORDINATOR_ADDRESS=127.0.0.1:" in words
    monkeypatch.setattr(joined, "resolved", lambda host: "127.0.1.1")
    words = refusal(place(coordinator="n1:9", num_local=1))
    assert "'n1' (SLURM) resolves to 127.0.1.1" in words and "each host would reach itself" in words
    monkeypatch.setattr(joined, "resolved", lambda host: "192.0.2.200")
    words = refusal(Place("Open MPI", 2, 0, "login:99", 0, 1))
    assert words.startswith("Open MPI names 'login', where mpirun runs, but process 0 is on ")


@pytest.mark.parametrize("more", [{}, {"JAX_COORDINATOR_ADDRESS": "n1:99"}], ids=["engine", "user"])
def test_processes_of_one_host_meet_on_loopback_whatever_its_name_resolves_to(more):
    """torchrun that has lost its other hosts names the one that is left. All must take the same address."""
    for number in ("0", "1"):
        left = env("TORCHRUN") | {"WORLD_SIZE": "2", "RANK": number, "LOCAL_RANK": number} | more
        assert detect(left).coordinator == ("127.0.0.1:99" if more else "127.0.0.1:29501")
        assert detect(left | {"WORLD_SIZE": "4"}).coordinator == ("n1:99" if more else "n1:29501")


def test_a_late_coordinator_is_waited_for_and_told(capfd, monkeypatch):
    free, told, tell = joined.free_port(), threading.Event(), joined.signals.write_sentence
    monkeypatch.setattr(joined.signals, "write_sentence", lambda words: (tell(words), told.set()))

    def listen():
        assert told.wait(60)
        with socket.create_server(("127.0.0.1", free)) as server:
            server.accept()[0].close()
        joined._gather(place(0, f"127.0.0.1:{free}"), f"127.0.0.1:{free}", 60)

    thread = threading.Thread(target=listen)
    thread.start()
    assert joined.check_coordinator(place(1, f"127.0.0.1:{free}", num_local=2), 60) == ("127.0.0.1", None)
    thread.join()
    (words,) = capfd.readouterr().err.splitlines()
    assert f"waits for process 0 at 127.0.0.1:{free} (SLURM): Connection refused" in words


def arrivals(*pairs, wait_s=60.0, declines=()):
    """What processes hear that start as (number, of how many); those of ``declines`` end before they come."""
    free = joined.free_port()

    def arrive(pair):
        number, num = pair
        one = place(number, f"127.0.0.1:{free}", num, num_local=num)
        try:
            if number in declines:
                environ = {"JAX_NUM_PROCESSES": str(num), "JAX_PROCESS_ID": str(number)}
                environ["JAX_COORDINATOR_ADDRESS"] = one.coordinator
                return joined.decline(environ, "no such flag")
            _, bind = joined.check_coordinator(one, wait_s)
            if number == 0:
                joined._gather(one, bind, wait_s)
            return "all have come"
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(pairs)) as pool:
        return list(pool.map(arrive, pairs))


@pytest.mark.parametrize("pairs, sentence", TABLES["who_comes"])
def test_who_comes_twice_or_as_one_of_another_number_is_refused_in_all(monkeypatch, pairs, sentence):
    monkeypatch.setattr(joined, "GREETING_S", 2.0)
    assert all(sentence.format(me=joined._location()) in words for words in arrivals(*pairs))


@pytest.mark.parametrize("declines", [(1,), (0,), (0, 1, 2)])
def test_a_process_that_ends_before_it_has_come_is_not_waited_for(monkeypatch, declines):
    """A flag that one alone has. All are told its sentence; where all refuse the same, nobody waits."""
    monkeypatch.setattr(joined, "GREETING_S", 2.0)
    words = arrivals((0, 3), (1, 3), (2, 3), declines=declines)
    told = [words[i] for i in range(3) if i not in declines or i == 0]
    says = r"process \d, on .*, ended before it came: no such flag"
    assert told and all(re.fullmatch(says, sentence) for sentence in told)


def test_who_is_no_process_0_is_not_waited_for(monkeypatch):
    """A program that has the port and says nothing, or what a web server says."""
    monkeypatch.setattr(joined, "GREETING_S", 0.2)
    for words in (b"", b"HTTP/1.1 400 Bad Request\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as other:

            def answer():
                with other.accept()[0] as line:
                    line.sendall(words)  # noqa: B023
                    while line.recv(999):
                        pass

            stranger = threading.Thread(target=answer)
            stranger.start()
            port = other.getsockname()[1]
            told = refusal(place(coordinator=f"127.0.0.1:{port}", num_local=2), wait_s=20)
            stranger.join()
        assert told.startswith(f"at 127.0.0.1:{port} listens no process 0 that waits for process 1")


def test_a_process_that_was_started_again_may_come_again(monkeypatch):
    """The last one that comes has come before."""
    free, has_come, missing = joined.free_port(), threading.Event(), joined._missing
    one, two, three = (place(i, f"127.0.0.1:{free}", 3) for i in range(3))

    def seen(here, lines):
        if any(number == 2 for number, _ in lines):
            has_come.set()
        return missing(here, lines)

    monkeypatch.setattr(joined, "_missing", seen)
    gathering = threading.Thread(target=joined._gather, args=(one, one.coordinator, 60))
    gathering.start()
    while gathering.is_alive():  # until it listens
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", free)) as line:
            line.sendall(b'[1, 3, "as before"]\n')
            line.recv(len(joined.GREETING))
            break
    late = [threading.Thread(target=joined.check_coordinator, args=(each, 60)) for each in (three, two)]
    late[0].start()
    assert has_come.wait(60)
    late[1].start()
    for thread in (gathering, *late):
        thread.join(60)
        assert not thread.is_alive()


def test_a_proxy_is_kept_out_of_the_way(capfd):
    environ = {"https_proxy": "http://proxy:3128", "no_proxy": "a.b"}
    joined.without_proxy(place(0, "n1:9"), environ)
    assert environ["no_proxy"] == "a.b,n1" and environ["no_grpc_proxy"] == "n1"
    assert "https_proxy would stand between the processes" in capfd.readouterr().err


class Store(dict):
    """What processes keep at the coordinator, as `joined` asks it."""

    key_value_try_get = dict.__getitem__

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self and not allow_overwrite:
            raise ValueError("it exists")
        self[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.items() if key.startswith(folder)]


def test_the_end_of_another_process_is_no_fault_of_ours(monkeypatch):
    from llmpar import cli

    with monkeypatch.context() as broken:
        broken.setitem(sys.modules, "jax", None)  # an import of it would fail once more
        assert not joined.is_joined()
    error = RuntimeError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer")
    assert cli.explain_error(error).startswith("this is a fault of llmpar")
    monkeypatch.setattr(joined, "is_joined", lambda: True)
    assert cli.explain_error(error).startswith("another process ended, or could not be reached: its own")
    assert cli._status(error) == 75


@pytest.mark.parametrize("told, sentence, status", CASES["statuses"])
def test_a_job_is_started_again_if_the_first_failure_may_be_mended(monkeypatch, told, sentence, status):
    """Job files read the exit status, and an engine may give them that of any process."""
    from llmpar import cli

    client = Store({joined._KEY: told} if told else {})
    monkeypatch.setattr(joined, "is_joined", lambda: True)
    monkeypatch.setattr(joined, "_client", lambda: client)
    error = ValueError(sentence)
    assert cli._fail(cli.explain_error(error), cli._status(error), error) == status
    assert client[joined._KEY] == (told or f"{status} process 0 failed: {sentence}")


NEVER = types.SimpleNamespace(wait=lambda seconds: False)
"""An event that does not come."""


def ended(monkeypatch, act):
    """The status and the sentence with which a process ends itself."""

    def end(words, status):
        raise SystemExit((status, words))

    monkeypatch.setattr(joined.signals, "end", end)
    with pytest.raises(SystemExit) as found:
        act()
    return found.value.code


def test_who_gives_no_sign_of_life_for_so_many_rounds_is_named_unless_it_compiles(monkeypatch):
    signs = Store({f"{joined._BEATS}/1": "7", f"{joined._BEATS}/2": joined._QUIET})
    monkeypatch.setattr(joined, "_state", lambda: types.SimpleNamespace(process_id=0, client=signs))
    beats, silent = {}, {}
    for number in range(8):
        assert joined._KEY not in signs
        joined._beat(str(number), beats, silent, 12)
    assert signs[joined._KEY].startswith(f"{joined.STUCK} process 1 gave no sign of life for 14 s: it is")


def test_a_process_ends_when_process_0_does_not_answer_or_no_step_ends(monkeypatch, capfd):
    joined._ANSWERED.set()  # in the first round
    status, words = ended(monkeypatch, lambda: joined._count(NEVER, 12))
    assert status == joined.STUCK and words.startswith("ends, because process 0 has not answered for 15 s")
    signs, watchdog = Store(), joined.Watchdog(3.0)
    monkeypatch.setattr(joined, "_client", lambda: signs)
    watchdog.feed()
    watchdog._until, watchdog._over = 0.0, NEVER
    status, words = ended(monkeypatch, watchdog._watch)
    assert status == joined.STUCK and "no step ended within 3 s after 1: a process is stuck" in words
    assert "no step ended" in signs[joined._KEY] and "most recent call first" in capfd.readouterr().err


WORDS = ("train", "--mesh", "dp=2 fsdp=4", "--checkpoints", "kept it's")
SITE = Site(
    partition="gpu", account="proj", gpus_per_node=4, cpus_per_node=32, modules=("cuda/12.6",),
    interface="ib0", setup=("source .venv/bin/activate",), hosts=("n1", "n2"),
    image="registry.example/llmpar:1", queue="research", volume="claim",
)  # fmt: skip
SERVE = ("serve", "/data/it's mine", "--served-model-name", 'a "b" $HOME', "--tensor-parallel-size", "4")
HERE = os.path.join(os.path.dirname(__file__), "fixtures", "jobs")


@pytest.mark.parametrize("name, engine, site", TABLES["job_files"])
def test_a_job_file_is_as_it_was(name, engine, site):
    """Remove tests/fixtures/jobs and run this once to write them anew; look at what changed."""
    site = Site(**site | {"hosts": tuple(site.get("hosts", ()))}) if site else SITE
    words = SERVE if "vllm" in engine else WORDS
    text, path = job_file(engine, Job(words, 2, site)), os.path.join(HERE, name)
    if not os.path.exists(path):
        os.makedirs(HERE, exist_ok=True)
        Path(path).write_text(text)
    assert text == Path(path).read_text()
    if name.endswith((".sh", ".sbatch")):
        subprocess.run(["bash", "-n", path], check=True)
    elif name.startswith("ray"):
        assert WORDS[-1] in str(compile(text, name, "exec").co_consts)


@pytest.mark.parametrize("site", [SITE, Site(image="llmpar", gpus_per_node=0)], ids=["all", "little"])
def test_a_jobsets_pods_have_the_command_and_find_one_another(site):
    """Kubernetes replaces $(NAME), and $$ by $; this is the one rule that it has."""
    words = ("train", "--checkpoints", "$(JAX_NUM_PROCESSES) $HOME $$ $(x $")
    jobset, policy = yaml.safe_load_all(job_file("jobset", Job(words, 2, site)))
    assert policy["spec"]["podSelector"] == policy["spec"]["ingress"][0]["from"][0]["podSelector"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    put = lambda found: "$" if found[1] == "$" else "replaced"
    read = lambda word: re.sub(r"\$(\$|\(([^)]*)\))", put, word)
    assert [read(word) for word in container["command"]] == ["llmpar", *words] and read(words[2]) != words[2]
    assert ("volumes" in pod, "volumeMounts" in container) == (bool(site.volume),) * 2
    given = {row["name"]: row["value"] for row in container["env"]}
    inside = given | env("KUBERNETES_SERVICE_HOST=10.0.0.1 JOB_COMPLETION_INDEX=1")
    assert detect(inside) == Place("Kubernetes", 2, 1, "llmpar-workers-0-0.llmpar:55527")


def served(folder, engine, job, *, key="k'e y", broken=False):
    """Run a server's job file where scontrol, srun, apptainer, ray and vllm are ours: what each heard."""
    text, port = job_file(engine, job), joined.free_port()
    ours = (Path(HERE).parent / "jobs_programs.txt").read_text().replace("{python}", sys.executable)
    programs = folder / "programs"
    programs.mkdir(parents=True)
    for name in ("scontrol", "srun", "apptainer", "ray", "vllm"):
        (programs / name).write_text(ours)
        (programs / name).chmod(0o755)
    (folder / "job").write_text(text.replace("6379", str(port)))
    if broken:
        (folder / "broken").touch()
    around = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "VLLM_API_KEY": key}
    how = dict(cwd=folder, env=around, capture_output=True, text=True, timeout=200)
    done = subprocess.run(["bash", "job"], **how)
    told = folder / "said.jsonl"
    said = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    assert not key or key not in text + done.stdout + done.stderr
    return done, said, port


@pytest.mark.parametrize("container", ["", "v llm.sif"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_server_s_job_starts_head_worker_and_vllm_and_ends_with_it(nodes, container, tmp_path):
    backend = ("--distributed-executor-backend", "ray") * (nodes > 1)
    job = Job(SERVE + backend, nodes, Site(gpus_per_node=4, container=container))
    done, said, port = served(tmp_path, "slurm vllm", job)
    assert done.returncode == 7, done.stderr
    ((words, told),) = [row[1:] for row in said if row[0] == "vllm"]
    assert words == [*SERVE, *backend, "--host", "127.0.0.1", "--port", "8000"]
    assert told == ([f"localhost:{port}", "k'e y", 64] if nodes > 1 else [None, "k'e y", 0])
    assert "ssh -N -L 8000:127.0.0.1:8000 localhost" in done.stdout
    rays = [words[1] for name, words, _ in said if name == "ray"]
    assert rays == (["--head", f"--address=localhost:{port}"] if nodes > 1 else [])
    inside = [words for name, words, _ in said if name == "apptainer"]
    assert len(inside) == (2 * nodes - 1) * bool(container)
    assert all(words[:5] == ["exec", "--nv", "--bind", SERVE[1], "v llm.sif"] for words in inside)


def test_a_server_s_job_ends_where_its_head_does_and_wants_a_key(tmp_path):
    job = Job(SERVE, 2, Site(gpus_per_node=4))
    done, said, _ = served(tmp_path / "broken", "slurm vllm", job, broken=True)
    assert done.returncode == 1 and "vllm" not in [name for name, *_ in said]
    done, said, _ = served(tmp_path / "no key", "slurm vllm", job, key="")
    assert (done.returncode, said) == (1, []) and done.stderr.startswith("set VLLM_API_KEY")
    done, said, _ = served(tmp_path / "ray", "ray vllm", job)
    assert done.returncode == 7
    assert said == [["vllm", [*SERVE, "--host", "127.0.0.1", "--port", "8000"], ["auto", "k'e y", 0]]]


def export_of(folder, total_size=16_060_522_496, quantization=None, **entries):
    """A folder as an export leaves it, but for its numbers: Llama 3.1 8B."""
    folder.mkdir(parents=True)
    card = to_hugging_face(preset("llama3.1-8b")) | entries
    (folder / "config.json").write_text(json.dumps(card))
    (folder / "model.safetensors").touch()
    if total_size is not None:
        index = {"metadata": {"total_size": total_size}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if quantization is not None:
        (folder / QUANTIZED).write_text(json.dumps({"quantization": quantization}))
    return str(folder)


SERVED = "launch slurm --serve vllm --chip a100-40 --cache-tokens 50000 --weights".split()


def test_a_server_takes_the_sizes_that_its_weights_and_cache_need(tmp_path, monkeypatch, call):
    """From the export's config.json: 16 GB in bfloat16 fit one GPU of 40 GB, 32 GB in float32 need two."""
    monkeypatch.chdir(tmp_path)
    out, err = call(*SERVED, os.path.relpath(export_of(tmp_path / "an export")))[1:]
    assert f"serve '{tmp_path}/an export' --served-model-name 'an export' --tensor-parallel-size 1" in out
    assert "--dtype bfloat16 --max-model-len 50000 --host" in out and "--gpus-per-node=1\n" in out
    assert "16.1 GB in bfloat16, on 1 a100-40 of 1 nodes (" in err
    wide = export_of(tmp_path / "wide", 32_121_044_992, torch_dtype="float32")
    out, err = call(*SERVED, wide)[1:]
    assert "--tensor-parallel-size 2" in out and "--dtype float32" in out and "32.1 GB in float32" in err


def test_quantized_weights_take_what_their_files_have(tmp_path, monkeypatch, call):
    """config.json still says bfloat16, and 16.1 GB would take two GPUs of 24; the index says 6.0 GB."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    kept = tmp_path / "hub" / "models--nvidia--Llama-FP4" / "snapshots" / "0123"
    small = export_of(kept, 6_000_000_000, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"})
    for name in (small, "nvidia/Llama-FP4"):
        out, err = call(*SERVED, name)[1:]
        assert f"6.0 GB in NVFP4 (says {QUANTIZED}), on 1 a100-40" in err
        assert "--dtype" not in out and f"serve {name} " in out
    with pytest.raises(ValueError, match=f"quantized to NVFP4 .{QUANTIZED}., which is not supported"):
        from_folder(small)


@pytest.mark.parametrize("folder, says", CASES["too_few_bytes"])
def test_files_that_hold_less_than_the_model_are_not_served(folder, says, tmp_path, call):
    status, _, err = call(*SERVED, export_of(tmp_path / "x", **json.loads(folder)))
    assert status == 1 and re.search(says, " ".join(err.split()))


def test_a_command_without_checkpoints_is_not_started_again():
    again = r"seq 3|requeue\n|maxRestarts: [1-9]|max-restarts=[1-9]|max_failures=[1-9]"
    for engine in ENGINES:
        assert not re.search(again, job_file(engine, Job(("train",), 2, SITE))), engine


def test_a_job_file_is_printed_and_submitted_only_when_it_is_asked_for(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("submitted"))
    _, out, _ = call(*"launch slurm --nodes 2 -- train --mesh fsdp=16 --checkpoints kept".split())
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=llmpar\n#SBATCH --nodes=2\n")
    assert "llmpar train --mesh fsdp=16 --checkpoints kept\n" in out and not list(tmp_path.iterdir())
    _, _, err = call(*"launch slurm --out job -- train --mesh fsdp=8".split())
    assert (tmp_path / "job").read_text().startswith("#!/bin/bash")
    assert "submit it: sbatch job" in err and "nothing is kept" in err
    asked, ended = [], subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda line, **_: asked.append(line) or ended)
    assert call(*"launch slurm --submit -- train --mesh fsdp=8".split())[0] == 0
    assert asked == [["sbatch", "llmpar-job.sbatch"]] and (tmp_path / "llmpar-job.sbatch").exists()


def test_the_table_of_start_times_is_what_was_recorded():
    assert engines_table.TABLE.read_text() == engines_table.table(json.loads(engines_table.FILE.read_text()))
