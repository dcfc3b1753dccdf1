"""Every back end against wire_oracle.py, which was written from docs/wire_format.md alone: every
byte of a message, every bit of a value.

``all_kernels`` are the torch reference, C++, and CUDA on the host; test_ptx.py has the compiler's
output, test_gpu.py the kernels of a GPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import BoundCodec, decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.rows import even_layout, plan_gather
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Offsets,
    Recode,
    Rotate,
    Rows,
    Sum,
    rows_of,
)
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.launch import tiling, whole_numel
from tests import needs
from tests.kernels.backends import storing
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    FORMULAS,
    GAUSSIAN,
    ONE_OF_EACH,
    STORES,
    absmax,
    id_of,
)
from tests.kernels.programs import (
    ARRIVED,
    BASE,
    OUT,
    OWN,
    SUMS,
    WIRE,
    Program,
    X,
    check,
    kinds_of,
    streams_of,
)
from tests.thin import thinned
from tests.unit import wire_oracle as oracle

BF16, FP16, FP32 = DTYPES
INT4, INT8 = absmax(4, 128, "stochastic"), GroupCodec(bits=8, group_size=64, rounding="stochastic")
SHIFTED = GroupCodec(bits=8, group_size=32, rounding="random_shift")
LEARNED = GroupCodec(bits=3, group_size=32, levels="learned")
WIDE = GroupCodec(bits=3, group_size=288, rounding="stochastic")
CASTS = CAST_BF16, CAST_FP16, CAST_FP32 = tuple(map(CastCodec, DTYPES))
IN_4_BITS = [GroupCodec(bits=4, group_size=128, **formula) for formula in FORMULAS]
HEADLINE = (*IN_4_BITS, *GAUSSIAN)
# One codec per way of unpacking: bits x (scale | scale and offset | table).
DECODERS = tuple(codec for codec in CODECS if codec.rounding == "nearest")


def sizes(codec: Codec, block: int = 0) -> list[int]:
    """Whole groups, ragged ones and less than a vector; Gaussian groups are whole or rotated."""
    g = codec.group_size
    if codec.is_gaussian and not block:
        return [g, 3 * g, 8 * g, 11 * g]
    return [1, 7, g - 1, g, 3 * g, 8 * g, 2 * g + 13, 9 * g - 13]


# ---- codec by codec ----


class Source(NamedTuple):
    """Values to encode: of a dtype, less those of ``base``, rotated."""

    codec: GroupCodec
    dtype: torch.dtype
    base: torch.dtype | None = None
    block: int = 0
    flips: bool = False

    @property
    def is_quick(self) -> bool:
        """True for one of each codec, and for all differences and rotations."""
        if self.base is not None or self.block:
            return True
        return self.codec in ONE_OF_EACH or (self.codec in HEADLINE and self.dtype == BF16)


SOURCES = (
    *(Source(codec, DTYPES[index % 3]) for index, codec in enumerate(CODECS)),
    *(Source(codec, dtype) for codec in HEADLINE for dtype in DTYPES),
    Source(INT4, BF16, block=32),
    Source(absmax(4, 64, "stochastic"), BF16, block=64, flips=True),
    Source(absmax(8, 2048), BF16, block=128, flips=True),
    Source(GroupCodec(bits=3, group_size=384, rounding="stochastic"), BF16, block=128),
    Source(GroupCodec(bits=6, group_size=32), BF16, block=32, flips=True),
    Source(absmax(4, 2048), FP32, BF16),
    Source(absmax(4, 128), BF16, BF16),
    Source(absmax(8, 128), FP32, FP32),
    Source(GroupCodec(bits=8, group_size=96, rounding="stochastic"), FP16, FP32),
    Source(absmax(5, 64), BF16, FP32, block=64, flips=True),
    *(Source(c, DTYPES[c.bits % 3], block=128, flips=f) for c in GAUSSIAN for f in (False, True)),
)


@pytest.mark.parametrize(
    "source",
    thinned([(source,) for source in SOURCES], lambda s: s.is_quick),
    ids=lambda s: id_of(s.codec),
)
def test_bytes_are_those_of_the_page(all_kernels, source: Source) -> None:
    """A difference is taken once, in fp32; what a rotation lacks in its last block is zeros."""
    codec, dtype, base, block, flips = source
    place = None if base is None else BASE
    found = [
        Encode(codec, numel, X, WIRE, stream, block, flips, place)
        for stream, numel in enumerate(sizes(codec, block))
    ]
    streams = streams_of([codec] * len(found), block=block, flips=flips)
    check(all_kernels, Program(found), streams, dtype, base or dtype, kinds_of(codec))


class Total(NamedTuple):
    """A sum of so many rows, one of them given as values, or none."""

    codec: GroupCodec
    sources: int = 3
    has_own: bool = True
    block: int = 0
    flips: bool = False

    @property
    def is_quick(self) -> bool:
        """True for one of each codec, and for all numbers of rows and rotations."""
        return self.codec in (*ONE_OF_EACH, *GAUSSIAN) or self.sources != 3 or self.block > 0


TOTALS = (
    *(Total(codec, has_own=codec.bits % 2 == 0) for codec in (*DECODERS, *GAUSSIAN)),
    Total(absmax(4, 128), 8, has_own=False),
    Total(absmax(4, 2048), 9),
    Total(absmax(8, 32), 2, has_own=False),
    Total(absmax(8, 32), 1),
    Total(GroupCodec(bits=7, group_size=64), 17, has_own=False),
    Total(GroupCodec(bits=3, group_size=288, levels="learned"), 4),
    Total(absmax(4, 128), 4, block=32),
    Total(absmax(4, 256), 3, has_own=False, block=64, flips=True),
    Total(absmax(4, 128), 4, block=128, flips=True),
    *(Total(codec, block=128, flips=True) for codec in GAUSSIAN),
)


@pytest.mark.parametrize(
    "total",
    thinned([(total,) for total in TOTALS], lambda t: t.is_quick),
    ids=lambda t: f"{t.sources}-{id_of(t.codec)}",
)
def test_values_are_those_of_the_page(all_kernels, total: Total) -> None:
    """Sums in order, rotated back, scaled and cast once; single rows, added to what is there."""
    codec, sources, has_own, block, flips = total
    place = codec.bits % sources if has_own else None
    scale = 1.0 if sources in (2, 4) and not block else 1 / sources
    how = {
        "block": block,
        "flips": flips,
        "own_row": place,
        "own": OWN,
        "scale": scale,
        "stride": 0,
    }
    found = []
    for stream, numel in enumerate(sizes(codec, block)):
        found.append(Sum(codec, numel, ARRIVED, OUT, stream, sources - has_own, **how))
        if not block:
            found.append(Decode(codec, numel, ARRIVED, OUT, stream, codec.bits % 2 == 0))
    streams = streams_of([codec] * len(found), block=block, flips=flips)
    dtype = BF16 if sources == 8 else DTYPES[codec.bits % 3]
    check(all_kernels, Program(found), streams, dtype, values=kinds_of(codec))


# ---- numbers on and beside borders ----


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
    every = torch.arange(1 << 16).to(torch.uint16).view(BF16).view(-1, 128).float()
    mixed = every.t().contiguous().view(-1, 128)
    mixed[:, 0] = torch.randn(512) * 2.0**60
    for groups in (every, mixed, around_borders(codec.bits)):
        n = groups.numel()
        found = [Encode(codec, n, X, WIRE, 0), Decode(codec, n, ARRIVED, OUT, 0)]
        values = lambda _, groups=groups: groups.flatten()  # noqa: E731
        check(all_kernels, Program(found), streams_of([codec]), FP32, values=values)


# Of 128 equal values: scales halfway between two bf16 numbers, the lower or the upper one even.
TIES = {
    2: ("0x1.07916p+0", "0x1.03096p+0"), 3: ("0x1.0adebp+0", "0x1.2a9f4p+0"),
    4: ("0x1.05074p+0", "0x1.0aaebp+0"), 5: ("0x1.0d898ep+0", "0x1.13d47cp+0"),
}  # fmt: skip


@pytest.mark.parametrize("codec", GAUSSIAN, ids=id_of)
def test_ties_of_the_scale_are_rounded_to_even(all_kernels, codec: GroupCodec) -> None:
    values = [torch.full((128,), float.fromhex(value)) for value in TIES[codec.bits]]
    program = Program([Encode(codec, 256, X, WIRE, 0)])
    wanted = check(
        all_kernels, program, streams_of([codec]), FP32, values=lambda _: torch.cat(values)
    )
    bits = wanted[WIRE].view(torch.int16)[-codec.wire_bytes(256) // 2 :]
    assert not (bits[256 * codec.bits // 16 :][:2] & 1).any()


def test_halves_are_read_and_rounded_as_torch_does(all_kernels) -> None:
    """Every fp16 number, and fp32 numbers on, beside and between the borders of rounding."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(FP16).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    numbers = [finite, middles, torch.randn(9999) * 2.0 ** torch.randint(-26, 18, (9999,))]
    numbers += [torch.nextafter(middles, torch.tensor(side * torch.inf)) for side in (1, -1)]
    x = torch.cat([*numbers, torch.tensor([65519.9, 65520.0, 1e30, torch.inf, 1e-45, -1e-45])])
    found = [Decode(CAST_FP16, len(every), ARRIVED, OUT, 0), Encode(CAST_FP16, len(x), X, WIRE, 0)]
    values = lambda n: every if n == len(every) else x  # noqa: E731
    check(all_kernels, Program(found), streams_of([CAST_FP16]), FP32, values=values)


