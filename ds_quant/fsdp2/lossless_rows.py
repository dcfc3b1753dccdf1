"""Lossless differences of the rows of a sharded module.

Every node holds the old rows, see [Note: rows of a node] of node_shard.py. A message has the rows
of all trained parameters of a module end to end, padding included, also small and excluded ones,
since nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.comm.lossless_gather import LosslessGather, joined
from ds_quant.comm.transport import Pending
from ds_quant.fsdp2.sharded_module import ShardedModule


class LosslessRows(NamedTuple):
    """The trained parameters of a sharded module: the ``Source`` of one message.

    columns: their elements in a row, as ``trained_columns`` has them.
    rows: of all nodes, (nodes, row).
    node: index of this node.
    new_row: returns this rank's new weights, (row,), in the dtype of the rows.
    """

    columns: tuple[range, ...]
    rows: Tensor
    node: int
    new_row: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        """Elements that one rank sends."""
        return sum(map(len, self.columns))

    def values(self) -> tuple[Tensor, Tensor]:
        """Return this rank's new values, and the old ones that all nodes hold."""
        return joined(self._cut(self.new_row())), joined(self._cut(self.rows[self.node]))

    def reference(self) -> Tensor:
        """Return the old values of all nodes, (nodes, elements)."""
        return joined(self._cut(self.rows))

    def update(self, values: Tensor) -> None:
        """Store new values in what ``reference`` has returned."""
        if len(self.columns) > 1:  # a single range was updated in place
            parts = values.split(list(map(len, self.columns)), dim=-1)
            torch._foreach_copy_(self._cut(self.rows), list(parts))

    def post(self, gathers: LosslessGather, index: int) -> Pending[None]:
        """Post the gather of message ``index``, which updates the rows of all nodes."""
        return gathers.post(index, self.reference).then(self.update)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        return [rows[..., columns.start : columns.stop] for columns in self.columns]


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
