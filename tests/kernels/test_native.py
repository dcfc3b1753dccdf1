"""The C++ kernels for CPU tensors against the torch reference, byte for byte."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.bound import Coding, decode, decode_sum, encode
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.kernels import dispatch, native, reference
from ds_quant.kernels.batch import Decode, Encode
from ds_quant.kernels.reference import BlockRotation
from ds_quant.kernels.run import Operations, Streams
from ds_quant.kernels.wire import round_up
from tests import needs
from tests.kernels.inputs import (
    CODECS,
    DTYPES,
    FORMULAS,
    KINDS,
    awkward,
    cases,
    guarded,
    id_of,
    table,
)
from tests.kernels.test_decode import assert_same as assert_same_values
from tests.kernels.test_decode import message, output, source_rows
from tests.kernels.test_encode import ADDRESS, assert_same, expected, one_by_one

EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True, database=None)
INT4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
IN_TORCH = replace(INT4, backend="torch")


@pytest.fixture
def threads():
    """Sets torch's number of threads, which the kernels take over, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs.native_kernels
@pytest.mark.parametrize("index", range(len(CODECS)), ids=lambda i: id_of(CODECS[i]))
def test_bytes_equal_the_reference(index: int) -> None:
    codec, dtype = CODECS[index], DTYPES[index % 3]

    @EXAMPLES
    @given(case=cases(codec.group_size))
    def check(case) -> None:
        x = case.values(codec.group_size, dtype)
        nbytes = codec.wire_bytes(case.numel)
        wire = guarded(case.rows * nbytes, torch.uint8).view(case.rows, nbytes).fill_(0x55)
        encode(codec, x, wire, address=case.address, levels=table(codec))
        assert_same(codec, wire, expected(codec, x, case.address))

    check()


@needs.native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: "-".join(f.values()))
def test_every_kind_of_group(formula: dict[str, str], dtype: torch.dtype) -> None:
    codec = GroupCodec(bits=8, group_size=128, **formula)
    x = awkward(128 * len(KINDS) - 61, 128, sorted(KINDS), seed=1).to(dtype)[None]
    wire = torch.empty(1, codec.wire_bytes(x.shape[1]), dtype=torch.uint8)
    encode(codec, x, wire, address=ADDRESS, levels=table(codec))
    assert_same(codec, wire, expected(codec, x, ADDRESS))


@needs.native_kernels
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_difference_is_taken_once_in_fp32(dtype: torch.dtype) -> None:
    @EXAMPLES
    @given(case=cases(INT4.group_size))
    def check(case) -> None:
        x = case.values(INT4.group_size, torch.bfloat16)
        base = (x.float() * 1.001 + 0.01).to(dtype)
        wanted = expected(INT4, x.float() - base.float(), case.address)
        for codec in (INT4, IN_TORCH):
            wire = torch.empty_like(wanted)
            encode(codec, x, wire, address=case.address, base=base)
            assert_same(INT4, wire, wanted)

    check()


@needs.native_kernels
@pytest.mark.parametrize("index", range(len(CODECS)), ids=lambda i: id_of(CODECS[i]))
def test_decoded_rows_and_sums_equal_the_reference(index: int) -> None:
    codec, dtype, levels = CODECS[index], DTYPES[index % 3], table(CODECS[index])

    @EXAMPLES
    @given(case=cases(codec.group_size), add=st.booleans(), own=st.integers(-1, 3))
    def check(case, add: bool, own: int) -> None:
        x = source_rows(codec, case, 4)
        wire = message(codec, x[:3])
        found, wanted = (output(3, case.numel, dtype, case.skew) for _ in range(2))
        decode(codec, wire, found, levels=levels, add=add)
        reference.decode(wire, wanted, codec, levels=levels, add=add)
        assert_same_values(codec, found, wanted)

        given = None if own < 0 else (own, x[own].bfloat16())
        sums = [output(1, case.numel, torch.float32, case.skew)[0] for _ in range(2)]
        options = {"scale": 1 / 3, "own": given, "levels": levels}
        decode_sum(codec, wire, sums[0], **options)
        reference.decode_sum(wire, sums[1], codec, **options)
        assert_same_values(codec, *sums)

    check()


