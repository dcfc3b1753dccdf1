"""Scratch memory of the reference kernels: on the CPU one growing buffer per thread and slot.

Fresh 64 MB temporaries cost more in page faults than the arithmetic done on them, so the chunked
CPU path reuses a few cache-sized buffers. They hold nothing between calls: a slot's content is
undefined when it is taken, and valid until the same slot is taken again on the same thread.
Views are kept too, because making one costs as much as a small operation.

[Note: scratch and streams] A device works later than its calls return, and on several streams at
once: DeepSpeed gathers on one and reduces on another, from one thread. A buffer that is used again
on another stream would be overwritten while the first one still reads it. So nothing is kept off
the CPU: torch's caching allocator hands out memory per stream and reuses it in its order.
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


def is_synchronous(device: torch.device) -> bool:
    """Whether an operation is done when its call returns, so that its result may be read at once
    and its memory used again. See [Note: scratch and streams].
    """
    return device.type == "cpu"


def nbytes() -> int:
    """What all threads of this process hold."""
    return sum(buffer.numel() for buffer in _everywhere.copy().values())


def take(
    slot: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialised contiguous tensor, on the CPU on top of this thread's buffer for `slot`."""
    if not is_synchronous(device):
        return _empty(math.prod(shape) * dtype.itemsize, device).view(dtype).view(shape)
    key = (slot, shape, dtype, device)
    view = _memory.views.get(key)
    return _make(key) if view is None else view


def derived(key: tuple, build: Callable[[], T], *, device: torch.device) -> T:
    """`build()`, on the CPU kept as long as the views it makes of taken tensors are valid."""
    if not is_synchronous(device):
        return build()
    kept = _memory.views.get(key)
    if kept is None:
        with torch.inference_mode(False):  # later calls may run outside inference mode
            kept = build()
        _memory.views[key] = kept
    return kept


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes: deepspeed.zero.Init converts floating-point torch.empty to the parameter dtype."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _make(key: tuple[str, tuple[int, ...], torch.dtype, torch.device]) -> torch.Tensor:
    slot, shape, dtype, device = key
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = _memory.buffers.get((slot, device))
    if buffer is None or buffer.numel() < nbytes:
        with torch.inference_mode(False):  # later calls may run outside inference mode
            buffer = _empty(nbytes, device)
        _memory.buffers[slot, device] = _everywhere[id(buffer)] = buffer
        _memory.views.clear()  # views would keep the outgrown buffer alive
    if len(_memory.views) >= _MAX_VIEWS:
        _memory.views.clear()
    with torch.inference_mode(False):
        view = buffer[:nbytes].view(dtype).view(shape)
    _memory.views[key] = view
    return view
