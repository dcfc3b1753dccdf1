"""Rows of shards: their place in memory, and the gathers that move them.

shard   the part of a tensor that one rank owns
row     the shards of all tensors of a collective that lie on one rank; a message carries one

[Note: strided layout] With G ranks per node, shard r of a tensor belongs to rank (node, local) =
(r // G, r % G). A *node shard* is a node's copy of the weights, split over its ranks. Local rank g
of every node keeps the shards {r : r % G = g} as rows (nodes, width), row n being shard n * G + g.
So an owner's shard lies in the owner's own rows, and new weights cross between nodes by one
all-gather among the ranks of equal g: each byte enters a node once. A gather inside the node
receives [G][nodes][width]; shard order is [nodes][G][width].

The rows of a node shard, which live between the steps, are in node_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import Codec
from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.slots import row_vector
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.kernels.wire import ceil_div

# ---- the layout ----


@dataclass(frozen=True)
class RowLayout:
    """Tensors that are split over ranks, and the place of every shard in rows.

    ZeRO-3 has a buffer for every tensor, FSDP2 one for all tensors of a module. Both address rows
    in the same way: those of a node shard by node, those of full weights by rank.

    numels: elements of every tensor.
    widths: elements of a full shard of every tensor; the last shards may be shorter or empty.
    ranks: shards of a tensor.
    is_flat: True if a row is contiguous in one buffer; False if every tensor has its own buffer.
    """

    numels: tuple[int, ...]
    widths: tuple[int, ...]
    ranks: int
    is_flat: bool = False

    @cached_property
    def offsets(self) -> list[int]:
        """First element of every tensor in a row that is contiguous."""
        return list(accumulate(self.widths, initial=0))[:-1]

    @cached_property
    def row_numel(self) -> int:
        """Elements of a row, padding included."""
        return sum(self.widths)

    @property
    def buffers(self) -> int:
        """Number of buffers that hold rows."""
        return 1 if self.is_flat else len(self.numels)

    def length(self, tensor: int, shard: int) -> int:
        """Return the elements of a shard."""
        width = self.widths[tensor]
        return min(max(self.numels[tensor] - shard * width, 0), width)

    def address(self, tensor: int, row: int) -> tuple[int, int]:
        """Return the buffer and the first element of a tensor's shard in row ``row``."""
        if self.is_flat:
            return 0, row * self.row_numel + self.offsets[tensor]
        return tensor, row * self.widths[tensor]


@lru_cache(maxsize=1024)
def even_layout(numels: tuple[int, ...], ranks: int) -> RowLayout:
    """Return the layout of DeepSpeed's ceil-division shards."""
    widths = tuple([ceil_div(numel, ranks) for numel in numels])
    return RowLayout(numels, widths, ranks)


# ---- the plans of its gathers ----

# All slots of a tensor are as long as a full shard, see [Note: one message] of slots.py. Modules
# of equal layout share a plan.


@lru_cache(maxsize=1024)
def plan_gather(
    layout: RowLayout, codecs: tuple[Codec, ...], rank: int, node_size: int | None
) -> Message:
    """Plan the gather of all shards: every rank sends its row.

    The values are this rank's row alone, so every source lies in row 0. The targets are the rows of
    all ranks.

    node_size: ranks per node of a gather over two levels, see ``slots.row_index``.
    """
    slices = []
    for tensor, (codec, width) in enumerate(zip(codecs, layout.widths, strict=True)):
        for shard in range(layout.ranks):
            slices.append(
                GatherSlice(
                    peer=shard,
                    codec=codec,
                    numel=layout.length(tensor, shard),
                    stream=tensor,
                    source=layout.address(tensor, 0),
                    target=layout.address(tensor, shard),
                    slot_numel=width,
                )
            )
    return Message(slices, rank=rank, ranks=layout.ranks, node_size=node_size)


@lru_cache(maxsize=1024)
def plan_exchange(
    layout: RowLayout,
    codecs: tuple[Codec | None, ...],
    differences: tuple[bool, ...],
    node: int,
    local: int,
    node_size: int,
) -> Message:
    """Plan the exchange of a node shard between the nodes: see [Note: strided layout].

    A gather of this message takes twice as many buffers as the layout has: first those of the kept
    rows, which are its targets, then those of this rank's new row, which is what it sends. Row n
    comes from node n.

    codecs: by tensor; None: it is not sent.
    differences: by tensor, True if the new row minus the kept row is sent.
    local: index of this rank in its node.
    """
    nodes = layout.ranks // node_size
    slices = []
    for tensor, (codec, width) in enumerate(zip(codecs, layout.widths, strict=True)):
        if codec is None:
            continue
        buffer, start = layout.address(tensor, 0)
        new_row = layout.buffers + buffer, start
        for row in range(nodes):
            shard = row * node_size + local
            slices.append(
                GatherSlice(
                    peer=row,
                    codec=codec,
                    numel=layout.length(tensor, shard),
                    stream=tensor,
                    source=new_row,
                    target=layout.address(tensor, row),
                    is_difference=differences[tensor],
                    slot_numel=width,
                )
            )
    return Message(slices, rank=node, ranks=nodes)


@lru_cache(maxsize=1024)
def plan_node_gather(
    layout: RowLayout, codecs: tuple[Codec, ...], local: int, node_size: int
) -> Message:
    """Plan the gather of a node shard inside the node: see [Note: strided layout].

    The values are the rows that this rank keeps, the targets the rows of all ranks. Every row of a
    tensor has a slot, one after the other.
    """
    slices = []
    for tensor, (codec, width) in enumerate(zip(codecs, layout.widths, strict=True)):
        for shard in range(layout.ranks):
            row, peer = divmod(shard, node_size)
            numel = layout.length(tensor, shard)
            slices.append(
                GatherSlice(
                    peer=peer,
                    codec=codec,
                    numel=numel,
                    stream=tensor,
                    source=layout.address(tensor, row),
                    target=layout.address(tensor, shard),
                    vector=row_vector(row, numel, width),
                    slot_numel=width,
                )
            )
    return Message(slices, rank=local, ranks=node_size)


# ---- the gather of ZeRO-3 ----


def all_gather(
    shards: Sequence[Tensor],
    numels: Sequence[int],
    bound_codecs: Sequence[BoundCodec],
    communicator: Communicator | HierarchicalCommunicator,
) -> Pending[list[Tensor]]:
    """Gather tensors that are split over the ranks in DeepSpeed's ceil-division shards.

    The result is the full tensors, (numel,) each in the dtype of its shard. Every rank decodes all
    shards from the wire, its own too, so all ranks hold equal bits.

    Args:
        shards: per tensor this rank's shard, 1-D and without padding (possibly empty), on the
            device of the collective. They must not change before the result is waited for: exact
            shards may be sent from where they lie.
        numels: per tensor its full number of elements.
        bound_codecs: per tensor; the addresses are this rank's own.
    """
    layout = even_layout(tuple(numels), communicator.size)
    codecs = tuple([bound.codec for bound in bound_codecs])
    message = plan_gather(layout, codecs, communicator.rank, communicator.node_size)
    shapes = [(numel, shard.dtype) for numel, shard in zip(numels, shards, strict=True)]
    targets = partial(new_values, shapes, shards[0].device)
    return message.gather(communicator, shards, bound_codecs, targets, values_stay=True)


def new_values(
    shapes: Sequence[tuple[int, torch.dtype]], device: torch.device | str
) -> list[Tensor]:
    """Allocate a tensor for each (numel, dtype), outside the pool: DeepSpeed frees them."""
    return [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in shapes]
