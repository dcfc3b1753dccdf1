"""Bind a codec to one tensor of a collective: random bits, levels, rotation, reference.

A rotation wraps a whole reduction: once before the first encode, once after the last sum; the
quantizers in between all see rotated values. It is linear, so sums need no rotation back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.codec import CastCodec, Codec, GroupCodec, check_bytes
from ds_quant.kernels import dispatch, scratch
from ds_quant.kernels import hadamard as kernels
from ds_quant.kernels.random_bits import Address, philox4x32
from ds_quant.kernels.wire import round_up

# ---- the rotation of a tensor ----


BLOCKS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Walsh-Hadamard transform of blocks of consecutive elements.

    block: 32, 64 or 128 elements.
    signs: stream of the sign flips before the transform, one pattern for all blocks, equal on all
        ranks; None for none. Without flips a block of equal values becomes one spike.
    backend: see GroupCodec.
    """

    block: int
    signs: Address | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise ValueError(f"rotation block = {self.block}: allowed are {BLOCKS}")

    def padded(self, numel: int) -> int:
        """Elements after rotation: `numel` rounded up to whole blocks."""
        return round_up(numel, self.block)

    @property
    def kernel(self) -> kernels.BlockRotation:
        """The rotation with its sign flips as bits, as the kernels take it."""
        flips = None if self.signs is None else _flips(self.signs) & (1 << self.block) - 1
        return kernels.BlockRotation(self.block, flips)

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(numel,) floating point -> (padded(numel),) fp32, ``out`` if given; x is not modified."""
        if out is None:
            out = torch.empty(self.padded(x.numel()), dtype=torch.float32, device=x.device)
        dispatch.on_host(x.device, self.backend).rotate(x.detach(), out, self.kernel)
        return out

    def inverse_(self, x: Tensor, *, scale: float = 1.0) -> None:
        """x = scale * (what ``forward`` made it from), in place; (padded,) fp32 contiguous."""
        dispatch.on_host(x.device, self.backend).unrotate_(x, self.kernel, scale=scale)


@lru_cache(maxsize=64)
def _flips(signs: Address) -> int:
    """Draw 128 random bits; a set bit flips the sign."""
    words = philox4x32((0, 0, *signs.step_words), signs.key_words)
    return ~sum(word << 32 * i for i, word in enumerate(words))


# ---- one tensor of a collective ----


Own = tuple[int, Tensor]  # a row of a sum that is not on the wire: its place and values

VECTORS_PER_ELEMENT = 16  # see Coding.at

_RUN = 1 << 22  # elements


class Coding(NamedTuple):
    """Codec of one tensor in one collective, with all that this use of it needs.

    ``levels`` is the learned table, if any. ``difference``: the bytes are what the receiver adds
    to the values it holds, instead of the values themselves; needs a GroupCodec.
    """

    codec: Codec
    address: Address | None = None
    levels: Tensor | None = None
    difference: bool = False

    def at(self, start: int) -> Coding:
        """Return the coding of the elements from ``start`` on, which have their own random bits.

        n elements, filled up to whole rotation blocks of at most 128, use at most 16 n vectors: so
        16 vectors per element keep the streams of disjoint runs apart.
        """
        if self.address is None or start == 0:
            return self
        key, step, first = self.address.key, self.address.step, self.address.first_vector
        return self._replace(address=Address(key, step, first + VECTORS_PER_ELEMENT * start))

    def encode(
        self,
        values: Tensor,
        wire: Tensor,
        *,
        held: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """values (numel,) -> wire (bytes,), or (rows, numel) -> (rows, bytes).

        held: (numel,), what all ranks hold; needed to send differences. The values are rounded to
        its dtype first, as the code of SDP4Bit does: a weight that stays the same in 16 bits then
        gives exactly zero, which costs the others of its group no precision.
        rotation: the rotated values are encoded; of one row.
        """
        if rotation is not None and not isinstance(self.codec, GroupCodec):
            values, rotation = rotation.forward(values), None
        wire, values, options = _rows(wire), _rows(values), {}
        if rotation is not None:
            options["rotation"] = rotation.kernel
        if self.difference:
            values, options["base"] = _rounded(values, held.dtype), _rows(held)
        self.codec.encode(values, wire, address=self.address, levels=self.levels, **options)

    def recode(
        self, source: Coding, wire: Tensor, out: Tensor, *, numel: int, own: Own | None
    ) -> None:
        """Encode the sum of rows of another coding: wire (rows, bytes) -> out (bytes,).

        ``own[1]``, (numel,), is added as row ``own[0]``, which the wire leaves out.
        """
        check_bytes("wire", wire, source.codec.wire_bytes(numel))
        check_bytes("out", out, self.codec.wire_bytes(numel))
        if isinstance(source.codec, GroupCodec) and isinstance(self.codec, GroupCodec):
            dispatch.recode(
                wire, out, source.codec, self.codec, numel=numel, own=own, address=self.address,
                source_levels=source.codec.table(source.levels, wire.device),
                levels=self.codec.table(self.levels, wire.device),
            )  # fmt: skip
            return
        total = scratch.take("temporary", (numel,), dtype=torch.float32, device=wire.device)
        with dispatch.launch_in_order():
            source.decode_sum(wire, total, own=own)
            self.encode(total, out)

    def sum_dtype(self, wanted: torch.dtype, device: torch.device) -> torch.dtype:
        """The cheapest dtype for ``decode_sum`` to write where `wanted` is needed in the end."""
        if not isinstance(self.codec, GroupCodec):
            return torch.float32
        return dispatch.sum_dtype(self.codec, wanted, device)

    def decode_sum(
        self,
        wire: Tensor,
        out: Tensor,
        *,
        own: Own | None,
        scale: float = 1.0,
        rotation: Rotation | None = None,
    ) -> None:
        """out = scale * sum of rows: wire (rows, bytes) -> (numel,) fp32, or as ``sum_dtype`` says,
        rotated back first.
        """
        options = {"own": own, "levels": self.levels}
        if rotation is None:
            self.codec.decode_sum(wire, out, scale=scale, **options)
        elif isinstance(self.codec, GroupCodec):
            self.codec.decode_sum(wire, out, scale=scale, rotation=rotation.kernel, **options)
        else:
            total = out.new_empty(rotation.padded(out.numel()))
            self.codec.decode_sum(wire, total, **options)
            rotation.inverse_(total, scale=scale)
            out.copy_(total[: out.numel()])

    @torch.no_grad()
    def error(
        self,
        values: Tensor,
        wire: Tensor,
        *,
        held: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Squared error and squared norm of what ``encode`` got, (2,) fp64 on the device, read back
        from its message; of the weights, not of their difference.
        """
        with dispatch.launch_in_order():
            if self.difference:
                values, found = values.to(held.dtype), held.clone()
                self.decode(wire, found)
            elif rotation is not None:
                found = values.new_empty(values.shape, dtype=torch.float32)
                self.decode_sum(wire.view(1, -1), found, own=None, rotation=rotation)
            else:
                found = values.new_empty(values.shape, dtype=torch.float32)
                self.decode(wire, found)
        return squares(found, values)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        """wire (bytes,) -> values (numel,), or (rows, bytes) -> (rows, numel): overwritten, or the
        decoded difference added in fp32.
        """
        wire, values = _rows(wire), _rows(values)
        if self.difference:
            self.codec.decode(wire, values, levels=self.levels, add=True)
        else:
            self.codec.decode(wire, values, levels=self.levels)


@cache
def exactly(dtype: torch.dtype) -> Coding:
    """Return the coding that sends values of `dtype` unchanged."""
    return Coding(codec=CastCodec(dtype))


def _rows(tensor: Tensor) -> Tensor:
    """(n,) as the one row (1, n); rows as they are."""
    return tensor.view(1, -1) if tensor.dim() == 1 else tensor


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to ``dtype``; on the CPU valid until the next call."""
    if values.dtype == dtype:
        return values
    shape, device = tuple(values.shape), values.device
    return scratch.take("temporary", shape, dtype=dtype, device=device).copy_(values)


def squares(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact|^2 and |exact|^2, run by run: a gradient may be large, and memory scarce."""
    sums = torch.zeros(2, dtype=torch.float64, device=exact.device)
    runs = found.reshape(-1).split(_RUN), exact.reshape(-1).split(_RUN)
    for a, b in zip(*runs, strict=True):
        b = b.float()
        sums[0] += (a.float() - b).square().sum(dtype=torch.float64)
        sums[1] += b.square().sum(dtype=torch.float64)
    return sums
