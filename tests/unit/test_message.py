"""A row of exact values that lies in memory as it would be packed is sent from there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.node_rows import RowArena
from tests.world import SimulatedRank, World

LARGE = CastCodec(torch.bfloat16)
BF16, FP32 = torch.bfloat16, torch.float32
BLOCK = torch.arange(64, dtype=BF16)
WHOLE = [BLOCK[:16], BLOCK[16:24], BLOCK[24:]]  # end to end, each of whole 16 bytes


def sent(
    values: Sequence[torch.Tensor], codecs: Sequence[Codec], *, values_stay: bool = True
) -> tuple[torch.Tensor, bool]:
    """What one of two ranks that send the same receives, and whether its row was packed."""
    numels, world, payloads = [len(tensor) for tensor in values], World(1, 2), []
    parts = [
        GatherSlice(rank, codec, numel, i, (i, 0), (i, rank * numel))
        for i, (codec, numel) in enumerate(zip(codecs, numels, strict=True))
        for rank in range(2)
    ]

    def gather(rank: SimulatedRank) -> list[torch.Tensor]:
        into = [torch.zeros(2 * len(tensor), dtype=tensor.dtype) for tensor in values]
        link, bound_codecs = rank.run.world.hierarchy.flat, [BoundCodec(codec) for codec in codecs]
        send = link.all_gather
        link.all_gather = lambda payload, **how: payloads.append(payload) or send(payload, **how)
        message = Message(parts, rank=rank.number, ranks=2)
        pending = message.gather(link, values, bound_codecs, lambda: into, values_stay=values_stay)
        return pending.wait()

    received = world.all(gather)[1]
    packed = {payload.data_ptr() != values[0].data_ptr() for payload in payloads}
    assert len(packed) == 1
    return torch.cat([tensor.float() for tensor in received]), packed.pop()


def test_exact_values_that_lie_end_to_end_are_sent_from_there() -> None:
    room = RowArena(1 << 10, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    cut = [room.zeros(2, 4, dtype=BF16), room.zeros(12, dtype=FP32)]
    mixed = [BLOCK[:16], BLOCK[16:32].view(FP32)]
    for values in (WHOLE, WHOLE[1:2], [tensor.view(-1) for tensor in cut[:1]], BLOCK.split(32)):
        found, packed = sent(values, [LARGE] * len(values))
        assert torch.equal(found, torch.cat([tensor.repeat(2).float() for tensor in values]))
        assert not packed
    assert cut[0].data_ptr() + cut[0].nbytes == cut[1].data_ptr(), "rooms leave no gaps"
    assert sent(mixed, [LARGE, CastCodec(FP32)])[1], "of one dtype only"


@pytest.mark.parametrize(
    ("values", "codecs"),
    [
        ([BLOCK[:16], BLOCK[24:]], [LARGE] * 2),  # a gap
        ([BLOCK[32:], BLOCK[:32]], [LARGE] * 2),  # in another order
        ([BLOCK[:16], BLOCK[24:32], BLOCK[16:24], BLOCK[32:]], [LARGE] * 4),
        ([BLOCK[:16], BLOCK[16:24].clone()], [LARGE] * 2),
        ([BLOCK[:12], BLOCK[12:32]], [LARGE] * 2),  # slots are padded
        ([BLOCK[:12]], [LARGE]),
        ([BLOCK[4:20]], [LARGE]),  # begins between 16 bytes
        ([BLOCK[:16]], [CastCodec(FP32)]),
        ([BLOCK[:16]], [CastCodec(torch.float16)]),
        ([BLOCK], [GroupCodec(bits=8, group_size=32)]),
        (WHOLE, [LARGE, GroupCodec(bits=8, group_size=32), LARGE]),
    ],
)
def test_what_lies_otherwise_is_packed(values: list, codecs: list) -> None:
    found, packed = sent(values, codecs)
    want = torch.cat([tensor.repeat(2).float() for tensor in values])
    assert packed and torch.allclose(found, want, atol=0.2)


def test_what_may_change_before_it_is_sent_is_packed() -> None:
    assert sent(WHOLE, [LARGE] * 3, values_stay=False)[1]


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_a_sample_measures_the_weights_whether_differences_are_sent(
    sent: bool, coded: bool
) -> None:
    """``coded``: the scheme has differences, which are sent where a reference is kept."""
    codec, wanted = GroupCodec(bits=8, group_size=32, range="absmax"), torch.linspace(1, 2, 64)
    parts = [
        GatherSlice(rank, codec, 64, 0, (1, 0), (0, 64 * rank), is_difference=sent)
        for rank in range(2)
    ]

    def measured(rank: SimulatedRank) -> list[float]:
        held = wanted.repeat(2) + 0.01 * torch.sin(torch.arange(128.0))
        meter = rank.run.traffic.meter
        meter.open(lambda: 0.0)
        bound_codec = BoundCodec(codec, difference=coded)
        message = Message(parts, rank=rank.number, ranks=2)
        message.gather(
            rank.run.communicator(None), [held, wanted], [bound_codec], lambda: [held]
        ).wait()
        return meter.close().tallies["weights", "intra"].squares.tolist()

    for error, norm in World(1, 2).all(measured):
        assert norm == pytest.approx(wanted.double().square().sum().item())
        assert 0 < error < (1e-8 if sent else 1e-4) * norm
