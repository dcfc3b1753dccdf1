"""A header of cuda/include, compiled for the host: exact division for every mantissa."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from ds_quant.resources import resource_dir

INCLUDE = resource_dir("cuda") / "include"
DIVISION = """
#include "platform.cuh"
template <int N> static long wrong_quotients(u32 exponent) {
    long wrong = 0;
    for (u32 mantissa = 0; mantissa < 1u << 23; ++mantissa) {
        const float x = float_of(exponent << 23 | mantissa);
        wrong += divided_by<N>(x) != x / N;
    }
    return wrong;
}
extern "C" long wrong() {
    const u32 low = 28, one = 127, high = 254;  // 2^-99, 1, the largest exponent
    return wrong_quotients<1>(one) + wrong_quotients<3>(low) + wrong_quotients<7>(high) +
           wrong_quotients<15>(one) + wrong_quotients<31>(low) + wrong_quotients<63>(high) +
           wrong_quotients<127>(one) + wrong_quotients<255>(low);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The headers as a shared library, every warning an error."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile cuda/include for the host")
    folder = tmp_path_factory.mktemp("headers")
    (folder / "headers.cpp").write_text(DIVISION)
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += ["-ffp-contract=off", "-Wno-unknown-pragmas", "-DDSQ_HOST", f"-I{INCLUDE}"]
    command += ["headers.cpp", "-o", "headers.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "headers.so"))


def test_division_by_the_number_of_steps_is_exact(library) -> None:
    """All mantissas; the two multiply-adds behave alike at every exponent in between."""
    assert library.wrong() == 0
