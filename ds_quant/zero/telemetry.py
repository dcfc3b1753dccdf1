"""Sampled steps of one engine, written to DeepSpeed's monitors and to a file of JSON lines.

[Note: which steps] Optimizer steps ``interval``, 2 ``interval``, ... as DeepSpeed counts them. Rank
0 measures itself and writes the records. Other ranks measure nothing.

[Note: CUDA] In a sampled step the clock waits for the device; otherwise it would time launches. The
waits also end overlap: a sampled step is slower, and its waiting times are an upper bound.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from ds_quant.comm.traffic import Sample, normalised
from ds_quant.config.errors import show
from ds_quant.config.schema import MetricsConfig
from ds_quant.policy.timing import device_clock
from ds_quant.runtime import log
from ds_quant.zero import accelerator, hooks
from ds_quant.zero.deepspeed_types import Engine
from ds_quant.zero.plugin import Plugin

_COUNTS = "resyncs", "nonfinite_steps", "exact_steps"  # of ``SchemeState``
PREFIX = "Train/Samples/ds_quant"  # as DeepSpeed names its own events


def unwritable(settings: MetricsConfig, rank: int) -> str:
    """Return the error if the file cannot be written; "" if it can, and on all ranks but 0."""
    if rank or not settings.interval or settings.file is None:
        return ""
    try:
        with Path(settings.file).open("a", encoding="utf-8"):
            return ""
    except OSError as error:
        return (
            f"metrics.file={show(settings.file)}: {error.strerror}: allowed: a file that rank 0 "
            "can write, in a folder that exists; or null"
        )


def json_line(step: int, samples: int, values: dict[str, float]) -> str:
    """Return a JSON line, with null for infinity and NaN, which JSON lacks.

    step: optimizer steps as DeepSpeed counts them. samples: ``engine.global_samples``. values: by
    name, such as "gradients/inter/error".
    """
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step, "samples": samples, **finite})


class Telemetry:
    """Open and close the samples of one engine."""

    def __init__(self, plugin: Plugin, settings: MetricsConfig) -> None:
        self._plugin = plugin
        self._interval = settings.interval
        self._file = None if settings.file is None else Path(settings.file)
        self._clock = device_clock(accelerator.device())
        self._logged_failed_write = False
        # Of the last record:
        self._steps = 0  # optimizer steps since then
        self._last = deepcopy(plugin.traffic.received)

    def arm(self) -> None:
        """Sample the next optimizer step if it is its turn. Called between steps."""
        meter = self._plugin.traffic.meter
        if (self._plugin.engine.global_steps + 1) % self._interval == 0 and not meter.is_open:
            meter.open(self._clock)

    def after_step(self) -> None:
        """Run after DeepSpeed counted an optimizer step, skipped or not."""
        self._steps += 1
        if self._plugin.traffic.meter.is_open:
            self._write(self._values(self._plugin.traffic.meter.close()))
            self._steps, self._last = 0, deepcopy(self._plugin.traffic.received)
        self.arm()

    def _values(self, sample: Sample) -> dict[str, float]:
        state = self._plugin.state
        values = dict(self._bytes())
        values |= _errors(sample)
        for (role, link), tally in sample.tallies.items():
            if tally.numel:
                values[f"{role}/{link}/bits"] = tally.bits
        padding = self._plugin.traffic.lossless.padding
        if padding is not None:
            values["weights/padding"] = padding
        for name in ("encode", "wait", "decode"):
            values[f"seconds/{name}"] = sample.seconds[name]
        for name in _COUNTS:
            values[name] = getattr(state, name)
        return values

    def _bytes(self) -> Iterator[tuple[str, float]]:
        """Yield bytes per step since the last record, and the saved share of full precision."""
        baseline = self._plugin.received_in_full_precision()
        for role, links in self._plugin.traffic.received.items():
            for link, received in links.items():
                per_step = (received - self._last[role][link]) / self._steps
                full_precision = baseline[role][link]
                if per_step:
                    yield f"{role}/{link}/bytes", per_step
                if per_step and full_precision:
                    yield f"{role}/{link}/saved", 1 - per_step / full_precision

    def _write(self, values: dict[str, float]) -> None:
        """Write a record. A full disk or a lost folder loses records and does not end the run."""
        engine, file = self._plugin.engine, self._file
        step, samples = engine.global_steps, engine.global_samples
        try:
            if engine.monitor.enabled:
                events = [(f"{PREFIX}/{name}", value, samples) for name, value in values.items()]
                engine.monitor.write_events(events)
            if file is not None:
                start = "\n" if _is_torn(file) else ""
                with file.open("a", encoding="utf-8") as opened:
                    opened.write(f"{start}{json_line(step, samples, values)}\n")
        except OSError as error:
            if not self._logged_failed_write:
                log.log_here(
                    f"quantized_comm: step {step}: the metrics cannot be written: {error}; "
                    "training goes on, and later ones are tried again (logged once)"
                )
            self._logged_failed_write = True


def _is_torn(path: Path) -> bool:
    """Return True if the last line has no end, because the disk was full or a job was killed."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def is_read(engine: Engine, settings: MetricsConfig) -> bool:
    """Return True if a monitor or a file takes the samples of this rank."""
    has_reader = settings.file is not None or engine.monitor.enabled
    return bool(settings.interval) and has_reader and hooks.rank_and_world()[0] == 0


def _errors(sample: Sample) -> dict[str, float]:
    """Read the errors back. The only point that waits for the device."""
    squares: dict[tuple[str, str], Tensor] = {}  # by role and link: error and norm
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
