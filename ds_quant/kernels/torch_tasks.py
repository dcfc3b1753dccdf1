"""One task of batch.py in torch: by the reference, or by the functions of a user's codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ds_quant.kernels import reference
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Operation,
    Places,
    Recode,
    Rotate,
    Sum,
)
from ds_quant.kernels.reference import Rotation
from ds_quant.kernels.wire import FP32_BYTES, Cast, Codec, UserFormat

if TYPE_CHECKING:
    from ds_quant.kernels.dispatch import RngState


class TorchTask(NamedTuple):
    """A task with its buffers and RNG state.

    Methods take the operation as an argument if they need members that not all operations have.
    """

    operation: Operation
    places: Places
    buffers: Sequence[Tensor]
    rng_state: RngState

    def run(self) -> None:
        """Carry out the task."""
        op = self.operation
        if op.numel == 0:
            return
        if isinstance(op, Encode):
            values = self.elements(op.values, self.places[0]).detach()[None]
            base = None
            if op.base is not None:
                base = self.elements(op.base, self.places[3]).detach()[None]
            self._encode(op, values, self.places[2], base, self.rotation)
        elif isinstance(op, Decode):
            self._decode(op)
        elif isinstance(op, Sum):
            out = self.elements(op.values, self.places[1])
            own_signs = op.flips == OWN_SIGNS
            self._add_up(op, op.codec, out, op.scale, self.rotation, own_signs)
        elif isinstance(op, Recode):
            total = self._empty(op, op.on_wire)
            self._add_up(op, op.source, total, 1.0, None)
            self._encode(op, total[None], self.places[3], None, None)
        else:
            self._rotate(op)

    @property
    def rotation(self) -> Rotation | None:
        """Rotation of the operation's stream; None if the operation does not rotate."""
        op = self.operation
        if isinstance(op, Decode) or not op.block:
            return None
        return self.rng_state.rotations[op.stream]

    def elements(self, buffer: int, start: int) -> Tensor:
        """View of the operation's elements in a buffer."""
        return _view(self.buffers[buffer], start, self.operation.numel)

    def message(self, op: Encode | Recode) -> Tensor:
        """View of the encoded bytes, (1, bytes)."""
        nbytes = op.codec.wire_bytes(op.on_wire)
        return _rows(self.buffers[op.wire], self.places[1], nbytes)

    def restored(self, op: Recode) -> Tensor:
        """Return the sum that is recoded, rotated back."""
        total = self._empty(op, op.numel)
        self._add_up(op, op.source, total, 1.0, self.rotation)
        return total

    def _empty(self, op: Recode, numel: int) -> Tensor:
        """Allocate fp32; zero.Init would give torch.empty the dtype of the parameters."""
        device = self.buffers[op.wire_in].device
        nbytes = FP32_BYTES * numel
        return torch.empty(nbytes, dtype=torch.uint8, device=device).view(torch.float32)

    def _encode(
        self,
        op: Encode | Recode,
        x: Tensor,
        vector: int,
        base: Tensor | None,
        rotation: Rotation | None,
    ) -> None:
        codec = op.codec
        wire = self.message(op)
        address = self.rng_state.address(op.stream, vector)
        if codec.kind == "groups":
            reference.encode(
                x,
                wire,
                codec,
                address=address,
                levels=codec.table(self.rng_state.bound_codecs[op.stream].levels, x.device),
                base=base,
                rotation=rotation,
            )
            return
        if base is not None:
            x = x.float() - base.float()
        if rotation is not None:
            rotated = x.new_empty(op.on_wire, dtype=torch.float32)
            reference.rotate(x[0], rotated, rotation)
            x = rotated[None]
        if codec.kind == "module":
            codec.write(x, wire, address)
            return
        nbytes = x.shape[1] * codec.dtype.itemsize
        wire[:, nbytes:].zero_()
        wire[:, :nbytes].copy_(x.to(codec.dtype).contiguous().view(torch.uint8))

    def _decode(self, op: Decode) -> None:
        codec = op.codec
        wire = _rows(self.buffers[op.wire], self.places[0], codec.wire_bytes(op.numel))
        out = self.elements(op.values, self.places[1]).detach()[None]
        if codec.kind == "groups":
            levels = codec.table(self.rng_state.bound_codecs[op.stream].levels, wire.device)
            reference.decode(wire, out, codec, levels=levels, add=op.add)
            return
        values = _decoded(codec, wire, op.numel)
        out.copy_(values + out if op.add else values)

    def _rotate(self, op: Rotate) -> None:
        values = self.elements(op.values, self.places[0]).detach()
        rotated = _view(self.buffers[op.rotated], self.places[1], op.padded)
        rotation = self.rotation
        if rotation is None:
            rotated.copy_(values)
        else:
            reference.rotate(values, rotated, rotation)

    def _add_up(
        self,
        op: Sum | Recode,
        codec: Codec,
        out: Tensor,
        scale: float,
        rotation: Rotation | None,
        own_signs: bool = False,
    ) -> None:
        nbytes = codec.wire_bytes(op.on_wire)
        wire = _rows(self.buffers[op.wire_in], self.places[0], nbytes, op.sources, op.stride)
        own = None
        if op.own_row is not None:
            own = op.own_row, _view(self.buffers[op.own], self.places[2], op.on_wire)
        out = out.detach()
        if codec.kind == "groups":
            reference.decode_sum(
                wire,
                out,
                codec,
                scale=scale,
                own=own,
                levels=codec.table(self.rng_state.bound_codecs[op.stream].levels, wire.device),
                rotation=rotation,
                own_signs=own_signs,
            )
            return
        rows = [_decoded(codec, row[None], op.on_wire)[0] for row in wire]
        if own is not None:
            rows.insert(*own)
        total = rows[0].float().clone()
        for row in rows[1:]:
            total += row
        if rotation is not None:
            reference.unrotate_(total, rotation, scale=scale)
        elif scale != 1.0:
            total *= scale
        out.copy_(total[: len(out)])


def _decoded(codec: Cast | UserFormat, wire: Tensor, numel: int) -> Tensor:
    """Return the numbers (rows, numel) of a codec that has no groups."""
    if codec.kind == "module":
        return codec.read(wire, numel)
    used = wire[:, : numel * codec.dtype.itemsize]
    return used.clone(memory_format=torch.contiguous_format).view(codec.dtype)


def _view(buffer: Tensor, start: int, numel: int) -> Tensor:
    return buffer.as_strided((numel,), (1,), buffer.storage_offset() + start)


def _rows(buffer: Tensor, start: int, nbytes: int, rows: int = 1, stride: int = 0) -> Tensor:
    step = stride if rows > 1 else nbytes  # 0 if all are the same row
    return buffer.as_strided((rows, nbytes), (step, 1), buffer.storage_offset() + start)
