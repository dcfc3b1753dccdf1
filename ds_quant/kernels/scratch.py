"""Scratch memory of the reference kernels: one growing arena per thread, device and slot.

Fresh 64 MB temporaries cost more in page faults than the arithmetic done on them, so the chunked
CPU path reuses a few cache-sized buffers. They hold nothing between calls: a slot's content is
undefined when it is taken, and valid until the same slot is taken again on the same thread.
May import torch only.
"""

from __future__ import annotations

import math
import threading

import torch

_arena = threading.local()


def take(slot: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device):
    """Uninitialised contiguous tensor of `shape` on top of this thread's buffer for `slot`."""
    buffers = _arena.__dict__
    key = (slot, device)
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    buffer = buffers.get(key)
    if buffer is None or buffer.numel() < nbytes:
        # uint8, because deepspeed.zero.Init converts floating-point torch.empty to the parameter
        # dtype; no inference tensor, because later calls may run outside inference mode.
        with torch.inference_mode(False):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        buffers[key] = buffer
    return buffer[:nbytes].view(dtype).view(shape)
