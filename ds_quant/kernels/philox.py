"""Philox4x32-7 in int64 tensor operations: random bits of whole ranges of vectors at once.

Bit-equal to rng.philox4x32. An int64 product wraps but keeps all 64 bits of a 32 x 32 product;
words carry arbitrary high halves and are masked once, just before they are multiplied.
The words of a step are constant over a call, so the first rounds multiply plain Python integers.
May import torch, layout, rng.
"""

from __future__ import annotations

import torch

from ds_quant import rng
from ds_quant.kernels import scratch

_MASK32 = 0xFFFFFFFF
_BLOCK_VECTORS = 1 << 15  # int64 scratch of a block stays near the second-level cache


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


def _round_keys(key_words: tuple[int, int]) -> list[tuple[int, int]]:
    k0, k1 = key_words
    return [
        ((k0 + i * rng.PHILOX_W0) & _MASK32, (k1 + i * rng.PHILOX_W1) & _MASK32)
        for i in range(rng.PHILOX_ROUNDS)
    ]


def _fill_block(address: rng.Address, first: int, out: torch.Tensor) -> None:
    """Words of vectors first .. first + len(out) - 1, equal in their high 32 bits, packed in out.

    out: (vectors, 2) int64. Letters as in rng.philox4x32; p and q are the two products.
    """
    keys = _round_keys(address.key_words)
    shape = out.shape[:1]

    def buffer(name: str) -> torch.Tensor:
        return scratch.take("philox " + name, shape, dtype=torch.int64, device=out.device)

    c0, c2, p, q, old_p, old_q = (buffer(n) for n in ("c0", "c2", "p", "q", "old p", "old q"))
    c2_word, c3_word = address.step_words

    # Round 1: only c0 is a tensor. Its successor and that of c1 are scalars.
    low = first & _MASK32
    torch.arange(low, low + shape[0], out=c0)
    product = rng.PHILOX_M1 * c2_word
    c0_word = (product >> 32) ^ (first >> 32 & _MASK32) ^ keys[0][0]
    c1_word = product & _MASK32
    torch.mul(c0, rng.PHILOX_M0, out=old_p)  # c3 of round 2
    torch.bitwise_right_shift(old_p, 32, out=c2)
    c2.bitwise_xor_(c3_word ^ keys[0][1]).bitwise_and_(_MASK32)

    # Round 2: c0 and c1 are scalars.
    product = rng.PHILOX_M0 * c0_word
    torch.mul(c2, rng.PHILOX_M1, out=old_q)  # c1 of round 3
    torch.bitwise_right_shift(old_q, 32, out=c0)
    c0.bitwise_xor_(c1_word ^ keys[1][0]).bitwise_and_(_MASK32)
    torch.bitwise_xor(old_p, (product >> 32) ^ keys[1][1], out=c2)
    c2.bitwise_and_(_MASK32)
    old_p.fill_(product & _MASK32)  # c3 of round 3

    for k0, k1 in keys[2:]:
        torch.mul(c0, rng.PHILOX_M0, out=p)
        torch.mul(c2, rng.PHILOX_M1, out=q)
        torch.bitwise_right_shift(q, 32, out=c0)
        c0.bitwise_xor_(old_q).bitwise_xor_(k0).bitwise_and_(_MASK32)
        torch.bitwise_right_shift(p, 32, out=c2)
        c2.bitwise_xor_(old_p).bitwise_xor_(k1).bitwise_and_(_MASK32)
        p, old_p, q, old_q = old_p, p, old_q, q

    torch.bitwise_or(c0, old_q.bitwise_left_shift_(32), out=out[:, 0])
    torch.bitwise_or(c2, old_p.bitwise_left_shift_(32), out=out[:, 1])
