"""Partial gradient sums, kept in their node until the last micro-step of an optimizer step.

[Note: partial gradients] Before the boundary of gradient accumulation a bucket takes only the first
of its two hops (see comm/reduce.py): the ranks of a node keep its *partial sums*, and DeepSpeed
gets zeros. At the boundary the bucket takes both hops, the second one with the partial sums, and
DeepSpeed gets the whole sum.

Partial sums are kept per bucket. A bucket is identified by its parameters and their cuts, which
repeat in every micro-step unless parameters come and go. Two cases need more:

- A parameter turns up in another bucket. The old bucket is reduced between the nodes at once. Its
  *reduced sums*, of this rank's elements only, are added to the next bucket of each parameter at
  the boundary.
- A parameter has no gradient at the boundary. It gets one of zeros there, after the last bucket,
  in module order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from ds_quant.comm.reduce import Reduction
from ds_quant.runtime.param import Param
from ds_quant.zero import accelerator, offload
from ds_quant.zero.deepspeed_types import ZeroOptimizer, ZeroParameter

# Key of a gradient slice: its parameter and the rank that owns it under ZeRO-1 and 2.
Member = tuple[Param, int]

NO_OWNER = -1  # instead of a rank, under ZeRO-3: every rank has a shard


class MicroSteps(Protocol):
    """The part of DeepSpeed's engine that counts micro-steps."""

    global_steps: int

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True in the last micro-step of an optimizer step."""


class Boundary(Enum):
    """Source of the answer to "is this the last micro-step?"."""

    # DeepSpeed counts micro-steps, or the user has declared the boundary before backward.
    DECLARED = auto()
    # The user steps after a backward that was not declared to be the last one.
    STEPPING = auto()


@dataclass(frozen=True, kw_only=True)
class PartialBucket:
    """Partial sums of some gradient slices.

    values: fp32 sums over the micro-steps and the ranks of the node.
    reduction: the running reduction inside the node that adds to ``values``.
    reduce_between_nodes: runs the second hop; yields this rank's sum of each member, fp32, without
        elements for members of other ranks.
    """

    members: Sequence[Member]
    values: Tensor
    reduction: Reduction
    reduce_between_nodes: Callable[[], Iterable[tuple[Member, Tensor]]]


class PartialGradients:
    """The partial sums of one engine: see [Note: partial gradients].

    Empty between optimizer steps.

    nbytes: bytes of partial sums now.
    most_nbytes: most bytes so far.
    """

    def __init__(self, engine: MicroSteps) -> None:
        self._engine = engine
        self._step = -1
        # Sums that are not reduced between the nodes. The bucket of the last micro-step frees them
        # (``pop``), or ``discard``, if the accumulation is abandoned.
        self._buckets: dict[Hashable, PartialBucket] = {}
        self._keys: dict[Member, Hashable] = {}  # of the bucket that had the member last
        # Reduced sums of this rank's elements. Freed as the others, by ``pop_reduced``.
        self._reduced: dict[Member, Tensor] = {}
        self._zeroed: set[Param] = set()  # parameters that are given zeros now
        self._boundary = Boundary.DECLARED
        self.nbytes = 0
        self.most_nbytes = 0

    # ---- one bucket ----

    def keep(self, key: Hashable, bucket: PartialBucket) -> None:
        """Keep the partial sums of a bucket until ``pop``."""
        if self._keys.get(bucket.members[0]) != key:
            self._keys.update(dict.fromkeys(bucket.members, key))
        self._buckets[key] = bucket
        self.nbytes += bucket.values.nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)

    def pop(self, key: Hashable, members: Sequence[Member]) -> PartialBucket | None:
        """Remove and return the partial sums of a bucket, None if there are none.

        Without them the buckets that had its members last are reduced between the nodes, for
        ``pop_reduced``: a collective, called by all ranks in the same order.

        key: None for a bucket that was never kept.
        """
        step = self._engine.global_steps
        if step != self._step:
            self.discard()
            self._step = step
        bucket = self._remove(key)
        if bucket is None and self._buckets:
            keys = dict.fromkeys(self._keys.get(member) for member in members)
            for overlapping in map(self._remove, keys):
                if overlapping is not None:
                    self._reduce(overlapping)
        return bucket

    def pop_reduced(self, members: Sequence[Member]) -> dict[Member, Tensor]:
        """Remove and return the reduced sums of these members."""
        if not self._reduced:
            return {}
        popped = {m: self._reduced.pop(m) for m in members if m in self._reduced}
        for sums in popped.values():
            accelerator.keep_for_current_stream(sums)
        return popped

    def discard(self) -> None:
        """Discard all sums: the accumulation was abandoned.

        No stream needs their memory. A running reduction adds to them in its ``wait``, which nobody
        calls any more, and DeepSpeed ends every backward with a wait for the stream of reductions.
        """
        self._buckets.clear()
        self._keys.clear()
        self._reduced.clear()
        self.nbytes = 0

    def holds(self, member: Member) -> bool:
        """Return True if there are partial sums of the member."""
        return self._keys.get(member) in self._buckets

    def only_zeros(self, members: Sequence[Member]) -> bool:
        """Return True if the bucket of these members holds only zeros of ``reduce_remaining``."""
        return bool(self._zeroed) and all(param in self._zeroed for param, _ in members)

    def _remove(self, key: Hashable) -> PartialBucket | None:
        bucket = self._buckets.pop(key, None)
        if bucket is not None:
            self.nbytes -= bucket.values.nbytes
            # The current stream has not allocated them if ``return_to_device`` has.
            accelerator.keep_for_current_stream(bucket.values)
        return bucket

    def _reduce(self, bucket: PartialBucket) -> None:
        """Reduce a bucket between the nodes, and add it to the reduced sums."""
        for member, sums in bucket.reduce_between_nodes():
            earlier = self._reduced.get(member)
            if earlier is not None:
                accelerator.keep_for_current_stream(earlier)
                sums = earlier + sums
            self._reduced[member] = sums

    # ---- the boundary ----

    def reduce_remaining(
        self,
        flush: Callable[[], None],
        reduce_zeros: Callable[[Sequence[ZeroParameter]], None],
    ) -> None:
        """Reduce the remaining sums, of parameters that had no gradient in the last backward.

        Called after the last gradient of every backward; does nothing before the boundary.

        flush, reduce_zeros: see ``shard_hooks.shard_buckets``.
        """
        if not (self._buckets or self._reduced):
            return
        if self._boundary is Boundary.DECLARED:
            if not self._engine.is_gradient_accumulation_boundary():
                return
        flush()
        remaining = {param for param, _ in self._reduced}
        for bucket in self._buckets.values():
            remaining.update(param for param, _ in bucket.members)
        if not remaining:
            return
        self._zeroed = remaining
        try:
            in_order = sorted(remaining, key=lambda param: param.index)
            reduce_zeros([param.tensor for param in in_order])
            flush()
        finally:
            self._zeroed = set()

    def reduce_before_step(self, optimizer: ZeroOptimizer) -> None:
        """Reduce the remaining sums before a step whose boundary was not declared to backward."""
        if self._buckets or self._reduced:
            self._boundary = Boundary.STEPPING
            try:
                optimizer.independent_gradient_partition_epilogue()
            finally:
                self._boundary = Boundary.DECLARED

    # ---- offload_states ----

    def leave_device(self, *, pin: bool) -> None:
        """Move all sums to the host: see ``offload.follow_states``."""
        for sums in self._all_sums():
            host = torch.empty_like(sums, device="cpu")
            if pin:
                host = offload.pin(host)
            sums.data = host.copy_(sums)

    def return_to_device(self) -> None:
        """Move all sums back: see ``offload.follow_states``.

        The current stream allocates them, and the stream of reductions reads them. So ``pop`` and
        ``pop_reduced`` record them on that stream.
        """
        for sums in self._all_sums():
            sums.data = sums.to(accelerator.device())

    def _all_sums(self) -> Iterator[Tensor]:
        for bucket in self._buckets.values():
            bucket.reduction.wait()
            yield bucket.values
        yield from self._reduced.values()
