"""Topology: the ranks of every node.

node        consecutive ranks, usually those of one host
local rank  index of a rank in its node
host        a machine, as ``host_name`` names it

The node size is an argument, never a count of devices, so a few processes on one machine can stand
for several nodes. Standard library only.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

_VARIABLES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")
_CONSECUTIVE = "srun --distribution=block, mpirun --map-by slot, a hostfile host by host"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """``world`` ranks in nodes of ``node_size`` consecutive ones.

    ranks: their global ranks, by index. Empty if they are all ranks of the job, in their order.
    """

    world: int
    node_size: int
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.world % self.node_size:
            raise ValueError(
                f"quantized_comm.node_size={self.node_size}: must divide the world size "
                f"{self.world}; allowed {divisors(self.world)}"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.node_size

    def levels(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the global ranks of every node, and those of every local rank over the nodes."""
        size = self.node_size
        ranks = self.all_ranks
        intra = [list(ranks[first : first + size]) for first in range(0, self.world, size)]
        inter = [list(ranks[local::size]) for local in range(size)]
        return intra, inter

    @property
    def all_ranks(self) -> Sequence[int]:
        """Global rank of every index."""
        return self.ranks or range(self.world)

    def part(self, ranks: Sequence[int]) -> Topology:
        """Return some of the global ranks in the nodes that hold them.

        Raises:
            PlacementError: nodes hold unequal numbers of these ranks, or not one after the other.
        """
        if list(ranks) == list(self.all_ranks):
            return self
        nodes = [self.node_of(rank) for rank in ranks]
        sizes = [len(list(same)) for _, same in groupby(nodes)]
        if len(sizes) > len(set(nodes)) or len(set(sizes)) > 1:
            raise PlacementError(
                f"ranks {list(ranks)} lie on nodes {nodes}: a mesh takes as many ranks of every "
                "node that it reaches, one after the other"
            )
        return Topology(world=len(ranks), node_size=sizes[0], ranks=tuple(ranks))

    def node_of(self, rank: int) -> int:
        """Return the node index of a global rank."""
        index = self.ranks.index(rank) if self.ranks else rank
        return index // self.node_size


def divisors(world: int) -> list[int]:
    """Return the node sizes that divide a world, ascending.

    Above 1e12 ranks some are left out: `ds_quant validate --world` answers at once for any number.
    """
    small = [size for size in range(1, min(math.isqrt(world), 10**6) + 1) if world % size == 0]
    large = [world // size for size in small]
    return sorted({*small, *large})


def launcher_variable(world: int) -> tuple[str, int] | None:
    """Return the launcher's variable with the number of ranks on this host, and its value.

    None if no variable has a value that divides the world. deepspeed sets LOCAL_SIZE, torchrun
    LOCAL_WORLD_SIZE. LOCAL_SIZE goes first: under the deepspeed launcher on CPU, accelerate sets
    LOCAL_WORLD_SIZE to 1.
    """
    for variable in _VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal() and int(value) > 0 and world % int(value) == 0:
            return variable, int(value)
    return None


def default_node_size(world: int) -> int:
    """Return the ranks per host as this rank's launcher sets them, without communication.

    ``world`` if it sets no number that divides the world: every rank counts as local.
    """
    launched = launcher_variable(world)
    if launched is None:
        return world
    _, ranks_on_host = launched
    return ranks_on_host


def host_name() -> str:
    """Return this machine's name and its boot id, because clones may share a name.

    Containers and network namespaces of one machine share the boot id.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")[:8]
    except (OSError, ValueError):
        boot_id = ""
    return f"{socket.gethostname()} {boot_id}".strip()


class PlacementError(ValueError):
    """The ranks' placement on hosts does not form nodes."""


def place(
    hosts: Sequence[str], *, given: int | None, launched: Sequence[tuple[str, int] | None]
) -> tuple[int, str]:
    """Return the node size in consecutive ranks, and a warning for the user, or "".

    Several nodes on one host are accepted without a warning; a node that spans hosts is not.

    Args:
        hosts: of every rank.
        given: quantized_comm.node_size.
        launched: of every rank, see ``launcher_variable``.

    Raises:
        PlacementError: no node size was given, and none can be derived.
    """
    hosts = _labels(hosts)
    if given is not None:
        return given, _spanning_warning(hosts, given)
    runs = [len(list(same)) for _, same in groupby(hosts)]  # of ranks that share a host
    if len(runs) > len(set(hosts)):
        raise PlacementError(_scattered(hosts))
    first = launched[0]
    if first is not None and len(set(launched)) == 1:
        variable, size = first
        if node := _spanning(hosts, size):
            raise PlacementError(
                f"{variable}={size}, but {_where(hosts, node)}: unset it, or set "
                f"quantized_comm.node_size={math.gcd(*runs)}, the ranks that share a host"
            )
        return size, ""
    size = math.gcd(*runs)
    if len(set(runs)) == 1:
        return size, ""
    shown = ", ".join(map(str, runs[:8]))
    if len(runs) > 8:
        shown += " ..."
    return size, (
        f"hosts hold {shown} ranks, so "
        f"nodes are of {size}; equal numbers of ranks per host make larger nodes"
    )


def _labels(hosts: Sequence[str]) -> list[str]:
    """Drop the boot ids of ``host_name``, unless two hosts share a name."""
    names = {host: host.split(" ")[0] for host in hosts}
    if len(set(names.values())) < len(names):
        return list(hosts)
    return [names[host] for host in hosts]


def _spanning(hosts: Sequence[str], size: int) -> range | None:
    """Return the first node of ``size`` ranks that lies on several hosts."""
    for start in range(0, len(hosts), size):
        if len(set(hosts[start : start + size])) > 1:
            return range(start, start + size)
    return None


def _where(hosts: Sequence[str], ranks: range) -> str:
    """Describe the ranks of a node and their first three hosts."""
    runs = [(host, len(list(same))) for host, same in groupby(hosts[ranks.start : ranks.stop])]
    shown = ", ".join(f"{count} on {host}" for host, count in runs[:3])
    if len(runs) > 3:
        shown += ", ..."
    return f"ranks {ranks.start} to {ranks.stop - 1} lie on several hosts ({shown})"


def _spanning_warning(hosts: Sequence[str], size: int) -> str:
    """Return a warning if a node of the given size spans hosts, else ""."""
    node = _spanning(hosts, size)
    if node is None:
        return ""
    if len(list(groupby(hosts))) > len(set(hosts)):
        fix = f"place the ranks of a host one after the other ({_CONSECUTIVE})"
    else:
        shared = math.gcd(*(len(list(same)) for _, same in groupby(hosts)))
        fix = f"set it to {shared} or leave it out"
    return (
        f"node_size={size}, but {_where(hosts, node)}: what should stay inside a "
        f"node crosses the network; {fix}, unless a fast link such as NVLink joins these hosts"
    )


def _scattered(hosts: Sequence[str]) -> str:
    """Name a host whose ranks are not consecutive."""
    last_rank: dict[str, int] = {}  # of every host so far
    for rank, host in enumerate(hosts):
        if host in last_rank and last_rank[host] != rank - 1:
            between = hosts[rank - 1]
            return (
                f"the ranks of host {host} are not consecutive: rank {last_rank[host]} lies there, "
                f"rank {rank - 1} on {between}, rank {rank} there again, and a node is a run of "
                f"consecutive ranks. Place them so ({_CONSECUTIVE}), or set "
                "quantized_comm.node_size=1, which makes every rank a node of its own"
            )
        last_rank[host] = rank
    raise AssertionError("called with consecutive ranks on every host")
