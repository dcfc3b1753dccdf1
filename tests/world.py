"""A world of ranks in this process, a thread each. Their messages stay in memory and can be read.

``World`` makes a front per rank, as benchmarks/simulated.py does. ``World.all`` runs a function on
every rank at the same time; ``World.messages`` returns the bytes that they have sent.
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
simulated.PATIENCE = 20  # seconds; the peers of a rank that failed fail too


class Recorded(Group):
    """A group of ranks that records its rounds. Receivers see a message only after they wait.

    payload_addresses: of the memory from which ranks have sent.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.rounds: list[Round] = []
        self.payload_addresses: set[int] = set()

    def join(
        self, rank: int, payload: Tensor, into: Tensor, sent: Sequence[int] | None = None
    ) -> LateMessage:
        self.payload_addresses.add(payload.data_ptr())
        arriving = super().join(rank, payload, into, sent)
        return LateMessage(arriving.wait, payload, into)

    def completed(self, round: Round) -> None:
        round.payloads = {rank: payload.clone() for rank, payload in round.payloads.items()}
        self.rounds.append(round)


class World:
    """``nodes`` x ``node_size`` ranks with a front each, under one ZeRO stage and block.

    groups: process groups by their ranks.
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
        topology = Topology(world=nodes * node_size, node_size=node_size)
        self.groups: dict[tuple[int, ...], Recorded] = {}
        self.engine = EngineOfNobody(module or nn.Module(), micro_steps, stage=stage)
        network = Network(topology, self._group)
        scheme = parse_block(block or {"scheme": "full_precision"}).to_scheme()
        self.ranks = [
            SimulatedRank(self.engine, scheme, rank, network) for rank in range(topology.world)
        ]

    def _group(self, ranks: Sequence[int]) -> Recorded:
        return self.groups.setdefault(tuple(ranks), Recorded(ranks))

    def communicator(
        self, ranks: Sequence[int], index: int, traffic: Traffic | None = None
    ) -> SimulatedCommunicator:
        """Return a communicator of rank ``index`` of a group. traffic: new counters if None."""
        return SimulatedCommunicator(
            self._group(ranks),
            index,
            topology=self.ranks[0].run.topology,
            traffic=traffic or Traffic(),
        )

    def all(self, run: Callable[[SimulatedRank], T]) -> list[T]:
        """Run a function on every rank at the same time. Return the results by rank."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            futures = [pool.submit(run, rank) for rank in self.ranks]
            return [future.result() for future in futures]

    def messages(self, ranks: Sequence[int]) -> list[dict[int, list[bytes]]]:
        """Return per round of a group: receiver -> the bytes that every sender sent it.

        Receivers and senders are indices in the group.
        """
        rounds = []
        for round in self.groups[tuple(ranks)].rounds:
            messages_by_receiver = {}
            for receiver in range(len(ranks)):
                messages = round.bound_for(receiver)
                messages_by_receiver[receiver] = [m.numpy().tobytes() for m in messages]
            rounds.append(messages_by_receiver)
        return rounds
