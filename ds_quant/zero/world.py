"""Collectives of the whole world: votes, and the process groups of the two levels."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ds_quant.comm.topology import Topology
from ds_quant.runtime import groups
from ds_quant.runtime.groups import LevelGroups
from ds_quant.zero import accelerator

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


def level_groups(topology: Topology) -> LevelGroups:
    """Return the process groups of this rank, made once per topology. A collective."""
    return groups.level_groups(
        topology,
        device=accelerator.device(),
        has_streams=accelerator.has_streams(),
        least=minimum,
    )
