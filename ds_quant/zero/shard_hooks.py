"""Contacts with DeepSpeed's private names that only gradients of ZeRO-3 need; see hooks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_quant.zero import accelerator
from ds_quant.zero.deepspeed_types import ShardOptimizer, ZeroParameter
from ds_quant.zero.hooks import AVG_SCATTER, BucketFunctions, ExpectedCall, Hooks, require

_FLUSH = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"

_reduce_scatter = ExpectedCall("reduce_scatter_coalesced")


class Reduce(Protocol):
    """Replacement of ``reduce_scatter_coalesced``, which returns this rank's shards.

    Returns None to leave the bucket to DeepSpeed.
    """

    def __call__(
        self, params: Sequence[ZeroParameter], tensors: list[Tensor], group: ProcessGroup | None, /
    ) -> list[Tensor] | None: ...


class Partition(Protocol):
    """Replacement of ``partition_grads``, which stores the shards; gets the original first."""

    def __call__(
        self,
        original: Callable[..., object],
        params: Sequence[ZeroParameter],
        shards: list[Tensor],
        /,
    ) -> object: ...


def wrap_shard_reduction(hooks: Hooks, reduce: Reduce, partition: Partition | None = None) -> None:
    """Replace the reduce-scatter of gradients, and the storing of its shards if given.

    DeepSpeed's reduce-scatter gets tensors only. The method that calls it has their parameters.
    """
    from deepspeed.runtime.zero import stage3

    _reduce_scatter.install(stage3)
    original = stage3.reduce_scatter_coalesced.ds_quant_wraps

    def around(
        avg_scatter: Callable[..., list[Tensor]],
        params: Sequence[ZeroParameter],
        *args: object,
        **kwargs: object,
    ) -> list[Tensor]:
        def scatter(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
            shards = reduce(params, tensors, group)
            return original(tensors, group) if shards is None else shards

        with _reduce_scatter.through(scatter):
            return avg_scatter(params, *args, **kwargs)

    hooks.wrap(hooks.optimizer, AVG_SCATTER, around)
    if partition is not None:
        hooks.wrap(hooks.optimizer, "partition_grads", partition)


def shard_buckets(optimizer: ShardOptimizer) -> BucketFunctions:
    """Return two functions on the buckets in which ZeRO-3 collects gradients.

    ``flush()`` reduces their content. ``reduce_zeros(params)`` puts a gradient of zeros into them
    for every parameter; a bucket that is full is reduced.
    """
    require(optimizer, _FLUSH)

    def flush() -> None:
        for dtype in sorted(optimizer.ipg_buckets, key=str):
            getattr(optimizer, _FLUSH)(dtype)

    def reduce_zeros(params: Sequence[ZeroParameter]) -> None:
        for p in params:
            p.grad = torch.empty_like(p)  # a partitioned parameter is empty, so is its gradient
            p.grad.data = torch.zeros(p.ds_shape, dtype=p.dtype, device=accelerator.device())
            optimizer.reduce_ready_partitions_and_remove_grads(p)

    return flush, reduce_zeros


def updated_parameters(optimizer: ShardOptimizer) -> list[ZeroParameter]:
    """Return the parameters whose shards a step overwrites with the master weights."""
    require(optimizer, "fp16_groups")
    return [p for group in optimizer.fp16_groups for p in group]


def skip_zero_shards(
    optimizer: ShardOptimizer, has_partial_sums: Callable[[ZeroParameter], bool]
) -> Partition:
    """Return a ``Partition`` that does not add zeros to stored shards.

    A bucket whose parameters all have partial sums has shards of zeros. An offloaded optimizer
    stores its shards on the host: adding zeros to them would take a copy.
    """
    require(optimizer, "micro_step_id")

    def partition(
        original: Callable[..., object], params: Sequence[ZeroParameter], shards: list[Tensor], /
    ) -> object:
        if optimizer.micro_step_id == 0 or not all(map(has_partial_sums, params)):
            return original(params, shards)
        for p in params:
            if p.grad is not None:
                accelerator.keep_for_current_stream(p.grad)
            p.grad = None
        return []

    return partition
