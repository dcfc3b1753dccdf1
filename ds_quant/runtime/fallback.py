"""Send steps in full precision after NaN or Inf in a gradient, and while a kill file exists.

[Note: one vote] A NaN in a shard or a file on a disk is seen by one rank, but changes the traffic
of all ranks. Ranks that did not change it in the same step would wait for messages of other
lengths. So all ranks take the minimum of two numbers after the last gradient collective and before
the optimizer uses the gradients. There is no vote unless a policy or a kill file asks for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ds_quant.config.environment import KILL_VARIABLE
from ds_quant.config.schema import FallbackConfig
from ds_quant.runtime import log
from ds_quant.runtime.run import Run


def kill_file() -> Path | None:
    """Return the file whose existence switches quantization off; None if none is watched."""
    path = os.environ.get(KILL_VARIABLE, "").strip()
    return Path(path) if path else None


def first_nonfinite(finite_flags: list[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose gradient has NaN or Inf, and clear the flags.

    finite_flags: names of parameters or modules, each with a () bool tensor: True if the part of
        its gradient that this rank received is finite. Read here together, with one wait for the
        device.
    """
    if not finite_flags:
        return None
    finite = torch.stack([flag for _, flag in finite_flags]).tolist()
    names = [name for name, _ in finite_flags]
    finite_flags.clear()
    for name, is_finite in zip(names, finite, strict=True):
        if not is_finite:
            return name
    return None


class Finding(NamedTuple):
    """NaN or Inf in the gradients of this rank.

    name: of the parameter or module that has the gradient.
    is_origin: False if it may have spread from another gradient, as clipping does.
    """

    name: str
    is_origin: bool


Find = Callable[[], Finding | None]


class Fallback:
    """Vote when the optimizer steps, and decide which steps use full precision.

    resync: refills the weights that ranks keep between steps. A collective.
    find: looks for NaN and Inf in the gradients of this rank; None: in the flags of the run.

    has_voted: True after ``vote``; the front clears it when there are other gradients.
    found_nonfinite: result of the last vote.
    """

    def __init__(
        self,
        run: Run,
        settings: FallbackConfig,
        resync: Callable[[], None],
        find: Find | None = None,
    ) -> None:
        self._run = run
        self._resync = resync
        self._find = find or self._find_in_flags
        self._policy = settings.on_nonfinite
        self._steps = settings.steps
        self._kill_file = kill_file()
        self._saw_kill_file = False  # on this rank, when it last could look
        self._logged_failed_look = False
        self.has_voted = False
        self.found_nonfinite = False
        # Of the step being taken:
        self._is_counted = False  # as a step in full precision
        self._nonfinite = False  # gradients hold NaN or Inf
        self._was_full_precision = False  # gradients were sent in full precision

    def vote(self, *, is_noted: bool = False) -> bool:
        """Vote before the optimizer steps. A collective of all ranks of the run.

        is_noted: NaN or Inf in these gradients was found before, and the policy has followed.

        Returns:
            True on all ranks if a rank has found NaN or Inf.

        Raises:
            FloatingPointError: on all ranks, with the policy "raise".
        """
        run = self._run
        state, step = run.state, run.step
        if (state.killed or step < state.exact_until) and not self._is_counted:
            state.exact_steps += 1
            self._is_counted = True
        self._was_full_precision = run.is_full_precision(step)
        self.has_voted = True
        finding = self._find()
        self._look_for_kill_file()
        flat = run.votes
        finder = 2 * flat.size
        if finding is not None:
            finder = flat.rank  # ranks that know where NaN or Inf arose come first
            if not finding.is_origin:
                finder += flat.size
        votes = [finder, flat.rank if self._saw_kill_file else flat.size]
        first_finder, killer = flat.least(torch.tensor(votes, device=run.device)).tolist()
        self._switch(flat.ranks[killer] if killer < flat.size else None)
        self._nonfinite = self.found_nonfinite = first_finder < 2 * flat.size
        if self._nonfinite and not is_noted:
            name = None if finding is None else finding.name
            self._apply_policy(first_finder % flat.size, name)
        return self._nonfinite

    def _find_in_flags(self) -> Finding | None:
        name = first_nonfinite(self._run.finite_flags or [])
        return None if name is None else Finding(name, is_origin=True)

    def after_step(self, skipped: bool) -> None:
        """Run after the optimizer step, or after the update was ``skipped``.

        Raises:
            FloatingPointError: DeepSpeed found NaN or Inf in a gradient that it reduced itself.
        """
        if skipped and not self._nonfinite and self._policy != "skip":
            self._nonfinite = True
            self._apply_policy(None, None)
        if skipped and self._nonfinite and self._policy == "full_precision":
            # The step is repeated, as the first of ``steps``.
            self._run.state.exact_until -= 1
        if skipped and not self._was_full_precision:
            if self._run.is_full_precision(self._run.step):
                self._resync()  # the skipped step has not refreshed the cached weights
        self._nonfinite = False
        self._is_counted = False

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
                rank = torch.distributed.get_rank()
                log.log_here(
                    f"quantized_comm: rank {rank} cannot look for the file of "
                    f"{KILL_VARIABLE}: {error}; until it can, its last vote stands (logged once)"
                )
            self._logged_failed_look = True

    def _switch(self, killer: int | None) -> None:
        """Set ``state.killed``. killer: lowest rank that saw the kill file, None if none did."""
        state = self._run.state
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
        self._run.log(f"quantized_comm: step {self._run.counted_steps}: {news}")

    def _apply_policy(self, finder: int | None, bad: str | None) -> None:
        """Raise, or schedule steps in full precision.

        finder: index of the rank that received NaN or Inf; None if DeepSpeed found it. bad: on that
            rank, the name of what has this gradient.
        """
        run = self._run
        state, step = run.state, run.counted_steps
        state.nonfinite_steps += 1
        if self._policy == "raise":
            where = "a parameter that DeepSpeed reduces itself"
            if finder is not None:
                flat = run.votes
                names = [bad]
                torch.distributed.broadcast_object_list(
                    names, src=flat.ranks[finder], group=flat.process_group
                )
                where = f"{names[0]}, on rank {flat.ranks[finder]}"
            raise FloatingPointError(
                f"quantized_comm: step {step}: NaN or Inf in the gradient of {where}. Training "
                'ends because quantized_comm.fallback.on_nonfinite="raise"; resume from the last '
                'checkpoint, or set it to "skip" or "full_precision"'
            )
        state.exact_until = run.step + 1 + self._steps
        if state.nonfinite_steps == 1:
            run.log(
                f"quantized_comm: step {step}: gradients hold NaN or Inf; the next {self._steps} "
                "steps travel in full precision (logged once, ds_quant.report counts)"
            )


def fallback_of(run: Run, resync: Callable[[], None], find: Find | None = None) -> Fallback | None:
    """Return the vote of a run, None if there is nothing to vote on. A collective of all ranks, if
    they watch a kill file.

    resync, find: as of ``Fallback``.
    """
    settings = run.scheme.block.fallback
    watches = kill_file() is not None
    if settings.on_nonfinite == "skip" and not watches:
        return None
    fallback = Fallback(run, settings, resync, find)
    if watches:
        run.notices.append(f"{KILL_VARIABLE} watched")
        fallback.vote()  # the file may exist already
        fallback.has_voted = False
    return fallback
