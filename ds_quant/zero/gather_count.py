"""ZeRO-3: how often a micro-step gathers the weights. Predicted at start-up, then counted.

[Note: steady state] DeepSpeed records the order of modules in a first pass, and decides by it from
then on which parameters stay gathered. An evaluation in between makes it record again. So the count
is taken from the first optimizer step that began after two undisturbed micro-steps and was not
disturbed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ds_quant.policy.model import FetchSettings
from ds_quant.runtime import log
from ds_quant.zero import sharded_params
from ds_quant.zero.deepspeed_types import Engine, ZeroParameter
from ds_quant.zero.plugin import Plugin

_RECORDING = 2  # micro-steps, see [Note: steady state]
_TOLERANCE = 0.03  # relative error of a prediction that is not logged


def predicted_gathers(engine: Engine) -> float:
    """Predict the gathers of an element per micro-step by the rule of ``policy.model``."""
    settings = FetchSettings(
        max_reuse_distance=engine.zero_max_reuse_distance(),
        max_live_parameters=engine.zero_max_live_parameters(),
        prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
    )
    numel, _ = sharded_params.elements(engine.module)
    return settings.gathers(numel, gathered_modules(engine.module))


def gathered_modules(module: torch.nn.Module) -> int:
    """Count the modules whose own parameters ZeRO-3 gathers, each on its own."""
    is_leaf = sharded_params.is_gathered_whole(module)
    params = sharded_params.parameters_of(module, recurse=is_leaf)
    # Without ``ds_persist``: not partitioned.
    count = int(any(not getattr(p, "ds_persist", True) for p in params))
    if not is_leaf:
        count += sum(map(gathered_modules, module.children()))
    return count


class GatherCount:
    """Counts fetched elements until an optimizer step in a steady state gives the number.

    start_line: returns the start-up line, which is logged again if the prediction was wrong.
    """

    def __init__(self, plugin: Plugin, start_line: Callable[[], str]) -> None:
        self._plugin = plugin
        self._start_line = start_line
        module = plugin.engine.module
        self._numel, _ = sharded_params.elements(module)
        persistent = [p for p in sharded_params.parameters_of(module) if p.ds_persist]
        self._persistent_numel = sum(p.ds_numel for p in persistent)
        self._fetched_numel = 0
        self._undisturbed = 0  # micro-steps before this optimizer step
        self._is_disturbed = False

    def fetched(self, params: Iterable[ZeroParameter]) -> None:
        """Count parameters that DeepSpeed gathers for forward or backward."""
        self._fetched_numel += sum(p.ds_numel for p in params if not p.ds_persist)
        self._is_disturbed |= not self._plugin.engine.module.training

    def disturb(self) -> None:
        """Do not count this step: an engine for evaluation has fetched."""
        self._is_disturbed = True

    def after_step(self) -> None:
        """End an optimizer step. Take its count if DeepSpeed was in a steady state."""
        plugin = self._plugin
        micro_steps = plugin.engine.gradient_accumulation_steps()
        if self._is_disturbed:
            self._undisturbed = 0
            self._begin_step()
            return
        if self._undisturbed < _RECORDING:
            self._undisturbed += micro_steps
            self._begin_step()
            return
        numel = self._fetched_numel + self._persistent_numel
        predicted = plugin.gathers
        plugin.gathers = numel / micro_steps / max(1, self._numel)
        plugin.gather_count = None
        plugin.hooks.after_count.remove(self.after_step)
        if abs(plugin.gathers - predicted) > _TOLERANCE * predicted:
            log.log_rank0(
                f"quantized_comm: weights are fetched {plugin.gathers:.3g} times per micro-batch, "
                f"not {predicted:.3g} as predicted; corrected start-up line: {self._start_line()}"
            )

    def _begin_step(self) -> None:
        self._fetched_numel = 0
        self._is_disturbed = False
