"""Counts and samples of a step, and their report: every figure by hand."""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ds_quant.codec.bound import BoundCodec, Rotation, decode, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.comm import traffic as meter_module
from ds_quant.comm.lossless_gather import counters_of_gather
from ds_quant.comm.traffic import Meter, Tally, Traffic, normalised
from ds_quant.config.schema import MetricsConfig
from ds_quant.runtime import log
from ds_quant.runtime.telemetry import StepTelemetry, json_line, unwritable
from ds_quant.zero import telemetry
from ds_quant.zero.telemetry import PREFIX, Telemetry

# ---- what a sample holds ----


def opened(*times: float) -> Meter:
    """A meter with an open sample, whose clock shows these times and fails behind them."""
    meter = Meter()
    meter.open(iter(times).__next__)
    return meter


def test_a_section_is_charged_without_what_is_inside_it() -> None:
    meter = opened(0, 2, 7, 8)
    with meter.section("decode"), meter.section("wait"):
        pass
    assert meter.close().seconds == {"encode": 0, "wait": 5, "decode": 3}


def test_between_samples_no_clock_is_read_and_nothing_is_decoded() -> None:
    meter = opened()
    meter.close()
    with meter.section("wait"), meter.encoding("weights", "inter") as note:
        assert note is None
    assert not meter.is_open


def test_what_was_encoded_is_read_back_outside_the_sections_and_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(*_: object) -> None:
        raise AssertionError("the device is waited for")

    meter = opened(0, 1, 5, 9)
    values = torch.tensor([[0.0, 1.0, 3.0, -2.0] * 8])
    bound_codec = BoundCodec(codec=GroupCodec(bits=2, group_size=32, range="absmax"))
    wire = torch.empty(1, bound_codec.codec.wire_bytes(32), dtype=torch.uint8)
    encode(bound_codec.codec, values, wire)
    with monkeypatch.context() as patched:
        for name in ("tolist", "item", "__float__", "__bool__"):
            patched.setattr(torch.Tensor, name, waits)
        with meter.encoding("gradients", "inter") as note:
            note(bound_codec.error, values, wire)
        sample = meter.close()
    decoded = torch.empty_like(values)
    decode(bound_codec.codec, wire, decoded)
    tally = sample.tallies["gradients", "inter"]
    expected = (decoded - values).square().sum() / values.square().sum()
    assert normalised(*tally.squares.tolist()) == pytest.approx(expected.item()) and expected > 0
    assert (tally.numel, tally.bits) == (32, 8 * wire.numel() / 32)
    assert sample.seconds["encode"] == 1, "reading back takes from 5 to 9 and is not encoding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_of_a_difference_is_that_of_the_weights(dtype: torch.dtype) -> None:
    """The weights are those that ranks hold: rounding to their dtype is no error of the codec."""
    master = torch.linspace(-1, 1, 64) + 0.01 * torch.sin(torch.arange(64.0))
    reference, wanted = torch.linspace(-1, 1, 64).to(dtype), master.to(dtype).float()
    codec = GroupCodec(bits=4, group_size=32, range="absmax")
    bound_codec = BoundCodec(codec=codec, difference=True)
    wire = torch.empty(codec.wire_bytes(64), dtype=torch.uint8)
    encode(codec, wanted[None], wire[None], base=reference.float()[None])
    error, norm = bound_codec.error(master, wire, reference=reference)
    after = reference.clone()
    decode(codec, wire[None], after[None], add=True)
    assert error == pytest.approx((after.float() - wanted).double().square().sum().item())
    assert norm == pytest.approx(wanted.double().square().sum().item())
    assert 0 < error < 1e-4 * norm
    assert torch.equal(reference, torch.linspace(-1, 1, 64).to(dtype)), "it is left alone"


