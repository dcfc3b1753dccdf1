"""Addressed random bits: the published Philox words."""

from __future__ import annotations

import pytest

from ds_quant.kernels import random_bits

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
