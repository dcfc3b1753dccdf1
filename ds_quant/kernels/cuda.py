"""CUDA kernels through CuPy: compile once per (kernel, macros, device), launch on torch's stream.

torch allocates everything; CuPy compiles, loads and launches. Arguments are one struct of 64-bit
integers, see launch.py, which CuPy passes by value as a NumPy array of one item. Kernels are
compiled at their first launch, which must not happen inside a CUDA graph capture: run every variant
once before.

CuPy's disk cache hashes the source text, not the files behind ``-I``, so an edited header would
silently run the old binary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch

from ds_quant.kernels.batch import Decode, Encode, Offsets, RngArrays, Task
from ds_quant.kernels.launch import ROOM, Launch, Table
from ds_quant.kernels.launch_batch import compile_tasks
from ds_quant.kernels.wire import layout_of
from ds_quant.resources import resource_dir

# ---- source text ----


KERNELS = ("encode", "decode_sum", "recode", "cast", "lossless")

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def source(kernel: str) -> str:
    """Return the source of a kernel with its includes inlined; ValueError for a name not in
    KERNELS.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel = {kernel!r}: allowed are {', '.join(KERNELS)}")
    return _flatten(resource_dir("cuda") / f"{kernel}.cu", set())


def _flatten(path: Path, seen: set[Path]) -> str:
    """Inline the headers of a file, each where it is first included."""

    def text_of(match: re.Match[str]) -> str:
        header = (path.parent / match[1]).resolve()
        if header in seen:
            return ""
        seen.add(header)
        return _flatten(header, seen)

    return _INCLUDE.sub(text_of, path.read_text("ascii"))


# ---- compile and launch ----


logger = logging.getLogger(__name__)

# Every operation of a kernel is rounded as the reference rounds it: nothing fused, nothing "fast".
OPTIONS = ("--std=c++17", "-fmad=false")

# bf16 arithmetic and the maximum over a warp in one instruction came with the A100.
LEAST_CAPABILITY = (8, 0)


