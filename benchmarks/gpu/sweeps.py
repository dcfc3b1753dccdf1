"""Times the layouts of stores, and kernels beside matrix products. Or runs five kernels once.

    python benchmarks/gpu/sweeps.py --sweep stores --json stores.json
    python benchmarks/gpu/sweeps.py --sweep five               # each once, for a profiler
    python benchmarks/gpu/sweeps.py --sweep stores --device cpu --bytes 1e5   # dry run

stores    decode and decode_sum with runs of 1, 2, 4 and 8 vectors, with and without staging
priority  a bucket's operations during matrix products, on streams of both priorities

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
    Bench,
    Maker,
    Operation,
    absmax,
    add_options,
    cache_bytes,
    device_of,
    measure_all,
    numel_for,
)

from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import launch
from ds_quant.kernels.launch import Stores

INT4 = absmax(4, 128, "stochastic")
INT4_2048 = absmax(4, 2048, "stochastic")
INT8 = absmax(8, 128)
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
    add("--sweep", choices=("stores", "priority", "five"), required=True)
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
        measure_all(stores(bench, args.bytes), bench, args, {})


if __name__ == "__main__":
    main()
