"""Learned levels: the online rule against a sequential oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.codec.codec import GroupCodec
from ds_quant.codec.levels import merge_levels, update_levels


def initial_levels(bits: int) -> torch.Tensor:
    return GroupCodec(bits=bits, rounding="nearest", levels="learned").table(
        None, torch.device("cpu")
    )


def samples(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sequential(levels: torch.Tensor, x: torch.Tensor, rate: float, group_size: int) -> np.ndarray:
    """The rule as a loop over values in float64, assignments fixed within a group."""
    table = levels.numpy().astype(np.float64)
    for start in range(0, len(x), group_size):
        group = x[start : start + group_size].numpy()
        unit = (group - group.min()) * np.float32((len(table) - 1) / (group.max() - group.min()))
        before = table.astype(np.float32)
        codes = [int(np.argmin(np.abs(before.astype(np.float64) - float(v)))) for v in unit]
        for v, i in zip(unit, codes, strict=True):
            table[i] -= rate * (table[i] - float(v))
    return table


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_update_equals_the_loop_over_values(bits):
    x = samples(4 * 256 + 100)
    start = initial_levels(bits)
    new = update_levels(start, x, group_size=256, rate=0.05)
    expected = sequential(start, x, 0.05, 256)
    # Five groups, each rounding the table to fp32 once: relative 5 * 2^-24 of at most 2^bits; the
    # oracle rounds nothing, and normalises with one rounding more or less (2^-23 of 2^bits).
    assert np.abs(new.numpy() - expected).max() < 2**bits * 10 * 2.0**-24
    assert torch.equal(start, initial_levels(bits))


def test_a_group_rounds_the_table_once():
    """Values that are levels already, so that nothing is rounded before the sum."""
    x = torch.randint(8, (1024,), generator=torch.Generator().manual_seed(1)).float()
    start = initial_levels(3) + 0.125 * torch.sin(torch.arange(8.0))
    new = update_levels(start, x, group_size=1024, rate=0.01)
    assert np.array_equal(new.numpy(), sequential(start, x, 0.01, 1024).astype(np.float32))


def test_groups_are_spread_evenly_and_deterministically():
    """With 2 of 4 groups allowed, groups 0 and 2 are read and the others are not."""
    x = samples(4 * 64)
    options = dict(group_size=64, rate=0.1, max_groups=2)
    levels = update_levels(initial_levels(3), x, **options)
    other = x.clone()
    other[64:128], other[192:] = 5.0, samples(64, seed=2)
    assert torch.equal(levels, update_levels(initial_levels(3), other, **options))
    read = torch.cat([x[:64], x[128:192]])
    assert torch.equal(levels, update_levels(initial_levels(3), read, group_size=64, rate=0.1))


@pytest.mark.parametrize(
    "x", [[], [3.0] * 100, [[0.0] * 50] * 2, [1.0, float("inf"), 2.0], [1.0, float("nan"), 2.0]]
)
def test_groups_without_a_range_teach_nothing(x):
    start = initial_levels(4)
    new = update_levels(start, torch.tensor(x), group_size=128, rate=0.5)
    assert torch.equal(new, start) and new is not start


def test_merge_is_the_weighted_mean_in_rank_order():
    tables = torch.stack([initial_levels(2), initial_levels(2) * 2, initial_levels(2) * 5])
    merged = merge_levels(tables, torch.tensor([1, 1, 2]))
    assert torch.equal(merged, torch.tensor([0.0, 3.25, 6.5, 9.75]))
    assert merged.dtype == torch.float32
    # A rank without data leaves no trace, not even as NaN of its own making.
    assert torch.equal(merge_levels(tables, torch.tensor([0, 3, 0])), tables[1])


def test_a_mean_is_rounded_once():
    tables = torch.tensor([[1.0], [2.0**-24], [-1.0]])
    assert merge_levels(tables, torch.ones(3)).item() == np.float32(2.0**-24 / 3)
