"""Which ranks share a node. The node size is an argument, never a count of devices, so that a
few processes on one machine can stand for several nodes. Standard library only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """``world`` ranks in nodes of ``node_size`` consecutive global ranks."""

    world: int
    node_size: int

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.world % self.node_size:
            divisors = [n for n in range(1, self.world + 1) if self.world % n == 0]
            raise ValueError(
                f"quantized_comm.node_size={self.node_size}: must divide the world size "
                f"{self.world}; allowed {divisors}"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.node_size

    def levels(self) -> tuple[list[list[int]], list[list[int]]]:
        """Global ranks of every node, and of every local place over the nodes."""
        intra = [list(range(n, n + self.node_size)) for n in range(0, self.world, self.node_size)]
        inter = [list(range(g, self.world, self.node_size)) for g in range(self.node_size)]
        return intra, inter

    def node_of(self, rank: int) -> int:
        """Node index of a global rank."""
        return rank // self.node_size


def default_node_size(world: int) -> int:
    """Ranks per host as the launcher set them (deepspeed: LOCAL_SIZE, torchrun: LOCAL_WORLD_SIZE).

    In this order: under the deepspeed launcher on CPU, accelerate sets LOCAL_WORLD_SIZE to 1.
    A launcher that does not say, or a value that does not divide the world (uneven hosts), gives
    ``world``: every rank counts as local, and the log line says so through its node count.
    """
    for variable in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) > 0 and world % int(value) == 0:
            return int(value)
    return world
