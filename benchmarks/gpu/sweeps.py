"""Times kernel variants against each other: layouts of stores, tables, lengths; or runs five once.

    python benchmarks/gpu/sweeps.py --sweep stores --json stores.json
    python benchmarks/gpu/sweeps.py --sweep five               # each once, for a profiler
    python benchmarks/gpu/sweeps.py --sweep stores --device cpu --bytes 1e5   # dry run, torch only

stores   decode and decode_sum with runs of 1, 2, 4 and 8 vectors, with and without staging
tables   64 tensors as 64 launches and as one table
ragged   a row that fills whole blocks, and one that is 5 elements longer

Rows as those of kernels.py; the file is written anew after every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kernels import cache_bytes, line, measure, write
from operations import UNIT, Bench, Operation, absmax

from ds_quant.codec.bound import Coding, decode, decode_sum, encode
from ds_quant.kernels import dispatch, launch
from ds_quant.kernels.batch import Recode
from ds_quant.kernels.geometry import Stores, runs_of
from ds_quant.kernels.launch import merge
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.reference import BlockRotation
from ds_quant.kernels.run import Operations, Streams

ADDRESS = Address(key=1, step=1)
INT4, INT4_2048, INT8 = absmax(4, 128, "stochastic"), absmax(4, 2048, "stochastic"), absmax(8, 128)
TENSORS = 64  # of a table
BF16, FP32 = torch.bfloat16, torch.float32

Maker = Callable[[], Operation]


def numel_for(nbytes: float, bytes_per_element: float) -> int:
    return max(UNIT, int(nbytes / bytes_per_element) // UNIT * UNIT)


def stores(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Every way to write of rows and sums, in bf16 and fp32."""
    for codec, sources in ((INT4, 1), (INT4, 8), (INT4_2048, 8), (INT8, 8), (INT8, 1)):
        for dtype in (BF16, FP32):
            numel = numel_for(nbytes, dtype.itemsize + sources * codec.bits / 8)
            ways = [
                Stores(run, staged) for run in runs_of(codec.group_size) for staged in (False, True)
            ]
            yield (
                lambda codec=codec, sources=sources, dtype=dtype, numel=numel, ways=ways: (
                    bench.stores(codec, numel, dtype, sources, ways)
                )
            )


def tables(bench: Bench, nbytes: float) -> Iterator[Maker]:
    """Encode and decode_sum of many tensors, one by one and as a table made beforehand."""
    numel = numel_for(nbytes / TENSORS, 2.5)
    for kind in ("encode", "decode_sum of 8"):
        for size in (numel, UNIT, 1000):
            yield lambda kind=kind, size=size: many(bench, kind, size)


def many(bench: Bench, kind: str, numel: int) -> Operation:
    """TENSORS tensors of `numel` elements."""
    sources = 8 if kind != "encode" else 1
    row = INT4.wire_bytes(numel)
    nbytes = TENSORS * (2 * numel + sources * row)
    found = Operation(f"{TENSORS} x {kind}", INT4.name, "bf16", TENSORS * numel, nbytes, 1)
    # Rows at multiples of 16 bytes, as those of a bucket.
    room = -(-numel // 8) * 8
    values = torch.randn(TENSORS, room, device=bench.device).to(BF16)[:, :numel]
    wire = torch.zeros(TENSORS, sources, row, dtype=torch.uint8, device=bench.device)
    run = dispatch.cuda_runner(bench.device, "auto")

    def collect(take: Callable) -> None:
        for x, rows in zip(values, wire, strict=True):
            if sources == 1:
                launch.encode(x[None], rows, INT4, address=ADDRESS, levels=None, run=take)
            else:
                launch.decode_sum(rows, x, INT4, scale=1.0, levels=None, run=take)

    if run is None:
        found.why_not["one by one"] = "no CUDA kernels here"
        return found
    launches: list = []
    collect(launches.append)
    (table,) = merge(launches)
    buffer = torch.frombuffer(bytearray(table.written), dtype=torch.uint8).to(bench.device)
    found.offer("one by one", lambda: lambda _: [run(work) for work in launches])
    found.offer("table", lambda: lambda _: run.run_table(table, buffer))
    found.offer("table, copied", lambda: lambda _: run.run_many(launches))
    return found


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


def five(device: torch.device, nbytes: float) -> None:
    """Five kernels once each, for a profiler; on the CPU the reference's operations."""
    numel = numel_for(nbytes, 8)
    x = torch.randn(1, numel, device=device).to(BF16)
    wire = torch.empty(8, INT4.wire_bytes(numel), dtype=torch.uint8, device=device)
    out = torch.empty(1, numel, dtype=BF16, device=device)
    for row in wire:
        encode(INT4, x, row[None], address=ADDRESS)
    rotation = BlockRotation(32)
    encode(INT4, x, wire[:1], address=ADDRESS, rotation=rotation)
    decode(INT4, wire[:1], out)
    total = torch.empty(numel, device=device)
    decode_sum(INT4, wire, total)
    again = Recode(INT4, INT4, numel, 0, 1, 0, 8, wire.stride(0), None, 0)
    streams = Streams([Coding(INT4, ADDRESS)], [None])
    Operations([(again, (0, 0, 0, 0))]).run([wire, wire[0].clone()], streams)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sweep", choices=(*SWEEPS, "five"), required=True)
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run, nothing to time")
    add("--bytes", type=float, default=5e8, help="that an operation reads and writes")
    add("--repeats", type=int, default=20)
    add("--limit", type=float, default=120, help="seconds after which no operation is started")
    add("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.sweep == "five":
        five(device, args.bytes)
        return
    deadline, rows, skipped = time.monotonic() + args.limit, [], 0
    bench = Bench(device, cache_bytes(device), ())
    with torch.no_grad():
        for make in SWEEPS[args.sweep](bench, args.bytes):
            if time.monotonic() > deadline:
                skipped += 1
                continue
            found = measure(make(), bench, args.repeats)
            print("\n".join(map(line, found)), flush=True)
            rows += found
            write(args.json, {"rows": rows, "operations_skipped_for_time": skipped})
    write(args.json, {"rows": rows, "operations_skipped_for_time": skipped})


if __name__ == "__main__":
    main()
