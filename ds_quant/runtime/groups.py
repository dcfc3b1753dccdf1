"""The process groups of the two levels: the ranks of a node, and the ranks of equal index in all
nodes.

[Note: making process groups] torch makes a process group by a collective of the whole world. At 64
nodes of 8 ranks these would be 72 collectives. Where the world is bound to devices (NCCL), each
would also split a communicator of 512 ranks; one split makes the groups of all nodes and a second
one those of all indices. Elsewhere only its members make a group, if all ranks know as many groups:
torch names such a group by its ranks and that number.

[Note: gradients inside a node] NCCL runs the operations of a communicator in order. With one
communicator the next gather of weights would wait behind slices of gradients, and those behind a
gather that waits for the network. So gradients have a second communicator inside the node on a
device with streams. All ranks post on it in one order, that of the reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ds_quant.comm.topology import Topology

# Of this rank: inside its node, between nodes, and inside its node for gradients.
LevelGroups = tuple[Any, Any, Any]
Vote = Callable[[list[int]], list[int]]
_level_groups: dict[Topology, LevelGroups] = {}
_groups: dict[tuple[int, ...], ProcessGroup] = {}  # by global ranks


def level_groups(
    topology: Topology, *, device: torch.device, has_streams: bool, least: Vote
) -> LevelGroups:
    """Return the process groups of this rank, made once per topology. A collective of its ranks.

    All runs of a topology share them: a group holds threads and connections until the process ends.

    device: of the collectives.
    has_streams: the device works on streams.
    least: returns the minimum of each number over the ranks of the topology. A collective.
    """
    known = c10d._world.pg_map
    groups = _level_groups.get(topology)
    if groups is None or not all(group in known for group in groups):  # destroyed since
        nodes, indices = topology.levels()
        make = _maker(topology, device, least)
        intra = make(nodes)
        inter = make(indices)
        gradients = intra
        if has_streams:  # see [Note: gradients inside a node]
            gradients = make(nodes)
        _level_groups[topology] = intra, inter, gradients
    return _level_groups[topology]


def group_of(ranks: Sequence[int], *, device: torch.device, least: Vote) -> ProcessGroup | None:
    """Return a process group of these global ranks, None for the whole world. A collective of them.

    least: as of ``level_groups``, over these ranks.
    """
    if list(ranks) == list(range(torch.distributed.get_world_size())):
        return None
    key = tuple(ranks)
    if key not in _groups or _groups[key] not in c10d._world.pg_map:  # destroyed since
        topology = Topology(world=len(ranks), node_size=len(ranks), ranks=key)
        _groups[key] = _maker(topology, device, least)([list(ranks)])
    return _groups[key]


def _maker(
    topology: Topology, device: torch.device, least: Vote
) -> Callable[[Sequence[list[int]]], ProcessGroup]:
    """Return a function that makes process groups and returns that of this rank: see
    [Note: making process groups].

    Its argument is a partition of the topology's ranks: the ranks of every group. The groups get
    the timeout of the default group; torch's default for new groups is 30 minutes.

    least: as of ``level_groups``.
    """
    world = c10d._get_default_group()
    backend = world._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    can_split = world.bound_device_id is not None and getattr(backend, "supports_splitting", False)
    is_whole_world = not topology.ranks

    def make(partition: Sequence[list[int]]) -> ProcessGroup:
        if can_split and is_whole_world:
            group = torch.distributed.split_group(
                split_ranks=list(partition),
                timeout=timeout,
                pg_options=_options_of_split(backend),
            )
            assert group is not None  # this rank is in one of the groups
            return group
        rank = torch.distributed.get_rank()
        (own,) = [ranks for ranks in partition if rank in ranks]
        count = len(c10d._world.pg_names)
        fewest, minus_most = least([count, -count])
        if fewest == -minus_most:  # members alone make their group
            return torch.distributed.new_group(own, timeout=timeout, use_local_synchronization=True)
        if not is_whole_world:
            raise RuntimeError(
                f"quantized_comm: this rank knows {count} process groups, another rank of "
                f"{list(topology.ranks)} knows another number, and torch names a new group by it: "
                "make process groups in equal number on all ranks that share a model"
            )
        # Every rank of the world takes part in making every group.
        made = [torch.distributed.new_group(ranks, timeout=timeout) for ranks in partition]
        return made[partition.index(own)]

    return make


_INHERITED = "is_high_priority_stream", "config"  # options that a user may have set


def _options_of_split(world_backend: Any) -> Any:
    """Return new options for one split of the world, with the settings of the world.

    Without options torch before 2.10 passes the world's own object to the split, which writes the
    ranks of its group there. The next split indexes these by ranks of the world: out of bounds.

    A world that is not the first NCCL group of its process does not know its ranks, and its splits
    would read them from an empty list. So they are set here.
    """
    given = world_backend.options
    if getattr(given, "global_ranks_in_group", None) == []:
        given.global_ranks_in_group = list(range(torch.distributed.get_world_size()))
    options = type(given)()
    for name in _INHERITED:
        if hasattr(given, name):
            setattr(options, name, getattr(given, name))
    return options
