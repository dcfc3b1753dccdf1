"""The pieces of DDP's gradients, and the runs of its buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from ds_quant.config.schema import parse_block
from ds_quant.ddp import gradients
from ds_quant.ddp.gradients import runs_of
from ds_quant.policy.route import Routes
from ds_quant.runtime.param import Param
from ds_quant.runtime.reductions import Placement, placements


def params_of(shapes: Sequence[tuple[int, ...]]) -> list[Param]:
    scheme = parse_block({"scheme": "eden4"}).to_scheme()
    routes = Routes(scheme=scheme, stage=0, nodes=8, node_size=8)
    return [
        Param(
            index=index,
            name=str(index),
            shape=torch.Size(shape),
            trained=True,
            tensor=torch.empty(shape, device="meta"),
            routes=routes,
        )
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 1000, 2**14, 2**14 + 5])
@pytest.mark.parametrize("unit", [8, 128, 1024])
def test_pieces_have_every_element_once_and_borders_between_groups(numel: int, unit: int) -> None:
    pieces = list(Placement(num_pieces=7, first=5, ranks=8).pieces(numel, unit))
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces)][:-1]
    assert sum(stop - start for start, stop, _ in pieces) == numel
    assert all(start % unit == 0 and start < stop for start, stop, _ in pieces)
    ranks = [rank for _, _, rank in pieces]
    assert len(set(ranks)) == len(ranks) and set(ranks) <= {5, 6, 7, 0, 1, 2, 3}


def test_ranks_of_eight_nodes_sum_equal_parts_of_a_model() -> None:
    """24 layers of width 1024, with norms and biases; 64 ranks."""
    layer = [(3072, 1024), (3072,), (1024, 1024), (1024,), (4096, 1024), (4096,), (1024, 4096)]
    params = params_of([(50257, 1024), *(layer + [(1024,)] * 5) * 24])
    placed = placements(params, 64)
    large, small = Counter[int](), Counter[int]()
    for param in params:
        counter = large if param.is_quantized(torch.float32) else small
        for start, stop, rank in placed[param].pieces(param.shape.numel(), 128):
            counter[rank] += stop - start
    for counter in (large, small):
        assert len(counter) == 64
        assert max(counter.values()) < 1.02 * sum(counter.values()) / 64


def test_a_bucket_is_cut_into_runs_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "RUN_NUMEL", 100)
    params = params_of([(60,), (40,), (1,), (300,), (50,), (50,)])
    runs = [[param.index for param in run] for run in runs_of(params)]
    assert runs == [[0, 1], [2], [3], [4, 5]]
