"""Bind a codec to one tensor of a collective: random bits, levels, rotation, reference.

A rotation wraps a whole reduction: once before the first encode, once after the last sum; the
quantizers in between all see rotated values. It is linear, so sums of values with equal signs need
no rotation back; where nodes have signs of their own, the last sum rotates each of its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.codec import CAST_NAMES, CastCodec, Codec, GroupCodec
from ds_quant.kernels.batch import Decode, Encode, Operation, Sum
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import Rotation
from ds_quant.kernels.run import Operations, Streams
from ds_quant.kernels.wire import round_up

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

    @torch.no_grad()
    def error(
        self,
        values: Tensor,
        wire: Tensor,
        *,
        reference: Tensor | None = None,
        rotation: Rotation | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Squared error and squared norm of what ``encode`` got, (2,) fp64 on the device, read back
        from its message; of the weights, not of their difference.
        """
        how = {"levels": self.levels, "backend": backend}
        if self.difference:
            values, found = values.to(reference.dtype), reference.clone()
            decode(self.codec, _rows(wire), _rows(found), add=True, **how)
        else:
            found = values.new_empty(values.numel(), dtype=torch.float32)
            decode_sum(self.codec, _rows(wire), found, rotation=rotation, **how)
        return squares(found, values)


@cache
def exactly(dtype: torch.dtype, *, tight: bool = False) -> Coding:
    """Return the coding that sends values of `dtype` unchanged; ``tight``: as a small tensor."""
    return Coding(codec=CastCodec(dtype, tight))


def _rows(tensor: Tensor) -> Tensor:
    """(n,) as the one row (1, n); rows as they are."""
    return tensor.view(1, -1) if tensor.dim() == 1 else tensor


