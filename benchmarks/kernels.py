"""Speed of the CUDA kernels beside a copy, torch, torch.compile, Triton and DeepSpeed's kernels.

    python benchmarks/kernels.py                                # 4 kB to 2 GB, every operation
    python benchmarks/kernels.py --max-bytes 1e8 --codecs int4 --json kernels.json --plot k.png
    python benchmarks/kernels.py --device cpu --max-bytes 1e6   # dry run: torch only, no figures

Sizes are bytes that an operation reads and writes. Times are medians of CUDA events around single
calls behind a busy device, with tensors rotating through more than the second-level cache; a copy
of as many bytes is measured in the same run, share is its time divided by the operation's. Launch
overhead is the host's time for a call on a tiny tensor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from operations import CODECS, LOSSLESS, SOURCES, UNIT, Bench, Operation, absmax
from report import provenance

from ds_quant.codec.lossless import DTYPES as LOSSLESS_DTYPES
from ds_quant.kernels import dispatch

SMALLEST = 4096  # bytes
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RIVALS = ("torch", "compile", "triton", "deepspeed")
_SLEEP_CYCLES = 2_000_000  # about 1 ms: the device works while the host queues


def sizes(smallest: int, largest: int) -> list[int]:
    """Powers of 8 times the smallest, and the largest."""
    found, size = [], smallest
    while size < largest:
        found.append(size)
        size *= 8
    return [*found, largest]


def operations(bench: Bench, nbytes: int, dtype: torch.dtype, filter_: str):
    """Makers of every operation that moves about `nbytes`; one at a time, as memory is short."""

    def numel_for(bytes_per_element: float) -> int:
        return max(UNIT, int(nbytes / bytes_per_element) // UNIT * UNIT)

    for codec in CODECS:
        if filter_ not in codec.name:
            continue
        width = codec.bits / 8
        numel = numel_for(dtype.itemsize + width)
        yield lambda codec=codec, numel=numel: bench.encode(codec, numel, dtype)
        yield lambda codec=codec, numel=numel: bench.decode(codec, numel, dtype)
        if codec.range == "minmax":
            continue
        yield lambda codec=codec, numel=numel: bench.encode(codec, numel, dtype, rotate=True)
        numel = numel_for(dtype.itemsize + SOURCES * width)
        yield lambda codec=codec, numel=numel: bench.decode(codec, numel, dtype, SOURCES)
        numel = numel_for(SOURCES * width + 0.5)
        target = codec if codec.is_gaussian else absmax(4, codec.group_size, "stochastic")
        yield lambda codec=codec, numel=numel, to=target: bench.recode(codec, to, numel)
    if filter_ in LOSSLESS.name and dtype in LOSSLESS_DTYPES:
        for name in ("encode", "decode"):  # a difference has about 3 bits
            numel = numel_for(2 * dtype.itemsize + 0.4)
            yield lambda name=name, numel=numel: bench.lossless(name, numel, dtype)


def seconds_of(work: Callable[[int], object], num_sets: int, repeats: int, cuda: bool) -> float:
    """Median time of a call."""
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
    torch.cuda._sleep(_SLEEP_CYCLES)
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
    copies.append(seconds_of(copy.ways["copy"], copy.num_sets, repeats, cuda))
    for way, work in found.ways.items():
        # A slow way at a large size needs no more repeats than show its order.
        count = max(3, repeats // 4) if way in ("torch", "deepspeed") else repeats
        times[way] = seconds_of(work, found.num_sets, count, cuda)
    copies.append(seconds_of(copy.ways["copy"], copy.num_sets, repeats, cuda))
    copy_seconds = min(copies)
    base = {"operation": found.name, "codec": found.codec, "dtype": found.dtype}
    base |= {"numel": found.numel, "bytes": found.nbytes, "copy_seconds": copy_seconds}
    return [
        base
        | {
            "way": way,
            "seconds": seconds,
            "gb_per_s": found.nbytes / seconds / 1e9,
            "share_of_copy": copy_seconds / seconds,
        }
        for way, seconds in times.items()
    ] + [base | {"way": way, "why_not": reason} for way, reason in found.why_not.items()]


def launch_overhead(bench: Bench, calls: int) -> dict[str, float]:
    """Host seconds per call of tiny operations, without waiting for the device."""
    codec, found = CODECS[0], {}
    for operation in (
        bench.encode(codec, UNIT, torch.bfloat16),
        bench.decode(codec, UNIT, torch.bfloat16),
    ):
        for way, work in operation.ways.items():
            samples = []
            for _ in range(max(calls // 200, 1)):  # the queue of a device holds about 1000
                if bench.device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(200):
                    work(0)
                samples.append((time.perf_counter() - start) / 200)
            found[f"{operation.name} {way}"] = statistics.median(samples)
    return found


def plot(rows: list[dict], path: Path) -> None:
    """Share of copy against bytes, a panel per operation; dotted: not ours."""
    from ds_quant.tools import plot_style

    rows = [row for row in rows if "seconds" in row and row["way"] in ("cuda", "triton")]
    names = sorted({row["operation"] for row in rows}) or ["nothing measured"]
    figure, panels = plot_style.pyplot().subplots(
        1, len(names), figsize=(6 * len(names), 4.5), squeeze=False, layout="constrained"
    )
    for name, panel in zip(names, panels[0], strict=True):
        series: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["operation"] == name:
                label = f"{row['way']} {row['codec']} {row['dtype']}"
                series.setdefault(label, []).append((row["bytes"], row["share_of_copy"]))
        for label, points in series.items():
            style = "-" if label.startswith("cuda") else ":"
            panel.plot(*zip(*sorted(points), strict=True), style, label=label, marker=".")
        panel.set(xscale="log", xlabel="bytes read and written", title=name, ylim=(0, 1.3))
        panel.set_ylabel("share of the copy's speed")
        plot_style.finish(panel)
        plot_style.label_lines(panel)
    plot_style.save(figure, path)


def line(row: dict) -> str:
    head = f"{row['operation']:<18}{row['codec']:<34}{row['dtype']:<5}{row['bytes']:>12} B  "
    if "why_not" in row:
        return f"{head}{row['way']:<10}{row['why_not']}"
    times = f"{row['seconds'] * 1e6:>11.1f} us {row['gb_per_s']:>8.1f} GB/s"
    return f"{head}{row['way']:<10}{times}  {row['share_of_copy']:.2f} of copy"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run of the script")
    add("--min-bytes", type=float, default=SMALLEST)
    add("--max-bytes", type=float, default=2e9)
    add("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    add("--codecs", default="", help="only codecs whose name contains this")
    add("--rivals", nargs="*", choices=RIVALS, default=["torch", "triton"])
    add("--repeats", type=int, default=20)
    add("--overhead", action="store_true", help="only the launch overhead")
    add("--limit", type=float, default=480, help="seconds after which no operation is started")
    add("--json", type=Path, help="write provenance, settings and rows here")
    add("--plot", type=Path, help="write a picture here")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict:
    """All rows, largest sizes first: what the bars are about comes before the time is up.

    The file is written anew after every operation, for whoever ends this before it is done.
    """
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        if dispatch.cuda_runner(device, "auto") is None:
            raise SystemExit("kernels.py: CuPy does not work here; the warning above says why")
    bench = Bench(device, cache_bytes(device), tuple(args.rivals))
    deadline = time.monotonic() + args.limit
    settings = {key: str(value) for key, value in vars(args).items()}
    document = {"provenance": provenance(), "settings": settings}
    with torch.no_grad():
        overhead = launch_overhead(bench, 2000 if args.device == "cuda" else 200)
        document |= {"launch_overhead_s": overhead, "rows": [], "operations_skipped_for_time": 0}
        for make in work_of(args, bench):
            if time.monotonic() > deadline:
                document["operations_skipped_for_time"] += 1
                continue
            found = measure(make(), bench, args.repeats)
            print("\n".join(map(line, found)), flush=True)
            document["rows"] += found
            write(args.json, document)
    for name, seconds in overhead.items():
        print(f"launch overhead, {name}: {seconds * 1e6:.1f} us")
    write(args.json, document)
    return document


def work_of(args: argparse.Namespace, bench: Bench) -> Iterator[Callable[[], Operation]]:
    """Makers of all operations, in the order in which they are measured."""
    if args.overhead:
        return
    for nbytes in reversed(sizes(int(args.min_bytes), int(args.max_bytes))):
        for name in args.dtypes:
            yield from operations(bench, nbytes, DTYPES[name], args.codecs)


def cache_bytes(device: torch.device) -> int:
    """Of the second-level cache."""
    if device.type != "cuda":
        return 1 << 20
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)


def write(path: Path | None, document: dict) -> None:
    """Replace the file as a whole: it may be read, or this program ended, at any moment."""
    if path is not None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        beside.replace(path)


def main() -> None:
    args = parse_args()
    document = run(args)
    if args.plot:
        plot(document["rows"], args.plot)


if __name__ == "__main__":
    main()