class Runner:
    """Launches kernels on one device; a runner for ds_quant.kernels.launch."""

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self._functions: dict[tuple, Callable] = {}
        self._threads = threading.local()

    def run_tables(self, tables: Iterable[Table]) -> None:
        """Launch tables: nothing is copied to the device but arguments."""
        for table in tables:
            for work in table.launches(self._room):
                self._launch(work)

    @cached_property
    def _room(self) -> int:
        """Bytes of arguments that compiler and driver take."""
        cuda = _import_cupy().cuda
        driver = divmod(cuda.runtime.driverGetVersion() // 10, 100)
        return ROOM if min(cuda.nvrtc.getVersion(), driver) >= (12, 1) else 4096

    def _launch(self, work: Launch) -> None:
        """Launch on torch's current stream of the device."""
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._launch(work)
        mine = self._threads
        if not hasattr(mine, "stream"):
            # CuPy keeps a current device of its own per thread, and autograd has threads. The
            # stream is the thread's too: another one may be about to launch on a stream of its own.
            _import_cupy().cuda.Device(self.index).use()
            mine.stream = SimpleNamespace()  # with the address that CuPy reads
        key = (work.kernel, work.macros)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = compiled(*key)
        # Asked for at every launch: a cached stream would leave a graph capture empty.
        mine.stream.ptr = _current_stream(self.index)
        arguments = np.frombuffer(work.job, dtype=f"V{len(work.job)}")  # size 1: passed by value
        return function(work.grid, (work.threads,), (arguments,), 0, mine.stream)


def _current_stream(index: int) -> int:
    """Address of torch's current stream; the private call, as in Triton, saves a microsecond."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


def compiled(kernel: str, macros: tuple[tuple[str, int], ...]) -> Callable:
    """The kernel for the current device, from CuPy's disk cache or NVRTC.

    Ranks may compile at once: cache files are written aside and renamed.
    """
    cupy = _import_cupy()
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in macros))
    # .kernel, because a call of the RawKernel itself asks for device and cache every time.
    return cupy.RawKernel(source(kernel), kernel, options=options).kernel


def _import_cupy() -> ModuleType:
    """Import CuPy with a cache directory that can be written: its import fails without one."""
    if "CUPY_CACHE_DIR" not in os.environ:
        home = os.path.expanduser("~/.cupy/kernel_cache")
        parent = home
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        if not os.access(parent, os.W_OK):
            os.environ["CUPY_CACHE_DIR"] = _own_folder()
    import cupy

    return cupy


def _own_folder() -> str:
    """Make a folder for compiled kernels that nobody else can have filled."""
    path = os.path.join(tempfile.gettempdir(), f"ds_quant_cupy_{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    info = os.lstat(path)
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o077
    # Another user's, or a link: whoever made it could put kernels there that this process runs.
    return path if private and info.st_uid == os.getuid() else tempfile.mkdtemp(prefix="ds_quant_")


@cache
def runner_of(device: torch.device) -> Runner | None:
    """Return the runner of a device, or None, with one warning, if CuPy does not work there.

    The check compiles and runs one kernel, so that a CuPy for another CUDA major version, a
    missing NVRTC or missing headers show here and not in the middle of a step.
    """
    if device.type != "cuda":
        return None
    try:
        _check_capability(device)
        _check_versions()
        runner = Runner(device)
        _probe(runner)
    except Exception as error:  # whatever a broken installation raises
        _report(device, error)
        return None
    return runner


class OldDevice(RuntimeError):
    """The kernels cannot run on a device, whatever is installed."""


class Failure(NamedTuple):
    """Why the kernels do not work on a device.

    reason, fix: one line each. traceback: empty if the device is too old.
    """

    reason: str
    traceback: str
    fix: str


_failures: dict[torch.device, Failure] = {}


def failure_of(device: torch.device) -> Failure | None:
    """Return why the kernels do not work on a CUDA device; None where they do."""
    return _failures[device] if runner_of(device) is None else None


def _report(device: torch.device, error: Exception) -> None:
    """Warn in one line; what is broken, not just missing, shows its traceback once."""
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
    is_old = isinstance(error, OldDevice)
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    built_for = (torch.version.cuda or "12").split(".")[0]
    if is_old:
        fix = "take a newer GPU, no package helps; the torch path makes the same bytes"
        failure = Failure(reason=first_line, traceback="", fix=fix)
    else:
        failure = Failure(
            reason=f"{type(error).__name__}: {first_line}",
            traceback="".join(traceback.format_exception(error)).strip(),
            fix=f"pip install 'ds_quant[cuda{built_for}]'",
        )
    _failures[device] = failure
    logger.warning(
        "ds_quant: CUDA kernels are off on %s, the slower torch path is used: %s (%s)",
        device,
        failure.reason,
        failure.fix,
        exc_info=None if is_missing or is_old else error,
    )


def _check_capability(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, here = (f"sm_{major}{minor}" for major, minor in (LEAST_CAPABILITY, capability))
        raise OldDevice(f"the kernels need {needed} (A100) or newer, this GPU is {here}")


def _check_versions() -> None:
    cupy = _import_cupy()
    mine, theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000, torch.version.cuda
    if theirs is None or int(theirs.split(".")[0]) != mine:
        raise RuntimeError(f"CuPy is built for CUDA {mine}, torch for CUDA {theirs}")


class _ProbeFormat(NamedTuple):
    """A codec whose codes are the integers -127 to 127 when the largest value is 127."""

    kind: Literal["groups"] = "groups"
    name: str = "probe"
    bits: int = 8
    group_size: int = 32
    rounding: str = "nearest"
    levels: str = "uniform"
    has_offset: bool = False
    is_gaussian: bool = False

    def wire_bytes(self, numel: int) -> int:
        """Exact bytes of one row of `numel` elements."""
        return layout_of(self, numel).nbytes

    def table(self, levels: torch.Tensor | None, device: torch.device) -> None:
        """No levels."""


def _probe(runner: Runner) -> None:
    """Encode and decode a few numbers that lie on the grid, by tables of two equal jobs."""
    fmt = _ProbeFormat()
    x = torch.tensor([127.0, -127.0, 0.0, 1.0, -64.0], device=runner.device)
    wire = torch.empty(fmt.wire_bytes(5), dtype=torch.uint8, device=runner.device)
    out = torch.zeros_like(x)
    buffers = [x, wire, out]
    zeros = np.zeros(2, dtype=np.uint64)
    streams = RngArrays(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    addresses = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.uint64)
    tasks: list[Task] = [
        (Encode(fmt, 5, values=0, wire=1, stream=0), Offsets()),
        (Decode(fmt, 5, wire=1, values=2, stream=0), Offsets()),
    ]
    for operation, offsets in tasks:
        alike = [(operation, offsets), (operation._replace(stream=1), offsets)]
        compile_tasks(alike, buffers, runner.run_tables)(addresses, streams)
    if not torch.equal(x, out):
        raise RuntimeError("a kernel returned wrong numbers")
