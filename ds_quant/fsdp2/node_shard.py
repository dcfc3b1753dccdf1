"""A node's copy of the weights of one sharded module, split over the ranks of the node.

[Note: rows of a node] Local rank g of every node holds the rows of all ranks whose local rank is g,
one per node, as [Note: strided layout] of comm/node_rows.py has it. An optimizer step posts the new
weights between these ranks: each byte enters a node once. A gather then stays inside the node. The
exchange is waited for when the module is gathered next.

[Note: one agreement] Lossless messages have lengths that all nodes must know before the first one
is posted. They are exchanged once per step for all modules: see [Note: lengths] of
comm/lossless_gather.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import Codec
from ds_quant.comm.lossless_gather import Post, posts
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.slots import row_vector
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.fsdp2.lossless_rows import LosslessRows, trained_columns
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.weight_codecs import WeightCodecs

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front

_BETWEEN, _INSIDE = 0, -1  # the hops of a parameter's weights


class NodeShard:
    """The rows of one sharded module: see [Note: rows of a node]."""

    def __init__(self, front: Front, sharded: ShardedModule) -> None:
        self._front, self._sharded = front, sharded
        topology = front.topology
        self._node, self._local = divmod(front.hierarchy.rank, topology.node_size)
        self._rows = torch.zeros(
            topology.nodes, sharded.row_numel, dtype=sharded.dtype, device=front.device
        )
        self._between = WeightCodecs(front, sharded, hop=_BETWEEN)
        self._inside = WeightCodecs(front, sharded, hop=_INSIDE)
        self.lossless_rows = LosslessRows(
            trained_columns(sharded), self._rows, self._node, self._new_row
        )
        self._exchange: Pending[Any] | None = None
        self._versions: list[int] = []
        self.refill()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on this rank."""
        return self._rows.nbytes

    def rows(self) -> Tensor:
        """Return the rows of this rank, with the weights of the last step."""
        self._finish_exchange()
        return self._rows

    def _finish_exchange(self) -> None:
        """Wait until the rows hold the weights of the last step."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def refill(self) -> None:
        """Fill the rows exactly. A collective."""
        self._finish_exchange()
        exact = [full_precision(self._sharded.dtype) for _ in self._sharded.params]
        self._post(exact, self._exchange_plan(exact, everything=True))
        self._finish_exchange()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows."""
        return self._rows.dtype

    @property
    def sends_lossless(self) -> bool:
        """True if the exchange of this step sends lossless differences."""
        front = self._front
        return (
            bool(self.lossless_rows.columns)
            and front.routes.sends_lossless(self.dtype)
            and not front.is_full_precision(front.step)
        )

    def exchange(self) -> None:
        """Post the new weights between the nodes; parameters that no optimizer moves stay."""
        bound_codecs, message = self._between.of_step(self._exchange_plan)
        self._post(bound_codecs, message)

    def exchange_lossless(self, post: Post) -> None:
        """Post the message of ``lossless_rows``, which is encoded already."""
        self._versions = self._sharded.versions()
        self._exchange = post()

    def gather(self, output: Tensor) -> Pending[Any]:
        """Gather all rows, (ranks * row,), from the ranks of this node.

        Raises:
            RuntimeError: weights were written outside of the optimizer since the last exchange.
        """
        self._require_unwritten()
        self._finish_exchange()
        intra = self._front.hierarchy.intra
        if intra is None:  # one rank per node: all rows are here
            output.view(self._rows.shape).copy_(self._rows)
            return Pending(lambda: output)
        bound_codecs, message = self._inside.of_step(self._node_plan)
        return message.gather(intra, [self._rows.view(-1)], bound_codecs, lambda: [output])

    def _post(self, bound_codecs: Sequence[BoundCodec], message: Message) -> None:
        """Post this rank's weights between the nodes."""
        own = self._new_row()
        self._versions = self._sharded.versions()
        rows = self._rows.view(-1)
        inter = _inter(self._front)
        self._exchange = message.gather(inter, [rows, own], bound_codecs, lambda: [rows])

    def _new_row(self) -> Tensor:
        """Return this rank's weights, padded, (row,), in the dtype of the rows."""
        row = torch.empty(
            self._sharded.row_numel, dtype=self._sharded.dtype, device=self._rows.device
        )
        torch._foreach_copy_(list(row.split(self._sharded.widths)), self._sharded.shards())
        return row

    def _exchange_plan(
        self, bound_codecs: Sequence[BoundCodec], *, everything: bool = False
    ) -> Message:
        """Plan an exchange; ``everything``: of parameters that no optimizer moves, too."""
        return _exchange_message(
            tuple([bound.codec for bound in bound_codecs]),
            self._sharded.widths,
            self._sharded.lengths,
            tuple([bound.difference for bound in bound_codecs]),
            tuple([everything or param.trained for param in self._sharded.params]),
            self._node,
            self._local,
            self._front.topology.node_size,
        )

    def _node_plan(self, bound_codecs: Sequence[BoundCodec]) -> Message:
        return _node_message(
            tuple([bound.codec for bound in bound_codecs]),
            self._sharded.widths,
            self._sharded.lengths,
            self._local,
            self._front.topology.node_size,
        )

    def _require_unwritten(self) -> None:
        if self._versions != self._sharded.versions():
            name = self._sharded.name or "the root"
            raise RuntimeError(
                f"quantized_comm: weights of {name} were written outside of the optimizer, such as "
                "by a loaded checkpoint: call ds_quant.resync(model) on all ranks after it, so "
                "that every node has them"
            )


