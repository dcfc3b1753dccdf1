"""Seconds that count what a device was asked to do.

A launch on CUDA returns before its kernel has run, so a clock read on the host would time launches.
May import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def device_clock(device: torch.device) -> Callable[[], float]:
    """A clock that is read when the device has done all it was asked to."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
