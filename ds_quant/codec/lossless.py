"""Lossless differences of 16-bit floats, in as few bytes as they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ds_quant.codec.codec import CAST_NAMES, check_choice
from ds_quant.kernels import dispatch
from ds_quant.kernels.lossless import MAX_NUMEL, max_bytes
from ds_quant.kernels.wire import ALIGNMENT

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class LosslessCodec:
    """Values against a reference that the receiver holds too; it gets them bit for bit.

    The bytes follow [Note: lossless format] of kernels/lossless.py. How many there are depends on
    the values, so messages have a length of their own. All tensors contiguous on one device.
    ``backend``: see GroupCodec.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, dispatch.BACKENDS)

    name: ClassVar[str] = "lossless"  # for logs and tables

    def max_bytes(self, numel: int) -> int:
        """Most bytes of a message of `numel` elements, a multiple of 16; 0 for no elements."""
        if not 0 <= numel <= MAX_NUMEL:
            raise ValueError(f"numel = {numel}: a lossless message holds 0 to {MAX_NUMEL} elements")
        return max_bytes(numel)

    def encode(
        self,
        values: torch.Tensor,  # (numel,) bf16 or fp16
        reference: torch.Tensor,  # (numel,) of the same dtype
        out: torch.Tensor,  # (max_bytes(numel),) uint8
        nbytes: torch.Tensor,  # (1,) int64
    ) -> None:
        """Write a message into `out` and the bytes it has, a multiple of 16, into `nbytes`.

        Bytes of `out` past the message hold nothing of use.
        """
        _check_values("values", values, reference)
        _check_tensor("out", out, self.max_bytes(values.numel()), torch.uint8)
        _check_tensor("nbytes", nbytes, 1, torch.int64)
        self.encode_all([(values, reference, out)], nbytes)

    def encode_all(self, messages: Sequence[dispatch.LosslessTask], nbytes: torch.Tensor) -> None:
        """As ``encode``, of messages of one dtype and not checked; nbytes: (messages,) int64."""
        dispatch.encode_lossless(messages, nbytes, backend=self.backend)

    def decode(
        self,
        wire: torch.Tensor,  # (bytes of the message,) uint8
        reference: torch.Tensor,  # (numel,) bf16 or fp16
        out: torch.Tensor,  # (numel,) of the same dtype; may be the reference itself
    ) -> None:
        """Overwrite `out` with the values. ValueError for a message that cannot be or was made
        against another reference; `out` then holds nothing of use. Waits for a CUDA device.
        """
        _check_values("out", out, reference)
        self.decode_rows(wire, [0], [wire.numel()], reference.view(1, -1), out.view(1, -1))

    def decode_rows(
        self,
        wire: torch.Tensor,  # (bytes,) uint8
        starts: Sequence[int] | np.ndarray,  # (rows,): where in `wire` each message begins
        lengths: Sequence[int] | np.ndarray,  # (rows,): its bytes
        reference: torch.Tensor,  # (rows, numel) bf16 or fp16, each row contiguous
        out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference itself
        status: torch.Tensor | None = None,  # (rows, 2) int32, zeros
    ) -> None:
        """Decode one message into every row of `out`, with host calls that do not grow with the
        rows. ``Damaged`` names the row, by its place, of a message as ``decode`` refuses it. With
        `status` that tells instead, see ``kernels.lossless.problem_of``, and nothing waits.
        """
        if reference.dtype not in DTYPES:
            raise _wrong_dtype(reference)
        _check_tensor("wire", wire, wire.numel(), torch.uint8)
        self.max_bytes(reference.shape[1])
        for name, tensor in (("reference", reference), ("out", out)):
            shape, dense = (len(starts), reference.shape[1]), tensor.stride(1) == 1
            if tensor.shape != shape or tensor.dtype != reference.dtype or not dense:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)} {tensor.dtype}, must be {shape} "
                    f"{reference.dtype}, each row contiguous"
                )
        starts, lengths = (np.asarray(n, dtype=np.int64) for n in (starts, lengths))
        outside = (starts < 0) | (lengths < 0) | (starts + lengths > wire.numel())
        if outside.any() or (starts % ALIGNMENT).any():
            raise ValueError(
                f"messages begin at {starts.tolist()} and have {lengths.tolist()} bytes: allowed "
                f"are multiples of {ALIGNMENT}, and ends up to {wire.numel()}"
            )
        dispatch.decode_lossless(
            wire, starts, lengths, reference, out, backend=self.backend, status=status
        )


def _check_values(name: str, values: torch.Tensor, reference: torch.Tensor) -> None:
    if reference.dtype not in DTYPES:
        raise _wrong_dtype(reference)
    _check_tensor("reference", reference, reference.numel(), reference.dtype)
    _check_tensor(name, values, reference.numel(), reference.dtype)


def _wrong_dtype(reference: torch.Tensor) -> ValueError:
    allowed = " and ".join(CAST_NAMES[dtype] for dtype in DTYPES)
    return ValueError(f"reference: {reference.dtype}, lossless differences are of {allowed}")


def _check_tensor(name: str, tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.shape != (numel,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)} {tensor.dtype}, must be ({numel},) {dtype}, "
            "contiguous"
        )
