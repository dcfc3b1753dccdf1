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
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import sections
import torch
from rich.console import Console
from rich.table import Table

from ds_quant.codec.bound import decode, encode
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
            "encode": lambda: encode(codec, x, wire, address=WHERE),
            "copy": lambda: target.copy_(source),
            "decode": lambda: decode(codec, wire, out),
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

    def row(self) -> dict[str, Any]:
        """What the samples say."""
        numel = self.x.shape[1]
        best = {name: min(samples) for name, samples in self.samples.items()}
        middle = {name: statistics.median(samples) for name, samples in self.samples.items()}
        row = {"input": CAST_NAMES[self.x.dtype], "codec": self.codec.name}
        for work in ("encode", "decode"):
            row |= {
                f"{work}_s": best[work], f"{work}_median_s": middle[work],
                f"{work}_gelem_s": numel / best[work] / 1e9,
                f"{work}_copy_ratio": best["copy"] / best[work],
            }  # fmt: skip
        return row | {
            "squared_error": self.squared_error, "wire_bytes": self.nbytes,
            "bits_per_element": self.nbytes * 8 / numel,
        }  # fmt: skip


def relative_squared_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """|y - x|^2 / |x|^2 of two (numel,) tensors, summed in fp64."""
    error = norm = 0.0
    for part, decoded in zip(x.split(1 << 20), y.split(1 << 20), strict=True):
        error += float((decoded.double() - part.double()).square().sum())
        norm += float(part.double().square().sum())
    return error / norm


def measure(cases: list[Case], repeats: int) -> list[dict[str, Any]]:
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


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    grid = Table(*COLUMNS)
    for column in grid.columns[2:]:
        column.justify = "right"
    for row in rows:
        timings = [
            cell
            for work in ("encode", "decode")
            for cell in (
                f"{row[f'{work}_s'] * 1e3:.3g}", f"{row[f'{work}_gelem_s']:.3f}",
                f"{row[f'{work}_copy_ratio']:.2f}",
            )
        ]  # fmt: skip
        error, bits = f"{row['squared_error']:.1e}", f"{row['bits_per_element']:.3f}"
        grid.add_row(
            row["input"], row["codec"], *timings, error, str(row["wire_bytes"]), bits
        )  # fmt: skip
    Console(width=None if Console().is_terminal else 140).print(grid)


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py; inputs of the first dtype."""
    first = result["rows"][0]["input"]
    rows = [
        [
            row["codec"], f"{row['encode_gelem_s']:.2f}", f"{row['decode_gelem_s']:.2f}",
            f"{row['encode_copy_ratio']:.2f} / {row['decode_copy_ratio']:.2f}",
            f"{row['squared_error']:.1e}", f"{row['bits_per_element']:.3f}",
        ]
        for row in result["rows"]
        if row["input"] == first
    ]  # fmt: skip
    header = ["codec", "encode Gelem/s", "decode Gelem/s", "share of a copy's speed",
              "squared error", "bits"]  # fmt: skip
    threads = result["arguments"]["threads"]
    return "Codecs", (
        f"Gaussian {first} on {threads} thread, {result['kernels']}, {result['vectors']}. Other\n"
        f"inputs are in the file.\n\n{sections.table(header, rows)}"
    )


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
    print(f"{arguments.numel} Gaussian elements, minimum of {arguments.repeats} interleaved runs")
    chosen = [codec for codec in all_codecs() if arguments.codecs in codec.name]
    dtypes = [DTYPES[name] for name in arguments.dtypes]
    rows = measure(make_cases(chosen, dtypes, arguments.numel), arguments.repeats)
    show(rows)
    if arguments.json:
        report.save(
            arguments.json, "codec", arguments, rows=rows,
            vectors=torch.backends.cpu.get_cpu_capability(),
            kernels=dispatch.describe(torch.device("cpu")),
        )  # fmt: skip


if __name__ == "__main__":
    main()
