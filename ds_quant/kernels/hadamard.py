"""Blockwise Walsh-Hadamard transform in torch, on any device: the specification of the numbers.

[Note: rotation numbers]
Natural (Sylvester) order, entries +-1. Stages of distance 1, 2, 4, ... block / 2; each stage maps
the pair (a, b) to (fl(a + b), fl(a - b)) in fp32. Signs, if any, multiply the input of the forward
transform and the output of the inverse, which is the same butterflies and then one multiplication
by fl(scale / block), because H H = block * I.
Pairs are independent within a stage, so every order of work gives the same bits. Here a chunk is
transposed first: then each stage reads and writes long runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ds_quant.kernels import scratch
from ds_quant.kernels.wire import round_up

_CHUNK_NUMEL = {"cpu": 1 << 19}  # measured: two buffers of 2 MB; 2^17 and 2^20 are a tenth slower
_DEVICE_CHUNK_NUMEL = 1 << 24


class BlockRotation(NamedTuple):
    """Walsh-Hadamard transform of blocks of 32, 64 or 128 elements.

    flips: bit i set = element i of every block changes its sign; None for no flips.
    """

    block: int
    flips: int | None = None

    def signs(self, device: torch.device) -> torch.Tensor | None:
        """(block,) fp32 of +-1, or None for no flips."""
        if self.flips is None:
            return None
        return _cpu_signs(self) if scratch.is_synchronous(device) else _signs(self, device)


@lru_cache(maxsize=64)
def _cpu_signs(rotation: BlockRotation) -> torch.Tensor:
    with torch.inference_mode(False):
        return _signs(rotation, torch.device("cpu"))


def _signs(rotation: BlockRotation, device: torch.device) -> torch.Tensor:
    """Made on the device: a copy from the host would wait for the stream."""
    places = torch.arange(32, device=device)
    words = [rotation.flips >> start & 0xFFFFFFFF for start in range(0, rotation.block, 32)]
    bits = torch.cat([torch.full_like(places, word) >> places & 1 for word in words])
    return 1 - 2 * bits.to(torch.float32)


def rotate(
    x: torch.Tensor,  # (numel,) floating point
    out: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: BlockRotation,
) -> None:
    """out = H (signs * x) block by block, x filled up with zeros to whole blocks."""
    block, signs = rotation.block, rotation.signs(x.device)
    out[: x.numel()].copy_(x)
    out[x.numel() :].zero_()
    for chunk in _chunks(out, block):
        if signs is not None:
            chunk.mul_(signs)
        _butterflies(chunk)


def rotated_rows(
    x: torch.Tensor, base: torch.Tensor | None, rotation: BlockRotation
) -> torch.Tensor:
    """x or x - base, (rows, numel) -> rotated, (rows, whole blocks) fp32."""
    values = x.detach() if base is None else x.detach().float() - base.detach().float()
    padded = round_up(x.shape[1], rotation.block)
    out = torch.empty(x.shape[0], padded, dtype=torch.float32, device=x.device)
    for row, target in zip(values, out, strict=True):
        rotate(row, target, rotation)
    return out


def unrotate_(
    x: torch.Tensor,  # (blocks * block,) fp32 contiguous
    rotation: BlockRotation,
    *,
    scale: float = 1.0,
) -> None:
    """x = signs * (H x * (scale / block)), in place: the inverse of ``rotate``, times scale."""
    block, signs = rotation.block, rotation.signs(x.device)
    for chunk in _chunks(x, block):
        _butterflies(chunk)
        chunk.mul_(scale / block)
        if signs is not None:
            chunk.mul_(signs)


def _chunks(values: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """Runs of whole blocks, each (blocks, block), views of `values`."""
    numel = _CHUNK_NUMEL.get(values.device.type, _DEVICE_CHUNK_NUMEL)
    return values.view(-1, block).split(max(1, numel // block)) if values.numel() else ()


def _butterflies(values: torch.Tensor) -> None:
    """H of every row of `values` (rows, block) fp32, in place."""
    rows, block = values.shape
    turns = [
        scratch.take(slot, (block, rows), dtype=torch.float32, device=values.device)
        for slot in ("rotation", "rotated")
    ]
    turns[0].copy_(values.t())
    distance = 1
    while distance < block:
        source, target = (t.view(block // (2 * distance), 2, distance * rows) for t in turns)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        turns.reverse()
        distance *= 2
    values.copy_(turns[0].t())
