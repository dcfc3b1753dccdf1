"""Counts the instructions that the kernels execute, without a GPU, and predicts their speed.

    python benchmarks/kernel_instructions.py --json benchmarks/results/kernel_instructions.json
    python benchmarks/kernel_instructions.py --measured one_size.json    # of kernels.py, on a GPU

The operations are those of kernels.py. The interpreter of tests/kernels/ptx executes their PTX and
counts instructions by class. [Note: model] says how a share of a copy follows. ``--measured``
prints measured shares beside those of the committed file and marks the ones to explain.

Needs the extra ``nvrtc``; ``--measured`` does not.

[Note: model] An operation moves B bytes per element; a copy needs ``B / (COPY * bandwidth)``
seconds for them. A multiprocessor issues 128 instructions per clock (four warps of 32 lanes), and
its pipes take fewer, see ``PIPES``. With n instructions per element, a pipe of r per clock needs
``n / (r * REACHED_PIPE * multiprocessors * clock)`` seconds per element. The share is the time of
the copy divided by the longest of these times and of the copy's own over MEMORY.

Machine instructions per element are those of the disassembled kernel times executed over static PTX
instructions, so paths that are not taken, and loops, count as they run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import kernels
import report
import sections
import torch

RESULT = sections.RESULTS / "kernel_instructions.json"
COPY = 0.9  # of the published bandwidth, that a copy reaches
MEMORY = 0.93  # of a copy's bandwidth, that a kernel with enough loads in flight reaches
ISSUE = 128  # instructions per clock and multiprocessor
REACHED_ISSUE = 0.85
REACHED_PIPE = 0.9

# Results per clock and multiprocessor, and the machine instructions that take a pipe: CUDA C++
# Programming Guide 12.6, "Throughput of Native Arithmetic Instructions". ``fma`` is of the GPU.
PIPES = {"alu": 64, "fma": None, "lsu": 32, "xu": 16}
_PIPE_OF = {
    "fma": ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HMUL2", "HFMA2"),
    "lsu": ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST", "ATOM", "ATOMG", "ATOMS", "RED",
            "SHFL", "LDSM"),
    "xu": ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "REDUX"),
    "none": ("BRA", "EXIT", "BSSY", "BSYNC", "BAR", "WARPSYNC", "CALL", "RET", "LDC", "LDCU",
             "S2R", "S2UR", "ULDC", "NOP", "DEPBAR", "YIELD", "ERRBAR", "MEMBAR"),
}  # fmt: skip
_PIPE = {opcode: pipe for pipe, opcodes in _PIPE_OF.items() for opcode in opcodes}

CLASSES = ("memory", "shared", "integer", "float", "convert", "special", "shuffle", "barrier",
           "branch", "move")  # fmt: skip


class Gpu(NamedTuple):
    """Published figures.

    teraflops: peak of fp32 outside tensor cores, from which the clock follows. terabytes: of memory
    per second. fma: fp32 results per clock and multiprocessor.
    """

    architecture: str
    multiprocessors: int
    teraflops: float
    terabytes: float
    fma: int

    @property
    def clock(self) -> float:
        """Return clocks per second."""
        return self.teraflops * 1e12 / (2 * self.fma * self.multiprocessors)


GPUS = {
    "A100": Gpu("80", 108, 19.5, 2.039, 64),
    "H100": Gpu("90", 132, 67.0, 3.35, 128),
    "H200": Gpu("90", 132, 67.0, 4.8, 128),
    "B200": Gpu("100", 148, 75.0, 8.0, 128),
}
SOURCES = (
    "NVIDIA's data sheets: A100 80GB SXM (19.5 TFLOPS of fp32, 2,039 GB/s), H100 SXM (67 TFLOPS, "
    "3.35 TB/s), H200 SXM (67 TFLOPS, 4.8 TB/s), HGX B200 (an eighth of 600 TFLOPS and 64 TB/s). "
    "Multiprocessors from NVIDIA's papers on Ampere (108) and Hopper (132), 148 for B200"
)
COUNTED = "90"  # the architecture whose classes are shown


# ---- counting ----


def count(architecture: str, nbytes: int, codecs: str = "") -> list[dict[str, Any]]:
    """Return a row per operation: executed PTX by class, machine instructions by pipe.

    All per element. Progress goes to the standard error.
    nbytes: of an operation. codecs: only those whose name contains this.
    """
    from ds_quant.kernels import dispatch
    from tests.kernels.ptx.runner import Runner

    runner = Runner(architecture)
    bench = kernels.Bench(torch.device("cpu"), 0, ("auto",))
    rows = []
    for make in kernels.operations(bench, nbytes, torch.bfloat16, codecs):
        operation = make()
        runner.forget_counts()
        with patch.object(dispatch, "cuda_runner", lambda *_: runner), torch.no_grad():
            operation.ways["auto"](0)
        executed: Counter[str] = Counter()
        machine: dict[str, float] = defaultdict(float)
        for key, counts in runner.executed.items():
            executed.update(counts.by_class)
            threads = counts.by_class.total() / counts.static
            for pipe, number in _pipes_of(key, architecture).items():
                machine[pipe] += number * threads
        print(f"sm_{architecture} {operation.name} {operation.codec}", file=sys.stderr)
        rows.append(
            {
                "operation": operation.name,
                "codec": operation.codec,
                "dtype": operation.dtype,
                "bytes": operation.nbytes / operation.numel,
                "executed": _per_element(executed, operation.numel),
                "machine": _per_element(machine, operation.numel),
            }
        )
    return rows


def _per_element(counts: Mapping[str, float], numel: int) -> dict[str, float]:
    return {name: round(number / numel, 3) for name, number in sorted(counts.items())}


@cache
def _pipes_of(key: tuple[str, tuple[tuple[str, int], ...]], architecture: str) -> Counter[str]:
    """Return the static machine instructions of a kernel by pipe, and of all: "issue"."""
    from ds_quant.kernels import cuda
    from tests.kernels import compiler

    kernel, macros = key
    found: Counter[str] = Counter()
    for opcode in compiler.opcodes(cuda.source(kernel), macros, architecture):
        found["issue"] += 1
        found[pipe_of(opcode)] += 1
    return found


def pipe_of(opcode: str) -> str:
    """Return the pipe of a machine instruction: "none" for jumps and those of a whole warp."""
    name = opcode.partition(".")[0]
    if name in _PIPE:
        return _PIPE[name]
    return "none" if name.startswith("U") else "alu"


# ---- the model ----


def share_of_copy(row: dict[str, Any], gpu: Gpu) -> tuple[float, str]:
    """Return the predicted share of a copy and what limits it: [Note: model]."""
    copy_seconds = row["bytes"] / (COPY * gpu.terabytes * 1e12)
    clocks_per_second = gpu.multiprocessors * gpu.clock
    machine = row["machine"]
    seconds = {
        "memory": copy_seconds / MEMORY,
        "issue": machine["issue"] / (ISSUE * REACHED_ISSUE * clocks_per_second),
    }
    for pipe, rate in PIPES.items():
        results = REACHED_PIPE * (rate or gpu.fma)
        seconds[pipe] = machine.get(pipe, 0) / (results * clocks_per_second)
    limit = max(seconds, key=lambda name: seconds[name])
    return copy_seconds / seconds[limit], limit


def predictions(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return operation, codec, and (share, limit) on every GPU."""
    rows = []
    for place, row in enumerate(result["rows"][COUNTED]):
        shares = {}
        for name, gpu in GPUS.items():
            shares[name] = share_of_copy(result["rows"][gpu.architecture][place], gpu)
        rows.append({"operation": row["operation"], "codec": row["codec"], "shares": shares})
    return rows


