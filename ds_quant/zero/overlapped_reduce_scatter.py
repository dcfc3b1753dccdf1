"""Overlap ZeRO-3 gradient reduction with backward on devices without streams (CPU).

[Note: late shards] On CUDA DeepSpeed reduces a bucket on a stream of its own while backward
continues. On the CPU backward would stop until the bucket has crossed the network. So the reduction
is only posted, and DeepSpeed stores the shards (``partition_grads``) later: when two more buckets
are posted, or when backward ends. The next bucket may overwrite the gradients, so the values that
this rank adds in full precision are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_quant.policy.in_flight import BUCKETS_AHEAD
from ds_quant.zero.deepspeed_types import ZeroParameter
from ds_quant.zero.shard_gradients import ShardBucket, ShardReduction
from ds_quant.zero.shard_hooks import Partition


class Backward(Enum):
    """Phase of a backward."""

    # Gradients are still computed: buckets may overlap with them.
    RUNNING = auto()
    # The last buckets are reduced: no shards may stay behind.
    ENDING = auto()


class OverlappedReduceScatter:
    """Posts gradient buckets, and lets DeepSpeed store their shards two buckets later."""

    def __init__(self, reduction: ShardReduction, wrapper: Partition | None) -> None:
        """wrapper: another replacement of ``partition_grads``, which gets the original."""
        self._reduction = reduction
        self._wrapper = wrapper
        self._phase = Backward.RUNNING
        # Reduced last; DeepSpeed has not asked to store its shards.
        self._latest: ShardBucket | None = None
        # Posted buckets, and functions that store their shards. At most BUCKETS_AHEAD between two
        # buckets, none after a backward: ``partition`` frees the oldest.
        self._posted: deque[tuple[ShardBucket, Callable[[list[Tensor]], None]]] = deque()
        # Dtypes whose shards DeepSpeed stores without changes.
        self._unscaled: set[torch.dtype] = set()

    def reduce(
        self,
        params: Sequence[ZeroParameter],
        tensors: list[Tensor],
        group: ProcessGroup | None,
    ) -> list[Tensor] | None:
        """Run ``ShardReduction``, except that the shards may be empty until ``partition``."""
        for posted, _ in self._posted:
            posted.sums.advance()
        bucket = self._reduction.begin(params, tensors, group)
        self._latest = bucket
        if bucket is None:
            return None
        # DeepSpeed may scale or cast shards before it stores them. The first bucket of a dtype is
        # reduced synchronously to find out.
        if tensors[0].dtype in self._unscaled:
            return bucket.shards
        return bucket.finish()

    def partition(
        self,
        original: Callable[..., object],
        params: Sequence[ZeroParameter],
        shards: list[Tensor],
    ) -> None:
        """Replace ``partition_grads``, which stores the shards and frees the gradients.

        Raises:
            RuntimeError: DeepSpeed has changed the shards of a dtype that it did not change before.
        """
        if self._wrapper is not None:
            original = partial(self._wrapper, original)
        bucket = self._latest
        self._latest = None
        if bucket is None or bucket.finished:
            original(params, shards)
            if bucket is not None and shards is bucket.shards:
                self._unscaled.add(shards[0].dtype)
            return
        if shards is not bucket.shards:
            raise RuntimeError(
                "quantized_comm: DeepSpeed scales the gradients of some buckets only; set "
                "zero_optimization.overlap_comm to false"
            )
        bucket_params = list(params)  # DeepSpeed clears its list
        for p in bucket_params:
            p.grad = None

        def store(shards: list[Tensor]) -> None:
            # The original frees gradients; these may be there again, of a later micro-step.
            later_grads = [p.grad for p in bucket_params]
            original(bucket_params, shards)
            for p, grad in zip(bucket_params, later_grads, strict=True):
                p.grad = grad

        self._posted.append((bucket, store))
        most_posted = BUCKETS_AHEAD
        if self._phase is Backward.ENDING:
            bucket.sums.advance()
            most_posted = 0
        while len(self._posted) > most_posted:
            oldest, store_oldest = self._posted.popleft()
            store_oldest(oldest.finish())

    @contextmanager
    def last_buckets(self) -> Iterator[None]:
        """Enter while DeepSpeed reduces the last buckets of a backward: all shards are stored.

        After a backward DeepSpeed 0.17 adds shards to the stored ones instead of copying them.
        """
        self._phase = Backward.ENDING
        try:
            yield
            # Every dtype that had a bucket has a last one, which stores all shards.
            if self._posted:
                raise RuntimeError(
                    f"quantized_comm: {len(self._posted)} gradient bucket(s) were not stored "
                    "at the end of the backward; set zero_optimization.overlap_comm: false and "
                    "report it with your ds_config.json"
                )
        finally:
            self._phase = Backward.RUNNING
