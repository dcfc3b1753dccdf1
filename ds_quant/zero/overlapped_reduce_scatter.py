"""Overlap ZeRO-3 gradient reduction with backward on devices without streams (CPU).

[Note: late shards] On CUDA DeepSpeed reduces a bucket on a stream of its own and backward goes on.
On the CPU nothing runs by itself, and backward would stand still until a bucket has crossed the
network. So a bucket is only posted there, and what DeepSpeed does with its shards
(``partition_grads``) is put off: until two later buckets were posted, or backward ends. The next
bucket may overwrite the gradients, so what this rank adds up exactly is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_quant.policy.memory import BUCKETS_AHEAD
from ds_quant.zero.gradients import Bucket, ShardReduction


class OverlappedReduceScatter:
    """Post gradient buckets, and hand their shards to DeepSpeed two buckets later."""

    def __init__(self, reduction: ShardReduction, skip: Callable[..., Any] | None) -> None:
        """``skip``: goes around DeepSpeed's ``partition_grads``, if anything does."""
        self._reduction, self._skip = reduction, skip
        self._begun: Bucket | None = None  # its shards are still in DeepSpeed's hands
        self._under_way: deque[tuple[Bucket, Callable[[], Any]]] = deque()
        self._untouched: set[torch.dtype] = set()
        self._ends = False  # backward

    def reduce(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any
    ) -> list[torch.Tensor] | None:
        """As ``ShardReduction``, except that the shards may be empty until ``partition``."""
        for bucket, _ in self._under_way:
            bucket.sums.advance()
        self._begun = bucket = self._reduction.begin(params, tensors, group)
        if bucket is None:
            return None
        # DeepSpeed may scale or cast shards before it stores them. The first bucket shows it.
        return bucket.shards if tensors[0].dtype in self._untouched else bucket.finish()

    def partition(
        self, original: Callable[..., Any], params: Sequence[Any], shards: list[torch.Tensor]
    ) -> None:
        """Replaces ``partition_grads``, which copies shards to where the optimizer finds them and
        frees the gradients.

        Raises:
            RuntimeError: DeepSpeed has changed shards that it had left alone before.
        """
        if self._skip is not None:
            original = partial(self._skip, original)
        bucket, self._begun = self._begun, None
        if bucket is None or bucket.finished:
            original(params, shards)
            if bucket is not None and shards is bucket.shards:
                self._untouched.add(shards[0].dtype)
            return
        if shards is not bucket.shards:
            raise RuntimeError(
                "quantized_comm: DeepSpeed scales the gradients of some buckets only; set "
                "zero_optimization.overlap_comm to false"
            )
        params = list(params)  # DeepSpeed clears its list
        for p in params:
            p.grad = None

        def store(shards: list[torch.Tensor]) -> None:
            grads = [p.grad for p in params]  # of later micro-steps: the original frees them
            original(params, shards)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad

        self._under_way.append((bucket, store))
        if self._ends:
            bucket.sums.advance()
        while len(self._under_way) > (0 if self._ends else BUCKETS_AHEAD):
            oldest, put_away = self._under_way.popleft()
            put_away(oldest.finish())

    @contextmanager
    def last_buckets(self) -> Iterator[None]:
        """Inside, DeepSpeed reduces what is left in its buckets, and every shard is stored: after
        it, DeepSpeed 0.17 would add shards to those of this backward instead of copying them.
        """
        self._ends = True
        try:
            yield
            if self._under_way:  # of a dtype of which there was a bucket, there is a last one
                raise RuntimeError(
                    f"quantized_comm: {len(self._under_way)} gradient bucket(s) were not put away "
                    "at the end of the backward; set zero_optimization.overlap_comm: false and "
                    "report it with your ds_config.json"
                )
        finally:
            self._ends = False
