"""Gaussian levels in the CUDA sources, on the host shim, against the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, reference
from ds_quant.kernels.reference import BlockRotation
from ds_quant.kernels.wire import round_up
from tests.kernels.inputs import (
    DTYPES,
    GAUSSIAN,
    KINDS,
    awkward,
    cases,
    guarded,
    id_of,
    rotated,
    rotated_back,
    table,
)
from tests.kernels.test_decode import assert_same as assert_same_values
from tests.kernels.test_decode import message, output
from tests.kernels.test_encode import ADDRESS, assert_same, encoded, expected

EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True, database=None)
INT8 = GroupCodec(bits=8, group_size=128, range="absmax")
FLIPS = 0x1234567890ABCDEF | 0xFEDCBA9876543210 << 64

every_codec = pytest.mark.parametrize("codec", GAUSSIAN, ids=id_of)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_codec
def test_every_kind_of_group(shim, codec: GroupCodec, dtype: torch.dtype) -> None:
    x = awkward(128 * len(KINDS), 128, sorted(KINDS), seed=1).to(dtype)[None]
    assert_same(codec, encoded(shim, codec, x, ADDRESS), expected(codec, x, ADDRESS))


# Of 128 equal values: scales halfway between two bf16 numbers, the lower or the upper one even.
TIES = {
    2: ("0x1.07916p+0", "0x1.03096p+0"), 3: ("0x1.0adebp+0", "0x1.2a9f4p+0"),
    4: ("0x1.05074p+0", "0x1.0aaebp+0"),
}  # fmt: skip


@every_codec
def test_ties_of_the_scale_are_rounded_to_even(shim, codec: GroupCodec) -> None:
    values = [torch.full((128,), float.fromhex(value)) for value in TIES[codec.bits]]
    x = torch.cat(values)[None]
    wanted = expected(codec, x, ADDRESS)
    bits = wanted.view(torch.int16).view(-1)
    assert not (bits[256 * codec.bits // 16 :][:2] & 1).any()
    assert_same(codec, encoded(shim, codec, x, ADDRESS), wanted)


@pytest.mark.parametrize("flips", (None, FLIPS), ids=("plain", "flips"))
@every_codec
def test_rotated_bytes_of_any_length_equal_the_reference(shim, codec, flips: int | None) -> None:
    @EXAMPLES
    @given(case=cases(128))
    def check(case) -> None:
        x = case.values(128, DTYPES[codec.bits % 3])
        wanted = expected(codec, rotated(x.float(), 128, flips), case.address)
        options = {"rotation": BlockRotation(128, flips), "on_wire": round_up(case.numel, 128)}
        assert_same(codec, encoded(shim, codec, x, case.address, **options), wanted)

    check()


@every_codec
def test_whole_blocks_take_their_own_variant(shim, codec: GroupCodec) -> None:
    wholes = []

    def run(work) -> None:
        wholes.append(dict(work.macros)["DSQ_WHOLE"])
        shim(work)

    x = torch.randn(2, 64 * 128).bfloat16()
    wanted = expected(codec, rotated(x.float(), 128, FLIPS), ADDRESS)
    found = encoded(run, codec, x, ADDRESS, rotation=BlockRotation(128, FLIPS))
    assert_same(codec, found, wanted)
    assert wholes == [1]


@every_codec
def test_decoded_rows_equal_the_reference(shim, codec: GroupCodec) -> None:
    x = awkward(128 * 40, 128, sorted(KINDS), seed=2).view(2, -1)
    wire, levels = message(codec, x), table(codec)
    for add in (False, True):
        values, out = torch.empty(x.shape), output(*x.shape, torch.bfloat16, 3)
        reference.decode(wire, values, codec, levels=levels)
        wanted = values + out.float() if add else values
        launch.decode(wire, out, codec, levels=levels, run=shim, add=add)
        assert_same_values(codec, out, wanted)


@every_codec
def test_rotated_sums_equal_the_reference(shim, codec: GroupCodec) -> None:
    @EXAMPLES
    @given(case=cases(128), own=st.integers(-1, 3))
    def check(case, own: int) -> None:
        on_wire = round_up(case.numel, 128)
        wire, total = message(codec, torch.randn(3, on_wire)), torch.empty(on_wire)
        given_row = None if own < 0 else (own, torch.randn(on_wire))
        how = {"levels": table(codec), "own": given_row}
        reference.decode_sum(wire, total, codec, scale=1.0, **how)
        wanted = rotated_back(total, 128, FLIPS, 0.5)[: case.numel]
        out = output(1, case.numel, torch.float32, case.skew)[0]
        rotation = BlockRotation(128, FLIPS)
        launch.decode_sum(wire, out, codec, scale=0.5, rotation=rotation, run=shim, **how)
        assert_same_values(codec, out, wanted)

    check()


@pytest.mark.parametrize("source", (INT8, *GAUSSIAN), ids=id_of)
@every_codec
def test_sums_are_encoded_anew(shim, codec: GroupCodec, source: GroupCodec) -> None:
    for numel in (128, 5 * 128, 64 * 128):
        x = awkward(3 * numel, 128, sorted(KINDS), seed=3).view(3, numel)
        wire, total = message(source, x)[None], torch.empty(1, numel)
        own = (1, torch.randn(numel))
        reference.decode_sum(wire[0], total[0], source, scale=1.0, own=own, levels=table(source))
        found = guarded(codec.wire_bytes(numel), torch.uint8)[None]
        launch.recode(
            wire, found, source, codec, numel=numel, address=None, run=shim,
            source_levels=table(source), levels=table(codec), own=own,
        )  # fmt: skip
        assert_same(codec, found, expected(codec, total, ADDRESS))
