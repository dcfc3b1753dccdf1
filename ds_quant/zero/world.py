"""What the ranks do all together: votes, and the process groups of the two levels, which are the
ranks of a node and those of one place in all nodes.

[Note: how they are made] torch makes a group by a collective of the whole world, which at 64 nodes
of 8 ranks would be 72 of them. Where the world is bound to devices (NCCL) each would split a
communicator of 512 ranks; there one split makes the groups of all nodes and one those of all
places. Elsewhere only the members of a group make it, if all ranks know as many groups: torch names
such a group by its ranks and that number.

[Note: gradients inside a node] NCCL carries out what a communicator is given in order, so the next
gather of weights would wait behind slices of gradients, and those behind one that waits for the
network. On a device with streams gradients have a communicator of their own inside the node. All
ranks post on it in one order, that of DeepSpeed's buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ds_quant.comm.topology import Topology
from ds_quant.zero import hooks

# ---- votes ----


def minimum(numbers: list[int] | Tensor) -> list[int]:
    """Return the smallest of each number over all ranks. A collective of the whole world, which
    waits for the device; ``numbers`` may lie there, (count,) int64.
    """
    from deepspeed import comm as dist

    votes = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, device=hooks.device())
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return votes.tolist()


def backend() -> str:
    """What carries the collectives, such as "nccl"; "" for a process that is alone."""
    return torch.distributed.get_backend() if torch.distributed.is_initialized() else ""


def broadcast(value: Any, *, source: int) -> Any:
    """Return the value of rank ``source``. A collective of the whole world."""
    from deepspeed import comm as dist

    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


# ---- process groups ----


# Of this rank: those inside its node, between nodes, and inside it for gradients.
LevelGroups = tuple[Any, Any, Any]
_made: dict[Topology, LevelGroups] = {}


def level_groups(topology: Topology) -> LevelGroups:
    """The process groups of this rank. All engines of a topology share them: a group holds threads
    and connections until the process ends. A collective of the whole world.
    """
    known = c10d._world.pg_map
    if not all(group in known for group in _made.get(topology, [None])):  # destroyed since
        nodes, places = topology.levels()
        intra, inter = _new_groups(nodes), _new_groups(places)
        gradients = _new_groups(nodes) if hooks.has_streams() else intra
        _made[topology] = intra, inter, gradients
    return _made[topology]


def _new_groups(level: Sequence[list[int]]) -> Any:
    """The one of these process groups that has this rank: see [Note: how they are made].

    With the default group's timeout: torch's own default for new groups is 30 minutes.
    """
    whole = c10d._get_default_group()
    world = whole._get_backend(hooks.device())
    timeout = getattr(getattr(world, "options", None), "_timeout", None)
    if whole.bound_device_id is not None and getattr(world, "supports_splitting", False):
        return torch.distributed.split_group(
            split_ranks=list(level), timeout=timeout, pg_options=_options_of_split(world)
        )
    mine, groups = hooks.rank_and_world()[0], len(c10d._world.pg_names)
    (own,) = (ranks for ranks in level if mine in ranks)
    if minimum([groups, -groups]) == [groups, -groups]:
        return torch.distributed.new_group(own, timeout=timeout, use_local_synchronization=True)
    made = [torch.distributed.new_group(ranks, timeout=timeout) for ranks in level]
    return made[level.index(own)]


# What a user may have set of the world's options and a part of it takes over.
_INHERITED = "is_high_priority_stream", "config"


def _options_of_split(world: Any) -> Any:
    """Return new options for one split of the world, set as its own are.

    Without them torch before 2.10 hands over the world's own object. A split writes the ranks of
    its group there, which the next split indexes by ranks of the world: out of bounds.

    A world that is not the first NCCL group of its process does not know its ranks, and its splits
    would read them from an empty list. So the world is told its ranks here.
    """
    given = world.options
    if getattr(given, "global_ranks_in_group", None) == []:
        given.global_ranks_in_group = list(range(hooks.rank_and_world()[1]))
    options = type(given)()
    for name in _INHERITED:
        if hasattr(given, name):
            setattr(options, name, getattr(given, name))
    return options
