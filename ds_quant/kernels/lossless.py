"""Lossless differences of 16-bit floats in torch, on any device: the specification of its bytes.

[Note: lossless format]
Values and reference are 16-bit floats; the receiver holds the reference and gets the values bit
for bit. Float bits b order as the integers I(b) = b ^ (b < 0 ? 0x7fff : 0), a bijection of int16:
NaN, Inf and -0 are integers like all others. d = I(value) - I(reference) modulo 2^16, and
u = zigzag(d) = (d << 1) ^ (d >> 15), 0 to 65535, is what is coded; u = 0 means unchanged.

All integers are little-endian, bit strings start at the lowest bit. A message of no elements has
0 bytes, any other is

    mode u32 | checksum u32 | bytes u64 | body, filled with zeros to a multiple of 16 bytes

checksum  sum of bits(value i) * w(i) modulo 2^32: what was decoded is what was sent, and both sides
          held the same reference. w(i) = y * 0x85EBCA77 | 1 with y = x ^ x >> 15 and
          x = i * 0x9E3779B1, all modulo 2^32: a field in the wrong place changes many neighbours
          by a little, whose sum under weights in a row is zero too often
mode 0    every element unchanged; no body
mode 1    the bits of the values, 2 bytes each; when mode 2 would take at least as many bytes
mode 2    blocks of 2048 elements, the last may be short: one entry of 8 bytes per block, then the
          payloads in their order

    end u32 | count u16 | scale u8 | kind u8

end is where the payload of the block ends, in words of 4 bytes from the start of the first
payload: a block is decoded with its entry and the end of the one before. Bits after the last
field of a payload are zero. No payload is longer than that of kind 1. Kinds:

0         unchanged, no payload; count and scale 0
1         the bits of the values, 2 bytes each; count and scale 0
2         a Rice list of every u, parameters k(scale, reference); count 0
16 + r    a Rice list of `count` gaps, parameter r (0 to 15), then a Rice list of u - 1 of the
          changed elements, parameters k(scale, reference). A gap is the number of unchanged
          elements since the last changed one, or since the start of the block.

k(scale, reference) = clamp(scale - e, 0, 15), e the biased exponent of the reference, at least 1;
0 where the reference is zero: a step of the optimizer is of one size for all, so in units of the
last place it doubles with every exponent less.

A Rice list of symbols x with parameters k, q = min(x >> k, 16), is three runs of fields without
gaps: the low k bits of every x, then every q as q zeros and a one, then 16 bits x of those with
q = 16. The runs can be read in parallel: where the low bits lie follows from the parameters, and
the ones are found by counting.

[Note: lossless choices] The sender's, no part of the format, but equal on every back end.
scale     s is the mean of (bits of u) + e, rounded down, over the changed elements whose reference
          is not zero (0 without any). The best of s - 3, s - 2, s - 1, s, clamped to 0..255, and
          the first of equals; for each list of its own
r         the better of n and n - 1, n = floor(log2(elements / changed)); n for equals
kind      the fewest words of raw, Rice and, if at most half of the elements changed, gaps;
          the earlier named of equals
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ds_quant.kernels.wire import ceil_div, round_up

BLOCK = 2048  # elements
HEADER = 16  # bytes
ENTRY = 8  # bytes
ESCAPE = 16  # quotient from which on a symbol travels as it is
SYMBOL = 16  # bits of a symbol, and of a value
MAX_K = 15
WORD = 32  # bits
MAX_NUMEL = 1 << 32  # so that ends fit 32 bits

UNCHANGED, RAW, BLOCKS = 0, 1, 2  # modes of a message
SAME, PLAIN, RICE, GAPS = 0, 1, 2, 16  # kinds of a block

EXPONENT = {torch.bfloat16: (7, 255), torch.float16: (10, 31)}  # lowest bit and mask
_ZERO = 511  # exponent of a zero: above every scale
_RUN = 512  # blocks that are worked on at once
_U16, _U32 = 0xFFFF, 0xFFFFFFFF


# What can be wrong with a message; the numbers of the C++ and CUDA kernels are places from 1 on.
PROBLEMS = (
    "length", "mode", "kind", "scale", "count", "offset", "quotient", "symbol", "gap", "checksum",
)  # fmt: skip


class _Damaged(ValueError):
    """One of PROBLEMS in a message."""


def problem_of(status: Sequence[int]) -> str | None:
    """Return a sentence about the damage of a row; None for an intact row.

    status: (2,), the number of a problem, 0 for none, and the difference of the checksums.
    """
    number, difference = status
    if not (number or difference):
        return None
    return (
        f"lossless message: wrong {PROBLEMS[number - 1] if number else 'checksum'}; it was damaged "
        "on its way, or the ranks hold different references"
    )


def blocks_of(numel: int) -> int:
    """Blocks of a message of `numel` elements."""
    return ceil_div(numel, BLOCK)


def max_bytes(numel: int) -> int:
    """Most bytes of a message of `numel` elements, a multiple of 16; 0 for no elements."""
    if not 0 <= numel <= MAX_NUMEL:
        raise ValueError(f"numel = {numel}: a lossless message holds 0 to {MAX_NUMEL} elements")
    return round_up(HEADER + 2 * numel, 16) if numel else 0


# ---- symbols ----


class _Run(NamedTuple):
    """Consecutive elements, whole blocks but for the last; (elements,) int64."""

    block: torch.Tensor  # in this run
    reference: torch.Tensor  # its bits, 0 to 65535
    exponent: torch.Tensor  # e of the reference, _ZERO where it is zero


def _run_of(reference: torch.Tensor) -> _Run:
    bits = _bits(reference)
    lowest, mask = EXPONENT[reference.dtype]
    exponent = (bits >> lowest & mask).clamp_(min=1)
    exponent.masked_fill_(bits & 0x7FFF == 0, _ZERO)
    return _Run(_places(reference) // BLOCK, bits, exponent)


def _places(values: torch.Tensor) -> torch.Tensor:
    return torch.arange(values.numel(), device=values.device)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bits of 16-bit floats, 0 to 65535."""
    return values.view(torch.int16).long() & _U16


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """I of [Note: lossless format], modulo 2^16; its own inverse."""
    return bits ^ (bits >> 15) * 0x7FFF


