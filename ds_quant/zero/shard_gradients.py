"""ZeRO-3: reduce every bucket to this rank's shards of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_quant.comm.profiling import profiler_range
from ds_quant.comm.reduction_plan import shards_of
from ds_quant.comm.small_tensors import is_tight, small_tensors_last
from ds_quant.comm.transport import Communicator
from ds_quant.runtime.param import Param
from ds_quant.zero.gradients import GradientReducer, GradientSlice, PendingSums, note_finite
from ds_quant.zero.partial_gradients import NO_OWNER


class ShardReduction(GradientReducer):
    """Replaces ``reduce_scatter_coalesced``."""

    def __call__(
        self,
        params: Sequence[Tensor],
        tensors: list[Tensor],
        group: ProcessGroup | None,
    ) -> list[Tensor] | None:
        """Reduce-scatter gradients, with the mean.

        Returns:
            per tensor this rank's shard without padding, in the tensor's dtype; None if DeepSpeed
            must reduce the bucket itself.
        """
        bucket = self.begin(params, tensors, group)
        return None if bucket is None else bucket.finish()

    def begin(
        self,
        params: Sequence[Tensor],
        tensors: list[Tensor],
        group: ProcessGroup | None,
    ) -> ShardBucket | None:
        """Begin the reduction. Afterwards the tensors may change.

        Returns:
            None if DeepSpeed must reduce the bucket itself.
        """
        run = self._run
        self._front.requested_roles.add("gradients")
        communicator = run.communicator(group)
        if communicator.size == 1 or not tensors:
            return None
        dtypes = tuple([tensor.dtype for tensor in tensors])
        full_precision = run.is_full_precision(self._front.step)
        key = tuple(map(id, params)), dtypes, communicator, full_precision
        layout = self._layouts.get(key)
        if layout is None:
            known_params = []
            for parameter in params:
                param = run.param_of(parameter)
                if param is None:
                    return None
                known_params.append(param)
            slices = self._slices(known_params, dtypes, communicator)
            has_one_dtype = len(set(dtypes)) == 1
            layout = self._plan(
                key,
                slices,
                communicator,
                scale=1 / communicator.size,
                balanced=False,
                sums_dtype=dtypes[0] if has_one_dtype else torch.float32,
            )
        flat_tensors = [tensor.reshape(-1) for tensor in tensors]
        first = run.param_of(params[0])
        with profiler_range("reduce", "" if first is None else first.name):
            sums = self._begin(layout, flat_tensors, run.level(group).hops)
        shards = [tensor.new_empty(0) for tensor in tensors]
        return ShardBucket(shards, sums, run.finite_flags)

    def _slices(
        self, params: Sequence[Param], dtypes: Sequence[torch.dtype], communicator: Communicator
    ) -> list[GradientSlice]:
        """Return the shards of all gradients: large ones first, then small ones by dtype."""
        hops = self._run.level(communicator.process_group).hops
        numels = [param.shape.numel() for param in params]
        gradient_codecs = [
            self._gradient_codecs(param, dtype, numel, len(hops), communicator.rank)
            for param, dtype, numel in zip(params, dtypes, numels, strict=True)
        ]
        is_rotated = any(codecs.spec.block for codecs in gradient_codecs)
        is_plain = len(hops) == 1 and not hops[0].full_precision_own and not is_rotated
        last_codecs = [codecs.spec.codecs[-1] for codecs in gradient_codecs]
        slices = []
        for index in small_tensors_last(last_codecs):
            shards = shards_of(
                index,
                numels[index],
                communicator.size,
                plain=is_plain,
                small=is_tight(last_codecs[index]),
            )
            member = params[index], NO_OWNER
            for shard in shards:
                slices.append(GradientSlice(member, gradient_codecs[index], shard))
        return slices


@dataclass(eq=False)
class ShardBucket:
    """A bucket whose reduction to this rank's shards is running.

    shards: per gradient (shard numel,) in its dtype; filled by ``finish``.
    finite_flags: see ``Run``.
    """

    shards: list[Tensor]
    sums: PendingSums
    finite_flags: list[tuple[str, Tensor]] | None
    finished: bool = False

    def finish(self) -> list[Tensor]:
        """Wait for the reduction, and return the filled shards."""
        total = self.sums.wait()
        filled = self._zero_shards() if total is None else self._views(total)
        for shard, values in zip(self.shards, filled, strict=True):
            shard.data = values
        if self.finite_flags is not None:
            for (param, _), segment, _ in self.sums.layout.own_sums:
                note_finite(self.finite_flags, param, self.shards[segment.tensor])
        self.finished = True
        return self.shards

    def _views(self, total: Tensor) -> list[Tensor]:
        """Return the sums of the shards, in the dtype of each. Shards of one dtype are views."""
        layout = self.sums.layout
        dtypes = {shard.dtype for shard in self.shards}
        if dtypes != {total.dtype} and len(dtypes) == 1:  # one cast of all
            (dtype,) = dtypes
            total = layout.reduction.new_sums(total.device, dtype).copy_(total)
        views = layout.shards(total)
        return [view.to(shard.dtype) for view, shard in zip(views, self.shards, strict=True)]

    def _zero_shards(self) -> list[Tensor]:
        """Return shards of zeros. Those of one dtype share memory."""
        own_sums = self.sums.layout.own_sums
        numels = {segment.tensor: segment.numel for _, segment, _ in own_sums}
        longest = max(numels.values())
        zeros = {shard.dtype: shard.new_zeros(longest) for shard in self.shards}
        return [zeros[shard.dtype][: numels[i]] for i, shard in enumerate(self.shards)]
