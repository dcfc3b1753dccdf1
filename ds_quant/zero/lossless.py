"""Lossless differences of the weights of ZeRO-1 and 2: the content of their messages.

Every receiver already holds the owner's old weights in the 16-bit replica. A message is a range of
the flat replica. It contains all parameters in between, also small and excluded ones, since nothing
is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from ds_quant.comm.hierarchy import HierarchicalCommunicator
from ds_quant.comm.lossless_gather import LosslessGather, Post, posts
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Pending
from ds_quant.zero.optimizer_hooks import ReplicaGroup


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
