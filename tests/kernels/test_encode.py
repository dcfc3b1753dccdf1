"""encode.cu on the host shim against the torch reference, byte for byte."""

from __future__ import annotations

import ctypes
import math
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch, reference
from ds_quant.kernels.geometry import tiling
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation
from ds_quant.kernels.wire import round_up
from ds_quant.resources import resource_dir
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    KINDS,
    awkward,
    cases,
    guarded,
    id_of,
    rotated,
    table,
)

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=11)
EXAMPLES = settings(max_examples=6, deadline=None, derandomize=True, database=None)


def expected(codec, x: torch.Tensor, address: Address) -> torch.Tensor:
    wire = torch.full((x.shape[0], codec.wire_bytes(x.shape[1])), 0xAA, dtype=torch.uint8)
    reference.encode(x, wire, codec, address=address, levels=table(codec))
    return wire


def encoded(shim, codec, x: torch.Tensor, address: Address, on_wire: int = 0, **options):
    rows, nbytes = x.shape[0], codec.wire_bytes(on_wire or x.shape[1])
    wire = guarded(rows * nbytes, torch.uint8).view(rows, nbytes)
    wire.fill_(0x55)
    launch.encode(x, wire, codec, address=address, levels=table(codec), run=shim, **options)
    return wire


def assert_same(codec, found: torch.Tensor, wanted: torch.Tensor) -> None:
    places = (found != wanted).nonzero().tolist()
    assert not places, f"{codec.name}: (row, byte) {places[:8]} of {tuple(wanted.shape)} differ"


@pytest.mark.parametrize("index", range(len(CODECS)), ids=lambda i: id_of(CODECS[i]))
def test_bytes_equal_the_reference(shim, index: int) -> None:
    codec, dtype = CODECS[index], DTYPES[index % 3]

    @EXAMPLES
    @given(case=cases(codec.group_size))
    def check(case) -> None:
        x = case.values(codec.group_size, dtype)
        wanted = expected(codec, x, case.address)
        assert_same(codec, encoded(shim, codec, x, case.address), wanted)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
@pytest.mark.parametrize("span", ("absmax", "minmax"))
def test_every_kind_of_group(shim, span: str, rounding: str, dtype: torch.dtype) -> None:
    codec = GroupCodec(bits=4, group_size=128, range=span, rounding=rounding)
    kinds = sorted(KINDS)
    for numel in (128 * len(kinds), 128 * len(kinds) - 61):
        x = awkward(numel, 128, kinds, seed=1).to(dtype)[None]
        assert_same(codec, encoded(shim, codec, x, ADDRESS), expected(codec, x, ADDRESS))


@pytest.mark.parametrize("group_size", (8192, 288, 96))
def test_order_of_warps_does_not_matter(shim, group_size: int) -> None:
    """A race between warps of a block would show as a difference."""
    for formula in ({"rounding": "random_shift"}, {"levels": "learned"}, {"range": "absmax"}):
        codec = GroupCodec(bits=5, group_size=group_size, **formula)
        x = torch.randn(2, 3 * group_size + 5).bfloat16()
        forward = encoded(shim, codec, x, ADDRESS)
        shim.reversed_warps = True
        backward = encoded(shim, codec, x, ADDRESS)
        shim.reversed_warps = False
        assert_same(codec, backward, forward)


