"""Speed of the kernels beside a copy and the torch reference.

    python benchmarks/kernels.py                                # 4 kB to 2 GB, every operation
    python benchmarks/kernels.py --max-bytes 1e8 --codecs int4 --json kernels.json
    python benchmarks/kernels.py --device cpu --max-bytes 1e6   # C++ and torch on this machine

A size is the bytes that an operation reads and writes. A time is the median of CUDA events around
single calls that are queued behind a busy device. Calls rotate through more tensors than the L2
cache holds. A copy of as many bytes is timed in the same run; share is its time divided by the
operation's. Launch overhead is the host time of a call, on one tiny tensor or a table of 2 to 180.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch

from ds_quant.codec.bound import BoundCodec, Rotation, encode
from ds_quant.codec.codec import CAST_NAMES, CastCodec, Codec, GroupCodec
from ds_quant.kernels import dispatch, lossless
from ds_quant.kernels.batch import Decode, Encode, Offsets, Recode, Sum, Task
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.kernels.random_bits import Address
from ds_quant.kernels.wire import VECTOR_NUMEL, round_up

SMALLEST = 4096  # bytes
DTYPES = {name: dtype for dtype, name in CAST_NAMES.items()}
BACKENDS = ("auto", "torch")
SOURCES = 8  # rows that a decode_sum and a recode add up
UNIT = 1 << 14  # sizes are multiples of it: whole blocks of a rotation
ADDRESS = Address(key=1, step=1)
TABLE_SIZES = (2, 16, 64, 180)  # jobs of a table; 180 fit the arguments of one launch
SLEEP_CYCLES = 100_000  # about 50 us per call: the device sleeps while the host queues
OVERHEAD_CALLS = 200  # per sample of the launch overhead
MAX_SETS = 64  # of tensors


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
EXACT = CastCodec()  # of tensors that are not quantized

Call = Callable[[int], object]  # runs an operation on the set of tensors with this index


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation at one size.

    nbytes: bytes that a call reads and writes.
    sets: sets of tensors that calls rotate through, so that no input is still in a cache.
    ways: a call per back end.
    """

    name: str
    codec: str
    dtype: str
    numel: int
    nbytes: int
    sets: int
    ways: dict[str, Call]


Maker = Callable[[], Operation]


