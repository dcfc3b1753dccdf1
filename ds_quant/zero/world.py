"""Collectives of the whole world: votes, and the process groups of the two levels.

The levels are the ranks of a node, and the ranks of equal index in all nodes.

[Note: making process groups] torch makes a process group by a collective of the whole world. At 64
nodes of 8 ranks these would be 72 collectives. Where the world is bound to devices (NCCL), each
would also split a communicator of 512 ranks; one split makes the groups of all nodes and a second
one those of all indices. Elsewhere only its members make a group, if all ranks know as many groups:
torch names such a group by its ranks and that number.

[Note: gradients inside a node] NCCL runs the operations of a communicator in order. With one
communicator the next gather of weights would wait behind slices of gradients, and those behind a
gather that waits for the network. So gradients have a second communicator inside the node on a
device with streams. All ranks post on it in one order, that of DeepSpeed's buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ds_quant.comm.topology import Topology
from ds_quant.zero import accelerator, hooks

T = TypeVar("T")

# ---- votes ----


def minimum(numbers: list[int] | Tensor) -> list[int]:
    """Return the minimum of each number over all ranks. A collective; waits for the device.

    ``Communicator.least`` takes the minimum inside one process group. This one also works before
    there is a communicator, and shows up in DeepSpeed's comms_logger.

    numbers: a list, or (count,) int64 on the device.
    """
    from deepspeed import comm as dist

    if isinstance(numbers, Tensor):
        votes = numbers
    else:
        votes = torch.tensor(numbers, device=accelerator.device())
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return votes.tolist()


def backend() -> str:
    """Return the name of the default backend, such as "nccl"; "" without a process group."""
    return torch.distributed.get_backend() if torch.distributed.is_initialized() else ""


def broadcast(value: T, *, source: int) -> T:
    """Return the value of rank ``source``. A collective."""
    from deepspeed import comm as dist

    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


# ---- process groups ----


# Of this rank: inside its node, between nodes, and inside its node for gradients.
LevelGroups = tuple[Any, Any, Any]
_made: dict[Topology, LevelGroups] = {}


def level_groups(topology: Topology) -> LevelGroups:
    """Return the process groups of this rank, made once per topology. A collective.

    All engines of a topology share them: a group holds threads and connections until the process
    ends.
    """
    known = c10d._world.pg_map
    groups = _made.get(topology)
    if groups is None or not all(group in known for group in groups):  # destroyed since
        nodes, indices = topology.levels()
        intra = _new_groups(nodes)
        inter = _new_groups(indices)
        gradients = intra
        if accelerator.has_streams():  # see [Note: gradients inside a node]
            gradients = _new_groups(nodes)
        _made[topology] = intra, inter, gradients
    return _made[topology]


def _new_groups(level: Sequence[list[int]]) -> ProcessGroup | None:
    """Make the process groups of a level, and return that of this rank.

    See [Note: making process groups]. They get the default group's timeout: torch's default for new
    groups is 30 minutes.
    """
    world = c10d._get_default_group()
    world_backend = world._get_backend(accelerator.device())
    timeout = getattr(getattr(world_backend, "options", None), "_timeout", None)
    if world.bound_device_id is not None and getattr(world_backend, "supports_splitting", False):
        return torch.distributed.split_group(
            split_ranks=list(level),
            timeout=timeout,
            pg_options=_options_of_split(world_backend),
        )
    rank, _ = hooks.rank_and_world()
    (own,) = [ranks for ranks in level if rank in ranks]
    groups = len(c10d._world.pg_names)
    all_know_as_many = minimum([groups, -groups]) == [groups, -groups]
    if all_know_as_many:
        return torch.distributed.new_group(own, timeout=timeout, use_local_synchronization=True)
    made = [torch.distributed.new_group(ranks, timeout=timeout) for ranks in level]
    return made[level.index(own)]


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
        given.global_ranks_in_group = list(range(hooks.rank_and_world()[1]))
    options = type(given)()
    for name in _INHERITED:
        if hasattr(given, name):
            setattr(options, name, getattr(given, name))
    return options
