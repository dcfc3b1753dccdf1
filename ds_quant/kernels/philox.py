"""Philox4x32-7 in int64 tensor operations: random bits of whole ranges of vectors at once.

Bit-equal to rng.philox4x32.

[Note: Philox in few operations]
An int64 product wraps but keeps all 64 bits of a 32 x 32 product. The counter words c0 and c2 are
multiplied, so they are masked to 32 bits; c1 and c3 are the low halves of the products of the
round before and are never copied out of them. On a little-endian machine the high half of
product i and the low half of word i lie at int32 positions 2i + 1 and 2i, so

    products.view(int32)[1:] ^ words.view(int32)[:-1]

is "shift right by 32, then xor" in one pass; what it leaves in the high halves falls to the mask.
The step is constant over a call, so the first two rounds multiply plain Python integers.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import torch

from ds_quant.kernels import random_bits as rng
from ds_quant.kernels import scratch

_MASK32 = 0xFFFFFFFF
_BLOCK_VECTORS = 1 << 17  # 1 MB per word; measured: below 2^16 the cost of a call dominates


def random_bits(address: rng.Address, first_vector: int, out: torch.Tensor) -> None:
    """Fill `out` (vectors, 8) uint16, contiguous, with the bits of vectors first_vector, ...

    first_vector is absolute. See [Note: who gets which bits] in ds_quant/kernels/random_bits.py.
    """
    words = out.view(torch.int32)  # (vectors, 4)
    keys = _constants(address.key_words, out.device)
    start, stop = first_vector, first_vector + out.shape[0]
    while start < stop:
        # The high counter word is a scalar: never cross a multiple of 2^32 inside a block.
        count = min(stop - start, _BLOCK_VECTORS, (1 << 32) - (start & _MASK32))
        position = start - first_vector
        _fill_block(address, start, keys, words[position : position + count])
        start += count


class _Products(NamedTuple):
    """Products (M0 c0, M1 c2) of a round, each as it is used by the next one.

    The (2 * vectors - 1,) int32 views start at the high and at the low half of the first product.
    """

    both: torch.Tensor  # (2, vectors) int64
    high0: torch.Tensor
    high1: torch.Tensor
    low0: torch.Tensor  # c3
    low1: torch.Tensor  # c1


class _Space(NamedTuple):
    """Scratch of a block. c0 and c2 are the rows of state, also as int32 from their low halves."""

    state: torch.Tensor  # (2, vectors) int64
    c2: torch.Tensor  # (vectors,) int64
    c0_low: torch.Tensor  # (2 * vectors - 1,) int32
    c2_low: torch.Tensor
    products: tuple[_Products, _Products]  # used in turns


def _space(count: int, device: torch.device) -> _Space:
    def take(slot: str) -> torch.Tensor:
        return scratch.take(slot, (2, count), dtype=torch.int64, device=device)

    def products(slot: str) -> _Products:
        both = take(slot)
        first, second = both.view(torch.int32).unbind(0)
        return _Products(both, first[1:], second[1:], first[:-1], second[:-1])

    def build() -> _Space:
        # Slots of the reference kernels, which are free meanwhile and then still in cache.
        state, pair = take("values"), (products("random"), products("philox"))
        c0_low, c2_low = state.view(torch.int32)[:, :-1].unbind(0)
        return _Space(state, state[1], c0_low, c2_low, pair)

    return scratch.derived(("philox", count, device), build, device=device)


def _fill_block(address: rng.Address, first: int, keys: _Constants, out: torch.Tensor) -> None:
    """Words of vectors first .. first + len(out) - 1, which have equal high counter words.

    out: (vectors, 4) int32. Letters as in rng.philox4x32.
    """
    space = _space(out.shape[0], out.device)
    state, (old, new) = space.state, space.products
    _first_rounds(address, first, space, old)

    for key in keys.round_keys[2:-1]:
        torch.mul(state, keys.multipliers, out=new.both)
        torch.bitwise_xor(new.high1, old.low1, out=space.c0_low)
        torch.bitwise_xor(new.high0, old.low0, out=space.c2_low)
        # c0_low ends before the last high half; the mask clears that one as well.
        state.bitwise_xor_(key).bitwise_and_(keys.mask)
        new, old = old, new

    # Last round, each word straight to its place. Row 1 of the products belongs to w0 and w1.
    torch.mul(state, keys.multipliers, out=new.both)
    old.both.bitwise_xor_(keys.round_keys[-1].flip(0))
    w0, w1, w2, w3 = out.unbind(1)
    torch.bitwise_xor(new.high1[::2], old.low1[::2], out=w0)
    torch.bitwise_xor(new.high0[::2], old.low0[::2], out=w2)
    w1.copy_(new.low1[::2])
    w3.copy_(new.low0[::2])


class _Constants(NamedTuple):
    """Scalars as tensors: an operation takes those faster than Python integers."""

    round_keys: tuple[torch.Tensor, ...]  # one (2, 1) int64 per round
    multipliers: torch.Tensor  # (2, 1) int64
    mask: torch.Tensor  # () int64, 2^32 - 1


def _constants(key_words: tuple[int, int], device: torch.device) -> _Constants:
    columns = [_round_key(key_words, i) for i in range(rng.PHILOX_ROUNDS)]
    columns += [(rng.PHILOX_M0, rng.PHILOX_M1), (_MASK32, 0)]
    if scratch.is_synchronous(device):
        table = torch.tensor(columns, dtype=torch.int64).unsqueeze(2)
    else:  # filled on the device: a copy from the host would wait for the stream
        table = torch.empty(len(columns), 2, 1, dtype=torch.int64, device=device)
        for place, number in zip(table.view(-1), itertools.chain(*columns), strict=True):
            place.fill_(number)
    *round_keys, multipliers, rest = table.unbind(0)
    return _Constants(tuple(round_keys), multipliers, rest[0, 0])


def _round_key(key_words: tuple[int, int], index: int) -> tuple[int, int]:
    k0, k1 = key_words
    return (k0 + index * rng.PHILOX_W0) & _MASK32, (k1 + index * rng.PHILOX_W1) & _MASK32


def _first_rounds(address: rng.Address, first: int, space: _Space, old: _Products) -> None:
    """Rounds 1 and 2, whose other words are scalars: fills the state and the products `old`."""
    key, next_key = (_round_key(address.key_words, i) for i in range(2))
    c2_word, c3_word = address.step_words
    product = rng.PHILOX_M1 * c2_word
    c0_word = (product >> 32) ^ (first >> 32 & _MASK32) ^ key[0]
    c1_word = product & _MASK32
    product = rng.PHILOX_M0 * c0_word

    # M0 * c0 for consecutive c0; wraps like the product.
    start = _signed(rng.PHILOX_M0 * (first & _MASK32), 64)
    torch.add(_ramp(len(space.c2), space.c2.device), start, out=old.both[0])
    torch.bitwise_xor(old.high0, _signed(c3_word ^ key[1], 32), out=space.c2_low)
    space.c2.bitwise_and_(_MASK32)
    torch.mul(space.c2, rng.PHILOX_M1, out=old.both[1])
    torch.bitwise_xor(old.high1, _signed(c1_word ^ next_key[0], 32), out=space.c0_low)
    torch.bitwise_xor(old.both[0], (product >> 32) ^ next_key[1], out=space.c2)
    space.state.bitwise_and_(_MASK32)
    old.both[0].fill_(product & _MASK32)


def _ramp(count: int, device: torch.device) -> torch.Tensor:
    """M0 * (0, 1, 2, ...) as (count,) int64; not kept off the CPU, as another stream's is late."""
    if scratch.is_synchronous(device):
        return _cpu_ramp()[:count]
    return torch.arange(count, device=device) * rng.PHILOX_M0


@cache
def _cpu_ramp() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(_BLOCK_VECTORS) * rng.PHILOX_M0


def _signed(word: int, bits: int) -> int:
    """The signed integer of `bits` bits with the same bit pattern."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word