def exchange(front: Front, node_shards: Sequence[NodeShard]) -> None:
    """Post the new weights of all modules between the nodes: see [Note: one agreement].

    A collective.
    """
    lossless: dict[torch.dtype, list[NodeShard]] = {}
    for node_shard in node_shards:
        node_shard._finish_exchange()  # a forward may have skipped the module
        if node_shard.sends_lossless:
            lossless.setdefault(node_shard.dtype, []).append(node_shard)
        else:
            node_shard.exchange()
    inter = _inter(front)
    for same_dtype in lossless.values():
        rows = [node_shard.lossless_rows for node_shard in same_dtype]
        gathers = posts(rows, inter, inter, device=front.device, traffic=front.traffic)
        for node_shard, post in zip(same_dtype, gathers, strict=True):
            node_shard.exchange_lossless(post)


def _inter(front: Front) -> Communicator:
    """Return the ranks of equal place in all nodes; with one rank per node, all ranks."""
    return front.hierarchy.inter or front.hierarchy.flat


@lru_cache(maxsize=1024)
def _exchange_message(
    codecs: tuple[Codec, ...],
    widths: tuple[int, ...],
    lengths: tuple[tuple[int, ...], ...],
    differences: tuple[bool, ...],
    sent: tuple[bool, ...],
    node: int,
    local: int,
    node_size: int,
) -> Message:
    """Plan the exchange of rows among the ranks of one place.

    The tensors are the rows and this rank's new weights. sent: by parameter, False for those that
    no optimizer moves.
    """
    nodes, row_numel = len(lengths[0]) // node_size, sum(widths)
    slices = []
    offset = 0
    for index, (codec, width) in enumerate(zip(codecs, widths, strict=True)):
        for peer in range(nodes if sent[index] else 0):
            slices.append(
                GatherSlice(
                    peer=peer,
                    codec=codec,
                    numel=lengths[index][peer * node_size + local],
                    stream=index,
                    source=(1, offset),
                    target=(0, peer * row_numel + offset),
                    is_difference=differences[index],
                    slot_numel=width,
                )
            )
        offset += width
    return Message(slices, rank=node, ranks=nodes)


@lru_cache(maxsize=1024)
def _node_message(
    codecs: tuple[Codec, ...],
    widths: tuple[int, ...],
    lengths: tuple[tuple[int, ...], ...],
    local: int,
    node_size: int,
) -> Message:
    """Plan the gather of all rows from the ranks of a node."""
    nodes, row_numel = len(lengths[0]) // node_size, sum(widths)
    slices = []
    offset = 0
    for index, (codec, width) in enumerate(zip(codecs, widths, strict=True)):
        for rank in range(nodes * node_size):
            node, peer = divmod(rank, node_size)
            numel = lengths[index][rank]
            slices.append(
                GatherSlice(
                    peer=peer,
                    codec=codec,
                    numel=numel,
                    stream=index,
                    source=(0, node * row_numel + offset),
                    target=(0, rank * row_numel + offset),
                    vector=row_vector(node, numel, width),
                    slot_numel=width,
                )
            )
        offset += width
    return Message(slices, rank=local, ranks=node_size)
