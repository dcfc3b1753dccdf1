"""Lossless differences: every bit arrives, and a damaged message is an error and nothing worse."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_quant.kernels import dispatch, native
from ds_quant.kernels.lossless import max_bytes
from tests.kernels.inputs import guarded
from tests.lossless_inputs import (
    DTYPES,
    NUMELS,
    SORTS,
    Damaged,
    decode,
    decode_rows,
    mixed,
    wrong_entries,
)
from tests.torch_kernels import only_torch
from tests.unit import lossless_oracle

GUARD = 64  # bytes or elements around what may be written
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(params=["torch", "native", "cuda"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch) -> Iterator[None]:
    """The reference, the C++ kernels, and the CUDA ones on the host."""
    if request.param == "native" and native.unavailable_reason() is not None:
        pytest.skip("needs the C++ library")
    if request.param == "cuda":
        shim = request.getfixturevalue("shim")
        monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: shim)
    with only_torch() if request.param == "torch" else nullcontext():
        yield


def encoded(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The message, after a look at the bytes around the space it has."""
    most = max_bytes(values.numel())
    room = torch.full((most + 2 * GUARD,), 77, dtype=torch.uint8)
    nbytes = torch.tensor([-1])
    dispatch.encode_lossless([(values, reference, room[GUARD : GUARD + most])], nbytes)
    assert (room[:GUARD] == 77).all() and (room[GUARD + most :] == 77).all()
    used = nbytes.item()
    assert 0 <= used <= most and used % 16 == 0 and most % 16 == 0
    return room[GUARD : GUARD + used].clone()


def decoded(message: torch.Tensor, reference: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """The values; fails if anything around them was written, also after an error."""
    numel = reference.numel()
    room = torch.full((numel + 2 * GUARD,), 77, dtype=torch.int16)
    out = room[GUARD : GUARD + numel].view(reference.dtype)
    if in_place:
        out.copy_(reference)
    try:
        decode(message, out if in_place else reference, out)
    finally:
        assert (room[:GUARD] == 77).all() and (room[GUARD + numel :] == 77).all()
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def kinds(message: torch.Tensor, numel: int) -> set[int]:
    """Kinds of the blocks of a message of mode 2."""
    entries = message[16 : 16 + 8 * math.ceil(numel / 2048)]
    return set(entries[7::8].tolist())


@PROPERTY
@given(
    sorts=st.lists(st.sampled_from(SORTS), min_size=1, max_size=5),
    numel=st.sampled_from(NUMELS) | st.integers(0, 9000),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    skew=st.sampled_from([0, 0, 1, 3, 8]),
    in_place=st.booleans(),
)
@example(
    sorts=["few", "any", 1e-5, "zeros"], numel=2**18 + 5, dtype=DTYPES[1], seed=1, skew=0,
    in_place=True,
)  # fmt: skip
def test_blocks_of_all_sorts_arrive_in_the_bytes_of_the_reference(
    sorts: list, numel: int, dtype: torch.dtype, seed: int, skew: int, in_place: bool
) -> None:
    """From memory that ends at an inaccessible page, or ``skew`` elements before it."""
    pair = mixed(sorts, numel, dtype, seed)
    values, reference = (guarded(numel + skew, dtype)[:numel].copy_(each) for each in pair)
    message = encoded(values, reference)
    assert same_bits(decoded(message, reference, in_place=in_place), values)
    with only_torch():
        assert torch.equal(encoded(values, reference), message)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [n for n in NUMELS if n < 10000])
def test_the_page_says_enough_to_decode(numel: int, dtype: torch.dtype) -> None:
    for sorts in ([3e-4, 1e-5, "few"], ["same"], ["any"], ["zeros", "same", "any"], [1e-7]):
        values, reference = mixed(sorts, numel, dtype, seed=5)
        message = bytes(encoded(values, reference).tolist())
        known = [bits & 0xFFFF for bits in reference.view(torch.int16).tolist()]
        found = lossless_oracle.decode(message, known, 7 if dtype == torch.bfloat16 else 10)
        assert found == [bits & 0xFFFF for bits in values.view(torch.int16).tolist()]


def test_every_mode_and_kind_is_reached() -> None:
    numel = 5 * 2048 + 100
    values, reference = mixed([3e-4, 1e-5, "any", "same"], numel, torch.bfloat16, seed=0)
    message = encoded(values, reference)
    assert message[0] == 2
    assert {0, 1, 2} < kinds(message, numel) and max(kinds(message, numel)) >= 16
    assert encoded(reference, reference)[0] == 0 and len(encoded(reference, reference)) == 16
    values, reference = mixed(["any"], numel, torch.bfloat16, seed=0)
    message = encoded(values, reference)
    assert message[0] == 1 and len(message) == max_bytes(numel)


# ---- damaged messages ----


DAMAGED = {
    "unchanged": ["same"],
    "raw": ["any"],
    "blocks": [3e-4, 1e-5, "any", "same", "few", "zeros"],
    "rice": [3e-4],
    "gaps": [1e-5, 1e-7],
}