def test_error_of_rotated_values_is_that_of_the_values() -> None:
    """A rotation keeps norms up to a factor, which must not show."""
    values = torch.sin(torch.arange(100.0)) * 3
    rotation = Rotation(block=32)
    bound_codec = BoundCodec(codec=GroupCodec(bits=8, group_size=32, range="absmax"))
    wire = torch.empty(bound_codec.codec.wire_bytes(128), dtype=torch.uint8)
    encode(bound_codec.codec, values[None], wire[None], rotation=rotation)
    error, norm = bound_codec.error(values, wire, rotation=rotation)
    assert norm == pytest.approx(values.double().square().sum().item())
    assert 0 < error < 1e-4 * norm


def sampled(meter: Meter, pieces: int) -> tuple[list[int], Tally]:
    """One sample of messages of two pieces of 100 bytes, whose first value is their place; places
    of those that were read back, the only ones that were made.
    """
    made = Mock(side_effect=lambda place: torch.full((100,), float(place)))
    error = Mock(side_effect=lambda values, wire: torch.stack([values[0], wire[0]]).double())
    meter.open(lambda: 0.0)
    for first in range(0, pieces, 2):
        with meter.encoding("gradients", "inter") as note:
            for place in (first, first + 1):
                note(error, functools.partial(made, place), torch.ones(100).byte(), numel=100)
    (tally,) = meter.close().tallies.values()
    assert made.call_count == error.call_count
    return [call.args[0] for call in made.call_args_list], tally


@pytest.mark.parametrize(
    ("bound", "pieces", "places"),
    [
        (300, 8, [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1, 2]]),
        (30, 2, [[0], [0], [0], [0], [1], [1], [1], [0]]),  # pieces larger than the bound
    ],
)
def test_a_sample_reads_back_a_bounded_part_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, bound: int, pieces: int, places: list[list[int]]
) -> None:
    monkeypatch.setattr(meter_module, "CHECKED", bound)
    meter = Meter()
    for expected in places:
        found, tally = sampled(meter, pieces)
        assert found == expected
        assert tally.squares.tolist() == [sum(found), len(found)]
        assert (tally.numel, tally.nbytes) == (100 * pieces, 100 * pieces), "all is counted"


# ---- what is reported ----

# Bytes that full precision would bring per step.
BASELINE = {
    "weights": {"intra": 0.0, "inter": 4000.0},
    "gradients": {"intra": 1000.0, "inter": 8000.0},
}


class Job:
    """An engine of rank 0 that samples every second step."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(telemetry.hooks, "rank_and_world", lambda: (0, 2))
        self.events: list[tuple[str, float, int]] = []
        monitor = SimpleNamespace(enabled=True, write_events=self.events.extend)
        self.engine = SimpleNamespace(global_steps=0, global_samples=0, monitor=monitor)
        self.traffic = Traffic()
        run: Any = SimpleNamespace(
            device=torch.device("cpu"),
            traffic=self.traffic,
            state=SimpleNamespace(resyncs=3, nonfinite_steps=5, exact_steps=7),
            received_in_full_precision=lambda: BASELINE,
        )
        settings = MetricsConfig(interval=2, file=str(file))
        self.telemetry, self._file = Telemetry(self.engine, run, settings), file
        self.telemetry.arm()

    def step(self, **received: int) -> None:
        """One optimizer step in which ``<role>_<link>`` bytes arrive; 32 samples."""
        for name, nbytes in received.items():
            role, link = name.split("_")
            self.traffic.count(role, **{"intra": 0, "inter": 0} | {link: nbytes})
        self.engine.global_steps += 1
        self.engine.global_samples += 32
        self.telemetry.after_step()

    def lines(self, torn: Sequence[int] = ()) -> list[dict[str, float]]:
        lines = enumerate(self._file.read_text("utf-8").splitlines())
        return [json.loads(line) for place, line in lines if place not in torn]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "lines", monkeypatch)


def test_saved_is_the_share_of_full_precision_that_did_not_arrive(job: Job) -> None:
    job.step(weights_inter=900, gradients_inter=3000)
    job.step(weights_inter=1100, gradients_inter=1000, gradients_intra=500)
    job.step(weights_inter=4000)
    job.step(weights_inter=4400)
    job.step()
    job.step(weights_intra=10)
    first, second, third = job.lines()
    assert (first["weights/inter/bytes"], first["weights/inter/saved"]) == (1000, 0.75)
    assert (first["gradients/inter/bytes"], first["gradients/inter/saved"]) == (2000, 0.75)
    assert (first["gradients/intra/bytes"], first["gradients/intra/saved"]) == (250, 0.75)
    # Since the last report only, and more than full precision is a loss.
    assert second["weights/inter/bytes"] == 4200
    assert second["weights/inter/saved"] == pytest.approx(-0.05)
    assert not [name for name in second if name.startswith("gradients")]
    # What full precision does not send saves nothing.
    assert third["weights/intra/bytes"] == 5 and "weights/intra/saved" not in third


def test_a_record_begins_on_a_line_of_its_own_after_a_torn_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of a record and freed later; then a killed job's file."""
    file, (_, hard) = tmp_path / "lines", resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(log, "log_here", lambda message: None)
    for step in range(6):
        full = step == 3  # the second record
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (file.stat().st_size + 50 if full else hard, hard)
        )
        try:
            job.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert [row["step"] for row in job.lines(torn=[1])] == [2, 6]
    with file.open("a", encoding="utf-8") as other:
        other.write('{"step": 7, "sam')
    again = Job(file, monkeypatch)
    again.step()
    again.step()
    assert [row["step"] for row in again.lines(torn=[1, 3])] == [2, 6, 2]


