"""Count how often ZeRO-3 gathers the weights: predicted at start-up, then measured.

[Note: what is counted] DeepSpeed records the order of modules in a first pass and decides by it
from then on; an evaluation in between makes it record again. What counts is the first optimizer
step that began after two undisturbed micro-steps and was not disturbed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ds_quant.policy.model import FetchSettings
from ds_quant.zero import hooks, log

_RECORDING = 2  # micro-steps, see [Note: what is counted]
_CLOSE = 0.03  # a relative error that is not logged


def predicted_gathers(engine: Any) -> float:
    """Predict gathers of an element per micro-step by the rule of ``policy.model``."""
    settings = FetchSettings(
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
    )
    numel, _ = hooks.elements(engine.module)
    return settings.gathers(numel, gathered_modules(engine.module))


def gathered_modules(module: torch.nn.Module) -> int:
    """Count the modules whose own parameters ZeRO-3 gathers, each by itself."""
    whole = hooks.is_gathered_whole(module)
    own = any(not getattr(p, "ds_persist", True) for p in module.parameters(recurse=whole))
    return own + (0 if whole else sum(map(gathered_modules, module.children())))


class GatherCount:
    """Count fetched elements until an optimizer step in a steady state gives the number.

    line: makes the start-up line, which is logged again if the number was predicted wrongly.
    """

    def __init__(self, plugin: Any, line: Callable[[], str]) -> None:
        self._plugin, self._line = plugin, line
        module = plugin.engine.module
        self._numel, _ = hooks.elements(module)
        self._persistent = sum(p.ds_numel for p in module.parameters() if p.ds_persist)
        self._fetched = 0
        self._undisturbed = 0  # micro-steps before this optimizer step
        self._disturbed = False

    def fetched(self, params: Iterable[Any]) -> None:
        """Count parameters that DeepSpeed gathers for forward or backward."""
        self._fetched += sum(p.ds_numel for p in params if not p.ds_persist)
        self._disturbed |= not self._plugin.engine.module.training

    def after_step(self) -> None:
        """End an optimizer step: take its count if DeepSpeed was in a steady state."""
        micro_steps = self._plugin.engine.gradient_accumulation_steps()
        if not self._disturbed and self._undisturbed >= _RECORDING:
            fetched = (self._fetched + self._persistent) / micro_steps
            self._settle(fetched / max(1, self._numel))
            return
        self._undisturbed = 0 if self._disturbed else self._undisturbed + micro_steps
        self._fetched, self._disturbed = 0, False

    def _settle(self, counted: float) -> None:
        plugin = self._plugin
        predicted, plugin.gathers, plugin.gather_count = plugin.gathers, counted, None
        plugin.hooks.after_count.remove(self.after_step)
        if abs(counted - predicted) > _CLOSE * predicted:
            log.log_rank0(
                f"quantized_comm: weights are fetched {counted:.3g} times per micro-batch, not "
                f"{predicted:.3g} as predicted; corrected start-up line: {self._line()}"
            )
