"""The rows of a node shard, which live between the steps, and the gathers that read and write them.

rows      this rank's part of one parameter of the node shard, (nodes, width), see ``ShardRows``
exchange  updates the rows between the nodes, after the optimizer step
gather    reads full parameters from the rows of the ranks of a node
lossless  an exchange of lossless differences, see ``LosslessRows``

[Note: strided layout] of rows.py says which shards a rank keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.comm.lossless_gather import LosslessGather, joined
from ds_quant.comm.rows import even_layout, new_values, plan_exchange, plan_node_gather
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.wire import ALIGNMENT, ceil_div, round_up

# ---- memory ----


class RowArena:
    """Memory for long-lived tensors, end to end, so that they can be sent without a copy.

    Tensors are cut out of large blocks, because torch rounds page-locked blocks up to powers of
    two.

    nbytes: bytes of all tensors together.
    zeros: allocates a block of zeros of a number of bytes, (bytes,) uint8.
    """

    _BLOCK_BYTES = 1 << 28

    def __init__(self, nbytes: int, zeros: Callable[[int], torch.Tensor]) -> None:
        self._bytes_to_come = nbytes
        self._new_block = zeros
        self._free = torch.empty(0, dtype=torch.uint8)  # the end of the current block

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous zeros, 16-byte aligned."""
        nbytes = math.prod(shape) * dtype.itemsize
        padded_bytes = round_up(nbytes, ALIGNMENT)
        if padded_bytes > self._free.numel():
            block_bytes = min(self._BLOCK_BYTES, self._bytes_to_come)
            self._free = self._new_block(max(padded_bytes, block_bytes))
        self._bytes_to_come -= padded_bytes
        taken = self._free[:nbytes]
        self._free = self._free[padded_bytes:]
        return taken.view(dtype).view(shape)


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """This rank's rows of one parameter in the node shard, see [Note: strided layout].

    numel: elements of the parameter.
    local: this rank's index in its node.
    rows: (nodes, width), in the dtype of the weights; elements past a shard's end stay zero.
    device: device of the collectives if the rows are in host memory; None if they are on it.
    """

    numel: int
    node_size: int
    local: int
    rows: Tensor
    device: torch.device | None = None

    @classmethod
    def allocate(
        cls,
        numel: int,
        *,
        nodes: int,
        node_size: int,
        local: int,
        dtype: torch.dtype,
        arena: RowArena,
        device: torch.device | None = None,
    ) -> ShardRows:
        """Allocate rows of zeros in ``arena``."""
        rows = arena.zeros(nodes, ceil_div(numel, nodes * node_size), dtype=dtype)
        return cls(numel=numel, node_size=node_size, local=local, rows=rows, device=device)


