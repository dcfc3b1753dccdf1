"""Times kernel variants against each other: layouts of stores, tables, lengths; or runs five once.

    python benchmarks/gpu/sweeps.py --sweep stores --json stores.json
    python benchmarks/gpu/sweeps.py --sweep five               # each once, for a profiler
    python benchmarks/gpu/sweeps.py --sweep stores --device cpu --bytes 1e5   # dry run

stores   decode and decode_sum with runs of 1, 2, 4 and 8 vectors, with and without staging
tables   64 tensors as 64 calls and as one
ragged   a row that fills whole blocks, and one that is 5 elements longer
forms    the same elements, casts too, as one job and as a table of two jobs
priority a bucket's operations beside matrix products, on streams of both priorities

Rows as those of kernels.py; the file is written anew after every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
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
)

from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.kernels import launch
from ds_quant.kernels.batch import Encode, Sum
from ds_quant.kernels.launch import Stores

INT4, INT4_2048, INT8 = absmax(4, 128, "stochastic"), absmax(4, 2048, "stochastic"), absmax(8, 128)
CAST = CastCodec()  # as gathered weights are
TENSORS = 64  # of a table
BF16, FP32 = torch.bfloat16, torch.float32


def numel_for(nbytes: float, bytes_per_element: float) -> int:
    return max(UNIT, int(nbytes / bytes_per_element) // UNIT * UNIT)


def stores(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Every way to write of rows and sums, in bf16 and fp32."""
    for codec, sources in ((INT4, 1), (INT4, 8), (INT4_2048, 8), (INT8, 8), (INT8, 1)):
        for dtype in (BF16, FP32):
            numel = numel_for(nbytes, dtype.itemsize + sources * codec.bits / 8)
            plain = codec, numel, dtype, sources
            runs = [run for run in (1, 2, 4, 8) if codec.group_size % (8 * run) == 0]
            for run, staged in product(runs, (False, True)):
                yield partial(stored, bench, plain, Stores(run, staged))


def stored(bench: Bench, plain: tuple, stores: Stores) -> Operation:
    """A decode or a sum that writes in this way: its first call compiles it."""
    found = bench.decode(*plain)
    launch.sum_plan.cache_clear()
    with patch.object(launch, "stores_of", lambda *_: stores):
        found.ways["auto"](0)
    launch.sum_plan.cache_clear()
    return replace(found, name=f"{found.name}, run {stores.run}{' staged' * stores.staged}")


