"""Codecs as values, and single tensors: rows that lie anywhere, and what is refused.

Their numbers are in tests/kernels/test_numbers.py.
"""

from __future__ import annotations

import pytest
import torch

from ds_quant.codec.bound import Rotation, decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.codec.rules import RULES
from ds_quant.kernels import reference
from ds_quant.kernels.random_bits import Address
from tests.codecs import codecs

ADDRESS = Address(key=0x0123456789ABCDEF, step=(3 << 32) | 5, first_vector=(1 << 32) - 2)


def encoded(codec, x) -> torch.Tensor:
    wire = torch.empty(x.shape[0], codec.wire_bytes(x.shape[1]), dtype=torch.uint8)
    encode(codec, x, wire, address=ADDRESS)
    return wire


@pytest.mark.parametrize("codec", [*codecs(bits=8), *codecs(bits=5)], ids=lambda codec: codec.name)
def test_strided_rows_give_the_same_bytes_and_values(codec):
    """Nothing beside them is written."""
    x = torch.randn(3, 2 * 97, generator=torch.Generator().manual_seed(6))[:, 50:147]
    nbytes, values = codec.wire_bytes(97), torch.zeros(3, 97)
    message = torch.full((3, 2 * nbytes), 0x5A, dtype=torch.uint8)
    encode(codec, x, message[:, 16 : 16 + nbytes], address=ADDRESS)
    dense, wide = encoded(codec, x.contiguous()), torch.zeros(3, 200)
    decode(codec, dense, values)
    decode(codec, message[:, 16 : 16 + nbytes], wide[:, 30:127])
    wanted = torch.full_like(message, 0x5A)
    wanted[:, 16 : 16 + nbytes] = dense
    assert torch.equal(message, wanted)
    assert torch.equal(wide, torch.nn.functional.pad(values, (30, 73)))


def test_a_strided_table_gives_the_same_bytes_and_values():
    codec, x = GroupCodec(bits=3, group_size=32, levels="learned"), torch.randn(2, 300)
    table = torch.tensor([0.0, 0.5, 2.0, 3.0, 4.5, 5.0, 6.25, 7.0])
    found = []
    for levels in (table, torch.stack([table, table.flip(0)], dim=1)[:, 0]):
        wire = torch.empty(2, codec.wire_bytes(300), dtype=torch.uint8)
        out = torch.empty(2, 300)
        encode(codec, x, wire, levels=levels)
        decode(codec, wire, out, levels=levels)
        found.append((wire, out))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_sums_that_are_sent_exactly_are_rotated_back_and_scaled_once(backend: str) -> None:
    values, rotation, codec = torch.randn(100), Rotation(block=32), CastCodec(torch.float32)
    wire = torch.empty(2, codec.wire_bytes(128), dtype=torch.uint8)
    encode(codec, values.expand(2, -1), wire, rotation=rotation)
    found = torch.empty(100)
    decode_sum(codec, wire, found, scale=0.25, rotation=rotation, backend=backend)
    torch.testing.assert_close(found, 0.5 * values)


# --- errors


GAUSSIAN = {"bits": 4, "group_size": 128, "range": "gaussian"}


@pytest.mark.parametrize(
    "fields, message",
    (
        (dict(bits=1), "bits = 1 in int1 minmax g1024 nearest: allowed are 2 to 8"),
        (dict(bits=9), "bits = 9 in .*: allowed are 2 to 8"),
        (dict(bits=True), "bits = True"),
        (dict(bits=4.0), "bits = 4.0"),
        (dict(group_size=100), "group_size = 100 in .*: .* 32 to 65536 in multiples of 32"),
        (dict(group_size=0), "group_size = 0"),
        (dict(group_size=131072), "group_size = 131072"),
        (dict(range="max"), "range = 'max' in .*: allowed are 'minmax', 'absmax'"),
        (dict(rounding="shift"), "rounding = 'shift' in .*: allowed are 'nearest'"),
        (dict(levels="lloyd"), "levels = 'lloyd'"),
        (dict(range="absmax", rounding="random_shift"), "random_shift: .* are 'nearest', 'stoch"),
        (dict(levels="learned", rounding="stochastic"), "stochastic learned: .* 'nearest'"),
        (dict(levels="learned", range="absmax"), "range = 'absmax' .*: .* 'minmax'"),
        (GAUSSIAN | {"bits": 6}, "bits = 6 in int6 gaussian .*: allowed are 2, 3, 4, 5"),
        (GAUSSIAN | {"group_size": 256}, "group_size = 256 in .*: allowed are 128"),
        (GAUSSIAN | {"rounding": "stochastic"}, "rounding = 'stochastic' in .* gaussian"),
        (GAUSSIAN | {"levels": "learned"}, "range = 'gaussian' in .* learned: allowed"),
    ),
)
def test_invalid_fields_are_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        GroupCodec(**fields)


def test_gaussian_rules_are_those_of_the_kernels_levels():
    allowed = {rule.restricted: rule.allowed for rule in RULES if rule.values == ("gaussian",)}
    assert allowed["bits"] == tuple(reference._MAGNITUDES)
    assert allowed["group_size"] == (reference.GAUSSIAN_GROUP,)


def test_wrong_arguments_are_refused():
    codec, x = GroupCodec(rounding="stochastic"), torch.zeros(2, 10)
    wire = torch.empty(2, codec.wire_bytes(10), dtype=torch.uint8)
    with pytest.raises(ValueError, match="levels"):
        decode(codec, wire, x, levels=torch.arange(256.0))
    with pytest.raises(ValueError, match=r"levels: shape \(3,\)"):
        wire = torch.empty(2, GroupCodec(bits=2).wire_bytes(10), dtype=torch.uint8)
        decode(GroupCodec(bits=2, levels="learned"), wire, x, levels=torch.arange(3.0))
    with pytest.raises(ValueError, match="dtype = torch.int8"):
        CastCodec(torch.int8)
    with pytest.raises(ValueError, match=r"rotation block = 48: allowed are \(32, 64, 128\)"):
        Rotation(block=48)


def test_codecs_are_hashable_values_with_names():
    assert GroupCodec() == GroupCodec(bits=8) and hash(GroupCodec()) == hash(GroupCodec(bits=8))
    assert GroupCodec(rounding="stochastic").name == "int8 minmax g1024 stochastic"
    assert GroupCodec(bits=4, levels="learned").name == "int4 minmax g1024 nearest learned"
    assert (CastCodec().name, CastCodec(torch.float32).name) == ("bf16", "fp32")