def test_lossless_differences_move_as_many_bytes_as_the_longest_message_of_each() -> None:
    """And receive the lengths, 8 bytes each, over links of their own."""
    found = counters_of_gather(
        150,
        np.array([[16, 32], [48, 16]]),
        rows={"intra": 0, "inter": 1},
        rows_of_lengths={"intra": 1, "inter": 0},
    )
    assert (found.numel, found.used, found.moved) == (300, 112, 2 * (48 + 32))
    assert found.received_numel == {"intra": 0, "inter": 150}
    assert found.received == {"intra": 2 * 8, "inter": 48 + 32}


def test_every_count_has_its_own_name(job: Job) -> None:
    exact = job.traffic.lossless
    exact.numel, exact.used, exact.moved = 100, 40, 50
    job.step()
    job.step()
    (line,) = job.lines()
    assert line["weights/padding"] == 0.25 and exact.bits == 3.2
    assert (line["resyncs"], line["nonfinite_steps"], line["exact_steps"]) == (3, 5, 7)
    assert (line["step"], line["samples"]) == (2, 64)
    counts = [event for event in job.events if "steps" in event[0] or "resyncs" in event[0]]
    assert counts == [
        (f"{PREFIX}/resyncs", 3, 64),
        (f"{PREFIX}/nonfinite_steps", 5, 64),
        (f"{PREFIX}/exact_steps", 7, 64),
    ]


