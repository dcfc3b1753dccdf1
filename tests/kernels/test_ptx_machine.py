"""The PTX interpreter: arithmetic against Python's integers and fractions, and small kernels.

Needs no NVRTC.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from tests.kernels.ptx import arithmetic, operations
from tests.kernels.ptx.machine import Kernel
from tests.kernels.ptx.memory import MemoryFault
from tests.kernels.ptx.program import parse

GENERATOR = np.random.default_rng(0)


def nearest(exact: Fraction) -> np.float32:
    """Return the nearest fp32 number, ties to even; exact is normal."""
    exponent = 23
    while abs(exact) * Fraction(2) ** exponent >= 1 << 24:
        exponent -= 1
    while abs(exact) * Fraction(2) ** exponent < 1 << 23:
        exponent += 1
    return np.float32(float(Fraction(round(exact * Fraction(2) ** exponent)) / 2**exponent))


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    a, b, c = (GENERATOR.standard_normal(300).astype(np.float32) for _ in range(3))
    c *= np.float32(2.0) ** GENERATOR.integers(-30, 30, 300).astype(np.float32)
    # The product lies halfway between two numbers, all but for an addend beyond the digits of f64.
    a[0], b[0], c[0] = 1 + 2**-12, 1 + 2**-12, 2**-80
    a[1], b[1], c[1] = 1 + 2**-12, 1 + 2**-12, -(2**-80)
    found = arithmetic.fused(a, b, c)
    for numbers, result in zip(zip(a, b, c, strict=True), found, strict=True):
        x, y, z = (Fraction(float(number)) for number in numbers)
        assert result == nearest(x * y + z)
    assert found[0] != found[1]


@pytest.mark.parametrize(("dtype", "bits"), [(np.uint32, 32), (np.uint64, 64)])
def test_integers_beyond_a_word(dtype: type, bits: int) -> None:
    top = (1 << bits) - 1
    numbers = [0, 1, top, top - 1, 1 << (bits - 1), 0x0123456789ABCDEF & top]
    pairs = np.array(list(product(numbers, numbers)), dtype)
    a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
    assert arithmetic.upper_half(a, b).tolist() == [
        int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)
    ]
    position = np.full(len(a), bits - 4, np.uint32)
    length = np.full(len(a), 8, np.uint32)
    mask = 0xF << (bits - 4)
    assert arithmetic.inserted_bits(a, b, position, length).tolist() == [
        int(y) & ~mask & top | int(x) << (bits - 4) & mask for x, y in zip(a, b, strict=True)
    ]
    for amount in (0, 1, bits - 1, bits, 4_000_000_000):
        shift = np.uint32(amount)
        assert arithmetic.shifted(a, shift, left=True).tolist() == [
            int(x) << min(amount, bits) & top for x in a
        ]
        signed = a.view(f"i{bits // 8}")
        assert arithmetic.shifted(signed, shift, left=False).tolist() == [
            int(x) >> min(amount, bits) for x in signed
        ]


def test_bytes_and_bits_of_words() -> None:
    words = GENERATOR.integers(0, 1 << 32, 64, dtype=np.uint32)
    a, b, selector = words[:20], words[20:40], words[40:60]
    permuted = arithmetic.permuted_bytes(a, b, selector)
    for x, y, code, found in zip(a, b, selector, permuted, strict=True):
        both = struct.pack("<II", x, y)
        wanted = bytearray()
        for place in range(4):
            nibble = int(code) >> 4 * place & 15
            byte = both[nibble & 7]
            wanted.append(255 * (byte >> 7) if nibble & 8 else byte)
        assert found == int.from_bytes(wanted, "little")
    numbers = np.append(words, np.array([0, 1, (1 << 32) - 1], np.uint32))
    assert arithmetic.bit_lengths(numbers).tolist() == [int(x).bit_length() for x in numbers]
    assert arithmetic.reversed_bits(numbers).tolist() == [
        int(f"{int(x):032b}"[::-1], 2) for x in numbers
    ]
    for table in (0xEA, 0x96, 0x78, 0xD2):
        wanted = np.zeros_like(a)
        for place in range(32):
            bits = ((each >> np.uint32(place)) & np.uint32(1) for each in (a, b, selector))
            first, second, third = bits
            index = 4 * first + 2 * second + third
            wanted |= ((np.uint32(table) >> index) & np.uint32(1)) << np.uint32(place)
        assert (arithmetic.lookup(a, b, selector, table) == wanted).all()


def test_extremes_of_numbers_keep_nan_and_the_sign_of_zeros() -> None:
    a = np.array([0.0, -0.0, np.nan, 1.0, -np.inf], np.float32)
    b = np.array([-0.0, 0.0, 1.0, np.nan, 2.0], np.float32)
    bits = [0, 0, 0x7FFFFFFF, 0x7FFFFFFF, 0x40000000]
    assert arithmetic.extreme_nan(a, b, largest=True).view(np.uint32).tolist() == bits
    bits = [1 << 31, 1 << 31, 0x7FFFFFFF, 0x7FFFFFFF, 0xFF800000]
    assert arithmetic.extreme_nan(a, b, largest=False).view(np.uint32).tolist() == bits


# ---- small kernels ----

KERNEL = """
.visible .entry small(
    .param .align 8 .b8 small_param_0[8]
)
.maxntid 64, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<8>;
    .shared .align 4 .b8 words[256];
    ld.param.u64 %rd1, [small_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 40;
{body}
    st.global.u32 [%rd3], %r2;
    ret;
}}
"""
# Every thread reads the word of thread 63 - i.
EXCHANGE = """
    mov.u32 %r3, words;
    shl.b32 %r4, %r1, 2;
    add.s32 %r5, %r3, %r4;
    st.shared.u32 [%r5], %r1;
    {barrier}
    sub.s32 %r6, 252, %r4;
    add.s32 %r7, %r3, %r6;
    ld.shared.u32 %r2, [%r7];
