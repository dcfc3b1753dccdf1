"""The CUDA kernels of lossless differences, run on the host: the reference's bytes and errors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.lossless import LosslessCodec
from ds_quant.kernels import dispatch, launch_lossless, lossless
from ds_quant.kernels.launch import Table
from tests.kernels.inputs import guarded
from tests.lossless_inputs import DTYPES, SORTS, mixed, wrong_entries

EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)


def with_guard(values: torch.Tensor, skew: int = 0) -> torch.Tensor:
    """A copy that ends at an inaccessible page, or `skew` elements before it."""
    room = guarded(values.numel() + skew, values.dtype)
    return room[: values.numel()].copy_(values)


def message_of(shim, values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    out = guarded(lossless.max_bytes(values.numel()), torch.uint8).fill_(0x55)
    nbytes = torch.zeros(1, dtype=torch.int64)
    launch_lossless.encode(values, reference, out, nbytes, run=shim)
    return with_guard(out[: nbytes.item()])


def decode(shim, message: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> None:
    """One message."""
    where = np.zeros(1, dtype=np.int64), np.array([message.numel()])
    rows = reference.view(1, -1), out.view(1, -1)
    launch_lossless.decode_rows(message, *where, *rows, run_tables=shim.run_tables)


def expected(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    out = torch.empty(lossless.max_bytes(values.numel()), dtype=torch.uint8)
    nbytes = torch.zeros(1, dtype=torch.int64)
    lossless.encode(values, reference, out, nbytes)
    return out[: nbytes.item()]


@pytest.mark.parametrize("is_reversed", (False, True))
def test_bytes_equal_the_reference_and_come_back(shim, is_reversed: bool) -> None:
    @EXAMPLES
    @given(
        sorts=st.lists(st.sampled_from(SORTS), min_size=1, max_size=5),
        numel=st.sampled_from([0, 1, 2048, 2049]) | st.integers(2, 99) | st.integers(0, 9000),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**31),
        skew=st.sampled_from([0, 0, 1, 3, 8]),
        in_place=st.booleans(),
    )
    def check(sorts, numel: int, dtype, seed: int, skew: int, in_place: bool) -> None:
        values, reference = (with_guard(x, skew) for x in mixed(sorts, numel, dtype, seed))
        message = message_of(shim, values, reference)
        assert torch.equal(message, expected(values, reference))
        out = reference if in_place else guarded(numel, dtype)
        decode(shim, message, reference, out)
        assert torch.equal(out.view(torch.int16), values.view(torch.int16))

    shim.reversed_warps = is_reversed
    try:
        check()
    finally:
        shim.reversed_warps = False


def test_ends_are_scanned_over_more_blocks_than_a_turn_has(shim) -> None:
    numel = 2048 * 2048 + 3000  # a turn of the scan holds 2048 blocks
    plan = launch_lossless.plan_of(launch_lossless.SCAN, numel, torch.bfloat16)
    blocks = lossless.blocks_of(numel)
    words = torch.randint(0, 300, (blocks,), generator=torch.Generator().manual_seed(0))
    wire = torch.zeros(4 + 2 * blocks, dtype=torch.int32)
    wire[4::2] = words
    nbytes = torch.zeros(1, dtype=torch.int64)
    fields = {"wire": wire.data_ptr(), "nbytes": nbytes.data_ptr()}
    shim(plan.launch(1, fields))
    assert torch.equal(wire[4::2].long(), words.cumsum(0))
    used = -(-(16 + 8 * blocks + 4 * int(words.sum())) // 16) * 16
    assert wire[:4].tolist() == [2, 0, used, 0] and nbytes.item() == used


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sorts=st.sampled_from([["same"], ["any"], [3e-4], [1e-5], [1e-5, 3e-4, "any", "same", "few"]]),
    numel=st.sampled_from([1, 2048, 2500, 3 * 2048]),
    places=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=3),
    near=st.sampled_from([16, 48, 2**20]),
    change=st.sampled_from([0, 0, 0, -16, 16, -64, 3]),
    in_place=st.booleans(),
)
def test_damaged_messages_are_errors(shim, sorts, numel, places, near, change, in_place) -> None:
    values, reference = (with_guard(x) for x in mixed(sorts, numel, torch.bfloat16, seed=1))
    message = expected(values, reference)
    length = max(0, message.numel() + change)
    other = torch.zeros(length, dtype=torch.uint8)
    other[: message.numel()] = message[:length]
    if change and length >= 16:
        other[8:12] = torch.tensor([length], dtype=torch.int32).view(torch.uint8)
    for place, byte in places if length else ():
        other[place % min(near, length)] = byte
    check_damaged(shim, other, values, reference, in_place)


def check_damaged(shim, message, values, reference, in_place: bool) -> None:
    """Exact or ValueError."""
    out = reference.clone() if in_place else guarded(values.numel(), values.dtype)
    try:
        decode(shim, with_guard(message), out if in_place else reference, out)
    except ValueError as error:
        assert "lossless message" in str(error)
    else:
        assert torch.equal(out.view(torch.int16), values.view(torch.int16))


def test_wrong_entries_are_errors(shim) -> None:
    for sorts, numel in (([1e-5, 3e-4, "any"], 3 * 2048 - 5), ([1e-7], 2 * 2048), ([3e-4], 30)):
        values, reference = (with_guard(x) for x in mixed(sorts, numel, torch.bfloat16, seed=0))
        for other in wrong_entries(expected(values, reference), numel):
            check_damaged(shim, other, values, reference, in_place=False)


def through_codec(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The message, after a look at what it decodes to."""
    codec, numel, device = LosslessCodec(), values.numel(), values.device
    out = torch.empty(codec.max_bytes(numel), dtype=torch.uint8, device=device)
    nbytes = torch.zeros(1, dtype=torch.int64, device=device)
    codec.encode(values, reference, out, nbytes)
    message, found = out[: nbytes.item()], reference.clone()
    codec.decode(message, found, found)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    return message


