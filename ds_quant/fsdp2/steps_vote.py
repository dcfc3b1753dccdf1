"""Notice ranks whose optimizers have taken other numbers of steps, without waiting for the device.

Weights and gradients are decoded with random bits of a step, so a rank that has taken another
number of steps would decode other values without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_quant.comm.transport import Communicator
from ds_quant.runtime.written_weights import UnequalSteps


class StepsVote:
    """A vote that each forward posts and the next one reads."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._posted: tuple[Any, Tensor] | None = None

    def compare(self, steps: int) -> None:
        """Read the vote of the last forward, and post that of this one. A collective.

        Raises:
            UnequalSteps: on all ranks, if they differed in the last forward.
        """
        if self._posted is not None:
            work, numbers = self._posted
            self._posted = None
            work.wait()
            least, inverted = numbers.tolist()
            if least != ~inverted:
                raise UnequalSteps(least, ~inverted)
        numbers = torch.tensor([steps, ~steps], device=self._device)
        self._posted = self._communicator.post_least(numbers), numbers
