"""A pool of large host buffers for messages and sums.

[Note: why a pool] A steady step allocates the same few large buffers as the step before. glibc
returns blocks of that size to the system when they are freed, and every page of the next block is
then faulted in and cleared: decoding and adding two int8 rows of 2^24 elements takes 22 ms on one
core of a loaded x86-64 machine, 73 ms into fresh memory (medians of 7 pairs). On CUDA torch's
caching allocator reuses blocks, so the pool leaves CUDA tensors to it.

[Note: when a buffer is free] Reference counted: a buffer is free when only the pool refers to it. A
tensor on a buffer refers to it, and so does every view of that tensor: a message in flight, or a
gradient that DeepSpeed holds. Nothing is given back explicitly.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import torch
from torch import Tensor

MIN_BYTES = 1 << 20  # smaller blocks: the allocator keeps them when they are freed


def _reference_counts(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


# References to an array that only a list holds; versions of Python differ.
_UNUSED = _reference_counts([np.empty(0)])[0]


class Buffers:
    """Pool of host buffers. It grows until a step finds all that it needs, then stays as large."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._lock = threading.Lock()  # autograd may call from another thread

    @property
    def nbytes(self) -> int:
        """Bytes in the pool, used or free."""
        return sum(array.nbytes for array in self._arrays)

    def empty(self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor, as ``torch.empty`` does."""
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or nbytes < MIN_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        with self._lock, torch.inference_mode(False):
            values = torch.frombuffer(self._take(nbytes), dtype=dtype, count=numel)
            return values if len(shape) == 1 else values.view(shape)

    def _take(self, nbytes: int) -> np.ndarray:
        """Take the smallest free array that is large enough, or replace a free one by a new one."""
        counts = _reference_counts(self._arrays)
        free = [
            array for array, count in zip(self._arrays, counts, strict=True) if count == _UNUSED
        ]
        large_enough = [array for array in free if array.nbytes >= nbytes]
        if large_enough:
            return min(large_enough, key=len)
        if free:  # all too small: drop the largest, so that no more arrays are held than are used
            replaced = max(free, key=len)
            self._arrays = [array for array in self._arrays if array is not replaced]
        self._arrays.append(np.empty(nbytes, dtype=np.uint8))
        return self._arrays[-1]
