"""The C++ kernels of LosslessCodec for CPU tensors: signatures and bytes of lossless.py."""

from __future__ import annotations

import ctypes

import torch

from ds_quant.kernels import lossless
from ds_quant.kernels.native import function, threads_for


class Job(ctypes.Structure):
    """Arguments of a kernel; LosslessJob in lossless.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("reference", "values", "wire")] + [
        (name, ctypes.c_int64) for name in ("numel", "exponent_at", "nbytes", "problem")
    ]


def encode(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
) -> None:
    """Write a message."""
    job = _job(values, reference, out)
    _call("dsq_lossless_encode", job)
    nbytes.fill_(job.nbytes)


def decode(
    wire: torch.Tensor,  # (bytes used,) uint8
    reference: torch.Tensor,  # (numel,) bf16 or fp16
    out: torch.Tensor,  # (numel,) of the same dtype; may be the reference
) -> None:
    """Overwrite `out` with the values. ValueError for a message that cannot be."""
    job = _job(out, reference, wire)
    job.nbytes = wire.numel()
    _call("dsq_lossless_decode", job)
    if job.problem:
        raise lossless.error(lossless.PROBLEMS[job.problem - 1])


def _job(values: torch.Tensor, reference: torch.Tensor, wire: torch.Tensor) -> Job:
    """Job on tensors that the caller keeps alive."""
    job = Job(reference.data_ptr(), values.data_ptr(), wire.data_ptr())
    job.numel, (job.exponent_at, _) = values.numel(), lossless.EXPONENT[values.dtype]
    return job


def _call(name: str, job: Job) -> None:
    function(name)(ctypes.addressof(job), 1, threads_for(job.numel))
