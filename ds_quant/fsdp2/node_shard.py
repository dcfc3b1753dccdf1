"""A node's copy of the weights of one sharded module, split over the ranks of the node.

[Note: rows of a node] Local rank g of every node holds the rows of all ranks whose local rank is g,
one per node, as [Note: strided layout] of comm/node_rows.py has it. An optimizer step posts the new
weights between these ranks: each byte enters a node once. A gather then stays inside the node. The
exchange is waited for when the module is gathered next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import Codec
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.slots import row_vector
from ds_quant.comm.transport import Communicator, Pending
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

    def refill(self) -> None:
        """Fill the rows exactly. A collective."""
        self._finish_exchange()
        exact = [full_precision(self._sharded.dtype) for _ in self._sharded.params]
        self._post(exact, self._exchange_plan(exact, everything=True))
        self._finish_exchange()

    def after_step(self) -> None:
        """Post the new weights between the nodes; parameters that no optimizer moves stay."""
        self._finish_exchange()
        bound_codecs, message = self._between.of_step(self._exchange_plan)
        self._post(bound_codecs, message)

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
        own = torch.empty(
            self._sharded.row_numel, dtype=self._sharded.dtype, device=self._rows.device
        )
        torch._foreach_copy_(list(own.split(self._sharded.widths)), self._sharded.shards())
        self._versions = self._sharded.versions()
        rows = self._rows.view(-1)
        self._exchange = message.gather(self._inter, [rows, own], bound_codecs, lambda: [rows])

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

    @property
    def _inter(self) -> Communicator:
        """The ranks of equal place in all nodes; with one rank per node, all ranks."""
        return self._front.hierarchy.inter or self._front.hierarchy.flat

    def _finish_exchange(self) -> None:
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.wait()

    def _require_unwritten(self) -> None:
        if self._versions != self._sharded.versions():
            name = self._sharded.name or "the root"
            raise RuntimeError(
                f"quantized_comm: weights of {name} were written outside of the optimizer, such as "
                "by a loaded checkpoint: call ds_quant.resync(model) on all ranks after it, so "
                "that every node has them"
            )


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
                    into=(0, peer * row_numel + offset),
                    differs=differences[index],
                    room=width,
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
                    into=(0, rank * row_numel + offset),
                    vector=row_vector(node, numel, width),
                    room=width,
                )
            )
        offset += width
    return Message(slices, rank=local, ranks=node_size)