def squares(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact|^2 and |exact|^2, run by run: a gradient may be large, and memory scarce."""
    sums = torch.zeros(2, dtype=torch.float64, device=exact.device)
    runs = found.reshape(-1).split(_RUN), exact.reshape(-1).split(_RUN)
    for a, b in zip(*runs, strict=True):
        b = b.float()
        sums[0] += (a.float() - b).square().sum(dtype=torch.float64)
        sums[1] += b.square().sum(dtype=torch.float64)
    return sums


# ---- single tensors ----


def encode(
    codec: Codec,
    x: Tensor,  # (rows, numel) floating point
    out: Tensor,  # (rows, bytes) uint8
    *,
    address: Address | None = None,
    levels: Tensor | None = None,  # (2^bits,) fp32
    base: Tensor | None = None,  # (rows, numel) floating point, subtracted from x in fp32
    rotation: Rotation | None = None,  # of x, or x - base
    backend: str = "auto",
) -> None:
    """Encode the rows of x, each a row of bytes; with a rotation whole blocks of it.

    Raises ``ValueError`` for shapes, dtypes and options that the codec does not take.
    """
    block = 0 if rotation is None else rotation.block
    on_wire = round_up(x.shape[-1], block or 1)
    _check(codec, ("x", x), ("out", out), on_wire, block)
    if getattr(codec, "rounding", "nearest") != "nearest" and address is None:
        raise ValueError(f"address = None: rounding {codec.rounding!r} needs an Address")
    if x.numel() == 0:
        return
    wire, place = _dense(out, copy=False), 2 if base is not None else None
    buffers = [_dense(x), wire] + ([] if base is None else [_dense(base)])
    flips = rotation is not None and rotation.flips is not None
    operation = Encode(codec, x.shape[1], 0, 1, 0, block, flips, place)
    step = 0 if address is None else address.vectors_per_row(on_wire)
    steps = [buffers[0].stride(0), wire.stride(0), step]
    steps += [] if base is None else [buffers[2].stride(0)]
    _run(operation, len(x), steps, buffers, Coding(codec, address, levels), rotation, backend)
    if wire is not out:
        out.copy_(wire)


def decode(
    codec: Codec,
    wire: Tensor,  # (rows, bytes) uint8
    out: Tensor,  # (rows, numel) floating point
    *,
    levels: Tensor | None = None,
    add: bool = False,  # in fp32 to what ``out`` holds
    backend: str = "auto",
) -> None:
    """Decode every row and cast once to the dtype of ``out``. ``ValueError`` as of ``encode``."""
    _check(codec, ("out", out), ("wire", wire), out.shape[-1])
    if out.numel() == 0:
        return
    buffers = [_dense(wire), _dense(out)]
    steps = [buffer.stride(0) for buffer in buffers]
    operation = Decode(codec, out.shape[1], 0, 1, 0, add)
    _run(operation, len(out), steps, buffers, Coding(codec, None, levels), None, backend)
    if buffers[1] is not out:
        out.copy_(buffers[1])


def decode_sum(
    codec: Codec,
    wire: Tensor,  # (rows, bytes) uint8
    out: Tensor,  # (numel,) floating point
    *,
    scale: float = 1.0,
    own: Own | None = None,  # place, (numel on the wire,) floating point
    levels: Tensor | None = None,
    rotation: Rotation | None = None,  # to undo
    backend: str = "auto",
) -> None:
    """out = scale * sum of the rows: fp32, in order, rotated back, scaled and cast once.

    The values ``own[1]`` are added as row ``own[0]``, which the wire leaves out. ``ValueError`` as
    of ``encode``.
    """
    block = 0 if rotation is None else rotation.block
    on_wire = round_up(out.shape[0], block or 1)
    if out.dim() != 1 or out.dtype not in CAST_NAMES:
        allowed = " or ".join(CAST_NAMES.values())
        raise ValueError(f"out: shape {tuple(out.shape)} {out.dtype}, must be (numel,) {allowed}")
    _check(codec, ("out", out.expand(len(wire), -1)), ("wire", wire), on_wire, block)
    if len(wire) == 0 and own is None:
        out.zero_()
    if out.numel() == 0 or (len(wire) == 0 and own is None):
        return
    place, values = own or (None, out.new_empty(0))
    buffers = [_dense(wire), _dense(out[None])[0], _dense(values[None].float())[0]]
    operation = Sum(
        codec, len(out), wire_in=0, values=1, stream=0, sources=len(wire),
        stride=buffers[0].stride(0), place=place, own=2, block=block,
        flips=rotation is not None and rotation.flips is not None, scale=scale,
    )  # fmt: skip
    _run(operation, 1, [0] * 3, buffers, Coding(codec, None, levels), rotation, backend)
    if buffers[1].data_ptr() != out.data_ptr():
        out.copy_(buffers[1])


def _run(
    operation: Operation,
    rows: int,
    steps: Sequence[int],
    buffers: list[Tensor],
    coding: Coding,
    rotation: Rotation | None,
    backend: str,
) -> None:
    table = coding.codec.table(coding.levels, buffers[0].device)  # refuses what does not fit
    coding = coding._replace(levels=None if coding.levels is None else table)
    tasks = [(operation, tuple(row * step for step in steps)) for row in range(rows)]
    Operations(tasks).run(buffers, Streams([coding], [rotation]), backend=backend)


def _dense(rows: Tensor, *, copy: bool = True) -> Tensor:
    """Rows without holes, in a dtype that messages can have; ``copy``: the content, too."""
    dtype = rows.dtype if rows.dtype in _DENSE else torch.float32
    if dtype == rows.dtype and (rows.stride(-1) == 1 or rows.shape[-1] == 1):
        return rows.detach()
    dense = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    return dense.copy_(rows.detach()) if copy else dense


_DENSE = (torch.uint8, *CAST_NAMES)


def _check(
    codec: Codec, values: tuple[str, Tensor], wire: tuple[str, Tensor], on_wire: int, block: int = 0
) -> None:
    """Named tensors: rows of values and of bytes."""
    name, rows = values
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            f"{name}: shape {tuple(rows.shape)} {rows.dtype}, must be (rows, numel) floating point"
        )
    (name, found), expected = wire, (len(rows), codec.wire_bytes(on_wire))
    if found.shape != expected or found.dtype != torch.uint8:
        raise ValueError(
            f"{name}: shape {tuple(found.shape)} {found.dtype}, must be {expected} uint8"
        )
    if block and isinstance(codec, GroupCodec) and codec.group_size % block:
        raise ValueError(f"rotation block = {block}: must divide group_size = {codec.group_size}")
    if isinstance(codec, GroupCodec) and codec.is_gaussian and on_wire % codec.group_size:
        raise ValueError(
            f"numel = {rows.shape[1]} with range = 'gaussian': allowed are multiples of "
            f"{codec.group_size}, or a rotation of {codec.group_size}"
        )
