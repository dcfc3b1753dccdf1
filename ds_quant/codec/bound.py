"""Bind a codec to one tensor of a collective: random bits, levels, rotation, reference.

A rotation wraps a whole reduction: once before the first encode, once after the last sum; the
quantizers in between all see rotated values. It is linear, so sums of values with equal signs need
no rotation back; where nodes have signs of their own, the last sum rotates each of its sources.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.kernels.batch import Decode, Encode, Offsets, Operation, Sum
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import Rotation

# ---- one tensor of a collective ----


Own = tuple[int, Tensor]  # a row of a sum that is not on the wire: its place and values

VECTORS_PER_ELEMENT = 16  # see BoundCodec.at

_RUN = 1 << 22  # elements


class BoundCodec(NamedTuple):
    """Codec of one tensor in one collective.

    address: of the random bits; None if the codec takes none.
    levels: the learned table, if there is one.
    difference: True if receivers add the decoded values to those they hold; needs a GroupCodec.
    """

    codec: Codec
    address: Address | None = None
    levels: Tensor | None = None
    difference: bool = False

    def at(self, start: int) -> BoundCodec:
        """Return the bound codec of the elements from ``start`` on, with random bits of their own.

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
        """Return squared error and squared norm of an encoded message as (2,) fp64.

        For differences, relative to the weights: ``reference`` has the values they are added to.
        """
        if not self.difference:
            decoded = values.new_empty(values.numel(), dtype=torch.float32)
            decode_sum(
                self.codec,
                _rows(wire),
                decoded,
                levels=self.levels,
                rotation=rotation,
                backend=backend,
            )
            return squares(decoded, values)
        if reference is None:
            raise ValueError("reference = None: a difference needs the values it is added to")
        decoded = reference.clone()
        decode(
            self.codec,
            _rows(wire),
            _rows(decoded),
            levels=self.levels,
            add=True,
            backend=backend,
        )
        return squares(decoded, values.to(reference.dtype))


@cache
def full_precision(dtype: torch.dtype, *, tight: bool = False) -> BoundCodec:
    """Return the bound codec that sends values of ``dtype`` unchanged.

    tight: without padding, as small tensors are sent: [Note: small tensors] of
        comm/small_tensors.py.
    """
    return BoundCodec(codec=CastCodec(dtype, tight))


def _rows(tensor: Tensor) -> Tensor:
    """(n,) as the one row (1, n); rows as they are."""
    return tensor.view(1, -1) if tensor.dim() == 1 else tensor


def squares(decoded: Tensor, exact: Tensor) -> Tensor:
    """Return |decoded - exact|^2 and |exact|^2, in runs that need little memory."""
    sums = torch.zeros(2, dtype=torch.float64, device=exact.device)
    decoded_runs = decoded.reshape(-1).split(_RUN)
    exact_runs = exact.reshape(-1).split(_RUN)
    for decoded_run, exact_run in zip(decoded_runs, exact_runs, strict=True):
        exact_run = exact_run.float()
        sums[0] += (decoded_run.float() - exact_run).square().sum(dtype=torch.float64)
        sums[1] += exact_run.square().sum(dtype=torch.float64)
    return sums


# ---- single tensors ----


def encode(
    codec: Codec,
    x: Tensor,  # (rows, numel) fp32, bf16 or fp16, each row contiguous
    out: Tensor,  # (rows, bytes) uint8, the same
    *,
    address: Address | None = None,  # rounding other than to nearest needs one
    levels: Tensor | None = None,  # (2^bits,) fp32
    base: Tensor | None = None,  # as x, subtracted from it in fp32
    rotation: Rotation | None = None,  # of x, or x - base
    backend: str = "auto",
) -> None:
    """Encode the rows of x, each a row of bytes; with a rotation whole blocks of it."""
    block = 0 if rotation is None else rotation.block
    flips = rotation is not None and rotation.flips is not None
    operation = Encode(
        codec,
        x.shape[1],
        values=0,
        wire=1,
        stream=0,
        block=block,
        flips=flips,
        base=None if base is None else 2,
    )
    buffers = [x.detach(), out, *([] if base is None else [base.detach()])]
    step = Offsets(
        values=x.stride(0),
        wire=out.stride(0),
        base=0 if base is None else base.stride(0),
        vector=0 if address is None else address.vectors_per_row(operation.on_wire),
    )
    _run(operation, len(x), step, buffers, BoundCodec(codec, address, levels), rotation, backend)


def decode(
    codec: Codec,
    wire: Tensor,  # (rows, bytes) uint8, each row contiguous
    out: Tensor,  # (rows, numel) fp32, bf16 or fp16, the same
    *,
    levels: Tensor | None = None,
    add: bool = False,  # in fp32 to what ``out`` holds
    backend: str = "auto",
) -> None:
    """Decode every row and cast once to the dtype of ``out``."""
    operation = Decode(codec, out.shape[1], wire=0, values=1, stream=0, add=add)
    buffers = [wire, out.detach()]
    step = Offsets(wire=wire.stride(0), values=out.stride(0))
    _run(operation, len(out), step, buffers, BoundCodec(codec, None, levels), None, backend)


def decode_sum(
    codec: Codec,
    wire: Tensor,  # (rows, bytes) uint8, each row contiguous
    out: Tensor,  # (numel,) fp32, bf16 or fp16, contiguous
    *,
    scale: float = 1.0,
    own: Own | None = None,  # place, (numel on the wire,) floating point
    levels: Tensor | None = None,
    rotation: Rotation | None = None,  # to undo
    backend: str = "auto",
) -> None:
    """out = scale * sum of the rows: fp32, in order, rotated back, scaled and cast once.

    The values ``own[1]`` are added as row ``own[0]``, which the wire leaves out.
    """
    if len(wire) == 0 and own is None:
        out.zero_()
        return
    place, values = own or (None, out.new_empty(0))
    operation = Sum(
        codec,
        len(out),
        wire_in=0,
        values=1,
        stream=0,
        sources=len(wire),
        stride=wire.stride(0),
        own_row=place,
        own=2,
        block=0 if rotation is None else rotation.block,
        flips=rotation is not None and rotation.flips is not None,
        scale=scale,
    )
    buffers = [wire, out.detach(), values.float()]
    _run(operation, 1, Offsets(), buffers, BoundCodec(codec, None, levels), rotation, backend)


def _run(
    operation: Operation,
    rows: int,
    step: Offsets,
    buffers: list[Tensor],
    bound_codec: BoundCodec,
    rotation: Rotation | None,
    backend: str,
) -> None:
    # Raises for levels that do not fit the codec.
    table = bound_codec.codec.table(bound_codec.levels, buffers[0].device)
    bound_codec = bound_codec._replace(levels=None if bound_codec.levels is None else table)
    if operation.numel == 0:
        rows = 0
    tasks = [(operation, step.times(row)) for row in range(rows)]
    Operations(tasks).run(buffers, RngState([bound_codec], [rotation]), backend=backend)
