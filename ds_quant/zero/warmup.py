"""Compile the CUDA kernels and connect the ranks, so that the first step does not wait for it.

A kernel is compiled at its first launch. That takes about a second and must not happen inside a
CUDA graph capture. So each kernel is launched here on a few elements. Scheme, stage and hops decide
which kernels a run launches; rows of whole blocks and other rows are different variants of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator
from ds_quant.kernels.batch import Decode, Encode
from ds_quant.kernels.dispatch import Operations, RngState, decode_lossless, encode_lossless
from ds_quant.kernels.launch import whole_numel
from ds_quant.kernels.lossless import max_bytes
from ds_quant.kernels.random_bits import Address
from ds_quant.runtime.handshake import store_of_call, wait_for_keys
from ds_quant.zero import accelerator, hooks
from ds_quant.zero.plugin import Plugin

_RAGGED = 9  # elements: more than a vector, less than any other block
_LOSSLESS_NUMEL = _RAGGED, 4096
_JOBS = 1, 2  # tables of several jobs are variants of their own
_ADDRESS = Address(key=0, step=0)
_PATIENCE = 600.0  # seconds that ranks wait for the first of their node, then compile themselves


def warm_up_engine(plugin: Plugin, device: torch.device) -> None:
    """Launch every kernel of the engine and connect every communicator. All ranks call it.

    The first rank of a node leaves compiled kernels in CuPy's cache, where the others find them.
    """
    rank, _ = hooks.rank_and_world()
    first = rank - rank % plugin.run.topology.node_size
    store = store_of_call("rehearsals", rank)
    if rank != first:
        wait_for_keys(store, [str(first)], _PATIENCE)
    try:
        warm_up_kernels(plugin, device)
    finally:
        if rank == first:
            store.set(str(first), "done")
    _connect(plugin, device)
    accelerator.synchronize()  # other streams do not wait for the tables that this one has written


# ---- communicators ----


def _connect(plugin: Plugin, device: torch.device) -> None:
    """Run each collective once on every communicator that the engine runs it on.

    NCCL connects ranks at their first message, which takes seconds. A gather connects each rank to
    few others, an all-to-all to all others of the communicator, so it runs only where gradients do.
    """
    exchanging, without_gathers = _gradient_communicators(plugin)
    for communicator in plugin.run.communicators():
        if communicator.size == 1:
            continue
        uncounted = Communicator(
            communicator.process_group,
            topology=plugin.run.topology,
            traffic=Traffic(),
        )
        payload = torch.zeros(communicator.size, dtype=torch.uint8, device=device)
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


def _gradient_communicators(plugin: Plugin) -> tuple[set[Communicator], set[Communicator]]:
    """Return the communicators that exchange gradients, and those that send nothing else."""
    exchanging: set[Communicator] = set()
    without_gathers: set[Communicator] = set()
    has_delivery = plugin.run.routes.gradients().delivery is not None
    for group in dict.fromkeys(group for _, group in plugin.served_params):
        hierarchy = plugin.run.level(group).hierarchy
        if hierarchy.gradients is not None and hierarchy.gradients is not hierarchy.intra:
            without_gathers.add(hierarchy.gradients)
        if plugin.stock_gradients_reason is None:
            exchanging.update(hop.communicator for hop in plugin.run.level(group).hops)
            if has_delivery:
                exchanging.add(hierarchy.flat)
    return exchanging, without_gathers


# ---- kernels ----


def warm_up_kernels(plugin: Plugin, device: torch.device) -> None:
    """Launch every kernel of the engine once on ``device``: the plans of training, on zeros."""
    for dtype in _dtypes(plugin):
        if plugin.run.routes.sends_lossless(dtype):
            _warm_up_lossless_differences(plugin, dtype, device)
    for codec, dtype, is_difference in _transfers(plugin):
        for numel, jobs in product(_sizes([codec]), _JOBS):
            _warm_up_transfer(plugin, codec, dtype, is_difference, numel, jobs, device)
    if plugin.stock_gradients_reason is None:
        for hops in dict.fromkeys(
            plugin.run.level(group).hops for _, group in plugin.served_params
        ):
            if hops[0].communicator.size > 1:
                _warm_up_reductions(plugin, hops, device)


def _dtypes(plugin: Plugin) -> list[torch.dtype]:
    params = plugin.engine.module.parameters()
    return sorted({p.dtype for p in params if p.is_floating_point()}, key=str)


def _sizes(codecs: Sequence[Codec]) -> tuple[int, int]:
    """Return a size with a partial block, and one of whole blocks."""
    return _RAGGED, whole_numel(codec for codec in codecs if isinstance(codec, GroupCodec))


def _run(
    plugin: Plugin,
    operations: Operations,
    buffers: Sequence[Tensor],
    codecs: Sequence[Codec],
    rotation: Rotation | None = None,
) -> None:
    rng_state = RngState(
        [BoundCodec(codec, _ADDRESS) for codec in codecs],
        [rotation] * len(codecs),
    )
    operations.run(buffers, rng_state, backend=plugin.run.scheme.block.backend)


def _warm_up_transfer(
    plugin: Plugin,
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
    encode = [(Encode(codec, numel, 0, 1, job, base=base), (0,) * 4) for job in range(jobs)]
    decode = [(Decode(codec, numel, 1, 2, job, is_difference), (0,) * 2) for job in range(jobs)]
    for operations in (Operations(encode), Operations(decode)):
        _run(plugin, operations, [values, wire, reference], [codec] * jobs)


def _warm_up_lossless_differences(plugin: Plugin, dtype: torch.dtype, device: torch.device) -> None:
    backend = plugin.run.scheme.block.backend
    for numel, change, rows in product(_LOSSLESS_NUMEL, (0, 1), _JOBS):
        reference = torch.zeros(numel, dtype=dtype, device=device)
        wire = torch.empty(max_bytes(numel), dtype=torch.uint8, device=device)
        used = torch.zeros(rows, dtype=torch.int64, device=device)
        messages = [(reference + change, reference, wire.clone()) for _ in range(rows)]
        encode_lossless(messages, used, backend=backend)
        lengths = used.cpu().numpy()
        offsets = lengths * 0
        old = reference.expand(rows, -1)
        status = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        first_wire = messages[0][2]
        decode_lossless(
            first_wire,
            offsets,
            lengths,
            old,
            torch.empty_like(old),
            status,
            backend=backend,
        )


def _transfers(plugin: Plugin) -> Iterator[tuple[Codec, torch.dtype, bool]]:
    """Yield codec, dtype and "is a difference" of values that are encoded and decoded.

    These are weights, and sums that balanced buckets deliver to their owners.
    """
    routes = [plugin.run.routes.weights()]
    if plugin.has_few_ranks:
        routes.append(plugin.run.routes.weights(full_world=False))
    codecs: dict[tuple[Codec, bool], None] = {}
    for route in routes:
        for hop in route.hops:
            if hop.codec is not None:
                codecs[hop.codec, hop.difference] = None
    for dtype in _dtypes(plugin):
        yield CastCodec(dtype), dtype, False
        for codec, is_difference in codecs:
            yield codec, dtype, is_difference
    delivery = plugin.run.routes.gradients().delivery
    if delivery is not None:
        cast = CastCodec(plugin.engine.communication_data_type)
        for codec in dict.fromkeys((cast, delivery.codec or cast)):
            yield codec, torch.float32, False


def _warm_up_reductions(plugin: Plugin, hops: Sequence[ReductionHop], device: torch.device) -> None:
    """Run the kernels of a reduction over these hops, without its messages."""
    route = plugin.run.routes.gradients(full_world=len(hops) > 1)
    dtype = plugin.engine.communication_data_type
    crosses_once = plugin.crosses_once(hops)
    cast = CastCodec(dtype)
    block = 0 if route.rotation is None else route.rotation.block
    hops = [replace(hop, slicing=Slicing(count=1)) for hop in hops]
    full_precision = GradientSpec((cast,) * len(hops))
    quantized = GradientSpec(tuple([hop.codec or cast for hop in route.hops]), block, route.flips)
    for spec in dict.fromkeys((full_precision, quantized)):
        # DeepSpeed may divide the gradients itself.
        cases = product(_reducers(hops), _sizes(spec.codecs), _JOBS, (1.0, 1 / 3))
        for reducer, numel, jobs, scale in cases:
            segments = [Segment(job, 0, numel, job, 0, reducer) for job in range(jobs)]
            plan = ReductionPlan(segments, [spec] * jobs, hops, scale=scale)
            tensors = [torch.zeros(numel, dtype=dtype, device=device)] * jobs
            slices = [*plan.slices]
            if crosses_once:
                slices += plan.deferred_slices
            for part in slices:
                # Sums may have DeepSpeed's dtype.
                for sums_dtype in (dtype, torch.float32):
                    sums = torch.zeros(numel, dtype=sums_dtype, device=device)
                    _reduce(plugin, part, spec, tensors, sums)


def _reduce(
    plugin: Plugin, part: SlicePlan, spec: GradientSpec, tensors: Sequence[Tensor], sums: Tensor
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
        _run(plugin, operation, buffers, [spec.codecs[depth]] * jobs, rotation)


def _reducers(hops: Sequence[ReductionHop]) -> list[int]:
    """Return this rank, and for every hop another rank that it reaches over this hop."""
    rank = sum(hop.communicator.rank * hop.divisor for hop in hops)
    others: list[int] = []
    for hop in hops:
        index, size = hop.communicator.rank, hop.communicator.size
        others.append(rank + ((index + 1) % size - index) * hop.divisor)
    return [rank, *others]
