"""Pairs of 16-bit floats after and before a step, for tests of lossless differences."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ds_quant.kernels.dispatch import decode_lossless, encode_lossless
from ds_quant.kernels.lossless import max_bytes, problem_of

DTYPES = (torch.bfloat16, torch.float16)
NUMELS = (0, 1, 2, 7, 1023, 1025, 2047, 2048, 2049, 4096, 2**16 + 3)
LARGE_NUMELS = (1, 2048, 70_001, 2048 * 2048 + 3000)  # the last one: a second turn of a scan
# Kinds of a block: unchanged, a step at a learning rate, any bits, any bits in a few elements,
# zeros that became any bits.
SORTS = ("same", 1e-3, 3e-4, 1e-4, 1e-5, 1e-7, "any", "few", "zeros")

# NaN with two payloads, both infinities, both zeros, both smallest, both largest.
SPECIAL = (0x7FC0, -1, 0x7F80, -0x80, 0x7C00, -0x400, 0, -0x8000, 1, -0x7FFF, 0x7F7F, -0x81)


def any_bits(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Return uniform 16-bit patterns with some special values, int16."""
    bits = torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int16)
    special = torch.tensor(SPECIAL, dtype=torch.int16)
    chosen = torch.randint(0, len(SPECIAL), (numel,), generator=generator)
    return bits.where(torch.rand(numel, generator=generator) < 0.9, special[chosen])


def step(
    numel: int, rate: float, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of a model (after, before) a step of Adam."""
    master = torch.randn(numel, generator=generator) * 0.02
    moved = master - 0.3 * rate * torch.randn(numel, generator=generator)
    return moved.to(dtype), master.to(dtype)


def pair(
    sort: str | float, numel: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, reference) of a kind of SORTS."""
    if isinstance(sort, float):
        return step(numel, sort, dtype, generator)
    reference = any_bits(numel, generator)
    values = any_bits(numel, generator)
    if sort == "same":
        values = reference
    elif sort == "few":
        values = values.where(torch.rand(numel, generator=generator) < 0.02, reference)
    elif sort == "zeros":
        reference = torch.zeros_like(reference)
    return values.view(dtype).clone(), reference.view(dtype).clone()


def mixed(
    sorts: list[str | float], numel: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, reference) in blocks of 2048 elements, of these kinds in turn."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        pair(sorts[index % len(sorts)], min(2048, numel - start), dtype, generator)
        for index, start in enumerate(range(0, numel, 2048))
    ]
    if not parts:
        return torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    values, references = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(references)


# Fields of a block's entry: offset, struct format, wrong values.
ENTRY_FIELDS = (
    (0, "<I", (0, 1, 2, 40, 600, 1000, 2**31, 2**32 - 1)),
    (4, "<H", (0, 1, 2, 500, 2047, 2048, 2049, 65535)),
    (6, "<B", (0, 1, 120, 130, 255)),
    (7, "<B", (*range(4), *range(15, 33), 255)),
)


def wrong_entries(message: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Return copies of a message of mode 2, each with one wrong field of one entry."""
    for entry in range(16, 16 + 8 * -(-numel // 2048), 8):
        for offset, form, values in ENTRY_FIELDS:
            for value in values:
                written = list(struct.pack(form, value))
                other = message.clone()
                other[entry + offset :][: len(written)] = torch.tensor(written, dtype=torch.uint8)
                if not torch.equal(other, message):
                    yield other


# ---- messages ----


class Damaged(ValueError):
    """A message that cannot be decoded. row: its index."""

    def __init__(self, problem: str, row: int) -> None:
        super().__init__(problem)
        self.row = row


def message_of(
    values: torch.Tensor, reference: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    out = torch.empty(max_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    nbytes = torch.zeros(1, dtype=torch.int64, device=values.device)
    encode_lossless([(values, reference, out)], nbytes, backend=backend)
    return out[: nbytes.item()].clone()


def decode_rows(
    wire: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    reference: torch.Tensor,
    out: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Decode a message into every row.

    Raises:
        Damaged: a message cannot be decoded, the first one of them.
    """
    status = torch.zeros(len(out), 2, dtype=torch.int32, device=wire.device)
    decode_lossless(
        wire, np.asarray(starts), np.asarray(lengths), reference, out, status, backend=backend
    )
    for row, numbers in enumerate(status.tolist()):
        if problem := problem_of(numbers):
            raise Damaged(problem, row)


def decode(
    wire: torch.Tensor, reference: torch.Tensor, out: torch.Tensor, backend: str = "auto"
) -> None:
    decode_rows(wire, [0], [len(wire)], reference[None], out[None], backend)