def check_damaged(message: torch.Tensor, reference: torch.Tensor, values: torch.Tensor) -> bool:
    """Exact or ValueError; whether it was an error."""
    for in_place in (False, True):
        try:
            assert same_bits(decoded(message, reference, in_place=in_place), values)
        except ValueError as error:
            assert "lossless message" in str(error)
            return True
    return False


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sorts=st.sampled_from(sorted(DAMAGED)),
    numel=st.sampled_from([1, 100, 2048, 2500, 3 * 2048]),
    seed=st.integers(0, 2**31),
    where=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    near=st.sampled_from([16, 64, 2**20]),
    byte=st.integers(0, 255) | st.none(),
)
def test_flipped_bits_are_an_error(
    sorts: str, numel: int, seed: int, where: list[int], near: int, byte: int | None
) -> None:
    values, reference = mixed(DAMAGED[sorts], numel, torch.bfloat16, seed)
    message = encoded(values, reference)
    for place in where:
        at = place // 8 % min(near, len(message))
        message[at] = message[at] ^ 1 << place % 8 if byte is None else byte
    check_damaged(message, reference, values)


def test_wrong_entries_are_errors() -> None:
    for sorts, numel in (([1e-5, 3e-4, "any"], 3 * 2048 - 5), ([1e-7], 2 * 2048), ([3e-4], 30)):
        values, reference = mixed(sorts, numel, torch.bfloat16, seed=0)
        for other in wrong_entries(encoded(values, reference), numel):
            check_damaged(guarded(len(other), torch.uint8).copy_(other), reference, values)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sorts=st.sampled_from(sorted(DAMAGED)),
    numel=st.sampled_from([0, 1, 2048, 2500, 3 * 2048]),
    change=st.integers(-5000, 5000) | st.integers(-40, 40),
    told=st.booleans(),
)
def test_another_length_is_an_error(sorts: str, numel: int, change: int, told: bool) -> None:
    values, reference = mixed(DAMAGED[sorts], numel, torch.bfloat16, seed=7)
    message = encoded(values, reference)
    length = max(0, len(message) + change)
    if length == len(message):
        return
    kept = message[:length]
    other = torch.cat([kept, torch.zeros(length - len(kept), dtype=torch.uint8)])
    if told and length >= 16:
        other[8:16] = torch.tensor(list(struct.pack("<Q", length)), dtype=torch.uint8)
    assert check_damaged(other, reference, values)


@pytest.mark.parametrize(
    "at, form, value, what",
    [
        (0, "<I", 3, "mode"),
        (4, "<I", 5, "checksum"),
        (8, "<Q", 1 << 40, "length"),
        # of the first block: its end, how many of it have changed, scale and kind
        (16, "<I", 2**32 - 1, "offset"),
        (16, "<I", 0, "offset"),
        (20, "<H", 2049, "count"),
        (22, "<B", 255, ""),
        (23, "<B", 3, "kind"),
        (23, "<B", 32, "kind"),
        (23, "<B", 1, ""),
    ],
)
def test_the_error_says_what_cannot_be(at: int, form: str, value: int, what: str) -> None:
    values, reference = mixed([1e-5, 3e-4], 2 * 2048, torch.bfloat16, seed=0)
    message = encoded(values, reference)
    written = torch.tensor(list(struct.pack(form, value)), dtype=torch.uint8)
    message[at : at + len(written)] = written
    with pytest.raises(ValueError, match=f"lossless message: wrong {what}"):
        decoded(message, reference, in_place=False)


def test_another_reference_is_an_error() -> None:
    values, reference = mixed([3e-4, "same"], 5000, torch.bfloat16, seed=0)
    message = encoded(values, reference)
    reference.view(torch.int16)[4000] += 1  # in an unchanged block
    with pytest.raises(ValueError, match="checksum"):
        decoded(message, reference, in_place=False)


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="numel = "):
        max_bytes(2**32 + 1)


# ---- messages of several ranks ----


def several(rows: int, numel: int) -> tuple[torch.Tensor, list[int], list[int], list[torch.Tensor]]:
    """Messages with gaps between them, where each lies, and (values, references) of all rows."""
    pairs = [
        mixed([SORTS[row % len(SORTS)]], numel, torch.bfloat16, seed=row) for row in range(rows)
    ]
    messages = [encoded(*pair) for pair in pairs]
    starts = [48 * row + max_bytes(numel) * row for row in range(rows)]
    wire = torch.full((starts[-1] + max_bytes(numel),), 9, dtype=torch.uint8)
    for start, message in zip(starts, messages, strict=True):
        wire[start : start + len(message)] = message
    return (
        wire,
        starts,
        list(map(len, messages)),
        [torch.stack(s) for s in zip(*pairs, strict=True)],
    )


@pytest.mark.parametrize("numel", [0, 1, 2048, 5000])
def test_messages_of_several_ranks_are_decoded_at_once(numel: int) -> None:
    wire, starts, lengths, (values, reference) = several(len(SORTS), numel)
    room = torch.full((len(SORTS), numel + 2 * GUARD), 77, dtype=torch.int16)
    rows = room[:, GUARD : GUARD + numel].view(torch.bfloat16).copy_(reference)
    decode_rows(wire, starts, lengths, rows, rows)
    assert same_bits(rows.contiguous(), values)
    assert (room[:, :GUARD] == 77).all() and (room[:, GUARD + numel :] == 77).all()


@pytest.mark.parametrize("damaged", [0, 3, 6])
def test_the_error_says_whose_message_it_is(damaged: int) -> None:
    wire, starts, lengths, (_, reference) = several(7, 3000)
    wire[starts[damaged] + 4] ^= 1  # the checksum
    out = torch.empty_like(reference)
    with pytest.raises(Damaged, match="wrong checksum") as told:
        decode_rows(wire, starts, lengths, reference, out)
    assert told.value.row == damaged
    lengths[damaged] -= 8
    with pytest.raises(Damaged, match="wrong length") as told:
        decode_rows(wire, starts, lengths, reference, out)
    assert told.value.row == damaged
