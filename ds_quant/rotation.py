"""Hadamard smoothing of a reduction (SDP4Bit, section 3.2): spreads an outlier over its block.

A rotation wraps a whole reduction: once before the first encode, once after the last sum; the
quantizers in between all see rotated values. It is linear, so sums need no rotation back.
May import torch, kernels, layout, rng.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_quant.kernels import dispatch
from ds_quant.layout import round_up
from ds_quant.rng import Address, philox4x32

BLOCKS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Walsh-Hadamard transform of blocks of consecutive elements.

    block: 32, 64 or 128 elements.
    signs: stream of the sign flips before the transform, one pattern for all blocks, equal on all
        ranks; None for none. Without flips a block of equal values becomes one spike.
    """

    block: int
    signs: Address | None = None

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"rotation block = {self.block}: allowed are {BLOCKS}")

    def padded(self, numel: int) -> int:
        """Elements of a rotated run: whole blocks."""
        return round_up(numel, self.block)

    def forward(self, x: Tensor) -> Tensor:
        """(numel,) floating point -> (padded(numel),) fp32; x is not modified."""
        out = torch.empty(self.padded(x.numel()), dtype=torch.float32, device=x.device)
        dispatch.rotate(x.detach(), out, self.block, signs=self._signs(x.device))
        return out

    def inverse_(self, x: Tensor, *, scale: float = 1.0) -> None:
        """x = scale * (what ``forward`` made it from), in place; (padded,) fp32 contiguous."""
        dispatch.unrotate_(x, self.block, scale=scale, signs=self._signs(x.device))

    def _signs(self, device: torch.device) -> Tensor | None:
        if self.signs is None:
            return None
        words = philox4x32((0, 0, *self.signs.step_words), self.signs.key_words)
        bits = [word >> i & 1 for word in words for i in range(32)]
        return torch.tensor(bits[: self.block], device=device).to(torch.float32) * 2 - 1
