"""The sections of each part of benchmarks/gpu_suite.sh: command, seconds, and what they need.

In a command {work}, {name} and {limit} are replaced: the folder for files, the section's name and
the seconds it has. A section leaves its figures in {work}/{name}.json. What matters most comes
first: later sections get what time is left. Standard library only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

PYTHON = os.environ.get("PYTHON", sys.executable)
JSON = ("--json", "{work}/{name}.json")

_CUPY = ("torch", "cupy")
_PYTEST = ("torch", "cupy", "pytest", "hypothesis")
_DEEPSPEED = ("torch", "deepspeed", "pydantic")
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}  # DeepSpeed compiles helpers, for which there is no time

# Without setup.cfg: its warnings are errors, and fit the versions of the development environment.
_GPU_TESTS = (
    *(PYTHON, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"),
    *("-W", "ignore", "-q", "tests/kernels/test_gpu.py"),
)
_METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__inst_executed.sum",
    # 32-byte sectors that a warp's load or store touches; twice what it needs shows half sectors.
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
)
# What a checker can find something in: rows of any length, and everything that shares memory.
_RAGGED = "equal_the_reference and (g96 or g8192)"
_BARRIERS = "lossless_rows or gaussian"
_RACES = f"{_RAGGED} or way_of_storing or {_BARRIERS}"
_MEMORY = f"{_RAGGED} or many_tensors or recode or encoded_anew or {_BARRIERS}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One command of a part."""

    name: str
    seconds: float  # at most
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (PYTHON, f"benchmarks/{name}", *arguments, *JSON)


def equality(dry: bool) -> list[Section]:
    """Part A: what the machine is, whether the kernels' bytes are right, what a launch costs."""
    device = ("--device", "cpu" if dry else "cuda")
    size = "1e5" if dry else "1e9"
    tests = (*_GPU_TESTS, "--collect-only") if dry else _GPU_TESTS
    workers = () if dry else ("-n", "6", "--dist", "worksteal")
    cupy = ("torch",) if dry else _CUPY
    pytest = tuple(name for name in _PYTEST if not dry or name != "cupy")
    sizes = ("--min-bytes", size, "--max-bytes", size, "--limit", "{limit}")
    kernels = _script("kernels.py", *device, *sizes, "--dtypes", "bf16", "--ways", "auto")
    return [
        Section(name="facts", seconds=50, command=_script("gpu/facts.py", *device)),
        Section(
            name="equality", seconds=300, command=(*tests, *workers),
            packages=pytest if dry else (*pytest, "xdist"),
        ),
        Section(
            name="overhead", seconds=40, packages=cupy,
            command=_script("kernels.py", *device, "--overhead"),
        ),
        Section(name="one_size", seconds=150, command=kernels, packages=cupy),
    ]  # fmt: skip


def speed(dry: bool) -> list[Section]:
    """Part B: which layout is fastest, and how fast beside a copy and the torch reference."""
    device = ("--device", "cpu" if dry else "cuda")
    size = ("1e5", "1e5") if dry else ("5e8", "5e8")
    sizes = ("1e4", "1e5") if dry else ("4096", "2e9")
    cupy = ("torch",) if dry else _CUPY

    def sweep(name: str, seconds: float) -> Section:
        options = ("--sweep", name, *device, "--bytes", size[0], "--limit", "{limit}")
        return Section(
            name=name, seconds=seconds, command=_script("gpu/sweeps.py", *options), packages=cupy
        )

    def kernels(name: str, seconds: float, between: tuple[str, str], *more: str) -> Section:
        options = ("--min-bytes", between[0], "--max-bytes", between[1], "--limit", "{limit}")
        command = _script("kernels.py", *device, *options, *more)
        return Section(name=name, seconds=seconds, command=command, packages=cupy)

    five = (PYTHON, "benchmarks/gpu/sweeps.py", "--sweep", "five", *device, "--bytes", size[0])
    profiler = ("ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(_METRICS),
                "--kernel-name", "regex:encode|decode_sum|recode")  # fmt: skip
    return [
        sweep("stores", 130),
        sweep("tables", 50),
        sweep("ragged", 50),
        kernels("sizes", 120, sizes, "--dtypes", "bf16", "--codecs", "int4", "--ways", "auto"),
        Section(
            name="counters", seconds=70, command=five if dry else (*profiler, *five),
            packages=cupy, programs=() if dry else ("ncu",),
        ),
        kernels("ways", 120, size, "--dtypes", "bf16"),
    ]  # fmt: skip


def training(dry: bool) -> list[Section]:
    """Part C: DeepSpeed with several ranks on one GPU, one of many ranks, and memory checks.

    Kernels are compiled first: several processes would compile the same ones.
    """
    device = ("--device", "cpu" if dry else "cuda")
    steps = "3" if dry else "20"
    schemes = ("full_precision", "qsdp", "sdp4bit", "zeropp", "lossless_w_g3", "eden3")
    schemes = ("qsdp", "lossless_w_g3") if dry else schemes
    cupy = ("torch",) if dry else _CUPY

    def ranks(stage: int, world: int) -> Section:
        size = 2 if dry else world  # a dry run starts as few processes as show the same
        nodes = ("--node-size", str(size // 2), "--accumulation", "2") if world == 4 else ()
        options = ("--world", str(size), "--stage", str(stage), "--steps", steps, "--width", "128")
        some = ("--at-once", str(12 // world), "--schemes", *schemes)  # 12 processes on 16 cores
        return Section(
            name=f"zero{stage}_world{world}", seconds=60, packages=_DEEPSPEED, environment=_EAGER,
            command=_script("one_gpu.py", *device, *options, *nodes, *some),
        )  # fmt: skip

    def checker(tool: str, seconds: float, tests: str, **environment: str) -> Section:
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_GPU_TESTS)
        if dry:
            command = (*_GPU_TESTS, "--collect-only")
        return Section(
            name=tool, seconds=seconds, command=(*command, "-x", "-k", tests),
            packages=tuple(name for name in _PYTEST if not dry or name != "cupy"),
            programs=() if dry else ("compute-sanitizer",), environment=environment,
        )  # fmt: skip

    precompile = _script("gpu/precompile.py", *device, "--schemes", *schemes)
    world = ("--ranks", "32", "--node-size", "8", *device, *(("--width", "64") if dry else ()))
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        Section(
            name="precompile", seconds=60, command=precompile, environment=_EAGER,
            packages=(*_DEEPSPEED, *cupy),
        ),
        ranks(3, 2),
        ranks(2, 2),
        ranks(3, 4),
        ranks(2, 4),
        Section(
            name="world32", seconds=60, command=_script("gpu/world.py", *world),
            packages=_DEEPSPEED, environment=_EAGER,
        ),
        checker("memcheck", 90, _MEMORY, **uncached),
        checker("racecheck", 70, _RACES),
    ]  # fmt: skip


PARTS = {"A": equality, "B": speed, "C": training}
