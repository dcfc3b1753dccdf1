"""Speed of the kernels beside a copy and the torch reference.

    python benchmarks/kernels.py                                # 4 kB to 2 GB, every operation
    python benchmarks/kernels.py --max-bytes 1e8 --codecs int4 --json kernels.json
    python benchmarks/kernels.py --device cpu --max-bytes 1e6   # C++ and torch on this machine

Sizes are bytes that an operation reads and writes. Times are medians of CUDA events around single
calls behind a busy device, with tensors rotating through more than the second-level cache; a copy
of as many bytes is measured in the same run, share is its time divided by the operation's. Launch
overhead is the host's time for a call on a tiny tensor, and on tables of 2 to 180 of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import report
import torch

from ds_quant.codec.bound import BoundCodec, Rotation, encode
from ds_quant.codec.codec import CAST_NAMES, GroupCodec
from ds_quant.kernels import dispatch, lossless
from ds_quant.kernels.batch import Decode, Encode, Recode, Sum, Task
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up

SMALLEST = 4096  # bytes
DTYPES = {name: dtype for dtype, name in CAST_NAMES.items()}
WAYS = ("auto", "torch")
SOURCES = 8  # rows of decode_sum and recode
UNIT = 1 << 14  # sizes are multiples of it: whole blocks
ADDRESS = Address(key=1, step=1)
JOBS = (2, 16, 64, 180)  # of a table: up to what the arguments of one launch hold
SLEEP_CYCLES = 100_000  # about 50 us for every launch: the device works while the host queues
QUEUE = 512  # launches that are queued at once; a device takes about 1000


def absmax(bits: int, group_size: int, rounding: str = "nearest") -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


CODECS = (
    absmax(4, 128, "stochastic"),
    absmax(4, 2048, "stochastic"),
    absmax(8, 128),
    absmax(4, 2048),
    GroupCodec(bits=8, group_size=1024, rounding="random_shift"),
    GroupCodec(bits=4, group_size=1024, rounding="stochastic"),
    GroupCodec(bits=4, group_size=1024, levels="learned"),
    GroupCodec(bits=3, group_size=128, range="gaussian"),
)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on one size. ways: calls on the set of tensors of a number, of which there are
    ``sets``, so that no run finds its input in a cache; nbytes: read and written by a call, which
    makes ``launches``.
    """

    name: str
    codec: str
    dtype: str
    numel: int
    nbytes: int
    sets: int
    ways: dict[str, Callable[[int], object]]
    launches: int = 1


Maker = Callable[[], Operation]


