"""Hosts on one machine: what leaves each is predicted, a team runs what it is given, nothing is left."""

import os
import subprocess
import sys
from fractions import Fraction

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from shared import CASES, HERE, program_text
from test_launch import gone_after_a_kill

from llmpar.launch import wire
from llmpar.launch.team import Team, TeamError
from llmpar.launch.wire import Wire
from llmpar.lessons import hosts
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict.hosts import leaving_bytes, sends
from llmpar.predict.traffic import step_traffic


def refusal():
    """Why no wire can be made here; '' where it can."""
    try:
        with Wire(2):
            return ""
    except ValueError as error:
        return str(error)


REFUSAL = refusal()
needs_wire = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
WITHIN = 0.02
BASE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all", "reduce-scatter"])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_each_device_sends_what_the_arithmetic_of_a_ring_says(kind, group):
    """A reduce-scatter by halving besides sends the pieces home whose numbers change with reversed bits."""
    for device in range(group):
        sent = sum(share for one, other, share in sends(kind, group) if device == one != other)
        laps = Fraction(2 if kind == "all-reduce" else 1)
        home = kind == "reduce-scatter" and (device, device) not in [s[:2] for s in list(sends(kind, group))]
        assert sent == laps * Fraction(group - 1, group) + Fraction(int(home), group)


PLANS = [Plan("dp=2 tp=4", zero=0), Plan("fsdp=8"), Plan("dp=2 fsdp=2 tp=2", tp_sequence=True)]
PLANS += [Plan("sp=4 tp=2"), Plan("pp=2 dp=2 tp=2", zero=0, microbatches=4)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_one_device_a_host_sends_its_whole_traffic(plan):
    """The sum over hosts is that over devices, but for pieces on their way home and a pipeline's ends."""
    config = preset("tiny")
    found = leaving_bytes(plan.resolve(config), 16, 64, range(8))
    stages = [step_traffic(plan.resolve(config), 16, 64, stage) for stage in range(plan.mesh.pp)]
    total = sum(stages[device * plan.mesh.pp // 8].total_bytes for device in range(8))
    rows = {kind: [r for (_, k), r in stages[0].items() if k == kind] for _, kind in stages[0]}
    permuted = sum(8 * row.bytes_sent for row in rows.get("collective-permute", ()) if plan.pipeline)
    scattered = rows.get("reduce-scatter", ())
    home = sum(8 * row.bytes_sent * Fraction(1, row.group_size - 1) for row in scattered)
    left = sum(sum(of.values()) for of in found.values())
    assert total - permuted / 2 - 64 <= left <= total + home + 64


def test_the_recorded_run_sent_what_is_predicted_today():
    """Both hosts, each placement at each rate; and one loss for all."""
    document = hosts.recorded()
    assert (document["params"], document["rows"]) == (hosts.TOY.num_params, hosts.ROWS)
    assert {run["placement"] for run in document["runs"]} == set(hosts.HOST_PLANS)
    for run in document["runs"]:
        for sent, expected in zip(run["sent"], hosts.leaving(run["placement"]), strict=True):
            assert 0 <= sent / expected - 1 < WITHIN, run
        assert np.allclose(run["losses"], document["runs"][0]["losses"], rtol=1e-5, atol=0)


@needs_wire
@pytest.mark.nightly  # the recorded run, above, has them, and what is predicted is compared with it
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_bytes_on_the_wire_are_those_predicted(monkeypatch):
    """Training steps in two processes with a network each; the four kinds of collectives are in them."""
    monkeypatch.setenv("PYTHONPATH", BASE["PYTHONPATH"])
    with hosts.start("1gbit") as pair:
        losses = []
        for name in ("dp across", "tp across", "fsdp over all"):
            for found, expected in zip(pair.run(hosts.measure, name, 2), hosts.leaving(name), strict=True):
                assert 0 <= found["sent"] / expected - 1 < WITHIN, (name, found)
                losses.append(found["losses"])
        assert np.allclose(losses, losses[0], rtol=1e-5, atol=0)


@needs_wire
def test_a_wire_has_its_rate_and_its_own_addresses():
    with Wire(2, "50mbit") as hosts_:
        sender, taker = ([sys.executable, "-c", program_text(name)] for name in ("sender", "taker"))
        with subprocess.Popen(hosts_.command(1, taker), stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"on\n"
            subprocess.run(hosts_.command(0, [*sender, hosts_.address(1)]), check=True, timeout=60)
            assert other.wait(60) == 0
        assert 2_500_000 < hosts_.sent_bytes(0) < 2_600_000
        assert [wire.bytes_per_s(rate) for rate in ("8kbit", "2.5gbit")] == [1e3, 312.5e6]
        for host in range(2):
            ask = hosts_.command(host, ["tc", "qdisc", "show", "dev", wire.CARD])
            assert "rate 50Mbit" in subprocess.run(ask, capture_output=True, text=True, check=True).stdout


@needs_wire
def test_a_killed_program_leaves_no_hosts_behind():
    gone_after_a_kill(program_text("holds_hosts"), 3)


@pytest.mark.parametrize("program, sentence", CASES["no_wire"])
def test_where_no_wire_can_be_made_one_sentence_says_so(program, sentence, tmp_path, monkeypatch):
    if program:
        for tool in wire.TOOLS:
            (tmp_path / tool).write_text(program)
            (tmp_path / tool).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal().startswith(sentence) and "\n" not in refusal()


def place():
    return jax.process_index(), len(jax.local_devices()), jax.device_count()


def fails_on_one():
    if jax.process_index() == 1:
        raise KeyError("planted")
    multihost_utils.sync_global_devices("never")


@pytest.mark.processes
def test_a_team_says_who_failed_and_where_the_others_stand(capsys):
    factor = 3
    with Team(2, 2, base=BASE) as team:
        assert team.run(place) == [(0, 2, 4), (1, 2, 4)]
        assert team.run(lambda x: print(factor * x), 4) == [None, None]
        assert sorted(capsys.readouterr().out.splitlines()) == ["[process 0] 12", "[process 1] 12"]
        with pytest.raises(TeamError) as error:
            team.run(fails_on_one)
        assert error.value.ends[1] == "raised KeyError: 'planted'"
        assert "has not come back; it stands in" in error.value.ends[0]
        with pytest.raises(RuntimeError, match="this team is over; start another"):
            team.run(place)


def is_killed():
    if jax.process_index() == 1:
        os.kill(os.getpid(), 9)
    multihost_utils.sync_global_devices("never")


@pytest.mark.nightly  # one that raises: above
@pytest.mark.processes
def test_a_team_of_which_a_process_is_killed_is_over_and_says_so():
    with Team(2, 1, base=BASE) as team, pytest.raises(TeamError) as error:
        team.run(is_killed)
    assert error.value.ends[1].startswith("was ended by SIGKILL")
    assert error.value.ends[0].startswith(("has not come back; it stands in", "raised"))


def test_without_cloudpickle_a_team_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="needs cloudpickle, which is missing; pip install 'llmpar.lab.'"):
        Team(2, 1)
