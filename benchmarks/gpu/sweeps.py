"""Times kernel variants against each other: layouts of stores, tables, lengths; or runs five once.

    python benchmarks/gpu/sweeps.py --sweep stores --json stores.json
    python benchmarks/gpu/sweeps.py --sweep five               # each once, for a profiler
    python benchmarks/gpu/sweeps.py --sweep stores --device cpu --bytes 1e5   # dry run

stores   decode and decode_sum with runs of 1, 2, 4 and 8 vectors, with and without staging
tables   64 tensors as 64 calls and as one
ragged   a row that fills whole blocks, and one that is 5 elements longer

Rows as those of kernels.py; the file is written anew after every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import report
import torch
from kernels import (
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

from ds_quant.kernels import launch
from ds_quant.kernels.batch import Encode
from ds_quant.kernels.launch import Stores

INT4, INT4_2048, INT8 = absmax(4, 128, "stochastic"), absmax(4, 2048, "stochastic"), absmax(8, 128)
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
    """TENSORS tensors of `numel` elements at multiples of 16 bytes, as those of a bucket."""
    row, room = INT4.wire_bytes(numel), -(-numel // 8) * 8
    buffers = [bench.random(TENSORS * room, BF16), bench.bytes(TENSORS * row)]
    tasks = [(Encode(INT4, numel - i % 2, 0, 1, 0), (i * room, i * row, 0)) for i in range(TENSORS)]
    name, calls = f"{TENSORS} x encode, {at_once} at once", range(0, TENSORS, at_once)
    found = [bench.tasks(name, INT4.name, tasks[i : i + at_once], buffers) for i in calls]
    ways = {way: lambda i, way=way: [each.ways[way](0) for each in found] for way in bench.ways}
    return replace(found[0], numel=TENSORS * numel, sets=1, ways=ways)


def ragged(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Whole blocks and a few elements more."""
    for codec in (INT4, INT4_2048):
        for extra in (0, 5):
            numel = numel_for(nbytes, 2.5) + extra
            yield lambda codec=codec, numel=numel: bench.encode(codec, numel, BF16)
            yield lambda codec=codec, numel=numel: bench.decode(codec, numel, BF16)
            numel = numel_for(nbytes, 6) + extra
            yield lambda codec=codec, numel=numel: bench.decode(codec, numel, BF16, 8)


SWEEPS = {"stores": stores, "tables": tables, "ragged": ragged}


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
    add("--sweep", choices=(*SWEEPS, "five"), required=True)
    add("--bytes", type=float, default=5e8, help="that an operation reads and writes")
    args = parser.parse_args()
    device = device_of(args)
    bench = Bench(device, cache_bytes(device), ("auto",))
    if args.sweep == "five":
        five(bench, args.bytes)
    else:
        measure_all(SWEEPS[args.sweep](bench, args.bytes), bench, args, {})


if __name__ == "__main__":
    main()
