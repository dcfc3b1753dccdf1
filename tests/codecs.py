"""Shared by the codec tests: lists of codecs, awkward groups."""

from __future__ import annotations

import itertools
import math

import torch

from ds_quant.codec.codec import LEVELS, RANGES, ROUNDINGS, GroupCodec


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
