"""Which kernels work on a tensor: CuPy kernels on CUDA, the C++ library on the CPU, else torch.

The torch reference also serves codecs that the CUDA kernels do not cover, and machines where CuPy
or the library does not work, which is reported once. Same signatures and same bytes everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch

from ds_quant.kernels import (
    cuda,
    launch_batch,
    launch_lossless,
    lossless,
    native,
    reference,
)
from ds_quant.kernels.batch import Runnable, Task
from ds_quant.kernels.geometry import MAX_GROUP
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


def variant_of(buffers: Sequence[torch.Tensor]) -> Hashable:
    """Key of ``compile_tasks`` besides the tasks."""
    device = buffers[0].device
    if device.type == "cpu":
        return device, tuple([b.dtype for b in buffers])
    return device, tuple([(b.dtype, b.data_ptr() % ALIGNMENT) for b in buffers])


def compile_tasks(
    tasks: Sequence[Task], buffers: Sequence[torch.Tensor], backend: str
) -> tuple[list[Runnable], list[Task]]:
    """Compile tasks for such buffers: one call of a kernel for all tasks of a kind that it covers,
    or of any kind on CUDA, and the tasks that are left.
    """
    device, kernels, how = buffers[0].device, None, ()
    runner = cuda_runner(device, backend)
    if runner is not None:
        kernels, how = launch_batch, (runner.run_tables,)
    elif on_host(device, backend) is native:
        kernels = native
    kinds: dict[Hashable, list[Task]] = {}
    left = []
    for task in tasks:
        operation = task[0]
        codecs = (getattr(operation, name, None) for name in ("codec", "source"))
        own = any(codec is not None and codec.kind == "module" for codec in codecs)
        if kernels is None or own or not kernels.covers(operation, buffers):
            size = getattr(getattr(operation, "codec", None), "group_size", 0)
            if runner is not None and size > MAX_GROUP:
                _report_large_groups(size)
            left.append(task)
        else:
            kind = type(operation), getattr(operation, "base", None) is None
            kinds.setdefault(kind if runner is None else "any", []).append(task)
    return [kernels.compile_tasks(alike, buffers, *how) for alike in kinds.values()], left


@cache
def _report_large_groups(group_size: int) -> None:
    logger.warning(
        "ds_quant: group_size = %d takes the slower torch path, CUDA kernels go up to %d",
        group_size,
        MAX_GROUP,
    )


def cuda_runner(device: torch.device, backend: str) -> cuda.Runner | None:
    """Return the launcher of CuPy kernels on a device; None where there is none."""
    if device.type != "cuda" or backend == "torch":
        return None
    return cuda.runner_of(device)


LosslessTask = launch_lossless.Task


def encode_lossless(
    messages: Sequence[LosslessTask], nbytes: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Write messages of lossless differences, in few launches: of each its values (numel,) in
    bf16 or fp16, the reference (numel,) of the same dtype, and (lossless.max_bytes(numel),) uint8
    for it, whose bytes past the message hold nothing of use. All contiguous, of one dtype.
    nbytes: (messages,) int64, receives the bytes used, multiples of 16.
    """
    device = nbytes.device
    if (runner := cuda_runner(device, backend)) is not None:
        launch_lossless.encode(messages, nbytes, run_tables=runner.run_tables)
        return
    encode = native.encode_lossless if on_host(device, backend) is native else lossless.encode
    for place, message in enumerate(messages):
        encode(*message, nbytes[place : place + 1])


def decode_lossless(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16, each row contiguous
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
    *,
    backend: str = "auto",
) -> None:
    """Decode a message into every row of `out`, with host calls that do not grow with the rows.

    `status` tells of messages that cannot be or were made against another reference, see
    ``lossless.problem_of``; their rows then hold nothing of use. CuPy kernels do not
    wait for the device.
    """
    device, rows = wire.device, (wire, starts, lengths, reference, out, status)
    if (runner := cuda_runner(device, backend)) is not None:
        launch_lossless.decode_rows(*rows, run_tables=runner.run_tables)
    elif on_host(device, backend) is native:
        native.decode_lossless(*rows)
    else:
        lossless.decode_rows(*rows)
