"""Times variants of the kernels: layouts of stores, tables, lengths. Or runs five kernels once.

    python benchmarks/gpu/sweeps.py --sweep stores --json stores.json
    python benchmarks/gpu/sweeps.py --sweep five               # each once, for a profiler
    python benchmarks/gpu/sweeps.py --sweep stores --device cpu --bytes 1e5   # dry run

stores   decode and decode_sum with runs of 1, 2, 4 and 8 vectors, with and without staging
tables   64 tensors in 64 calls and in one
ragged   a row that fills whole blocks, and one that is 5 elements longer
forms    the same elements, casts too, as one job and as a table of two jobs
priority a bucket's operations during matrix products, on streams of both priorities

Rows are those of kernels.py. The file is replaced after every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import report
import torch
from kernels import (
    SLEEP_CYCLES,
    UNIT,
    Bench,
    Maker,
    Operation,
    absmax,
    add_options,
    cache_bytes,
    device_of,
    measure_all,
    numel_for,
    sum_of,
)

from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.kernels import launch
from ds_quant.kernels.batch import Encode, Task
from ds_quant.kernels.launch import Stores

INT4 = absmax(4, 128, "stochastic")
INT4_2048 = absmax(4, 2048, "stochastic")
INT8 = absmax(8, 128)
CAST = CastCodec()  # of gathered weights
TENSORS = 64  # of a table
BF16 = torch.bfloat16
FP32 = torch.float32


class DecodeCase(NamedTuple):
    """Arguments of Bench.decode."""

    codec: GroupCodec
    numel: int
    dtype: torch.dtype
    sources: int


def stores(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Every layout of stores, for rows and sums in bf16 and fp32."""
    for codec, sources in ((INT4, 1), (INT4, 8), (INT4_2048, 8), (INT8, 8), (INT8, 1)):
        for dtype in (BF16, FP32):
            numel = numel_for(nbytes, dtype.itemsize + sources * codec.bits / 8)
            case = DecodeCase(codec, numel, dtype, sources)
            runs = [run for run in (1, 2, 4, 8) if codec.group_size % (8 * run) == 0]
            for run, staged in product(runs, (False, True)):
                yield partial(stored, bench, case, Stores(run, staged))


def stored(bench: Bench, case: DecodeCase, stores: Stores) -> Operation:
    """Return a decode or a sum with this layout of stores. Compiles it."""
    operation = bench.decode(case.codec, case.numel, case.dtype, case.sources)
    launch.sum_plan.cache_clear()
    with patch.object(launch, "stores_of", lambda *_: stores):
        operation.ways["auto"](0)
    launch.sum_plan.cache_clear()
    name = f"{operation.name}, run {stores.run}"
    if stores.staged:
        name += " staged"
    return replace(operation, name=name)


