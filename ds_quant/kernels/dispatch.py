"""Which kernels work on a tensor: CuPy kernels on CUDA, the C++ library on the CPU, else torch.

The torch reference also serves codecs that the CUDA kernels do not cover, and machines where CuPy
or the library does not work, which is reported once. Same signatures and same bytes everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
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
from ds_quant.kernels.hadamard import Rotation
from ds_quant.kernels.launch import Own
from ds_quant.kernels.packing import Format
from ds_quant.kernels.wire import ALIGNMENT

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch")

_backend = "auto"


def use(backend: str) -> None:
    """Choose for this process: "auto" goes by the tensor's device, "torch" is the reference."""
    global _backend
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    _backend = backend


def describe(device: torch.device) -> str:
    """Name the kernels used on a device for the log: CuPy, C++ or torch kernels."""
    if device.type == "cuda" and _backend == "auto":
        return "torch kernels" if cuda.runner_of(device) is None else "CuPy kernels"
    if device.type == "cpu" and _backend == "auto":
        why = native.unavailable_reason()
        return "C++ kernels" if why is None else f"torch kernels (C++ ones {why})"
    return "torch kernels"


def _on_host(device: torch.device) -> ModuleType:
    """Return the module for tensors that no CuPy kernel takes."""
    if device.type != "cpu" or _backend == "torch" or native.unavailable_reason() is not None:
        return reference
    return native


def runner_for(fmt: Format, device: torch.device) -> launch.Runner | None:
    """Return the runner for a codec on a device; None where no kernel takes it."""
    if device.type == "cuda" and _backend != "torch" and not launch.supports(fmt):
        _report_large_groups(fmt.group_size)
        return None
    runner = cuda_runner(device)
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
        return _backend, device, tuple([b.dtype for b in buffers])
    places = tuple([(b.dtype, b.data_ptr() % ALIGNMENT) for b in buffers])
    return _backend, device, places


def compile_tasks(tasks: Sequence[Task], buffers: Sequence[torch.Tensor]) -> Runnable | None:
    """Compile tasks of one kind for such buffers; None where no kernel takes them all."""
    device, operations = buffers[0].device, [operation for operation, _ in tasks]
    runner = cuda_runner(device)
    if runner is not None:
        if not all(launch_batch.covers(operation, buffers) for operation in operations):
            return None
        return launch_batch.compile_tasks(tasks, buffers, runner.run_tables)
    if _on_host(device) is not native:
        return None
    if not all(native_batch.covers(operation, buffers) for operation in operations):
        return None
    return native_batch.compile_tasks(tasks, buffers)


def cuda_runner(device: torch.device) -> cuda.Runner | None:
    """Return the launcher of CuPy kernels on a device; None where there is none."""
    if device.type != "cuda" or _backend == "torch":
        return None
    return cuda.runner_of(device)


@cache
def _report_large_groups(group_size: int) -> None:
    logger.warning(
        "ds_quant: group_size = %d takes the slower torch path, CUDA kernels go up to %d",
        group_size,
        MAX_GROUP,
    )


def encode(
    x: torch.Tensor,  # (rows, numel) floating point
    out: torch.Tensor,  # (rows, nbytes) uint8
    fmt: Format,
    *,
    address: random_bits.Address | None,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    base: torch.Tensor | None = None,  # (rows, numel) floating point, subtracted from x in fp32
    rotation: Rotation | None = None,  # of x, or x - base; the wire holds whole blocks
) -> None:
    """Write the wire bytes of every row, padding included."""
    options = {"address": address, "levels": levels, "base": base, "rotation": rotation}
    run = runner_for(fmt, x.device)
    if run is None:
        _on_host(x.device).encode(x, out, fmt, **options)
    else:
        launch.encode(x, out, fmt, run=run, **options)


