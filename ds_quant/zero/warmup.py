"""Do what a first step would wait for: compile the CUDA kernels, connect the ranks.

Kernels are compiled by using each once on a few elements.

A kernel is compiled at its first launch, which takes a second or so and must not happen inside a
CUDA graph capture. What a run launches follows from its scheme, stage and hops; rows of whole
blocks and others are different variants of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduction_plan import LinkHop
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link
from ds_quant.kernels.batch import Decode, Encode, Operation, Recode, Sum
from ds_quant.kernels.dispatch import Operations, Streams, decode_lossless, encode_lossless
from ds_quant.kernels.launch import whole_numel
from ds_quant.kernels.lossless import max_bytes
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up
from ds_quant.zero import hooks
from ds_quant.zero.handshake import Board
from ds_quant.zero.plugin import Plugin

_RAGGED = 9  # elements: more than a vector, less than anything else
_ADDRESS = Address(key=0, step=0)
_PATIENCE = 600.0  # seconds that ranks wait for the first of their node, then compile themselves


def rehearse(plugin: Plugin, device: torch.device) -> None:
    """Use every kernel of the engine and every link once. All ranks call it.

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
    for link in plugin.links():
        if link.size > 1:
            uncounted = Link(link.process_group, topology=plugin.topology, traffic=Traffic())
            # A byte from each rank to each: NCCL connects them at their first use, which takes
            # seconds.
            payload = torch.zeros(link.size, dtype=torch.uint8, device=device)
            one = [1] * link.size
            uncounted.all_gather(payload[:1], role="weights").wait()
            uncounted.all_to_all(payload, sent=one, received=one, role="gradients").wait()


# Codecs of some elements, the dtype of these, and what is done with a number of them.
_Use = tuple[Sequence[Codec], torch.dtype, Callable[[int], Iterator[Operation]]]


def warm_up(plugin: Plugin, device: torch.device) -> None:
    """Use every kernel of the engine once on ``device``."""
    _rehearse_lossless_differences(plugin, device)
    for codecs, dtype, tasks in (*_weights(plugin), *_gradients(plugin)):
        grouped = tuple(codec for codec in codecs if isinstance(codec, GroupCodec))
        for numel in (_RAGGED, whole_numel(grouped)):
            buffers = _buffers(codecs, dtype, device, numel)
            for operation in tasks(numel):
                # Tables of several jobs are variants of their own.
                for alike in ([operation], [operation, operation._replace(stream=1)]):
                    work = Operations((each, (0,) * _PLACES[type(each)]) for each in alike)
                    work.run(buffers, _streams(operation), backend=plugin.scheme.block.backend)


def _rehearse_lossless_differences(plugin: Plugin, device: torch.device) -> None:
    how = {"backend": plugin.scheme.block.backend}
    for dtype in _dtypes(plugin):
        if not plugin.routes.sends_lossless(dtype):
            continue
        for reference in (
            torch.zeros(numel, dtype=dtype, device=device) for numel in (_RAGGED, 4096)
        ):
            wire = torch.empty(max_bytes(reference.numel()), dtype=torch.uint8, device=device)
            for values in (reference, reference + 1):
                for rows in (1, 2):  # tables of several jobs are variants of their own
                    used = torch.zeros(rows, dtype=torch.int64, device=device)
                    messages = [(values, reference, wire.clone()) for _ in range(rows)]
                    encode_lossless(messages, used, **how)
                    lengths, old = used.cpu().numpy(), reference.expand(rows, -1)
                    status = torch.zeros(rows, 2, dtype=torch.int32, device=device)
                    at = messages[0][2], lengths * 0, lengths
                    decode_lossless(*at, old, torch.empty_like(old), status, **how)


def _dtypes(plugin: Plugin) -> list[torch.dtype]:
    params = plugin.engine.module.parameters()
    return sorted({p.dtype for p in params if p.is_floating_point()}, key=str)


def _weights(plugin: Plugin) -> Iterator[_Use]:
    routes = [plugin.routes.weights()]
    if plugin.has_few_ranks:
        routes.append(plugin.routes.weights(whole=False))
    sent = dict.fromkeys((hop.codec, hop.difference) for route in routes for hop in route.hops)
    for dtype in _dtypes(plugin):
        for codec, difference in sent:
            if codec is not None:
                yield [codec], dtype, partial(_transfer, codec, difference)
        yield [CastCodec(dtype)], dtype, partial(_transfer, CastCodec(dtype), False)


