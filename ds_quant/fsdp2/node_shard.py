"""A node's copy of the weights of one sharded module, split over the ranks of the node.

[Note: rows of a node] Local rank g of every node holds the rows of all ranks whose local rank is g,
one per node, as [Note: strided layout] of comm/rows.py has it. An optimizer step posts the new
weights between these ranks: each byte enters a node once. A gather then stays inside the node. The
exchange is waited for when the module is gathered next.

[Note: filled rows] Rows are made and filled, exactly, before the first gather: until then the
weights may be on the meta device or about to be loaded. Rows of parameters that were written
outside of an optimizer step are filled again, see node_copies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, full_precision
from ds_quant.codec.codec import Codec
from ds_quant.comm.lossless_gather import Post
from ds_quant.comm.message import Message
from ds_quant.comm.node_rows import LosslessRows
from ds_quant.comm.rows import plan_exchange, plan_node_gather
from ds_quant.comm.transport import Pending
from ds_quant.config.errors import KEY
from ds_quant.fsdp2.context import Context
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.fsdp2.weight_codecs import WeightCodecs

_BETWEEN, _INSIDE = 0, -1  # the hops of a parameter's weights


class NodeShard:
    """The rows of one sharded module: see [Note: rows of a node]."""

    def __init__(self, context: Context, sharded: ShardedModule) -> None:
        self._run = context.run
        self.sharded = sharded
        self._level = sharded.level
        topology = self._level.topology
        rank = self._level.hierarchy.rank
        self._node, self._local = divmod(rank, topology.node_size)
        self._shape = topology.nodes, sharded.row_numel
        self._rows: Tensor | None = None  # see [Note: filled rows]
        self._between = WeightCodecs(context, sharded, hop=_BETWEEN)
        self._inside = WeightCodecs(context, sharded, hop=_INSIDE)
        self._exchange: Pending[Any] | None = None
        self._is_lossless = sharded.level.routes.sends_lossless(sharded.dtype)

    # ---- rows ----

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on this rank."""
        nodes, numel = self._shape
        return nodes * numel * self.sharded.dtype.itemsize

    @property
    def is_filled(self) -> bool:
        """True once the rows exist."""
        return self._rows is not None

    def rows(self) -> Tensor:
        """Return the rows of this rank, (nodes, row), with the weights of the last step.

        Raises:
            RuntimeError: no forward has filled them.
        """
        self.finish_exchange()
        if self._rows is None:
            raise RuntimeError(
                f"{KEY}: {self.sharded.title} is gathered for the backward of a forward before "
                "attach: call ds_quant.fsdp2.attach before the forward"
            )
        return self._rows

    def finish_exchange(self) -> None:
        """Wait until the rows hold the weights of the last step."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def fill(self, is_written: Sequence[bool]) -> None:
        """Fill the rows of some parameters exactly. A collective.

        is_written: by parameter, the same on all ranks.
        """
        self.finish_exchange()
        if self._rows is None:
            # Later steps write them outside of the inference mode of a first evaluation.
            with torch.inference_mode(False):
                self._rows = torch.zeros(
                    self._shape, dtype=self.sharded.dtype, device=self._run.device
                )
        exact = [full_precision(self.sharded.dtype) for _ in self.sharded.params]
        self._post(self._rows, exact, self._plan(exact, is_written))
        self.finish_exchange()

    # ---- the exchange after a step ----

    @property
    def sends_lossless(self) -> bool:
        """True if the exchange of this step sends lossless differences."""
        run = self._run
        return (
            self._is_lossless
            and any(param.trained for param in self.sharded.params)
            and not run.is_full_precision(run.step)
        )

    def lossless_rows(self) -> LosslessRows:
        """Return the trained parameters as the source of a lossless message.

        Padding is sent, and so are small and excluded parameters, since nothing is lost.
        """
        columns = trained_columns(self.sharded)

        def new_rows() -> list[Tensor]:
            return _cut(self._new_row(), columns)

        return LosslessRows(_cut(self.rows(), columns), self._node, new_rows)

    def exchange(self) -> None:
        """Post the new weights between the nodes; parameters that no optimizer moves stay."""
        bound_codecs, message = self._between.of_step(self._trained_plan)
        self._post(self.rows(), bound_codecs, message)

    def exchange_lossless(self, post: Post) -> None:
        """Post the message of ``lossless_rows``, which is encoded already."""
        self._exchange = post()

    def _post(self, rows: Tensor, bound_codecs: Sequence[BoundCodec], message: Message) -> None:
        """Post this rank's weights between the nodes."""
        own = self._new_row()
        flat = rows.view(-1)
        inter = self._level.between_nodes
        self._exchange = message.gather(inter, [flat, own], bound_codecs, lambda: [flat])

    def _new_row(self) -> Tensor:
        """Return this rank's weights, padded, (row,), in the dtype of the rows."""
        run = self._run
        numel = self.sharded.row_numel
        row = run.buffers.empty(numel, dtype=self.sharded.dtype, device=run.device)
        torch._foreach_copy_(list(row.split(self.sharded.widths)), self.sharded.shards())
        return row

    def _trained_plan(self, bound_codecs: Sequence[BoundCodec]) -> Message:
        """Plan the exchange after a step."""
        return self._plan(bound_codecs, [param.trained for param in self.sharded.params])

    def _plan(self, bound_codecs: Sequence[BoundCodec], is_sent: Sequence[bool]) -> Message:
        """Plan the exchange of some parameters."""
        codecs: list[Codec | None] = []
        for bound, sent in zip(bound_codecs, is_sent, strict=True):
            codecs.append(bound.codec if sent else None)
        return plan_exchange(
            self.sharded.layout,
            tuple(codecs),
            tuple([bound.difference for bound in bound_codecs]),
            self._node,
            self._local,
            self._level.topology.node_size,
        )

    # ---- gathers ----

    def gather(self, output: Tensor) -> Pending[Any]:
        """Gather all rows, (ranks * row,), from the ranks of this node."""
        rows = self.rows()
        intra = self._level.hierarchy.intra
        if intra is None:  # one rank per node: all rows are here
            output.view(rows.shape).copy_(rows)
            return Pending(lambda: output)
        bound_codecs, message = self._inside.of_step(self._node_plan)
        return message.gather(intra, [rows.view(-1)], bound_codecs, lambda: [output])

    def _node_plan(self, bound_codecs: Sequence[BoundCodec]) -> Message:
        codecs = tuple([bound.codec for bound in bound_codecs])
        node_size = self._level.topology.node_size
        return plan_node_gather(self.sharded.layout, codecs, self._local, node_size)


def _cut(rows: Tensor, columns: Sequence[range]) -> list[Tensor]:
    """Return the columns of one row, (row,), or of several, (rows, row)."""
    return [rows[..., one.start : one.stop] for one in columns]


def trained_columns(sharded: ShardedModule) -> tuple[range, ...]:
    """Return the elements of trained parameters in a row, as few ranges as possible."""
    ranges: list[range] = []
    for param, start, width in zip(sharded.params, sharded.offsets, sharded.widths, strict=True):
        if not param.trained:
            continue
        stop = start + width
        if ranges and ranges[-1].stop == start:
            start = ranges.pop().start
        ranges.append(range(start, stop))
    return tuple(ranges)