class Bench:
    """Makes operations on one device. ways: back ends; cache_bytes: of the second-level cache."""

    def __init__(self, device: torch.device, cache_bytes: int, ways: Sequence[str] = WAYS) -> None:
        self.device, self.cache_bytes, self.ways = device, cache_bytes, ways

    def tasks(
        self, name: str, codec: str, tasks: Sequence[Task], buffers: list[torch.Tensor]
    ) -> Operation:
        """All tasks in one call; they use every buffer once."""
        first, nbytes = tasks[0][0], sum(buffer.nbytes for buffer in buffers)
        sets = [buffers]
        sets += [[b.clone() for b in buffers] for _ in range(1, self._sets(nbytes))]
        rotation = Rotation(block=first.block) if getattr(first, "block", 0) else None
        streams = RngState([BoundCodec(first.codec, ADDRESS)], [rotation])
        runs = {way: Operations(tasks) for way in self.ways}
        return Operation(
            name=name, codec=codec, numel=sum(task.numel for task, _ in tasks), nbytes=nbytes,
            dtype=next((CAST_NAMES[b.dtype] for b in buffers if b.dtype in CAST_NAMES), "-"),
            sets=len(sets),
            ways={
                way: lambda i, way=way: runs[way].run(sets[i], streams, backend=way)
                for way in self.ways
            },
        )  # fmt: skip

    def encode(self, codec: GroupCodec, numel: int, dtype: torch.dtype, block: int = 0):
        """numel values -> wire bytes; block: of a rotation."""
        buffers = [self.random(numel, dtype), self.bytes(codec.wire_bytes(numel))]
        name = "rotate and encode" if block else "encode"
        return self.tasks(
            name, codec.name, [(Encode(codec, numel, 0, 1, 0, block), (0, 0, 0))], buffers
        )

    def table(self, codec: GroupCodec, numel: int, dtype: torch.dtype, jobs: int) -> Operation:
        """Encode so many tensors in one launch."""
        tasks, buffers = self.many(codec, numel, dtype, jobs)
        return self.tasks(f"encode of {jobs} tensors", codec.name, tasks, buffers)

    def many(
        self, codec: GroupCodec, numel: int, dtype: torch.dtype, count: int
    ) -> tuple[list[Task], list[torch.Tensor]]:
        """Return encodes of ``count`` tensors at multiples of 16 bytes, as those of a bucket, and
        their buffers. Every second one is an element shorter: equal ones would be rows of one job.
        """
        row, room = codec.wire_bytes(numel), round_up(numel, VECTOR_NUMEL)
        buffers = [self.random(count * room, dtype), self.bytes(count * row)]
        tasks = [
            (Encode(codec, numel - i % 2, 0, 1, 0), (i * room, i * row, 0)) for i in range(count)
        ]
        return tasks, buffers

    def decode(self, codec: GroupCodec, numel: int, dtype: torch.dtype, sources: int = 1):
        """``sources`` rows -> numel values, their sum."""
        buffers = [self.wire(codec, numel, sources), torch.empty_like(self.random(numel, dtype))]
        task = Decode(codec, numel, 0, 1, 0), (0, 0)
        if sources > 1:
            task = _sum(codec, numel, sources), (0, 0, 0)
        name = "decode" if sources == 1 else f"decode_sum of {sources}"
        return self.tasks(name, codec.name, [task], buffers)

    def recode(self, source: GroupCodec, codec: GroupCodec, numel: int):
        """Rows -> wire bytes of their sum."""
        buffers = [self.wire(source, numel, SOURCES), self.bytes(codec.wire_bytes(numel))]
        operation = Recode(
            source, codec, numel, 0, 1, 0, SOURCES, source.wire_bytes(numel), None, 0
        )
        label = f"{source.name} -> {codec.name}"
        return self.tasks(f"recode of {SOURCES}", label, [(operation, (0, 0, 0, 0))], buffers)

    def lossless(self, name: str, numel: int, dtype: torch.dtype) -> Operation:
        """encode: weights against those before a step at 3e-4 -> a message; decode: back."""
        before = self.random(numel, torch.float32) * 0.02
        values = before + 0.3 * 3e-4 * self.random(numel, torch.float32, seed=1)
        values, before = values.to(dtype), before.to(dtype)
        room, used = self.bytes(lossless.max_bytes(numel)), self.bytes(8).view(torch.int64)
        dispatch.encode_lossless([(values, before, room)], used)
        message = room[: used.item()].clone()
        nbytes = 2 * values.nbytes + message.numel()
        sets = self._sets(nbytes)
        olds, news, wires = (
            x.expand(sets, -1).clone()
            for x in (before, values, room if name == "encode" else message)
        )

        def way(backend: str) -> Callable[[int], object]:
            if name == "encode":
                return lambda i: dispatch.encode_lossless(
                    [(news[i], olds[i], wires[i])], used, backend=backend
                )
            start, length = np.zeros(1, dtype=np.int64), np.array([message.numel()])
            status = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
            return lambda i: dispatch.decode_lossless(
                wires[i], start, length, olds[i, None], news[i, None], status, backend=backend
            )

        return Operation(
            name=name, codec="lossless", dtype=CAST_NAMES[dtype], numel=numel, nbytes=nbytes,
            sets=sets, ways={each: way(each) for each in self.ways},
        )  # fmt: skip

    def copy(self, nbytes: int) -> Operation:
        """Read and write ``nbytes`` bytes together."""
        half, sets = max(nbytes // 2, 16), self._sets(nbytes)
        pool = self.bytes(2 * sets * half).view(2, sets, half)
        return Operation(
            name="copy", codec="-", dtype="-", numel=half, nbytes=2 * half, sets=sets,
            ways={"copy": lambda i: pool[1, i].copy_(pool[0, i])},
        )  # fmt: skip

    def random(self, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(numel, generator=generator, device=self.device, dtype=dtype)

    def bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def wire(self, codec: GroupCodec, numel: int, rows: int) -> torch.Tensor:
        """Rows of random values, one behind the other."""
        row = self.bytes(codec.wire_bytes(numel))
        encode(codec, self.random(numel, torch.float32)[None], row[None], address=ADDRESS)
        return row.repeat(rows)

    def _sets(self, nbytes: int) -> int:
        """How many sets of tensors exceed the cache twice, at most 64."""
        return min(64, 2 * self.cache_bytes // max(nbytes, 1) + 1)


def _sum(codec: GroupCodec, numel: int, sources: int) -> Sum:
    row = codec.wire_bytes(numel)
    return Sum(codec, numel, 0, 1, 0, sources=sources, stride=row, place=None, own=1)


def operations(bench: Bench, nbytes: int, dtype: torch.dtype, chosen: str):
    """Makers of every operation that moves about `nbytes`; one at a time, as memory is short."""

    def numel_for(bytes_per_element: float) -> int:
        return max(UNIT, int(nbytes / bytes_per_element) // UNIT * UNIT)

    for codec in CODECS:
        if chosen not in codec.name:
            continue
        width = codec.bits / 8
        numel = numel_for(dtype.itemsize + width)
        yield lambda codec=codec, numel=numel: bench.encode(codec, numel, dtype)
        yield lambda codec=codec, numel=numel: bench.decode(codec, numel, dtype)
        if codec.range == "minmax":
            continue
        block = 128 if codec.is_gaussian else 32
        yield lambda codec=codec, numel=numel, n=block: bench.encode(codec, numel, dtype, n)
        numel = numel_for(dtype.itemsize + SOURCES * width)
        yield lambda codec=codec, numel=numel: bench.decode(codec, numel, dtype, SOURCES)
        numel = numel_for(SOURCES * width + 0.5)
        target = codec if codec.is_gaussian else absmax(4, codec.group_size, "stochastic")
        yield lambda codec=codec, numel=numel, to=target: bench.recode(codec, to, numel)
    if chosen in "lossless" and dtype in lossless.EXPONENT:
        for name in ("encode", "decode"):  # a difference has about 3 bits
            numel = numel_for(2 * dtype.itemsize + 0.4)
            yield lambda name=name, numel=numel: bench.lossless(name, numel, dtype)


# ---- times ----


def seconds_of(
    work: Callable[[int], object], num_sets: int, repeats: int, cuda: bool, *, launches: int = 1
) -> float:
    """Median time of a call, which makes so many launches.

    All calls are queued behind a sleep of the device, so that it never waits for the host; of calls
    of many launches there are fewer, as many as the queue takes.
    """
    repeats = max(3, min(repeats, QUEUE // launches))
    work(0)
    if not cuda:
        samples = []
        for i in range(repeats):
            start = time.perf_counter()
            work(i % num_sets)
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES * repeats * launches)
    for i, (before, after) in enumerate(events):
        before.record()
        work(i % num_sets)
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def measure(found: Operation, bench: Bench, repeats: int) -> list[dict]:
    """A row per way, with the copy of the same bytes measured right before and after."""
    cuda = bench.device.type == "cuda"
    copy = bench.copy(found.nbytes)
    copies, times = [], {}
    copies.append(seconds_of(copy.ways["copy"], copy.sets, repeats, cuda))
    for way, work in found.ways.items():
        # The reference at a large size needs no more repeats than show its order.
        count = max(3, repeats // 4) if way == "torch" else repeats
        times[way] = seconds_of(work, found.sets, count, cuda, launches=found.launches)
    copies.append(seconds_of(copy.ways["copy"], copy.sets, repeats, cuda))
    base = {"operation": found.name, "codec": found.codec, "dtype": found.dtype}
    base |= {"numel": found.numel, "bytes": found.nbytes, "copy_seconds": min(copies)}
    return [
        base
        | {
            "way": way,
            "seconds": seconds,
            "gb_per_s": found.nbytes / seconds / 1e9,
            "share_of_copy": min(copies) / seconds,
        }
        for way, seconds in times.items()
    ]


def launch_overhead(bench: Bench, calls: int) -> dict[str, float]:
    """Host seconds per call of tiny operations, without waiting for the device."""
    codec, works = CODECS[0], {}
    for operation in (
        bench.encode(codec, UNIT, torch.bfloat16),
        bench.decode(codec, UNIT, torch.bfloat16),
    ):
        for way, work in operation.ways.items():
            works[f"{operation.name} {way}"] = partial(work, 0)
    for jobs in JOBS if "auto" in bench.ways else ():
        operation = bench.table(codec, codec.group_size, torch.bfloat16, jobs)
        works[operation.name] = partial(operation.ways["auto"], 0)
    return {name: _host_seconds(work, calls, bench.device) for name, work in works.items()}


def _host_seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    samples = []
    for _ in range(max(calls // 200, 1)):  # the queue of a device holds about 1000
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            work()
        samples.append((time.perf_counter() - start) / 200)
    return statistics.median(samples)


# ---- the command ----


def line(row: dict) -> str:
    head = f"{row['operation']:<24}{row['codec']:<34}{row['dtype']:<5}{row['bytes']:>12} B  "
    times = f"{row['seconds'] * 1e6:>11.1f} us {row['gb_per_s']:>8.1f} GB/s"
    return f"{head}{row['way']:<10}{times}  {row['share_of_copy']:.2f} of copy"


def measure_all(
    makers: Iterator[Callable[[], Operation]],
    bench: Bench,
    args: argparse.Namespace,
    document: dict,
) -> None:
    """Give the document a row per operation and way.

    Its file is written anew after every operation, for whoever ends this before it is done.
    """
    deadline = time.monotonic() + args.limit
    document |= {"rows": [], "operations_skipped_for_time": 0}
    with torch.no_grad():
        for make in makers:
            if time.monotonic() > deadline:
                document["operations_skipped_for_time"] += 1
                continue
            found = measure(make(), bench, args.repeats)
            print("\n".join(map(line, found)), flush=True)
            document["rows"] += found
            report.write(args.json, document)
    report.write(args.json, document)


def work_of(args: argparse.Namespace, bench: Bench) -> Iterator[Maker]:
    """Makers of all operations, largest sizes first: what matters comes before the time is up."""
    if args.overhead:
        return
    sizes = [int(args.max_bytes)]
    while sizes[-1] > 8 * args.min_bytes:
        sizes.append(sizes[-1] // 8)
    for nbytes in (*sizes, *([int(args.min_bytes)] if args.min_bytes < sizes[-1] else [])):
        for name in args.dtypes:
            yield from operations(bench, nbytes, DTYPES[name], args.codecs)


def device_of(args: argparse.Namespace) -> torch.device:
    """Exits where CUDA kernels are wanted and do not work."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda" and dispatch.cuda_runner(device, "auto") is None:
        raise SystemExit("kernels.py: CuPy does not work here; the warning above says why")
    return device


def cache_bytes(device: torch.device) -> int:
    """Of the second-level cache."""
    if device.type != "cuda":
        return 1 << 20
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)


def add_options(parser: argparse.ArgumentParser, limit: float) -> Callable:
    """Options that sweeps.py has, too."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--repeats", type=int, default=20)
    add("--limit", type=float, default=limit, help="seconds after which no operation is started")
    add("--json", type=Path, help="write provenance, settings and rows here")
    return add


def main() -> None:
    parser = report.parser(__doc__)
    add = add_options(parser, limit=480)
    add("--min-bytes", type=float, default=SMALLEST)
    add("--max-bytes", type=float, default=2e9)
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    add("--codecs", default="", help="only codecs whose name contains this")
    add("--ways", nargs="*", choices=WAYS, default=list(WAYS), help="back ends")
    add("--overhead", action="store_true", help="only the launch overhead")
    args = parser.parse_args()
    device = device_of(args)
    bench = Bench(device, cache_bytes(device), args.ways)
    with torch.no_grad():
        overhead = launch_overhead(bench, 2000 if args.device == "cuda" else 200)
    for name, seconds in overhead.items():
        print(f"launch overhead, {name}: {seconds * 1e6:.1f} us")
    settings = {key: str(value) for key, value in vars(args).items()}
    document = {
        "provenance": report.provenance(),
        "settings": settings,
        "launch_overhead_s": overhead,
    }
    measure_all(work_of(args, bench), bench, args, document)


if __name__ == "__main__":
    main()