def _transfer(codec: Codec, differs: bool, numel: int) -> Iterator[Operation]:
    yield Encode(codec, numel, _VALUES, _WIRE, 0, base=_SUMS if differs else None)
    yield Decode(codec, numel, _WIRE, _SUMS, 0, differs)


# Buffers of the operations: values, messages, fp32 values, sums in the dtype of the values. All
# rows of a sum are the same.
_VALUES, _WIRE, _ARRIVED, _NUMBERS, _SUMS = range(5)
_PLACES = {Encode: 4, Decode: 2, Sum: 3, Recode: 4}  # of each operation, all 0


def _buffers(
    codecs: Sequence[Codec], dtype: torch.dtype, device: torch.device, numel: int
) -> list[Tensor]:
    whole = round_up(numel, 128)
    values, sums = (torch.zeros(whole, dtype=dtype, device=device) for _ in range(2))
    room = max(codec.wire_bytes(whole) for codec in codecs)
    wire, arrived = (torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(2))
    return [values, wire, arrived, values.new_zeros(whole, dtype=torch.float32), sums]


def _streams(operation: Operation) -> Streams:
    coding = Coding(getattr(operation, "codec", None), _ADDRESS)
    rotation = None
    if block := getattr(operation, "block", 0):
        signs = _ADDRESS if getattr(operation, "flips", False) else None
        rotation = Rotation(block=block, signs=signs)
    return Streams([coding] * 2, [rotation] * 2)


def _gradients(plugin: Plugin) -> Iterator[_Use]:
    if plugin.shipped_gradients is None:
        for hops in dict.fromkeys(plugin.route(group) for _, group in plugin.served):
            if hops[0].link.size > 1:
                yield from _reductions(plugin, hops)


def _reductions(plugin: Plugin, hops: Sequence[LinkHop]) -> Iterator[_Use]:
    route = plugin.routes.gradients(whole=len(hops) > 1)
    block = 0 if route.rotation is None else route.rotation.block
    dtype = plugin.engine.communication_data_type
    cast = CastCodec(dtype)
    turns = {((cast,) * len(hops), 0, 0): None}
    turns[tuple(hop.codec or cast for hop in route.hops), block, route.flips] = None
    once = plugin.crosses_once(hops)
    for codecs, block, flips in turns:
        yield codecs, dtype, partial(_reduction, hops, codecs, block, flips, once)
    if route.delivery is not None:  # sums that balanced buckets deliver to their owners
        for codec in (cast, route.delivery.codec or cast):
            yield [codec], torch.float32, partial(_transfer, codec, False)


def _reduction(
    hops: Sequence[LinkHop], codecs: Sequence[Codec], block: int, flips: int, once: bool, numel: int
) -> Iterator[Operation]:
    """The operations of a reduction; ``once``: sums wait between its two hops. What stays fp32
    beside what is encoded takes the same kernels.
    """
    on_wire = round_up(numel, block or 1)
    yield Encode(codecs[0], numel, _VALUES, _WIRE, 0, block, bool(flips))
    for depth, (hop, codec) in enumerate(zip(hops, codecs, strict=True)):
        rows = {
            "wire_in": _ARRIVED, "stream": 0, "sources": hop.link.size - hop.exact_own,
            "stride": 0, "place": 0 if hop.exact_own else None, "own": _NUMBERS,
        }  # fmt: skip
        if depth + 1 == len(hops):
            for values in (_NUMBERS, _SUMS):
                for scale in (1.0, 1 / 3):  # DeepSpeed may divide by itself
                    how = {"block": block, "flips": flips, "scale": scale, **rows}
                    yield Sum(codec, numel, values=values, **how)
            return
        following = codecs[depth + 1]
        yield Recode(codec, following, numel, wire=_WIRE, block=block, **rows)
        if once:  # encoded from the sums that wait
            yield Encode(following, on_wire, _NUMBERS, _WIRE, 0)
            yield Sum(codec, on_wire, values=_NUMBERS, **rows)
