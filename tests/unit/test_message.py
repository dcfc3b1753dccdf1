"""Gathers of two ranks: full-precision values that already form the row are sent without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.node_rows import RowArena
from tests.world import SimulatedRank, World

BF16 = torch.bfloat16
EXACT_BF16 = CastCodec(torch.bfloat16)
EXACT_FP16 = CastCodec(torch.float16)
EXACT_FP32 = CastCodec(torch.float32)
INT8 = GroupCodec(bits=8, group_size=32)

BLOCK = torch.arange(64, dtype=BF16)  # of 8 values in 16 bytes
ADJACENT = [BLOCK[:16], BLOCK[16:24], BLOCK[24:]]


class Gathered(NamedTuple):
    """The result of a gather. values: as decoded, of rank 0 and then of rank 1, per tensor."""

    values: list[Tensor]
    is_copied: bool


def gather_from_both(
    values: Sequence[Tensor], codecs: Sequence[Codec], *, values_stay: bool = True
) -> Gathered:
    """Gather tensors of which both ranks send the same values."""
    slices = []
    for index, (tensor, codec) in enumerate(zip(values, codecs, strict=True)):
        for rank in range(2):
            slices.append(
                GatherSlice(
                    peer=rank,
                    codec=codec,
                    numel=len(tensor),
                    stream=index,
                    source=(index, 0),
                    target=(index, rank * len(tensor)),
                )
            )

    def gather(rank: SimulatedRank) -> list[Tensor]:
        targets = [tensor.new_zeros(2 * len(tensor)) for tensor in values]
        message = Message(slices, rank=rank.number, ranks=2)
        pending = message.gather(
            rank.run.world.hierarchy.flat,
            values,
            [BoundCodec(codec) for codec in codecs],
            lambda: targets,
            values_stay=values_stay,
        )
        return pending.wait()

    world = World(1, 2)
    received = world.all(gather)[1]
    sent_from = world.groups[0, 1].payload_addresses
    return Gathered(received, is_copied=values[0].data_ptr() not in sent_from)


# ---- values that are sent from where they lie ----


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(ADJACENT, id="three tensors of one block"),
        pytest.param(ADJACENT[1:2], id="a part of a block"),
        pytest.param(BLOCK.split(32), id="two halves"),
    ],
)
def test_adjacent_values_are_sent_without_a_copy(values: Sequence[Tensor]) -> None:
    gathered = gather_from_both(values, [EXACT_BF16] * len(values))
    assert not gathered.is_copied
    for received, sent in zip(gathered.values, values, strict=True):
        assert torch.equal(received, sent.repeat(2))


def test_tensors_of_an_arena_are_adjacent() -> None:
    arena = RowArena(1 << 10, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    first = arena.zeros(2, 4, dtype=BF16)
    second = arena.zeros(12, dtype=torch.float32)
    assert first.data_ptr() + first.nbytes == second.data_ptr()


# ---- values that are copied into a row ----


@pytest.mark.parametrize(
    ("values", "codecs"),
    [
        pytest.param([BLOCK[:16], BLOCK[24:]], [EXACT_BF16] * 2, id="a gap"),
        pytest.param([BLOCK[32:], BLOCK[:32]], [EXACT_BF16] * 2, id="in another order"),
        pytest.param(
            [BLOCK[:16], BLOCK[24:32], BLOCK[16:24], BLOCK[32:]],
            [EXACT_BF16] * 4,
            id="in another order between equal ends",
        ),
        pytest.param([BLOCK[:16], BLOCK[16:24].clone()], [EXACT_BF16] * 2, id="of two blocks"),
        pytest.param([BLOCK[:12], BLOCK[12:32]], [EXACT_BF16] * 2, id="padding between them"),
        pytest.param([BLOCK[:12]], [EXACT_BF16], id="padding behind them"),
        pytest.param([BLOCK[4:20]], [EXACT_BF16], id="not aligned"),
        pytest.param(
            [BLOCK[:16], BLOCK[16:32].view(torch.float32)],
            [EXACT_BF16, EXACT_FP32],
            id="of two dtypes",
        ),
        pytest.param([BLOCK[:16]], [EXACT_FP32], id="sent in more bits"),
        pytest.param([BLOCK[:16]], [EXACT_FP16], id="sent in another dtype"),
        pytest.param([BLOCK], [INT8], id="quantized"),
        pytest.param(ADJACENT, [EXACT_BF16, INT8, EXACT_BF16], id="quantized in part"),
    ],
)
def test_values_that_do_not_form_the_row_are_copied(
    values: Sequence[Tensor], codecs: Sequence[Codec]
) -> None:
    gathered = gather_from_both(values, codecs)
    assert gathered.is_copied
    for received, sent in zip(gathered.values, values, strict=True):
        assert torch.allclose(received, sent.repeat(2), atol=0.2)


def test_values_that_may_change_before_they_are_sent_are_copied() -> None:
    assert gather_from_both(ADJACENT, [EXACT_BF16] * 3, values_stay=False).is_copied


# ---- the measured error ----


def measured_error(*, sends_difference: bool, codec_takes_differences: bool) -> float:
    """Return the relative squared error that two ranks measure, which must be the same."""
    weights = torch.linspace(1, 2, 64)
    codec = GroupCodec(bits=8, group_size=32, range="absmax")
    slices = [
        GatherSlice(
            peer=rank,
            codec=codec,
            numel=64,
            stream=0,
            source=(1, 0),
            target=(0, 64 * rank),
            is_difference=sends_difference,
        )
        for rank in range(2)
    ]

    def gather(rank: SimulatedRank) -> list[float]:
        kept = weights.repeat(2) + 0.01 * torch.sin(torch.arange(128.0))
        meter = rank.run.traffic.meter
        meter.open(lambda: 0.0)
        Message(slices, rank=rank.number, ranks=2).gather(
            rank.run.communicator(None),
            [kept, weights],
            [BoundCodec(codec, difference=codec_takes_differences)],
            lambda: [kept],
        ).wait()
        return meter.close().tallies["weights", "intra"].squares.tolist()

    relative_errors = set()
    for squared_error, squared_norm in World(1, 2).all(gather):
        assert squared_norm == pytest.approx(weights.double().square().sum().item())
        relative_errors.add(squared_error / squared_norm)
    return max(relative_errors)


@pytest.mark.parametrize("codec_takes_differences", [False, True])
def test_the_error_of_weights_is_that_of_8_bits(codec_takes_differences: bool) -> None:
    error = measured_error(sends_difference=False, codec_takes_differences=codec_takes_differences)
    assert 1e-8 < error < 1e-4


@pytest.mark.parametrize("codec_takes_differences", [False, True])
def test_the_error_of_a_difference_is_relative_to_the_weights(
    codec_takes_differences: bool,
) -> None:
    error = measured_error(sends_difference=True, codec_takes_differences=codec_takes_differences)
    assert 0 < error < 1e-8
