"""Do what a first step would wait for: compile the CUDA kernels, connect the ranks.

Kernels are compiled by using each once on a few elements.

A kernel is compiled at its first launch, which takes a second or so and must not happen inside a
CUDA graph capture. What a run launches follows from its scheme, stage and hops; rows of whole
blocks and others are different variants of a kernel.
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
from ds_quant.zero import hooks
from ds_quant.zero.handshake import Board
from ds_quant.zero.plugin import Plugin

_RAGGED = 9  # elements: more than a vector, less than anything else
_ADDRESS = Address(key=0, step=0)
_PATIENCE = 600.0  # seconds that ranks wait for the first of their node, then compile themselves


def warm_up_rank(plugin: Plugin, device: torch.device) -> None:
    """Use every kernel of the engine and every link that it needs once. All ranks call it.

    The first rank of a node leaves compiled kernels in CuPy's cache, where the others find them.
    """
    rank, _ = hooks.rank_and_world()
    first = rank - rank % plugin.topology.node_size
    board = Board.of_call("rehearsals", rank)
    if rank != first:
        board.arrive([first], _PATIENCE)
    try:
        warm_up(plugin, device)
    finally:
        if rank == first:
            board.put(first, "done")
    _connect(plugin, device)
    hooks.synchronize()  # streams do not know of tables that this one has written


def _connect(plugin: Plugin, device: torch.device) -> None:
    """Use every link once, for what the engine sends there.

    NCCL connects ranks at their first message, which takes seconds. A gather connects each rank to
    few others, an all-to-all to all others of the link, so a link without exchanges gets none.
    """
    exchanging, without_gathers = _gradient_links(plugin)
    for communicator in plugin.communicators():
        if communicator.size == 1:
            continue
        uncounted = Communicator(
            communicator.process_group, topology=plugin.topology, traffic=Traffic()
        )
        payload = torch.zeros(
            communicator.size, dtype=torch.uint8, device=device
        )  # a byte for each rank
        one = [1] * communicator.size
        if communicator not in without_gathers:
            uncounted.all_gather(payload[:1], role="weights").wait()
        if communicator in exchanging:
            uncounted.all_to_all(payload, sent=one, received=one, role="gradients").wait()


def _gradient_links(plugin: Plugin) -> tuple[set[Communicator], set[Communicator]]:
    """Return the links that exchange gradients, and those that carry nothing else."""
    exchanging: set[Communicator] = set()
    without_gathers: set[Communicator] = set()
    delivers = plugin.routes.gradients().delivery is not None
    for group in dict.fromkeys(group for _, group in plugin.served):
        hierarchy = plugin.hierarchy(group)
        if hierarchy.gradients is not None and hierarchy.gradients is not hierarchy.intra:
            without_gathers.add(hierarchy.gradients)
        if plugin.stock_gradients is None:
            exchanging.update(hop.communicator for hop in plugin.route(group))
            if delivers:
                exchanging.add(hierarchy.flat)
    return exchanging, without_gathers


_JOBS = 1, 2  # tables of several jobs are variants of their own


def warm_up(plugin: Plugin, device: torch.device) -> None:
    """Use every kernel of the engine once on ``device``: training's own plans, on zeros."""
    for dtype in _dtypes(plugin):
        if plugin.routes.sends_lossless(dtype):
            _warm_up_lossless_differences(plugin, dtype, device)
    for codec, dtype, differs in _transfers(plugin):
        for numel, jobs in product(_sizes([codec]), _JOBS):
            base, streams = 2 if differs else None, range(jobs)
            encode = [(Encode(codec, numel, 0, 1, s, base=base), (0,) * 4) for s in streams]
            decode = [(Decode(codec, numel, 1, 2, s, differs), (0,) * 2) for s in streams]
            values, held = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
            wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
            for tasks in (encode, decode):
                _run(plugin, Operations(tasks), [values, wire, held], [codec] * jobs)
    if plugin.stock_gradients is None:
        for hops in dict.fromkeys(plugin.route(group) for _, group in plugin.served):
            if hops[0].communicator.size > 1:
                _warm_up_reductions(plugin, hops, device)


def _dtypes(plugin: Plugin) -> list[torch.dtype]:
    params = plugin.engine.module.parameters()
    return sorted({p.dtype for p in params if p.is_floating_point()}, key=str)


def _sizes(codecs: Sequence[Codec]) -> tuple[int, int]:
    return _RAGGED, whole_numel(codec for codec in codecs if isinstance(codec, GroupCodec))


def _run(
    plugin: Plugin,
    operations: Operations,
    buffers: Sequence[Tensor],
    codecs: Sequence[Codec],
    rotation: Rotation | None = None,
) -> None:
    streams = RngState([BoundCodec(codec, _ADDRESS) for codec in codecs], [rotation] * len(codecs))
    operations.run(buffers, streams, backend=plugin.scheme.block.backend)


