"""FSDP2: the trained parameters of a row as the source of a lossless message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_quant.fsdp2.node_shard import trained_columns


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("TTTT", [range(10)]),
        ("TFTT", [range(3), range(5, 10)]),
        ("FTFT", [range(3, 5), range(9, 10)]),
        ("FFFF", []),
        ("TTFF", [range(5)]),
    ],
)
def test_trained_parameters_side_by_side_are_one_range(trained: str, expected: list[range]) -> None:
    widths = (3, 2, 4, 1)
    sharded: Any = SimpleNamespace(
        params=[SimpleNamespace(trained=each == "T") for each in trained],
        offsets=[0, 3, 5, 9],
        widths=widths,
    )
    assert list(trained_columns(sharded)) == expected


def test_every_parameter_of_a_row_has_a_place() -> None:
    params = [SimpleNamespace(trained=True)] * 2
    for offsets, widths in (([0], (3, 2)), ([0, 3], (3,))):
        sharded: Any = SimpleNamespace(params=params, offsets=offsets, widths=widths)
        with pytest.raises(ValueError, match="shorter"):
            trained_columns(sharded)
