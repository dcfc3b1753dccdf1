"""Several tensors per kernel for one table each, with what the reference makes of them.

The tensors of a kind differ in length and address but share the macros of their kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, reference
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation

INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
INT8 = GroupCodec(bits=8, group_size=128, range="absmax")
ADDRESS = Address(key=77, step=5, first_vector=(1 << 32) - 5)
NUMELS = (1, 129, 4099, 2047, 777)
ROTATION = BlockRotation(32)


class Case(NamedTuple):
    """One tensor of a table."""

    call: Callable[[Callable], object]  # of a runner
    found: torch.Tensor
    wanted: torch.Tensor  # on the CPU


def wire_of(codec: GroupCodec, x: torch.Tensor, **options) -> torch.Tensor:
    """By the reference, on the CPU."""
    rotation = options.get("rotation")
    numel = -(-x.shape[1] // rotation.block) * rotation.block if rotation else x.shape[1]
    out = torch.empty(x.shape[0], codec.wire_bytes(numel), dtype=torch.uint8)
    reference.encode(x, out, codec, address=ADDRESS, levels=None, **options)
    return out


def at(x: torch.Tensor, device: torch.device, skew: int) -> torch.Tensor:
    """A copy on the device whose rows start `skew` elements off an allocation."""
    buffer = torch.empty(x.shape[0], x.shape[1] + skew, dtype=x.dtype, device=device)
    return buffer[:, skew:].copy_(x)


def encodes(device: torch.device, skew: int = 0, base: bool = False, rotate: bool = False):
    for index, numel in enumerate(NUMELS):
        x, held = torch.randn(1 + index % 2, numel).bfloat16(), None
        options = {"rotation": ROTATION if rotate else None}
        if base:
            held = torch.randn(x.shape[0], numel)
        wanted = wire_of(INT4, x, base=held, **options)
        found = torch.full_like(wanted, 0x55, device=device)
        there, before = at(x, device, skew), None if held is None else at(held, device, skew)
        yield Case(
            lambda run, x=there, out=found, base=before, options=options: launch.encode(
                x, out, INT4, address=ADDRESS, levels=None, base=base, run=run, **options
            ),
            found,
            wanted,
        )


def decodes(device: torch.device, skew: int):
    for numel in NUMELS:
        wire = wire_of(INT4, torch.randn(2, numel))
        wanted = torch.empty(2, numel)
        reference.decode(wire, wanted, INT4, levels=None)
        found, there = at(torch.zeros(2, numel).bfloat16(), device, skew), wire.to(device)
        yield Case(
            lambda run, wire=there, out=found: launch.decode(wire, out, INT4, levels=None, run=run),
            found,
            wanted.bfloat16(),
        )


def sums(device: torch.device):
    for numel in NUMELS:
        own, wire = torch.randn(numel), wire_of(INT4, torch.randn(7, numel))
        wanted = torch.empty(numel)
        options = {"scale": 0.125, "levels": None}
        reference.decode_sum(wire, wanted, INT4, own=(3, own), **options)
        found = torch.zeros(numel, device=device)
        mine, there = (3, own.to(device)), wire.to(device)
        yield Case(
            lambda run, wire=there, out=found, own=mine, options=options: launch.decode_sum(
                wire, out, INT4, own=own, run=run, **options
            ),
            found,
            wanted,
        )


def recodes(device: torch.device):
    for numel in NUMELS:
        wire = wire_of(INT8, torch.randn(8, numel))
        total = torch.empty(1, numel)
        reference.decode_sum(wire, total[0], INT8, scale=1.0, own=None, levels=None)
        wanted = wire_of(INT4, total)
        found, there = torch.full_like(wanted, 0x55, device=device), wire.to(device)[None]
        yield Case(
            lambda run, wire=there, out=found, numel=numel: launch.recode(
                wire, out, INT8, INT4, numel=numel, address=ADDRESS, run=run
            ),
            found,
            wanted,
        )


KINDS: dict[str, Callable[[torch.device], object]] = {
    "encode": encodes,
    "encode, unaligned": lambda device: encodes(device, skew=3),
    "encode, base": lambda device: encodes(device, base=True),
    "encode, base, rotated, unaligned": lambda device: encodes(device, 3, base=True, rotate=True),
    "decode": lambda device: decodes(device, 0),
    "decode, unaligned": lambda device: decodes(device, 3),
    "decode_sum, own row": sums,
    "recode": recodes,
}
