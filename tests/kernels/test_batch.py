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
from ds_quant.kernels.batch import OWN_SIGNS, Decode, Encode, Recode, Rotate, Sum, Task, rows_of
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


def check(
    kernels, tasks: Sequence[Task], make: Callable[[], list[torch.Tensor]], streams: Streams
) -> None:
    """Every buffer is the same with the kernels and with the torch reference."""
    torch.manual_seed(1)
    wanted = make()
    buffers = [kernels.put(buffer.clone()) for buffer in wanted]
    tables = [c.levels if c.levels is None else kernels.put(c.levels) for c in streams.codings]
    there = [c._replace(levels=t) for c, t in zip(streams.codings, tables, strict=True)]
    Operations(tasks).run(buffers, Streams(there, streams.rotations))
    with patch.dict(reference._RUN_NUMEL, cpu=8192):  # as if the tensors were large
        Operations(tasks).run(wanted, streams, backend="torch")
    for found, expected in zip(buffers, wanted, strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def encodes(codecs: Sequence[Codec], *, block: int = 0, flips: bool = False) -> list[Task]:
    """Pieces of several sizes; those of equal size lie at equal distances."""
    tasks, values, wire = [], 0, 0
    for stream, codec in enumerate(codecs):
        for numel in NUMELS:
            operation = Encode(codec, numel, 0, 1, stream, block, flips)
            tasks.append((operation, (values, wire, 16 * values)))
            values += numel + 12
            wire += codec.wire_bytes(operation.on_wire)
    return tasks


def buffers_for(tasks: Sequence[Task], dtype: torch.dtype) -> list[torch.Tensor]:
    numel = max(places[0] + task.numel for task, places in tasks)
    nbytes = sum(task.codec.wire_bytes(task.on_wire) for task, _ in tasks)
    return [torch.randn(numel).to(dtype), torch.full((nbytes,), 7, dtype=torch.uint8)]


@pytest.mark.parametrize("dtype, block, flips", TURNED)
def test_encode(kernels, dtype: torch.dtype, block: int, flips: bool) -> None:
    codecs = (*codecs_in(block), *codecs_in(block))
    tasks = encodes(codecs, block=block, flips=flips)
    streams = streams_of(codecs, block=block, flips=flips)
    check(kernels, tasks, lambda: buffers_for(tasks, dtype), streams)


@pytest.mark.parametrize("base_dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_encode_differences(kernels, dtype: torch.dtype, base_dtype: torch.dtype) -> None:
    """Beside pieces that are encoded as they are; base values lie elsewhere than the new ones."""
    codecs = [codec for codec in CODECS if isinstance(codec, GroupCodec)]
    tasks = []
    for index, (operation, (values, wire, vector)) in enumerate(encodes(codecs)):
        if index % 2:
            operation = operation._replace(base=2)
            tasks.append((operation, (values, wire, vector, 5 + values)))
        else:
            tasks.append((operation, (values, wire, vector)))

    def make() -> list[torch.Tensor]:
        values, wire = buffers_for(tasks, base_dtype)
        base = torch.randn(values.numel() + 5).to(base_dtype)
        return [values.to(dtype), wire, base]

    check(kernels, tasks, make, streams_of(codecs, block=0, flips=False))


def arrived(
    codecs: Sequence[Codec],
    numels: Sequence[int],
    sources: int,
    values: Callable[[int], torch.Tensor] = torch.randn,
) -> torch.Tensor:
    """Rows of all sources, with a slot per codec and size."""
    rows = []
    for _ in range(sources):
        for place, codec in enumerate(codecs):
            for numel in numels:
                wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
                coding = streams_of(codecs, block=0, flips=False).codings[place]
                where = {"address": coding.address, "levels": coding.levels}
                encode(codec, values(numel)[None], wire[None], **where)
                rows.append(wire)
    return torch.cat(rows)


@pytest.mark.parametrize("add", (False, True))
def test_decode(kernels, add: bool) -> None:
    codecs, tasks, values, wire = CODECS + CODECS, [], 0, 0
    for stream, codec in enumerate(codecs):
        for numel in NUMELS:
            if add and isinstance(codec, CastCodec):
                continue
            tasks.append((Decode(codec, numel, 0, 1, stream, add), (wire, values)))
            values, wire = values + numel, wire + codec.wire_bytes(numel)
    sent = [codec for codec in codecs if not (add and isinstance(codec, CastCodec))]

    def make() -> list[torch.Tensor]:
        return [arrived(sent, NUMELS, 1), torch.randn(values).bfloat16()]

    check(kernels, tasks, make, streams_of(codecs, block=0, flips=False))


@pytest.mark.parametrize("dtype, block, flips", [*TURNED, (DTYPES[0], 128, OWN_SIGNS)])
@pytest.mark.parametrize("place, scale", [(None, 1 / 3), (0, 1.0), (2, 0.25)])
def test_sum(kernels, place, dtype, block: int, flips: int, scale: float) -> None:
    tasks, out, own, wire = [], 0, 0, 0
    codecs = codecs_in(block)
    sizes = [round_up(numel, block or 1) for numel in NUMELS]
    row = sum(codec.wire_bytes(size) for codec in codecs for size in sizes)
    for stream, codec in enumerate(codecs):
        for numel, size in zip(NUMELS, sizes, strict=True):
            operation = Sum(
                codec, numel, wire_in=0, values=2, stream=stream, sources=2, stride=row,
                place=place, own=1, block=block, flips=flips, scale=scale,
            )  # fmt: skip
            tasks.append((operation, (wire, out, own)))
            out, own, wire = out + numel, own + round_up(size, 8), wire + codec.wire_bytes(size)

    def make() -> list[torch.Tensor]:
        return [arrived(codecs, sizes, 2), torch.randn(own), torch.zeros(out, dtype=dtype)]

    check(kernels, tasks, make, streams_of(codecs, block=block, flips=flips))


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
    tasks, own, read, written = [], 0, 0, 0
    sizes = [round_up(numel, block or 1) for numel in NUMELS]
    row = sum(source.wire_bytes(size) for size in sizes)
    for numel, size in zip(NUMELS, sizes, strict=True):
        operation = Recode(
            source, codec, numel, wire_in=0, wire=2, stream=0, sources=3, stride=row,
            place=place, own=1, block=block,
        )  # fmt: skip
        tasks.append((operation, (read, written, own, 16 * own)))
        own, read = own + round_up(size, 8), read + source.wire_bytes(size)
        written += codec.wire_bytes(size)
    (coding,) = streams_of([codec], block=0, flips=False).codings
    streams = Streams([coding._replace(levels=LEVELS if codec is LEARNED else None)], [None])

    def make() -> list[torch.Tensor]:
        values = torch.randn  # casts differ in the bits of a NaN
        if isinstance(codec, GroupCodec):
            values = lambda numel: awkward(numel, 128, sorted(KINDS), seed=numel)  # noqa: E731
        wire = torch.full((written,), 7, dtype=torch.uint8)
        return [arrived([source], sizes, 3, values), torch.randn(own), wire]

    check(kernels, tasks, make, streams)


@pytest.mark.parametrize("dtype, block, flips", TURNED)
def test_values_that_stay_are_made_beside_encoded_ones(
    kernels, dtype: torch.dtype, block: int, flips: bool
) -> None:
    codec = GAUSSIAN[1] if block == 128 else INT4
    tasks = [
        (op._replace(wire=2), places)
        for op, places in encodes((codec, codec), block=block, flips=flips)
    ]
    written = sum(op.codec.wire_bytes(op.on_wire) for op, _ in tasks)
    values, rotated = max(places[0] + op.numel for op, places in tasks), 0
    for stream in range(2):
        for numel in (*NUMELS, 20_000):
            rotation = Rotate(codec, numel, 0, 1, stream, block, flips)
            tasks.append((rotation, (stream + numel % 9, rotated)))
            rotated += round_up(rotation.padded, 8)

    def make() -> list[torch.Tensor]:
        x = torch.randn(max(values, 20_010)).to(dtype)
        return [x, torch.zeros(rotated), torch.full((written,), 7, dtype=torch.uint8)]

    before = len(kernels.macros)
    check(kernels, tasks, make, streams_of((codec, codec), block=block, flips=flips))
    assert kernels.name == "native" or not block or len(kernels.macros) == before + 1


@pytest.mark.parametrize("place", (None, 1))
@pytest.mark.parametrize("codec", (INT4, GAUSSIAN[1], BF16), ids=str)
def test_sums_that_stay_are_made_beside_recoded_ones(kernels, codec: Codec, place) -> None:
    sizes, tasks, own, read, written = (128, 640, 640, 4096), [], 0, 0, 0
    source = BF16 if codec is BF16 else INT8
    row, total = sum(source.wire_bytes(size) for size in sizes), sum(sizes)
    for size in sizes:
        how = {"wire_in": 0, "stream": 0, "sources": 3, "stride": row, "place": place, "own": 1}
        tasks.append((Recode(source, codec, size, wire=2, **how), (read, written, own, 16 * own)))
        sum_of = Sum(source, size, values=3, beside=codec, **how)
        tasks.append((sum_of, (read, own, own)))
        tasks.append((sum_of._replace(numel=size - 5), (read, total + own, own)))
        tasks.append((sum_of._replace(beside=None, scale=0.5), (read, 2 * total + own, own)))
        own, read = own + size, read + source.wire_bytes(size)
        written += codec.wire_bytes(size)

    def make() -> list[torch.Tensor]:
        wire = torch.full((written,), 7, dtype=torch.uint8)
        return [arrived([source], sizes, 3), torch.randn(own), wire, torch.zeros(3 * total)]

    check(kernels, tasks, make, streams_of([codec], block=0, flips=False))
    launches = sum("DSQ_SOURCES" in macros for macros in kernels.macros)  # not of casts
    assert kernels.name == "native" or launches == (0 if codec is BF16 else 2)


@pytest.mark.parametrize("codec", (INT4, INT8, GAUSSIAN[1], BF16, FP32), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_address_of_values(kernels, dtype: torch.dtype, codec: Codec) -> None:
    """Rows of several warps and of less than one at every distance from a multiple of 16 bytes."""
    block, streams = 128 * (codec is GAUSSIAN[1]), streams_of([codec], block=128, flips=False)
    encoded, decoded, values, wire = [], [], 0, 0
    for skew in range(16 // dtype.itemsize):
        for numel in (5000 + 8 * skew, 8192, 100 + skew):
            start, op = values + skew, Encode(codec, numel, 0, 1, 0, block)
            encoded.append((op, (start, wire, 16 * start)))
            decoded.append((Decode(codec, numel, 0, 1, 0), (wire, start)))
            how = {"sources": 1, "stride": 0, "place": 1, "own": 2, "block": block}
            decoded.append((Sum(codec, numel, 0, 3, 0, **how), (wire, start, values)))
            if codec in (INT4, INT8):
                encoded.append((op._replace(block=0, wire=2, base=3), (*encoded[-1][1], start)))
                decoded.append((Decode(codec, numel, 0, 4, 0, True), (wire, start)))
            values, wire = values + round_up(numel + 16, 128), wire + codec.wire_bytes(op.on_wire)

    def numbers() -> torch.Tensor:
        return torch.randn(values).to(dtype)

    def messages() -> list[torch.Tensor]:
        written = torch.full((wire,), 7, dtype=torch.uint8)
        return [numbers(), written, written.clone(), numbers()]

    check(kernels, encoded, messages, streams)
    sent = messages()
    Operations(encoded).run(sent, streams, backend="torch")
    check(
        kernels,
        decoded,
        lambda: [sent[1], numbers(), torch.randn(values), numbers(), numbers()],
        streams,
    )


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