def run(kernels, operation, *buffers: torch.Tensor) -> torch.Tensor:
    """One task at the begin of its buffers; what it has written into the last one."""
    there, streams = (
        [kernels.put(b) for b in buffers],
        RngState([BoundCodec(operation.codec)], [None]),
    )
    Operations([(operation, Offsets())]).run(there, streams)
    return there[-1].cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_values_keep_every_bit(all_kernels, dtype: torch.dtype) -> None:
    """A NaN keeps its bits, too, on its way into a message and out of it."""
    bits = torch.randint(-(1 << 15), 1 << 15, (dtype.itemsize * 5000,), dtype=torch.int16)
    x, codec = bits.view(dtype)[:4999], CastCodec(dtype)
    out = torch.empty(codec.wire_bytes(4999), dtype=torch.uint8)
    wire = run(all_kernels, Encode(codec, 4999, 0, 1, 0), x, out)
    found = run(all_kernels, Decode(codec, 4999, 0, 1, 0), wire, torch.empty_like(x))
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


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


# ---- many codecs and sizes in one list ----

MIXED = (INT4, INT8, LEARNED, SHIFTED, *CASTS) * 2
IN_128 = (*GAUSSIAN, INT4)  # whose groups are blocks of 128
RECODED = (
    *((INT8, INT4), (INT4, SHIFTED), (CAST_BF16, CAST_BF16), (CAST_BF16, INT8)),
    *((CAST_FP16, CAST_FP32), (INT4, CAST_FP32), (LEARNED, LEARNED), (SHIFTED, WIDE)),
)
NUMELS = (1, 129, 500, 500, 500, 4096)
TURNED = [(BF16, 0, 0), (FP16, 32, 0), (FP32, 64, 1), (BF16, 128, 1)]


