"""Shared by the codec and kernel tests: a slow oracle of GroupCodec, awkward groups, codec lists.

The oracle is written from [Note: numbers] of ds_quant/kernels/reference.py with numpy scalars,
Python integers as bit strings and rng.philox4x32; it shares no code with the tensor path.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct

import numpy as np
import torch

from ds_quant.codec.codec import LEVELS, RANGES, ROUNDINGS, GroupCodec
from ds_quant.kernels import random_bits

F32 = np.float32
PLANES = {8: [8], 7: [4, 2, 1], 6: [4, 2], 5: [4, 1], 4: [4], 3: [2, 1], 2: [2]}


def codecs(**fixed) -> list[GroupCodec]:
    """Every valid codec with the given fields; groups of 32 unless said otherwise."""
    found = []
    fields = dict(bits=range(2, 9), group_size=(32,), range=RANGES, rounding=ROUNDINGS)
    fields["levels"] = LEVELS
    fields.update({name: (value,) for name, value in fixed.items()})
    for values in itertools.product(*fields.values()):
        chosen = dict(zip(fields, values, strict=True))
        if chosen["range"] == "gaussian":  # tests/unit/test_gaussian.py
            continue
        learned = chosen["levels"] == "learned"
        if chosen["rounding"] == "random_shift" and chosen["range"] == "absmax":
            continue
        if learned and (chosen["range"], chosen["rounding"]) != ("minmax", "nearest"):
            continue
        found.append(GroupCodec(**chosen))
    return found


def flushed(value: np.float32) -> np.float32:
    return F32(0) if abs(value) < 2.0**-126 else value


def oracle_group(values, codec, random, shift, levels):
    """(codes, scale, offset) of one group; values and the results are numpy fp32 scalars."""
    symmetric = codec.range == "absmax"
    top = 2 ** (codec.bits - 1) - 1 if symmetric else 2**codec.bits - 1
    zero = 2 ** (codec.bits - 1) if symmetric else 0
    nothing = [zero] * len(values)
    if not all(np.isfinite(values)):
        return nothing, F32("nan"), F32(0)
    largest = max(abs(v) for v in values)
    low = F32(0) if symmetric else min(values)
    span = largest if symmetric else F32(max(values) - low)
    if span < 2.0**-99:
        return nothing, F32(0), F32(0) if largest < 2.0**-99 else flushed(low)
    scale = F32(span / F32(top))
    if not scale <= 2.0**126:
        return nothing, F32("nan"), F32(0)
    offset = flushed(low)
    if codec.rounding == "random_shift":
        offset = flushed(F32(offset + flushed(F32(F32(shift) * scale))))
        if not np.isfinite(offset):
            return nothing, F32("nan"), F32(0)
    stochastic = codec.rounding == "stochastic"
    fraction = (15 if codec.bits == 8 else 16) if stochastic else 0
    inverse = F32(F32(2.0**fraction) / scale)
    middles = [F32(F32(a + b) / F32(2)) for a, b in itertools.pairwise(levels or [])]
    codes = []
    for value, r in zip(values, random, strict=True):
        product = F32((value if symmetric else F32(value - offset)) * inverse)
        if codec.levels == "learned":
            q = bisect.bisect_left(middles, product)
        elif stochastic:
            q = (int(np.rint(product)) + (r >> 16 - fraction)) >> fraction
        else:
            q = int(np.rint(min(product, F32(1e6))))  # x - offset may overflow beside a shift
        codes.append(min(max(q, -top if symmetric else 0), top) + zero)
    return codes, scale, offset


def oracle_row(values, codec, row, address, levels=None) -> bytes:
    """Wire bytes of one row of numpy fp32 values."""
    numel = len(values)
    vectors = -(-numel // 8)
    random = []
    for vector in range(vectors):
        index = address.first_vector + row * vectors + vector
        counter = (index % 2**32, index >> 32, address.step % 2**32, address.step >> 32)
        words = random_bits.philox4x32(counter, (address.key % 2**32, address.key >> 32))
        random += [half for word in words for half in (word % 2**16, word >> 16)]
    shift = random_bits.shift_of(address)
    codes, scales, offsets = [], [], []
    for start in range(0, numel, codec.group_size):
        stop = min(start + codec.group_size, numel)
        group = oracle_group(values[start:stop], codec, random[start:stop], shift, levels)
        codes += group[0]
        scales.append(group[1])
        offsets.append(group[2])
    sections, low_bit = [], 0
    for width in PLANES[codec.bits]:
        string = sum((c >> low_bit) % 2**width << i * width for i, c in enumerate(codes))
        sections.append(string.to_bytes(vectors * width, "little"))
        low_bit += width
    sections.append(struct.pack(f"<{len(scales)}f", *scales))
    if codec.range == "minmax":
        sections.append(struct.pack(f"<{len(offsets)}f", *offsets))
    return b"".join(section + bytes(-len(section) % 16) for section in sections)


def awkward_groups() -> torch.Tensor:
    """(groups, 32) fp32: the groups of [Note: exceptional groups] and their neighbours."""
    generator = torch.Generator().manual_seed(2)
    tiny, largest = 2.0**-99, torch.finfo(torch.float32).max
    normal = torch.randn(32, generator=generator)
    unit = normal / normal.abs().max()
    ramp = torch.arange(32.0)
    below = math.nextafter(tiny, 0.0)

    def planted(value: float) -> torch.Tensor:
        group = normal.clone()
        group[9] = value
        return group

    groups = [normal, torch.zeros(32), -torch.zeros(32), torch.full((32,), 2.5), -ramp - 1e6]
    groups += [unit * scale for scale in (tiny, below, tiny * 2, tiny / 2, tiny * 300, 1e-40)]
    groups += [ramp * (scale / 31) for scale in (tiny, below, 255 * tiny, 2.0**-126, 2.0**-140)]
    groups += [ramp.clamp(max=1) * 1e-41, 1.0 + ramp * 2.0**-23, 1e-30 + ramp * tiny / 40]
    groups += [unit * largest, unit.abs() * largest, torch.full((32,), largest)]
    groups += [ramp * (largest / 31), unit * 2.0**126, ramp * (2.0**126 / 31), ramp - largest]
    groups += [planted(value) for value in (math.inf, -math.inf, math.nan, largest, 1e-42)]
    groups += [torch.full((32,), value) for value in (math.inf, math.nan)]
    mixed_zeros = ramp.clone()
    mixed_zeros[:4] = torch.tensor([-0.0, 0.0, -0.0, 1e-45])
    return torch.stack([*groups, mixed_zeros, mixed_zeros.flip(0), 1e-44 - ramp, ramp - 1e-44])
