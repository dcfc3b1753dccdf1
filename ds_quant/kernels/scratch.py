"""Scratch memory of the reference kernels: one growing buffer per thread, device and slot.

Fresh 64 MB temporaries cost more in page faults than the arithmetic done on them, so the chunked
CPU path reuses a few cache-sized buffers. They hold nothing between calls: a slot's content is
undefined when it is taken, and valid until the same slot is taken again on the same thread.
Views are kept too, because making one costs as much as a small operation. May import torch only.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_MAX_VIEWS = 512  # kept per thread; a training run repeats a few dozen shapes


class _Memory(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.views: dict[tuple, object] = {}


_memory = _Memory()
_everywhere: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def nbytes() -> int:
    """What all threads of this process hold."""
    return sum(buffer.numel() for buffer in _everywhere.copy().values())


def take(
    slot: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialised contiguous tensor on top of this thread's buffer for `slot`."""
    key = (slot, shape, dtype, device)
    view = _memory.views.get(key)
    return _make(key) if view is None else view


def derived(key: tuple, build: Callable[[], T]) -> T:
    """`build()`, kept as long as the views it makes of taken tensors are valid."""
    kept = _memory.views.get(key)
    if kept is None:
        with torch.inference_mode(False):  # later calls may run outside inference mode
            kept = build()
        _memory.views[key] = kept
    return kept


def _make(key: tuple[str, tuple[int, ...], torch.dtype, torch.device]) -> torch.Tensor:
    slot, shape, dtype, device = key
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = _memory.buffers.get((slot, device))
    if buffer is None or buffer.numel() < nbytes:
        # uint8, because deepspeed.zero.Init converts floating-point torch.empty to the parameter
        # dtype; no inference tensor, because later calls may run outside inference mode.
        with torch.inference_mode(False):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _memory.buffers[slot, device] = _everywhere[id(buffer)] = buffer
        _memory.views.clear()  # views would keep the outgrown buffer alive
    if len(_memory.views) >= _MAX_VIEWS:
        _memory.views.clear()
    with torch.inference_mode(False):
        view = buffer[:nbytes].view(dtype).view(shape)
    _memory.views[key] = view
    return view