def codecs_in(block: int) -> tuple[Codec, ...]:
    """Codecs whose groups hold whole blocks of a rotation."""
    if block == 128:
        return IN_128 * 2
    return tuple(c for c in MIXED if not block or getattr(c, "group_size", block) % block == 0)


ROTATED = (*TURNED, (FP32, 0, 0), (BF16, 128, OWN_SIGNS))
SCALED = (None, 1 / 3), (0, 1.0), (2, 0.25)
# make test takes the first rotation, with one place of the own row.
FIRST = (*SCALED[0], *ROTATED[0])


@pytest.mark.parametrize(
    ("place", "scale", "dtype", "block", "flips"),
    thinned(
        [(*scaled, *rotated) for scaled in SCALED for rotated in ROTATED],
        lambda *case: case == FIRST,
    ),
)
def test_many_codecs_and_sizes(kernels, place, dtype, block: int, flips: int, scale: float) -> None:
    """Every second codec encodes differences, and adds what it decodes."""
    codecs, found = codecs_in(block), []
    how = {"sources": 2, "stride": 0, "own_row": place, "own": OWN, "block": block, "flips": flips}
    for stream, codec in enumerate(codecs):
        differs = stream % 2 == 1 and not block and isinstance(codec, GroupCodec)
        for numel in NUMELS:
            base = BASE if differs else None
            found.append(Encode(codec, numel, X, WIRE, stream, block, bool(flips), base))
            found.append(Sum(codec, numel, ARRIVED, OUT, stream, scale=scale, **how))
            if not block:
                found.append(Decode(codec, numel, ARRIVED, OUT, stream, differs))
    check(kernels, Program(found), streams_of(codecs, block=block, flips=flips), dtype)


