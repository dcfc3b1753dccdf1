"""The node shard: a node's copy of the weights, split over its ranks.

rows      this rank's part of one parameter of the node shard, (nodes, width), see ``ShardRows``
exchange  updates the rows between the nodes, after the optimizer step
gather    reads full parameters from the rows of the ranks of a node

[Note: strided layout] With G ranks per node, ZeRO-3's shard r of a parameter belongs to rank
(node, local) = (r // G, r % G). Local rank g of every node keeps the shards {r : r % G = g} as rows
(nodes, width), row n being shard n * G + g. So an owner's shard lies in the owner's own rows, and
new weights cross between nodes by one all-gather among the ranks of equal g: each byte enters a
node once. A gather inside the node receives [G][nodes][width]; shard order is [nodes][G][width].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import Codec
from ds_quant.comm.message import GatherSlice, Message, new_values
from ds_quant.comm.slots import row_vector
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.wire import ALIGNMENT, ceil_div, round_up, shard_range

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


def rows_on_device(node_rows: Sequence[ShardRows], node: int | None = None) -> list[Tensor]:
    """Return the rows of each parameter on the device, or row ``node`` of each.

    Rows in host memory are copied, in order of the current stream. All parameters are on the device
    or none is.
    """
    if node is None:
        rows = [item.rows for item in node_rows]
    else:
        rows = [item.rows[node] for item in node_rows]
    device = node_rows[0].device
    if device is None:
        return rows
    return [row.to(device, non_blocking=True) for row in rows]


def update_rows(node_rows: Sequence[ShardRows], rows: Sequence[Tensor]) -> None:
    """Copy updated rows back into the node shard."""
    torch._foreach_copy_([item.rows for item in node_rows], list(rows), non_blocking=True)


# ---- between the nodes ----


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
        shards: per parameter this rank's new weights without padding, (length,), on the device.
        bound_codecs: per parameter; the addresses are this rank's own.
        inter: the ranks of equal local rank.
    """
    sizes = tuple(
        [
            (bound.codec, item.numel, bound.difference)
            for bound, item in zip(bound_codecs, node_rows, strict=True)
        ]
    )
    on_host = node_rows[0].device is not None
    any_differs = any([bound.difference for bound in bound_codecs])
    # Only differences read the rows when they are encoded.
    rows = list(shards) if on_host and not any_differs else rows_on_device(node_rows)
    # Differences are taken from rounded values: see docs/wire_format.md.
    values = [
        shard.to(row.dtype) if bound.difference else shard
        for shard, row, bound in zip(shards, rows, bound_codecs, strict=True)
    ]
    first = node_rows[0]
    message = _exchange_message(sizes, inter.size, first.node_size, inter.rank, first.local)
    tensors = [*rows, *values]
    if not on_host:
        return message.gather(inter, tensors, bound_codecs, lambda: rows)
    updated = message.gather(inter, tensors, bound_codecs, partial(rows_on_device, node_rows))
    return updated.then(partial(update_rows, node_rows))


@lru_cache(maxsize=1024)
def _exchange_message(
    sizes: tuple[tuple[Codec, int, bool], ...], nodes: int, node_size: int, node: int, local: int
) -> Message:
    """Plan an exchange; tensors are the rows of all parameters, then their new values.

    sizes: per parameter its codec, its elements, and True if differences are sent.
    """
    slices = []
    for param, (codec, numel, differs) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for row in range(nodes):
            start, stop = shard_range(numel, nodes * node_size, row * node_size + local)
            slices.append(
                GatherSlice(
                    peer=row,
                    codec=codec,
                    numel=stop - start,
                    stream=param,
                    source=(len(sizes) + param, 0),
                    target=(param, row * width),
                    is_difference=differs,
                    slot_numel=width,
                )
            )
    return Message(slices, rank=node, ranks=nodes)


# ---- inside the node ----


def gather(
    node_rows: Sequence[ShardRows], bound_codecs: Sequence[BoundCodec], intra: Communicator | None
) -> Pending[list[Tensor]]:
    """Gather full parameters, (numel,) each, in shard order, from the rows of the ranks of a node.

    Every rank uses decoded values, of its own rows too. ``intra`` is None with one rank per node.
    """
    if intra is None:
        # Copies to the device begin now, ahead of their use.
        full = [
            rows.view(-1)[: item.numel]
            for rows, item in zip(rows_on_device(node_rows), node_rows, strict=True)
        ]
        if node_rows[0].device is not None:
            return Pending(lambda: full)
        return Pending(lambda: [values.clone() for values in full])
    sizes = tuple(
        [
            (bound.codec, item.numel, item.rows.shape[0])
            for bound, item in zip(bound_codecs, node_rows, strict=True)
        ]
    )
    rows = rows_on_device(node_rows)
    message = _node_message(sizes, intra.size, intra.rank)
    shapes = [(item.numel, item.rows.dtype) for item in node_rows]
    targets = partial(new_values, shapes, rows[0].device)
    return message.gather(intra, rows, bound_codecs, targets, values_stay=True)


@lru_cache(maxsize=1024)
def _node_message(sizes: tuple[tuple[Codec, int, int], ...], node_size: int, local: int) -> Message:
    """Plan a gather inside the node; every row of a parameter has a slot, one after the other.

    sizes: per parameter its codec, its elements and the number of nodes.
    """
    slices = []
    for param, (codec, numel, nodes) in enumerate(sizes):
        width = ceil_div(numel, nodes * node_size)
        for shard in range(nodes * node_size):
            row, peer = divmod(shard, node_size)
            start, stop = shard_range(numel, nodes * node_size, shard)
            slices.append(
                GatherSlice(
                    peer=peer,
                    codec=codec,
                    numel=stop - start,
                    stream=param,
                    source=(param, row * width),
                    target=(param, start),
                    vector=row_vector(row, stop - start, width),
                    slot_numel=width,
                )
            )
    return Message(slices, rank=local, ranks=node_size)