def on_device(rows: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """Return rows on the device of the collectives; None: they are on it.

    Rows in host memory are copied, in order of the current stream.
    """
    if device is None:
        return list(rows)
    return [row.to(device, non_blocking=True) for row in rows]


def update_rows(rows: Sequence[Tensor], updated: Sequence[Tensor]) -> None:
    """Copy updated rows back into the node shard."""
    torch._foreach_copy_(list(rows), list(updated), non_blocking=True)


# ---- between the nodes ----


def chunk_ranges(widths: Sequence[int], most_numel: int) -> list[range]:
    """Cut consecutive tensors into chunks of at most ``most_numel`` elements, or of one tensor.

    widths: elements that this rank sends of every tensor.
    """
    chunks: list[range] = []
    start = 0
    numel = 0
    for index, width in enumerate(widths):
        if index > start and numel + width > most_numel:
            chunks.append(range(start, index))
            start = index
            numel = 0
        numel += width
    if widths:
        chunks.append(range(start, len(widths)))
    return chunks


def exchange(
    node_rows: Sequence[ShardRows],
    shards: Sequence[Tensor],
    bound_codecs: Sequence[BoundCodec],
    inter: Communicator,
) -> Pending[list[Tensor]] | Pending[None]:
    """Update all rows of every parameter to the decoded values of their owners.

    Rows of this rank's own shards take decoded values too, so all nodes hold equal bits.

    1. Encode this rank's shards, or their differences to the rows.
    2. Post the all-gather between the nodes.
    3. When the result is waited for, decode into the rows; rows in host memory through copies.

    Args:
        node_rows: all in host memory, or none.
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        bound_codecs: per parameter; the addresses are this rank's own.
        inter: the ranks of equal local rank.
    """
    first = node_rows[0]
    differences = tuple([bound.difference for bound in bound_codecs])
    message = plan_exchange(
        even_layout(tuple([item.numel for item in node_rows]), inter.size * first.node_size),
        tuple([bound.codec for bound in bound_codecs]),
        differences,
        inter.rank,
        first.local,
        first.node_size,
    )
    kept = [item.rows for item in node_rows]
    device = first.device
    # Only differences read the rows when they are encoded.
    reads_rows = device is None or any(differences)
    rows = on_device(kept, device) if reads_rows else list(shards)
    # Differences are taken from rounded values: see docs/wire_format.md.
    values = [
        shard.to(row.dtype) if is_difference else shard
        for shard, row, is_difference in zip(shards, kept, differences, strict=True)
    ]
    tensors = [*rows, *values]
    if device is None:
        return message.gather(inter, tensors, bound_codecs, lambda: rows)
    updated = message.gather(inter, tensors, bound_codecs, partial(on_device, kept, device))
    return updated.then(partial(update_rows, kept))


# ---- inside the node ----


def gather(
    node_rows: Sequence[ShardRows], bound_codecs: Sequence[BoundCodec], intra: Communicator | None
) -> Pending[list[Tensor]]:
    """Gather full parameters, (numel,) each, in shard order, from the rows of the ranks of a node.

    Every rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    device = node_rows[0].device
    rows = on_device([item.rows for item in node_rows], device)
    numels = tuple([item.numel for item in node_rows])
    if intra is None:
        # Copies to the device begin now, ahead of their use.
        full = [row.view(-1)[:numel] for row, numel in zip(rows, numels, strict=True)]
        if device is not None:
            return Pending(lambda: full)
        return Pending(lambda: [values.clone() for values in full])
    nodes = len(rows[0])
    message = plan_node_gather(
        even_layout(numels, nodes * intra.size),
        tuple([bound.codec for bound in bound_codecs]),
        intra.rank,
        intra.size,
    )
    shapes = [(numel, row.dtype) for numel, row in zip(numels, rows, strict=True)]
    targets = partial(new_values, shapes, rows[0].device)
    return message.gather(intra, rows, bound_codecs, targets, values_stay=True)


# ---- lossless differences between the nodes ----


class LosslessRows(NamedTuple):
    """Rows of the node shard, end to end: the ``Source`` of one lossless message.

    They are padded with zeros to equal width. The padding stays zero.

    rows: (nodes, width) each, of one dtype.
    node: index of this node.
    new_rows: returns this rank's new rows, (width,) each, or (length,) without padding.
    device: device of the collectives if the rows are in host memory; None if they are on it.
    """

    rows: Sequence[Tensor]
    node: int
    new_rows: Callable[[], Sequence[Tensor]]
    device: torch.device | None = None

    @property
    def numel(self) -> int:
        """Elements that one rank sends."""
        return sum([rows.shape[1] for rows in self.rows])

    def values(self) -> tuple[Tensor, Tensor]:
        """Return this rank's new rows, and the old ones that all nodes hold."""
        new_rows: list[Tensor] = []
        for rows, new_row in zip(self.rows, self.new_rows(), strict=True):
            new_rows.append(new_row)
            padding = rows.shape[1] - new_row.numel()
            if padding:
                new_rows.append(new_row.new_zeros(padding))
        old_rows = [rows[self.node] for rows in self.rows]
        return joined(new_rows), joined(on_device(old_rows, self.device))

    def reference(self) -> Tensor:
        """Return the old rows of all nodes, (nodes, elements)."""
        return joined(on_device(self.rows, self.device))

    def update(self, values: Tensor) -> None:
        """Store new values of the rows that ``reference`` has returned."""
        # A single tensor of rows on the device was updated in place.
        if len(self.rows) > 1 or self.device is not None:
            widths = [rows.shape[1] for rows in self.rows]
            update_rows(self.rows, values.split(widths, dim=1))

    def post(self, gathers: LosslessGather, index: int) -> Pending[None]:
        """Post the gather of message ``index``, which updates the rows of all nodes."""
        return gathers.post(index, self.reference).then(self.update)