# ---- pages ----


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    counted = []
    predicted = []
    for row, prediction in zip(result["rows"][COUNTED], predictions(result), strict=True):
        name = f"{row['operation']} `{row['codec']}`"
        executed = [row["executed"].get(each, 0) for each in CLASSES]
        counted.append([name, *(f"{number:.1f}" if number else "" for number in executed)])
        cells = [f"{share:.2f} {limit}" for share, limit in prediction["shares"].values()]
        machine = row["machine"]
        pipes = [f"{machine['issue']:.1f}", f"{machine['alu']:.1f}"]
        predicted.append([name, f"{row['bytes']:.2f}", *pipes, *cells])
    header = ["operation, bf16", "bytes", "instructions", "of these ALU", *GPUS]
    return "Instructions of the kernels, and the speed that follows", _PAGE.format(
        shares=sections.table(header, predicted),
        classes=sections.table(["operation, bf16", *CLASSES], counted),
        copy=COPY,
        memory=MEMORY,
        issue=ISSUE,
        reached_issue=REACHED_ISSUE,
        reached_pipe=REACHED_PIPE,
        sources=SOURCES,
    )


_PAGE = """\
**Predicted; nothing here has been measured on a GPU.** The first measurement is held against this
page: `benchmarks/kernel_instructions.py --measured FILE`.

## Share of a copy

{shares}

Per element: bytes that are read and written, and machine instructions for sm_90. Behind a share
stands what limits it: memory, the issue of instructions, or a pipe.

    share = copy / max(copy / {memory}, issue, pipe)
    copy  = bytes / ({copy} * published bandwidth)
    issue = n / ({issue} * {reached_issue} * M * f)
    pipe  = p / (r * {reached_pipe} * M * f)

M multiprocessors run at f clocks per second; an element takes n machine instructions, p of them on
a pipe of r per clock.

- **Rates** of the pipes: ALU 64 (integers, logic, comparisons), FMA 64 on A100 and 128 on the
  others, load and store 32, special functions 16: CUDA C++ Programming Guide 12.6, "Throughput of
  Native Arithmetic Instructions". B200 is assumed to have those of compute capability 9.0.
- **Published figures**: {sources}.
  f is fp32 operations per second / (2 * FMA rate * M).
- **Assumed**: {copy} of the bandwidth for a copy, {memory} of a copy for a kernel, {reached_issue}
  of the issue rate and {reached_pipe} of a pipe's.
- **Left out**: latency. Kernels with few loads in flight (sums, casts, lossless) are slower.
- **Machine instructions**: those of the disassembled kernel, times executed over static PTX
  instructions.

## Executed PTX instructions by class

{classes}

Per element, compute_90. A warp counts as 32 lanes also where fewer take part. `move` are copies
between registers and reads of arguments, most of which become no instruction."""


