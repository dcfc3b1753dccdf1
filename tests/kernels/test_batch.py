"""Operations on many pieces at once, by the C++ kernels and by the CUDA ones on the shim, against
the same operations one by one with the torch reference: every bit of every buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation, decode, encode
from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.message import _shard_message
from ds_quant.kernels import reference
from ds_quant.kernels.batch import (
    OWN_SIGNS,
    Decode,
    Encode,
    Operation,
    Recode,
    Rotate,
    Sum,
    rows_of,
)
from ds_quant.kernels.dispatch import Operations, Streams
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import round_up
from tests import needs
from tests.kernels.inputs import DTYPES, GAUSSIAN, KINDS, awkward

INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
INT8 = GroupCodec(bits=8, group_size=64, rounding="stochastic")
LEARNED = GroupCodec(bits=3, group_size=32, levels="learned")
SHIFTED = GroupCodec(bits=8, group_size=32, rounding="random_shift")
BF16, FP16, FP32 = (CastCodec(d) for d in (torch.bfloat16, torch.float16, torch.float32))
CODECS = (INT4, INT8, LEARNED, SHIFTED, BF16, FP16, FP32)
IN_128 = (*GAUSSIAN, INT4)  # whose groups are blocks of 128
WIDE = GroupCodec(bits=3, group_size=288, rounding="stochastic")
RECODED = (
    *((INT8, INT4), (INT4, SHIFTED), (BF16, BF16), (BF16, INT8)),
    *((FP16, FP32), (INT4, FP32), (LEARNED, LEARNED), (SHIFTED, WIDE)),
)
NUMELS = (1, 129, 500, 500, 500, 4096)
LEVELS = torch.tensor([0.0, 0.5, 2.0, 3.0, 4.5, 5.0, 6.25, 7.0])
FLIPS = Address(key=77, step=5)
TURNED = [  # dtypes and rotations
    (DTYPES[0], 0, False), (DTYPES[1], 32, False), (DTYPES[2], 64, True), (DTYPES[0], 128, True),
]  # fmt: skip


def codecs_in(block: int) -> Sequence[Codec]:
    """Codecs whose groups hold whole blocks of a rotation."""
    if block == 128:
        return IN_128
    return [c for c in CODECS if not block or getattr(c, "group_size", block) % block == 0]


def streams_of(codecs: Sequence[Codec], *, block: int, flips: bool) -> Streams:
    """A stream per codec; the last learned one has a table of its own."""
    codings, rotations = [], []
    for place, codec in enumerate(codecs):
        levels = LEVELS if codec is LEARNED and place % 2 else None
        codings.append(Coding(codec, Address(key=9 + place, step=4, first_vector=3), levels))
        signs = FLIPS._replace(key=place) if flips else None
        rotations.append(Rotation(block=block, signs=signs) if block else None)
    return Streams(codings, rotations)


# Buffers: values, and what is subtracted of them; messages that have arrived, and values in place
# of one; messages that are written; values of a dtype that are, and fp32 ones.
X, BASE, ARRIVED, OWN, WIRE, OUT, SUMS = range(7)


class Program:
    """Operations whose places follow each other in every buffer; equal sizes at equal distances.

    skews: where the values of each begin, from a multiple of 16 bytes on.
    """

    def __init__(self, operations: Sequence[Operation], skews: Sequence[int] = ()) -> None:
        self.used, self.skews, self.tasks = [0, 5, 0, 0, 0, 0, 0], skews, []
        for operation in operations:
            self.tasks.append((operation, self._places(operation)))
        self.reading = [op for op in operations if isinstance(op, Decode | Sum | Recode)]
        for place, (op, places) in enumerate(self.tasks):
            if isinstance(op, Sum | Recode):
                self.tasks[place] = op._replace(stride=self.used[ARRIVED]), places

    def _places(self, op: Operation) -> tuple[int, ...]:
        if isinstance(op, Encode):
            first, wire = self._take(X, op.numel, 12), self._bytes(WIRE, op.codec, op.on_wire)
            base = () if op.base is None else (self._take(BASE, op.numel, 12),)
            return first, wire, 16 * first, *base
        if isinstance(op, Decode):
            return self._bytes(ARRIVED, op.codec, op.numel), self._take(OUT, op.numel)
        if isinstance(op, Rotate):
            return self._take(X, op.numel), self._take(SUMS, round_up(op.padded, 8))
        own = self._take(OWN, round_up(op.on_wire, 8))
        if isinstance(op, Sum):
            values = self._take(op.values, round_up(op.numel, 8 if op.values == SUMS else 1))
            return self._bytes(ARRIVED, op.codec, op.on_wire), values, own
        read = self._bytes(ARRIVED, op.source, op.on_wire)
        return read, self._bytes(WIRE, op.codec, op.on_wire), own, 16 * own

    def _take(self, buffer: int, items: int, gap: int = 0) -> int:
        start = self.used[buffer]
        if self.skews:
            start = round_up(start, 128) + (self.skews[len(self.tasks)] if buffer != OWN else 0)
        self.used[buffer] = start + items + gap
        return start

    def _bytes(self, buffer: int, codec: Codec, numel: int) -> int:
        start = self.used[buffer]
        self.used[buffer] += codec.wire_bytes(numel)
        return start

    def buffers(
        self, dtype: torch.dtype, base: torch.dtype, values: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """``values``: numbers that have arrived."""
        arrived = torch.empty(0, self.used[ARRIVED], dtype=torch.uint8)
        if self.reading:
            sources = max(getattr(op, "sources", 1) for op in self.reading)
            arrived = torch.stack([self._message(values) for _ in range(sources)])
        x, subtracted, _, own, wire, out, sums = map(torch.randn, self.used)
        return [
            x.to(dtype), subtracted.to(base), arrived.view(-1), own, wire.fill_(7).byte(),
            out.to(dtype), sums,
        ]  # fmt: skip

    def _message(self, values: Callable[[int], torch.Tensor]) -> torch.Tensor:
        rows = []
        for op in self.reading:
            codec = op.source if isinstance(op, Recode) else op.codec
            numel = getattr(op, "on_wire", op.numel)
            rows.append(torch.empty(codec.wire_bytes(numel), dtype=torch.uint8))
            encode(codec, values(numel)[None], rows[-1][None], address=FLIPS)
        return torch.cat(rows)


def check(
    kernels,
    program: Program,
    streams: Streams,
    dtype: torch.dtype = torch.bfloat16,
    base: torch.dtype = torch.bfloat16,
    values: Callable[[int], torch.Tensor] = torch.randn,
) -> None:
    """Every buffer is the same with the kernels and with the torch reference."""
    torch.manual_seed(1)
    wanted = program.buffers(dtype, base, values)
    buffers = [kernels.put(buffer.clone()) for buffer in wanted]
    tables = [c.levels if c.levels is None else kernels.put(c.levels) for c in streams.codings]
    there = [c._replace(levels=t) for c, t in zip(streams.codings, tables, strict=True)]
    Operations(program.tasks).run(buffers, Streams(there, streams.rotations))
    with patch.dict(reference._RUN_NUMEL, cpu=8192):  # as if the tensors were large
        Operations(program.tasks).run(wanted, streams, backend="torch")
    for found, expected in zip(buffers, wanted, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def encodes(codecs: Sequence[Codec], *, block: int = 0, flips: bool = False) -> list[Operation]:
    return [
        Encode(codec, numel, X, WIRE, stream, block, flips)
        for stream, codec in enumerate(codecs)
        for numel in NUMELS
    ]


@pytest.mark.parametrize("dtype, block, flips", TURNED)
def test_encode(kernels, dtype: torch.dtype, block: int, flips: bool) -> None:
    codecs, how = (*codecs_in(block), *codecs_in(block)), {"block": block, "flips": flips}
    check(kernels, Program(encodes(codecs, **how)), streams_of(codecs, **how), dtype)


@pytest.mark.parametrize("base", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_encode_differences(kernels, dtype: torch.dtype, base: torch.dtype) -> None:
    """Beside pieces that are encoded as they are; base values lie elsewhere than the new ones."""
    codecs = [codec for codec in CODECS if isinstance(codec, GroupCodec)]
    found = [op._replace(base=BASE if i % 2 else None) for i, op in enumerate(encodes(codecs))]
    check(kernels, Program(found), streams_of(codecs, block=0, flips=False), dtype, base)


@pytest.mark.parametrize("add", (False, True))
def test_decode(kernels, add: bool) -> None:
    found = [
        Decode(codec, numel, ARRIVED, OUT, stream, add)
        for stream, codec in enumerate(CODECS + CODECS)
        for numel in NUMELS
        if not (add and isinstance(codec, CastCodec))
    ]
    check(kernels, Program(found), streams_of(CODECS + CODECS, block=0, flips=False))


@pytest.mark.parametrize("dtype, block, flips", [*TURNED, (DTYPES[0], 128, OWN_SIGNS)])
@pytest.mark.parametrize("place, scale", [(None, 1 / 3), (0, 1.0), (2, 0.25)])
def test_sum(kernels, place, dtype, block: int, flips: int, scale: float) -> None:
    codecs = codecs_in(block)
    found = [
        Sum(codec, numel, ARRIVED, OUT, stream, 2, 0, place, OWN, block, flips, scale)
        for stream, codec in enumerate(codecs)
        for numel in NUMELS
    ]
    check(kernels, Program(found), streams_of(codecs, block=block, flips=flips), dtype)


@pytest.mark.parametrize("place", (None, 1))
@pytest.mark.parametrize(
    "source, codec, block",
    [
        *((*pair, block) for pair in RECODED for block in (0, 32)),
        (INT4, GAUSSIAN[1], 128),
        (GAUSSIAN[2], GAUSSIAN[0], 128),
    ],
)
def test_recode(kernels, source: Codec, codec: Codec, place: int | None, block: int) -> None:
    found = [Recode(source, codec, n, ARRIVED, WIRE, 0, 3, 0, place, OWN, block) for n in NUMELS]
    (coding,) = streams_of([codec], block=0, flips=False).codings
    streams = Streams([coding._replace(levels=LEVELS if codec is LEARNED else None)], [None])
    values = torch.randn  # casts differ in the bits of a NaN
    if isinstance(codec, GroupCodec):
        values = lambda numel: awkward(numel, 128, sorted(KINDS), seed=numel)  # noqa: E731
    check(kernels, Program(found), streams, values=values)


@pytest.mark.parametrize("dtype, block, flips", TURNED)
def test_values_that_stay_are_made_beside_encoded_ones(
    kernels, dtype: torch.dtype, block: int, flips: bool
) -> None:
    codec, before = GAUSSIAN[1] if block == 128 else INT4, len(kernels.macros)
    found = encodes((codec, codec), block=block, flips=flips)
    for stream in range(2):
        for numel in (*NUMELS, 20_000):
            found.append(Rotate(codec, numel, X, SUMS, stream, block, flips))
    check(kernels, Program(found), streams_of((codec, codec), block=block, flips=flips), dtype)
    assert kernels.name == "native" or not block or len(kernels.macros) == before + 1


@pytest.mark.parametrize("place", (None, 1))
@pytest.mark.parametrize("codec", (INT4, GAUSSIAN[1], BF16), ids=str)
def test_sums_that_stay_are_made_beside_recoded_ones(kernels, codec: Codec, place) -> None:
    found, source = [], BF16 if codec is BF16 else INT8
    for size in (128, 640, 640, 4096):
        how = {"wire_in": ARRIVED, "stream": 0, "sources": 3, "stride": 0, "place": place}
        found.append(Recode(source, codec, size, wire=WIRE, own=OWN, **how))
        stays = Sum(source, size, values=SUMS, own=OWN, beside=codec, **how)
        found += [stays, stays._replace(numel=size - 5), stays._replace(beside=None, scale=0.5)]
    check(kernels, Program(found), streams_of([codec], block=0, flips=False))
    launches = sum("DSQ_SOURCES" in macros for macros in kernels.macros)  # not of casts
    assert kernels.name == "native" or launches == (0 if codec is BF16 else 2)


@pytest.mark.parametrize("codec", (INT4, INT8, GAUSSIAN[1], BF16, FP32), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_address_of_values(kernels, dtype: torch.dtype, codec: Codec) -> None:
    """Rows of several warps and of less than one at every distance from a multiple of 16 bytes."""
    block, found, skews = 128 * (codec is GAUSSIAN[1]), [], []
    for skew in range(16 // dtype.itemsize):
        for numel in (5000 + 8 * skew, 8192, 100 + skew):
            here = [Encode(codec, numel, X, WIRE, 0, block), Decode(codec, numel, ARRIVED, OUT, 0)]
            here.append(Sum(codec, numel, ARRIVED, OUT, 0, 1, 0, 1, OWN, block))
            if codec in (INT4, INT8):
                here.append(Encode(codec, numel, X, WIRE, 0, base=BASE))
                here.append(Decode(codec, numel, ARRIVED, OUT, 0, True))
            found, skews = found + here, skews + [skew] * len(here)
    streams = streams_of([codec], block=128, flips=False)
    check(kernels, Program(found, skews), streams, dtype, dtype)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_all_sources_of_a_sum_may_be_one_row(backend: str) -> None:
    """As the rehearsal has them."""
    codec = GroupCodec(bits=8, group_size=128, range="absmax")
    wire, once = torch.zeros(1, codec.wire_bytes(256)).byte(), torch.zeros(1, 256)
    sums = torch.zeros(256)
    encode(codec, torch.randn(1, 256), wire)
    decode(codec, wire, once)
    how = {"sources": 4, "stride": 0, "place": None, "own": 1}
    task = Sum(codec, 256, 0, 1, 0, **how), (0, 0, 0)
    Operations([task]).run([wire[0], sums], Streams([Coding(codec)], [None]), backend=backend)
    assert torch.equal(sums, 4 * once[0])


def test_pieces_at_equal_distances_become_rows() -> None:
    """Two nodes of three ranks: the shards of a gradient in the messages to each of them."""
    operation = Encode(INT4, 50, 0, 1, 0)
    tasks = [
        (operation, (50 * (3 * node + local), 1000 * local + 64 * node, 800 * (3 * node + local)))
        for local in range(3)
        for node in range(2)
    ]
    (rows,) = rows_of(tasks, 2)
    assert (rows.places, rows.shape) == ((0, 0, 0), (3, 2))
    assert rows.steps == ((50, 1000, 800), (150, 64, 2400))
    backwards = rows_of([tasks[0], *tasks[::-1]], 1)
    assert all(step >= 0 for found in backwards for step in found.steps[0])
    ragged = [*tasks[:-1], (operation._replace(numel=49), tasks[-1][1])]
    assert [found.shape for found in rows_of(ragged, 2)] == [(2, 2), (1, 1), (1, 1)]


@needs.native_kernels
def test_threads_that_share_a_plan_do_not_mix_their_buffers() -> None:
    """Two engines in two threads gather tensors of equal sizes: they share what decodes them."""
    codec, ranks, width = GroupCodec(range="absmax", group_size=128), 4, 50_000
    decoding = _shard_message(((codec, ranks * width),), ranks, 0, None)._decode

    def wrong(seed: int) -> int:
        x = torch.randn(ranks, width, generator=torch.Generator().manual_seed(seed))
        wire = torch.empty(ranks, codec.wire_bytes(width), dtype=torch.uint8)
        encode(codec, x, wire)
        wanted = torch.empty_like(x)
        decode(codec, wire, wanted)
        differing = 0
        for _ in range(150):
            found = torch.zeros(ranks * width)
            decoding.run([wire.view(-1), found], Streams([Coding(codec)], [None]))
            differing += not torch.equal(found, wanted.view(-1))
        return differing

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(wrong, range(4))) == [0] * 4
