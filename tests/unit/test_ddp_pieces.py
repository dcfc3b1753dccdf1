"""The pieces of DDP's gradients, and the runs of its buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.comm.reduction_plan import Segment
from ds_quant.comm.returned_sums import Piece
from ds_quant.config.schema import parse_block
from ds_quant.ddp import gradients
from ds_quant.ddp.gradients import runs_of
from ds_quant.policy.route import Routes
from ds_quant.runtime import reductions
from ds_quant.runtime.param import Param, bind, full_precision_gradient
from ds_quant.runtime.reductions import (
    Placement,
    ReturnedGradients,
    placements,
    plan_return,
    reduced_codecs,
)


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


def test_pieces_begin_at_whole_groups_and_are_summed_by_one_rank_after_the_other() -> None:
    pieces = Placement(num_pieces=3, first=2, ranks=4).pieces(1000, 128)
    # Thirds begin at 333 and 666: in groups of 128 at 256 and 640.
    assert list(pieces) == [(0, 256, 2), (256, 640, 3), (640, 1000, 0)]
    few = Placement(num_pieces=3, first=2, ranks=4).pieces(200, 128)
    assert list(few) == [(0, 128, 3), (128, 200, 0)]  # the first one is empty


def test_parameters_take_turns_with_as_many_pieces_as_they_are_large() -> None:
    """Of 1024 elements at least if they are quantized, and of 128 if not; here for five ranks."""
    params = params_of([(64, 64), (40, 64), (1000,), (255,), (2,), (96, 64)])
    params[5].tensor = torch.empty(96, 64, dtype=torch.int8)  # which is never quantized
    placed = placements(params, 5)
    assert [placed[param] for param in params] == [
        Placement(num_pieces=4, first=0, ranks=5),  # 4096 elements
        Placement(num_pieces=2, first=4, ranks=5),  # 2560
        Placement(num_pieces=5, first=1, ranks=5),  # 1000, for seven pieces of 128
        Placement(num_pieces=1, first=1, ranks=5),
        Placement(num_pieces=1, first=2, ranks=5),
        Placement(num_pieces=5, first=3, ranks=5),
    ]


# ---- codecs on the way to the ranks that sum, and back ----


def level_of(**fields: Any) -> Any:
    """Return a level of rank 5 of 8 x 8, with two hops."""
    return SimpleNamespace(hops=("inside", "between"), hierarchy=SimpleNamespace(rank=5), **fields)


@pytest.mark.parametrize("full_precision", [False, True])
def test_gradients_are_sent_quantized_unless_the_step_is_exact_or_they_are_small(
    full_precision: bool,
) -> None:
    dtype = torch.bfloat16
    params = params_of([(200, 128), (9,), (20_000,)])
    small, large = (full_precision_gradient(dtype, 2, tight=tight) for tight in (True, False))
    quantized = params[0].gradient_codecs(dtype, rank=5, hops=2)
    assert quantized.spec.block == 128
    found = reduced_codecs(level_of(), params, dtype, full_precision=full_precision)
    assert found == [large if full_precision else quantized, small, large]


SEGMENTS = [
    Segment(tensor=0, start=100, numel=30, gradient=0, first=0, reducer=5),
    Segment(tensor=0, start=130, numel=40, gradient=0, first=30, reducer=12),
    Segment(tensor=0, start=170, numel=50, gradient=1, first=3, reducer=13),
    Segment(tensor=0, start=220, numel=60, gradient=2, first=7, reducer=21),
]


@pytest.mark.parametrize("full_precision", [False, True])
@pytest.mark.parametrize("replicas", [False, True])
def test_sums_go_back_to_all_ranks_that_hold_the_weights(
    replicas: bool, full_precision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With replicas these are the ranks of equal place in all nodes, here the sixth of eight: it
    sends what it has summed, and its index is that of the node.
    """
    planned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(reductions, "ReturnedSums", lambda *args: planned.append(args) or "sums")
    dtype = torch.bfloat16
    params = params_of([(200, 128), (9,), (20_000,)])
    level = level_of(
        returning="receivers",
        routes=SimpleNamespace(replicas=replicas),
        topology=SimpleNamespace(node_size=8),
        shard=5,
    )
    sums: Any = SimpleNamespace(own={0: 1000, 3: 2000})  # of this rank, by segment
    how = {"full_precision": full_precision}
    found = plan_return(level, params, dtype, SEGMENTS, sums, first=100, **how)
    small, large = (full_precision_gradient(dtype, 1, tight=tight) for tight in (True, False))
    quantized = params[0].returned_codecs(dtype, rank=5)
    assert quantized.spec.block == 128
    assert found.codecs == [large if full_precision else quantized, small, large]
    assert found.exchange == "sums"
    ((pieces, specs, receivers),) = planned
    assert receivers == "receivers" and specs == [codecs.spec for codecs in found.codecs]
    senders = (0, None, 1, 2) if replicas else (5, 12, 13, 21)
    assert pieces == [
        Piece(sender, segment.gradient, segment.numel, segment.first, source, segment.start - 100)
        for sender, segment, source in zip(senders, SEGMENTS, (1000, 0, 0, 2000), strict=True)
        if sender is not None
    ]
    plan_return(level, params, dtype, SEGMENTS, sums, **how)
    assert [piece.target for piece in planned[1][0]] == [piece.target + 100 for piece in pieces]


def test_sums_go_back_with_the_random_bits_of_their_step() -> None:
    dtype = torch.bfloat16
    codecs = [param.returned_codecs(dtype, rank=5) for param in params_of([(64, 64), (9, 9)])]
    exchange, sums, output = Mock(), torch.zeros(3), torch.zeros(5)
    pending = ReturnedGradients(codecs=codecs, exchange=exchange).send(sums, output, 6)
    assert pending is exchange.send.return_value
    given = exchange.send.call_args.args
    assert given[0] is sums and given[1] is output
    bound_codecs, rotations = bind(codecs, 6, 6)
    assert given[2] == [codec for (codec,) in bound_codecs] and given[3] == rotations
    assert rotations[0] is not None and rotations[0].signs.step == 6  # type: ignore[union-attr]


def test_plans_of_returned_sums_are_distinct_and_do_not_change() -> None:
    """Every bucket has one of its own, even if two of them are equal."""
    exchange = Mock()
    one, other = (ReturnedGradients(codecs=[], exchange=exchange) for _ in range(2))
    assert one != other and len({one, other}) == 2
    with pytest.raises(FrozenInstanceError):
        one.codecs = []  # type: ignore[misc]
    with pytest.raises(TypeError):
        ReturnedGradients([], exchange)  # type: ignore[misc]