@pytest.mark.parametrize("place", (None, 1))
@pytest.mark.parametrize(
    "source, codec, block",
    thinned(
        [
            *((*pair, block) for pair in RECODED for block in (0, 32)),
            (INT4, GAUSSIAN[1], 128),
            (GAUSSIAN[2], GAUSSIAN[0], 128),
        ],
        lambda source, codec, block: block != 32 or codec is INT4,
    ),
)
def test_recode(kernels, source: Codec, codec: Codec, place: int | None, block: int) -> None:
    streams = 2 if codec is LEARNED else 1  # the second one with levels of its own
    found = [
        Recode(source, codec, numel, ARRIVED, WIRE, i % streams, 3, 0, place, OWN, block)
        for i, numel in enumerate(NUMELS)
    ]
    values = torch.randn if isinstance(codec, CastCodec) else kinds_of(codec)  # of a NaN: the bits
    check(kernels, Program(found), streams_of([codec] * streams), values=values)


@pytest.mark.parametrize("dtype, block, flips", TURNED)
def test_values_that_stay_are_made_beside_encoded_ones(
    all_kernels, dtype: torch.dtype, block: int, flips: int
) -> None:
    codec, before = GAUSSIAN[1] if block == 128 else INT4, len(all_kernels.macros)
    found = []
    for stream in range(2):
        found += [Encode(codec, n, X, WIRE, stream, block, flips) for n in NUMELS]
        found += [Rotate(codec, n, X, SUMS, stream, block, flips) for n in (*NUMELS, 20_000)]
    streams = streams_of((codec, codec), block=block, flips=flips)
    check(all_kernels, Program(found), streams, dtype)
    if all_kernels.is_cuda:  # unrotated values that stay are copied by a kernel of their own
        assert len(all_kernels.macros) - before == (1 if block else 2)


@pytest.mark.parametrize("place", (None, 1))
@pytest.mark.parametrize("codec", (INT4, GAUSSIAN[1], CAST_BF16), ids=str)
def test_sums_that_stay_are_made_beside_recoded_ones(all_kernels, codec: Codec, place) -> None:
    found, source = [], CAST_BF16 if codec is CAST_BF16 else INT8
    for size in (128, 640, 640, 4096):
        how = {"wire_in": ARRIVED, "stream": 0, "sources": 3, "stride": 0, "own_row": place}
        found.append(Recode(source, codec, size, wire=WIRE, own=OWN, **how))
        stays = Sum(source, size, values=SUMS, own=OWN, fuse_with=codec, **how)
        found += [stays, stays._replace(numel=size - 5), stays._replace(fuse_with=None, scale=0.5)]
    check(all_kernels, Program(found), streams_of([codec]))
    if all_kernels.is_cuda:
        launches = sum("DSQ_SOURCES" in macros for macros in all_kernels.macros)  # not of casts
        assert launches == (0 if codec is CAST_BF16 else 2)


IN_ANY_PLACE = (INT4, INT8, GAUSSIAN[1], CAST_BF16, CAST_FP32)


