"""The facts that a run asks its front for.

A front is a way of training: an engine of DeepSpeed, or a model under FSDP2 or DDP. It holds a
``Run`` and knows what only its library can tell. A run computes all prices from these facts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ds_quant.config.errors import KEY
from ds_quant.policy.cost import ParamSpec
from ds_quant.policy.memory import Sizes
from ds_quant.policy.scheme import FLOATS
from ds_quant.runtime.param import Param


class SentParam(NamedTuple):
    """A parameter in the communication of an optimizer step.

    dtype: of its gathered weights. gradient_dtype: in which its gradient is reduced.
    trained: it has a gradient.
    stock_weights: the front's library gathers it itself.
    """

    param: Param
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    trained: bool
    stock_weights: bool = False

    @property
    def stock_gradients(self) -> bool:
        """True if no codec takes its gradient: the front's library reduces it itself."""
        return self.gradient_dtype not in FLOATS

    @property
    def spec(self) -> ParamSpec:
        """The parameter as the formulas of bytes need it."""
        param = self.param
        return ParamSpec(
            name=param.name,
            shape=tuple(param.shape),
            dtype=self.dtype,
            trainable=self.trained,
            packed=param.packed,
            needs_full_gradient=param.needs_full_gradient,
            boundary=param.boundary,
            stock_weights=self.stock_weights,
            stock_gradients=self.stock_gradients,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The communication of an optimizer step, the same for every scheme.

    params: of every level of the run.
    gathers: of a weight in a micro-step, by level; the mean over its weights where they differ.
    gather_numel: elements of one gather.
    micro_steps: of an optimizer step.
    stock_gradients: the front's library reduces all gradients itself.
    """

    params: Sequence[Sequence[SentParam]]
    gathers: Sequence[float]
    gather_numel: int
    micro_steps: int
    stock_gradients: bool = False

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of gradients that codecs take, for prices and kernels.

        Where they differ, it is that of the first one; fp32 if codecs take none.
        """
        for params in self.params:
            for sent in params:
                if not sent.stock_gradients:
                    return sent.gradient_dtype
        return torch.float32


MOST_STEPS = 1 << 39  # random bits are addressed by 64-bit integers of step and reduction


def saved_step(state: Mapping[str, Any]) -> int:
    """Return the step of a front's ``state_dict``.

    Raises:
        ValueError: it is none.
    """
    step = state.get("step") if isinstance(state, Mapping) else None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < MOST_STEPS:
        raise ValueError(
            f"{KEY}: front.load_state_dict: step={step!r}: allowed: the state that "
            "front.state_dict() has returned, with a whole number of steps"
        )
    return number


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
