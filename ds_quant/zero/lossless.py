"""Lossless differences of the weights: the content of their messages under ZeRO-1, 2 and 3.

Every receiver already holds the owner's old weights: in the 16-bit replica under ZeRO-1 and 2, in
the rows of the node shard under ZeRO-3. A message is a range of the flat replica, or the rows of
some parameters end to end. It contains all parameters in between, also small and excluded ones,
since nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.lossless_gather import LosslessGather, Post, joined, posts
from ds_quant.comm.node_rows import ShardRows, rows_on_device, update_rows
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Pending
from ds_quant.zero.optimizer_hooks import ReplicaGroup

# ---- the replica of ZeRO-1 and 2 ----


class Window(NamedTuple):
    """A range of elements of the partition of every rank.

    within: the range, in elements of a partition.
    """

    group: ReplicaGroup
    hierarchy: HierarchicalCommunicator
    within: range

    @property
    def numel(self) -> int:
        """Elements of one rank."""
        return len(self.within)

    def rows(self) -> Tensor:
        """View the window in every rank's partition of the replica, (ranks, elements)."""
        partitions = self.group.flat.view(self.hierarchy.size, -1)
        return partitions[:, self.within.start : self.within.stop]

    def values(self) -> tuple[Tensor, Tensor]:
        """Return the new weights of this rank's partition in 16 bits, and the old ones."""
        old = self.rows()[self.hierarchy.rank]
        return self.group.updated(self.within, self.hierarchy.empty), old

    def post(self, gathers: LosslessGather, index: int) -> Pending[Tensor]:
        """Post the gather of message ``index``, which updates the window."""
        return gathers.post(index, self.rows)


def replica_posts(windows: Iterable[Window], traffic: Traffic) -> Iterator[Post]:
    """Yield per window a function that posts its gather.

    The ranks of a process group exchange all lengths at once.
    """
    by_hierarchy: dict[HierarchicalCommunicator, list[Window]] = {}
    for window in windows:
        by_hierarchy.setdefault(window.hierarchy, []).append(window)
    for hierarchy, own_windows in by_hierarchy.items():
        device = own_windows[0].group.flat.device
        yield from posts(own_windows, hierarchy.flat, hierarchy, device=device, traffic=traffic)


# ---- the node shard of ZeRO-3 ----


class NodeRows(NamedTuple):
    """Rows of some parameters of one dtype in the node shard.

    Rows are padded with zeros to equal width. The padding stays zero.

    shards: returns this rank's new shards of the parameters.
    node: index of this node.
    """

    node_rows: Sequence[ShardRows]
    shards: Callable[[], Sequence[Tensor]]
    node: int

    @property
    def numel(self) -> int:
        """Elements of one node's rows."""
        return sum(item.rows.shape[1] for item in self.node_rows)

    def values(self) -> tuple[Tensor, Tensor]:
        """Return this rank's new rows end to end, and the old ones."""
        new_rows: list[Tensor] = []
        for item, shard in zip(self.node_rows, self.shards(), strict=True):
            new_rows.append(shard)
            padding = item.rows.shape[1] - shard.numel()
            if padding:
                new_rows.append(shard.new_zeros(padding))
        return joined(new_rows), joined(rows_on_device(self.node_rows, self.node))

    def reference(self) -> Tensor:
        """Return the old rows of all nodes, (nodes, elements), of all parameters end to end."""
        return joined(rows_on_device(self.node_rows))

    def update(self, rows: Tensor) -> None:
        """Store new values of the rows that ``reference`` has returned."""
        # A single parameter on the device was updated in place.
        if len(self.node_rows) > 1 or self.node_rows[0].device is not None:
            widths = [item.rows.shape[1] for item in self.node_rows]
            update_rows(self.node_rows, rows.split(widths, dim=1))

    def post(self, gathers: LosslessGather, index: int) -> Pending[None]:
        """Post the gather of message ``index``, which updates the rows of all nodes."""
        return gathers.post(index, self.reference).then(self.update)