ROTATIONS = (BlockRotation(32), BlockRotation(64, 0xF00D), BlockRotation(128, (5 << 96) | 77))


@needs.native_kernels
@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotated_messages_and_sums_equal_the_reference(rotation: BlockRotation) -> None:
    codec = GroupCodec(bits=4, group_size=256, range="absmax", rounding="stochastic")

    @EXAMPLES
    @given(case=cases(codec.group_size), own=st.integers(-1, 2))
    def check(case, own: int) -> None:
        x = source_rows(codec, case, 2).bfloat16()
        on_wire = -(-case.numel // rotation.block) * rotation.block
        base = x.roll(1, 1).float()
        nbytes = codec.wire_bytes(on_wire)
        wires = [guarded(2 * nbytes, torch.uint8).view(2, nbytes).fill_(i) for i in range(2)]
        options = {"address": case.address, "levels": None, "base": base, "rotation": rotation}
        encode(codec, x, wires[0], **options)
        reference.encode(x, wires[1], codec, **options)
        assert_same(codec, *wires)

        given = None if own < 0 else (own, torch.randn(on_wire))
        sums = [output(1, case.numel, torch.float32, case.skew)[0] for _ in range(2)]
        options = {"scale": 0.3, "own": given, "levels": None, "rotation": rotation}
        decode_sum(codec, wires[1], sums[0], **options)
        reference.decode_sum(wires[1], sums[1], codec, **options)
        assert_same_values(codec, *sums)

    check()


@needs.native_kernels
def test_halves_are_read_and_rounded_as_torch_does() -> None:
    """Every fp16 number, and fp32 numbers on, beside and between the borders of rounding."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    found = torch.empty(1, 1 << 16)
    wire = every.view(torch.uint8)[None]
    task = Decode(CastCodec(torch.float16), 1 << 16, 0, 1, 0), (0, 0)
    Operations([task]).run([wire, found], Streams([Coding(CastCodec())], [None]))
    assert torch.equal(found[0].nan_to_num(7.0), every.float().nan_to_num(7.0))
    finite = every[every.isfinite()].float().sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    numbers = [finite, middles, torch.randn(9999) * 2.0 ** torch.randint(-26, 18, (9999,))]
    numbers += [torch.nextafter(middles, torch.tensor(side * torch.inf)) for side in (1, -1)]
    x = torch.cat([*numbers, torch.tensor([65519.9, 65520.0, 1e30, torch.inf, 1e-45, -1e-45])])
    out = torch.empty(round_up(2 * x.numel(), 16), dtype=torch.uint8)
    task = Encode(CastCodec(torch.float16), x.numel(), 0, 1, 0), (0, 0, 0)
    Operations([task]).run([x, out], Streams([Coding(CastCodec())], [None]))
    assert torch.equal(out[: 2 * x.numel()].view(torch.int16), x.half().view(torch.int16))


@needs.native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_values_keep_every_bit(dtype: torch.dtype) -> None:
    """Of a NaN too, on its way into a message and out of it."""
    bits = torch.randint(-(1 << 15), 1 << 15, (dtype.itemsize * 5000,), dtype=torch.int16)
    x, codec = bits.view(dtype)[:4999], CastCodec(dtype)
    wire, found = torch.empty(codec.wire_bytes(4999), dtype=torch.uint8), torch.empty_like(x)
    streams = Streams([Coding(codec)], [None])
    Operations([(Encode(codec, 4999, 0, 1, 0), (0, 0, 0))]).run([x, wire], streams)
    Operations([(Decode(codec, 4999, 0, 1, 0), (0, 0))]).run([wire, found], streams)
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


@needs.native_kernels
def test_number_of_threads_changes_nothing(threads) -> None:
    x = torch.randn(3, native._NUMEL_PER_THREAD + 77)
    wires, sums = [], []
    for count in (1, 3):
        threads(count)
        wire = torch.empty(3, INT4.wire_bytes(x.shape[1]), dtype=torch.uint8)
        encode(INT4, x, wire, address=ADDRESS, levels=None)
        total = torch.empty(x.shape[1])
        decode_sum(INT4, wire, total, scale=1.0, own=None, levels=None)
        wires.append(wire), sums.append(total)
    for first, second in (wires, sums):
        assert torch.equal(first, second)


@needs.native_kernels
def test_rows_with_holes_and_columns_of_messages() -> None:
    wide = torch.randn(3, 500)
    for x in (wide[:, 100:333], wide.t()[:77], wide.double()[:, :50], wide[:1].expand(4, 500)):
        nbytes = INT4.wire_bytes(x.shape[1])
        message = torch.full((x.shape[0], nbytes + 33), 7, dtype=torch.uint8)
        out = message[:, 1 : nbytes + 1]
        encode(INT4, x, out, address=ADDRESS, levels=None)
        assert_same(INT4, out, expected(INT4, x, ADDRESS))
        assert torch.all(message[:, :1] == 7) and torch.all(message[:, nbytes + 1 :] == 7)
        found, wanted = torch.zeros(2, *x.shape).transpose(1, 2).reshape(2, *x.shape).unbind()
        decode(INT4, out, found, levels=None)
        reference.decode(out, wanted, INT4, levels=None)
        assert torch.equal(found, wanted)


def test_backend_torch_leaves_the_library_alone(monkeypatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("called")

    monkeypatch.setattr(native, "function", refuse)
    x = torch.randn(1, 100)
    wire = torch.empty(1, INT4.wire_bytes(100), dtype=torch.uint8)
    encode(IN_TORCH, x, wire, address=ADDRESS)
    assert_same(INT4, wire, expected(INT4, x, ADDRESS))
    decode(IN_TORCH, wire, torch.empty(1, 100))
    assert dispatch.describe(x.device, "torch") == "torch kernels"


@pytest.mark.parametrize(
    "version, reason", [(None, "not built"), (0, "have version 0"), (OSError("no"), "no")]
)
def test_a_library_that_does_not_fit_is_not_used(monkeypatch, version, reason: str) -> None:
    def load(path: str):
        if isinstance(version, OSError):
            raise version
        return type("Library", (), {"dsq_version": staticmethod(lambda: version)})

    spec = None if version is None else type("Spec", (), {"origin": "/somewhere/_native.so"})
    monkeypatch.setattr(native, "find_spec", lambda _: spec)
    monkeypatch.setattr(ctypes, "CDLL", load)
    native.unavailable_reason.cache_clear()
    try:
        assert reason in native.unavailable_reason()
        assert dispatch.describe(torch.device("cpu")).startswith("torch kernels (C++")
    finally:
        native.unavailable_reason.cache_clear()


@needs.native_kernels
@pytest.mark.parametrize("numel", (13, 500, 4000))
def test_random_bits_of_rows_lie_a_stride_apart(numel: int) -> None:
    x = torch.randn(5, numel).bfloat16()
    wire = torch.empty(5, INT4.wire_bytes(numel), dtype=torch.uint8)
    for step in (16 * 5000, 1 << 33):
        address = ADDRESS._replace(row_vectors=step)
        encode(INT4, x, wire, address=address, levels=None)
        assert_same(INT4, wire, one_by_one(INT4, x, address))


@needs.native_kernels
def test_backend_torch_takes_the_reference_and_auto_the_library(monkeypatch) -> None:
    used, found = [], native.function
    monkeypatch.setattr(native, "function", lambda name: used.append(name) or found(name))
    x = torch.randn(1, 300)
    wire = torch.empty(1, INT4.wire_bytes(300), dtype=torch.uint8)
    encode(INT4, x, wire, address=ADDRESS)
    assert used == ["dsq_encode"] and dispatch.describe(x.device) == "C++ kernels"
    encode(IN_TORCH, x, wire, address=ADDRESS)
    assert used == ["dsq_encode"] and dispatch.describe(x.device, "torch") == "torch kernels"
    assert_same(INT4, wire, expected(INT4, x, ADDRESS))
