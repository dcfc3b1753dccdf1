"""The votes and metrics of a model's steps under FSDP2 and DDP, where the block asks for them.

Under DeepSpeed the lists of events of an engine hold both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_quant.config.errors import KEY
from ds_quant.runtime.fallback import Fallback, Find, fallback_of
from ds_quant.runtime.front import saved_step
from ds_quant.runtime.run import Run
from ds_quant.runtime.telemetry import StepTelemetry


class StepEvents:
    """Called by a front around its steps. Does nothing until ``begin``.

    find: as of ``Fallback``.
    """

    def __init__(self, run: Run, find: Find | None = None) -> None:
        self._run = run
        self._find = find
        self._fallback: Fallback | None = None
        self._telemetry: StepTelemetry | None = None

    def begin(self, resync: Callable[[], None] | None) -> None:
        """Vote and write metrics from now on. A collective of all ranks.

        resync: refills the weights that ranks keep between steps. None: no optimizer steps, so
            there are no votes.
        """
        if resync is not None:
            self._fallback = fallback_of(self._run, resync, self._find)
        self._run.begin_step()
        metrics = self._run.scheme.block.metrics
        if metrics.file is not None and metrics.interval and torch.distributed.get_rank() == 0:
            self._telemetry = StepTelemetry(self._run, metrics)
            self._telemetry.arm()

    # ---- a step ----

    def gradients_changed(self) -> None:
        """Note that gradients were reduced or dropped: the next step votes again."""
        if self._fallback is not None:
            self._fallback.has_voted = False

    def before_step(self, *, is_noted: bool = False) -> None:
        """Vote, unless all ranks have voted on these gradients. See runtime/fallback.py.

        is_noted: as of ``Fallback.vote``.
        """
        if self._fallback is not None and not self._fallback.has_voted:
            self._fallback.vote(is_noted=is_noted)

    def after_step(self) -> None:
        """Run after a step was counted."""
        if self._fallback is not None:
            self._fallback.after_step(skipped=False)
        self._run.begin_step()
        if self._telemetry is not None:
            self._telemetry.after_step()

    def watched_gradients(self) -> Fallback:
        """Return the vote on NaN and Inf, for ``found_nonfinite`` of a front.

        Raises:
            RuntimeError: nothing is watched.
        """
        if self._fallback is None or self._run.finite_flags is None:
            raise RuntimeError(
                f'{KEY}.fallback.on_nonfinite="skip": nothing looks at the gradients: allowed for '
                'front.found_nonfinite(): "full_precision", "raise"'
            )
        return self._fallback

    # ---- state ----

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the state of a checkpoint that all fronts have. step: of the next one."""
        state: dict[str, Any] = {"step": step}
        if self._run.finite_flags is not None:
            state["exact_until"] = self._run.state.exact_until
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Take over a checkpoint's state, and return its step.

        Raises:
            ValueError: a state without a number of steps.
        """
        step = saved_step(state)
        self._run.state.exact_until = int(state.get("exact_until", 0))
        return step

    def rearm(self) -> None:
        """Run after the number of steps has jumped."""
        self._run.begin_step()
        if self._telemetry is not None:
            self._telemetry.arm()
