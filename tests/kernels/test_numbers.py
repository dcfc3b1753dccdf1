"""Every back end against wire_oracle.py, which was written from docs/wire_format.md alone: every
byte of a message, every bit of a value.

``all_kernels`` are the torch reference, C++, and CUDA on the host; test_gpu.py has those of a GPU.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from ds_quant.codec.bound import Coding, decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.kernels.batch import Decode, Encode, Recode
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.launch import tiling, whole_numel
from ds_quant.kernels.random_bits import Address
from tests.codecs import format_of
from tests.kernels.backends import storing
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    FORMULAS,
    GAUSSIAN,
    KINDS,
    STORES,
    FixedRotation,
    absmax,
    awkward,
    cases,
    guarded,
    id_of,
    learned,
    rotated,
    rotated_back,
)
from tests.unit import wire_oracle as oracle

ADDRESS = Address(key=0x0123456789ABCDEF, step=(1 << 33) + 1, first_vector=11)
BF16, FP16, FP32 = DTYPES
INT4, INT8 = absmax(4, 128, "stochastic"), absmax(8, 128)
FLIPS = 0x1234567890ABCDEF | 0xFEDCBA9876543210 << 64


def expected(codec, x: torch.Tensor, address: Address = ADDRESS) -> torch.Tensor:
    """Wire rows of x (rows, numel), ending where readable memory ends."""
    nbytes, levels = codec.wire_bytes(x.shape[1]), learned(codec)
    wire = guarded(len(x) * nbytes, torch.uint8).view(len(x), nbytes)
    for place, row in enumerate(x.float().numpy()):
        first = address.first_vector + place * address.vectors_per_row(x.shape[1])
        how = {"stream": (address.key, address.step), "first": first}
        how["table"] = None if levels is None else levels.numpy()
        found = oracle.encode(row, format_of(codec), **how)
        wire[place] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
    return wire


def encoded(kernels, codec, x, address=ADDRESS, *, on_wire=0, base=None, rotation=None):
    """The same by a back end."""
    nbytes = codec.wire_bytes(on_wire or x.shape[1])
    wire = kernels.put(guarded(len(x) * nbytes, torch.uint8).view(len(x), nbytes).fill_(0x55))
    base, levels = (None if t is None else kernels.put(t) for t in (base, learned(codec)))
    how = {"address": address, "levels": levels, "base": base, "rotation": rotation}
    encode(codec, kernels.put(x), wire, **how)
    return wire.cpu()


def decoded(codec, wire: torch.Tensor, numel: int) -> torch.Tensor:
    """(rows, numel) fp32."""
    levels = learned(codec)
    how = None if levels is None else levels.numpy()
    with np.errstate(all="ignore"):
        rows = [oracle.decode(row.numpy().tobytes(), format_of(codec), numel, how) for row in wire]
    return torch.from_numpy(np.stack(rows))


def output(rows: int, numel: int, dtype: torch.dtype, skew: int) -> torch.Tensor:
    """(rows, numel) at an odd address if there is a skew, filled with small numbers."""
    padding = skew or -numel % 16
    out = guarded(rows * (numel + padding), dtype).view(rows, -1)[:, padding:]
    return out.copy_(torch.arange(rows * numel).view(rows, numel) % 7)


def assert_bytes(codec, found: torch.Tensor, wanted: torch.Tensor) -> None:
    places = (found != wanted).nonzero().tolist()
    assert not places, f"{codec.name}: (row, byte) {places[:8]} of {tuple(wanted.shape)} differ"


def assert_values(codec, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal bits, except that a NaN may have any sign and payload."""
    found, wanted = found.cpu(), wanted.to(found.dtype)
    both_nan = found.isnan() & wanted.isnan()
    as_int = {2: torch.int16, 4: torch.int32}[found.element_size()]
    same = found.contiguous().view(as_int) == wanted.contiguous().view(as_int)
    places = (~(same | both_nan)).nonzero().tolist()
    assert not places, f"{codec.name}: {places[:8]} of {tuple(wanted.shape)} differ"


# ---- encode ----


class Source(NamedTuple):
    """What is encoded: values of a dtype, less those of ``base``, rotated."""

    codec: GroupCodec
    dtype: torch.dtype
    base: torch.dtype | None = None
    block: int = 0
    flips: int | None = None


