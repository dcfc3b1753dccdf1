"""ZeRO-1 and 2: reduce the slices of a bucket to the ranks that own them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_quant.codec.bound import full_precision
from ds_quant.comm.reduction_plan import Segment
from ds_quant.comm.small_tensors import group_small_tensors, is_tight
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.dispatch import RngState
from ds_quant.runtime.param import Param
from ds_quant.zero import hooks, optimizer_hooks
from ds_quant.zero.deepspeed_types import OwnerOptimizer
from ds_quant.zero.equal_buckets import require_equal
from ds_quant.zero.front import EngineFront
from ds_quant.zero.gradients import GradientReducer, GradientSlice, note_finite
from ds_quant.zero.optimizer_hooks import owners_of
from ds_quant.zero.partial_gradients import PartialGradients

_COPY = RngState([full_precision(torch.float32)], [None])


class _ParamRange(NamedTuple):
    """Elements [start, stop) of the bucket that belong to one parameter.

    first: the first one's index in the parameter.
    """

    first: int
    param: Param
    start: int
    stop: int


class OwnerReduction(GradientReducer):
    """Replaces ``allreduce_and_copy_with_multiple_ranks``.

    DeepSpeed hands over slices of its bucket by owner. A slice may run over several parameters:
    their borders are found in the bucket, so that no group of a codec straddles two parameters.
    """

    def __init__(
        self,
        front: EngineFront,
        partial_gradients: PartialGradients | None,
        optimizer: OwnerOptimizer,
    ) -> None:
        super().__init__(front, partial_gradients)
        self._optimizer = optimizer
        # The bucket that is being reduced: see ``bucket``.
        self._bucket: Tensor | None = None
        self._divisor = 1.0
        self._params: list[Tensor] = []
        self._starts: list[int] = []  # first element of each parameter, then the end

    @contextmanager
    def bucket(self, tensor: Tensor, params: list[Tensor], divisor: float) -> Iterator[None]:
        """Enter while DeepSpeed reduces a bucket.

        tensor: gradients of ``params``, end to end. DeepSpeed frees it at the end of a backward, so
            no reference may stay.
        divisor: of the sums.
        """
        self._bucket = tensor.view(-1)
        self._divisor = divisor
        self._params = params
        self._starts = list(accumulate((p.numel() for p in params), initial=0))
        try:
            yield
        finally:
            self._bucket = None

    def reduce(self, original: Callable[..., object], arguments: dict[str, Any]) -> None:
        """Sum every slice for its owner, in place. Slices of other ranks keep their values.

        original, arguments: DeepSpeed's function and what it was called with.

        Raises:
            RuntimeError: DeepSpeed calls it outside ``bucket``.
        """
        bucket = self._bucket
        if bucket is None:
            raise hooks.moved(optimizer_hooks.BUCKET)
        self._front.requested_roles.add("gradients")
        group = arguments["process_group"] or self._optimizer.dp_process_group
        communicator = self._run.communicator(group)
        shared, single_owner = optimizer_hooks.by_owner_count(
            arguments, is_single_rank=communicator.size == 1
        )
        if shared is not None:
            self._all_reduce(bucket, original, shared, communicator)
        if single_owner is not None:
            self._reduce_to_owners(bucket, single_owner, communicator)

    def _all_reduce(
        self,
        bucket: Tensor,
        original: Callable[..., object],
        arguments: dict[str, Any],
        communicator: Communicator,
    ) -> None:
        """Leave slices that several ranks need (Muon's split matrices) to DeepSpeed."""
        slices = arguments["small_bucket"]
        if self._divisor != 1:
            for values in slices:
                values.div_(self._divisor)
        original(**arguments)
        numel = sum(values.numel() for values in slices)
        nbytes = numel * arguments["communication_data_type"].itemsize
        communicator.count_ring(nbytes, role="gradients", passes=2)
        own_slices = [
            values
            for values, ranks in zip(slices, owners_of(arguments), strict=True)
            if communicator.rank in ranks
        ]
        finite_flags = self._run.finite_flags
        if finite_flags is not None:
            for begin, end in _ranges_in(bucket, own_slices):
                for part in self._param_ranges(begin, end):
                    note_finite(finite_flags, part.param, bucket[part.start : part.stop])

    def _reduce_to_owners(
        self, bucket: Tensor, arguments: dict[str, Any], communicator: Communicator
    ) -> None:
        """Sum every slice for the one rank that owns it."""
        run = self._run
        owners = [owner for (owner,) in owners_of(arguments)]
        slices = arguments["small_bucket"]
        dtype = arguments["communication_data_type"]
        ranges = _ranges_in(bucket, slices)
        key = (
            tuple(ranges),
            tuple(owners),
            tuple(map(id, self._params)),
            dtype,
            run.is_full_precision(self._front.step),
            communicator,
            self._divisor,
        )
        layout = self._layouts.get(key)
        if layout is None:
            gradient_slices = self._slices(zip(owners, ranges, strict=True), dtype, communicator)
            layout = self._plan(
                key, gradient_slices, communicator, scale=1 / self._divisor, balanced=True
            )
        if communicator.is_gloo:
            require_equal(self._front, communicator, layout)
        hops = run.level(communicator.process_group).hops
        sums = self._begin(layout, [bucket], hops).wait()
        own_slices = [index for index, owner in enumerate(owners) if owner == communicator.rank]
        if sums is None:  # kept as partial sums
            for index in own_slices:
                slices[index].zero_()
            return
        layout.copy_to_bucket.run(
            [sums.view(torch.uint8), bucket], _COPY, backend=communicator.backend
        )
        if run.finite_flags is not None:
            for (param, _), segment, _ in layout.own_sums:
                values = bucket[segment.start : segment.start + segment.numel]
                note_finite(run.finite_flags, param, values)
        outputs = arguments.get("output_bucket")
        if outputs:
            for index in own_slices:
                optimizer_hooks.add_to_partition(self._optimizer, outputs[index], slices[index])

    def _slices(
        self,
        owned_ranges: Iterable[tuple[int, tuple[int, int]]],
        dtype: torch.dtype,
        communicator: Communicator,
    ) -> list[GradientSlice]:
        """Cut ranges of the bucket, each with its owner, at parameter borders.

        Small slices of an owner follow each other, at the place of the first one.
        """
        hops = self._run.level(communicator.process_group).hops
        slices = []
        for owner, (begin, end) in owned_ranges:
            for first, param, start, stop in self._param_ranges(begin, end):
                numel = stop - start
                codecs = self._gradient_codecs(param, dtype, numel, len(hops), communicator.rank)
                segment = Segment(
                    tensor=0,
                    start=start,
                    numel=numel,
                    gradient=0,
                    first=first,
                    reducer=owner,
                )
                gradient_slice = GradientSlice((param, owner), codecs, segment)
                is_small = is_tight(codecs.spec.codecs[-1])
                slices.append((gradient_slice, owner if is_small else None))
        return group_small_tensors(slices)

    def _param_ranges(self, begin: int, end: int) -> Iterator[_ParamRange]:
        """Cut elements [begin, end) of the bucket at parameter borders."""
        index = bisect_right(self._starts, begin) - 1
        position = begin
        while position < end:
            param_start = self._starts[index]
            stop = min(end, self._starts[index + 1])
            if position < stop:  # else a parameter without elements
                param = self._run.param_of(self._params[index])
                assert param is not None  # attach refuses parameters of other modules
                yield _ParamRange(position - param_start, param, position, stop)
            position = stop
            index += 1


def _ranges_in(bucket: Tensor, slices: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the elements [start, stop) of the bucket that each slice views."""
    bucket_address = bucket.data_ptr()
    itemsize = bucket.element_size()
    bucket_numel = bucket.numel()
    ranges = []
    for values in slices:
        start = (values.data_ptr() - bucket_address) // itemsize
        stop = start + values.numel()
        if start < 0 or stop > bucket_numel:
            raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
        ranges.append((start, stop))
    return ranges