"""


def small(body: str) -> tuple[np.ndarray, dict[str, int]]:
    """Run a body on 64 threads. Return %r2 of every thread, and executed instructions by class."""
    out = np.zeros(64, np.uint32)
    job = struct.pack("<Q", out.ctypes.data)
    return out, Kernel(parse(KERNEL.format(body=body))).launch((1, 1), 64, job)


def test_lanes_that_part_meet_again() -> None:
    body = """
    mov.u32 %r2, 7;
    @!%p1 bra $L_else;
    add.s32 %r2, %r1, 100;
    bra $L_end;
$L_else:
    add.s32 %r2, %r1, 200;
$L_end:
    shfl.sync.bfly.b32 %r2|%p2, %r2, 1, 31, -1;
    """
    found, executed = small(body)
    lane = np.arange(64) ^ 1
    assert (found == np.where(lane < 40, lane + 100, lane + 200)).all()
    assert executed["shuffle"] == 64 and executed["memory"] == 64
    # mul, add, setp by all; either sum by every warp with a lane that takes it.
    assert executed["integer"] == 3 * 64 + 64 + 32


def test_lanes_that_have_ended_are_not_waited_for() -> None:
    """Every warp loses lanes before a shuffle, whose value of them is undefined, and a barrier."""
    body = """
    and.b32 %r4, %r1, 31;
    setp.ge.u32 %p2, %r4, 8;
    @%p2 bra $L_end;
    shfl.sync.bfly.b32 %r2, %r1, 8, 31, -1;
    bar.sync 0;
    st.global.u32 [%rd3], %r2;
    ret;
$L_end:
    mov.u32 %r2, 7;
    """
    found, _ = small(body)
    has_ended = np.arange(64) % 32 >= 8
    assert (found[has_ended] == 7).all()
    assert (found[~has_ended] == operations.UNDEFINED).all()


def test_a_barrier_orders_shared_memory() -> None:
    found, executed = small(EXCHANGE.format(barrier="bar.sync 0;"))
    assert (found == 63 - np.arange(64)).all() and executed["barrier"] == 64
    for barrier in ("", "bar.warp.sync -1;"):
        with pytest.raises(MemoryFault, match="race: no barrier lies between lanes"):
            small(EXCHANGE.format(barrier=barrier))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%p1 bra $L_over; bar.sync 0; bra $L_end; $L_over: bar.sync 0; $L_end:", "wait for each"),
        ("ld.shared.u32 %r2, [words+256];", "beyond 256 bytes"),
        ("add.s64 %rd3, %rd3, 2;", "no multiple of 4 bytes"),
    ],
)
def test_faults_are_named(body: str, message: str) -> None:
    with pytest.raises(MemoryFault, match=message):
        small(body)


@pytest.mark.parametrize("text", ["add.ftz.f32 %r2, %r1, %r1;", "cvt.rz.bf16x2.f32 %r2, %r1, %r1;"])
def test_unknown_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotImplementedError, match="PTX: "):
        small(text)
