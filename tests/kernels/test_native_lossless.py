"""The C++ kernels of lossless differences: the reference's bytes, and no access out of bounds."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_quant.kernels import lossless, native_lossless
from tests import needs
from tests.kernels.inputs import guarded
from tests.lossless_inputs import DTYPES, NUMELS, SORTS, mixed

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = Path(__file__).with_name("lossless_sanitized.cpp")


def message_of(kernels, values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """What kernels encode, in memory that ends at an inaccessible page."""
    out = guarded(lossless.max_bytes(values.numel()), torch.uint8)
    nbytes = torch.zeros(1, dtype=torch.int64)
    kernels.encode(values, reference, out, nbytes)
    return out[: nbytes.item()]


def decode(message: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> None:
    """One message by the C++ kernels."""
    where = np.zeros(1, dtype=np.int64), np.array([message.numel()])
    native_lossless.decode_rows(message, *where, reference.view(1, -1), out.view(1, -1))


@needs.native_kernels
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sorts=st.lists(st.sampled_from(SORTS), min_size=1, max_size=5),
    numel=st.sampled_from(NUMELS) | st.integers(2, 99) | st.integers(0, 9000),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(sorts=[1e-4, "few", 1e-5, "zeros"], numel=2**20 + 2049, dtype=DTYPES[1], seed=1)
def test_bytes_equal_the_reference(sorts: list, numel: int, dtype: torch.dtype, seed: int) -> None:
    values, reference = mixed(sorts, numel, dtype, seed)
    wanted = message_of(lossless, values, reference)
    assert torch.equal(message_of(native_lossless, values, reference), wanted)


@needs.native_kernels
def test_number_of_threads_changes_nothing() -> None:
    before = torch.get_num_threads()
    values, reference = mixed([3e-4, 1e-5, "any", "same"], 2**20 + 77, DTYPES[0], seed=0)
    try:
        messages, found = [], []
        for count in (1, 3):
            torch.set_num_threads(count)
            messages.append(message_of(native_lossless, values, reference))
            found.append(reference.clone())
            decode(messages[-1], found[-1], found[-1])
        assert torch.equal(*messages)
        assert all(torch.equal(f.view(torch.int16), values.view(torch.int16)) for f in found)
        damaged = messages[0].clone()
        damaged[-5000] ^= 1
        with pytest.raises(ValueError, match="lossless message"):
            decode(damaged, reference, values)
    finally:
        torch.set_num_threads(before)


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
            message = message_of(lossless, values, reference)
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
