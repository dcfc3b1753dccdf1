"""Headers of cuda/include, compiled for the host: random bits as in Python, exact division."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess

import pytest
import torch

from ds_quant.kernels import random_bits, reference
from ds_quant.resources import resource_dir

INCLUDE = resource_dir("cuda") / "include"
MASK32 = 0xFFFFFFFF

SOURCE = """
#include "philox.cuh"
extern "C" void words_of(const u32* in, u32* out) {  // counter (4), key (2) -> words (4)
    PhiloxWords w = philox4x32(in[0], in[1], in[2], in[3], in[4], in[5]);
    out[0] = w.w0; out[1] = w.w1; out[2] = w.w2; out[3] = w.w3;
}
extern "C" void bits_of(u64 first, u64 count, u64 step, u64 key, u32* out) {
    for (u64 i = 0; i < count; ++i) {
        PhiloxWords w = philox_of_vector(first + i, step, key);
        out[4 * i] = w.w0; out[4 * i + 1] = w.w1; out[4 * i + 2] = w.w2; out[4 * i + 3] = w.w3;
    }
}
"""


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
    (folder / "headers.cpp").write_text(SOURCE + DIVISION)
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += ["-ffp-contract=off", "-Wno-unknown-pragmas", "-DDSQ_HOST", f"-I{INCLUDE}"]
    command += ["headers.cpp", "-o", "headers.so"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "headers.so"))


def test_division_by_the_number_of_steps_is_exact(library) -> None:
    """All mantissas; the two multiply-adds behave alike at every exponent in between."""
    assert library.wrong() == 0


def test_host_words_equal_the_oracle(library):
    generator = random.Random(1)
    inputs = [[generator.getrandbits(32) for _ in range(6)] for _ in range(500)]
    inputs += [[0] * 6, [MASK32] * 6]
    for numbers in inputs:
        out = (ctypes.c_uint32 * 4)()
        library.words_of((ctypes.c_uint32 * 6)(*numbers), out)
        assert tuple(out) == random_bits.philox4x32(tuple(numbers[:4]), tuple(numbers[4:]))


@pytest.mark.parametrize("first", (0, (1 << 32) - 100, 1 << 40))
def test_host_bits_equal_the_torch_reference(library, first):
    address = random_bits.Address(key=0xC0FFEE1234567890, step=(9 << 32) | 77)
    count = 1000
    out = torch.empty(count, 4, dtype=torch.int32)
    library.bits_of(
        ctypes.c_uint64(first),
        ctypes.c_uint64(count),
        ctypes.c_uint64(address.step),
        ctypes.c_uint64(address.key),
        ctypes.c_void_p(out.data_ptr()),
    )
    bits = reference.random_bits(address, first, count, out.device)
    # Little-endian words: element 2i takes the low half of word i, 2i + 1 the high half.
    assert torch.equal(bits[:, ::2] | bits[:, 1::2] << 16, out)
