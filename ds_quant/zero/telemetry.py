"""Sampled steps of one engine, written to DeepSpeed's monitors, too."""

from __future__ import annotations

from ds_quant.config.schema import MetricsConfig
from ds_quant.runtime import telemetry
from ds_quant.runtime.run import Run
from ds_quant.zero import hooks
from ds_quant.zero.deepspeed_types import Engine

PREFIX = "Train/Samples/ds_quant"  # as DeepSpeed names its own events


class Telemetry(telemetry.Telemetry):
    """The samples of one engine. Steps are those that DeepSpeed counts."""

    def __init__(self, engine: Engine, run: Run, settings: MetricsConfig) -> None:
        super().__init__(run, settings)
        self._engine = engine

    @property
    def finished_steps(self) -> int:
        """Optimizer steps that DeepSpeed has counted."""
        return self._engine.global_steps

    @property
    def heading(self) -> dict[str, int]:
        """Steps and training samples."""
        return {**super().heading, "samples": self._engine.global_samples}

    def write(self, values: dict[str, float]) -> None:
        """Write a record to DeepSpeed's monitors, and to the file."""
        engine = self._engine
        if engine.monitor.enabled:
            samples = engine.global_samples
            events = [(f"{PREFIX}/{name}", value, samples) for name, value in values.items()]
            engine.monitor.write_events(events)
        super().write(values)


def is_read(engine: Engine, settings: MetricsConfig) -> bool:
    """Return True if a monitor or a file takes the samples of this rank."""
    has_reader = settings.file is not None or engine.monitor.enabled
    return bool(settings.interval) and has_reader and hooks.rank_and_world()[0] == 0
