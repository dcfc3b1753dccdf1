"""Kernels of lossless differences: threads, warps, launches, and C++ under the sanitizer."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_quant.kernels import dispatch, launch, launch_batch, lossless
from tests import needs
from tests.lossless_inputs import DTYPES, SORTS, decode, decode_rows, message_of, mixed
from tests.torch_kernels import only_torch

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = Path(__file__).with_name("lossless_sanitized.cpp")


@needs.native_kernels
def test_number_of_threads_changes_nothing(threads) -> None:
    values, reference = mixed([3e-4, 1e-5, "any", "same"], 2**20 + 77, DTYPES[0], seed=0)
    messages, found = [], []
    for count in (1, 3):
        threads(count)
        messages.append(message_of(values, reference))
        found.append(reference.clone())
        decode(messages[-1], found[-1], found[-1])
    assert torch.equal(*messages)
    assert all(torch.equal(f.view(torch.int16), values.view(torch.int16)) for f in found)
    messages[0][-5000] ^= 1
    with pytest.raises(ValueError, match="lossless message"):
        decode(messages[0], reference, values)


@pytest.mark.slow
def test_damaged_messages_under_the_address_sanitizer(tmp_path: Path) -> None:
    """Bytes of messages of every mode and kind are changed at random, their lengths too."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / "sanitized"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-pthread"]
    flags += ["-fno-sanitize-recover=all", f"-I{ROOT / 'ds_quant' / 'kernels'}"]
    built = subprocess.run(
        [compiler, *flags, str(SANITIZED), "-o", str(program)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    damaged = 0
    for number, sorts in enumerate((["same"], ["any"], [3e-4], [1e-5, 1e-7], list(SORTS))):
        for numel in (1, 2048, 2500, 9 * 2048 + 3):
            values, reference = mixed(sorts, numel, DTYPES[number % 2], seed=number)
            message = message_of(values, reference)
            path = tmp_path / "message"
            at = 7 if number % 2 == 0 else 10
            head = struct.pack("<qqq", numel, at, message.numel())
            parts = (reference, values, message)
            path.write_bytes(head + b"".join(p.view(torch.uint8).numpy().tobytes() for p in parts))
            done = subprocess.run(
                [str(program), str(path), "2000"], capture_output=True, text=True, timeout=250
            )
            assert done.returncode == 0, done.stderr[-4000:]
            damaged += int(done.stdout)
    assert damaged > 20_000


@pytest.fixture
def cuda(shim, monkeypatch):
    """The codec takes the CUDA kernels, on the host."""
    monkeypatch.setattr(dispatch, "cuda_runner", lambda *_: shim)
    return shim


def test_order_of_warps_does_not_matter(cuda, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "reversed_warps", True)
    for seed, numel in enumerate((1, 2047, 2049, 9000, 3 * 2048 + 7)):
        for sorts in ([sort] for sort in SORTS):
            values, reference = mixed(sorts, numel, DTYPES[seed % 2], seed)
            message = message_of(values, reference)
            with only_torch():
                assert torch.equal(message, message_of(values, reference))
            decode(message, reference, reference)
            assert torch.equal(reference.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("rows", (1, 3, 5))
def test_a_message_is_three_launches_and_messages_of_all_ranks_are_decoded_in_one(
    cuda, rows
) -> None:
    numel, first = 3 * 2048 + 77, len(cuda.launched)
    values, reference = mixed([3e-4, 1e-5, "any", "same"], numel, torch.bfloat16, seed=1)
    message = message_of(values, reference)
    wire, lengths = message.repeat(rows), [len(message)] * rows
    found = torch.zeros(rows, numel + 9, dtype=torch.bfloat16)[:, 3 : numel + 3]
    decode_rows(wire, [len(message) * row for row in range(rows)], lengths,
                      reference.expand(rows, -1), found)  # fmt: skip
    assert torch.equal(found.view(torch.int16), values.view(torch.int16).expand(rows, -1))
    assert [dict(macros)["DSQ_PHASE"] for _, macros in cuda.launched[first:]] == [0, 1, 2, 3]


def test_messages_of_several_lengths_are_encoded_in_three_launches(cuda) -> None:
    sizes, first = (3000, 0, 1, 2048, 9000), len(cuda.launched)
    pairs = [
        mixed([sort], numel, torch.bfloat16, seed=2)
        for sort, numel in zip(SORTS, sizes, strict=False)
    ]
    rooms = [torch.empty(lossless.max_bytes(len(values)), dtype=torch.uint8) for values, _ in pairs]
    nbytes = torch.full((len(pairs),), 5)
    dispatch.encode_lossless(
        [(*pair, room) for pair, room in zip(pairs, rooms, strict=True)], nbytes
    )
    assert [dict(macros)["DSQ_PHASE"] for _, macros in cuda.launched[first:]] == [0, 1, 2]
    for pair, room, used in zip(pairs, rooms, nbytes.tolist(), strict=True):
        with only_torch():
            assert torch.equal(room[:used], message_of(*pair))


def test_ends_are_scanned_over_more_blocks_than_a_turn_has(shim) -> None:
    numel = 2048 * 2048 + 3000  # a turn of the scan holds 2048 blocks
    plan = launch_batch.lossless_plan(launch_batch.SCAN, numel, torch.bfloat16)
    blocks = lossless.blocks_of(numel)
    words = torch.randint(0, 300, (blocks,), generator=torch.Generator().manual_seed(0))
    wire = torch.zeros(4 + 2 * blocks, dtype=torch.int32)
    wire[4::2] = words
    nbytes = torch.zeros(1, dtype=torch.int64)
    jobs = np.zeros(1, launch.fields_of("lossless"))
    jobs["numel"], jobs["wire"], jobs["nbytes"] = numel, wire.data_ptr(), nbytes.data_ptr()
    shim.run_tables([launch.table_of([plan], [1], jobs)])
    assert torch.equal(wire[4::2].long(), words.cumsum(0))
    used = -(-(16 + 8 * blocks + 4 * int(words.sum())) // 16) * 16
    assert wire[:4].tolist() == [2, 0, used, 0] and nbytes.item() == used