def at_every_address(dtype: torch.dtype, codec: Codec) -> Program:
    """Rows of several warps and of less than one at every distance from a multiple of 16 bytes."""
    block, found, skews = 128 * (codec is GAUSSIAN[1]), [], []
    for skew in range(16 // dtype.itemsize):
        for numel in (5000 + 8 * skew, 8192, 100 + skew):
            here = [Encode(codec, numel, X, WIRE, 0, block)]
            here.append(Sum(codec, numel, ARRIVED, OUT, 0, 1, 0, 1, OWN, block))
            if not block:
                here.append(Decode(codec, numel, ARRIVED, OUT, 0))
            if codec in (INT4, INT8):
                here.append(Encode(codec, numel, X, WIRE, 0, base=BASE))
                here.append(Decode(codec, numel, ARRIVED, OUT, 0, True))
            found, skews = found + here, skews + [skew] * len(here)
    return Program(found, skews)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    thinned(
        product(IN_ANY_PLACE, DTYPES),
        lambda codec, dtype: dtype == DTYPES[IN_ANY_PLACE.index(codec) % len(DTYPES)],
    ),
    ids=str,
)
def test_every_address_of_values(all_kernels, dtype: torch.dtype, codec: Codec) -> None:
    streams = streams_of([codec], block=128)
    check(all_kernels, at_every_address(dtype, codec), streams, dtype, dtype)


