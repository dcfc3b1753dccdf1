"""One task of batch.py in torch: by the reference, or by the functions of a user's codec."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ds_quant.kernels import reference
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Offsets,
    Operation,
    Recode,
    Rotate,
    Sum,
)
from ds_quant.kernels.reference import Rotation
from ds_quant.kernels.wire import FP32_BYTES, Cast, Codec, GroupFormat, UserFormat

if TYPE_CHECKING:
    from ds_quant.kernels.dispatch import RngState


class TorchTask(NamedTuple):
    """A task with its buffers and RNG state."""

    operation: Operation
    offsets: Offsets
    buffers: Sequence[Tensor]
    rng_state: RngState

    def run(self) -> None:
        """Carry out the task."""
        if self.operation.numel > 0:
            _carry_out(self.operation, self)

    @property
    def rotation(self) -> Rotation | None:
        """Rotation of the operation's stream; None if the operation does not rotate."""
        operation = self.operation
        if isinstance(operation, Decode) or not operation.block:
            return None
        return self.rng_state.rotations[operation.stream]

    def elements(self, buffer: int, start: int) -> Tensor:
        """View of the operation's elements in a buffer."""
        return _view(self.buffers[buffer], start, self.operation.numel)

    def message(self, operation: Encode | Recode) -> Tensor:
        """View of the encoded bytes, (1, bytes)."""
        nbytes = operation.codec.wire_bytes(operation.on_wire)
        return _rows(self.buffers[operation.wire], self.offsets.wire, nbytes)

    def messages(self, operation: Sum | Recode, nbytes: int) -> Tensor:
        """View of the messages that are added up, (sources, nbytes)."""
        wire = self.buffers[operation.wire_in]
        return _rows(wire, self.offsets.wire_in, nbytes, operation.sources, operation.stride)

    def restored(self, operation: Recode) -> Tensor:
        """Return the sum that is recoded, rotated back."""
        total = self.empty_sum(operation, operation.numel)
        rotation = self.rotation
        _add_up(operation, self, operation.source, total, rotation=rotation)
        return total

    def empty_sum(self, operation: Recode, numel: int) -> Tensor:
        """Allocate fp32; zero.Init would give torch.empty the dtype of the parameters."""
        device = self.buffers[operation.wire_in].device
        nbytes = FP32_BYTES * numel
        return torch.empty(nbytes, dtype=torch.uint8, device=device).view(torch.float32)

    def levels(self, codec: GroupFormat) -> Tensor | None:
        """Table of the levels of a codec: the stream's learned ones, or the codec's own."""
        stream = self.operation.stream
        return codec.table(self.rng_state.bound_codecs[stream].levels, self.buffers[0].device)


# ---- one function per operation ----


@singledispatch
def _carry_out(operation: Operation, task: TorchTask) -> None:
    raise TypeError(f"operation = {operation!r}: torch has no function for it")


@_carry_out.register
def _encode(operation: Encode, task: TorchTask) -> None:
    values = task.elements(operation.values, task.offsets.values).detach()[None]
    base = None
    if operation.base is not None:
        base = task.elements(operation.base, task.offsets.base).detach()[None]
    _write_message(operation, task, values, base, task.rotation)


@_carry_out.register
def _decode(operation: Decode, task: TorchTask) -> None:
    codec = operation.codec
    nbytes = codec.wire_bytes(operation.numel)
    wire = _rows(task.buffers[operation.wire], task.offsets.wire, nbytes)
    out = task.elements(operation.values, task.offsets.values).detach()[None]
    if codec.kind == "groups":
        reference.decode(wire, out, codec, levels=task.levels(codec), add=operation.add)
        return
    values = _decoded(codec, wire, operation.numel)
    out.copy_(values + out if operation.add else values)


@_carry_out.register
def _sum(operation: Sum, task: TorchTask) -> None:
    _add_up(
        operation,
        task,
        operation.codec,
        task.elements(operation.values, task.offsets.values),
        scale=operation.scale,
        rotation=task.rotation,
        own_signs=operation.flips == OWN_SIGNS,
    )


@_carry_out.register
def _recode(operation: Recode, task: TorchTask) -> None:
    total = task.empty_sum(operation, operation.on_wire)
    _add_up(operation, task, operation.source, total)
    _write_message(operation, task, total[None])


