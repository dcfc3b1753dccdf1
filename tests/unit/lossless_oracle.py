"""Decodes a lossless message from docs/wire_format.md, section 8, bit by bit, in plain Python."""

from __future__ import annotations

import struct


class Bits:
    """A bit string that is read from its lowest bit on."""

    def __init__(self, data: bytes) -> None:
        self.number = int.from_bytes(data, "little")
        self.at = 0

    def take(self, count: int) -> int:
        value = self.number >> self.at & ((1 << count) - 1)
        self.at += count
        return value

    def zeros(self) -> int:
        """Return the number of zeros before the next one; take them and the one."""
        count = 0
        while not self.take(1):
            count += 1
        return count


def rice_list(bits: Bits, parameters: list[int]) -> list[int]:
    low = [bits.take(k) for k in parameters]
    quotients = [bits.zeros() for _ in parameters]
    found = []
    for q, k, rest in zip(quotients, parameters, low, strict=True):
        found.append(bits.take(16) if q == 16 else q << k | rest)
    return found


def ordered(bits: int) -> int:
    return bits if bits < 0x8000 else -1 - (bits & 0x7FFF)


def bits_of(order: int) -> int:
    order = (order + 0x8000) % 0x10000 - 0x8000
    return order if order >= 0 else 0x8000 | -1 - order


def parameter(scale: int, reference: int, exponent_at: int) -> int:
    magnitude = reference & 0x7FFF
    return min(max(scale - max(magnitude >> exponent_at, 1), 0), 15) if magnitude else 0


def decode(message: bytes, reference: list[int], exponent_at: int) -> list[int]:
    """Bits of the values. `exponent_at`: 7 for bf16, 10 for fp16."""
    if not reference:
        assert message == b""
        return []
    mode, checksum, nbytes = struct.unpack_from("<IIQ", message)
    assert nbytes == len(message)
    if mode == 0:
        values = list(reference)
    elif mode == 1:
        values = list(struct.unpack_from(f"<{len(reference)}H", message, 16))
    else:
        values = _blocks(message[16:], reference, exponent_at)
    assert checksum == sum(v * weight(i) for i, v in enumerate(values)) % 2**32
    return values


def weight(i: int) -> int:
    x = i * 0x9E3779B1 % 2**32
    return (x ^ x >> 15) * 0x85EBCA77 % 2**32 | 1


def _blocks(body: bytes, reference: list[int], exponent_at: int) -> list[int]:
    count = -(-len(reference) // 2048)
    payload, start, values = body[8 * count :], 0, []
    for block in range(count):
        end, changed, scale, kind = struct.unpack_from("<IHBB", body, 8 * block)
        part = reference[2048 * block :][:2048]
        bits = Bits(payload[4 * start : 4 * end])
        if kind == 1:
            values += [bits.take(16) for _ in part]
        else:
            values += _coded(bits, part, changed, scale, kind, exponent_at)
        assert -(-bits.at // 32) == end - start, "words of the payload"
        start = end
    return values


def _coded(
    bits: Bits, reference: list[int], changed: int, scale: int, kind: int, exponent_at: int
) -> list[int]:
    symbols, places = [0] * len(reference), []
    if kind == 2:
        places = list(range(len(reference)))
    elif kind >= 16:
        at = -1
        for gap in rice_list(bits, [kind - 16] * changed):
            at += gap + 1
            places.append(at)
    parameters = [parameter(scale, reference[place], exponent_at) for place in places]
    for place, symbol in zip(places, rice_list(bits, parameters), strict=True):
        symbols[place] = symbol + (kind >= 16)
    differences = [u // 2 if u % 2 == 0 else -(u + 1) // 2 for u in symbols]
    return [bits_of(ordered(h) + d) for h, d in zip(reference, differences, strict=True)]
