"""Every 16 bytes that a kernel of test_gpu.py reads of skewed rows lie inside an allocation.

compute-sanitizer calls a read of 16 bytes a fault that begins inside an allocation and ends behind
it. Which bytes are read is asked of cuda/include/values.cuh itself, whose loads are noted instead
of carried out; where allocations end, of the functions that make the tensors of the GPU tests.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from ds_quant.kernels.batch import DTYPES as NUMBERS
from ds_quant.kernels.batch import Decode, Encode, Rotate
from ds_quant.kernels.wire import ALIGNMENT, VECTOR_NUMEL
from ds_quant.resources import resource_dir
from tests.kernels.backends import Kernels, skewed
from tests.kernels.inputs import CODECS, DTYPES, large_rows
from tests.kernels.programs import BASE, OUT, Program, X
from tests.kernels.shim import HEADER
from tests.kernels.test_numbers import IN_ANY_PLACE, at_every_address
from tests.lossless_inputs import DTYPES as LOSSLESS_DTYPES
from tests.lossless_inputs import LARGE_NUMELS as LOSSLESS_NUMELS

META = torch.device("meta")  # tensors that have an allocation's size, and no allocation
PAGE = 1 << 20  # an address of a vector, less its skew; nothing is read there

READS = """
#include "{shim}"
#include "{headers}/platform.cuh"
static u64 first, behind;
static Words4 noted(const void* p) {{
    if ((u64)p % 16) __builtin_trap();
    first = (u64)p < first ? (u64)p : first;
    behind = (u64)p + 16 > behind ? (u64)p + 16 : behind;
    return Words4{{}};
}}
#define load16 noted
#define load16_once noted
#include "{headers}/values.cuh"
extern "C" void reads(int dtype, u64 p, u64* found) {{
    first = ~0ull, behind = 0;
    if (dtype == DSQ_FP32) Raw<DSQ_FP32>().load_anywhere((const u8*)p);
    if (dtype == DSQ_BF16) Raw<DSQ_BF16>().load_anywhere((const u8*)p);
    if (dtype == DSQ_FP16) Raw<DSQ_FP16>().load_anywhere((const u8*)p);
    found[0] = first, found[1] = behind;
}}
"""

Reads = Callable[[torch.dtype, int], tuple[int, int]]


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    """(first, behind): bytes that the load of a vector reads, from its first element on; of a dtype
    and the vector's distance from a multiple of 16 bytes.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to ask the CUDA sources what they read")
    folder = tmp_path_factory.mktemp("reads")
    text = READS.format(shim=HEADER, headers=resource_dir("cuda") / "include")
    (folder / "reads.cpp").write_text(text)
    how = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-DDSQ_HOST"]
    command = [compiler, *how, str(folder / "reads.cpp"), "-o", str(folder / "reads.so")]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "reads.so"))

    def ask(dtype: torch.dtype, skew: int) -> tuple[int, int]:
        found = (ctypes.c_ulonglong * 2)()
        library.reads(NUMBERS[dtype], ctypes.c_ulonglong(PAGE + skew), found)
        return found[0] - PAGE - skew, found[1] - PAGE - skew

    return ask


