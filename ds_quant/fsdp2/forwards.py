"""Find where a forward begins, among the gathers of a model, and compare the ranks' steps there.

[Note: equal steps] Weights and gradients are decoded with random bits of a step. A rank that has
taken another number of steps would decode other values without an error. So each forward posts a
vote and the next one reads it: nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.config.errors import KEY
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.runtime.run import Run
from ds_quant.runtime.written_weights import UnequalSteps

_MANY_FORWARDS = 1000  # without an optimizer step


class Forwards:
    """The forwards of a model.

    A module that is gathered again, or outside of any forward, counts as a forward of its own.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_about_to_begin = True  # nothing has been gathered in this forward
        self._gathered: set[ShardedModule] = set()  # in this forward
        self._with_gradients = 0  # since the last optimizer step
        self.ended_by = ""  # error after which no message of this model finds its counterpart
        self._steps_vote: StepsVote | None = None  # where nothing depends on the step
        if run.scheme.weights is not None or run.scheme.gradients is not None:
            self._steps_vote = StepsVote(run.votes, run.device)

    def expect(self) -> None:
        """Note that the forward of the root, or of a module that no other calls, begins."""
        self._is_about_to_begin = True

    def begins_with(self, sharded: ShardedModule) -> bool:
        """Return True if the gather of a module is the first one of a forward."""
        begins = self._is_about_to_begin or sharded in self._gathered
        if begins or not torch_names.in_forward(sharded.module):
            return True
        self._gathered.add(sharded)
        return False

    def compare_steps(self, *, now: bool = False) -> None:
        """Compare the optimizer steps of all ranks. A collective, if random bits depend on them.

        now: read the vote of this call, too, which waits for the device.

        Raises:
            UnequalSteps: on all ranks, if they differed in the last forward; with ``now`` also if
                they differ here.
        """
        if self._steps_vote is not None:
            self._steps_vote.compare(self._run.step)
            if now:
                self._steps_vote.read()

    def error_of(self, unequal: UnequalSteps, *, has_copies: bool) -> RuntimeError:
        """Return the error of ranks whose optimizers have stepped alone.

        has_copies: nodes keep copies of the weights, so that weights of the step are under way.
            Then ``refuse_ended`` raises it from now on.
        """
        least, most = unequal.args
        message = (
            f"{KEY}: optimizers of this model have taken {least} steps on some ranks and "
            f"{most} on others. Random bits and the nodes' copies of the weights need steps of "
            "all ranks alike: let all ranks decide together, such as by torch.distributed."
            "all_reduce of the flag that skips a step. "
        )
        if not has_copies:
            return RuntimeError(f"{message}Load a checkpoint on all ranks, also to the front")
        self.ended_by = (
            f"{message}Resume from a checkpoint in new processes: weights are under way to "
            "ranks that do not expect them"
        )
        return RuntimeError(self.ended_by)

    def refuse_ended(self) -> None:
        """Raise RuntimeError if ranks have stepped alone: other messages would meet theirs."""
        if self.ended_by:
            raise RuntimeError(self.ended_by)

    def begin_with(self, sharded: ShardedModule | None) -> None:
        """Note that a forward has begun with the gather of a module, or without any."""
        self._is_about_to_begin = False
        self._gathered = set() if sharded is None else {sharded}
        if torch.is_grad_enabled():
            self._with_gradients += 1
            if self._with_gradients == _MANY_FORWARDS:
                self._run.log(
                    f"{KEY}: {_MANY_FORWARDS} forwards without a step of an optimizer of "
                    "torch.optim.Optimizer that holds this model's parameters: random bits repeat, "
                    "and warmup_steps do not end (logged once)"
                )

    def after_step(self) -> None:
        """Note an optimizer step."""
        self._with_gradients = 0


class StepsVote:
    """See [Note: equal steps]."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._posted: tuple[Any, Tensor] | None = None

    def compare(self, steps: int) -> None:
        """Read the vote of the last forward, and post that of this one. A collective.

        Raises:
            UnequalSteps: on all ranks, if they differed in the last forward.
        """
        self.read()
        numbers = torch.tensor([steps, ~steps], device=self._device)
        self._posted = self._communicator.post_least(numbers), numbers

    def read(self) -> None:
        """Read the vote that was posted last, if it was not read. Waits for the device.

        Raises:
            UnequalSteps: on all ranks, if their steps differ.
        """
        if self._posted is None:
            return
        work, numbers = self._posted
        self._posted = None
        work.wait()
        least, inverted = numbers.tolist()
        if least != ~inverted:
            raise UnequalSteps(least, ~inverted)