def _symbols(bits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """u of values and reference, all as bits."""
    difference = _ordered(bits) - _ordered(reference) & _U16
    return (difference << 1 & _U16) ^ (difference >> 15) * _U16


def _restored(symbols: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Bits of the values that give these symbols."""
    difference = symbols >> 1 ^ (symbols & 1) * _U16
    return _ordered(_ordered(reference) + difference & _U16)


def _parameters(scale: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return (scale - exponent).clamp_(0, MAX_K)


def _sums(numbers: torch.Tensor, block: torch.Tensor, blocks: int) -> torch.Tensor:
    """Sums per block."""
    return numbers.new_zeros(blocks).index_add_(0, block, numbers)


def _offsets(numbers: torch.Tensor, block: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Sums of those before in the same block; `sums` are the blocks' own."""
    return numbers.cumsum(0) - numbers - (sums.cumsum(0) - sums)[block]


def _checksum(values: torch.Tensor, start: int) -> int:
    """Part of the message's checksum that elements from `start` on contribute."""
    x = (_places(values) + start) * 0x9E3779B1 & _U32
    weights = (x ^ x >> 15) * 0x85EBCA77 & _U32 | 1
    return int((_bits(values) * weights & _U32).sum()) & _U32


# ---- encode ----


class _Plan(NamedTuple):
    """How the sender codes the blocks of a run; (blocks,) int64."""

    words: torch.Tensor
    counts: torch.Tensor
    scale: torch.Tensor
    kind: torch.Tensor


class _Changes(NamedTuple):
    """Elements of some blocks that changed, in their order."""

    elements: torch.Tensor  # in the run
    block: torch.Tensor
    gap: torch.Tensor


def encode(
    values: torch.Tensor,  # (numel,) bf16 or fp16
    reference: torch.Tensor,  # (numel,) of the same dtype
    out: torch.Tensor,  # (max_bytes(numel),) uint8
    nbytes: torch.Tensor,  # (1,) int64, receives the bytes used
) -> None:
    """Write a message; bytes of `out` past it stay as they are."""
    numel = values.numel()
    if numel == 0:
        nbytes.zero_()
        return
    table, payload, checksum, before = [], [], 0, 0
    for start in range(0, numel, _RUN * BLOCK):
        part = slice(start, start + _RUN * BLOCK)
        bits, run = _bits(values[part]), _run_of(reference[part])
        symbols = _symbols(bits, run.reference)
        plan = _planned(symbols, run)
        payload.append(_payload(bits, symbols, run, plan))
        table.append(_entries(plan, before))
        checksum += _checksum(values[part], start)
        before += payload[-1].numel()
    body = torch.cat(table + payload)
    mode, used = _mode_of(numel, body.numel(), is_unchanged=before == 0)
    body = body if mode == BLOCKS else body[:0]
    out[:used].copy_(_bytes(_message(mode, checksum, used, body)))
    if mode == RAW:
        out[HEADER : HEADER + 2 * numel].copy_(values.view(torch.uint8))
    nbytes.fill_(used)


def _mode_of(numel: int, body_words: int, is_unchanged: bool) -> tuple[int, int]:
    """Return the mode of a message and its bytes."""
    nbytes = round_up(HEADER + 4 * body_words, 16)
    if is_unchanged:
        return UNCHANGED, HEADER
    if nbytes >= max_bytes(numel):
        return RAW, max_bytes(numel)
    return BLOCKS, nbytes


def _message(mode: int, checksum: int, used: int, body: torch.Tensor) -> torch.Tensor:
    """Return the words of a message of `used` bytes: header, body and zeros."""
    message = torch.zeros(used // 4, dtype=torch.int64, device=body.device)
    header = [mode, checksum & _U32, used & _U32, used >> 32]
    message[:4] = torch.tensor(header, device=body.device)
    message[4 : 4 + body.numel()] = body
    return message


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """32-bit words as bytes."""
    return (words - (words >> 31 << 32)).int().view(torch.uint8)


def _entries(plan: _Plan, before: int) -> torch.Tensor:
    """Entries of the blocks as words."""
    ends = plan.words.cumsum(0) + before
    return torch.stack([ends, plan.counts | plan.scale << 16 | plan.kind << 24], dim=1).view(-1)


def _planned(symbols: torch.Tensor, run: _Run) -> _Plan:
    """[Note: lossless choices]."""
    blocks = int(run.block[-1]) + 1
    sizes = torch.bincount(run.block, minlength=blocks)
    counts = _sums((symbols > 0).long(), run.block, blocks)
    scales = _scales(symbols, run, blocks)
    bits, scale = _fewest(scales, lambda s: _list_bits(symbols, run.exponent, run.block, s))
    words = (sizes + 1) // 2
    plan = _Plan(words, torch.zeros_like(words), torch.zeros_like(words), words * 0 + PLAIN)
    plan = _better(plan, _Plan(_words(bits), plan.counts, scale, plan.scale + RICE))
    plan = _better(plan, _planned_gaps(symbols, run, sizes, counts, scales))
    return _Plan(*(column.where(counts > 0, 0) for column in plan))


def _planned_gaps(
    symbols: torch.Tensor,
    run: _Run,
    sizes: torch.Tensor,
    counts: torch.Tensor,
    scales: list[torch.Tensor],
) -> _Plan:
    """Blocks as gaps and changed elements."""
    few = (counts > 0) & (2 * counts <= sizes)
    changes = _changes(symbols, run, few)
    exponent = run.exponent[changes.elements]
    rest = symbols[changes.elements] - 1
    bits, scale = _fewest(scales, lambda s: _list_bits(rest, exponent, changes.block, s))
    r = _bit_length(sizes // counts.clamp(min=1)) - 1
    zero = torch.zeros_like(changes.gap)
    gap_bits, r = _fewest(
        [r, (r - 1).clamp_(min=0)], lambda r: _list_bits(changes.gap, zero, changes.block, r)
    )
    words = _words(bits + gap_bits).where(few, 1 << 30)
    return _Plan(words, counts, scale, r + GAPS)


def _better(plan: _Plan, other: _Plan) -> _Plan:
    shorter = other.words < plan.words
    return _Plan(*(b.where(shorter, a) for a, b in zip(plan, other, strict=True)))


def _fewest(
    candidates: Sequence[torch.Tensor], bits_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fewest bits, and the candidate that takes them, by block; the first of equals."""
    best = candidates[0]
    fewest = bits_of(best)
    for candidate in candidates[1:]:
        bits = bits_of(candidate)
        best = candidate.where(bits < fewest, best)
        fewest = torch.minimum(bits, fewest)
    return fewest, best


def _scales(symbols: torch.Tensor, run: _Run, blocks: int) -> list[torch.Tensor]:
    """Candidates for the scale of each block."""
    known = (symbols > 0) & (run.exponent < _ZERO)
    sizes = (_bit_length(symbols) + run.exponent).where(known, 0)
    counts = _sums(known.long(), run.block, blocks)
    mean = _sums(sizes, run.block, blocks) // counts.clamp_(min=1)
    return [(mean - less).clamp_(0, 255) for less in (3, 2, 1, 0)]


def _bit_length(numbers: torch.Tensor) -> torch.Tensor:
    """Bits that a number needs; 0 for 0. Below 2^24."""
    return torch.frexp(numbers.float()).exponent.long()


def _changes(symbols: torch.Tensor, run: _Run, chosen: torch.Tensor) -> _Changes:
    """Changed elements of the chosen blocks."""
    index = ((symbols > 0) & chosen[run.block]).nonzero().view(-1)
    block = run.block[index]
    before = torch.cat([index[:1] * 0 - 1, index[:-1]])
    before = torch.maximum(before, block * BLOCK - 1)
    return _Changes(index, block, index - before - 1)


def _quotients(symbols: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (symbols >> k).clamp_(max=ESCAPE)


def _list_bits(
    symbols: torch.Tensor, exponent: torch.Tensor, block: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Bits of the Rice list of each block."""
    k = _parameters(scale[block], exponent)
    q = _quotients(symbols, k)
    return _sums(k + q + 1 + (q == ESCAPE) * SYMBOL, block, scale.numel())


def _words(bits: torch.Tensor) -> torch.Tensor:
    return (bits + (WORD - 1)) // WORD


def _payload(bits: torch.Tensor, symbols: torch.Tensor, run: _Run, plan: _Plan) -> torch.Tensor:
    """Payloads of a run as words."""
    words = plan.words.new_zeros(int(plan.words.sum()) + 2)  # fields of no bits may lie past
    start = (plan.words.cumsum(0) - plan.words) * WORD
    plain = (plan.kind == PLAIN)[run.block].nonzero().view(-1)
    _put(words, start[run.block[plain]] + plain % BLOCK * SYMBOL, bits[plain])

    rice = (plan.kind == RICE)[run.block].nonzero().view(-1)
    k = _parameters(plan.scale[run.block[rice]], run.exponent[rice])
    _put_list(words, start, run.block[rice], symbols[rice], k)

    changes = _changes(symbols, run, plan.kind >= GAPS)
    r, scale = (plan.kind - GAPS)[changes.block], plan.scale[changes.block]
    start = _put_list(words, start, changes.block, changes.gap, r)
    k = _parameters(scale, run.exponent[changes.elements])
    _put_list(words, start, changes.block, symbols[changes.elements] - 1, k)
    return words[:-2]


def _put(words: torch.Tensor, at: torch.Tensor, fields: torch.Tensor) -> None:
    """Write fields of at most 17 bits at bit positions that are still zero."""
    shifted = fields << at % WORD
    words.index_add_(0, at // WORD, shifted & _U32)
    words.index_add_(0, at // WORD + 1, shifted >> WORD)


def _put_list(
    words: torch.Tensor,
    start: torch.Tensor,  # (blocks,) in bits
    block: torch.Tensor,
    symbols: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor:
    """Write the Rice list of each block and return where they end, in bits."""
    fields = symbols & (1 << k) - 1
    for lengths, skip, field in (
        (k, k * 0, fields),
        ((q := _quotients(symbols, k)) + 1, q, torch.ones_like(q)),
        ((q == ESCAPE) * SYMBOL, k * 0, symbols.where(q == ESCAPE, 0)),
    ):
        sums = _sums(lengths, block, start.numel())
        _put(words, start[block] + _offsets(lengths, block, sums) + skip, field)
        start = start + sums
    return start


# ---- decode ----


def decode(
    wire: torch.Tensor,  # (bytes used,) uint8
    reference: torch.Tensor,  # (numel,) bf16 or fp16
    out: torch.Tensor,  # (numel,) of the same dtype; may be the reference
) -> None:
    """Overwrite `out` with the values. _Damaged for a message that cannot be; after an error `out`
    holds nothing of use.
    """
    numel = reference.numel()
    mode, checksum = _checked_header(wire, numel)
    if mode == UNCHANGED:
        out.copy_(reference)
    elif mode == RAW:
        out.view(torch.uint8).copy_(wire[HEADER : HEADER + 2 * numel])
    else:
        _decode_blocks(_words_of(wire[HEADER:]), reference, out)
    decoded_checksum = sum(
        _checksum(out[start : start + _RUN * BLOCK], start)
        for start in range(0, numel, _RUN * BLOCK)
    )
    _check(decoded_checksum & _U32 == checksum, "checksum")


def decode_rows(
    wire: torch.Tensor,  # (bytes,) uint8: the messages, each at a multiple of 16 bytes
    starts: np.ndarray,  # (rows,) int64, first byte of each
    lengths: np.ndarray,  # (rows,) int64, its bytes
    reference: torch.Tensor,  # (rows, numel) bf16 or fp16
    out: torch.Tensor,  # (rows, numel) of the same dtype; may be the reference
    status: torch.Tensor,  # (rows, 2) int32, zeros
) -> None:
    """Decode a message into every row of `out`; `status` tells which cannot be."""
    for row, (start, nbytes) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        try:
            decode(wire[start : start + nbytes], reference[row], out[row])
        except _Damaged as problem:
            status[row, 0] = PROBLEMS.index(str(problem)) + 1


def _check(holds: bool | torch.Tensor, what: str) -> None:
    if not bool(holds):
        raise _Damaged(what)


def _checked_header(wire: torch.Tensor, numel: int) -> tuple[int, int]:
    """Mode and checksum of a message of `numel` elements."""
    if numel == 0:
        _check(wire.numel() == 0, "length")
        return UNCHANGED, 0
    _check(wire.numel() >= HEADER and wire.numel() % 16 == 0, "length")
    mode, checksum, low, high = _words_of(wire[:HEADER]).tolist()
    _check(low | high << 32 == wire.numel(), "length")
    _check(mode in (UNCHANGED, RAW, BLOCKS), "mode")
    if mode == BLOCKS:
        _check(wire.numel() >= HEADER + ENTRY * blocks_of(numel), "length")
    else:
        _check(wire.numel() == (HEADER if mode == UNCHANGED else max_bytes(numel)), "length")
    return mode, checksum


def _words_of(wire: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words in int64."""
    return wire.clone().view(torch.int32).long() & _U32


def _decode_blocks(words: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> None:
    """Body of mode 2."""
    blocks = blocks_of(reference.numel())
    ends, rest = words[: 2 * blocks].view(blocks, 2).unbind(1)
    starts = torch.cat([ends[:1] * 0, ends[:-1]])
    payload = words[2 * blocks :]
    _check((starts <= ends).all() & (ends[-1] <= payload.numel()), "offset")
    _check(payload.numel() - int(ends[-1]) < 4, "length")
    plan = _Plan(ends - starts, rest & _U16, rest >> 16 & 0xFF, rest >> 24)
    for first in range(0, blocks, _RUN):
        some = slice(first, first + _RUN)
        part = slice(first * BLOCK, (first + _RUN) * BLOCK)
        run = _run_of(reference[part])
        part_of_plan = _Plan(*(column[some] for column in plan))
        _check_plan(part_of_plan, torch.bincount(run.block))
        bits = _decoded(payload[starts[first] : ends[some][-1]], run, part_of_plan)
        out[part].view(torch.int16).copy_(bits - (bits >> 15 << 16))


def _check_plan(plan: _Plan, sizes: torch.Tensor) -> None:
    """Entries of blocks of these sizes."""
    words, count, scale, kind = plan
    gaps = (kind >= GAPS) & (kind <= GAPS + MAX_K)
    _check((gaps | (kind <= RICE)).all(), "kind")
    _check(((scale == 0) | gaps | (kind == RICE)).all(), "scale")
    _check(((count == 0) ^ gaps & (count <= sizes)).all(), "count")
    _check(((words == 0) | (kind != SAME)).all(), "offset")
    raw = (sizes + 1) // 2
    _check((words <= raw).all() & ((words == raw) | (kind != PLAIN)).all(), "offset")


def _decoded(words: torch.Tensor, run: _Run, plan: _Plan) -> torch.Tensor:
    """Bits of the values of a run."""
    stop = plan.words.cumsum(0) * WORD
    start = stop - plan.words * WORD
    payload = _Payload(words)
    symbols = torch.zeros_like(run.block)

    rice = (plan.kind == RICE)[run.block].nonzero().view(-1)
    k = _parameters(plan.scale[run.block[rice]], run.exponent[rice])
    symbols[rice], end_of_rice = payload.read_list(start, stop, run.block[rice], k)

    block = torch.repeat_interleave(plan.counts)
    gap, end = payload.read_list(start, stop, block, (plan.kind - GAPS)[block])
    place = _offsets(gap + 1, block, _sums(gap + 1, block, stop.numel())) + gap
    _check((place < torch.bincount(run.block)[block]).all(), "gap")
    index = block * BLOCK + place
    k = _parameters(plan.scale[block], run.exponent[index])
    rest, end = payload.read_list(end, stop, block, k)
    _check((rest < _U16).all(), "symbol")
    symbols[index] = rest + 1

    end = end_of_rice.where(plan.kind == RICE, end)
    coded = (plan.kind == RICE) | (plan.kind >= GAPS)
    _check(((_words(end) * WORD == stop) | ~coded).all(), "offset")
    bits = _restored(symbols, run.reference)
    plain = (plan.kind == PLAIN)[run.block].nonzero().view(-1)
    bits[plain] = payload.fields(start[run.block[plain]] + plain % BLOCK * SYMBOL, SYMBOL)
    return bits


class _Payload:
    """Words of a run, and where their ones are."""

    def __init__(self, words: torch.Tensor) -> None:
        shifts = torch.arange(WORD, device=words.device)
        self._ones = (words[:, None] >> shifts & 1).view(-1).nonzero().view(-1)
        self._words = torch.cat([words, words.new_zeros(2)])

    def fields(self, at: torch.Tensor, lengths: torch.Tensor | int) -> torch.Tensor:
        """Bit fields of at most 16 bits."""
        word = at // WORD
        pair = self._words[word] | self._words[word + 1] << WORD
        return pair >> at % WORD & (1 << lengths) - 1

    def read_list(
        self,
        start: torch.Tensor,  # (blocks,) in bits
        stop: torch.Tensor,
        block: torch.Tensor,
        k: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Symbols of the Rice lists that begin at `start`, and where they end."""
        blocks = start.numel()
        sums = _sums(k, block, blocks)
        low_at = start[block] + _offsets(k, block, sums)
        start = start + sums
        _check((start <= stop).all(), "offset")

        quotient = self._quotients(start, stop, block)
        start = start + _sums(quotient + 1, block, blocks)

        escaped = quotient == ESCAPE
        lengths = escaped * SYMBOL
        sums = _sums(lengths, block, blocks)
        at = start[block] + _offsets(lengths, block, sums)
        start = start + sums
        _check((start <= stop).all(), "offset")
        symbols = quotient << k | self.fields(low_at, k)
        symbols[escaped] = self.fields(at[escaped], SYMBOL)
        _check((symbols <= _U16).all(), "symbol")
        return symbols, start

    def _quotients(
        self,
        start: torch.Tensor,  # (blocks,) in bits
        stop: torch.Tensor,
        block: torch.Tensor,
    ) -> torch.Tensor:
        """Quotients of Rice lists: each is the number of zeros before a one."""
        count = torch.bincount(block, minlength=start.numel())
        first = torch.searchsorted(self._ones, start)
        _check(((first + count <= self._ones.numel()) | (count == 0)).all(), "quotient")
        place = _offsets(torch.ones_like(block), block, count)
        ones = self._ones[first[block] + place]
        before = torch.cat([ones[:1], ones[:-1]]).where(place > 0, start[block] - 1)
        quotient = ones - before - 1
        _check((quotient <= ESCAPE).all() & (ones < stop[block]).all(), "quotient")
        return quotient
