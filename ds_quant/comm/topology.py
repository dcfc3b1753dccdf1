"""Topology: which ranks share a node. The node size is an argument, never a count of devices, so
that a few processes on one machine can stand for several nodes. Standard library only.
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
    """``world`` ranks in nodes of ``node_size`` consecutive global ranks."""

    world: int
    node_size: int

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
        """Global ranks of every node, and of every local place over the nodes."""
        intra = [list(range(n, n + self.node_size)) for n in range(0, self.world, self.node_size)]
        inter = [list(range(g, self.world, self.node_size)) for g in range(self.node_size)]
        return intra, inter

    def node_of(self, rank: int) -> int:
        """Node index of a global rank."""
        return rank // self.node_size


def divisors(world: int) -> list[int]:
    """Return the node sizes that divide a world, ascending.

    Above 1e12 ranks some are left out: `ds_quant validate --world` answers at once for any number.
    """
    small = [size for size in range(1, min(math.isqrt(world), 10**6) + 1) if world % size == 0]
    large = [world // size for size in small]
    return sorted({*small, *large})


def launched_size(world: int) -> tuple[str, int] | None:
    """Return the variable in which the launcher gives the ranks of this host (deepspeed:
    LOCAL_SIZE, torchrun: LOCAL_WORLD_SIZE), and its value; None if it gives none that divides the
    world.

    In this order: under the deepspeed launcher on CPU, accelerate sets LOCAL_WORLD_SIZE to 1.
    """
    for variable in _VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal() and int(value) > 0 and world % int(value) == 0:
            return variable, int(value)
    return None


def default_node_size(world: int) -> int:
    """Return the ranks per host that the launcher of this rank gives, without asking the others;
    ``world`` if it does not say: every rank counts as local.
    """
    launched = launched_size(world)
    return world if launched is None else launched[1]


def host_name() -> str:
    """Return this machine's name and an id of its running system: clones may share a name.
    Containers and network namespaces of one machine share the id.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")[:8]
    except (OSError, ValueError):
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


class PlacementError(ValueError):
    """The ranks' placement on hosts does not form nodes."""


def place(
    hosts: Sequence[str], *, given: int | None, launched: Sequence[tuple[str, int] | None]
) -> tuple[int, str]:
    """Decide how many consecutive ranks make a node; also what a user should know, or "".

    Several nodes on one host are as good as declared; a node that spans hosts is not.

    Args:
        hosts: of every rank.
        given: quantized_comm.node_size.
        launched: what the launcher told every rank, see ``launched_size``.

    Raises:
        PlacementError: nobody gave a node size, and none can be found.
    """
    hosts = _labels(hosts)
    if given is not None:
        return given, _given_spans(hosts, given)
    runs = [len(list(same)) for _, same in groupby(hosts)]
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
    uneven = len(set(runs)) > 1
    warning = (
        f"hosts hold {', '.join(map(str, runs[:8]))}{' ...' if len(runs) > 8 else ''} ranks, so "
        f"nodes are of {size}; equal numbers of ranks per host make larger nodes"
    )
    return size, warning if uneven else ""


def _labels(hosts: Sequence[str]) -> list[str]:
    """Drop the ids that ``host_name`` adds, unless they tell two hosts apart."""
    short = {host: host.split(" ")[0] for host in hosts}
    return [short[host] if len(set(short.values())) == len(short) else host for host in hosts]


def _spanning(hosts: Sequence[str], size: int) -> range | None:
    """Find the first node of ``size`` ranks that lies on several hosts."""
    for start in range(0, len(hosts), size):
        if len(set(hosts[start : start + size])) > 1:
            return range(start, start + size)
    return None


def _where(hosts: Sequence[str], ranks: range) -> str:
    """Describe the ranks of a node and their hosts, the first three."""
    runs = [(host, len(list(same))) for host, same in groupby(hosts[ranks.start : ranks.stop])]
    shown = ", ".join(f"{count} on {host}" for host, count in runs[:3])
    more = ", ..." if len(runs) > 3 else ""
    return f"ranks {ranks.start} to {ranks.stop - 1} lie on several hosts ({shown}{more})"


def _given_spans(hosts: Sequence[str], size: int) -> str:
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
    """Name a host whose ranks do not follow each other."""
    ended: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        if host in ended and ended[host] != rank - 1:
            between = hosts[rank - 1]
            return (
                f"the ranks of host {host} are not consecutive: rank {ended[host]} lies there, "
                f"rank {rank - 1} on {between}, rank {rank} there again, and a node is a run of "
                f"consecutive ranks. Place them so ({_CONSECUTIVE}), or set "
                "quantized_comm.node_size=1, which makes every rank a node of its own"
            )
        ended[host] = rank
    raise AssertionError("called for hosts in order")