ROTATED = (
    (GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic"), 32, None),
    (
        GroupCodec(bits=4, group_size=64, range="absmax", rounding="stochastic"),
        64,
        0x9E3779B97F4A7C15,
    ),
    (
        GroupCodec(bits=8, group_size=2048, range="absmax", rounding="nearest"),
        128,
        0x1234567890ABCDEF,
    ),
    (GroupCodec(bits=3, group_size=384, range="minmax", rounding="stochastic"), 128, None),
    (GroupCodec(bits=6, group_size=32, range="minmax", rounding="nearest"), 32, 0x600DCAFE),
)


@pytest.mark.parametrize("codec, block, flips", ROTATED, ids=id_of)
def test_rotated_bytes_equal_the_reference(shim, codec, block: int, flips: int | None) -> None:
    flips = None if flips is None else flips | flips << 64

    @EXAMPLES
    @given(case=cases(codec.group_size))
    def check(case) -> None:
        x = case.values(codec.group_size, torch.bfloat16)
        wanted = expected(codec, rotated(x.float(), block, flips), case.address)
        options = {"rotation": BlockRotation(block, flips), "on_wire": round_up(case.numel, block)}
        assert_same(codec, encoded(shim, codec, x, case.address, **options), wanted)

    check()


DIFFERENCES = (
    (GroupCodec(bits=4, group_size=2048, range="absmax"), torch.float32, torch.bfloat16, 0),
    (GroupCodec(bits=4, group_size=128, range="absmax"), torch.bfloat16, torch.bfloat16, 0),
    (GroupCodec(bits=8, group_size=96, rounding="stochastic"), torch.float16, torch.float32, 0),
    (GroupCodec(bits=5, group_size=64, range="absmax"), torch.bfloat16, torch.float32, 64),
)


@pytest.mark.parametrize("codec, dtype, base_dtype, block", DIFFERENCES, ids=id_of)
def test_difference_is_taken_once_in_fp32(shim, codec, dtype, base_dtype, block: int) -> None:
    @EXAMPLES
    @given(case=cases(codec.group_size), base_skew=st.sampled_from((0, 1, 8)))
    def check(case, base_skew: int) -> None:
        x = case.values(codec.group_size, dtype)
        padding = base_skew or -case.numel % 16
        base = guarded(case.rows * (case.numel + padding), base_dtype)
        base = base.view(case.rows, -1)[:, padding:]
        base.copy_(x.float() * 1.001 + 0.01)
        difference = x.float() - base.float()
        options = {"base": base}
        if block:
            difference = rotated(difference, block, None)
            options |= {"rotation": BlockRotation(block), "on_wire": difference.shape[1]}
        wanted = expected(codec, difference, case.address)
        assert_same(codec, encoded(shim, codec, x, case.address, **options), wanted)

    check()


@pytest.mark.parametrize("index", range(0, len(CODECS), 7), ids=lambda i: id_of(CODECS[i]))
def test_whole_blocks_take_their_own_variant(shim, index: int) -> None:
    """Aligned rows of whole blocks: the kernel has no checks of addresses and ends."""
    codec, dtype = CODECS[index], DTYPES[index % 3]
    blocks = math.lcm(*(tiling(codec.group_size, run).block_groups for run in (1, 4)))
    numel = codec.group_size * blocks
    wholes = []

    def run(work) -> None:
        wholes.append(dict(work.macros)["DSQ_WHOLE"])
        shim(work)

    x = awkward(2 * numel, codec.group_size, sorted(KINDS), seed=index).view(2, numel).to(dtype)
    assert_same(codec, encoded(run, codec, x, ADDRESS), expected(codec, x, ADDRESS))
    base = torch.randn(2, numel).bfloat16()
    wanted = expected(codec, x.float() - base.float(), ADDRESS)
    assert_same(codec, encoded(run, codec, x, ADDRESS, base=base), wanted)
    wanted = expected(codec, rotated(x.float(), 32, 5), ADDRESS)
    found = encoded(run, codec, x, ADDRESS, rotation=BlockRotation(32, 5))
    assert_same(codec, found, wanted)
    assert wholes == [1, 1, 1]


def test_strided_columns_and_odd_messages_are_encoded_in_place(shim) -> None:
    """Columns of a wider tensor, a transposed one, and rows of a message at odd addresses."""
    codec = GroupCodec(bits=4, group_size=32, range="absmax", rounding="stochastic")
    wide = torch.randn(3, 500)
    for x in (wide[:, 100:333], wide.t()[:77], wide.double()[:, :50], wide[:1].expand(4, 500)):
        nbytes = codec.wire_bytes(x.shape[1])
        for offset in (0, 1, 16):
            message = torch.full((x.shape[0], nbytes + 33), 7, dtype=torch.uint8)
            out = message[:, offset : offset + nbytes]
            launch.encode(x, out, codec, address=ADDRESS, levels=None, run=shim)
            assert_same(codec, out, expected(codec, x, ADDRESS))
            assert torch.all(message[:, :offset] == 7)
            assert torch.all(message[:, offset + nbytes :] == 7)


def test_nothing_is_launched_for_empty_tensors() -> None:
    def run(_) -> None:
        raise AssertionError("launched")

    codec = GroupCodec(bits=4, group_size=32)
    for shape in ((0, 7), (3, 0)):
        out = torch.empty(shape[0], codec.wire_bytes(shape[1]), dtype=torch.uint8)
        launch.encode(torch.empty(shape), out, codec, address=None, levels=None, run=run)
        launch.decode(out, torch.empty(shape), codec, levels=None, run=run)


def test_codecs_beyond_the_kernels_are_named() -> None:
    assert launch.supports(GroupCodec(group_size=8192))
    assert not launch.supports(GroupCodec(group_size=8224))
    assert not launch.supports(GroupCodec(group_size=96), BlockRotation(64))


DIVISION = """
#include "platform.cuh"
template <int N> static long wrong_quotients(u32 exponent) {
    long wrong = 0;
    for (u32 mantissa = 0; mantissa < 1u << 23; ++mantissa) {
        const float x = float_of(exponent << 23 | mantissa);
        wrong += divided_by<N>(x) != x / N;
    }
    return wrong;
}
extern "C" long wrong() {
    const u32 low = 28, one = 127, high = 254;  // 2^-99, 1, the largest exponent
    return wrong_quotients<1>(one) + wrong_quotients<3>(low) + wrong_quotients<7>(high) +
           wrong_quotients<15>(one) + wrong_quotients<31>(low) + wrong_quotients<63>(high) +
           wrong_quotients<127>(one) + wrong_quotients<255>(low);
}
"""


def test_division_by_the_number_of_steps_is_exact(shim, tmp_path) -> None:
    """All mantissas; the two multiply-adds behave alike at every exponent in between."""
    (tmp_path / "division.cpp").write_text(DIVISION)
    include = resource_dir("cuda") / "include"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-DDSQ_HOST", "-shared", "-fPIC"]
    command = [shim.compiler, *flags, f"-I{include}", "division.cpp", "-o", "division.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert ctypes.CDLL(str(tmp_path / "division.so")).wrong() == 0


def one_by_one(codec, x: torch.Tensor, address: Address) -> torch.Tensor:
    """Bytes of rows that are encoded alone, each with the address of its own bits."""
    alone = [
        address._replace(first_vector=address.first_vector + row * address.row_vectors)
        for row in range(len(x))
    ]
    rows = [expected(codec, x[row : row + 1], a) for row, a in enumerate(alone)]
    return torch.cat(rows)


@pytest.mark.parametrize("numel", (13, 500, 4000))
@pytest.mark.parametrize("bits", (4, 8))
def test_random_bits_of_rows_lie_a_stride_apart(shim, bits: int, numel: int) -> None:
    """As those of runs of one tensor do: 16 vectors per element. Beyond 32 bits, too."""
    codec = GroupCodec(bits=bits, group_size=64, range="absmax", rounding="stochastic")
    x = torch.randn(5, numel).bfloat16()
    for first, step in ((0, 16 * 5000), (7, 1 << 33)):
        address = Address(key=3, step=4, first_vector=first, row_vectors=step)
        wanted = one_by_one(codec, x, address)
        assert_same(codec, expected(codec, x, address), wanted)
        assert_same(codec, encoded(shim, codec, x, address), wanted)