def test_a_record_has_all_figures_of_its_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s of encoding, 2 s of waiting, 3 s of decoding. Reading back takes the clock twice, too."""
    times = iter((0, 1, 1, 1, 2, 2, 2, 2, 10, 12, 20, 23))
    monkeypatch.setattr(job.telemetry, "_clock", lambda: float(next(times)))
    job.step()
    meter = job.traffic.meter
    assert meter.is_open, "the second step is sampled, from its begin on"
    with meter.encoding("gradients", "inter") as note:
        wire = torch.zeros(40, dtype=torch.uint8)
        note(lambda values, wire: torch.tensor([2.0, 8.0]), torch.zeros(80), wire)
    with meter.encoding("weights", "inter") as note:
        note(lambda values, wire: torch.tensor([3.0, 4.0]), torch.zeros(0), wire[:0])
    for section in ("wait", "decode"):
        with meter.section(section):
            pass
    job.step(gradients_inter=8000, weights_inter=4000)
    (line,) = job.lines()
    counts = {"resyncs": 3, "nonfinite_steps": 5, "exact_steps": 7}
    assert line == {
        "step": 2,
        "samples": 64,
        "weights/inter/bytes": 2000.0,
        "weights/inter/saved": 0.5,
        "gradients/inter/bytes": 4000.0,
        "gradients/inter/saved": 0.5,
        "gradients/inter/error": 0.25,
        "gradients/inter/bits": 4.0,
        "seconds/encode": 1.0,
        "seconds/wait": 2.0,
        "seconds/decode": 3.0,
        **counts,
    }
    assert not meter.is_open, "the third step is not sampled"


def test_a_load_in_a_sampled_step_goes_on_with_its_sample(job: Job) -> None:
    job.step()
    sample = job.traffic.meter._sample
    job.telemetry.arm()
    assert job.traffic.meter._sample is sample


def test_records_that_cannot_be_written_are_told_once(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "log_here", said.append)
    job.telemetry._file = tmp_path / "lost" / "lines"
    for _ in range(4):
        job.step()
    assert said == [
        "quantized_comm: step 2: the metrics cannot be written: [Errno 2] No such file or "
        f"directory: '{tmp_path}/lost/lines'; training goes on, and later ones are tried again "
        "(logged once)"
    ]
    (tmp_path / "lost").mkdir()
    job.step(weights_inter=800)
    job.step()
    (line,) = [json.loads(line) for line in job.telemetry._file.read_text("utf-8").splitlines()]
    assert (line["step"], line["weights/inter/bytes"]) == (6, 400), "of the steps since the fourth"


def test_infinity_and_nan_are_null_in_a_record() -> None:
    values = {"a": float("inf"), "b": float("nan"), "c": -float("inf"), "d": 0.5}
    line = json_line({"step": 3, "samples": 96}, values)
    assert line == '{"step": 3, "samples": 96, "a": null, "b": null, "c": null, "d": 0.5}'


@pytest.mark.parametrize("interval", [0, 2])
def test_a_file_that_can_be_written_keeps_its_records(tmp_path: Path, interval: int) -> None:
    file = tmp_path / "lines"
    file.write_text("a record\n", "utf-8")
    assert unwritable(MetricsConfig(interval=interval, file=str(file))) == ""
    assert file.read_text("utf-8") == "a record\n"
    assert unwritable(MetricsConfig(interval=interval, file=str(tmp_path / "new"))) == ""


def test_a_file_that_cannot_be_written_is_refused_where_samples_are_taken(tmp_path: Path) -> None:
    lost = str(tmp_path / "lost" / "lines")
    with_file = MetricsConfig(interval=2, file="/no/such/folder")
    assert unwritable(with_file) == (
        'metrics.file="/no/such/folder": No such file or directory: allowed: a file that rank 0 '
        "can write, in a folder that exists; or null"
    )
    assert unwritable(MetricsConfig(interval=0, file=lost)) == ""
    assert unwritable(MetricsConfig(interval=2, file=None)) == ""


def test_a_front_without_samples_counts_the_steps_of_its_run(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(
        device=torch.device("cpu"),
        traffic=Traffic(),
        state=SimpleNamespace(resyncs=3, nonfinite_steps=5, exact_steps=7),
        received_in_full_precision=lambda: BASELINE,
        step=2,
    )
    file = tmp_path / "lines"
    found = StepTelemetry(run, MetricsConfig(interval=4, file=str(file)))
    for sampled in (False, True):
        found.after_step()
        assert (run.step, run.traffic.meter.is_open) == (3 if sampled else 2, sampled)
        run.step += 1
    with run.traffic.meter.section("wait"):
        time.sleep(0.001)
    found.after_step()
    record = json.loads(file.read_text("utf-8"))
    assert record["step"] == 4 and 0.001 <= record["seconds/wait"] < 10
    without = StepTelemetry(run, MetricsConfig(interval=1, file=None))
    without.arm()
    without.after_step()
    assert run.traffic.meter.is_open, "every step is sampled"
