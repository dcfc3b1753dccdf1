"""What a sampled step reports, on a stand-in for an engine: every figure by hand."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_quant.comm.lossless import Outbox, Parcel
from ds_quant.comm.traffic import Traffic
from ds_quant.config.schema import MetricsConfig
from ds_quant.zero import telemetry
from ds_quant.zero.telemetry import PREFIX, Telemetry

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
        plugin: Any = SimpleNamespace(
            engine=self.engine,
            traffic=self.traffic,
            state=SimpleNamespace(resyncs=3, nonfinite_steps=5, exact_steps=7),
            received_in_full_precision=lambda: BASELINE,
        )
        settings = MetricsConfig(interval=2, file=str(file))
        self.telemetry, self._file = Telemetry(plugin, settings), file
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
    first, second = job.lines()
    assert (first["weights/inter/bytes"], first["weights/inter/saved"]) == (1000, 0.75)
    assert (first["gradients/inter/bytes"], first["gradients/inter/saved"]) == (2000, 0.75)
    assert (first["gradients/intra/bytes"], first["gradients/intra/saved"]) == (250, 0.75)
    # Since the last report only, and more than full precision is a loss.
    assert second["weights/inter/bytes"] == 4200
    assert second["weights/inter/saved"] == pytest.approx(-0.05)
    assert not [name for name in second if name.startswith("gradients")]


def test_what_full_precision_does_not_send_saves_nothing(job: Job) -> None:
    job.step()
    job.step(weights_intra=10)
    (line,) = job.lines()
    assert line["weights/intra/bytes"] == 5 and "weights/intra/saved" not in line


def test_a_record_begins_on_a_line_of_its_own_after_a_torn_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of a record and freed later; then a killed job's file."""
    file, (_, hard) = tmp_path / "lines", resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(telemetry.log, "log_here", lambda message: None)
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
    outbox, traffic = object.__new__(Outbox), Traffic()
    outbox._link, outbox._lengths = SimpleNamespace(size=2), np.array([[16, 32], [48, 16]])
    outbox._count([Parcel(numel=70, values=list), Parcel(numel=80, values=list)], traffic)
    found = traffic.lossless
    assert (found.numel, found.used, found.moved) == (300, 112, 2 * (48 + 32))


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
