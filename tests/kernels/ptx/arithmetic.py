"""The arithmetic of PTX instructions, on arrays of lanes.

Every f32 operation rounds once, to nearest even, keeps denormals, and has one NaN.
"""

from __future__ import annotations

import numpy as np

NAN = np.uint32(0x7FFFFFFF)  # of every f32 operation
HALF_NAN = np.uint16(0x7FFF)

# ---- numbers ----


def rounded(values: np.ndarray) -> np.ndarray:
    """Return f32 results with the NaN of a GPU."""
    values = np.asarray(values)
    is_nan = np.isnan(values)
    if is_nan.any():
        values = np.where(is_nan, NAN.view(np.float32), values)
    return values


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in f32, rounded once.

    The product is exact in f64. The sum is rounded to odd there, which a second rounding, to 24 of
    53 bits, cannot tell from the exact sum.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    is_even = total.view(np.uint64) & np.uint64(1) == 0
    inexact = np.isfinite(total) & (error != 0) & is_even
    toward = np.where(error > 0, np.inf, -np.inf)
    total = np.where(inexact, np.nextafter(total, toward), total)
    return rounded(total.astype(np.float32))


def reciprocal(values: np.ndarray, shift: int) -> np.ndarray:
    """Return 1 / values, moved by ``shift`` units in the last place. Denormals are zeros."""
    found = np.asarray(np.float32(1) / _flushed(values))
    moved = (found.view(np.int32) + np.int32(shift)).view(np.float32)
    found = np.where(np.isfinite(found) & (found != 0), moved, found)
    return rounded(_flushed(found))


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(0, values), values)


def _extreme(a: np.ndarray, b: np.ndarray, *, largest: bool) -> np.ndarray:
    """Return where a is taken of (a, b), neither NaN. -0 is below +0."""
    if largest:
        return (a > b) | ((a == b) & ~np.signbit(a))
    return (a < b) | ((a == b) & np.signbit(a))


def extreme_nan(a: np.ndarray, b: np.ndarray, *, largest: bool) -> np.ndarray:
    """max.NaN.f32 or min.NaN.f32."""
    found = np.where(_extreme(a, b, largest=largest), a, b)
    return np.where(np.isnan(a) | np.isnan(b), NAN.view(np.float32), found)


def extreme_of_pairs(a: np.ndarray, b: np.ndarray, *, largest: bool, kind: str) -> np.ndarray:
    """max.NaN or min.NaN of two halves in each 32 bits. kind: "bf16x2" or "f16x2"."""
    first, second = (np.ascontiguousarray(each).view(np.uint16) for each in (a, b))
    if kind == "f16x2":
        x, y = first.view(np.float16), second.view(np.float16)
    else:
        x, y = bf16_values(first), bf16_values(second)
    found = np.where(_extreme(x, y, largest=largest), first, second)
    return np.where(np.isnan(x) | np.isnan(y), HALF_NAN, found).view(np.uint32)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Return f32 values as bits of bf16, rounded to nearest even: u16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), HALF_NAN, rounded)


def to_fp16(values: np.ndarray) -> np.ndarray:
    """Return f32 values as bits of fp16, rounded to nearest even: u16."""
    bits = np.asarray(values, np.float16).view(np.uint16)
    return np.where(np.isnan(values), HALF_NAN, bits)


def upper_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the upper 32 or 64 bits of products of unsigned numbers."""
    if a.dtype == np.uint32:
        return ((a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    carry = ((a & low) * (b & low)) >> half
    middle = (a >> half) * (b & low) + carry
    other = (a & low) * (b >> half) + (middle & low)
    return (a >> half) * (b >> half) + (middle >> half) + (other >> half)


# ---- bits ----


def lookup(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: bit i of the result is bit 4 a_i + 2 b_i + c_i of the table."""
    total = np.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            term = a if place & 4 else ~a
            term = term & (b if place & 2 else ~b)
            total |= term & (c if place & 1 else ~c)
    return total


def permuted_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: byte i is byte (selector >> 4i) & 7 of a (0-3) and b (4-7), or its sign 8 times."""
    both = np.stack([a, b], axis=-1).view(np.uint8)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
    found = np.take_along_axis(both, (nibbles & np.uint32(7)).view(np.int32), axis=1)
    if (nibbles & np.uint32(8)).any():
        signs = np.where(found & np.uint8(128), np.uint8(255), np.uint8(0))
        found = np.where(nibbles & np.uint32(8), signs, found)
    return np.ascontiguousarray(found).view(np.uint32)[:, 0]


def inserted_bits(
    field: np.ndarray, into: np.ndarray, position: np.ndarray, length: np.ndarray
) -> np.ndarray:
    """bfi: ``length`` bits of field at ``position`` of into."""
    kind = into.dtype.type
    one, width = kind(1), kind(8 * into.dtype.itemsize)
    position, length = (each.astype(kind) & kind(255) for each in (position, length))
    inside = np.minimum(position, width - one)
    ones = (one << np.minimum(length, width - one)) - one
    ones = np.where(length >= width, ~kind(0), ones)
    mask = np.where(position >= width, kind(0), ones << inside)
    return (into & ~mask) | ((field << inside) & mask)


def bit_lengths(values: np.ndarray) -> np.ndarray:
    """Return the place of the highest one, counted from 1, of u32: 0 for 0."""
    return np.frexp(values.astype(np.float64))[1].astype(np.uint32)


def reversed_bits(values: np.ndarray) -> np.ndarray:
    total = np.zeros_like(values)
    for place in range(32):
        total |= ((values >> np.uint32(place)) & np.uint32(1)) << np.uint32(31 - place)
    return total


def shifted(values: np.ndarray, amount: np.ndarray, *, left: bool) -> np.ndarray:
    """shl and shr: by the number of bits or more gives 0, of negative numbers -1."""
    width = 8 * values.dtype.itemsize
    inside = np.minimum(amount, np.uint32(width - 1)).astype(values.dtype)
    if not left and values.dtype.kind == "i":
        return values >> inside
    found = values << inside if left else values >> inside
    return np.where(amount >= width, values.dtype.type(0), found)
