"""Back ends for tests of numbers: where their tensors lie, and what they launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.kernels import launch, launch_batch
from ds_quant.kernels.batch import Task
from ds_quant.kernels.dispatch import RngState
from ds_quant.kernels.launch import Stores, Table
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import ALIGNMENT, round_up

ADDRESS = Address(key=5, step=6)


class Kernels:
    """name: "torch", "native", "shim", "ptx" or "gpu"; runner: of the CUDA kernels."""

    def __init__(self, name: str, device: torch.device, runner: Any = None) -> None:
        self.name, self.device, self._runner = name, device, runner
        self.macros: list[dict[str, int]] = []  # of every launch

    @property
    def is_cuda(self) -> bool:
        return self.name in ("shim", "ptx", "gpu")

    def runner(self, _: torch.device, backend: str) -> Kernels | None:
        """Stand for ``dispatch.cuda_runner``."""
        return None if backend == "torch" else self

    def run_tables(self, tables: Iterable[Table]) -> None:
        """As a Runner does."""
        tables = list(tables)
        self.macros += [dict(table.macros) for table in tables]
        self._runner.run_tables(tables)

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """x on the device, rows (rows, numel) as far apart and as far off an allocation as here."""
        if self.device.type == "cpu":
            return x
        if x.dim() == 1 or x.stride(0) < x.shape[1]:
            return room(x.shape, x.dtype, self.device).copy_(x)
        return skewed(x, x.stride(0) - x.shape[1], self.device)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor at the begin of an allocation of whole 16 bytes.

    Kernels read every aligned 16 bytes that hold some of a row. PyTorch's allocator always leaves
    room behind a tensor; without its cache, as compute-sanitizer needs it, an allocation may end
    inside those 16 bytes, and the read counts as a fault.
    """
    numel = math.prod(shape)
    items = round_up(numel * dtype.itemsize, ALIGNMENT) // dtype.itemsize
    return torch.empty(items, dtype=dtype, device=device)[:numel].view(*shape)


def skewed(x: torch.Tensor, skew: int, device: torch.device) -> torch.Tensor:
    """Return a copy of x (rows, numel) on the device. Its first row starts ``skew`` elements behind
    the begin of an allocation, and as many lie between two rows.
    """
    rows, numel = x.shape
    return room((rows, numel + skew), x.dtype, device)[:, skew:].copy_(x)


def tables_of(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> list[Table]:
    """The launches of tasks of one kind, with the random bits of ``ADDRESS``; never carried out."""
    found: list[Table] = []
    operation = tasks[0][0]
    streams = RngState([BoundCodec(getattr(operation, "codec", None), ADDRESS)], [None])
    run = launch_batch.compile_tasks(tasks, buffers, found.extend)
    run(np.array([buffer.data_ptr() for buffer in buffers], dtype=np.uint64), streams.arrays)
    return found


@contextmanager
def storing(stores: Stores):
    """Inside, sums are written this way, whatever launch.py chooses."""
    launch.sum_plan.cache_clear()
    with patch.object(launch, "stores_of", lambda *_: stores):
        yield
    launch.sum_plan.cache_clear()
