"""The torch path on a device with streams: nothing is shared between them, nothing read back."""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.bound import Coding
from ds_quant.kernels import reference
from ds_quant.kernels.batch import Recode
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.run import Operations, Streams
from tests.kernels.inputs import CODECS, KINDS, FixedRotation, awkward, id_of, table
from tests.kernels.streams import Recorder, in_turns, spoiled

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=(1 << 32) - 5)
ROTATION = FixedRotation(64, flips=0xF00D_0000_1234_5678)


def values_of(codec, seed: int) -> torch.Tensor:
    return awkward(2 * 3001, codec.group_size, sorted(KINDS), seed=seed).view(2, 3001)


def encode(codec, x: torch.Tensor, out: torch.Tensor) -> None:
    reference.encode(x, out, codec, address=ADDRESS, levels=table(codec))


def wire_of(codec, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], codec.wire_bytes(x.shape[1]), dtype=torch.uint8)
    encode(codec, x, out)
    return out


@pytest.mark.parametrize("codec", CODECS[::5], ids=id_of)  # every formula, every width
def test_two_streams_encode_and_decode_at_once(codec) -> None:
    inputs = [values_of(codec, seed) for seed in (1, 2)]
    wanted = [wire_of(codec, x) for x in inputs]
    sums = [torch.empty(3001) for _ in inputs]
    for wire, total in zip(wanted, sums, strict=True):
        reference.decode_sum(wire, total, codec, scale=0.5, own=None, levels=table(codec))
    levels = table(codec)
    outs = [torch.empty_like(wire) for wire in wanted]
    totals = [torch.empty(3001) for _ in inputs]
    streams = Recorder(), Recorder()
    for stream, x, out, total in zip(streams, inputs, outs, totals, strict=True):
        with stream:
            reference.encode(x, out, codec, address=ADDRESS, levels=levels)
            reference.decode_sum(out, total, codec, scale=0.5, own=None, levels=levels)
        spoiled(out, total)
    in_turns(*streams)
    for found, wire, total, expected in zip(outs, wanted, totals, sums, strict=True):
        assert torch.equal(found, wire)
        assert torch.equal(total.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_two_streams_rotate_and_recode_at_once() -> None:
    codec = CODECS[1]
    recode = Recode(codec, codec, 1024, 0, 1, 0, 2, codec.wire_bytes(1024), None, 0)
    streams_of = Streams([Coding(codec, ADDRESS)], [None])
    inputs = [torch.randn(2, 1024) for _ in range(2)]

    def work(x: torch.Tensor, wire: torch.Tensor, out: torch.Tensor) -> None:
        reference.encode(x, wire, codec, address=ADDRESS, levels=None, rotation=ROTATION)
        Operations([(recode, (0, 0, 0, 0))]).run([wire, out], streams_of, backend="torch")

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        nbytes = codec.wire_bytes(1024)
        return torch.empty(2, nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    wanted = [empty() for _ in inputs]
    for x, outs in zip(inputs, wanted, strict=True):
        work(x, *outs)
    streams, found = (Recorder(), Recorder()), [empty() for _ in inputs]
    for stream, x, outs in zip(streams, inputs, found, strict=True):
        with stream:
            work(x, *outs)
        spoiled(*outs)
    in_turns(*streams)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