def decode(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (rows, numel) floating point
    fmt: Format,
    *,
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    add: bool = False,  # in fp32 to what `out` holds
) -> None:
    """Decode every row and cast once to the dtype of `out`."""
    run = runner_for(fmt, wire.device)
    if run is None:
        _on_host(wire.device).decode(wire, out, fmt, levels=levels, add=add)
    else:
        launch.decode(wire, out, fmt, levels=levels, add=add, run=run)


def sum_dtype(fmt: Format, wanted: torch.dtype, device: torch.device) -> torch.dtype:
    """The cheapest dtype for ``decode_sum`` to write where `wanted` is needed: CUDA kernels cast
    for free, elsewhere many sums are cast at once.
    """
    return torch.float32 if runner_for(fmt, device) is None else wanted


def decode_sum(
    wire: torch.Tensor,  # (rows, nbytes) uint8
    out: torch.Tensor,  # (numel,) floating point
    fmt: Format,
    *,
    scale: float,
    own: tuple[int, torch.Tensor] | None,  # place and values, (numel on the wire,) floating point
    levels: torch.Tensor | None,  # (2^bits,) fp32, learned levels only
    rotation: Rotation | None = None,  # to undo; the wire holds whole blocks
) -> None:
    """out = scale * (row 0 + row 1 + ...), fp32 sums in row order, multiplied once at the end and
    then cast once to the dtype of `out`.
    """
    options = {"scale": scale, "levels": levels, "rotation": rotation}
    run = runner_for(fmt, wire.device)
    if run is None:
        total = out
        if out.dtype != torch.float32:
            total = scratch.take("sum", tuple(out.shape), dtype=torch.float32, device=out.device)
        _on_host(wire.device).decode_sum(wire, total, fmt, own=own, **options)
        if total is not out:
            out.copy_(total)
        return
    given = None if own is None else Own(*own)
    launch.decode_sum(wire, out, fmt, own=given, run=run, **options)


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
    runs = runner_for(source, wire.device), runner_for(fmt, wire.device)
    if None in runs:
        total = scratch.take("sum", (numel,), dtype=torch.float32, device=wire.device)
        with launch_in_order():
            decode_sum(wire, total, source, scale=1.0, own=own, levels=source_levels)
            encode(total.view(1, -1), out.view(1, -1), fmt, address=address, levels=levels)
        return
    given = None if own is None else Own(*own)
    launch.recode(
        wire.unsqueeze(0), out.view(1, -1), source, fmt, numel=numel, address=address,
        run=runs[1], source_levels=source_levels, levels=levels, own=given,
    )  # fmt: skip


def rotate(
    x: torch.Tensor,  # (numel,) floating point
    out: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: Rotation,
) -> None:
    """out = H (signs * x) block by block, x filled up with zeros to whole blocks."""
    _on_host(x.device).rotate(x, out, rotation)


def unrotate_(
    x: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: Rotation,
    *,
    scale: float = 1.0,
) -> None:
    """x = signs * (H x * (scale / block)), in place: the inverse of ``rotate``, times scale."""
    _on_host(x.device).unrotate_(x, rotation, scale=scale)


def encode_lossless(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (lossless.max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
) -> None:
    """Write the message of the exact differences."""
    run = cuda_runner(values.device)
    if run is None:
        _lossless_on(values.device).encode(values, reference, out, nbytes)
    else:
        launch_lossless.encode(values, reference, out, nbytes, run=run)


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
) -> None:
    """Decode a message into every row of `out`. ``lossless.Damaged`` for one that cannot be: on
    CUDA that waits for the device.
    """
    runner, messages = cuda_runner(wire.device), (wire, starts, lengths)
    if runner is None:
        _lossless_on(wire.device).decode_rows(*messages, reference, out)
    else:
        launch_lossless.decode_rows(*messages, reference, out, run_tables=runner.run_tables)


def _lossless_on(device: torch.device) -> ModuleType:
    return native_lossless if _on_host(device) is native else lossless
