"""Many ranks in this process, each with a thread of its own: plugins and links, over
messages that stay in memory and can be read afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import simulated
from simulated import (
    EngineOfNobody,
    Group,
    Network,
    Round,
    SimulatedCommunicator,
    SimulatedRank,
)
from torch import Tensor, nn

from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.config.schema import parse_block
from tests.late import LateMessage

T = TypeVar("T")
simulated.PATIENCE = 20  # seconds: a rank that fails is told by the others, too


class Recorded(Group):
    """A group of ranks that remembers its rounds and whose messages are late."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.rounds: list[Round] = []

    def join(
        self, rank: int, payload: Tensor, into: Tensor, sent: Sequence[int] | None = None
    ) -> LateMessage:
        arriving = super().join(rank, payload, into, sent)
        return LateMessage(arriving.wait, payload, into)

    def completed(self, one: Round) -> None:
        one.payloads = {rank: payload.clone() for rank, payload in one.payloads.items()}
        self.rounds.append(one)


class World:
    """``nodes`` x ``node_size`` ranks with a plugin each, under one ZeRO stage and block.

    groups: of processes, by their ranks.
    """

    def __init__(
        self,
        nodes: int,
        node_size: int,
        *,
        module: nn.Module | None = None,
        stage: int = 3,
        micro_steps: int = 1,
        **block: Any,
    ) -> None:
        topology, self.groups = Topology(world=nodes * node_size, node_size=node_size), {}
        self.engine = EngineOfNobody(module or nn.Module(), micro_steps, stage=stage)
        network = Network(topology, self._group)
        scheme = parse_block(block or {"scheme": "full_precision"}).to_scheme()
        self.ranks = [SimulatedRank(self.engine, scheme, r, network) for r in range(topology.world)]

    def _group(self, ranks: Sequence[int]) -> Recorded:
        return self.groups.setdefault(tuple(ranks), Recorded(ranks))

    def link(self, ranks: Sequence[int], place: int) -> SimulatedCommunicator:
        """A link of one of some ranks, with counters of its own."""
        return SimulatedCommunicator(
            self._group(ranks), place, topology=self.ranks[0].topology, traffic=Traffic()
        )

    def all(self, run: Callable[[SimulatedRank], T]) -> list[T]:
        """What every rank returns; they wait for each other inside."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [future.result() for future in [pool.submit(run, rank) for rank in self.ranks]]

    def messages(self, ranks: Sequence[int]) -> list[dict[int, list[bytes]]]:
        """By round of a group: place of the receiver -> what every place sent it."""
        places = range(len(ranks))
        return [
            {place: [sent.numpy().tobytes() for sent in one.bound_for(place)] for place in places}
            for one in self.groups[tuple(ranks)].rounds
        ]
