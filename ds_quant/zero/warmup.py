"""Compile the CUDA kernels of a run before its first step, by using each once on a few elements.

A kernel is compiled at its first launch, which takes a second or so and must not happen inside a
CUDA graph capture. What a run launches follows from its scheme, stage and hops; rows of whole
blocks and others are different variants of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ds_quant.codec.bound import Coding
from ds_quant.codec.codec import GroupCodec
from ds_quant.comm.operations import Operations, Streams
from ds_quant.comm.reduction_plan import LinkHop
from ds_quant.kernels.batch import Rotate
from ds_quant.kernels.cuda import Batch
from ds_quant.kernels.dispatch import batch_launches
from ds_quant.kernels.launch import whole_numel
from ds_quant.kernels.random_bits import Address
from ds_quant.zero import hooks
from ds_quant.zero.engine import QuantizedEngine

_RAGGED = 9  # elements: more than a vector, less than anything else


class _Use(NamedTuple):
    """An operation on some elements, and the codecs whose blocks they may fill."""

    codecs: tuple[GroupCodec, ...]
    run: Callable[[int], None]


def warm_up(binding: QuantizedEngine, device: torch.device) -> None:
    """Use every kernel of the engine once on ``device``."""
    _rehearse_exact_differences(binding, device)
    for codecs, run in _uses(binding, device):
        for numel in (_RAGGED, whole_numel(codecs)):
            run(numel)
            with batch_launches():  # tables of launches are variants of their own
                for _ in range(Batch.FEW):
                    run(numel)


def _rehearse_exact_differences(binding: QuantizedEngine, device: torch.device) -> None:
    codec = binding.scheme.exact_codec
    for dtype in _dtypes(binding):
        if not binding.routes.differs_exactly(dtype):
            continue
        for held in (torch.zeros(numel, dtype=dtype, device=device) for numel in (_RAGGED, 4096)):
            wire = torch.empty(codec.max_bytes(held.numel()), dtype=torch.uint8, device=device)
            used = torch.zeros(1, dtype=torch.int64, device=device)
            for values in (held, held + 1):
                codec.encode(values, held, wire, used)
                nbytes, two = int(used), held.new_empty(2, held.numel())
                codec.decode(wire[:nbytes], held, two[0])  # as metrics read back
                codec.decode_rows(wire, [0, 0], [nbytes] * 2, held.expand(2, -1), two)


def _dtypes(binding: QuantizedEngine) -> list[torch.dtype]:
    params = binding.engine.module.parameters()
    return sorted({p.dtype for p in params if p.is_floating_point()}, key=str)


def _uses(binding: QuantizedEngine, device: torch.device) -> Iterator[_Use]:
    routes = [binding.routes.weights()]
    if binding.has_few_ranks:
        routes.append(binding.routes.weights(whole=False))
    sent = dict.fromkeys((hop.codec, hop.difference) for route in routes for hop in route.hops)
    for dtype in _dtypes(binding):
        for codec, difference in sent:
            if isinstance(codec, GroupCodec):
                yield from _weights(_coding(codec, difference), dtype, device)
    if hooks.exact_gradient_reason(binding.engine) is None:
        reductions = {binding.route(group): None for group in binding.process_groups}
        for hops in reductions:
            yield from _gradients(binding, hops, hooks.gradient_dtype(binding.engine), device)


def _coding(codec: GroupCodec, difference: bool = False) -> Coding:
    return Coding(codec=codec, address=Address(key=0, step=0), difference=difference)


def _weights(coding: Coding, dtype: torch.dtype, device: torch.device) -> Iterator[_Use]:
    def encode_and_decode(numel: int) -> None:
        values = torch.zeros(numel, dtype=dtype, device=device)
        wire = _wire(coding, numel, device)
        coding.encode(values, wire, held=values)
        coding.decode(wire, values)

    yield _Use((coding.codec,), encode_and_decode)


def _gradients(
    binding: QuantizedEngine, hops: Sequence[LinkHop], dtype: torch.dtype, device: torch.device
) -> Iterator[_Use]:
    route = binding.routes.gradients(whole=len(hops) > 1)
    codecs = [hop.codec for hop in route.hops]
    if hops[0].link.size == 1 or not all(isinstance(codec, GroupCodec) for codec in codecs):
        return
    codings, rotation = [_coding(codec) for codec in codecs], route.rotation
    if rotation is not None and binding.scheme.rotation_signs:
        rotation = replace(rotation, signs=Address(key=0, step=0))

    def reduce(numel: int) -> None:
        values = torch.zeros(numel, dtype=dtype, device=device)
        on_wire = numel if rotation is None else rotation.padded(numel)
        wire = _wire(codings[0], on_wire, device)
        codings[0].encode(values, wire, rotation=rotation)
        if rotation is not None:  # of what a rank adds as it is; the others launch as they do here
            block, flips = rotation.block, rotation.signs is not None
            rotated = torch.empty(on_wire, device=device).float()
            turn = Operations([(Rotate(numel, 0, 1, 0, block, flips, rotation.backend), (0, 0))])
            turn.run([values, rotated], Streams(codings[:1], [rotation]))
        for depth, (hop, coding) in enumerate(zip(hops, codings, strict=True)):
            rows = wire.expand(hop.link.size - hop.exact_own, -1)
            own = (0, values.new_zeros(on_wire).float()) if hop.exact_own else None
            if depth + 1 == len(hops):
                for wanted in {torch.float32, coding.sum_dtype(dtype, device)}:
                    total = torch.empty(numel, dtype=wanted, device=device)
                    for scale in (1.0, 1 / 3):  # DeepSpeed may divide by itself
                        coding.decode_sum(rows, total, own=own, scale=scale, rotation=rotation)
                return
            following = codings[depth + 1]
            wire = _wire(following, on_wire, device)
            following.recode(coding, rows, wire, numel=on_wire, own=own)
            if binding.crosses_once(hops):  # encoded from what is held instead
                following.encode(torch.zeros(on_wire, device=device).float(), wire)
            if hops[depth + 1].exact_own or binding.crosses_once(hops):
                coding.decode_sum(rows, torch.empty(on_wire, device=device).float(), own=own)

    yield _Use(tuple(codecs), reduce)
    if route.delivery is not None:  # sums that balanced buckets deliver to their owners
        yield from _weights(_coding(route.delivery.codec), torch.float32, device)


def _wire(coding: Coding, numel: int, device: torch.device) -> torch.Tensor:
    return torch.empty(coding.codec.wire_bytes(numel), dtype=torch.uint8, device=device)
