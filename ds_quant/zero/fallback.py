"""Send steps in full precision after NaN or Inf in a gradient, and while a kill file exists.

[Note: one vote] A NaN in a shard or a file on a disk is seen by one rank, but changes the traffic
of all ranks. Ranks that did not change it in the same step would wait for messages of other
lengths. So all ranks take the minimum of two numbers after the last gradient collective and before
the optimizer uses the gradients. There is no vote unless a policy or a kill file asks for one.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ds_quant.config.environment import KILL_VARIABLE
from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import log
from ds_quant.runtime.param import Param
from ds_quant.zero import hooks
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.world import broadcast, minimum


def kill_file() -> Path | None:
    """Return the file whose existence switches quantization off; None if none is watched."""
    path = os.environ.get(KILL_VARIABLE, "").strip()
    return Path(path) if path else None


def first_nonfinite(finite_flags: list[tuple[Param, Tensor]]) -> Param | None:
    """Return the first parameter whose gradient has NaN or Inf, and clear the flags.

    finite_flags: parameters, each with a () bool tensor: True if the part of its gradient that
        this rank received is finite. Read here together, with one wait for the device.
    """
    if not finite_flags:
        return None
    finite = torch.stack([flag for _, flag in finite_flags]).tolist()
    params = [param for param, _ in finite_flags]
    finite_flags.clear()
    for param, is_finite in zip(params, finite, strict=True):
        if not is_finite:
            return param
    return None


class Fallback:
    """Vote when the optimizer steps, and decide which steps use full precision."""

    def __init__(self, plugin: Plugin, settings: FallbackConfig) -> None:
        self._plugin = plugin
        self._policy = settings.on_nonfinite
        self._steps = settings.steps
        self._kill_file = kill_file()
        self._saw_kill_file = False  # on this rank, when it last could look
        self._logged_failed_look = False
        # Of the step being taken:
        self._nonfinite = False  # gradients hold NaN or Inf
        self._was_full_precision = False  # gradients were sent in full precision

    def vote(self) -> None:
        """Vote before the optimizer steps. A collective of the whole world.

        Raises:
            FloatingPointError: on all ranks, with the policy "raise".
        """
        state, step = self._plugin.run.state, self._plugin.step
        if state.killed or step < state.exact_until:
            state.exact_steps += 1
        self._was_full_precision = self._plugin.run.is_full_precision(step)
        rank, world = hooks.rank_and_world()
        bad = first_nonfinite(self._plugin.finite_flags or [])
        self._look_for_kill_file()
        finder, killer = minimum(
            [
                world if bad is None else rank,
                rank if self._saw_kill_file else world,
            ]
        )
        self._switch(killer if killer < world else None)
        self._nonfinite = finder < world
        if self._nonfinite:
            self._apply_policy(finder, bad if finder == rank else None)

    def after_step(self, skipped: bool) -> None:
        """Run after the optimizer step, or after DeepSpeed ``skipped`` the update.

        Raises:
            FloatingPointError: DeepSpeed found NaN or Inf in a gradient that it reduced itself.
        """
        if skipped and not self._nonfinite and self._policy != "skip":
            self._nonfinite = True
            self._apply_policy(None, None)
        if skipped and self._nonfinite and self._policy == "full_precision":
            # DeepSpeed repeats this step, as the first of ``steps``.
            self._plugin.run.state.exact_until -= 1
        if skipped and not self._was_full_precision:
            if self._plugin.run.is_full_precision(self._plugin.step):
                self._plugin.resync()  # the skipped step has not refreshed the cached weights
        self._nonfinite = False

    def _look_for_kill_file(self) -> None:
        """Update this rank's vote. A rank whose file system fails repeats its last vote: an error
        here must not end the run, and the other ranks wait for the vote.
        """
        if self._kill_file is None:
            return
        try:
            self._saw_kill_file = self._kill_file.exists()
        except OSError as error:
            if not self._logged_failed_look:
                log.log_here(
                    f"quantized_comm: rank {hooks.rank_and_world()[0]} cannot look for the file of "
                    f"{KILL_VARIABLE}: {error}; until it can, its last vote stands (logged once)"
                )
            self._logged_failed_look = True

    def _switch(self, killer: int | None) -> None:
        """Set ``state.killed``. killer: lowest rank that saw the kill file, None if none did."""
        state = self._plugin.run.state
        if state.killed == (killer is not None):
            return
        state.killed = killer is not None
        if state.killed:
            news = (
                f"{KILL_VARIABLE} names a file that exists on rank {killer}: full precision from "
                "the next step on, as long as it does"
            )
        else:
            news = f"the file of {KILL_VARIABLE} is gone on all ranks: quantized again"
        log.log_rank0(f"quantized_comm: step {self._plugin.engine.global_steps}: {news}")

    def _apply_policy(self, finder: int | None, param: Param | None) -> None:
        """Raise, or schedule steps in full precision.

        finder: rank that received NaN or Inf; None if DeepSpeed found it. param: on that rank, the
            parameter whose gradient it is.
        """
        state, step = self._plugin.run.state, self._plugin.engine.global_steps
        state.nonfinite_steps += 1
        if self._policy == "raise":
            where = "a parameter that DeepSpeed reduces itself"
            if finder is not None:
                name = broadcast(None if param is None else param.name, source=finder)
                where = f"{name}, received by rank {finder}"
            raise FloatingPointError(
                f"quantized_comm: step {step}: NaN or Inf in the gradient of {where}. Training "
                'ends because quantized_comm.fallback.on_nonfinite="raise"; resume from the last '
                'checkpoint, or set it to "skip" or "full_precision"'
            )
        state.exact_until = self._plugin.step + 1 + self._steps
        if state.nonfinite_steps == 1:
            log.log_rank0(
                f"quantized_comm: step {step}: gradients hold NaN or Inf; the next {self._steps} "
                "steps travel in full precision (logged once, ds_quant.report counts)"
            )
