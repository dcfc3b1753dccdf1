"""Addresses of random bits: randomness is a function of names, never of call order.

An address names a stream by (seed, role, parameter, rank, hop) in its key and by the optimizer
step in its counter; the element index does the rest. So two gathers of one step give equal bits,
whatever bucket a parameter travels in, and two ranks of a process group never share a gradient
stream. The rank is the place in that group, so equal places of two groups do share one: where
tensor-parallel ranks hold copies of a parameter, equal gradients stay equal.
Generator: Philox4x32-7 (Salmon et al., SC 2011, sec. 3.3; 7 rounds pass BigCrush).
Standard library only; `philox4x32` is the oracle of the tensor and CUDA versions.

[Note: who gets which bits]
Vector v is 8 consecutive elements of a row. Rows of one call follow each other, unless the address
says otherwise: v = first_vector + row * (row_vectors or ceil(numel / 8)) + j. Its counter is (v
low, v high, step low, step high), 32 bits each, its key (key low, key high). Element 2i of the
vector takes the low 16 bits of word i of the four words returned, element 2i + 1 the high 16 bits.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
PHILOX_ROUNDS = 7

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


class Role(IntEnum):
    """Use of a stream; part of its key."""

    WEIGHTS = 0
    GRADIENTS = 1


class Address(NamedTuple):
    """Address of a stream of random bits: key and step (64 bit each), index of the first vector,
    and vectors from one row to the next; None where rows follow each other.
    """

    key: int
    step: int
    first_vector: int = 0
    row_vectors: int | None = None

    def vectors_per_row(self, numel: int) -> int:
        """Vectors from one row of ``numel`` elements to the next."""
        return -(-numel // 8) if self.row_vectors is None else self.row_vectors

    @property
    def key_words(self) -> tuple[int, int]:
        """Philox key (k0, k1), 32 bits each."""
        return self.key & _MASK32, self.key >> 32 & _MASK32

    @property
    def step_words(self) -> tuple[int, int]:
        """Counter words (c2, c3), 32 bits each."""
        return self.step & _MASK32, self.step >> 32 & _MASK32


def key_of(*, seed: int, role: Role, parameter: int, rank: int = 0, hop: int = 0) -> int:
    """Key of the stream of one parameter, the same in all steps: those are a counter word."""
    key = 0
    for field in (seed, int(role), parameter, rank, hop):
        key = _splitmix64((key ^ (field & _MASK64)) + 0x9E3779B97F4A7C15)
    return key


def _splitmix64(z: int) -> int:
    """Finalizer of splitmix64 (Steele et al. 2014): a bijection on 64 bits that mixes well."""
    z &= _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = PHILOX_ROUNDS
) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a counter, in plain Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = PHILOX_M0 * c0, PHILOX_M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + PHILOX_W0) & _MASK32, (k1 + PHILOX_W1) & _MASK32
    return c0, c1, c2, c3


def shift_of(address: Address) -> float:
    """Random shift of a parameter in units of a step, uniform in [-1/2, 1/2); exact in fp32.

    One scalar shared by all groups of the parameter (QSDP: one r per application of Q^w).
    """
    word = philox4x32((0, 0, *address.step_words), address.key_words)[0]
    return (word >> 8) * 2.0**-24 - 0.5


@lru_cache(maxsize=64)
def flips_of(signs: Address) -> int:
    """Draw 128 random bits; a set bit flips the sign of its element of a rotation block."""
    words = philox4x32((signs.first_vector, 0, *signs.step_words), signs.key_words)
    return ~sum(word << 32 * i for i, word in enumerate(words))
