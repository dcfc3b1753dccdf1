"""Return of a running job to full precision: after NaN or Inf, or because somebody asks for it.

[Note: one vote] What one rank sees (a NaN in its shard, a file on its disk) must change the traffic
of all ranks in the same step, else they wait for messages of different lengths. So all ranks take
the minimum of two numbers when the optimizer is about to step: where nothing was sent since the
gradients, and before anything is made of them. Nobody votes unless a policy or a kill file asks
for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ds_quant.zero import seams
from ds_quant.zero.binding import Binding
from ds_quant.zero.log import log_here
from ds_quant.zero.world import broadcast, minimum

KILL_VARIABLE = "DS_QUANT_KILL_FILE"


def kill_file() -> Path | None:
    """The file whose presence switches quantization off, None if none is watched."""
    path = os.environ.get(KILL_VARIABLE, "").strip()
    return Path(path) if path else None


class Watch:
    """Remembers, without waiting for the device, whether reduced gradients were finite."""

    def __init__(self) -> None:
        self._finite: list[tuple[int, torch.Tensor]] = []

    def note(self, index: int, reduced: torch.Tensor) -> None:
        """``reduced``: what this rank has received for the parameter of that index."""
        self._finite.append((index, torch.isfinite(reduced).all()))

    def first(self) -> int | None:
        """The first parameter with NaN or Inf since the last call, and forget all."""
        noted, self._finite = self._finite, []
        finite = torch.stack([flag for _, flag in noted]).tolist() if noted else []
        bad = [index for (index, _), good in zip(noted, finite, strict=True) if not good]
        return bad[0] if bad else None


class Fallback:
    """Votes when the optimizer steps and decides which steps travel in full precision."""

    def __init__(
        self, binding: Binding, *, on_nonfinite: str, steps: int, kill_file: Path | None
    ) -> None:
        self._binding, self._policy, self._steps = binding, on_nonfinite, steps
        self._kill_file = kill_file
        self._asked = self._blind = False  # whether this rank saw the file, and once could not look
        self._nonfinite = False  # gradients of the step being taken
        self._was_exact = False  # how they travelled
        if on_nonfinite != "skip":
            binding.watch = Watch()

    def votes(self) -> bool:
        """Whether there is anything to watch at all."""
        return self._policy != "skip" or self._kill_file is not None

    def vote(self) -> None:
        """Before the optimizer steps. A collective of the whole world.

        Raises:
            FloatingPointError: on all ranks, with the policy "raise".
        """
        state, step = self._binding.state, self._binding.step
        state.exact_steps += state.killed or step < state.exact_until
        self._was_exact = self._binding.is_exact(step)
        rank, world = seams.rank_and_world()
        bad = None if self._binding.watch is None else self._binding.watch.first()
        self._look()
        finder, killer = minimum([world if bad is None else rank, rank if self._asked else world])
        self._switch(killer if killer < world else None)
        self._nonfinite = finder < world
        if self._nonfinite:
            self._found(finder, bad if finder == rank else None)

    def after_step(self, skipped: bool) -> None:
        """The optimizer has stepped, or DeepSpeed has ``skipped`` the update.

        Raises:
            FloatingPointError: DeepSpeed has found what did not travel through this plugin.
        """
        if skipped and not self._nonfinite and self._policy != "skip":
            self._nonfinite = True
            self._found(None, None)
        if skipped and self._nonfinite and self._policy == "full_precision":
            self._binding.state.exact_until -= 1  # the n steps begin with this one, taken again
        if skipped and self._binding.is_exact(self._binding.step) and not self._was_exact:
            # What this step would have brought along exactly is still what quantized steps left.
            for holder in (self._binding.replica, self._binding.node):
                if holder is not None:
                    holder.resync()
        self._nonfinite = False

    def _look(self) -> None:
        """Look for the kill file. A file system that fails here must not end the run, nor may this
        rank keep the others waiting: it goes on voting as it did last.
        """
        if self._kill_file is None:
            return
        try:
            self._asked = self._kill_file.exists()
        except OSError as error:
            if not self._blind:
                log_here(
                    f"quantized_comm: rank {seams.rank_and_world()[0]} cannot look for the file of "
                    f"{KILL_VARIABLE}: {error}; until it can, its last vote stands (logged once)"
                )
            self._blind = True

    def _switch(self, killer: int | None) -> None:
        state = self._binding.state
        if state.killed == (killer is not None):
            return
        state.killed = killer is not None
        what = (
            f"{KILL_VARIABLE} names a file that exists on rank {killer}: full precision from the "
            "next step on, as long as it does"
            if state.killed
            else f"the file of {KILL_VARIABLE} is gone on all ranks: quantized again"
        )
        seams.log_rank0(f"quantized_comm: step {self._binding.engine.global_steps}: {what}")

    def _found(self, finder: int | None, index: int | None) -> None:
        """``finder``: rank that holds NaN or Inf, in the gradient of parameter ``index``."""
        state, step = self._binding.state, self._binding.engine.global_steps
        state.nonfinite_steps += 1
        if self._policy == "raise":
            raise FloatingPointError(
                f"quantized_comm: step {step}: NaN or Inf in the gradient of "
                f"{self._name(finder, index)}. Training ends because "
                'quantized_comm.fallback.on_nonfinite="raise"; resume from the last checkpoint, '
                'or set it to "skip" or "full_precision"'
            )
        state.exact_until = self._binding.step + 1 + self._steps
        if state.nonfinite_steps == 1:
            seams.log_rank0(
                f"quantized_comm: step {step}: gradients hold NaN or Inf; the next {self._steps} "
                "steps travel in full precision (logged once, ds_quant.report counts)"
            )

    def _name(self, finder: int | None, index: int | None) -> str:
        if finder is None:
            return "a parameter that DeepSpeed reduces itself"
        names = {tracked.index: tracked.name for tracked in self._binding.all_tracked()}
        name: Any = broadcast(names.get(index), source=finder)
        return f"{name}, received by rank {finder}"
