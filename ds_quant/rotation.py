"""Hadamard smoothing of a reduction (SDP4Bit, section 3.2): spreads an outlier over its block.

A rotation wraps a whole reduction: once before the first encode, once after the last sum; the
quantizers in between all see rotated values. It is linear, so sums need no rotation back.
May import torch, kernels, layout, rng.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_quant.kernels import dispatch
from ds_quant.kernels import rotation as kernels
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

    @property
    def kernel(self) -> kernels.Rotation:
        """As the kernels take it: with the flips as bits."""
        flips = None if self.signs is None else _flips(self.signs) & (1 << self.block) - 1
        return kernels.Rotation(self.block, flips)

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(numel,) floating point -> (padded(numel),) fp32, ``out`` if given; x is not modified."""
        if out is None:
            out = torch.empty(self.padded(x.numel()), dtype=torch.float32, device=x.device)
        dispatch.rotate(x.detach(), out, self.kernel)
        return out

    def inverse_(self, x: Tensor, *, scale: float = 1.0) -> None:
        """x = scale * (what ``forward`` made it from), in place; (padded,) fp32 contiguous."""
        dispatch.unrotate_(x, self.kernel, scale=scale)


@lru_cache(maxsize=64)
def _flips(signs: Address) -> int:
    """128 random bits; set: the sign changes."""
    words = philox4x32((0, 0, *signs.step_words), signs.key_words)
    return ~sum(word << 32 * i for i, word in enumerate(words))
