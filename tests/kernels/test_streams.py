"""The torch path on a device with streams: nothing is shared between them, nothing read back."""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.kernels import reference
from ds_quant.kernels.batch import Recode
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.random_bits import Address
from tests.kernels.inputs import CODECS, KINDS, FixedRotation, awkward, id_of, table
from tests.kernels.streams import Recorder, in_turns, spoiled

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=(1 << 32) - 5)
ROTATION = FixedRotation(32, flips=0xF00D_0000_1234_5678)
NUMEL = 3008


@pytest.mark.parametrize("codec", CODECS[::5], ids=id_of)  # every formula, every width
def test_two_streams_work_at_once(codec) -> None:
    """Each encodes two rows, adds them up and encodes the sum again."""
    levels, nbytes = table(codec), codec.wire_bytes(NUMEL)
    recode = Recode(codec, codec, NUMEL, 0, 1, 0, 2, nbytes, None, 0)
    streams_of = Streams([Coding(codec, ADDRESS, levels)], [None])

    def work(x: torch.Tensor, wire: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        reference.encode(x, wire, codec, address=ADDRESS, levels=levels, rotation=ROTATION)
        reference.decode_sum(
            wire, total, codec, scale=0.5, own=None, levels=levels, rotation=ROTATION
        )
        Operations([(recode, (0, 0, 0, 0))]).run([wire, out], streams_of, backend="torch")

    def empty() -> tuple[torch.Tensor, ...]:
        wire = torch.empty(2, nbytes, dtype=torch.uint8)
        return wire, torch.empty(NUMEL), torch.empty(nbytes, dtype=torch.uint8)

    inputs = [
        awkward(2 * NUMEL, codec.group_size, sorted(KINDS), seed=seed).view(2, NUMEL)
        for seed in (1, 2)
    ]
    wanted, found, streams = [empty(), empty()], [empty(), empty()], (Recorder(), Recorder())
    for x, outs in zip(inputs, wanted, strict=True):
        work(x, *outs)
    for stream, x, outs in zip(streams, inputs, found, strict=True):
        with stream:
            work(x, *outs)
        spoiled(*outs)
    in_turns(*streams)
    for mine, theirs in zip(found, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
