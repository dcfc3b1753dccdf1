"""Which kernels work on a tensor: CuPy kernels on CUDA, the C++ library on the CPU, else torch.

The torch reference also serves codecs that the CUDA kernels do not cover, and machines where CuPy
or the library does not work, which is reported once. Same signatures and same bytes everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch

from ds_quant.kernels import (
    cuda,
    launch,
    launch_batch,
    launch_lossless,
    lossless,
    native,
    native_batch,
    native_lossless,
    random_bits,
    reference,
    scratch,
)
from ds_quant.kernels.batch import Runnable, Task
from ds_quant.kernels.geometry import MAX_GROUP
from ds_quant.kernels.packing import Format
from ds_quant.kernels.wire import ALIGNMENT

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch")  # by the device of the tensors, or always the reference


def describe(device: torch.device, backend: str = "auto") -> str:
    """Name the kernels that a backend uses on a device for the log: CuPy, C++ or torch kernels."""
    if device.type == "cuda" and backend == "auto":
        return "torch kernels" if cuda.runner_of(device) is None else "CuPy kernels"
    if device.type == "cpu" and backend == "auto":
        why = native.unavailable_reason()
        return "C++ kernels" if why is None else f"torch kernels (C++ ones {why})"
    return "torch kernels"


def on_host(device: torch.device, backend: str) -> ModuleType:
    """Return the module for tensors that no CuPy kernel takes."""
    if device.type != "cpu" or backend == "torch" or native.unavailable_reason() is not None:
        return reference
    return native


def runner_for(fmt: Format, device: torch.device) -> launch.Runner | None:
    """Return the runner for a codec on a device; None where no kernel takes it."""
    if device.type == "cuda" and fmt.backend != "torch" and not launch.supports(fmt):
        _report_large_groups(fmt.group_size)
        return None
    runner = cuda_runner(device, fmt.backend)
    if runner is None or _open.batches is None:
        return runner
    return _open.batches.setdefault(device, cuda.Batch(runner))


class _Open(threading.local):
    """Batches of this thread by device while ``batch_launches`` is entered, else None."""

    batches: dict[torch.device, cuda.Batch] | None = None


_open = _Open()


@contextmanager
def batch_launches() -> Iterator[None]:
    """Let independent operations inside share launches on CUDA.

    What they write is there after the end of the block, not before. Does nothing on the CPU.
    """
    before, _open.batches = _open.batches, {}
    try:
        yield
        for batch in _open.batches.values():
            batch.run()
    finally:
        _open.batches = before


@contextmanager
def launch_in_order() -> Iterator[None]:
    """Launch operations inside in order, each reading what earlier ones wrote, also within
    ``batch_launches``.
    """
    before, _open.batches = _open.batches, None
    try:
        yield
    finally:
        _open.batches = before


def variant_of(buffers: Sequence[torch.Tensor]) -> Hashable:
    """Key of ``compile_tasks`` besides the tasks."""
    device = buffers[0].device
    if device.type == "cpu":
        return device, tuple([b.dtype for b in buffers])
    return device, tuple([(b.dtype, b.data_ptr() % ALIGNMENT) for b in buffers])


def compile_tasks(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable | None:
    """Compile tasks of one kind and backend for such buffers; None where no kernel takes all."""
    device, operations = buffers[0].device, [operation for operation, _ in tasks]
    backend = operations[0].backend
    runner = cuda_runner(device, backend)
    if runner is not None:
        kernels, run = launch_batch, (runner.run_tables,)
    elif on_host(device, backend) is native:
        kernels, run = native_batch, ()
    else:
        return None
    if not all(kernels.covers(operation, buffers) for operation in operations):
        return None
    return kernels.compile_tasks(tasks, buffers, *run)


def cuda_runner(device: torch.device, backend: str) -> cuda.Runner | None:
    """Return the launcher of CuPy kernels on a device; None where there is none."""
    if device.type != "cuda" or backend == "torch":
        return None
    return cuda.runner_of(device)


@cache
def _report_large_groups(group_size: int) -> None:
    logger.warning(
        "ds_quant: group_size = %d takes the slower torch path, CUDA kernels go up to %d",
        group_size,
        MAX_GROUP,
    )


def kernel(name: str, fmt: Format, device: torch.device) -> Callable[..., None]:
    """Find "encode", "decode" or "decode_sum" for a codec on a device.

    The signatures are those of reference.py; on CUDA a sum may also be written in 16 bits.
    """
    run = runner_for(fmt, device)
    if run is None:
        return getattr(on_host(device, fmt.backend), name)
    return partial(getattr(launch, name), run=run)


def sum_dtype(fmt: Format, wanted: torch.dtype, device: torch.device) -> torch.dtype:
    """The cheapest dtype for ``decode_sum`` to write where `wanted` is needed: CUDA kernels cast
    for free, elsewhere many sums are cast at once.
    """
    return torch.float32 if runner_for(fmt, device) is None else wanted


def recode(
    wire: torch.Tensor,  # (sources, nbytes of source) uint8
    out: torch.Tensor,  # (nbytes of fmt,) uint8
    source: Format,
    fmt: Format,
    *,
    numel: int,
    own: tuple[int, torch.Tensor] | None,  # place and values, (numel,) floating point
    address: random_bits.Address | None,
    source_levels: torch.Tensor | None,  # learned levels only
    levels: torch.Tensor | None,
) -> None:
    """Decode, add up in fp32 in order and encode the sum, as one operation.

    On CUDA one kernel, whose sums never leave the registers.
    """
    device = wire.device
    runs = runner_for(source, device), runner_for(fmt, device)
    if None in runs:
        total = scratch.take("sum", (numel,), dtype=torch.float32, device=device)
        with launch_in_order():
            add_up, encode = kernel("decode_sum", source, device), kernel("encode", fmt, device)
            add_up(wire, total, source, scale=1.0, own=own, levels=source_levels)
            encode(total.view(1, -1), out.view(1, -1), fmt, address=address, levels=levels)
        return
    launch.recode(
        wire.unsqueeze(0), out.view(1, -1), source, fmt, numel=numel, address=address,
        run=runs[1], source_levels=source_levels, levels=levels, own=own,
    )  # fmt: skip


def encode_lossless(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (lossless.max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
    *,
    backend: str,
) -> None:
    """Write the message of the exact differences."""
    run = cuda_runner(values.device, backend)
    if run is None:
        _lossless_on(values.device, backend).encode(values, reference, out, nbytes)
    else:
        launch_lossless.encode(values, reference, out, nbytes, run=run)


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    *,
    backend: str,
) -> None:
    """Decode a message into every row of `out`. ``lossless.Damaged`` for one that cannot be: on
    CUDA that waits for the device.
    """
    runner, messages = cuda_runner(wire.device, backend), (wire, starts, lengths)
    if runner is None:
        _lossless_on(wire.device, backend).decode_rows(*messages, reference, out)
    else:
        launch_lossless.decode_rows(*messages, reference, out, run_tables=runner.run_tables)


def _lossless_on(device: torch.device, backend: str) -> ModuleType:
    return native_lossless if on_host(device, backend) is native else lossless
