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
from ds_quant.zero.hooks import Hooks

_RECORDING = 2  # micro-steps, see [Note: steady state]
_TOLERANCE = 0.03  # relative error of a prediction that is not logged


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
    """The gathers of an element per micro-step of one engine.

    gathers: predicted, until ``count`` has replaced it.
    mean_numel: elements of one gather, predicted.
    is_counting: True while ``fetched`` must be called.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        numel, _ = sharded_params.elements(engine.module)
        modules = gathered_modules(engine.module)
        settings = FetchSettings(
            max_reuse_distance=engine.zero_max_reuse_distance(),
            max_live_parameters=engine.zero_max_live_parameters(),
            prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
        )
        self.gathers = settings.gathers(numel, modules)  # by the rule of ``policy.model``
        self.mean_numel = numel // max(1, modules)
        self.is_counting = False
        self._fetched_numel = 0
        self._undisturbed = 0  # micro-steps before this optimizer step
        self._is_disturbed = False

    def count(self, events: Hooks, saving: Callable[[], str]) -> None:
        """Count until an optimizer step in a steady state gives the number.

        saving: compares the bytes of a step, and is logged again if the prediction was wrong.
        """
        module = self._engine.module
        numel, _ = sharded_params.elements(module)
        persistent = [p for p in sharded_params.parameters_of(module) if p.ds_persist]
        persistent_numel = sum(p.ds_numel for p in persistent)
        predicted = self.gathers

        def after_count() -> None:
            if not self._ends_steady_step():
                self._begin_step()
                return
            self.is_counting = False
            events.after_count.remove(after_count)
            fetched_numel = self._fetched_numel + persistent_numel
            self.gathers = fetched_numel / self._micro_steps / max(1, numel)
            if abs(self.gathers - predicted) > _TOLERANCE * predicted:
                log.log_rank0(
                    f"quantized_comm: weights are fetched {self.gathers:.3g} times per "
                    f"micro-batch, not {predicted:.3g} as predicted: {saving()}"
                )

        self.is_counting = True
        self._begin_step()
        events.after_count.append(after_count)

    def fetched(self, params: Iterable[ZeroParameter]) -> None:
        """Count parameters that DeepSpeed gathers for forward or backward."""
        self._fetched_numel += sum(p.ds_numel for p in params if not p.ds_persist)
        self._is_disturbed |= not self._engine.module.training

    def disturb(self) -> None:
        """Do not count this step: an engine for evaluation shares the module, and may fetch."""
        self._is_disturbed = True

    @property
    def _micro_steps(self) -> int:
        return self._engine.gradient_accumulation_steps()

    def _begin_step(self) -> None:
        self._fetched_numel = 0
        self._is_disturbed = False

    def _ends_steady_step(self) -> bool:
        """Return True if the optimizer step that has ended was in a steady state."""
        if self._is_disturbed:
            self._undisturbed = 0
            return False
        if self._undisturbed < _RECORDING:
            self._undisturbed += self._micro_steps
            return False
        return True
