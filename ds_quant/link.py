"""Byte transport of the collectives: process groups and their nodes, asynchronous, counted.

Flat uint8 through ``all_gather_into_tensor`` and ``all_to_all_single``: the only forms that gloo
and NCCL share for any world size. May import: torch, deepspeed.comm, metrics, topology.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_quant.metrics import Traffic
from ds_quant.topology import Topology


class Work(Protocol):
    """An asynchronous collective of torch.distributed."""

    def wait(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A posted byte collective. Holds both buffers until ``wait`` has returned."""

    payload: Tensor
    received: Tensor
    work: Work | None

    def wait(self) -> Tensor:
        """The received bytes; on CUDA valid in order of the current stream."""
        if self.work is not None:
            self.work.wait()
        return self.received


class Link:
    """Byte collectives over one process group, counted. Holds no algorithm."""

    def __init__(self, process_group: object, *, topology: Topology, traffic: Traffic) -> None:
        from deepspeed import comm as dist

        self._dist = dist
        self._process_group = process_group
        self._traffic = traffic
        self.size: int = dist.get_world_size(group=process_group)
        self.rank: int = dist.get_rank(group=process_group)
        self.ranks: list[int] = [self._global_rank(r) for r in range(self.size)]
        nodes = [topology.node_of(r) for r in self.ranks]
        self._near = [node == nodes[self.rank] for node in nodes]

    def _global_rank(self, rank: int) -> int:
        if self._process_group is None:
            return rank
        return self._dist.get_global_rank(self._process_group, rank)

    def all_gather(self, payload: Tensor, *, role: str) -> Exchange:
        """payload (bytes,) uint8, equal size on all ranks -> received (ranks * bytes,) uint8."""
        received = torch.empty(
            self.size * payload.numel(), dtype=torch.uint8, device=payload.device
        )
        self._count(role, [payload.numel()] * self.size)
        work = self._dist.all_gather_into_tensor(
            received, payload, group=self._process_group, async_op=True
        )
        return Exchange(payload=payload, received=received, work=work)

    def all_to_all(
        self, payload: Tensor, *, sent: Sequence[int], received: Sequence[int], role: str
    ) -> Exchange:
        """payload (sum(sent),) uint8, ``sent[d]`` bytes for rank d -> (sum(received),) uint8."""
        buffer = torch.empty(sum(received), dtype=torch.uint8, device=payload.device)
        self._count(role, received)
        work = self._dist.all_to_all_single(
            buffer,
            payload,
            output_split_sizes=list(received),
            input_split_sizes=list(sent),
            group=self._process_group,
            async_op=True,
        )
        return Exchange(payload=payload, received=buffer, work=work)

    def _count(self, role: str, received: Sequence[int]) -> None:
        intra = sum(b for r, b in enumerate(received) if self._near[r] and r != self.rank)
        inter = sum(b for r, b in enumerate(received) if not self._near[r])
        self._traffic.count(role, intra=intra, inter=inter)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The links of one process group and, where its ranks fill several nodes, of its two levels.

    intra: this rank's node. inter: the ranks of all nodes with this rank's place in the node.
    Both are None for a group that lies in one node, has one rank per node, or is not the world.
    """

    whole: Link
    intra: Link | None = None
    inter: Link | None = None

    def all_gather(self, payload: Tensor, *, role: str) -> Callable[[], Tensor]:
        """As ``Link.all_gather`` over the whole group; returns the function that waits.

        With two levels the rows cross between nodes once and are then spread inside the node.
        The second level is posted by the wait, so waits must come in the same order on all ranks.
        """
        if self.intra is None or self.inter is None:
            return self.whole.all_gather(payload, role=role).wait
        between = self.inter.all_gather(payload, role=role)

        def wait() -> Tensor:
            rows = self.intra.all_gather(between.wait(), role=role).wait()
            places = rows.view(self.intra.size, self.inter.size, -1)  # local rank, node, bytes
            return places.transpose(0, 1).reshape(-1)

        return wait