def held_against(result: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Return a line per operation that was measured: both shares, and the difference.

    measured: file of kernels.py.

    Raises:
        ValueError: its GPU has no prediction.
    """
    device = ", ".join(measured["provenance"]["hardware"]["gpus"])
    name = next((name for name in GPUS if name in device), None)
    if name is None:
        raise ValueError(f"GPU {device!r}: predictions are for {', '.join(GPUS)}")
    predicted = {(row["operation"], row["codec"]): row["shares"] for row in predictions(result)}
    lines = []
    for row in measured["rows"]:
        key = (row["operation"], row["codec"])
        if row["way"] != "auto" or row["dtype"] != "bf16" or key not in predicted:
            continue
        share, limit = predicted[key][name]
        miss = row["share_of_copy"] - share
        mark = "  explain" if abs(miss) > 0.1 else ""
        lines.append(
            f"{key[0]:<24}{key[1]:<40}{name} predicted {share:.2f} ({limit}), "
            f"measured {row['share_of_copy']:.2f}, {miss:+.2f}{mark}"
        )
    return lines


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--bytes", type=int, default=200_000, help="bytes that an operation reads and writes")
    add("--json", type=Path, help="write the counts and their page here")
    add("--measured", type=Path, help="file of kernels.py to compare with; nothing is counted")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    if args.measured:
        measured = json.loads(args.measured.read_text("utf-8"))
        print("\n".join(held_against(json.loads(RESULT.read_text("utf-8")), measured)))
        return
    from tests.kernels import compiler

    rows = {name: count(name, args.bytes) for name in compiler.ARCHITECTURES}
    if args.json:
        report.save(
            args.json,
            Path(__file__).stem,
            {"bytes": args.bytes},
            nvrtc=compiler.nvrtc_version(),
            rows=rows,
        )
    for prediction in predictions({"rows": rows}):
        cells = (f"{share:.2f} {limit}" for share, limit in prediction["shares"].values())
        print(f"{prediction['operation']:<24}{prediction['codec']:<40}{'  '.join(cells)}")


if __name__ == "__main__":
    main()
