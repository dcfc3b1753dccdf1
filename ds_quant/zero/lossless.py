"""Lossless differences of the weights: what their messages hold under ZeRO-1, 2 and 3.

Every holder has what the owner has: the 16-bit replica under ZeRO-1 and 2, the rows of the node
shard under ZeRO-3. A message is a stretch of the flat replica or some parameters' rows end to end,
whatever parameters lie in it, small and excluded ones too: nothing of them is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_quant.comm.lossless_gather import LosslessGather, LosslessMessage
from ds_quant.comm.message import ShardRows, copy_into_rows, rows_of
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator, Pending
from ds_quant.zero.optimizer_hooks import ReplicaGroup

Post = Callable[[], Pending[Any]]  # begins a gather


def posts(
    messages: Sequence[Window] | Sequence[NodeRows],
    communicator: Communicator,
    transport: Communicator | HierarchicalCommunicator,
    **how: Any,
) -> Iterator[Post]:
    """Yield what brings each message and takes it over, in turn. All are encoded, and their lengths
    exchanged, before the first is yielded. ``link``, ``road``, ``how``: see ``LosslessGather``.
    """
    outgoing = [LosslessMessage(message.numel, message.values) for message in messages]
    outbox = LosslessGather(outgoing, communicator, transport, **how)
    for place, message in enumerate(messages):
        yield partial(message.post, outbox, place)


# ---- the replica of ZeRO-1 and 2 ----


class Window(NamedTuple):
    """Elements ``within`` the partition of every rank of a group's process group."""

    group: ReplicaGroup
    hierarchy: HierarchicalCommunicator
    within: range

    @property
    def numel(self) -> int:
        return len(self.within)

    def rows(self) -> Tensor:
        """View the window in every rank's partition of the replica, (ranks, elements)."""
        partitions = self.group.flat.view(self.hierarchy.size, -1)
        return partitions[:, self.within.start : self.within.stop]

    def values(self) -> tuple[Tensor, Tensor]:
        """The new weights of this rank's partition in 16 bits, and its reference."""
        reference = self.rows()[self.hierarchy.rank]
        return self.group.updated(self.within, self.hierarchy.empty), reference

    def post(self, outbox: LosslessGather, place: int) -> Pending[Tensor]:
        """Begin to gather the window."""
        return outbox.post(place, self.rows)


def replica_posts(windows: Iterable[Window], traffic: Traffic) -> Iterator[Post]:
    """Yield what gathers each window, in turn; a process group agrees on all lengths together."""
    by_fabric: dict[HierarchicalCommunicator, list[Window]] = {}
    for window in windows:
        by_fabric.setdefault(window.hierarchy, []).append(window)
    for hierarchy, own in by_fabric.items():
        device = own[0].group.flat.device
        yield from posts(own, hierarchy.flat, hierarchy, device=device, traffic=traffic)


# ---- the node shard of ZeRO-3 ----


class NodeRows(NamedTuple):
    """Parameters of one dtype in the node shard, and this rank's new shards of them.

    Rows are filled up with zeros to equal width, and zeros they stay.
    """

    node_rows: Sequence[ShardRows]
    shards: Callable[[], Sequence[Tensor]]
    node: int

    @property
    def numel(self) -> int:
        return sum(item.rows.shape[1] for item in self.node_rows)

    def values(self) -> tuple[Tensor, Tensor]:
        """Return this rank's new rows end to end, and their reference."""
        parts = []
        for item, shard in zip(self.node_rows, self.shards(), strict=True):
            parts.append(shard)
            missing = item.rows.shape[1] - shard.numel()
            if missing:
                parts.append(shard.new_zeros(missing))
        return joined(parts), joined(rows_of(self.node_rows, self.node))

    def reference(self) -> Tensor:
        """The rows of all nodes, (nodes, elements), of all parameters end to end."""
        return joined(rows_of(self.node_rows))

    def take(self, rows: Tensor) -> None:
        """Take over new values of what ``reference`` has returned."""
        if len(self.node_rows) > 1 or self.node_rows[0].device is not None:
            widths = [item.rows.shape[1] for item in self.node_rows]
            copy_into_rows(self.node_rows, rows.split(widths, dim=1))

    def post(self, outbox: LosslessGather, place: int) -> Pending[None]:
        """Begin to gather the rows of all nodes."""
        return outbox.post(place, self.reference).then(self.take)


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of one dtype; a single row is returned without a copy."""
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows), dim=-1)
