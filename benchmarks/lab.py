"""N hosts on one switch, each a network namespace, with a rate that can change under a running job.

Everything lives in namespaces whose names share a prefix: nothing is created in the root
namespace, and what a crashed run left behind is found by name and removed. Rates are decimal
(1 Mbit/s = 10^6 bit/s) and shaped by `tc tbf` in both directions of every host's link.

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
    """The lab cannot be built or used; the message says what to do."""


def obstacle() -> str | None:
    """Why this machine cannot run a lab, or None."""
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

    For machines without an ``obstacle``. Use it as a context manager: leaving removes everything,
    also after an exception; what a run that crashed has left is removed by the next one.
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
        # Another congestion control than the usual one would be measured instead of the codecs.
        route = f"{SUBNET}.0/24 dev {INTERFACE} proto kernel scope link src {address}"
        _ip(f"-n {host} route change {route} congctl cubic")

    def address(self, index: int) -> str:
        """IPv4 address of a host."""
        return f"{SUBNET}.{index + 1}"

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command line that runs on a host."""
        return ["ip", "netns", "exec", f"{PREFIX}-{index}", *argv]


class Loopback:
    """Takes the place of a lab where none can be built: every host is this machine.

    Nothing limits a rate, and no interface counts what one host sends to another.
    """

    is_shaped, interface = False, "lo"

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was made."""

    def address(self, index: int) -> str:
        """IPv4 address of a host."""
        return "127.0.0.1"

    def command(self, index: int, argv: Sequence[str]) -> list[str]:
        """`argv` as a command line that runs on a host."""
        return list(argv)


def set_rate(hosts: int, mbits: float) -> None:
    """Shape every host's link, both ways, to ``mbits`` Mbit/s; 0: as fast as the machine.

    Works from inside a host too.

    Raises:
        LabError: a rate that the kernel does not take.
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
    """What the link of the host that the calling process runs on has brought since it exists."""
    return int(Path(RECEIVED).read_text())


def remove() -> None:
    """Remove all namespaces of a lab, with their links; nothing else."""
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
