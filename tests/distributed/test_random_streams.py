"""No two values of a training step are rounded by the same random bits, and errors average out.

Bits are noted where they are drawn, in the torch kernels, so nothing here repeats the rules by
which streams get their names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.models import FEATURES, TARGETS, Regression, build, settings, train_steps
from tests.thin import thinned

PLACES = [(role, link) for role in ("weights", "gradients") for link in ("intra", "inter")]
DELIVERED = 1 << 62  # from this vector on, bits of what a reducer delivers to an owner


class Even(nn.Module):
    """97k parameters. ``first.weight`` has one owner of four and is cut into halves of whole
    groups, so that to balance its bucket costs no byte more and is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 256, bias=False)
        self.second = nn.Linear(256, 256, bias=False)
        self.last = nn.Linear(256, TARGETS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.second(self.first(x)))) - y).square().mean()


def config(stage: int, node_size: int, **block: Any) -> dict[str, Any]:
    """All roles are rounded stochastically, by the torch kernels."""
    fields = {
        "scheme": "qsdp",
        "backend": "torch",
        "node_size": node_size,
        "weights": {"rounding": "stochastic", "intra": {"bits": 8}},
        **block,
    }
    if stage == 3:
        # Weights are gathered once per step: forward and backward share bits on purpose.
        once = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
        return settings(3, fields, zero=once)
    small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 20_000}
    return settings(2, fields, zero=small, accumulation=2)


TWO_LEVELS = {"gradients": {"bits": 4, "intra": {"bits": 8}}, "slices": 3}
CASES: dict[str, tuple[dict[str, Any], type[nn.Module]]] = {
    "ZeRO-3, one level": (config(3, 4), Regression),
    "ZeRO-3, two levels": (config(3, 2, node_shard=True, **TWO_LEVELS), Regression),
    "ZeRO-2, one level": (config(2, 4), Even),
    "ZeRO-2, two levels": (config(2, 2, **TWO_LEVELS), Even),
}


def drawn(config: dict[str, Any], model: type[nn.Module]) -> np.ndarray:
    """Return the random bits that this rank has drawn from the second step on.

    In its first step ZeRO-3 gathers everything twice. A row per draw, uint64: vectors
    [first, first + count) of the stream (key, step), and the role and level of their message.
    """
    from ds_quant.comm.traffic import Meter
    from ds_quant.kernels import reference

    draws: list[tuple[int, int, int, int, int]] = []
    draw, encoding = reference.random_bits, Meter.encoding
    place = 0

    def placed(self: Meter, role: str, hop: str) -> Any:
        nonlocal place
        place = PLACES.index((role, hop))
        return encoding(self, role, hop)

    def noted(address: Any, first: int, vectors: int, device: torch.device) -> torch.Tensor:
        draws.append((address.key, address.step, first, vectors, place))
        return draw(address, first, vectors, device)

    reference.random_bits, Meter.encoding = noted, placed
    engine = build(config, model)
    train_steps(engine, 1)
    draws.clear()
    train_steps(engine, 2, first=1)
    return np.array(draws, dtype=np.uint64)


@pytest.mark.parametrize("case", thinned(CASES, lambda case: "two levels" in case))
@on_ranks(4)
def test_no_random_bits_are_drawn_twice(case: str) -> None:
    """By no other rank, parameter, shard, slice, run, delivery or micro-step, nor for the other
    role or hop: a rank keeps its own part on the first hop and sends it on the second one, so
    streams that both shared would not show otherwise.
    """
    columns = np.concatenate(of_all_ranks(drawn(*CASES[case]))).T
    order = np.lexsort(columns[2::-1])  # of streams, then vectors
    key, step, first, count, place = columns[:, order]
    same = (key[1:] == key[:-1]) & (step[1:] == step[:-1])
    again = same & (first[1:] < first[:-1] + count[:-1])
    assert not again.any(), f"{again.sum()} of {len(again)} draws"
    assert same.any() and len(np.unique(key)) > 3 * 4, "several draws per stream, many streams"
    assert ("ZeRO-2" in case) == (first >= DELIVERED).any(), "buckets of one owner are balanced"
    assert len(np.unique(np.stack([key, place]), axis=1).T) == len(np.unique(key))
    assert len(np.unique(place)) > 1
