"""Sampled steps of one model under FSDP2."""

from __future__ import annotations

from ds_quant.config.schema import MetricsConfig
from ds_quant.runtime import telemetry
from ds_quant.runtime.run import Run


class Telemetry(telemetry.Telemetry):
    """The samples of one model. Steps are those of the optimizer."""

    def __init__(self, run: Run, settings: MetricsConfig) -> None:
        super().__init__(settings, run)

    @property
    def heading(self) -> dict[str, int]:
        """Optimizer steps. FSDP2 does not know the samples."""
        return {"step": self._run.step}
