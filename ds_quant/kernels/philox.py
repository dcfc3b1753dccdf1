"""Philox4x32-7 in int64 tensor operations: random bits of whole ranges of vectors at once.

Bit-equal to rng.philox4x32. May import torch, layout, rng.

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

from typing import NamedTuple

import torch

from ds_quant import rng
from ds_quant.kernels import scratch

_MASK32 = 0xFFFFFFFF
_BLOCK_VECTORS = 1 << 16  # measured: the cost of a call per operation beats the cache below this


def random_bits(address: rng.Address, first_vector: int, out: torch.Tensor) -> None:
    """Fill `out` (vectors, 8) uint16, contiguous, with the bits of vectors first_vector, ...

    first_vector is absolute. See [Note: who gets which bits] in ds_quant/rng.py.
    """
    words = out.view(torch.int64)  # (vectors, 2): words 0 and 1, words 2 and 3
    start, stop = first_vector, first_vector + out.shape[0]
    while start < stop:
        # The high counter word is a scalar: never cross a multiple of 2^32 inside a block.
        count = min(stop - start, _BLOCK_VECTORS, (1 << 32) - (start & _MASK32))
        position = start - first_vector
        _fill_block(address, start, words[position : position + count])
        start += count


class _Products(NamedTuple):
    """Products (M0 c0, M1 c2) of a round, each as it is used by the next one."""

    both: torch.Tensor  # (2, vectors) int64
    high0: torch.Tensor  # (2 * vectors - 1,) int32, from the high half of the first product on
    high1: torch.Tensor
    low0: torch.Tensor  # the same length, from the low half of the first product on: c3
    low1: torch.Tensor  # c1


def _products(slot: str, count: int, device: torch.device) -> _Products:
    both = scratch.take(slot, (2, count), dtype=torch.int64, device=device)
    first, second = both.view(torch.int32).unbind(0)
    return _Products(both, first[1:], second[1:], first[:-1], second[:-1])


def _fill_block(address: rng.Address, first: int, out: torch.Tensor) -> None:
    """Words of vectors first .. first + len(out) - 1, equal in their high 32 bits, packed in out.

    out: (vectors, 2) int64. Letters as in rng.philox4x32.
    """
    count, device = out.shape[0], out.device
    state = scratch.take("philox state", (2, count), dtype=torch.int64, device=device)
    c0, c2 = state.unbind(0)
    new, old = _products("philox new", count, device), _products("philox old", count, device)
    keys = _constants(address.key_words, device)
    _first_rounds(address, first, c0, c2, old.both)

    c0_low, c2_low = (word.view(torch.int32)[:-1] for word in (c0, c2))
    for key in keys.round_keys[2:]:
        torch.mul(state, keys.multipliers, out=new.both)
        torch.bitwise_xor(new.high1, old.low1, out=c0_low)
        torch.bitwise_xor(new.high0, old.low0, out=c2_low)
        # c0_low ends before the last high half; the mask clears that one as well.
        state.bitwise_xor_(key).bitwise_and_(keys.mask)
        new, old = old, new

    old.both.bitwise_left_shift_(keys.half)
    torch.bitwise_or(c0, old.both[1], out=out[:, 0])
    torch.bitwise_or(c2, old.both[0], out=out[:, 1])


class _Constants(NamedTuple):
    """Scalars as tensors: an operation takes those faster than Python integers."""

    round_keys: tuple[torch.Tensor, ...]  # one (2, 1) int64 per round
    multipliers: torch.Tensor  # (2, 1) int64
    mask: torch.Tensor  # () int64, 2^32 - 1
    half: torch.Tensor  # () int64, 32


def _constants(key_words: tuple[int, int], device: torch.device) -> _Constants:
    k0, k1 = key_words
    columns = [
        ((k0 + i * rng.PHILOX_W0) & _MASK32, (k1 + i * rng.PHILOX_W1) & _MASK32)
        for i in range(rng.PHILOX_ROUNDS)
    ]
    columns += [(rng.PHILOX_M0, rng.PHILOX_M1), (_MASK32, 32)]
    table = torch.tensor(columns, dtype=torch.int64, device=device).unsqueeze(2)
    *round_keys, multipliers, rest = table.unbind(0)
    mask, half = rest.view(2).unbind(0)
    return _Constants(tuple(round_keys), multipliers, mask, half)


def _first_rounds(
    address: rng.Address, first: int, c0: torch.Tensor, c2: torch.Tensor, old: torch.Tensor
) -> None:
    """Rounds 1 and 2, whose other words are scalars: fills c0, c2 and the products `old`."""
    k0, k1 = address.key_words
    next_k0, next_k1 = (k0 + rng.PHILOX_W0) & _MASK32, (k1 + rng.PHILOX_W1) & _MASK32
    c2_word, c3_word = address.step_words
    product = rng.PHILOX_M1 * c2_word
    c0_word = (product >> 32) ^ (first >> 32 & _MASK32) ^ k0
    c1_word = product & _MASK32
    product = rng.PHILOX_M0 * c0_word
    c2_of_round_3, c3_of_round_3 = (product >> 32) ^ next_k1, product & _MASK32

    low = first & _MASK32
    torch.arange(low, low + c0.shape[0], out=c0)
    torch.mul(c0, rng.PHILOX_M0, out=old[0])
    torch.bitwise_right_shift(old[0], 32, out=c2)
    c2.bitwise_xor_(c3_word ^ k1).bitwise_and_(_MASK32)
    torch.mul(c2, rng.PHILOX_M1, out=old[1])
    torch.bitwise_right_shift(old[1], 32, out=c0)
    c0.bitwise_xor_(c1_word ^ next_k0).bitwise_and_(_MASK32)
    torch.bitwise_xor(old[0], c2_of_round_3, out=c2)
    c2.bitwise_and_(_MASK32)
    old[0].fill_(c3_of_round_3)
