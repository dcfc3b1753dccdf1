"""The C++ kernels of lossless differences: signatures and bytes of lossless.py."""

from __future__ import annotations

import numpy as np
import torch

from ds_quant.kernels import lossless
from ds_quant.kernels.native import function, threads_for

# Arguments of a kernel; LosslessJob in lossless.cpp.
_FIELDS = np.dtype(
    [(name, np.uint64) for name in ("reference", "values", "wire")]
    + [(name, np.int64) for name in ("numel", "exponent_at", "nbytes", "problem")]
)


def encode(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
) -> None:
    """Write a message."""
    jobs = _jobs(values.view(1, -1), reference.view(1, -1))
    jobs["wire"] = out.data_ptr()
    _call("dsq_lossless_encode", jobs, values)
    nbytes.fill_(int(jobs["nbytes"][0]))


def decode_rows(
    wire: torch.Tensor,  # (bytes,) uint8: the messages
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
) -> None:
    """Decode a message into every row of `out`, in one call; `status` tells which cannot be."""
    jobs = _jobs(out, reference)
    jobs["wire"] = wire.data_ptr() + starts.astype(np.uint64)
    jobs["nbytes"] = lengths
    _call("dsq_lossless_decode", jobs, out)
    status[:, 0] = torch.from_numpy(jobs["problem"])


def _jobs(values: torch.Tensor, reference: torch.Tensor) -> np.ndarray:
    """Jobs on the rows of tensors that the caller keeps alive."""
    rows, numel = values.shape
    jobs, places = np.zeros(rows, dtype=_FIELDS), np.arange(rows, dtype=np.uint64)
    for name, tensor in (("values", values), ("reference", reference)):
        jobs[name] = tensor.data_ptr() + places * np.uint64(2 * tensor.stride(0))
    jobs["numel"], (jobs["exponent_at"], _) = numel, lossless.EXPONENT[values.dtype]
    return jobs


def _call(name: str, jobs: np.ndarray, values: torch.Tensor) -> None:
    function(name)(jobs.ctypes.data, len(jobs), threads_for(values.numel()))
