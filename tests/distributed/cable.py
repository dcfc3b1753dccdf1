"""Two hosts, each a network namespace, and a cable between them that delays and loses packets.

The cable is a process that carries IP packets from one TUN device to the other, so it needs no
queueing discipline of the kernel (netem is often not built). Needs root, Linux and `ip`. As
``python -m tests.distributed.cable FILE`` this file is the cable; FILE holds seconds and share.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = ("dsqfault-0", "dsqfault-1")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
DEVICE = "tun0"
_SETIFF, _TUN, _NO_HEADER, _NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def obstacle() -> str | None:
    """Why this machine cannot have one, or None."""
    if os.geteuid() != 0:
        return "needs root to create network namespaces"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True)
    return "needs the command ip: install iproute2" if probe.returncode else None


@contextmanager
def cable(folder: str) -> Iterator[None]:
    """Hosts and cable for the length of the block; ``disturb`` changes it."""
    remove()
    disturb(folder, delay=0.0, loss=0.0)
    for name in NAMES:
        subprocess.run(["ip", "netns", "add", name], check=True)
    argv = [sys.executable, "-m", "tests.distributed.cable", str(Path(folder, "cable"))]
    carrier = subprocess.Popen(command(0, argv), cwd=Path(__file__).resolve().parents[2])
    try:
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _until_there(name)
            for words in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} up"):
                subprocess.run(["ip", "-n", name, *words.split()], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield
    finally:
        carrier.kill()
        carrier.wait()
        remove()


def _until_there(name: str) -> None:
    for _ in range(200):
        show = ["ip", "-n", name, "link", "show", DEVICE]
        if subprocess.run(show, capture_output=True).returncode == 0:
            return
        time.sleep(0.05)
    raise RuntimeError(f"the cable has made no device in {name}")


def command(host: int, argv: list[str]) -> list[str]:
    """``argv`` as a command line that runs on a host."""
    return ["ip", "netns", "exec", NAMES[host], *argv]


def disturb(folder: str, *, delay: float, loss: float) -> None:
    """Every packet from now on, both ways: seconds on its way, and the share that is lost."""
    settings = Path(folder, "cable")
    Path(f"{settings}.new").write_text(f"{delay} {loss}")
    os.replace(f"{settings}.new", settings)


def remove() -> None:
    """What an earlier run has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in set(NAMES) & {line.split()[0] for line in listed.splitlines() if line}:
        subprocess.run(["ip", "netns", "del", name], check=True)


def _end_in(namespace: str) -> int:
    """A TUN device in a namespace, which this process enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _SETIFF, struct.pack("16sH", DEVICE.encode(), _TUN | _NO_HEADER))
    return end


def carry(settings: Path) -> None:
    """Until killed."""
    ends = [_end_in(name) for name in NAMES]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    draw, count, read = random.Random(0), 0, 0.0
    delay = loss = 0.0
    travelling: list[tuple[float, int, int, bytes]] = []
    while True:
        now = time.monotonic()
        if now - read > 0.1:
            delay, loss = map(float, settings.read_text().split())
            read = now
        while travelling and travelling[0][0] <= now:
            _, _, end, packet = heapq.heappop(travelling)
            with suppress(OSError):  # the host is not up yet
                os.write(end, packet)
        wait = min(0.1, travelling[0][0] - now) if travelling else 0.1
        for end in select.select(ends, [], [], wait)[0]:
            packet = os.read(end, 65536)
            if draw.random() >= loss:
                count += 1
                heapq.heappush(travelling, (time.monotonic() + delay, count, other[end], packet))


if __name__ == "__main__":
    carry(Path(sys.argv[1]))