def span(reads: Reads, begin: int, numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the first and the end of the bytes that the loads of a row's whole vectors read.

    Both count from the begin of its allocation. begin: offset of the row in bytes. Vectors lie 16
    or 32 bytes apart, so all have one skew.
    """
    count, nbytes = numel // VECTOR_NUMEL, VECTOR_NUMEL * dtype.itemsize
    if count == 0:
        return begin, begin
    first, behind = reads(dtype, begin % ALIGNMENT)
    return begin + first, begin + (count - 1) * nbytes + behind


def bytes_outside(reads: Reads, rows: torch.Tensor, *, nbytes: int | None = None) -> int:
    """Bytes read before and behind the allocation of (rows, numel), or one of ``nbytes``."""
    room, item = nbytes or rows.untyped_storage().nbytes(), rows.element_size()
    outside = 0
    for row in range(len(rows)):
        begin = (rows.storage_offset() + row * rows.stride(0)) * item
        first, behind = span(reads, begin, rows.shape[1], rows.dtype)
        outside = max(outside, -first, behind - room)
    return outside


def test_a_load_reads_every_aligned_16_bytes_of_its_vector_and_no_others(reads: Reads) -> None:
    for dtype in DTYPES:
        for skew in range(0, ALIGNMENT, dtype.itemsize):
            end = VECTOR_NUMEL * dtype.itemsize
            assert reads(dtype, skew) == (-skew, end + -(skew + end) % ALIGNMENT)


def skewed_rows() -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, exact bytes and rows of every case of test_gpu.py that begins off a multiple of 16
    bytes.
    """
    for index, codec in enumerate(CODECS):
        for numel, skew in large_rows(codec):
            x = torch.empty(2, numel, dtype=DTYPES[index % 3], device=META)
            exact = 2 * (numel + skew) * x.element_size()
            yield f"{codec.name} {x.dtype} {skew}", exact, skewed(x, skew, META)
    for numel, dtype, skew in product(LOSSLESS_NUMELS, LOSSLESS_DTYPES, (0, 3)):
        x = torch.empty(1, numel, dtype=dtype, device=META)
        exact = (numel + skew) * x.element_size()
        yield f"lossless {dtype} {numel} {skew}", exact, skewed(x, skew, META)


def test_reads_of_large_rows_lie_inside_their_allocations(reads: Reads) -> None:
    """``room`` rounds allocations up. Those of exact size would be read past their end by rows of
    16-bit elements that begin off a multiple of 16 bytes.
    """
    past_end = {}
    for name, exact, rows in skewed_rows():
        assert bytes_outside(reads, rows) == 0, name
        past_end[name] = bytes_outside(reads, rows, nbytes=exact)
    # The second row begins 2 bytes off: loads go 14 bytes past its last whole vector, and its last
    # 3 elements fill 6 of them.
    expected = {
        f"{codec.name} {DTYPES[index % 3]} 3": 8
        for index, codec in enumerate(CODECS)
        if DTYPES[index % 3].itemsize == 2
    }
    of_codecs = {name: n for name, n in past_end.items() if n and "lossless" not in name}
    assert of_codecs == expected
    # A row that begins 6 bytes off: 10 bytes, less 2 if an element follows its last whole vector.
    assert {n for name, n in past_end.items() if "lossless" in name} == {0, 8, 10}


def values_of(program: Program) -> Iterator[tuple[int, int, int]]:
    """Buffer, first element and length of all values that its tasks read or write."""
    for operation, offsets in program.tasks:
        if isinstance(operation, Encode | Rotate):
            yield X, offsets.values, operation.numel
            if getattr(operation, "base", None) is not None:
                yield BASE, offsets.base, operation.numel
        elif isinstance(operation, Decode):
            yield OUT, offsets.values, operation.numel


@pytest.mark.parametrize("codec", IN_ANY_PLACE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_at_every_address_lie_inside_their_allocations(
    reads: Reads, dtype: torch.dtype, codec
) -> None:
    kernels, program = Kernels("gpu", META), at_every_address(dtype, codec)
    rooms = {
        buffer: kernels.put(torch.empty(program.used[buffer], dtype=dtype))
        for buffer in (X, BASE, OUT)
    }
    for buffer, first, numel in values_of(program):
        begin, behind = span(reads, first * dtype.itemsize, numel, dtype)
        assert begin >= 0 and behind <= rooms[buffer].untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_put_where_they_may_be_read(reads: Reads, dtype: torch.dtype) -> None:
    """Rows of every length, contiguous or with room between them."""
    kernels = Kernels("gpu", META)
    for numel, skew in product((1, 7, 8, 9, 63, 4999), range(9)):
        rows = torch.empty(3, numel + skew, dtype=dtype)[:, skew:]
        for x in (rows, rows[:1]):
            there = kernels.put(x)
            assert there.shape == x.shape and bytes_outside(reads, there) == 0
        flat = kernels.put(rows[0])
        assert span(reads, 0, numel, dtype)[1] <= flat.untyped_storage().nbytes()


def test_what_is_put_keeps_its_values() -> None:
    """Beside the kernels' own memory: copies on the CPU."""
    cpu = torch.device("cpu")
    x = torch.arange(21.0).view(3, 7)
    there = skewed(x, 3, cpu)
    assert torch.equal(there, x) and there.stride() == (10, 1) and there.storage_offset() == 3