class Bench:
    """Makes operations on one device.

    cache_bytes: size of the L2 cache.
    ways: back ends to run.
    """

    def __init__(
        self, device: torch.device, cache_bytes: int, ways: Sequence[str] = BACKENDS
    ) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.ways = ways

    def tasks(
        self,
        name: str,
        codec: Codec,
        tasks: Sequence[Task],
        buffers: list[torch.Tensor],
        label: str | None = None,
    ) -> Operation:
        """Return the operation that runs all tasks in one call. They use every buffer once.

        codec: codec of the tasks; its learned levels and random bits are bound to their stream.
        label: name of the codec in the results, by default its own.
        """
        nbytes = sum(buffer.nbytes for buffer in buffers)
        buffer_sets = [buffers]
        for _ in range(1, self._sets(nbytes)):
            buffer_sets.append([buffer.clone() for buffer in buffers])
        rng_state = RngState([BoundCodec(codec, ADDRESS)], [_rotation_of(tasks[0])])
        return Operation(
            name=name,
            codec=label or codec.name,
            dtype=_dtype_name(buffers),
            numel=sum(operation.numel for operation, _ in tasks),
            nbytes=nbytes,
            sets=len(buffer_sets),
            ways={
                backend: _run_of(Operations(tasks), buffer_sets, rng_state, backend)
                for backend in self.ways
            },
        )

    def encode(self, codec: Codec, numel: int, dtype: torch.dtype, block: int = 0) -> Operation:
        """Encode `numel` values. block: elements of a rotation block, 0: no rotation."""
        buffers = [self.random(numel, dtype), self.bytes(codec.wire_bytes(numel))]
        name = "rotate and encode" if block else "encode"
        operation = Encode(codec, numel, values=0, wire=1, stream=0, block=block)
        return self.tasks(name, codec, [(operation, Offsets())], buffers)

    def table(self, codec: GroupCodec, numel: int, dtype: torch.dtype, jobs: int) -> Operation:
        """Encode `jobs` tensors in one launch."""
        tasks, buffers = self.many(codec, numel, dtype, jobs)
        return self.tasks(f"encode of {jobs} tensors", codec, tasks, buffers)

    def many(
        self, codec: GroupCodec, numel: int, dtype: torch.dtype, count: int
    ) -> tuple[list[Task], list[torch.Tensor]]:
        """Return the encodes of ``count`` tensors, aligned to 16 bytes as in a bucket, and buffers.

        Every second tensor is one element shorter, because equal ones would be rows of one job.
        """
        wire_bytes = codec.wire_bytes(numel)
        room = round_up(numel, VECTOR_NUMEL)
        buffers = [self.random(count * room, dtype), self.bytes(count * wire_bytes)]
        tasks: list[Task] = []
        for index in range(count):
            operation = Encode(codec, numel - index % 2, values=0, wire=1, stream=0)
            tasks.append((operation, Offsets(values=index * room, wire=index * wire_bytes)))
        return tasks, buffers

    def decode(self, codec: Codec, numel: int, dtype: torch.dtype, sources: int = 1) -> Operation:
        """Decode a row, or the sum of several: ``sources`` rows -> `numel` values."""
        buffers = [self.wire(codec, numel, sources), torch.empty_like(self.random(numel, dtype))]
        if sources == 1:
            decode = Decode(codec, numel, wire=0, values=1, stream=0)
            return self.tasks("decode", codec, [(decode, Offsets())], buffers)
        decode_sum = sum_of(codec, numel, sources, codec.wire_bytes(numel))
        return self.tasks(f"decode_sum of {sources}", codec, [(decode_sum, Offsets())], buffers)

    def recode(self, source: GroupCodec, codec: GroupCodec, numel: int) -> Operation:
        """Encode the sum of SOURCES rows."""
        buffers = [self.wire(source, numel, SOURCES), self.bytes(codec.wire_bytes(numel))]
        operation = Recode(
            source,
            codec,
            numel,
            wire_in=0,
            wire=1,
            stream=0,
            sources=SOURCES,
            stride=source.wire_bytes(numel),
            own_row=None,
            own=0,
        )
        return self.tasks(
            f"recode of {SOURCES}",
            codec,
            [(operation, Offsets())],
            buffers,
            label=f"{source.name} -> {codec.name}",
        )

    def lossless(self, name: str, numel: int, dtype: torch.dtype) -> Operation:
        """Encode the change of weights by a step at 3e-4 ("encode"), or decode it ("decode")."""
        before = self.random(numel, torch.float32) * 0.02
        values = before + 0.3 * 3e-4 * self.random(numel, torch.float32, seed=1)
        values, before = values.to(dtype), before.to(dtype)
        room = self.bytes(lossless.max_bytes(numel))
        used = self.bytes(8).view(torch.int64)  # bytes of the message
        dispatch.encode_lossless([(values, before, room)], used)
        message = room[: int(used)].clone()
        nbytes = 2 * values.nbytes + message.numel()
        sets = self._sets(nbytes)
        old_values = before.expand(sets, -1).clone()
        new_values = values.expand(sets, -1).clone()
        wires = (room if name == "encode" else message).expand(sets, -1).clone()
        starts = np.zeros(1, dtype=np.int64)
        lengths = np.array([message.numel()])
        status = torch.zeros(1, 2, dtype=torch.int32, device=self.device)

        def encode(backend: str, index: int) -> None:
            dispatch.encode_lossless(
                [(new_values[index], old_values[index], wires[index])], used, backend=backend
            )

        def decode(backend: str, index: int) -> None:
            dispatch.decode_lossless(
                wires[index],
                starts,
                lengths,
                old_values[index, None],
                new_values[index, None],
                status,
                backend=backend,
            )

        run = encode if name == "encode" else decode
        return Operation(
            name=name,
            codec="lossless",
            dtype=CAST_NAMES[dtype],
            numel=numel,
            nbytes=nbytes,
            sets=sets,
            ways={backend: partial(run, backend) for backend in self.ways},
        )

    def copy(self, nbytes: int) -> Operation:
        """Copy, reading and writing ``nbytes`` bytes together."""
        half = max(nbytes // 2, 16)
        sets = self._sets(nbytes)
        pool = self.bytes(2 * sets * half).view(2, sets, half)

        def run(index: int) -> None:
            pool[1, index].copy_(pool[0, index])

        return Operation(
            name="copy",
            codec="-",
            dtype="-",
            numel=half,
            nbytes=2 * half,
            sets=sets,
            ways={"copy": run},
        )

    def random(self, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(numel, generator=generator, device=self.device, dtype=dtype)

    def bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def wire(self, codec: Codec, numel: int, rows: int) -> torch.Tensor:
        """Return encoded random values, ``rows`` equal rows end to end."""
        row = self.bytes(codec.wire_bytes(numel))
        encode(codec, self.random(numel, torch.float32)[None], row[None], address=ADDRESS)
        return row.repeat(rows)

    def _sets(self, nbytes: int) -> int:
        """Return the sets of tensors that are twice as large as the cache, at most MAX_SETS."""
        return min(MAX_SETS, 2 * self.cache_bytes // max(nbytes, 1) + 1)


def sum_of(codec: Codec, numel: int, sources: int, stride: int) -> Sum:
    """Return the sum of rows ``stride`` bytes apart: wire 0 -> values 1."""
    return Sum(
        codec,
        numel,
        wire_in=0,
        values=1,
        stream=0,
        sources=sources,
        stride=stride,
        own_row=None,
        own=1,
    )


def _rotation_of(task: Task) -> Rotation | None:
    operation, _ = task
    if isinstance(operation, Decode) or not operation.block:
        return None
    return Rotation(block=operation.block)


def _dtype_name(buffers: Sequence[torch.Tensor]) -> str:
    """Return the dtype of the first buffer that holds numbers."""
    for buffer in buffers:
        if buffer.dtype in CAST_NAMES:
            return CAST_NAMES[buffer.dtype]
    return "-"


def _run_of(
    operations: Operations,
    buffer_sets: Sequence[Sequence[torch.Tensor]],
    rng_state: RngState,
    backend: str,
) -> Call:
    def run(index: int) -> None:
        operations.run(buffer_sets[index], rng_state, backend=backend)

    return run


def numel_for(nbytes: float, bytes_per_element: float) -> int:
    """Return about as many elements as ``nbytes`` holds, whole units, at least one."""
    return max(UNIT, int(nbytes / bytes_per_element) // UNIT * UNIT)


def operations(bench: Bench, nbytes: int, dtype: torch.dtype, chosen: str) -> Iterator[Maker]:
    """Return makers of every operation that moves about ``nbytes``: memory holds one at a time."""
    for codec in CODECS:
        if chosen not in codec.name:
            continue
        wire_bytes = codec.bits / 8  # of an element
        numel = numel_for(nbytes, dtype.itemsize + wire_bytes)
        yield partial(bench.encode, codec, numel, dtype)
        yield partial(bench.decode, codec, numel, dtype)
        if codec.range == "minmax":
            continue
        block = 128 if codec.is_gaussian else 32
        yield partial(bench.encode, codec, numel, dtype, block)
        numel = numel_for(nbytes, dtype.itemsize + SOURCES * wire_bytes)
        yield partial(bench.decode, codec, numel, dtype, SOURCES)
        numel = numel_for(nbytes, SOURCES * wire_bytes + 0.5)
        target = codec if codec.is_gaussian else absmax(4, codec.group_size, "stochastic")
        yield partial(bench.recode, codec, target, numel)
    if chosen in EXACT.name:
        yield partial(bench.encode, EXACT, numel_for(nbytes, dtype.itemsize + 2), dtype)
        numel = numel_for(nbytes, dtype.itemsize + SOURCES * 2)
        yield partial(bench.decode, EXACT, numel, dtype, SOURCES)
    if chosen in "lossless" and dtype in lossless.EXPONENT:
        numel = numel_for(nbytes, 2 * dtype.itemsize + 0.4)  # a difference has about 3 bits
        for name in ("encode", "decode"):
            yield partial(bench.lossless, name, numel, dtype)


# ---- times ----


def seconds_of(work: Call, num_sets: int, repeats: int, cuda: bool) -> float:
    """Return the median seconds of a call.

    On CUDA all calls are queued while the device sleeps, so it never waits for the host.
    """
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
    torch.cuda._sleep(SLEEP_CYCLES * repeats)
    for i, (before, after) in enumerate(events):
        before.record()
        work(i % num_sets)
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def measure(operation: Operation, bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """Return a row per back end. A copy of the same bytes is timed right before and after."""
    cuda = bench.device.type == "cuda"
    copy = bench.copy(operation.nbytes)
    seconds_of_copies = []
    seconds_of_backends = {}
    seconds_of_copies.append(seconds_of(copy.ways["copy"], copy.sets, repeats, cuda))
    for backend, work in operation.ways.items():
        # Few repeats show how much slower the reference is.
        count = max(3, repeats // 4) if backend == "torch" else repeats
        seconds_of_backends[backend] = seconds_of(work, operation.sets, count, cuda)
    seconds_of_copies.append(seconds_of(copy.ways["copy"], copy.sets, repeats, cuda))
    copy_seconds = min(seconds_of_copies)
    return [
        {
            "operation": operation.name,
            "codec": operation.codec,
            "dtype": operation.dtype,
            "numel": operation.numel,
            "bytes": operation.nbytes,
            "copy_seconds": copy_seconds,
            "way": backend,
            "seconds": seconds,
            "gb_per_s": operation.nbytes / seconds / 1e9,
            "share_of_copy": copy_seconds / seconds,
        }
        for backend, seconds in seconds_of_backends.items()
    ]


def launch_overhead(bench: Bench, calls: int) -> dict[str, float]:
    """Return the host seconds per call of tiny operations, without waits for the device."""
    codec = CODECS[0]
    works: dict[str, Callable[[], object]] = {}
    for operation in (
        bench.encode(codec, UNIT, torch.bfloat16),
        bench.decode(codec, UNIT, torch.bfloat16),
    ):
        for backend, work in operation.ways.items():
            works[f"{operation.name} {backend}"] = partial(work, 0)
    if "auto" in bench.ways:
        for jobs in TABLE_SIZES:
            operation = bench.table(codec, codec.group_size, torch.bfloat16, jobs)
            works[operation.name] = partial(operation.ways["auto"], 0)
    return {name: _host_seconds(work, calls, bench.device) for name, work in works.items()}


def _host_seconds(work: Callable[[], object], calls: int, device: torch.device) -> float:
    samples = []
    for _ in range(max(calls // OVERHEAD_CALLS, 1)):  # the queue of a device holds about 1000
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(OVERHEAD_CALLS):
            work()
        samples.append((time.perf_counter() - start) / OVERHEAD_CALLS)
    return statistics.median(samples)


# ---- the command ----


def line(row: dict[str, Any]) -> str:
    head = f"{row['operation']:<24}{row['codec']:<34}{row['dtype']:<5}{row['bytes']:>12} B  "
    times = f"{row['seconds'] * 1e6:>11.1f} us {row['gb_per_s']:>8.1f} GB/s"
    return f"{head}{row['way']:<10}{times}  {row['share_of_copy']:.2f} of copy"


def measure_all(
    makers: Iterator[Maker],
    bench: Bench,
    args: argparse.Namespace,
    document: dict[str, Any],
) -> None:
    """Measure all operations. Add a row per operation and back end to the document.

    The file is replaced after every operation: a run that is ended leaves the rows it has.
    """
    deadline = time.monotonic() + args.limit
    document["rows"] = []
    document["operations_skipped_for_time"] = 0
    with torch.no_grad():
        for make in makers:
            if time.monotonic() > deadline:
                document["operations_skipped_for_time"] += 1
                continue
            rows = measure(make(), bench, args.repeats)
            print("\n".join(map(line, rows)), flush=True)
            document["rows"] += rows
            report.write(args.json, document)
    report.write(args.json, document)


def work_of(args: argparse.Namespace, bench: Bench) -> Iterator[Maker]:
    """Return makers of all operations, largest sizes first: time may end before the small ones."""
    sizes = [int(args.max_bytes)]
    while sizes[-1] > 8 * args.min_bytes:
        sizes.append(sizes[-1] // 8)
    if args.min_bytes < sizes[-1]:
        sizes.append(int(args.min_bytes))
    for nbytes in sizes:
        for name in args.dtypes:
            yield from operations(bench, nbytes, DTYPES[name], args.codecs)


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device of --device. Exit if it is CUDA and its kernels do not work."""
    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if dispatch.cuda_runner(device, "auto") is None:
        raise SystemExit("kernels.py: CuPy does not work here; the warning above says why")
    return device


def cache_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache."""
    if device.type != "cuda":
        return 1 << 20
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)


def add_options(parser: argparse.ArgumentParser, limit: float) -> None:
    """Add the options that sweeps.py has too. limit: default of --limit, seconds."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--repeats", type=int, default=20)
    add("--limit", type=float, default=limit, help="seconds after which no operation is started")
    add("--json", type=Path, help="write provenance, settings and rows here")


def main() -> None:
    parser = report.parser(__doc__)
    add_options(parser, limit=480)
    add = parser.add_argument
    add("--min-bytes", type=float, default=SMALLEST)
    add("--max-bytes", type=float, default=2e9)
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    add("--codecs", default="", help="only codecs whose name contains this")
    add("--ways", nargs="*", choices=BACKENDS, default=list(BACKENDS), help="back ends")
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
