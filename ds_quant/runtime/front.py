"""The facts that a run asks its front for.

A front is a way of training: an engine of DeepSpeed, or a model under FSDP2. It holds a ``Run`` and
knows what only its library can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_quant.policy.cost import ParamSpec
from ds_quant.policy.memory import Sizes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The communication of an optimizer step, the same for every scheme.

    param_specs: of every level of the run.
    gathers: of every weight in a micro-step. micro_steps: of an optimizer step.
    gradient_dtype: in which gradients are reduced.
    stock_gradients: the front's library reduces them itself.
    """

    param_specs: Sequence[Sequence[ParamSpec]]
    gathers: float
    micro_steps: int
    gradient_dtype: torch.dtype
    stock_gradients: bool = False


class Front(Protocol):
    """The facts of a front that change while it trains."""

    @property
    def step(self) -> int:
        """Optimizer steps that have changed the weights: equal step, equal weights."""

    @property
    def counted_steps(self) -> int:
        """Optimizer steps as the training loop counts them, with those that were skipped."""

    def workload(self) -> Workload:
        """Return the communication of an optimizer step, as the model is now."""

    def sizes(self) -> Sequence[Sizes]:
        """Return the sizes that decide the peak memory of a step, of every level of the run."""
