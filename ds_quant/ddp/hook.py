"""The communication hook of a DDP model, which torch can register once and not remove.

DDP compares the annotations of a hook with its own types, so they must not be strings here: this
module has no ``from __future__ import annotations``.
"""

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ds_quant.config.errors import KEY, AttachError


class Reducer(Protocol):
    """Reduces the buckets of a model."""

    def reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the mean of a bucket over all ranks, as torch's communication hooks do."""


class Hook:
    """The state of the hook of one model.

    reducer: reduces the buckets; None before ``attach`` is through and after ``detach``, which
        frees it: then buckets are reduced as by DDP without a hook.

    Must not refer to the model, which could never be freed: torch's C++ code holds the hook.
    """

    def __init__(self) -> None:
        self.reducer: Reducer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without the reducer: DDP does not register the hooks of a copied or loaded model."""
        return Hook, ()


def reduce_bucket(state: Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run as the communication hook.

    Raises:
        RuntimeError: another caller than DDP's reducer.
    """
    if not isinstance(bucket, GradBucket):
        raise RuntimeError(
            f'{KEY}: torch._dynamo.config.optimize_ddp="python_reducer" gives a communication hook '
            'single gradients: allowed: "ddp_optimizer" (the default), "no_optimization"'
        )
    if state.reducer is None:
        return mean_of_ranks(bucket.buffer())
    return state.reducer.reduce(bucket)


def mean_of_ranks(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Replace values by their mean over all ranks, with the bits of DDP without a hook.

    DDP multiplies by the inverse of the number of ranks, and torch's ``allreduce_hook`` divides.
    """
    buffer.mul_(1 / dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda reduced: reduced.value()[0])


_hooks: "WeakKeyDictionary[DistributedDataParallel, Hook]" = WeakKeyDictionary()


def find(model: DistributedDataParallel) -> Hook | None:
    """Return the hook that ``register`` has given the model, None if there is none."""
    return _hooks.get(model)


def register(model: DistributedDataParallel) -> Hook:
    """Give the model its hook, without a reducer.

    Raises:
        AttachError: it has another hook.
    """
    hook = Hook()
    try:
        model.register_comm_hook(hook, reduce_bucket)
    except RuntimeError as error:
        raise AttachError(
            f"{KEY}: this model has a communication hook already, and DDP takes one: leave out "
            "the other one: register_comm_hook, DDPStrategy(ddp_comm_hook=), mixed_precision=, an "
            f"optimizer that steps in backward, or the overlap of ZeroRedundancyOptimizer ({error})"
        ) from error
    _hooks[model] = hook
    return hook
