"""Compile the CUDA kernels and connect the ranks, so that the first step does not wait for it.

A kernel is compiled at its first launch. That takes about a second and must not happen inside a
CUDA graph capture. So each kernel is launched here on a few elements. Scheme, stage and hops decide
which kernels a run launches; rows of whole blocks and other rows are different variants of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduction_plan import (
    GradientSpec,
    ReductionHop,
    ReductionPlan,
    Segment,
    SlicePlan,
    Slicing,
)
from ds_quant.comm.returned_sums import Piece, ReturnedSums
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Decode, Encode, Offsets
from ds_quant.kernels.dispatch import Operations, RngState, decode_lossless, encode_lossless
from ds_quant.kernels.launch import whole_numel
from ds_quant.kernels.lossless import max_bytes
from ds_quant.kernels.random_bits import Address
from ds_quant.runtime.handshake import store_of_call, wait_for_keys
from ds_quant.runtime.run import Level, Run

_RAGGED = 9  # elements: more than a vector, less than any other block
_LOSSLESS_NUMEL = _RAGGED, 4096
_JOBS = 1, 2  # tables of several jobs are variants of their own
_ADDRESS = Address(key=0, step=0)
_PATIENCE = 600.0  # seconds that ranks wait for the first of their node, then compile themselves


@dataclass(frozen=True, kw_only=True)
class MessageKinds:
    """Dtypes and levels of a run's messages, on which its kernels and connections depend.

    weight_dtypes: of gathered weights. gradient_dtype: of reduced gradients.
    reducing: levels over which gradients are reduced; none if the front's library does that.
    all_levels: levels over which weights or gradients are sent.
    crosses_once: gradients over two hops cross once per optimizer step.
    has_few_ranks: some weights are gathered over part of the ranks.
    """

    weight_dtypes: Sequence[torch.dtype]
    gradient_dtype: torch.dtype
    reducing: Sequence[Level]
    all_levels: Sequence[Level]
    crosses_once: bool
    has_few_ranks: bool


def message_kinds(run: Run, levels: Sequence[Level]) -> MessageKinds:
    """Return dtypes and levels of a run's messages.

    levels: over which weights or gradients are sent. One that the run does not list is of a process
        group that is smaller than the run.
    """
    workload = run.workload
    params = [sent for of_level in workload.params for sent in of_level]
    weight_dtypes = {
        sent.dtype
        for sent in params
        if run.routes.sends_weights and sent.dtype.is_floating_point and not sent.stock_weights
    }
    reduces = not workload.stock_gradients and any(not sent.stock_gradients for sent in params)
    return MessageKinds(
        weight_dtypes=sorted(weight_dtypes, key=str),
        gradient_dtype=workload.gradient_dtype,
        reducing=levels if reduces else [],
        all_levels=levels,
        crosses_once=any(level.routes.gradients().keeps_partial_sums for level in levels),
        has_few_ranks=any(level not in run.levels for level in levels),
    )


def warm_up(run: Run, kinds: MessageKinds) -> None:
    """Launch every kernel of a run and connect every communicator. All its ranks call it.

    The first rank of a node leaves compiled kernels in CuPy's cache, where the others find them.
    """
    ranks = run.topology.all_ranks
    rank = torch.distributed.get_rank()
    index = ranks.index(rank)
    first = ranks[index - index % run.topology.node_size]
    store = store_of_call("rehearsals", rank)
    if rank != first:
        wait_for_keys(store, [str(first)], _PATIENCE)
    try:
        warm_up_kernels(run, kinds, run.device)
    finally:
        if rank == first:
            store.set(str(first), "done")
    _connect(run, kinds)
    if run.device.type != "cpu":
        # Other streams do not wait for the tables that this one has written.
        torch.accelerator.synchronize(run.device)


# ---- communicators ----


def _connect(run: Run, kinds: MessageKinds) -> None:
    """Run each collective once on every communicator that the run uses it on.

    NCCL connects ranks at their first message, which takes seconds. A gather connects each rank to
    few others, an all-to-all to all others of the communicator, so it runs only where gradients do.
    """
    exchanging, without_gathers = _gradient_communicators(run, kinds)
    for communicator in run.communicators():
        if communicator.size == 1:
            continue
        uncounted = run.uncounted(communicator)
        payload = torch.zeros(communicator.size, dtype=torch.uint8, device=run.device)
        if communicator not in without_gathers:
            uncounted.all_gather(payload[:1], role="weights").wait()
        if communicator in exchanging:
            one_byte_each = [1] * communicator.size
            uncounted.all_to_all(
                payload,
                sent=one_byte_each,
                received=one_byte_each,
                role="gradients",
            ).wait()


def _gradient_communicators(
    run: Run, kinds: MessageKinds
) -> tuple[set[Communicator], set[Communicator]]:
    """Return the communicators that exchange gradients, and those that send nothing else."""
    exchanging: set[Communicator] = set()
    without_gathers: set[Communicator] = set()
    has_delivery = run.routes.gradients().delivery is not None
    for level in kinds.all_levels:
        hierarchy = level.hierarchy
        if hierarchy.gradients is not None and hierarchy.gradients is not hierarchy.intra:
            without_gathers.add(hierarchy.gradients)
    for level in kinds.reducing:
        exchanging.update(hop.communicator for hop in level.hops)
        if has_delivery:
            exchanging.add(level.hierarchy.flat)
    return exchanging, without_gathers


# ---- kernels ----


def warm_up_kernels(run: Run, kinds: MessageKinds, device: torch.device) -> None:
    """Launch every kernel of the run once on ``device``: the plans of training, on zeros."""
    for dtype in kinds.weight_dtypes:
        if run.routes.sends_lossless(dtype):
            _warm_up_lossless_differences(run, dtype, device)
    for codec, dtype, is_difference in _transfers(run, kinds):
        for numel, jobs in product(_sizes([codec]), _JOBS):
            _warm_up_transfer(run, codec, dtype, is_difference, numel, jobs, device)
    for hops in dict.fromkeys(level.hops for level in kinds.reducing):
        if hops[0].communicator.size > 1:
            _warm_up_reductions(run, kinds, hops, device)
    for level in kinds.reducing:
        _warm_up_returned_sums(run, kinds, level, device)


def _sizes(codecs: Sequence[Codec]) -> tuple[int, int]:
    """Return a size with a partial block, and one of whole blocks."""
    return _RAGGED, whole_numel(codec for codec in codecs if isinstance(codec, GroupCodec))


def _launch(
    run: Run,
    operations: Operations,
    buffers: Sequence[Tensor],
    codecs: Sequence[Codec],
    rotation: Rotation | None = None,
) -> None:
    rng_state = RngState(
        [BoundCodec(codec, _ADDRESS) for codec in codecs],
        [rotation] * len(codecs),
    )
    operations.run(buffers, rng_state, backend=run.scheme.block.backend)


def _warm_up_transfer(
    run: Run,
    codec: Codec,
    dtype: torch.dtype,
    is_difference: bool,
    numel: int,
    jobs: int,
    device: torch.device,
) -> None:
    """Encode and decode rows of ``numel`` elements."""
    values = torch.zeros(numel, dtype=dtype, device=device)
    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
    reference = torch.zeros(numel, dtype=dtype, device=device)
    base = 2 if is_difference else None  # index of ``reference`` among the buffers
    encode = [(Encode(codec, numel, 0, 1, job, base=base), Offsets()) for job in range(jobs)]
    decode = [(Decode(codec, numel, 1, 2, job, is_difference), Offsets()) for job in range(jobs)]
    for operations in (Operations(encode), Operations(decode)):
        _launch(run, operations, [values, wire, reference], [codec] * jobs)


def _warm_up_lossless_differences(run: Run, dtype: torch.dtype, device: torch.device) -> None:
    backend = run.scheme.block.backend
    for numel, change, rows in product(_LOSSLESS_NUMEL, (0, 1), _JOBS):
        reference = torch.zeros(numel, dtype=dtype, device=device)
        wire = torch.empty(max_bytes(numel), dtype=torch.uint8, device=device)
        used = torch.zeros(rows, dtype=torch.int64, device=device)
        messages = [(reference + change, reference, wire.clone()) for _ in range(rows)]
        encode_lossless(messages, used, backend=backend)
        lengths = used.cpu().numpy()
        starts = lengths * 0  # every row decodes the first message
        old = reference.expand(rows, -1)
        status = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        first_wire = messages[0][2]
        decode_lossless(
            first_wire,
            starts,
            lengths,
            old,
            torch.empty_like(old),
            status,
            backend=backend,
        )


def _transfers(run: Run, kinds: MessageKinds) -> Iterator[tuple[Codec, torch.dtype, bool]]:
    """Yield codec, dtype and "is a difference" of values that are encoded and decoded.

    These are weights, and sums that balanced buckets deliver to their owners.
    """
    routes = [run.routes.weights()]
    if kinds.has_few_ranks:
        routes.append(run.routes.weights(full_world=False))
    codecs: dict[tuple[Codec, bool], None] = {}
    for route in routes:
        for hop in route.hops:
            if hop.codec is not None:
                codecs[hop.codec, hop.difference] = None
    for dtype in kinds.weight_dtypes:
        yield CastCodec(dtype), dtype, False
        for codec, is_difference in codecs:
            yield codec, dtype, is_difference
    delivery = run.routes.gradients().delivery
    if delivery is not None:
        cast = CastCodec(kinds.gradient_dtype)
        for codec in dict.fromkeys((cast, delivery.codec or cast)):
            yield codec, torch.float32, False


def _warm_up_reductions(
    run: Run, kinds: MessageKinds, hops: Sequence[ReductionHop], device: torch.device
) -> None:
    """Run the kernels of a reduction over these hops, without its messages."""
    route = run.routes.gradients(full_world=len(hops) > 1)
    dtype = kinds.gradient_dtype
    crosses_once = kinds.crosses_once and len(hops) == 2
    cast = CastCodec(dtype)
    block = 0 if route.rotation is None else route.rotation.block
    # A number of slices that the user sets would cut these few elements.
    hops = [replace(hop, slicing=Slicing(count=1)) for hop in hops]
    full_precision = GradientSpec((cast,) * len(hops))
    quantized = GradientSpec(tuple([hop.codec or cast for hop in route.hops]), block, route.flips)
    for spec in dict.fromkeys((full_precision, quantized)):
        # A scale of 1, where DeepSpeed divides the gradients itself, is a variant of its own.
        cases = product(_reducers(hops), _sizes(spec.codecs), _JOBS, (1.0, 1 / 3))
        for reducer, numel, jobs, scale in cases:
            segments = [
                Segment(tensor=job, start=0, numel=numel, gradient=job, first=0, reducer=reducer)
                for job in range(jobs)
            ]
            plan = ReductionPlan(segments, [spec] * jobs, hops, scale=scale)
            tensors = [torch.zeros(numel, dtype=dtype, device=device)] * jobs
            slices = [*plan.slices]
            if crosses_once:
                slices += plan.deferred_slices
            for part in slices:
                # Sums may have DeepSpeed's dtype.
                for sums_dtype in (dtype, torch.float32):
                    sums = torch.zeros(numel, dtype=sums_dtype, device=device)
                    _reduce(run, part, spec, tensors, sums)


def _reduce(
    run: Run, part: SlicePlan, spec: GradientSpec, tensors: Sequence[Tensor], sums: Tensor
) -> None:
    """Run the kernels of a slice on messages of zeros."""
    jobs = len(tensors)
    rotation = None
    if spec.block:
        rotation = Rotation(block=spec.block, signs=_ADDRESS if spec.flips else None)
    nbytes = max(max(sum(hop.sent), sum(hop.received)) for hop in part.hops)
    messages = torch.zeros(nbytes, dtype=torch.uint8, device=sums.device)
    own_numel = max(part.stop - part.start, *(hop.own_numel for hop in part.hops))
    own = sums.new_zeros(own_numel, dtype=torch.float32)
    buffers = [messages, own, messages, own, sums, *tensors]
    # Operations, each with the index of the hop whose codecs it uses.
    operations = [*enumerate(hop.encode for hop in part.hops)]
    operations += [(0, part.partial_sums), (-1, part.final_sums)]
    for depth, operation in operations:
        _launch(run, operation, buffers, [spec.codecs[depth]] * jobs, rotation)


def _warm_up_returned_sums(
    run: Run, kinds: MessageKinds, level: Level, device: torch.device
) -> None:
    """Run the kernels of sums on their way back to all replicas, without their messages."""
    route = run.routes.gradients(full_world=level.hierarchy.intra is not None)
    receivers = level.returning
    if route.returned is None or receivers is None:
        return
    dtype = kinds.gradient_dtype
    cast = CastCodec(dtype)
    block = 0 if route.rotation is None else route.rotation.block
    full_precision = GradientSpec((cast,))
    # Every sum has one sender, so its signs are those of the stream, not OWN_SIGNS.
    quantized = GradientSpec((route.returned.codec or cast,), block, int(bool(route.flips)))
    for spec in dict.fromkeys((full_precision, quantized)):
        rotation = None
        if spec.block:
            rotation = Rotation(block=spec.block, signs=_ADDRESS if spec.flips else None)
        for numel, jobs in product(_sizes(spec.codecs), _JOBS):
            pieces = [
                Piece(
                    sender=receivers.rank,
                    gradient=job,
                    numel=numel,
                    first=0,
                    source=0,
                    target=0,
                )
                for job in range(jobs)
            ]
            returned = ReturnedSums(pieces, [spec] * jobs, receivers)
            messages = torch.zeros(
                receivers.size * returned.nbytes, dtype=torch.uint8, device=device
            )
            sums = torch.zeros(numel, device=device)
            result = torch.zeros(numel, dtype=dtype, device=device)
            codecs = [spec.codecs[0]] * jobs
            _launch(run, returned.encode, [messages[: returned.nbytes], sums], codecs, rotation)
            # The kernel reads no third buffer here.
            _launch(run, returned.decode, [messages, result, sums], codecs, rotation)


def _reducers(hops: Sequence[ReductionHop]) -> list[int]:
    """Return this rank, and for every hop another rank that it reaches over this hop."""
    rank = sum(hop.communicator.rank * hop.divisor for hop in hops)
    others: list[int] = []
    for hop in hops:
        index, size = hop.communicator.rank, hop.communicator.size
        others.append(rank + ((index + 1) % size - index) * hop.divisor)
    return [rank, *others]
