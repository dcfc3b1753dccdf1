"""Sampled steps of one engine, written to DeepSpeed's monitors and to a file of JSON lines.

[Note: which steps] Optimizer steps ``interval``, 2 ``interval``, ... as DeepSpeed counts them. Rank
0 measures itself and writes that; nobody would read what other ranks see, so they measure nothing.

[Note: CUDA] In a sampled step the clock waits for the device, else it would time launches. That
also ends overlap: a sampled step is slower, and its waits are an upper bound.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from ds_quant.comm.traffic import Sample, normalised
from ds_quant.config.errors import show
from ds_quant.config.schema import MetricsConfig
from ds_quant.policy.autotune import device_clock
from ds_quant.zero import hooks, log
from ds_quant.zero.plugin import Plugin

_COUNTS = "resyncs", "nonfinite_steps", "exact_steps"  # of the plugin's state
PREFIX = "Train/Samples/ds_quant"  # as DeepSpeed names its own events


def unwritable(settings: MetricsConfig, rank: int) -> str:
    """On rank 0, say why the file cannot be written; empty if it can."""
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
    """Return a JSON line; it has no infinity and no NaN: null instead.

    step: optimizer steps as DeepSpeed counts them. samples: ``engine.global_samples``. values: by
    name, such as "gradients/inter/error".
    """
    finite = {n: v if math.isfinite(v) else None for n, v in values.items()}
    return json.dumps({"step": step, "samples": samples, **finite})


class Telemetry:
    """Open and close the samples of one engine."""

    def __init__(self, plugin: Plugin, settings: MetricsConfig) -> None:
        self._plugin, self._interval = plugin, settings.interval
        self._file = None if settings.file is None else Path(settings.file)
        self._clock = device_clock(hooks.device())
        self._failed = False  # to write, once
        self._steps = 0  # since the last report
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
        values, state = dict(self._bytes()), self._plugin.state
        values |= _errors(sample)
        for (role, link), tally in sample.tallies.items():
            if tally.numel:
                values[f"{role}/{link}/bits"] = tally.bits
        if (padding := self._plugin.traffic.lossless.padding) is not None:
            values["weights/padding"] = padding
        for name in ("encode", "wait", "decode"):
            values[f"seconds/{name}"] = sample.seconds[name]
        return values | {name: getattr(state, name) for name in _COUNTS}

    def _bytes(self) -> Iterator[tuple[str, float]]:
        """Bytes per step since the last report, and the share of full precision that is saved."""
        baseline = self._plugin.received_in_full_precision()
        for role, links in self._plugin.traffic.received.items():
            for link, received in links.items():
                per_step = (received - self._last[role][link]) / self._steps
                exact = baseline[role][link]
                if per_step:
                    yield f"{role}/{link}/bytes", per_step
                if per_step and exact:
                    yield f"{role}/{link}/saved", 1 - per_step / exact

    def _write(self, values: dict[str, float]) -> None:
        """Write a record; a full disk or a lost folder costs records, not the run."""
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
            if not self._failed:
                log.log_here(
                    f"quantized_comm: step {step}: the metrics cannot be written: {error}; "
                    "training goes on, and later ones are tried again (logged once)"
                )
            self._failed = True


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end, because the disk was full or a job was killed."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def listened_to(engine: Any, settings: MetricsConfig) -> bool:
    """Whether anybody reads samples of this rank: a monitor, or a file."""
    reader = settings.file is not None or engine.monitor.enabled
    return bool(settings.interval) and reader and hooks.rank_and_world()[0] == 0


def _errors(sample: Sample) -> dict[str, float]:
    """Read the errors back: the only point that waits for the device."""
    places = [place for place, tally in sample.tallies.items() if tally.squares is not None]
    if not places:
        return {}
    squares = torch.stack([sample.tallies[place].squares for place in places]).tolist()
    return {
        f"{role}/{link}/error": normalised(error, norm)
        for (role, link), (error, norm) in zip(places, squares, strict=True)
    }
