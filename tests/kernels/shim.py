"""Runs the CUDA sources on the CPU: builds them with g++ behind shim.h, once per set of macros.

Compiling takes most of the time of these tests, so shim.h is compiled once for all libraries.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ds_quant.kernels.cuda import source
from ds_quant.kernels.launch import FIELDS, Launch, Table

HEADER = Path(__file__).with_name("shim.h")
# -Og: the whole run is a few thousand blocks. No contraction into fused operations, which g++ does
# by default. A fortified longjmp refuses another stack.
FLAGS = [
    *("-std=c++17", "-Og", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"),
    *("-U_FORTIFY_SOURCE", "-DDSQ_HOST"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
]
# The process that loads a library has the C library already. libgcc converts fp16.
LINKING = ["-shared", "-nostdlib"]
LIBRARIES = ["-lgcc"]


class Shim:
    """Stands for kernels.cuda.Runner, on CPU tensors; libraries are kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.compiler = shutil.which("g++")
        if self.compiler is None:
            pytest.skip("needs g++ to run the CUDA sources on the CPU")
        self.folder = folder
        self._precompile_header()
        self.reversed_warps = False
        self.built: dict[tuple, ctypes.CDLL] = {}
        self.launched: list[tuple[str, tuple]] = []  # kernels and their macros

    def __call__(self, launch: Launch) -> None:
        """Run every block of a launch, on this thread, as cuLaunchKernel would."""
        self.launched.append((launch.kernel, launch.macros))
        job = ctypes.create_string_buffer(launch.job, len(launch.job))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(job))
        sizes = (ctypes.c_uint * 2)(*launch.grid)
        library = self.library(launch.kernel, launch.macros)
        library.shim_launch(sizes, launch.threads, arguments, int(self.reversed_warps))

    def run_tables(self, tables: Iterable[Table]) -> None:
        """As a Runner does."""
        for table in tables:
            for launch in table.launches():
                self(launch)

    def elements_alone(self) -> int:
        """Elements that kernels have read or written by themselves so far."""
        count = 0
        for library in self.built.values():
            library.shim_elements_alone.restype = ctypes.c_ulonglong
            count += library.shim_elements_alone()
        return count

    def library(self, kernel: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        """The kernel with these macros as a shared library."""
        key = (kernel, macros)
        if key not in self.built:
            self.built[key] = self._build(kernel, macros)
        return self.built[key]

    def _precompile_header(self) -> None:
        """Compile shim.h into a file that g++ takes in place of the header of that name."""
        header = self.folder / HEADER.name
        header.write_text(f'#include "{HEADER}"\n')
        compiled = header.with_name(f"{header.name}.gch")
        command = [self.compiler, *FLAGS, "-x", "c++-header", str(header), "-o", str(compiled)]
        subprocess.run(command, check=True, timeout=120)

    def _build(self, kernel: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        stem = self.folder / f"{kernel}{len(self.built)}"
        text = f'#include "{HEADER.name}"\n{source(kernel)}\nSHIM_EXPORT({kernel})\n'
        text += f'static_assert(sizeof({JOBS[kernel]}) == {8 * len(FIELDS[kernel])}, "fields");\n'
        stem.with_suffix(".cpp").write_text(text)
        defines = [f"-D{name}={value}" for name, value in macros]
        command = [self.compiler, *FLAGS, *LINKING, *defines]
        command += [str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so"))]
        command += LIBRARIES
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:  # no AssertionError, which hypothesis would try to shrink
            pytest.exit(f"{' '.join(defines)}\n{done.stderr[:4000]}", returncode=1)
        return ctypes.CDLL(str(stem.with_suffix(".so")))


JOBS = {
    "encode": "EncodeJob",
    "decode_sum": "SumJob",
    "recode": "RecodeJob",
    "cast": "CastJob",
    "lossless": "LosslessJob",
}