def tables(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Encode of many tensors, one by one and all at once."""
    for size in (numel_for(nbytes / TENSORS, 2.5), UNIT, 1000):
        for count in (1, TENSORS):
            yield partial(many, bench, size, count)


def many(bench: Bench, numel: int, at_once: int) -> Operation:
    """Encode TENSORS tensors of `numel` elements, ``at_once`` per call."""
    tasks, buffers = bench.many(INT4, numel, BF16, TENSORS)
    name = f"{TENSORS} x encode, {at_once} at once"
    operations = [
        bench.tasks(name, INT4, tasks[first : first + at_once], buffers)
        for first in range(0, TENSORS, at_once)
    ]

    def run(backend: str, _: int) -> None:
        for operation in operations:
            operation.ways[backend](0)

    return replace(
        operations[0],
        numel=TENSORS * numel,
        sets=1,
        ways={backend: partial(run, backend) for backend in bench.ways},
        launches=len(operations),
    )


def ragged(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Whole blocks, and a few elements more."""
    for codec in (INT4, INT4_2048):
        for extra in (0, 5):
            numel = numel_for(nbytes, 2.5) + extra
            yield partial(bench.encode, codec, numel, BF16)
            yield partial(bench.decode, codec, numel, BF16)
            numel = numel_for(nbytes, 6) + extra
            yield partial(bench.decode, codec, numel, BF16, 8)


def forms(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """The same elements as one job, which has a launch form of its own, and as a table of two."""
    encoded: tuple[tuple[Codec, int], ...] = ((INT4, 0), (INT8, 32), (CAST, 0))
    for codec, block in encoded:
        numel = numel_for(nbytes, 2 + codec.wire_bytes(UNIT) / UNIT)
        for parts in parts_of(numel):
            yield partial(encode_of_parts, bench, codec, parts, block)
    summed: tuple[tuple[Codec, int], ...] = ((INT4, 1), (INT4, 8), (CAST, 8))
    for codec, sources in summed:
        numel = numel_for(nbytes, 4 + sources * codec.wire_bytes(UNIT) / UNIT)
        for parts in parts_of(numel):
            yield partial(sum_of_parts, bench, codec, parts, sources)


def parts_of(numel: int) -> tuple[list[int], list[int]]:
    """Return the sizes of one part and of two. Two equal parts would be rows of one job."""
    units = max(3, numel // UNIT)
    return [units * UNIT], [units // 3 * UNIT, (units - units // 3) * UNIT]


def encode_of_parts(bench: Bench, codec: Codec, parts: list[int], block: int) -> Operation:
    """Encode parts of a row, each a job."""
    tasks: list[Task] = []
    value_offset = 0
    wire_offset = 0
    for numel in parts:
        operation = Encode(codec, numel, values=0, wire=1, stream=0, block=block)
        tasks.append((operation, (value_offset, wire_offset, 0)))
        value_offset += numel
        wire_offset += codec.wire_bytes(numel)
    action = "encode rotated" if block else "encode"
    buffers = [bench.random(value_offset, BF16), bench.bytes(wire_offset)]
    return bench.tasks(f"{action}, {len(parts)} jobs", codec, tasks, buffers)


def sum_of_parts(bench: Bench, codec: Codec, parts: list[int], sources: int) -> Operation:
    """Add up parts of rows in fp32, each a job."""
    total = sum(parts)
    stride = codec.wire_bytes(total)
    tasks: list[Task] = []
    value_offset = 0
    wire_offset = 0
    for numel in parts:
        operation = sum_of(codec, numel, sources, stride)
        tasks.append((operation, (wire_offset, value_offset, 0)))
        value_offset += numel
        wire_offset += codec.wire_bytes(numel)
    buffers = [bench.wire(codec, total, sources), bench.random(total, FP32)]
    return bench.tasks(f"sum of {sources}, {len(parts)} jobs", codec, tasks, buffers)


SWEEPS = {"stores": stores, "tables": tables, "ragged": ragged, "forms": forms}
CHAIN = 5  # dependent operations of a bucket


def priority(bench: Bench, nbytes: float) -> list[dict[str, float | str]]:
    """Return seconds of a bucket's operations and of matrix products that run meanwhile.

    The operations depend on each other and have a stream of their own. They run alone, then with
    products, on streams of both priorities.
    """
    encode = bench.encode(INT8, numel_for(nbytes / 8, 3), BF16).ways["auto"]
    size = 8192 if bench.device.type == "cuda" else 64
    factor = bench.random(size * size, BF16).view(size, size)
    product = torch.empty_like(factor)

    def chain() -> None:
        for _ in range(CHAIN):
            encode(0)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=product)

    chain()
    products(1)
    if bench.device.type != "cuda":
        return [{"name": "none: a CPU has no streams"}]
    rows: list[dict[str, float | str]] = []
    for name, level, count in (("alone", 0, 0), ("normal", 0, 32), ("high", -1, 32)):
        for _ in range(3):
            chain_seconds, products_seconds = side_by_side(chain, partial(products, count), level)
            rows.append(
                {
                    "name": name,
                    "chain_seconds": chain_seconds,
                    "products_seconds": products_seconds,
                }
            )
    return rows


def side_by_side(
    chain: Callable[[], None], products: Callable[[], None], priority: int
) -> tuple[float, float]:
    """Return (chain seconds, products seconds), from the start of the products on.

    The products are queued first. priority: of the chain's stream.
    """
    compute_stream = torch.cuda.Stream()
    chain_stream = torch.cuda.Stream(priority=priority)
    begin = torch.cuda.Event(enable_timing=True)
    computed = torch.cuda.Event(enable_timing=True)
    chained = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(compute_stream):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        begin.record()
        products()
        computed.record()
    with torch.cuda.stream(chain_stream):
        chain_stream.wait_event(begin)
        chain()
        chained.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(chained) / 1e3, begin.elapsed_time(computed) / 1e3


def five(bench: Bench, nbytes: float) -> None:
    """Run five kernels once each, for a profiler."""
    numel = numel_for(nbytes, 8)
    for operation in (
        bench.encode(INT4, numel, BF16),
        bench.encode(INT4, numel, BF16, 32),
        bench.decode(INT4, numel, BF16),
        bench.decode(INT4, numel, FP32, 8),
        bench.recode(INT4, INT4, numel),
    ):
        operation.ways["auto"](0)


def main() -> None:
    parser = report.parser(__doc__)
    add_options(parser, limit=120)
    add = parser.add_argument
    add("--sweep", choices=(*SWEEPS, "priority", "five"), required=True)
    add("--bytes", type=float, default=5e8, help="bytes that an operation reads and writes")
    args = parser.parse_args()
    device = device_of(args)
    bench = Bench(device, cache_bytes(device), ("auto",))
    if args.sweep == "five":
        five(bench, args.bytes)
    elif args.sweep == "priority":
        rows = priority(bench, args.bytes)
        print("\n".join(map(str, rows)))
        report.write(args.json, {"rows": rows})
    else:
        measure_all(SWEEPS[args.sweep](bench, args.bytes), bench, args, {})


if __name__ == "__main__":
    main()
