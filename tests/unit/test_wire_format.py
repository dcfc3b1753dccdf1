"""docs/wire_format.md is precise: wire_oracle.py, written from it alone, equals our bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation, decode, encode
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.checksum import seal
from ds_quant.comm.gather import all_gather
from ds_quant.comm.message import lay_out
from ds_quant.comm.reduction_plan import Slicing
from ds_quant.kernels import random_bits, reference
from tests.distributed.messages import reduce_scatter
from tests.unit import wire_oracle as oracle
from tests.unit.links import Echo


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + n))


def codec_of(bits: int, minmax: bool, rounding: str = "nearest") -> GroupCodec:
    name = "minmax" if minmax else "absmax"
    return GroupCodec(bits=bits, group_size=64, range=name, rounding=rounding)


def encoded(
    codec: GroupCodec, x: torch.Tensor, address: random_bits.Address | None = None
) -> bytes:
    wire = torch.full((1, codec.wire_bytes(len(x))), 255, dtype=torch.uint8)
    encode(codec, x.view(1, -1), wire, address=address)
    return wire.numpy().tobytes()


def decoded(codec: GroupCodec, row: bytes, n: int) -> np.ndarray:
    out = torch.empty(1, n)
    wire = torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else torch.empty(0)
    decode(codec, wire.to(torch.uint8).view(1, -1), out)
    return out.numpy()[0]


def test_keys_are_those_of_section_4() -> None:
    names = {"seed": 5, "parameter": 3, "hop": 1}
    for role in random_bits.Role:
        for rank in (0, 4):
            key = random_bits.key_of(role=role, rank=rank, **names)
            assert key == oracle.key_of(role=int(role), stream=rank, **names)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_rotation_is_undone_by_the_page(block: int) -> None:
    x = values(256)
    rotated = torch.empty(256)
    turn = reference.BlockRotation(block)
    reference.rotate(x, rotated, turn)
    back = rotated.clone()
    reference.unrotate_(back, turn, scale=0.25)
    assert np.array_equal(oracle.unrotate(rotated.numpy(), block, 0.25), back.numpy())


def test_sign_flips_are_those_of_the_page() -> None:
    names = {"seed": 5, "parameter": 3, "hop": 99}
    signs = random_bits.address(role=random_bits.Role.GRADIENTS, step=8, rank=0, **names)
    words = oracle.philox(oracle.key_of(role=1, stream=0, **names), 8, 0)
    expected = np.array([words[i // 32] >> i % 32 & 1 for i in range(64)]) * 2.0 - 1
    x = values(128)
    out = torch.empty(128)
    reference.rotate(x, out, Rotation(block=64, signs=signs).kernel)
    assert np.allclose(oracle.unrotate(out.numpy(), 64, 1.0), np.tile(expected, 2) * x.numpy())


# ---- section 5: whole messages ----


def sent(payload: torch.Tensor) -> bytes:
    return payload.numpy().tobytes()


def test_message_of_a_gather_has_one_slot_per_tensor() -> None:
    """Two tensors of 400 and 5 elements: shards of 134 and 2, this rank's own."""
    link, codec = Echo(3), codec_of(5, True)
    shards = [values(134), values(2)]
    all_gather(
        shards, [400, 5], [Coding(codec=codec), Coding(codec=CastCodec(torch.float32))], link
    )
    fmt = oracle.Format(bits=5, group=64, minmax=True)
    (payload,), first = map(sent, link.payloads), oracle.sections(fmt, 134)[3]
    assert len(payload) == first + 16
    expected = oracle.decode(payload[:first], fmt, 134)
    assert np.array_equal(expected, decoded(codec, encoded(codec, shards[0]), 134))
    assert np.frombuffer(payload, "<f4", 2, first).tolist() == shards[1].tolist()


def test_message_of_a_reduction_has_one_row_per_peer_and_short_last_shards() -> None:
    link, codec = Echo(3), codec_of(8, False)
    tensor = values(100)
    reduce_scatter([tensor], [Coding(codec=codec)], link, scale=1.0)
    fmt = oracle.Format(bits=8, group=64, minmax=False)
    nbytes = oracle.sections(fmt, 34)[3]  # shards of 34, 34 and 32 elements, equal slots
    (payload,) = map(sent, link.payloads)
    assert len(payload) == 3 * nbytes == 3 * lay_out([(codec, 34)])[1]
    for peer, n in enumerate((34, 34, 32)):
        part = tensor[34 * peer : 34 * peer + n].numpy()
        row = payload[peer * nbytes : (peer + 1) * nbytes]
        assert row[: oracle.sections(fmt, n)[3]] == oracle.encode(part, fmt)
        step = np.abs(part).max() / 127
        assert np.abs(oracle.decode(row, fmt, n) - part).max() <= 0.51 * step


@pytest.mark.parametrize("sizes", [[0, 1, 16, 16, 40, 0, 4096], [24, 24]])
def test_checksum_is_that_of_the_page(sizes: list[int]) -> None:
    draw = np.random.default_rng(len(sizes))
    messages = [draw.bytes(n) for n in sizes]
    payload = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    sealed = seal(payload, sizes, sender=3).numpy().tobytes()
    assert sealed == b"".join(oracle.sealed(message, 3) for message in messages)


def test_slices_are_as_many_as_the_page_says() -> None:
    for total in (0, 1, 499_999, 500_001, 4_499_999, 4_500_001, 10**8, 10**10):
        assert oracle.slice_count(total) == Slicing().slices(total)
