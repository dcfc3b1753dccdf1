"""Sampled steps of one model under FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_quant.config.schema import MetricsConfig
from ds_quant.runtime import telemetry
from ds_quant.runtime.figures import Received

if TYPE_CHECKING:
    from ds_quant.fsdp2.front import Front


class Telemetry(telemetry.Telemetry):
    """The samples of one model. Steps are those of the optimizer."""

    def __init__(self, front: Front, settings: MetricsConfig) -> None:
        super().__init__(settings, front.traffic, front.device)
        self._front = front

    @property
    def heading(self) -> dict[str, int]:
        """Optimizer steps. FSDP2 does not know the samples."""
        return {"step": self._front.step}

    def received_in_full_precision(self) -> Received:
        """Return bytes that this rank would receive in a step of as many backwards as the last."""
        return self._front.received_in_full_precision()