def test_codec_takes_the_kernels_where_there_is_a_runner(shim, monkeypatch) -> None:
    values, reference = mixed([3e-4, 1e-5], 5000, torch.bfloat16, seed=3)
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: shim)
    first = len(shim.launched)
    assert torch.equal(through_codec(values, reference), expected(values, reference))
    assert [dict(macros)["DSQ_PHASE"] for _, macros in shim.launched[first:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", (1, 3, 5))
def test_messages_of_several_ranks_are_one_launch_and_an_error_names_the_first(shim, rows) -> None:
    numel, launches = 3 * 2048 + 77, []
    pairs = [mixed([3e-4, sort, 1e-5], numel, torch.bfloat16, seed=1) for sort in SORTS[:rows]]
    messages = [message_of(shim, *pair) for pair in pairs]
    lengths = np.array([message.numel() for message in messages])
    starts = np.arange(rows) * lossless.max_bytes(numel)
    wire = torch.zeros(rows * lossless.max_bytes(numel), dtype=torch.uint8)
    for start, message in zip(starts, messages, strict=True):
        wire[start : start + message.numel()] = message
    values, held = (torch.stack(side) for side in zip(*pairs, strict=True))

    def run(tables: Iterable[Table]) -> None:
        launches.append(len(tables))
        shim.run_tables(tables)

    found = torch.zeros(rows, numel + 9, dtype=torch.bfloat16)[:, 3 : numel + 3]
    launch_lossless.decode_rows(wire, starts, lengths, held, found, run_tables=run)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    assert launches == [1]
    held[rows - 1, 7] += 1
    with pytest.raises(lossless.Damaged, match="hold different") as told:
        launch_lossless.decode_rows(wire, starts, lengths, held, found, run_tables=run)
    assert told.value.row == rows - 1
