"""Simulate hosts on this machine, joined by a wire of a chosen rate: each process in a network of its own.

The networks are Linux's network namespaces: a switch, and for each host a card ``wire`` at one of its ports.
The rate is a token bucket on every card. A namespace lives as long as a process in it, and ours end with this
process: nothing is left behind. Root may make them, others where user namespaces are allowed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

NETWORK = "10.77.0"
"""The first three numbers of the hosts' addresses, which are valid only among them."""
CARD = "wire"
"""A host's only card besides loopback. Real cards have other names, so what it counts is ours."""
TOOLS = ("unshare", "nsenter", "ip", "tc")
_BURST, _LATENCY = "128kb", "100ms"
"""The bytes that a card sends before its rate limits it: two of the largest packets that Linux hands to a
card; and how long a packet may wait there: one that would wait longer is dropped, and TCP sends it again."""


def card_sent_bytes(pid: int | str = "self") -> int:
    """Read how many bytes the card of a process's network has sent since it was made, as the kernel counts
    them; 0 without a card."""
    with open(f"/proc/{pid}/net/dev") as lines:
        cards = {
            name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)
        }
    return int(cards[CARD][8]) if CARD in cards else 0


def _checked(rate: str) -> str:
    """Return a rate that tc accepts; raise ValueError for others."""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate) or not float(rate[:-4]):
        raise ValueError(
            f"'{rate}' is no rate of a wire; write one such as 20mbit, 100mbit or 1gbit"
        )
    return rate


def bytes_per_s(rate: str) -> float:
    """Return the bytes that a wire of this rate carries in a second."""
    return float(_checked(rate)[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]] / 8


class Wire(contextlib.ExitStack):
    """Make several hosts that a switch joins; leaving ``with`` removes them.

    Args:
        num_hosts: 2 to 250.
        rate: of each card, as tc writes it.

    Raises ValueError, in one sentence, where it cannot be made.
    """

    def __init__(self, num_hosts: int, rate: str = "100mbit"):
        if not 2 <= num_hosts <= 250:
            raise ValueError(f"a wire joins 2 to 250 hosts, not {num_hosts}")
        super().__init__()
        self.num_hosts, self.rate = num_hosts, _checked(rate)
        self._alone = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._enter = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self._holders: list[subprocess.Popen] = []

    def __enter__(self) -> "Wire":
        if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
            need = (
                "Linux with the packages util-linux and iproute2"
                if sys.platform == "linux"
                else "Linux"
            )
            raise ValueError(
                f"hosts cannot be simulated on this machine: {missing[0]} is missing; use {need}"
            )
        try:
            self._make()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            words = " ".join((getattr(error, "stderr", "") or str(error)).split())
            raise ValueError(
                f"hosts cannot be simulated on this machine: {words}; be root of a machine or of a"
                " container with the capabilities NET_ADMIN and SYS_ADMIN"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def _hold(self, command: Sequence[str]) -> None:
        """Make a network, which exists until this process ends or closes it."""
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [*command, "sh", "-c", "echo made; exec cat"]
        # Ctrl-C is not for it
        holder = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        self._holders.append(holder)
        self.callback(holder.communicate)
        self.callback(holder.kill)
        if holder.stdout is None or holder.stdout.readline() != "made\n":
            raise subprocess.SubprocessError(holder.communicate()[1])

    def _in(self, number: int, script: str) -> None:
        """Run a script in one of the networks."""
        command = [*self._within(number), "sh", "-ec", script]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)

    def _within(self, number: int) -> list[str]:
        return ["nsenter", "--target", str(self._holders[number].pid), "--net", *self._enter, "--"]

    def _make(self) -> None:
        self._hold(["unshare", "--net", *self._alone])
        self._in(0, "ip link add switch type bridge; ip link set switch up")
        switch = self._holders[0].pid
        for host in range(self.num_hosts):
            self._hold([*self._within(0), "unshare", "--net"])
            lines = (
                "ip link set lo up",
                f"ip link add {CARD} type veth peer name port{host} netns {switch}",
                f"ip addr add {self.address(host)}/24 dev {CARD}",
                f"ip link set {CARD} up",
            )
            self._in(host + 1, "\n".join(lines))
            self._in(0, f"ip link set port{host} master switch up")
            bucket = f"tbf rate {self.rate} burst {_BURST} latency {_LATENCY}"
            self._in(host + 1, f"tc qdisc replace dev {CARD} root {bucket}")

    def address(self, host: int) -> str:
        """Return a host's address, which the others reach."""
        return f"{NETWORK}.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` on a host."""
        return [*self._within(host + 1), *command]

    def sent_bytes(self, host: int) -> int:
        """Return how many bytes a host has sent to the others so far."""
        return card_sent_bytes(self._holders[host + 1].pid)
