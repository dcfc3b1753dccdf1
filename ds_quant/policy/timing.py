"""Clocks of collectives, and the rate of a link fitted to measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that synchronizes the device first: launches on CUDA are asynchronous."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def slowest(run: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """Return the median seconds of ``run`` on the slowest rank of the world. A collective.

    All ranks get the same value, so they decide alike. A first run, which compiles kernels, does
    not count.
    """
    clock = device_clock(device)
    durations = []
    for _ in range(repeats + 1):
        torch.distributed.barrier()
        start = clock()
        run()
        durations.append(clock() - start)
    seconds = torch.tensor([median(durations[1:])], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
    return seconds.item()


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Rate and latency of a link.

    bytes_per_second: into one rank inside a node, or into one node.
    latency: seconds of the smallest message.
    """

    bytes_per_second: float
    latency: float


def rate_from(received: Sequence[int], seconds: Sequence[float]) -> Rate:
    """Fit a rate to messages of increasing size.

    The latency is the time of the smallest message, the rate that of the largest one without the
    latency. If noise or latency make up most of the largest message's time, nothing is subtracted:
    the rate is then too low rather than absurd.

    Args:
        received: bytes of every message.
        seconds: time of every message.
    """
    latency = seconds[0]
    longest = seconds[-1]
    if latency > longest / 2:
        return Rate(bytes_per_second=received[-1] / longest, latency=latency)
    received_beyond_smallest = received[-1] - received[0]
    return Rate(
        bytes_per_second=received_beyond_smallest / (longest - latency),
        latency=latency,
    )
