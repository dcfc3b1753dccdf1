"""Exact differences of 16-bit floats, in as few bytes as they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_quant.codec.codec import CAST_NAMES, check_choice
from ds_quant.kernels import dispatch, launch_lossless
from ds_quant.kernels.lossless import MAX_NUMEL, max_bytes

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

    @property
    def name(self) -> str:
        """For logs and tables."""
        return "lossless"

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
        dispatch.encode_lossless(values, reference, out, nbytes, backend=self.backend)

    def decode(
        self,
        wire: torch.Tensor,  # (bytes of the message,) uint8
        reference: torch.Tensor,  # (numel,) bf16 or fp16
        out: torch.Tensor,  # (numel,) of the same dtype; may be the reference itself
        *,
        status: torch.Tensor | None = None,  # (2,) int32 zeros on the device
    ) -> None:
        """Overwrite `out` with the values. ValueError for a message that cannot be or was made
        against another reference; `out` then holds nothing of use.

        With a status nothing waits for a CUDA device: ``check`` raises what is found there.
        """
        _check_values("out", out, reference)
        _check_tensor("wire", wire, wire.numel(), torch.uint8)
        self.max_bytes(reference.numel())
        dispatch.decode_lossless(wire, reference, out, backend=self.backend, status=status)

    def check(self, status: Sequence[int]) -> None:
        """ValueError for a status, read back from the device, of a decoding that went wrong."""
        launch_lossless.check(*status)


def _check_values(name: str, values: torch.Tensor, reference: torch.Tensor) -> None:
    if reference.dtype not in DTYPES:
        allowed = " and ".join(CAST_NAMES[dtype] for dtype in DTYPES)
        raise ValueError(f"reference: {reference.dtype}, lossless differences are of {allowed}")
    _check_tensor("reference", reference, reference.numel(), reference.dtype)
    _check_tensor(name, values, reference.numel(), reference.dtype)


def _check_tensor(name: str, tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.shape != (numel,) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)} {tensor.dtype}, must be ({numel},) {dtype}, "
            "contiguous"
        )
