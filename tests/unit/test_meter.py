"""Meter: whose seconds count where, and that nothing happens between samples; Traffic."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from ds_quant.codec.bound import Coding, Rotation, decode, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.comm import traffic as meter_module
from ds_quant.comm.traffic import Meter, Tally, normalised


def ticking(*times: float) -> Iterator[float]:
    yield from times


def test_a_section_is_charged_without_what_is_inside_it() -> None:
    clock, meter = ticking(0, 2, 7, 8), Meter()
    meter.open(lambda: next(clock))
    with meter.section("decode"), meter.section("wait"):
        pass
    assert meter.close().seconds == {"encode": 0, "wait": 5, "decode": 3}


def test_between_samples_no_clock_is_read_and_nothing_is_decoded() -> None:
    def forbidden() -> float:
        raise AssertionError("a clock was read")

    meter = Meter()
    meter.open(forbidden)
    meter.close()
    with meter.section("wait"), meter.encoding("weights", "inter") as note:
        assert note is None
    assert not meter.is_open


def test_what_was_encoded_is_read_back_outside_the_sections() -> None:
    clock, meter = ticking(0, 1, 5, 9), Meter()
    meter.open(lambda: next(clock))
    values = torch.tensor([[0.0, 1.0, 3.0, -2.0] * 8])
    coding = Coding(codec=GroupCodec(bits=2, group_size=32, range="absmax"))
    wire = torch.empty(1, coding.codec.wire_bytes(32), dtype=torch.uint8)
    with meter.encoding("gradients", "inter") as note:
        encode(coding.codec, values, wire)
        note(coding.error, values, wire)
    sample = meter.close()
    decoded = torch.empty_like(values)
    decode(coding.codec, wire, decoded)
    tally = sample.tallies["gradients", "inter"]
    expected = (decoded - values).square().sum() / values.square().sum()
    assert normalised(*tally.squares.tolist()) == pytest.approx(expected.item()) and expected > 0
    assert (tally.numel, tally.bits) == (32, 8 * wire.numel() / 32)
    assert sample.seconds["encode"] == 1, "reading back takes from 5 to 9 and is not encoding"


def test_error_of_a_difference_is_that_of_the_weights() -> None:
    reference = torch.linspace(-1, 1, 64)
    wanted = reference + 0.01 * torch.sin(torch.arange(64.0))
    codec = GroupCodec(bits=4, group_size=32, range="absmax")
    coding = Coding(codec=codec, difference=True)
    wire = torch.empty(codec.wire_bytes(64), dtype=torch.uint8)
    encode(codec, wanted[None], wire[None], base=reference[None])
    error, norm = coding.error(wanted, wire, reference=reference)
    after = reference.clone()
    decode(codec, wire[None], after[None], add=True)
    assert error == pytest.approx((after - wanted).double().square().sum().item())
    assert norm == pytest.approx(wanted.double().square().sum().item())
    assert 0 < error < 1e-4 * norm
    assert torch.equal(reference, torch.linspace(-1, 1, 64)), "the reference is left alone"


def test_error_of_rotated_values_is_that_of_the_values() -> None:
    """A rotation keeps norms up to a factor, which must not show."""
    values = torch.sin(torch.arange(100.0)) * 3
    rotation = Rotation(block=32)
    coding = Coding(codec=GroupCodec(bits=8, group_size=32, range="absmax"))
    wire = torch.empty(coding.codec.wire_bytes(128), dtype=torch.uint8)
    encode(coding.codec, values[None], wire[None], rotation=rotation)
    error, norm = coding.error(values, wire, rotation=rotation)
    assert norm == pytest.approx(values.double().square().sum().item())
    assert 0 < error < 1e-4 * norm


class _Slow:
    """Stands for a coding; counts bytes that are read back. ``tolist`` and such would wait."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def error(self, values: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
        self.read.append(wire.numel())
        return torch.tensor([float(values[0]), 1.0], dtype=torch.float64)


def _sampled(meter: Meter, coding: _Slow, pieces: int, nbytes: int) -> tuple[list[int], Tally]:
    """One sample of messages of two pieces each; places of the pieces that were read back."""
    before = len(coding.read)
    meter.open(lambda: 0.0)
    wire, found = torch.empty(nbytes, dtype=torch.uint8), []
    for first in range(0, pieces, 2):
        with meter.encoding("gradients", "inter") as note:
            for place in (first, first + 1):
                make = functools.partial(_made, found, place, nbytes)
                note(coding.error, make, wire, numel=nbytes)
    (tally,) = meter.close().tallies.values()
    assert coding.read[before:] == [nbytes] * len(found)
    return found, tally


def _made(found: list[int], place: int, numel: int) -> torch.Tensor:
    found.append(place)
    return torch.full((numel,), float(place))


def test_a_sample_reads_back_a_bounded_part_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meter_module, "CHECKED", 300)
    meter, coding = Meter(), _Slow()
    seen = [_sampled(meter, coding, pieces=8, nbytes=100) for _ in range(4)]
    assert [places for places, _ in seen] == [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1, 2]]
    assert {(tally.numel, tally.nbytes) for _, tally in seen} == {(800, 800)}, "all is counted"
    assert seen[1][1].squares.tolist() == [3 + 4 + 5, 3]


def test_a_piece_larger_than_the_bound_is_read_back_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "CHECKED", 30)
    meter, coding = Meter(), _Slow()
    seen = [_sampled(meter, coding, pieces=2, nbytes=100)[0] for _ in range(8)]
    assert seen == [[0], [0], [0], [0], [1], [1], [1], [0]]


def test_nothing_waits_for_the_device_while_a_sample_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(*_: object) -> None:
        raise AssertionError("the device is waited for")

    meter, values = Meter(), torch.randn(64)
    coding = Coding(codec=GroupCodec(bits=4, group_size=32))
    wire = torch.empty(coding.codec.wire_bytes(64), dtype=torch.uint8)
    meter.open(lambda: 0.0)
    encode(coding.codec, values[None], wire[None])
    for name in ("tolist", "item", "__float__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    with meter.encoding("weights", "inter") as note:
        note(coding.error, values, wire)
    (tally,) = meter.close().tallies.values()
    monkeypatch.undo()
    error, norm = tally.squares.tolist()
    assert 0 < error < 0.1 * norm