SIGNS = 0x9E3779B97F4A7C15 | 0x9E3779B97F4A7C15 << 64
SOURCES = (
    *(Source(codec, DTYPES[index % 3]) for index, codec in enumerate(CODECS)),
    Source(INT4, BF16, block=32),
    Source(absmax(4, 64, "stochastic"), BF16, block=64, flips=SIGNS),
    Source(absmax(8, 2048), BF16, block=128, flips=FLIPS),
    Source(GroupCodec(bits=3, group_size=384, rounding="stochastic"), BF16, block=128),
    Source(GroupCodec(bits=6, group_size=32), BF16, block=32, flips=SIGNS),
    Source(absmax(4, 2048), FP32, BF16),
    Source(absmax(4, 128), BF16, BF16),
    Source(GroupCodec(bits=8, group_size=96, rounding="stochastic"), FP16, FP32),
    Source(absmax(5, 64), BF16, FP32, block=64, flips=5),
    *(Source(c, DTYPES[c.bits % 3], block=128, flips=f) for c in GAUSSIAN for f in (None, FLIPS)),
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: id_of(s.codec))
def test_bytes_are_those_of_the_page(all_kernels, source: Source) -> None:
    """A difference is taken once, in fp32; what a rotation lacks in its last block is zeros."""
    codec, dtype, base_dtype, block, flips = source

    @all_kernels.example(case=cases(codec.group_size), base_skew=st.sampled_from((0, 1, 8)))
    def check(case, base_skew: int) -> None:
        x, base = case.values(codec.group_size, dtype), None
        turned, how = x.float(), {}
        if base_dtype is not None:
            padding = base_skew or -case.numel % 16
            base = guarded(case.rows * (case.numel + padding), base_dtype)
            base = base.view(case.rows, -1)[:, padding:].copy_(x.float() * 1.001 + 0.01)
            turned = turned - base.float()
        if block:
            turned = rotated(turned, block, flips)
            how = {"rotation": FixedRotation(block, flips), "on_wire": turned.shape[1]}
        found = encoded(all_kernels, codec, x, case.address, base=base, **how)
        assert_bytes(codec, found, expected(codec, turned, case.address))


IN_4_BITS = [GroupCodec(bits=4, group_size=128, **formula) for formula in FORMULAS]


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        *((codec, dtype) for codec in (*IN_4_BITS, *GAUSSIAN) for dtype in DTYPES),
        *((codec, DTYPES[index % 3]) for index, codec in enumerate(CODECS)),
    ],
    ids=id_of,
)
def test_every_kind_of_group(all_kernels, codec: GroupCodec, dtype: torch.dtype) -> None:
    whole = codec.group_size * len(KINDS)
    x = awkward(whole, codec.group_size, sorted(KINDS), seed=1).to(dtype)[None]
    assert_bytes(codec, encoded(all_kernels, codec, x), expected(codec, x))
    if not codec.is_gaussian:
        x = x[:, :-13]
        assert_bytes(codec, encoded(all_kernels, codec, x), expected(codec, x))


def around_borders(bits: int) -> torch.Tensor:
    """(64, 128) fp32: one unit in the last place around every border between Gaussian levels,
    among values that fix the root mean square.
    """
    levels = [np.float32(t) for t in oracle.LEVELS[bits]]
    near = [np.nextafter(np.float32((a + b) / 2), np.float32(to), dtype=np.float32)
            for a, b in pairwise(levels) for to in (0.0, 9.0)]  # fmt: skip
    x = torch.ones(64, 128)
    x[:, : len(near)] = torch.tensor(near)
    x[:, 64:] += torch.linspace(-1e-3, 1e-3, 64)[:, None]
    return x


