"""Host memory: large buffers of one engine, used again in every step, and what stays for good.

[Note: why a pool] A steady step asks for the same few large buffers as the one before. glibc hands
blocks of that size back to the system when they are freed, and every page of the next one is then
faulted in and cleared anew: decoding and adding two int8 rows of 2^24 elements takes 22 ms on one
core of a loaded x86-64 machine, 73 ms into fresh memory (medians of 7 pairs). On CUDA torch's
caching allocator does what is done here, so the pool leaves it alone.

[Note: when a buffer is free] A tensor made on a buffer keeps it alive, as does every view of that
tensor, and so does whoever holds one: a message in flight, or DeepSpeed with a gradient that it was
given. So a buffer that nothing but the pool refers to is free, and there is nothing to give back.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable

import numpy as np
import torch

from ds_quant.kernels.wire import ALIGNMENT, round_up

MIN_BYTES = 1 << 20  # below, the allocator keeps freed blocks by itself


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(0)])[0]  # what a list alone comes to; versions of Python differ


class Buffers:
    """Grows until a step finds all it needs; then its size is constant."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()  # autograd may call from a thread of its own

    @property
    def nbytes(self) -> int:
        """Bytes in the pool, used or free."""
        return sum(array.nbytes for array in self._arrays)

    def empty(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, as ``torch.empty`` does."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < MIN_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock, torch.inference_mode(False):
            numbers = torch.frombuffer(self._take(nbytes), dtype=dtype, count=math.prod(shape))
            return numbers if len(shape) == 1 else numbers.view(shape)

    def _take(self, nbytes: int) -> np.ndarray:
        """Take the smallest free array that is large enough, else replace a free one."""
        counts = _references(self._arrays)
        free = [a for a, n in zip(self._arrays, counts, strict=True) if n == _UNUSED]
        fitting = [a for a in free if a.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=len)
        if free:  # too small for this: its place is taken, so that no more are held than are used
            replaced = max(free, key=len)
            self._arrays = [a for a in self._arrays if a is not replaced]
        self._arrays.append(np.empty(nbytes, dtype=np.uint8))
        return self._arrays[-1]


class Room:
    """Memory for tensors that stay, ``nbytes`` in all, end to end: they can be sent as they lie.

    They are cut out of large blocks, because torch rounds page-locked ones up to powers of two.
    zeros: makes a block of so many bytes, (bytes,) uint8.
    """

    _BLOCK = 1 << 28

    def __init__(self, nbytes: int, zeros: Callable[[int], torch.Tensor]) -> None:
        self._to_come, self._zeros = nbytes, zeros
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous zeros, at a multiple of 16 bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        taken = round_up(nbytes, ALIGNMENT)
        if taken > self._left.numel():
            self._left = self._zeros(max(taken, min(self._BLOCK, self._to_come)))
        self._to_come -= taken
        room, self._left = self._left[:nbytes], self._left[taken:]
        return room.view(dtype).view(shape)
