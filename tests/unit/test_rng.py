"""Addressed random bits: Philox words, distinct streams, and the torch version of both."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_quant.kernels import random_bits, reference

CPU = torch.device("cpu")
MASK32 = 0xFFFFFFFF

# Random123's known-answer file (kat_vectors), philox4x32: rounds, counter, key, words.
KNOWN_ANSWERS = (
    (7, (0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (MASK32,) * 4, (MASK32,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
    (10, (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
)


@pytest.mark.parametrize("rounds, counter, key, words", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(rounds, counter, key, words):
    assert random_bits.philox4x32(counter, key, rounds) == words


@pytest.mark.parametrize("first", (0, 1, (1 << 32) - 5, (1 << 40) + 3, (1 << 63) + (1 << 32) - 2))
@pytest.mark.parametrize("step", (0, 1, (1 << 31) + 7, (1 << 64) - 1))
def test_tensor_philox_equals_the_oracle_word_for_word(first, step):
    address = random_bits.Address(key=0xFEDCBA9876543210, step=step)
    bits = reference.random_bits(address, first, 40, CPU)
    for index, row in enumerate(bits.tolist()):
        vector = (first + index) & ((1 << 64) - 1)
        counter = (vector & MASK32, vector >> 32, step & MASK32, step >> 32)
        words = random_bits.philox4x32(counter, address.key_words)
        assert row == [half for word in words for half in (word & 0xFFFF, word >> 16)]


def test_distinct_names_give_distinct_keys():
    names = itertools.product(range(4), random_bits.Role, range(40), range(12), range(2))
    keys = [
        random_bits.address(
            seed=seed, role=role, step=9, parameter=parameter, rank=rank, hop=hop
        ).key
        for seed, role, parameter, rank, hop in names
    ]
    assert len(set(keys)) == len(keys) == 4 * 2 * 40 * 12 * 2
    assert all(0 <= key < 1 << 64 for key in keys)
    # Both key words vary: a stream is not told apart by half of its key only.
    assert len({key & MASK32 for key in keys}) > 0.999 * len(keys)
    assert len({key >> 32 for key in keys}) > 0.999 * len(keys)


def test_exchanged_field_values_do_not_collide():
    base = dict(seed=1, role=random_bits.Role.GRADIENTS, step=0)
    pair = [
        random_bits.address(parameter=2, rank=3, **base).key,
        random_bits.address(parameter=3, rank=2, **base).key,
        random_bits.address(parameter=2, rank=0, hop=3, **base).key,
    ]
    assert len(set(pair)) == 3


def test_step_is_a_counter_word_and_leaves_the_key():
    first, second = (
        random_bits.address(seed=-5, role=random_bits.Role.WEIGHTS, step=step, parameter=1)
        for step in (3, 4)
    )
    assert first.key == second.key
    assert (first.step, second.step) == (3, 4)
    assert random_bits.Address(key=0, step=(5 << 32) | 6).step_words == (6, 5)
    assert random_bits.Address(key=(5 << 32) | 6, step=0).key_words == (6, 5)


def test_shifts_are_exact_in_fp32_and_cover_the_half_open_unit_interval():
    shifts = [random_bits.shift_of(random_bits.Address(key=11, step=step)) for step in range(4000)]
    assert all(-0.5 <= shift < 0.5 for shift in shifts)
    assert all(torch.tensor(shift, dtype=torch.float32).item() == shift for shift in shifts)
    # Uniform: the mean of N has deviation 1 / sqrt(12 N), the largest gap to the ends ~ 1 / N.
    assert abs(sum(shifts) / 4000) < 4 / (12 * 4000) ** 0.5
    assert min(shifts) < -0.5 + 10 / 4000 and max(shifts) > 0.5 - 10 / 4000


def test_shift_uses_the_high_24_bits_of_word_0_of_vector_0():
    address = random_bits.Address(key=99, step=(7 << 32) | 1, first_vector=12)
    word = random_bits.philox4x32((0, 0, 1, 7), (99, 0))[0]
    assert random_bits.shift_of(address) == (word >> 8) / 2**24 - 0.5
