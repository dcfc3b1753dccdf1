"""Learned levels: the online rule against a loop over single values, and the mean over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_quant.codec.codec import GroupCodec
from ds_quant.codec.levels import merge_levels, update_levels


def uniform_levels(bits: int) -> Tensor:
    """Return the levels before anything is learned, 0 to 2^bits - 1."""
    codec = GroupCodec(bits=bits, rounding="nearest", levels="learned")
    table = codec.table(None, torch.device("cpu"))
    assert table is not None
    return table


def normal_values(numel: int, seed: int = 1) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# ---- the update from one rank's values ----


def learned_value_by_value(levels: Tensor, x: Tensor, rate: float, group_size: int) -> np.ndarray:
    """Return levels learned in a loop over the values, in float64.

    A value moves the level that was nearest to it when its group began.
    """
    table = levels.numpy().astype(np.float64)
    highest_code = len(table) - 1
    for start in range(0, len(x), group_size):
        group = x[start : start + group_size].numpy()
        unit = (group - group.min()) * np.float32(highest_code / (group.max() - group.min()))
        table_of_group = table.astype(np.float32).astype(np.float64)
        for value in unit.astype(np.float64):
            nearest = int(np.argmin(np.abs(table_of_group - value)))
            table[nearest] -= rate * (table[nearest] - value)
    return table


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_levels_move_as_in_a_loop_over_the_values(bits: int) -> None:
    x = normal_values(4 * 256 + 100)  # the last group is short
    new = update_levels(uniform_levels(bits), x, group_size=256, rate=0.05)
    expected = learned_value_by_value(uniform_levels(bits), x, rate=0.05, group_size=256)
    # Five groups, each rounding the table to fp32 once: relative 5 * 2^-24 of at most 2^bits; the
    # oracle rounds nothing, and normalises with one rounding more or less (2^-23 of 2^bits).
    assert np.abs(new.numpy() - expected).max() < 2**bits * 10 * 2.0**-24


def test_the_levels_before_are_left_as_they_were() -> None:
    levels = uniform_levels(4)
    update_levels(levels, normal_values(256), group_size=256, rate=0.05)
    assert torch.equal(levels, uniform_levels(4))


def test_a_group_rounds_the_levels_once() -> None:
    """The values are codes already, so nothing is rounded before the sum."""
    codes = torch.randint(8, (1024,), generator=torch.Generator().manual_seed(1)).float()
    levels = uniform_levels(3) + 0.125 * torch.sin(torch.arange(8.0))
    new = update_levels(levels, codes, group_size=1024, rate=0.01)
    expected = learned_value_by_value(levels, codes, rate=0.01, group_size=1024)
    assert np.array_equal(new.numpy(), expected.astype(np.float32))


def test_with_two_of_four_groups_the_first_and_third_are_read() -> None:
    first, second, third, fourth = normal_values(4 * 64).split(64)
    limited = update_levels(
        uniform_levels(3),
        torch.cat([first, second, third, fourth]),
        group_size=64,
        rate=0.1,
        max_groups=2,
    )
    of_both = update_levels(uniform_levels(3), torch.cat([first, third]), group_size=64, rate=0.1)
    assert torch.equal(limited, of_both)


@pytest.mark.parametrize(
    "x",
    [
        pytest.param([], id="no values"),
        pytest.param([3.0] * 100, id="equal values"),
        pytest.param([[0.0] * 50] * 2, id="zeros"),
        pytest.param([1.0, float("inf"), 2.0], id="infinity"),
        pytest.param([1.0, float("nan"), 2.0], id="NaN"),
    ],
)
def test_groups_without_a_finite_range_leave_the_levels_unchanged(x: list[Any]) -> None:
    new = update_levels(uniform_levels(4), torch.tensor(x), group_size=128, rate=0.5)
    assert torch.equal(new, uniform_levels(4))


def test_unchanged_levels_are_a_copy() -> None:
    """Otherwise a later update in place would change the levels of another step."""
    levels = uniform_levels(4)
    assert update_levels(levels, torch.zeros(0), group_size=128, rate=0.5) is not levels


# ---- the mean over ranks ----


def test_ranks_count_by_their_number_of_elements() -> None:
    tables = torch.stack([uniform_levels(2), uniform_levels(2) * 2, uniform_levels(2) * 5])
    mean = merge_levels(tables, torch.tensor([1, 1, 2]))
    assert mean.dtype == torch.float32
    assert torch.equal(mean, torch.tensor([0.0, 3.25, 6.5, 9.75]))


def test_a_rank_without_elements_does_not_count() -> None:
    tables = torch.stack([uniform_levels(2), uniform_levels(2) * 2, uniform_levels(2) * 5])
    assert torch.equal(merge_levels(tables, torch.tensor([0, 3, 0])), uniform_levels(2) * 2)


def test_the_mean_is_rounded_once() -> None:
    tables = torch.tensor([[1.0], [2.0**-24], [-1.0]])
    assert merge_levels(tables, torch.ones(3)).item() == np.float32(2.0**-24 / 3)
