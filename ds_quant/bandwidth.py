"""What a link carries: bandwidth and latency of its own collectives, of the slowest rank.

All ranks of the world measure at once, each its own link, so that nodes send as they do in a step.
May import torch, clock, link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ds_quant.clock import device_clock
from ds_quant.link import Link

SMALL, FIRST, LARGEST = 1 << 10, 1 << 16, 1 << 24  # bytes from each rank, in a short measurement
RECEIVED = 1 << 28  # bytes at most that one rank receives, however many send
ENOUGH = 0.1  # seconds of a gather that a short measurement does not go beyond


@dataclass(frozen=True, kw_only=True)
class Rate:
    """bytes_per_second: into one rank inside a node, or into one node. latency: seconds."""

    bytes_per_second: float
    latency: float


def rate_from(received: Sequence[int], seconds: Sequence[float]) -> Rate:
    """Latency is the time of the smallest message; the rate that of the largest, without it.

    Where noise or latency make up most of the largest message's time, nothing is taken off it:
    the rate is then too low rather than absurd.
    """
    latency, longest = seconds[0], seconds[-1]
    if latency > longest / 2:
        return Rate(bytes_per_second=received[-1] / longest, latency=latency)
    moved = received[-1] - received[0]
    return Rate(bytes_per_second=moved / (longest - latency), latency=latency)


def measure(
    link: Link,
    sizes: Sequence[int],
    device: torch.device,
    *,
    show: Callable[[int], None] = lambda nbytes: None,
) -> Rate:
    """Rate into one rank from gathers of ``sizes`` bytes per rank, the smallest first."""
    seconds = []
    for nbytes in sizes:
        show(nbytes)
        seconds.append(_seconds(link, nbytes, device, repeats=20 if nbytes < 1 << 20 else 5))
    return rate_from([nbytes * (link.size - 1) for nbytes in sizes], seconds)


def measure_shortly(link: Link, device: torch.device) -> Rate:
    """The same within a second or so on any link: messages grow until one takes long enough."""
    sizes, nbytes = [SMALL], FIRST
    seconds = [_seconds(link, SMALL, device, repeats=5)]
    while nbytes <= min(LARGEST, RECEIVED // link.size) and seconds[-1] < ENOUGH:
        sizes.append(nbytes)
        seconds.append(_seconds(link, nbytes, device, repeats=3))
        nbytes *= 4
    return rate_from([n * (link.size - 1) for n in sizes], seconds)


def _seconds(link: Link, nbytes: int, device: torch.device, *, repeats: int) -> float:
    """Median seconds of a gather of ``nbytes`` from every rank of the link, on the slowest rank of
    the world: all ranks get the same number, and decide alike.
    """
    payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    clock, found = device_clock(device), []
    for _ in range(repeats + 1):
        torch.distributed.barrier()
        start = clock()
        link.all_gather(payload, role="weights").wait()
        found.append(clock() - start)
    slowest = torch.tensor([median(found[1:])], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return slowest.item()
