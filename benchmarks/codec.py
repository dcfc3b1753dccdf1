"""Speed, error and bytes of the codecs on this machine, beside a copy of the same bytes.

    python benchmarks/codec.py                                  # 16M elements, one thread
    python benchmarks/codec.py --numel 4096 --codecs int4 --json codec.json

One row per codec and input dtype. Every repeat runs encode, copy and decode of all rows
once, so that noise falls on all alike; times are minima, medians go into the JSON file. A copy of
the same bytes moves as many bytes as the codec reads and writes; x copy is the time of that copy
divided by the codec's. Bits and bytes are those of the wire, the error is |y - x|^2 / |x|^2 on
Gaussian data.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results_schema import CodecRow

from ds_quant.codec.codec import CAST_NAMES, CastCodec, Codec, GroupCodec
from ds_quant.kernels import dispatch
from ds_quant.kernels.random_bits import Role, address

DTYPES = {name: dtype for dtype, name in CAST_NAMES.items()}
WHERE = address(seed=0, role=Role.GRADIENTS, step=1, parameter=0)
COLUMNS = ("input", "codec", "encode ms", "Gelem/s", "x copy", "decode ms", "Gelem/s", "x copy")
COLUMNS += ("error", "wire bytes", "bits")


def all_codecs() -> list[Codec]:
    """The codecs of the table: the presets' ones, and the widths in between."""
    codecs: list[Codec] = [CastCodec(), CastCodec(torch.float32)]
    codecs += [GroupCodec(range="absmax", group_size=size) for size in (128, 1024, 2048)]
    codecs += [GroupCodec(rounding=r) for r in ("nearest", "random_shift", "stochastic")]
    codecs += [GroupCodec(bits=bits) for bits in range(7, 1, -1)]
    codecs += [GroupCodec(bits=4, rounding="stochastic")]
    codecs += [
        GroupCodec(bits=4, range="absmax", group_size=size, rounding="stochastic")
        for size in (128, 1024, 2048)
    ]
    codecs += [GroupCodec(bits=4, levels="learned")]
    return codecs


class Case:
    """A codec on one input, with the samples of its three timings.

    pool: bytes for the wire and the copies, shared by all cases; out: (1, numel) like x.
    """

    def __init__(self, codec: Codec, x: torch.Tensor, out: torch.Tensor, pool: torch.Tensor):
        self.codec, self.x, self.out = codec, x, out  # x: (1, numel)
        self.nbytes = codec.wire_bytes(x.shape[1])
        wire = pool[: self.nbytes].view(1, -1)
        half = (x.nbytes + self.nbytes) // 2  # a copy reads and writes: 2 * half bytes in all
        source, target = pool[self.nbytes :][: 2 * half].view(2, half)
        self.work: dict[str, Callable[[], object]] = {
            "encode": lambda: codec.encode(x, wire, address=WHERE),
            "copy": lambda: target.copy_(source),
            "decode": lambda: codec.decode(wire, out),
        }
        self.samples: dict[str, list[float]] = {name: [] for name in self.work}
        self.squared_error = 0.0

    def warm_up(self) -> None:
        """One untimed run, which also gives the error."""
        for work in self.work.values():
            work()
        self.squared_error = relative_squared_error(self.x[0], self.out[0])

    def run(self) -> None:
        """One sample of each timing."""
        for name, work in self.work.items():
            start = time.perf_counter()
            work()
            self.samples[name].append(time.perf_counter() - start)

    def row(self) -> CodecRow:
        """What the samples say."""
        numel = self.x.shape[1]
        best = {name: min(samples) for name, samples in self.samples.items()}
        middle = {name: statistics.median(samples) for name, samples in self.samples.items()}
        return CodecRow(
            input=CAST_NAMES[self.x.dtype],
            codec=self.codec.name,
            encode_s=best["encode"],
            encode_median_s=middle["encode"],
            encode_gelem_s=numel / best["encode"] / 1e9,
            encode_copy_ratio=best["copy"] / best["encode"],
            decode_s=best["decode"],
            decode_median_s=middle["decode"],
            decode_gelem_s=numel / best["decode"] / 1e9,
            decode_copy_ratio=best["copy"] / best["decode"],
            squared_error=self.squared_error,
            wire_bytes=self.nbytes,
            bits_per_element=self.nbytes * 8 / numel,
        )


def relative_squared_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """|y - x|^2 / |x|^2 of two (numel,) tensors, summed in fp64."""
    error = norm = 0.0
    for part, decoded in zip(x.split(1 << 20), y.split(1 << 20), strict=True):
        error += float((decoded.double() - part.double()).square().sum())
        norm += float(part.double().square().sum())
    return error / norm


def measure(cases: list[Case], repeats: int) -> list[CodecRow]:
    """Rows of all cases, after one untimed round, variants interleaved."""
    for case in cases:
        case.warm_up()
    for _ in range(repeats):
        for case in cases:
            case.run()
    return [case.row() for case in cases]


def make_cases(codecs: list[Codec], dtypes: list[torch.dtype], numel: int) -> list[Case]:
    """Every codec on every dtype of the same Gaussian numbers."""
    normal = torch.randn(1, numel, generator=torch.Generator().manual_seed(0))
    largest = 4 * numel + 4096  # bytes of an input, and more than those of any wire
    pool = torch.ones(3 * largest, dtype=torch.uint8)
    cases = []
    for dtype in dtypes:
        x, out = normal.to(dtype), torch.empty(1, numel, dtype=dtype)
        cases += [Case(codec, x, out, pool) for codec in codecs]
    return cases


def environment(threads: int) -> dict[str, str | int]:
    """What a number needs beside it."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "kernels": dispatch.describe(torch.device("cpu")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def cells(row: CodecRow) -> list[str]:
    """The row as text, in the order of COLUMNS."""
    timings = []
    for kind in ("encode", "decode"):
        seconds, speed, ratio = (
            getattr(row, f"{kind}_{name}") for name in ("s", "gelem_s", "copy_ratio")
        )
        timings += [f"{seconds * 1e3:.3g}", f"{speed:.3f}", f"{ratio:.2f}"]
    error, bits = f"{row.squared_error:.1e}", f"{row.bits_per_element:.3f}"
    return [row.input, row.codec, *timings, error, str(row.wire_bytes), bits]


def show(rows: list[CodecRow]) -> None:
    """Print the table, with rich where it is installed."""
    lines = [cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [COLUMNS, *lines]) for i in range(len(COLUMNS))]
        for line in [COLUMNS, *lines]:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(*COLUMNS)
    for column in table.columns[2:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    Console(width=None if Console().is_terminal else 140).print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements (default 2^24)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--codecs", default="", help="only codecs whose name contains this")
    parser.add_argument("--json", type=Path, help="write environment, arguments and rows here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_args()
    torch.set_num_threads(arguments.threads)
    print(", ".join(f"{key} {value}" for key, value in environment(arguments.threads).items()))
    print(f"{arguments.numel} Gaussian elements, minimum of {arguments.repeats} interleaved runs")
    chosen = [codec for codec in all_codecs() if arguments.codecs in codec.name]
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    rows = measure(make_cases(chosen, dtypes, arguments.numel), arguments.repeats)
    show(rows)
    if arguments.json:
        settings = {"numel": arguments.numel, "repeats": arguments.repeats, "data": "gaussian"}
        report = {
            "environment": environment(arguments.threads),
            "settings": settings,
            "rows": [row.model_dump() for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
