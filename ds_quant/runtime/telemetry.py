"""Sampled steps of one engine or model, written to a file of JSON lines.

[Note: which steps] Optimizer steps ``interval``, 2 ``interval``, ... Rank 0 measures itself and
writes the records. Other ranks measure nothing.

[Note: CUDA] In a sampled step the clock waits for the device; otherwise it would time launches. The
waits also end overlap: a sampled step is slower, and its waiting times are an upper bound.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from ds_quant.comm.traffic import Sample, normalised
from ds_quant.config.errors import show
from ds_quant.config.schema import MetricsConfig
from ds_quant.policy import timing
from ds_quant.runtime import log
from ds_quant.runtime.run import Run

_COUNTS = "resyncs", "nonfinite_steps", "exact_steps"  # of ``SchemeState``


def unwritable(settings: MetricsConfig) -> str:
    """Return the error if this process cannot write the file, "" if it can or there is none."""
    if not settings.interval or settings.file is None:
        return ""
    try:
        with Path(settings.file).open("a", encoding="utf-8"):
            return ""
    except OSError as error:
        return (
            f"metrics.file={show(settings.file)}: {error.strerror}: allowed: a file that rank 0 "
            "can write, in a folder that exists; or null"
        )


def json_line(heading: Mapping[str, int], values: Mapping[str, float]) -> str:
    """Return a JSON line, with null for infinity and NaN, which JSON lacks.

    heading: the optimizer step, and under DeepSpeed the samples. values: by name, such as
        "gradients/inter/error".
    """
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({**heading, **finite})


class Telemetry(ABC):
    """Open and close the samples of one engine or model."""

    def __init__(self, run: Run, settings: MetricsConfig) -> None:
        self._run = run
        self._interval = settings.interval
        self._file = None if settings.file is None else Path(settings.file)
        self._traffic = run.traffic
        self._clock = timing.device_clock(run.device)
        self._logged_failed_write = False
        # Of the last record:
        self._steps = 0  # optimizer steps since then
        self._last = deepcopy(run.traffic.received)

    # - Parts of a front

    @property
    @abstractmethod
    def finished_steps(self) -> int:
        """Optimizer steps so far. A record begins with it, as "step"."""

    @property
    def heading(self) -> dict[str, int]:
        """The begin of a record."""
        return {"step": self.finished_steps}

    def counts(self) -> dict[str, float]:
        """Return counters of the run, for the end of a record."""
        return {name: getattr(self._run.state, name) for name in _COUNTS}

    def write(self, values: dict[str, float]) -> None:
        """Write a record to the file, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            return
        start = "\n" if _is_torn(self._file) else ""
        with self._file.open("a", encoding="utf-8") as opened:
            opened.write(f"{start}{json_line(self.heading, values)}\n")

    # - Events

    def arm(self) -> None:
        """Sample the next optimizer step if it is its turn.

        Called between steps, and after a checkpoint was loaded: then a sample may have begun.
        """
        meter = self._traffic.meter
        next_step = self.finished_steps + 1
        if next_step % self._interval == 0 and not meter.is_open:
            meter.open(self._clock)

    def after_step(self) -> None:
        """Run after an optimizer step was counted, skipped or not."""
        self._steps += 1
        if self._traffic.meter.is_open:
            self._try_to_write(self._values(self._traffic.meter.close()))
            self._steps, self._last = 0, deepcopy(self._traffic.received)
        self.arm()

    # - Internals

    def _values(self, sample: Sample) -> dict[str, float]:
        values = dict(self._bytes())
        values |= _errors(sample)
        for (role, link), tally in sample.tallies.items():
            if tally.numel:
                values[f"{role}/{link}/bits"] = tally.bits
        padding = self._traffic.lossless.padding
        if padding is not None:
            values["weights/padding"] = padding
        for name in ("encode", "wait", "decode"):
            values[f"seconds/{name}"] = sample.seconds[name]
        return values | self.counts()

    def _bytes(self) -> Iterator[tuple[str, float]]:
        """Yield bytes per step since the last record, and the saved share of full precision."""
        baseline = self._run.received_in_full_precision()
        for role, links in self._traffic.received.items():
            for link, received in links.items():
                per_step = (received - self._last[role][link]) / self._steps
                full_precision = baseline[role][link]
                if per_step:
                    yield f"{role}/{link}/bytes", per_step
                if per_step and full_precision:
                    yield f"{role}/{link}/saved", 1 - per_step / full_precision

    def _try_to_write(self, values: dict[str, float]) -> None:
        """Write a record. A full disk or a lost folder loses records and does not end the run."""
        try:
            self.write(values)
        except OSError as error:
            if not self._logged_failed_write:
                log.log_here(
                    f"quantized_comm: step {self.finished_steps}: the metrics cannot be written: "
                    f"{error}; training goes on, and later ones are tried again (logged once)"
                )
            self._logged_failed_write = True


class StepTelemetry(Telemetry):
    """Counts the steps of the run: FSDP2 and DDP do not know the number of training samples."""

    @property
    def finished_steps(self) -> int:
        """See ``Telemetry``."""
        return self._run.step


def _is_torn(path: Path) -> bool:
    """Return True if the last line has no end, because the disk was full or a job was killed."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _errors(sample: Sample) -> dict[str, float]:
    """Return the relative errors by role and link, read back in one copy from the device."""
    squares: dict[tuple[str, str], Tensor] = {}  # squared error and norm
    for key, tally in sample.tallies.items():
        if tally.squares is not None:
            squares[key] = tally.squares
    if not squares:
        return {}
    errors: dict[str, float] = {}
    rows = torch.stack(list(squares.values())).tolist()
    for (role, link), (error, norm) in zip(squares, rows, strict=True):
        errors[f"{role}/{link}/error"] = normalised(error, norm)
    return errors