@pytest.mark.parametrize("numel", (13, 500, 4000))
@pytest.mark.parametrize("bits", (4, 8))
def test_random_bits_of_rows_lie_a_stride_apart(all_kernels, bits: int, numel: int) -> None:
    """As those of runs of one tensor do: 16 vectors per element. Beyond 32 bits and 63, too."""
    codec = absmax(bits, 64, "stochastic")
    for step in (16 * 5000, 1 << 33, 8):
        program = Program([Encode(codec, numel, X, WIRE, stream) for stream in (0, 3)] * 5)
        program.tasks = [
            (op, offsets._replace(vector=row // 2 * step))
            for row, (op, offsets) in enumerate(program.tasks)
        ]
        check(all_kernels, program, streams_of([codec] * 4))


# ---- variants of the kernels ----


@pytest.mark.parametrize(
    "codec",
    thinned([*CODECS[::14], *GAUSSIAN], lambda codec: codec.bits in (2, 4)),
    ids=id_of,
)
def test_whole_blocks_are_encoded_without_checks_of_ends(all_kernels, codec: GroupCodec) -> None:
    """Aligned rows take a variant of the CUDA kernel."""
    dtype = DTYPES[CODECS.index(codec) % 3] if codec in CODECS else BF16
    numel = whole_numel([codec]) if codec.is_gaussian else codec.group_size * max(
        tiling(codec.group_size, run).block_groups for run in (1, 4)
    )  # fmt: skip
    plain = Encode(codec, numel, X, WIRE, 0)
    turned = plain._replace(block=128 if codec.is_gaussian else 32, flips=True)
    found = [plain, turned, plain._replace(base=BASE)] * 2
    streams = streams_of([codec], block=turned.block, flips=True)
    check(all_kernels, Program(found, [0] * 6), streams, dtype, values=kinds_of(codec))
    if all_kernels.is_cuda:
        assert {macros["DSQ_WHOLE"] for macros in all_kernels.macros} == {1}


@pytest.mark.parametrize("codec", DECODERS[::7], ids=id_of)
def test_whole_blocks_are_decoded_without_checks_of_ends(all_kernels, codec: GroupCodec) -> None:
    numel, how = 1 << 15, {"sources": 8, "stride": 0, "own_row": None, "own": OWN}
    found = [Decode(codec, numel, ARRIVED, OUT, 0)] * 2
    found.append(Sum(codec, numel, ARRIVED, SUMS, 0, scale=0.125, **how))
    if codec.levels != "learned":
        found.append(Recode(codec, INT4, numel, ARRIVED, WIRE, 0, **how))
    check(all_kernels, Program(found, [0] * 4), streams_of([INT4]))
    if all_kernels.is_cuda:
        assert {macros["DSQ_WHOLE"] for macros in all_kernels.macros} == {1}


@pytest.mark.parametrize(
    "stores",
    thinned([(stores,) for stores in STORES], lambda stores: stores.run in (1, 8)),
    ids=str,
)
def test_every_way_of_storing_writes_the_same_values(cuda_kernels, nothing_left, stores) -> None:
    """Rows of any length and address, added to what is there; whole blocks of sums; and rotated
    ones.
    """
    codec, coarse, fine = GroupCodec(bits=4, group_size=64), absmax(8, 2048), absmax(8, 128)
    how = {"own_row": None, "own": OWN, "scale": 0.5, "sources": 3, "stride": 0}
    decodes = [Decode(codec, numel, ARRIVED, OUT, 0, True) for numel in (*NUMELS, 7)]
    with storing(stores):
        check(cuda_kernels, Program(decodes), streams_of([codec]))
        check(cuda_kernels, Program([Sum(coarse, 1 << 14, ARRIVED, SUMS, 0, **how)]),
              streams_of([coarse]))  # fmt: skip
        macros = cuda_kernels.macros[-1]
        assert (macros["DSQ_RUN"], macros["DSQ_STAGED"]) == (stores.run, stores.staged)
        assert macros["DSQ_WHOLE"]
        turned = Sum(fine, 5000, ARRIVED, OUT, 0, block=64, flips=1, **how)
        check(cuda_kernels, Program([turned]), streams_of([fine], block=64, flips=1))
        assert cuda_kernels.macros[-1]["DSQ_STAGED"] == stores.staged


# ---- lists of tasks ----


def test_all_sources_of_a_sum_may_be_one_row(all_kernels) -> None:
    """As the rehearsal has them."""
    codec = absmax(8, 128)
    program = Program([Sum(codec, 256, ARRIVED, OUT, 0, 4, 0, None, OWN)])
    program.tasks = [(op._replace(stride=0), offsets) for op, offsets in program.tasks]
    check(all_kernels, program, streams_of([codec]))


def test_pieces_at_equal_distances_become_rows() -> None:
    """The shards of a gradient in the messages to three ranks."""
    operation = Encode(INT4, 50, 0, 1, 0)
    step = Offsets(values=50, wire=64, vector=800)
    first = Offsets(values=7, wire=16)
    tasks = [
        (operation, first),
        (operation, Offsets(values=57, wire=80, vector=800)),
        (operation, Offsets(values=107, wire=144, vector=1600)),
    ]
    assert rows_of(tasks) == [Rows(operation, first, 3, step)]
    assert rows_of(tasks[:1]) == [Rows(operation, first, 1, Offsets())]

    backwards = rows_of([tasks[0], *tasks[::-1]])
    assert [rows.num_rows for rows in backwards] == [2, 1, 1]
    shorter = (operation._replace(numel=49), tasks[2][1])
    assert [rows.num_rows for rows in rows_of([*tasks[:2], shorter])] == [2, 1]
    farther = (operation, tasks[2][1]._replace(wire=152))
    assert [rows.num_rows for rows in rows_of([*tasks[:2], farther])] == [2, 1]
    two_runs = [(operation, Offsets(values=8 * place)) for place in (0, 1, 2, 10, 11)]
    assert [rows.num_rows for rows in rows_of(two_runs)] == [3, 2]


def test_rows_of_operations_that_kernels_take_one_by_one_stay_alone() -> None:
    add_up = Sum(INT4, 128, ARRIVED, OUT, 0, 4, 0, None, OWN)
    assert [rows.num_rows for rows in rows_of([(add_up, Offsets())] * 3)] == [1, 1, 1]
    decode = Decode(INT4, 128, ARRIVED, OUT, 0)
    assert [rows.num_rows for rows in rows_of([(decode, Offsets())] * 3)] == [3]


@needs.native_kernels
def test_threads_that_share_a_plan_do_not_mix_their_buffers() -> None:
    """Two engines in two threads gather tensors of equal sizes: they share what decodes them."""
    codec, ranks, width = GroupCodec(range="absmax", group_size=128), 4, 50_000
    decoding = plan_gather(even_layout((ranks * width,), ranks), (codec,), 0, None)._decode

    def wrong(seed: int) -> int:
        x = torch.randn(ranks, width, generator=torch.Generator().manual_seed(seed))
        wire = torch.empty(ranks, codec.wire_bytes(width), dtype=torch.uint8)
        encode(codec, x, wire)
        wanted = torch.empty_like(x)
        decode(codec, wire, wanted)
        differing = 0
        for _ in range(150):
            found = torch.zeros(ranks * width)
            decoding.run([wire.view(-1), found], RngState([BoundCodec(codec)], [None]))
            differing += not torch.equal(found, wanted.view(-1))
        return differing

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(wrong, range(4))) == [0] * 4