@pytest.mark.parametrize("codec", GAUSSIAN, ids=id_of)
def test_every_bf16_number_and_every_border_of_gaussian_levels(all_kernels, codec) -> None:
    """The numbers as neighbours of equal magnitude, and beside a large one."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(-1, 128).float()
    mixed = every.t().contiguous().view(-1, 128)
    mixed[:, 0] = torch.randn(512) * 2.0**60
    for groups in (every, mixed, around_borders(codec.bits)):
        x = groups.view(1, -1)
        wire = expected(codec, x)
        assert_bytes(codec, encoded(all_kernels, codec, x), wire)
        found = all_kernels.put(torch.empty_like(x))
        decode(codec, all_kernels.put(wire), found)
        assert_values(codec, found, decoded(codec, wire, x.shape[1]))


# Of 128 equal values: scales halfway between two bf16 numbers, the lower or the upper one even.
TIES = {
    2: ("0x1.07916p+0", "0x1.03096p+0"), 3: ("0x1.0adebp+0", "0x1.2a9f4p+0"),
    4: ("0x1.05074p+0", "0x1.0aaebp+0"),
}  # fmt: skip


@pytest.mark.parametrize("codec", GAUSSIAN, ids=id_of)
def test_ties_of_the_scale_are_rounded_to_even(all_kernels, codec: GroupCodec) -> None:
    values = [torch.full((128,), float.fromhex(value)) for value in TIES[codec.bits]]
    x = torch.cat(values)[None]
    wanted = expected(codec, x)
    bits = wanted.view(torch.int16).view(-1)
    assert not (bits[256 * codec.bits // 16 :][:2] & 1).any()
    assert_bytes(codec, encoded(all_kernels, codec, x), wanted)


@pytest.mark.parametrize("numel", (13, 500, 4000))
@pytest.mark.parametrize("bits", (4, 8))
def test_random_bits_of_rows_lie_a_stride_apart(all_kernels, bits: int, numel: int) -> None:
    """As those of runs of one tensor do: 16 vectors per element. Beyond 32 bits and 63, too."""
    codec = absmax(bits, 64, "stochastic")
    x = torch.randn(5, numel).bfloat16()
    for first, step in ((0, 16 * 5000), (7, 1 << 33), ((1 << 63) + 7, 8)):
        address = Address(key=3, step=4, first_vector=first, row_vectors=step)
        rows = [
            expected(codec, x[row : row + 1], address._replace(first_vector=first + row * step))
            for row in range(len(x))
        ]
        assert_bytes(codec, encoded(all_kernels, codec, x, address), torch.cat(rows))


# ---- decode and add up ----

# One codec per way of unpacking: bits x (scale | scale and offset | table).
DECODERS = tuple(codec for codec in CODECS if codec.rounding == "nearest")


@pytest.mark.parametrize("codec", (*DECODERS, *GAUSSIAN), ids=id_of)
def test_decoded_rows_are_those_of_the_page(all_kernels, codec: GroupCodec) -> None:
    dtype, add = DTYPES[codec.bits % 3], codec.bits % 2 == 0

    @all_kernels.example(4, case=cases(codec.group_size))
    def check(case) -> None:
        x = case.values(codec.group_size, torch.float32)
        if codec.is_gaussian:
            x = rotated(x, 128, None)
        wire, out = expected(codec, x), output(len(x), x.shape[1], dtype, case.skew)
        values = decoded(codec, wire, x.shape[1])
        wanted, found = values + out.float() if add else values, all_kernels.put(out)
        levels = None if learned(codec) is None else all_kernels.put(learned(codec))
        decode(codec, all_kernels.put(wire), found, levels=levels, add=add)
        assert_values(codec, found, wanted)


class Total(NamedTuple):
    """A sum of so many rows, one of them given as values, or none."""

    codec: GroupCodec
    sources: int = 3
    has_own: bool = True
    block: int = 0
    flips: int | None = None


TOTALS = (
    *(Total(codec, has_own=codec.bits % 2 == 0) for codec in DECODERS),
    Total(absmax(4, 128), 8, has_own=False),
    Total(absmax(4, 2048), 9),
    Total(absmax(8, 32), 2, has_own=False),
    Total(absmax(8, 32), 1),
    Total(GroupCodec(bits=7, group_size=64), 17, has_own=False),
    Total(GroupCodec(bits=3, group_size=288, levels="learned"), 4),
    Total(absmax(4, 128), 4, block=32),
    Total(absmax(4, 256), 3, has_own=False, block=64, flips=0xF00D),
    Total(absmax(4, 128), 4, block=128, flips=(5 << 96) | 77),
    *(Total(codec, block=128, flips=FLIPS) for codec in GAUSSIAN),
)


def rows_of(codec, case, sources: int) -> torch.Tensor:
    torch.manual_seed(case.seed)
    return case.values(codec.group_size, torch.float32)[:1] + torch.randn(sources, case.numel)


def sum_of(codec, wire: torch.Tensor, numel: int, own: tuple | None) -> torch.Tensor:
    """Rows, one of them replaced, added one by one."""
    rows = decoded(codec, wire, numel)
    if own is not None:
        rows[own[0]] = own[1]
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def without(wire: torch.Tensor, row: int) -> torch.Tensor:
    """What travels of rows when one of them is given as values."""
    return torch.cat([wire[:row], wire[row + 1 :]])


@pytest.mark.parametrize("total", TOTALS, ids=lambda t: f"{t.sources}-{id_of(t.codec)}")
def test_sums_of_rows_are_those_of_the_page(all_kernels, total: Total) -> None:
    """In order, rotated back, scaled and cast once."""
    codec, sources, has_own, block, flips = total
    scale = 1.0 if sources in (2, 4) and not block else 1 / sources
    dtype = torch.bfloat16 if sources == 8 else torch.float32

    @all_kernels.example(4, case=cases(codec.group_size), row=st.integers(0, sources - 1))
    def check(case, row: int) -> None:
        x = rows_of(codec, case, sources)
        rotation = FixedRotation(block, flips) if block else None
        x = rotated(x, block, flips) if block else x
        own = (row, x[row].to(torch.bfloat16)) if has_own else None
        wire = expected(codec, x)
        wanted = sum_of(codec, wire, x.shape[1], own)
        wanted = rotated_back(wanted, block, flips, scale) if block else wanted * scale
        sent = without(wire, row) if has_own else wire
        how = {"scale": scale, "rotation": rotation}
        found = all_kernels.put(output(1, case.numel, dtype, case.skew))[0]
        own = own and (row, all_kernels.put(own[1]))
        levels = None if learned(codec) is None else all_kernels.put(learned(codec))
        decode_sum(codec, all_kernels.put(sent), found, own=own, levels=levels, **how)
        assert_values(codec, found, wanted[: case.numel])


# ---- variants of the kernels ----


@pytest.mark.parametrize("codec", (*CODECS[::7], *GAUSSIAN), ids=id_of)
def test_whole_blocks_are_encoded_without_checks_of_ends(all_kernels, codec: GroupCodec) -> None:
    """Of aligned rows, in a variant of the CUDA kernel."""
    dtype = DTYPES[CODECS.index(codec) % 3] if codec in CODECS else torch.bfloat16
    numel = whole_numel([codec]) if codec.is_gaussian else codec.group_size * max(
        tiling(codec.group_size, run).block_groups for run in (1, 4)
    )  # fmt: skip
    x = awkward(2 * numel, codec.group_size, sorted(KINDS), seed=7).view(2, numel).to(dtype)
    block = 128 if codec.is_gaussian else 32
    wanted = expected(codec, rotated(x.float(), block, 5))
    assert_bytes(codec, encoded(all_kernels, codec, x, rotation=FixedRotation(block, 5)), wanted)
    assert_bytes(codec, encoded(all_kernels, codec, x), expected(codec, x))
    base = torch.randn(2, numel).bfloat16()
    wanted = expected(codec, x.float() - base.float())
    assert_bytes(codec, encoded(all_kernels, codec, x, base=base), wanted)
    assert all(macros["DSQ_WHOLE"] for macros in all_kernels.macros)


@pytest.mark.parametrize("codec", DECODERS[::7], ids=id_of)
def test_whole_blocks_are_decoded_without_checks_of_ends(all_kernels, codec: GroupCodec) -> None:
    numel, sources, put = 1 << 15, 8, all_kernels.put
    wire = expected(codec, torch.randn(sources, numel))
    levels = None if learned(codec) is None else put(learned(codec))
    out = put(output(2, numel, torch.bfloat16, 0))
    decode(codec, put(wire[:2]), out, levels=levels)
    assert_values(codec, out, decoded(codec, wire[:2], numel))
    total = put(output(1, numel, torch.float32, 0))[0]
    decode_sum(codec, put(wire), total, scale=0.125, levels=levels)
    exact = sum_of(codec, wire, numel, None)
    assert_values(codec, total, exact * 0.125)
    if codec.levels != "learned":
        how = {"wire_in": 0, "wire": 1, "stream": 0, "sources": 8, "stride": wire.stride(0)}
        recode = Recode(codec, INT4, numel, place=None, own=2, **how), (0, 0, 0, 0)
        buffers = [put(wire), put(expected(INT4, exact[None])[0].fill_(0x55)), put(torch.empty(0))]
        Operations([recode]).run(buffers, Streams([Coding(INT4, ADDRESS)], [None]))
        assert_bytes(INT4, buffers[1].cpu()[None], expected(INT4, exact[None]))
    assert all(macros["DSQ_WHOLE"] for macros in all_kernels.macros)


@pytest.mark.parametrize("stores", STORES, ids=str)
def test_every_way_of_storing_writes_the_same_values(cuda_kernels, nothing_left, stores) -> None:
    """Rows of any length and address, added to what is there; and whole blocks of sums, one of
    them rotated.
    """
    codec, put = GroupCodec(bits=4, group_size=64), cuda_kernels.put
    with storing(stores):

        @cuda_kernels.example(4, case=cases(codec.group_size, max_groups=40))
        def check(case) -> None:
            wire = expected(codec, case.values(codec.group_size, torch.float32))
            out = output(case.rows, case.numel, torch.bfloat16, case.skew)
            wanted, found = decoded(codec, wire, case.numel) + out.float(), put(out)
            decode(codec, put(wire), found, add=True)
            assert_values(codec, found, wanted)

        coarse, numel = absmax(8, 2048), 1 << 14
        wire = expected(coarse, torch.randn(3, numel))
        found = put(output(1, numel, torch.float32, 0))[0]
        decode_sum(coarse, put(wire), found, scale=0.5)
        assert_values(coarse, found, sum_of(coarse, wire, numel, None) * 0.5)
        macros = cuda_kernels.macros[-1]
        assert (macros["DSQ_RUN"], macros["DSQ_STAGED"]) == (stores.run, stores.staged)
        assert macros["DSQ_WHOLE"]
        x = rotated(torch.randn(3, 5000), 64, 77)
        wire, found = expected(INT8, x), put(output(1, 5000, torch.bfloat16, 0))[0]
        decode_sum(INT8, put(wire), found, scale=0.5, rotation=FixedRotation(64, 77))
        wanted = rotated_back(sum_of(INT8, wire, x.shape[1], None), 64, 77, 0.5)[:5000]
        assert_values(INT8, found, wanted)
        assert cuda_kernels.macros[-1]["DSQ_STAGED"] == stores.staged


# ---- nothing, and numbers that are sent as they are ----


@pytest.mark.parametrize("codec", [IN_4_BITS[0], IN_4_BITS[2], CastCodec()], ids=id_of)
def test_no_rows_and_no_elements_work_everywhere(all_kernels, codec) -> None:
    for rows, numel in product((0, 1, 3), (0, 1, 7, 100)):
        x, put = torch.ones(rows, numel), all_kernels.put
        wire = put(torch.empty(rows, codec.wire_bytes(numel), dtype=torch.uint8))
        out, total = put(torch.empty(rows, numel)), put(torch.full((numel,), 7.0))
        encode(codec, put(x), wire)
        decode(codec, wire, out)
        decode_sum(codec, wire, total, scale=0.5)
        assert torch.equal(out.cpu(), x) and torch.equal(total.cpu(), x.sum(0) / 2)


def cast(kernels, operation, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    places = (0,) * (3 if isinstance(operation, Encode) else 2)
    buffers, streams = [kernels.put(x), kernels.put(out)], Streams([Coding(CastCodec())], [None])
    Operations([(operation, places)]).run(buffers, streams)
    return buffers[1].cpu()


def test_halves_are_read_and_rounded_as_torch_does(all_kernels) -> None:
    """Every fp16 number, and fp32 numbers on, beside and between the borders of rounding."""
    codec, count = CastCodec(torch.float16), 1 << 16
    every = torch.arange(count, dtype=torch.int32).to(torch.int16).view(torch.float16)
    reading = Decode(codec, count, 0, 1, 0)
    found = cast(all_kernels, reading, every.view(torch.uint8), torch.empty(count))
    assert torch.equal(found.nan_to_num(7.0), every.float().nan_to_num(7.0))
    finite = every[every.isfinite()].float().sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    numbers = [finite, middles, torch.randn(9999) * 2.0 ** torch.randint(-26, 18, (9999,))]
    numbers += [torch.nextafter(middles, torch.tensor(side * torch.inf)) for side in (1, -1)]
    x = torch.cat([*numbers, torch.tensor([65519.9, 65520.0, 1e30, torch.inf, 1e-45, -1e-45])])
    out = torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8)
    wire = cast(all_kernels, Encode(codec, x.numel(), 0, 1, 0), x, out)
    assert torch.equal(wire[: 2 * x.numel()].view(torch.int16), x.half().view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_values_keep_every_bit(all_kernels, dtype: torch.dtype) -> None:
    """Of a NaN too, on its way into a message and out of it."""
    bits = torch.randint(-(1 << 15), 1 << 15, (dtype.itemsize * 5000,), dtype=torch.int16)
    x, codec = bits.view(dtype)[:4999], CastCodec(dtype)
    out = torch.empty(codec.wire_bytes(4999), dtype=torch.uint8)
    wire = cast(all_kernels, Encode(codec, 4999, 0, 1, 0), x, out)
    found = cast(all_kernels, Decode(codec, 4999, 0, 1, 0), wire, torch.empty_like(x))
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))