def tables(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Encode of many tensors, one by one and all at once."""
    for size in (numel_for(nbytes / TENSORS, 2.5), UNIT, 1000):
        for count in (1, TENSORS):
            yield lambda size=size, count=count: many(bench, size, count)


def many(bench: Bench, numel: int, at_once: int) -> Operation:
    """TENSORS tensors of `numel` elements."""
    tasks, buffers = bench.many(INT4, numel, BF16, TENSORS)
    name, calls = f"{TENSORS} x encode, {at_once} at once", range(0, TENSORS, at_once)
    found = [bench.tasks(name, INT4.name, tasks[i : i + at_once], buffers) for i in calls]
    ways = {way: lambda i, way=way: [each.ways[way](0) for each in found] for way in bench.ways}
    return replace(found[0], numel=TENSORS * numel, sets=1, ways=ways, launches=len(found))


def ragged(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Whole blocks and a few elements more."""
    for codec in (INT4, INT4_2048):
        for extra in (0, 5):
            numel = numel_for(nbytes, 2.5) + extra
            yield lambda codec=codec, numel=numel: bench.encode(codec, numel, BF16)
            yield lambda codec=codec, numel=numel: bench.decode(codec, numel, BF16)
            numel = numel_for(nbytes, 6) + extra
            yield lambda codec=codec, numel=numel: bench.decode(codec, numel, BF16, 8)


def forms(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """The same elements as one job, whose launch has a form of its own, and as a table of two."""
    for codec, block in ((INT4, 0), (INT8, 32), (CAST, 0)):
        numel = numel_for(nbytes, 2 + codec.wire_bytes(UNIT) / UNIT)
        for parts in parts_of(numel):
            yield partial(encoded, bench, codec, parts, block)
    for codec, sources in ((INT4, 1), (INT4, 8), (CAST, 8)):
        numel = numel_for(nbytes, 4 + sources * codec.wire_bytes(UNIT) / UNIT)
        for parts in parts_of(numel):
            yield partial(added_up, bench, codec, parts, sources)


def parts_of(numel: int) -> tuple[list[int], list[int]]:
    """All of them, and two unequal parts of whole blocks: equal ones would be rows of one job."""
    units = max(3, numel // UNIT)
    return [units * UNIT], [units // 3 * UNIT, (units - units // 3) * UNIT]


def encoded(bench: Bench, codec: Codec, parts: list[int], block: int) -> Operation:
    """Encode parts of a row, each a job."""
    tasks, value, wire = [], 0, 0
    for numel in parts:
        tasks.append((Encode(codec, numel, 0, 1, 0, block), (value, wire, 0)))
        value, wire = value + numel, wire + codec.wire_bytes(numel)
    name = f"encode{' rotated' * bool(block)}, {len(parts)} jobs"
    return bench.tasks(name, codec.name, tasks, [bench.random(value, BF16), bench.bytes(wire)])


def added_up(bench: Bench, codec: Codec, parts: list[int], sources: int) -> Operation:
    """Add up parts of rows in fp32, each a job."""
    total = sum(parts)
    tasks, value, wire, row = [], 0, 0, codec.wire_bytes(total)
    for numel in parts:
        how = {"sources": sources, "stride": row, "place": None, "own": 1}
        tasks.append((Sum(codec, numel, 0, 1, 0, **how), (wire, value, 0)))
        value, wire = value + numel, wire + codec.wire_bytes(numel)
    buffers = [bench.wire(codec, total, sources), bench.random(total, FP32)]
    return bench.tasks(f"sum of {sources}, {len(parts)} jobs", codec.name, tasks, buffers)


SWEEPS = {"stores": stores, "tables": tables, "ragged": ragged, "forms": forms}


CHAIN = 5  # dependent operations of a bucket on its way


def priority(bench: Bench, nbytes: float) -> list[dict[str, float | str]]:
    """Seconds of a bucket's operations, one after the other on a stream of its own: alone, and
    beside matrix products, on streams of both priorities; and of the products meanwhile.
    """
    found = bench.encode(INT8, numel_for(nbytes / 8, 3), BF16).ways["auto"]
    size = 8192 if bench.device.type == "cuda" else 64
    factor = bench.random(size * size, BF16).view(size, size)
    product = torch.empty_like(factor)

    def chain() -> None:
        for _ in range(CHAIN):
            found(0)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor, out=product)

    chain()
    products(1)
    if bench.device.type != "cuda":
        return [{"name": "none: a CPU has no streams"}]
    rows = []
    for name, level, count in (("alone", 0, 0), ("normal", 0, 32), ("high", -1, 32)):
        for _ in range(3):
            rows.append({"name": name, **side_by_side(chain, partial(products, count), level)})
    return rows


def side_by_side(
    chain: Callable[[], None], products: Callable[[], None], level: int
) -> dict[str, float]:
    """Seconds from the begin of the products on, which are queued first."""
    computes, sends = torch.cuda.Stream(), torch.cuda.Stream(priority=level)
    begin, sent, computed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(computes):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        begin.record()
        products()
        computed.record()
    with torch.cuda.stream(sends):
        sends.wait_event(begin)
        chain()
        sent.record()
    torch.cuda.synchronize()
    times = {"chain_seconds": sent, "products_seconds": computed}
    return {name: begin.elapsed_time(end) / 1e3 for name, end in times.items()}


def five(bench: Bench, nbytes: float) -> None:
    """Five kernels once each, for a profiler."""
    numel = numel_for(nbytes, 8)
    for found in (
        bench.encode(INT4, numel, BF16),
        bench.encode(INT4, numel, BF16, 32),
        bench.decode(INT4, numel, BF16),
        bench.decode(INT4, numel, FP32, 8),
        bench.recode(INT4, INT4, numel),
    ):
        found.ways["auto"](0)


def main() -> None:
    parser = report.parser(__doc__)
    add = add_options(parser, limit=120)
    add("--sweep", choices=(*SWEEPS, "priority", "five"), required=True)
    add("--bytes", type=float, default=5e8, help="that an operation reads and writes")
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
