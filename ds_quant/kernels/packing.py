"""Bit planes of codes: one byte per code <-> packed planes, with integer shifts on wide words.

The layout is [Note: wire layout] of ds_quant/layout.py. A plane of width p holds 8 / p codes per
byte; as many code bytes are viewed as one little-endian word and folded onto its lowest byte.
Words are 2, 4 or 8 bytes, so rows hold whole vectors of 8 codes. May import torch and layout.
"""

from __future__ import annotations

import torch

from ds_quant.kernels import scratch
from ds_quant.layout import VECTOR_NUMEL, planes

# width -> (word dtype, left shifts that spread the lowest byte, mask after each shift)
_WORDS = {
    4: (torch.int16, ((4, 0x0F0F),)),
    2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (
        torch.int64,
        ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101)),
    ),
}


def plane_bytes(numel: int, width: int) -> int:
    """Bytes of a plane of `numel` codes (a multiple of 8) of `width` bits."""
    return numel // VECTOR_NUMEL * width


def pack(codes: torch.Tensor, sections: list[torch.Tensor], *, bits: int) -> None:
    """Write the planes of `codes` (rows, numel) uint8, numel a multiple of 8, contiguous.

    sections: one (rows, plane_bytes) uint8 tensor per plane, rows may be strided. 2 to 7 bits.
    """
    widths = planes(bits)
    shift = 0
    for width, section in zip(widths, sections, strict=True):
        plane = codes
        if len(widths) > 1:
            plane = scratch.take("plane", codes.shape, dtype=torch.uint8, device=codes.device)
            torch.bitwise_right_shift(codes, shift, out=plane)
            plane.bitwise_and_((1 << width) - 1)
        dtype, spreads = _WORDS[width]
        words = plane.view(dtype)
        folded = scratch.take("words", words.shape, dtype=dtype, device=codes.device)
        for position, (distance, _) in enumerate(reversed(spreads)):
            source = words if position == 0 else folded
            shifted = scratch.take("shifted", words.shape, dtype=dtype, device=codes.device)
            torch.bitwise_right_shift(source, distance, out=shifted)
            torch.bitwise_or(source, shifted, out=folded)
        section.copy_(folded)  # keeps the lowest byte of each word
        shift += width


def unpack(sections: list[torch.Tensor], codes: torch.Tensor, *, bits: int) -> None:
    """Inverse of `pack`: fill `codes` (rows, numel) uint8, contiguous, from its planes."""
    shift = 0
    for width, section in zip(planes(bits), sections, strict=True):
        dtype, spreads = _WORDS[width]
        shape = (codes.shape[0], codes.shape[1] // dtype.itemsize)
        words = codes.view(dtype)
        if shift:
            words = scratch.take("words", shape, dtype=dtype, device=codes.device)
        shifted = scratch.take("shifted", shape, dtype=dtype, device=codes.device)
        words.copy_(section)
        for distance, mask in spreads:
            torch.bitwise_left_shift(words, distance, out=shifted)
            words.bitwise_or_(shifted).bitwise_and_(mask)
        if shift:
            plane = words.view(torch.uint8)
            codes.bitwise_or_(plane.bitwise_left_shift_(shift))
        shift += width