@_carry_out.register
def _rotate(operation: Rotate, task: TorchTask) -> None:
    values = task.elements(operation.values, task.offsets.values).detach()
    buffer = task.buffers[operation.rotated]
    rotated = _view(buffer, task.offsets.rotated, operation.padded)
    rotation = task.rotation
    if rotation is None:
        rotated.copy_(values)
    else:
        reference.rotate(values, rotated, rotation)


# ---- messages ----


def _write_message(
    operation: Encode | Recode,
    task: TorchTask,
    x: Tensor,  # (1, numel)
    base: Tensor | None = None,  # (1, numel), subtracted from x
    rotation: Rotation | None = None,  # of x, or x - base
) -> None:
    """Encode x into the message of a task."""
    codec = operation.codec
    wire = task.message(operation)
    address = task.rng_state.address(operation.stream, task.offsets.vector)
    if codec.kind == "groups":
        levels = task.levels(codec)
        reference.encode(
            x, wire, codec, address=address, levels=levels, base=base, rotation=rotation
        )
        return
    if base is not None:
        x = x.float() - base.float()
    if rotation is not None:
        rotated = x.new_empty(operation.on_wire, dtype=torch.float32)
        reference.rotate(x[0], rotated, rotation)
        x = rotated[None]
    if codec.kind == "module":
        codec.write(x, wire, address)
        return
    nbytes = x.shape[1] * codec.dtype.itemsize
    wire[:, nbytes:].zero_()
    wire[:, :nbytes].copy_(x.to(codec.dtype).contiguous().view(torch.uint8))


def _add_up(
    operation: Sum | Recode,
    task: TorchTask,
    codec: Codec,
    out: Tensor,  # (numel,)
    *,
    scale: float = 1.0,
    rotation: Rotation | None = None,  # to undo
    own_signs: bool = False,  # row k has the sign flips of the k-th sender
) -> None:
    """out = scale * the sum of the messages and this rank's own row."""
    numel = operation.on_wire
    wire = task.messages(operation, codec.wire_bytes(numel))
    own = None
    if operation.own_row is not None:
        own = operation.own_row, _view(task.buffers[operation.own], task.offsets.own, numel)
    if codec.kind != "groups":
        rows = _decoded_rows(codec, wire, numel, own)
        _add_up_decoded(rows, out.detach(), scale, rotation)
        return
    reference.decode_sum(
        wire,
        out.detach(),
        codec,
        scale=scale,
        own=own,
        levels=task.levels(codec),
        rotation=rotation,
        own_signs=own_signs,
    )


def _add_up_decoded(
    rows: Sequence[Tensor],  # (numel,) each
    out: Tensor,  # (numel,), or without what fills the last rotation block
    scale: float,
    rotation: Rotation | None,
) -> None:
    """out = scale * the sum of the rows, rotated back."""
    total = rows[0].float().clone()
    for row in rows[1:]:
        total += row
    if rotation is not None:
        reference.unrotate_(total, rotation, scale=scale)
    elif scale != 1.0:
        total *= scale
    out.copy_(total[: len(out)])


def _decoded_rows(
    codec: Cast | UserFormat, wire: Tensor, numel: int, own: tuple[int, Tensor] | None
) -> list[Tensor]:
    """Return the numbers (numel,) of every message, and this rank's own row among them."""
    rows = [_decoded(codec, row[None], numel)[0] for row in wire]
    if own is not None:
        rows.insert(*own)
    return rows


def _decoded(codec: Cast | UserFormat, wire: Tensor, numel: int) -> Tensor:
    """Return the numbers (rows, numel) of a codec that has no groups."""
    if codec.kind == "module":
        return codec.read(wire, numel)
    used = wire[:, : numel * codec.dtype.itemsize]
    return used.clone(memory_format=torch.contiguous_format).view(codec.dtype)


# ---- views ----


def _view(buffer: Tensor, start: int, numel: int) -> Tensor:
    return buffer.as_strided((numel,), (1,), buffer.storage_offset() + start)


def _rows(buffer: Tensor, start: int, nbytes: int, rows: int = 1, stride: int = 0) -> Tensor:
    step = stride if rows > 1 else nbytes  # 0 if all are the same row
    return buffer.as_strided((rows, nbytes), (step, 1), buffer.storage_offset() + start)
