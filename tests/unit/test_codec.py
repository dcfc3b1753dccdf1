"""Codecs: exact on the grid, byte for byte as docs/wire_format.md says, and the edges."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.kernels import random_bits, reference
from tests.codecs import awkward_groups, codecs
from tests.torch_kernels import only_torch
from tests.unit import wire_oracle as oracle

ADDRESS = random_bits.Address(
    key=0x0123456789ABCDEF, step=(3 << 32) | 5, first_vector=(1 << 32) - 2
)


def encoded(codec, x, address=ADDRESS, levels=None) -> torch.Tensor:
    """Wire rows of x; every byte starts at 0xA5, so a byte nobody writes shows."""
    wire = torch.full((x.shape[0], codec.wire_bytes(x.shape[1])), 0xA5, dtype=torch.uint8)
    encode(codec, x, wire, address=address, levels=levels)
    return wire


def decoded(codec, wire, numel, dtype=torch.float32, levels=None) -> torch.Tensor:
    out = torch.full((wire.shape[0], numel), 12345.0, dtype=dtype)
    decode(codec, wire, out, levels=levels)
    return out


def round_trip(codec, x, address=ADDRESS) -> torch.Tensor:
    return decoded(codec, encoded(codec, x, address), x.shape[1])


def assert_equals_oracle(codec, x, address=ADDRESS, levels=None):
    """Bytes and decoded values."""
    fmt = oracle.Format(bits=codec.bits, group=codec.group_size, minmax=codec.has_offset)
    how = {"rounding": codec.rounding, "stream": (address.key, address.step)}
    if codec.levels == "learned":
        how["table"] = np.arange(2.0**codec.bits, dtype=np.float32)
    if levels is not None:
        how["table"] = levels.numpy()
    wire, numel = encoded(codec, x, address, levels), x.shape[1]
    found = decoded(codec, wire, numel, levels=levels)
    for row, values in enumerate(x.float().numpy()):
        first = address.first_vector + row * -(-numel // 8)
        expected = oracle.encode(values, fmt, first=first, **how)
        assert wire[row].numpy().tobytes() == expected, f"{codec.name}, row {row}"
        with np.errstate(over="ignore"):
            wanted = oracle.decode(expected, fmt, numel, how.get("table"))
        np.testing.assert_array_equal(found[row], wanted)


# --- exactness


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: codec.name)
def test_wire_bytes_equal_the_oracle(codec, dtype):
    """Sizes around vectors and groups, a prime, one short group; 3 rows of different magnitude."""
    generator = torch.Generator().manual_seed(1)
    for numel in (1, 7, 8, 31, 32, 33, 97):
        x = torch.randn(3, numel, generator=generator) * torch.tensor([[1e-3], [1.0], [40.0]])
        assert_equals_oracle(codec, x.to(dtype))


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: codec.name)
def test_exceptional_groups_equal_the_oracle(codec):
    groups = awkward_groups()
    assert_equals_oracle(codec, groups.reshape(2, -1)[:, :-5])  # the last groups are short


@pytest.mark.parametrize("codec", codecs(levels="learned"), ids=lambda codec: codec.name)
def test_a_learned_table_is_searched_and_decoded(codec):
    top = 2**codec.bits - 1
    levels = torch.linspace(0, 1, top + 1) ** 1.5 * (top - 0.2) + 0.1
    x = torch.randn(2, 97, generator=torch.Generator().manual_seed(3))
    assert_equals_oracle(codec, x, levels=levels)
    wire = encoded(codec, x, levels=levels)
    out = decoded(codec, wire, 97, levels=levels)
    for row, start in itertools.product(range(2), (0, 32, 64, 96)):
        group, back = x[row, start : start + 32], out[row, start : start + 32]
        scale = (group.max() - group.min()) / top
        table = levels * scale + group.min()
        # No other level is nearer; 1e-6 * range covers the fp32 roundings of both sides.
        nearest = (group[:, None] - table).abs().min(dim=1).values
        assert torch.all((back - group).abs() <= nearest + 1e-6 * (scale * top))


@only_torch()
def test_long_rows_and_many_rows_equal_their_pieces():
    """Chunking is invisible: bytes do not depend on how much one pass takes."""
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(4))
    for codec in codecs(bits=5) + codecs(bits=8):
        whole = encoded(codec, x)
        sums, small_sums = torch.empty(1000), torch.empty(1000)
        decode_sum(codec, whole, sums)
        for chunk in (64, 2000):
            with patch.dict(reference._RUN_NUMEL, {"cpu": chunk}):
                assert torch.equal(encoded(codec, x), whole)
                assert torch.equal(
                    decoded(codec, whole, 1000).nan_to_num(), round_trip(codec, x).nan_to_num()
                )
                decode_sum(codec, whole, small_sums)
                assert torch.equal(sums, small_sums)


# --- edges


@pytest.mark.parametrize("codec", [*codecs(bits=3), CastCodec()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("rows", (0, 1, 3))
@pytest.mark.parametrize("numel", (0, 1, 7, 100))
def test_no_rows_and_no_elements_work_everywhere(codec, rows, numel):
    x = torch.ones(rows, numel)
    wire = encoded(codec, x)
    out = decoded(codec, wire, numel)
    total = torch.full((numel,), 7.0)
    decode_sum(codec, wire, total, scale=0.5)
    assert torch.equal(out, x)
    assert torch.equal(total, torch.full((numel,), rows * 0.5))
    assert codec.wire_bytes(0) == 0


@pytest.mark.parametrize("codec", [*codecs(bits=8), *codecs(bits=5)], ids=lambda codec: codec.name)
def test_strided_rows_give_the_same_bytes_and_values(codec):
    x = torch.randn(3, 2 * 97, generator=torch.Generator().manual_seed(6))
    rows, nbytes = x[:, 50:147], codec.wire_bytes(97)
    dense = encoded(codec, rows.contiguous())
    for first in (0, 16, 3):  # 3: a column slice that is not even aligned to a float
        message = torch.full((3, 2 * nbytes + 5), 0x5A, dtype=torch.uint8)
        section = message[:, first : first + nbytes]
        encode(codec, rows, section, address=ADDRESS)
        assert torch.equal(section, dense)
        assert torch.all(message[:, :first] == 0x5A)
        assert torch.all(message[:, first + nbytes :] == 0x5A)
        wide = torch.zeros(3, 200)
        decode(codec, section, wide[:, 30:127])
        assert torch.equal(wide[:, 30:127], decoded(codec, dense, 97))
        assert not wide[:, :30].any() and not wide[:, 127:].any()
    transposed = rows.t().contiguous().t()
    assert torch.equal(encoded(codec, transposed), dense)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_decode_casts_once_from_fp32(dtype):
    codec = GroupCodec(group_size=64)
    wire = encoded(codec, torch.randn(2, 150, generator=torch.Generator().manual_seed(8)))
    assert torch.equal(decoded(codec, wire, 150, dtype), decoded(codec, wire, 150).to(dtype))


@pytest.mark.parametrize("codec", [*codecs(bits=6), CastCodec()], ids=lambda codec: codec.name)
def test_scratch_made_in_inference_mode_serves_training_too(codec):
    """A shape first seen by an evaluation, 4711 elements, while scratch is large enough."""
    encoded(codec, torch.randn(1, 1 << 17))
    x = torch.randn(1, 4711)
    with torch.inference_mode():
        first = encoded(codec, x.clone())
    assert torch.equal(encoded(codec, x), first)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("numel", (1, 7, 97))
def test_cast_codec_sends_the_values_themselves(dtype, numel):
    codec = CastCodec(dtype)
    x = torch.randn(3, numel).to(dtype)
    wire = encoded(codec, x)
    assert wire.shape[1] == -(-numel * dtype.itemsize // 16) * 16
    for row, values in zip(wire, x, strict=True):
        raw = values.view(torch.uint8).numpy().tobytes()
        assert row.numpy().tobytes() == raw + bytes(-len(raw) % 16)
    odd = torch.empty(3, wire.shape[1] + 3, dtype=torch.uint8)[:, 1:-2]
    encode(codec, x, odd)
    assert torch.equal(odd, wire)
    assert torch.equal(decoded(codec, odd, numel, dtype), x)


# --- errors


@pytest.mark.parametrize(
    "fields, message",
    (
        (dict(bits=1), "bits = 1: allowed are 2 to 8"),
        (dict(bits=9), "bits = 9: allowed are 2 to 8"),
        (dict(bits=True), "bits = True"),
        (dict(bits=4.0), "bits = 4.0"),
        (dict(group_size=100), "group_size = 100: allowed are 32 to 65536 in multiples of 32"),
        (dict(group_size=0), "group_size = 0"),
        (dict(group_size=131072), "group_size = 131072"),
        (dict(range="max"), "range = 'max': allowed are 'minmax', 'absmax'"),
        (dict(rounding="shift"), "rounding = 'shift': allowed are 'nearest'"),
        (dict(levels="lloyd"), "levels = 'lloyd'"),
        (dict(range="absmax", rounding="random_shift"), "needs range 'minmax'"),
        (dict(levels="learned", rounding="stochastic"), "rounding 'nearest'"),
        (dict(levels="learned", range="absmax"), "needs range 'minmax'"),
    ),
)
def test_invalid_fields_are_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        GroupCodec(**fields)


def test_a_strided_table_gives_the_same_bytes_and_values():
    codec, x = GroupCodec(bits=3, group_size=32, levels="learned"), torch.randn(2, 300)
    table = torch.tensor([0.0, 0.5, 2.0, 3.0, 4.5, 5.0, 6.25, 7.0])
    found = []
    for levels in (table, torch.stack([table, table.flip(0)], dim=1)[:, 0]):
        wire = torch.empty(2, codec.wire_bytes(300), dtype=torch.uint8)
        out, total = torch.empty(2, 300), torch.empty(300)
        encode(codec, x, wire, levels=levels)
        decode(codec, wire, out, levels=levels)
        decode_sum(codec, wire, total, levels=levels)
        found.append((wire, out, total))
    assert all(map(torch.equal, *found))


def test_wrong_arguments_are_refused():
    codec, x = GroupCodec(rounding="stochastic"), torch.zeros(2, 10)
    wire = torch.empty(2, codec.wire_bytes(10), dtype=torch.uint8)
    with pytest.raises(ValueError, match="address = None.*stochastic"):
        encode(codec, x, wire)
    with pytest.raises(ValueError, match=r"out: shape \(2, 47\)"):
        encode(codec, x, wire[:, :47], address=ADDRESS)
    with pytest.raises(ValueError, match=r"x: shape \(2, 10\) torch.int64"):
        encode(codec, x.long(), wire, address=ADDRESS)
    with pytest.raises(ValueError, match="out: .*fp32"):
        decode_sum(codec, wire, torch.empty(10, dtype=torch.float64))
    with pytest.raises(ValueError, match="levels"):
        decode(codec, wire, x, levels=torch.arange(256.0))
    with pytest.raises(ValueError, match=r"levels: shape \(3,\)"):
        wire = torch.empty(2, GroupCodec(bits=2).wire_bytes(10), dtype=torch.uint8)
        decode(GroupCodec(bits=2, levels="learned"), wire, x, levels=torch.arange(3.0))
    with pytest.raises(ValueError, match="dtype = torch.int8"):
        CastCodec(torch.int8)


def test_codecs_are_hashable_values_with_names():
    assert GroupCodec() == GroupCodec(bits=8) and hash(GroupCodec()) == hash(GroupCodec(bits=8))
    assert GroupCodec(rounding="stochastic").name == "int8 minmax g1024 stochastic"
    assert GroupCodec(bits=4, levels="learned").name == "int4 minmax g1024 nearest learned"
    assert (CastCodec().name, CastCodec(torch.float32).name) == ("bf16", "fp32")