def _warm_up_lossless_differences(plugin: Plugin, dtype: torch.dtype, device: torch.device) -> None:
    how = {"backend": plugin.scheme.block.backend}
    for numel, change, rows in product((_RAGGED, 4096), (0, 1), _JOBS):
        reference = torch.zeros(numel, dtype=dtype, device=device)
        wire = torch.empty(max_bytes(numel), dtype=torch.uint8, device=device)
        used = torch.zeros(rows, dtype=torch.int64, device=device)
        messages = [(reference + change, reference, wire.clone()) for _ in range(rows)]
        encode_lossless(messages, used, **how)
        lengths, old = used.cpu().numpy(), reference.expand(rows, -1)
        status = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        at = messages[0][2], lengths * 0, lengths
        decode_lossless(*at, old, torch.empty_like(old), status, **how)


def _transfers(plugin: Plugin) -> Iterator[tuple[Codec, torch.dtype, bool]]:
    """What is encoded and decoded, of which dtype, and whether that is a difference: weights, and
    sums that balanced buckets deliver to their owners.
    """
    routes = [plugin.routes.weights()]
    if plugin.has_few_ranks:
        routes.append(plugin.routes.weights(full_world=False))
    sent = dict.fromkeys((hop.codec, hop.difference) for route in routes for hop in route.hops)
    for dtype in _dtypes(plugin):
        yield CastCodec(dtype), dtype, False
        yield from ((codec, dtype, differs) for codec, differs in sent if codec is not None)
    if delivery := plugin.routes.gradients().delivery:
        cast = CastCodec(plugin.engine.communication_data_type)
        for codec in dict.fromkeys((cast, delivery.codec or cast)):
            yield codec, torch.float32, False


def _warm_up_reductions(plugin: Plugin, hops: Sequence[ReductionHop], device: torch.device) -> None:
    """Reduce gradients over these hops, but for the messages."""
    route = plugin.routes.gradients(full_world=len(hops) > 1)
    dtype, once = plugin.engine.communication_data_type, plugin.crosses_once(hops)
    cast, block = CastCodec(dtype), 0 if route.rotation is None else route.rotation.block
    hops = [replace(hop, slicing=Slicing(count=1)) for hop in hops]
    codecs = tuple([hop.codec or cast for hop in route.hops])
    for spec in dict.fromkeys(
        (GradientSpec((cast,) * len(hops)), GradientSpec(codecs, block, route.flips))
    ):
        # DeepSpeed may divide by itself, and sums may have its dtype.
        cases = product(_reducers(hops), _sizes(spec.codecs), _JOBS, (1.0, 1 / 3))
        for reducer, numel, jobs, scale in cases:
            segments = [Segment(g, 0, numel, g, 0, reducer) for g in range(jobs)]
            plan = ReductionPlan(segments, [spec] * jobs, hops, scale=scale)
            tensors = [torch.zeros(numel, dtype=dtype, device=device)] * jobs
            for part in (*plan.slices, *(plan.deferred_slices if once else ())):
                _reduce(plugin, part, spec, tensors, torch.zeros_like(tensors[0]))
                _reduce(
                    plugin, part, spec, tensors, tensors[0].new_zeros(numel, dtype=torch.float32)
                )


def _reduce(
    plugin: Plugin, part: SlicePlan, spec: GradientSpec, tensors: Sequence[Tensor], sums: Tensor
) -> None:
    """Carry out a slice as if nothing but zeros had arrived."""
    signs, jobs = _ADDRESS if spec.flips else None, len(tensors)
    rotation = Rotation(block=spec.block, signs=signs) if spec.block else None
    nbytes = max(max(sum(step.sent), sum(step.received)) for step in part.steps)
    messages = torch.zeros(nbytes, dtype=torch.uint8, device=sums.device)
    own = max(part.stop - part.start, *(step.own for step in part.steps))
    values = sums.new_zeros(own, dtype=torch.float32)
    works = [*enumerate(step.encode for step in part.steps), (0, part.partial), (-1, part.total)]
    for depth, work in works:
        buffers = [messages, values, messages, values, sums, *tensors]
        _run(plugin, work, buffers, [spec.codecs[depth]] * jobs, rotation)


def _reducers(hops: Sequence[ReductionHop]) -> list[int]:
    """This rank and one beside it on every hop."""
    rank, ranks = sum(hop.communicator.rank * hop.divisor for hop in hops), []
    for hop in hops:
        step = (hop.communicator.rank + 1) % hop.communicator.size - hop.communicator.rank
        ranks.append(rank + step * hop.divisor)
    return [rank, *ranks]
