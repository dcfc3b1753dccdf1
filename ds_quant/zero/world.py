"""Small collectives of the whole world, on its own process group."""

from __future__ import annotations

from typing import Any

import torch

from ds_quant.zero import parameters


def minimum(numbers: list[int]) -> list[int]:
    """The smallest of each number over all ranks. A collective of the whole world."""
    from deepspeed import comm as dist

    votes = torch.tensor(numbers, device=parameters.device())
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return votes.tolist()


def broadcast(value: Any, *, source: int) -> Any:
    """The value that rank ``source`` gives. A collective of the whole world."""
    from deepspeed import comm as dist

    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def new_group(ranks: list[int]) -> Any:
    """A process group of global ranks, as patient as the world's: without being told, torch gives
    every new group half an hour. A collective of the whole world.
    """
    whole = torch.distributed.distributed_c10d._get_default_group()
    world = whole._get_backend(parameters.device())
    timeout = getattr(getattr(world, "options", None), "_timeout", None)
    return torch.distributed.new_group(ranks, timeout=timeout)
