"""Compiles and disassembles the kernels without a GPU: NVRTC through ctypes, nvdisasm.

Both come from wheels (the extra ``nvrtc``); nothing here needs a driver or the CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ds_quant.kernels import cuda
from ds_quant.kernels.cuda import source
from ds_quant.kernels.launch import Launch

ARCHITECTURES = ("80", "90", "100")

# CuPy appends -ftz=true after our options.
_AS_CUPY = (*cuda.OPTIONS, "-ftz=true")
OPTIONS = (*_AS_CUPY, "--ptxas-options=-v")  # with the report of ptxas in the log

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_STACK = re.compile(r"(\d+) bytes stack frame")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


class Report(NamedTuple):
    """The figures of ptxas and the disassembler for a kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int  # of a thread
    instructions: int | None  # static, the padding after the end left out; None: no nvdisasm
    wide_loads: int | None  # 16 bytes from global memory
    narrow_loads: int | None
    flushing: int | None  # instructions that take denormals for zeros

    def per_element(self, elements: int) -> float | None:
        """Static instructions per element of a thread."""
        return None if self.instructions is None else round(self.instructions / elements, 2)


def elements_of(launch: Launch) -> int:
    """Elements that a thread of a launch works on."""
    macros = dict(launch.macros)
    if launch.kernel == "lossless":
        return 8
    vectors = macros["DSQ_RUN"]
    if launch.kernel != "decode_sum":
        vectors = macros["DSQ_VECTORS"] * macros["DSQ_SLOTS"]
    return 8 * vectors


def report(launch: Launch, architecture: str, *, count: bool = True) -> Report:
    """Compile the kernel of a launch for an architecture, e.g. "90". RuntimeError with the log.

    count: disassemble, which takes as long as compiling.
    """
    defines = [f"-D{name}={value}" for name, value in launch.macros]
    options = [*OPTIONS, f"-arch=sm_{architecture}", *defines]
    cubin, log = _compile(source(launch.kernel), options)
    spills = sum(int(number) for number in _SPILLS.findall(log))
    registers, stack = (int(pattern.search(log)[1]) for pattern in (_REGISTERS, _STACK))
    found = _disassemble(cubin) if count else None
    if found is None:
        return Report(registers, spills, stack, None, None, None, None)
    loads = [opcode for opcode in found if opcode.startswith("LDG")]
    wide = sum(".128" in opcode for opcode in loads)
    instructions = sum(opcode != "NOP" for opcode in found)
    # F2I is part of every integer division.
    flushing = sum(".FTZ" in opcode and not opcode.startswith("F2I") for opcode in found)
    return Report(registers, spills, stack, instructions, wide, len(loads) - wide, flushing)


def ptx(text: str, macros: tuple[tuple[str, int], ...], architecture: str) -> str:
    """Return the PTX of a kernel's source for an architecture. RuntimeError with the log."""
    defines = [f"-D{name}={value}" for name, value in macros]
    options = [*_AS_CUPY, f"-arch=compute_{architecture}", *defines]
    with _compiled(text, options) as program:
        library = _nvrtc()
        return _read(library.nvrtcGetPTXSize, library.nvrtcGetPTX, program).rstrip(b"\0").decode()


def opcodes(text: str, macros: tuple[tuple[str, int], ...], architecture: str) -> list[str]:
    """Return the machine instructions of a kernel in order, without padding.

    Raises:
        RuntimeError: it does not compile, or nvdisasm is not installed.
    """
    defines = [f"-D{name}={value}" for name, value in macros]
    cubin, _ = _compile(text, [*_AS_CUPY, f"-arch=sm_{architecture}", *defines])
    found = _disassemble(cubin)
    if found is None:
        raise RuntimeError("counting needs nvdisasm: pip install ds_quant[nvrtc]")
    return [opcode for opcode in found if opcode != "NOP"]


def nvrtc_version() -> str | None:
    """ "13.5" for the library that is found; None without one."""
    library = _nvrtc()
    if library is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _find(pattern: str) -> Path | None:
    """A file of a wheel, below the folders Python imports from."""
    for folder in sys.path:
        found = sorted(Path(folder or ".").glob(pattern))
        if found:
            return found[0]
    return None


@cache
def _nvrtc() -> ctypes.CDLL | None:
    path = _find("nvidia/*/lib/libnvrtc.so.*")
    if path is None:
        return None
    # First, because NVRTC would look for it where the loader looks, not beside itself.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _compile(text: str, options: list[str]) -> tuple[bytes, str]:
    with _compiled(text, options) as program:
        library = _nvrtc()
        log = _log(program)
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log


@contextmanager
def _compiled(text: str, options: list[str]) -> Iterator[ctypes.c_void_p]:
    """A program of NVRTC, destroyed at the end."""
    library = _nvrtc()
    program = ctypes.c_void_p()
    name = b"kernel.cu"
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name, 0, None, None)
    values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    try:
        if library.nvrtcCompileProgram(program, len(options), values):
            raise RuntimeError(f"NVRTC, {' '.join(options)}:\n{_log(program)}")
        yield program
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(program: ctypes.c_void_p) -> str:
    library = _nvrtc()
    return _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode()


def _read(size_of, read, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@cache
def nvdisasm() -> Path | None:
    """The disassembler, if its wheel is installed."""
    return _find("nvidia/*/bin/nvdisasm")


def _disassemble(cubin: bytes) -> list[str] | None:
    """Opcodes with their modifiers, in order."""
    if nvdisasm() is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm()), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (_INSTRUCTION.match(line) for line in text.splitlines())
    return [match[1] for match in found if match]
