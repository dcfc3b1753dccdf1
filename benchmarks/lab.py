"""A network lab: hosts on one switch, each a network namespace, with link rates that can change.

All namespaces share a name prefix. Nothing is created in the root namespace, and namespaces that a
crashed run has left are found by name and removed. Rates are decimal (1 Mbit/s = 10^6 bit/s) and
shaped by `tc tbf` in both directions of every host's link, also under a running job.

Needs root, Linux, `ip` and `tc` (iproute2). May import the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PREFIX = "dsqlab"
SWITCH = f"{PREFIX}-sw"
SUBNET = "10.77.0"
INTERFACE = "eth0"
RECEIVED = f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"
_LATENCY = "50ms"  # longest stay in the shaper's queue
# (up to Mbit/s, burst): smaller bursts cap the rate or cut large packets into frames
_BURSTS = ((1000, "128k"), (2000, "256k"), (3200, "512k"), (5000, "1m"), (float("inf"), "2m"))


class LabError(RuntimeError):
    """The lab cannot be built or used. The message names the remedy."""


def obstacle() -> str | None:
    """Return the reason why this machine cannot run a lab, or None."""
    if os.geteuid() != 0:
        return "needs root to create network namespaces: run it with sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}: install iproute2"
    probe = f"{PREFIX}-probe"
    try:
        _ip(f"netns add {probe}")
    except LabError as error:
        return f"cannot create network namespaces: {error}"
    try:
        shaper = f"tbf rate 10mbit burst 128k latency {_LATENCY}"
        _ip(f"netns exec {probe} tc qdisc add dev lo root {shaper}")
    except LabError as error:
        return f"the kernel cannot shape rates (tc tbf): {error}"
    finally:
        _ip(f"netns del {probe}")
    return None


class Lab:
    """`hosts` namespaces dsqlab-0, dsqlab-1, ... with addresses 10.77.0.1, 10.77.0.2, ...

    For machines without an ``obstacle``. A context manager: leaving it removes everything, also
    after an exception. The next run removes the rest of a crashed one.
    """

    is_shaped, interface = True, INTERFACE

    def __init__(self, hosts: int) -> None:
        if not 1 <= hosts <= 64:
            raise LabError(f"hosts = {hosts}: allowed are 1 to 64")
        self.hosts = hosts

    def __enter__(self) -> Lab:
        remove()
        try:
            _ip(f"netns add {SWITCH}")
            _ip(f"-n {SWITCH} link add br0 type bridge")
            _ip(f"-n {SWITCH} link set br0 up")
            for index in range(self.hosts):
                self._add_host(index)
        except LabError:
            remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove()

    def _add_host(self, index: int) -> None:
        host, port, address = f"{PREFIX}-{index}", f"p{index}", self.address(index)
        _ip(f"netns add {host}")
        _ip(f"-n {host} link set lo up")
        _ip(f"-n {host} link add {INTERFACE} type veth peer name {port} netns {SWITCH}")
        _ip(f"-n {host} addr add {address}/24 dev {INTERFACE}")
        _ip(f"-n {host} link set {INTERFACE} up")
        _ip(f"-n {SWITCH} link set {port} master br0 up")
        # Pin the usual congestion control: another one changes the times.
        route = f"{SUBNET}.0/24 dev {INTERFACE} proto kernel scope link src {address}"
        _ip(f"-n {host} route change {route} congctl cubic")

    def address(self, index: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{SUBNET}.{index + 1}"

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on a host."""
        return ["ip", "netns", "exec", f"{PREFIX}-{index}", *argv]


class Loopback:
    """Stands in for a lab that cannot be built: every host is this machine.

    Rates are not limited, and no interface counts the bytes between hosts.
    """

    is_shaped, interface = False, "lo"

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove nothing: nothing was made."""

    def address(self, index: int) -> str:
        """Return the IPv4 address of a host."""
        return "127.0.0.1"

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on a host."""
        return list(argv)


def set_rate(hosts: int, mbits: float) -> None:
    """Shape every host's link in both directions, also from inside a host.

    mbits: rate in Mbit/s; 0: not shaped.

    Raises:
        LabError: the kernel refuses the rate.
    """
    for index in range(hosts):
        for namespace, device in ((f"{PREFIX}-{index}", INTERFACE), (SWITCH, f"p{index}")):
            shaper, where = f"tc -n {namespace} qdisc", f"dev {device} root"
            if not mbits:
                subprocess.run(f"{shaper} del {where}".split(), capture_output=True)
                continue
            burst = next(size for limit, size in _BURSTS if mbits <= limit)
            rate = f"tbf rate {int(mbits * 1e6)}bit burst {burst} latency {_LATENCY}"
            _run(f"{shaper} replace {where} {rate}")


def received_bytes() -> int:
    """Return the bytes that the calling process's host has received since it was made."""
    return int(Path(RECEIVED).read_text())


def remove() -> None:
    """Remove all namespaces of a lab and their links, nothing else."""
    for line in _ip("netns list").splitlines():
        if line.startswith(f"{PREFIX}-"):
            _ip(f"netns del {line.split()[0]}")


def _ip(command: str) -> str:
    return _run(f"ip {command}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{command}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
