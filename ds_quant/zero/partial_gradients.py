"""Gradients that wait, summed inside their node, for the last micro-step of an optimizer step.

[Note: partial gradients] Before the boundary of gradient accumulation a bucket takes only the first
of its two hops (see comm/reduce.py), and DeepSpeed gets zeros. At the boundary it takes both, with
the waiting sums, and DeepSpeed gets the whole sum. Partial sums are stored per bucket; a bucket is
identified by its parameters and their cuts, which repeat in every micro-step unless parameters come
and go. If a parameter turns up in another bucket, the old one is sent at once, and the sums of its
parameters, of this rank's elements only, wait for their next bucket at the boundary. A parameter
without a gradient at the boundary gets one of zeros there, after the last bucket, in module order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_quant.comm.reduce import Reduction
from ds_quant.zero import hooks, offload
from ds_quant.zero.param import Param

Member = tuple[Param, int]  # a parameter, and the rank that owns this part of it or -1


@dataclass(frozen=True, kw_only=True)
class PartialBucket:
    """Partial sums of some parameters.

    cross: takes the second hop; this rank's sums by member, fp32, of no elements where another
    rank's.
    """

    members: Sequence[Member]
    values: Tensor
    added: Reduction
    cross: Callable[[], Iterable[tuple[Member, Tensor]]]


class PartialGradients:
    """The sums of one engine: see [Note: partial gradients]. Empty between optimizer steps."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._step = -1
        self._buckets: dict[Hashable, PartialBucket] = {}
        self._keys: dict[Member, Hashable] = {}  # of the bucket that had it last
        self._crossed: dict[Member, Tensor] = {}  # sums that wait for their bucket
        self.nbytes = self.most_nbytes = 0  # now, and at most so far
        self._left: set[Param] = set()  # those that are given zeros now
        self._is_over = False  # the accumulation, whatever the engine says

    def take(self, key: Hashable, members: Sequence[Member]) -> PartialBucket | None:
        """Return and forget what waits of a make-up; others with any of its parameters cross.
        All ranks call it in the same order.
        """
        step = self._engine.global_steps
        if step != self._step:
            self.drop()
            self._step = step
        found = self._pop(key)
        if found is None and self._buckets:
            keys = dict.fromkeys(self._keys.get(member) for member in members)
            for bucket in map(self._pop, keys):
                if bucket is not None:
                    self._cross(bucket)
        return found

    def _pop(self, key: Hashable) -> PartialBucket | None:
        found = self._buckets.pop(key, None)
        if found is not None:
            self.nbytes -= found.values.nbytes
            hooks.keep_for_current_stream(found.values)  # see ``return_to_device``
        return found

    def put(self, key: Hashable, bucket: PartialBucket) -> None:
        """Hold a bucket."""
        if self._keys.get(bucket.members[0]) != key:
            self._keys.update(dict.fromkeys(bucket.members, key))
        self._buckets[key] = bucket
        self.nbytes += bucket.values.nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)

    def drop(self) -> None:
        """Forget what waits: an accumulation was abandoned."""
        self._buckets.clear()
        self._keys.clear()
        self._crossed.clear()
        self.nbytes = 0

    def leave_device(self, *, pin: bool) -> None:
        """See ``offload.follow_states``."""
        for sums in self._sums():
            room = torch.empty_like(sums, device="cpu")
            sums.data = (offload.pin(room) if pin else room).copy_(sums)

    def return_to_device(self) -> None:
        """See ``offload.follow_states``. The current stream makes these sums, and the one that
        reduces takes them.
        """
        for sums in self._sums():
            sums.data = sums.to(hooks.device())

    def _sums(self) -> Iterator[Tensor]:
        for bucket in self._buckets.values():
            bucket.added.wait()
            yield bucket.values
        yield from self._crossed.values()

    def waits(self, member: Member) -> bool:
        """Whether something waits of it."""
        return self._keys.get(member) in self._buckets

    def are_left(self, members: Sequence[Member]) -> bool:
        """Whether a bucket has the zeros of ``reduce_rest`` only."""
        return bool(self._left) and all(param in self._left for param, _ in members)

    def take_crossed(self, members: Sequence[Member]) -> dict[Member, Tensor]:
        """Sums that waited for a bucket at the boundary."""
        if not self._crossed:
            return {}
        taken = {m: self._crossed.pop(m) for m in members if m in self._crossed}
        for sums in taken.values():
            hooks.keep_for_current_stream(sums)
        return taken

    def reduce_rest(
        self, flush: Callable[[], None], reduce_zeros: Callable[[Sequence[Any]], None]
    ) -> None:
        """At the boundary, when backward has computed its last gradient: reduce what is left of
        parameters that had none. Arguments: see ``hooks.shard_buckets``.
        """
        if not (self._buckets or self._crossed):
            return
        if not self._is_over and not self._engine.is_gradient_accumulation_boundary():
            return
        flush()
        waiting = [member for bucket in self._buckets.values() for member in bucket.members]
        self._left = {param for param, _ in (*waiting, *self._crossed)}
        try:
            in_order = sorted(self._left, key=lambda param: param.index)
            reduce_zeros([param.tensor for param in in_order])
            if self._left:
                flush()
        finally:
            self._left = set()

    def finish(self, optimizer: Any) -> None:
        """Backward could not know that it was the last one: its user decides when to step."""
        if self._buckets or self._crossed:
            self._is_over = True
            try:
                optimizer.independent_gradient_partition_epilogue()
            finally:
                self._is_over = False

    def _cross(self, bucket: PartialBucket) -> None:
        for member, sums in bucket.cross():
            waiting = self._crossed.get(member)
            if waiting is not None:
                hooks.keep_for_current_stream(waiting)
            self._crossed[member] = sums if waiting is None else waiting + sums
