"""Refuse optimizer steps that would lose gradients of an accumulation, or take them for others."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from ds_quant.config.errors import KEY
from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.optimizers import parameters_of


def require_reduced(
    reductions: Iterable[QuantizedReduceScatter], event: str, optimizer: Optimizer | None = None
) -> None:
    """Raise RuntimeError if gradients wait for a backward that is declared the last one.

    event: the event that would lose them, such as "the model is detached".
    optimizer: only gradients of its parameters count; None: all gradients.
    """
    waiting = [reduction for reduction in reductions if reduction.holds_partial_sums]
    if waiting and optimizer is not None:
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        waiting = [each for each in waiting if not held.isdisjoint(each.waiting_parameters())]
    if not waiting:
        return
    raise RuntimeError(
        f"{KEY}: {event} while gradients of {_named(waiting)}, have not been reduced over all "
        f"ranks{_way_out(waiting)}"
    )


def _way_out(waiting: list[QuantizedReduceScatter]) -> str:
    """Return the end of the error: the cause, if it is known, and the calls that help."""
    if any(torch_names.has_ended_early(reduction.sharded.module) for reduction in waiting):
        return (
            ", because an error has ended a backward: call model.reset_iter_state() (torch 2.13) "
            "where you catch the error, and begin the step again"
        )
    way_out = (
        ": call model.set_is_last_backward(True), and set_requires_all_reduce(True) if you have "
        "called it, before the last backward of a step; or drop the gradients with "
        "front.discard_gradients()"
    )
    if not all(reduction.sharded.is_replicated for reduction in waiting):
        way_out += f'; or set {KEY}.gradients.cross="micro_step"'
    return way_out


def require_unwritten(reductions: Iterable[QuantizedReduceScatter]) -> None:
    """Raise RuntimeError if gradients were written between two backwards of this step."""
    written = [reduction for reduction in reductions if reduction.has_written_gradients]
    if written:
        raise RuntimeError(
            f"{KEY}: gradients of {_named(written)}, were written between two backwards of an "
            "optimizer step. They are zero until the last backward, because the sums of this step "
            "are kept inside the nodes. To drop this step's gradients call optimizer.zero_grad(); "
            "to scale or clip gradients do so after the last backward, or set "
            f'{KEY}.gradients.cross="micro_step"'
        )


def require_one_divide_factor(reductions: Iterable[QuantizedReduceScatter]) -> None:
    """Raise RuntimeError if the user's divisor has changed while gradients waited."""
    changed = [reduction for reduction in reductions if reduction.has_changed_factor]
    if changed:
        raise RuntimeError(
            f"{KEY}: set_gradient_divide_factor was called between two backwards of an optimizer "
            f"step: gradients of {_named(changed)}, wait for the last backward and are divided "
            "once. To drop this step's gradients call optimizer.zero_grad(); to weigh the "
            "backwards of a step keep one factor and scale their losses"
        )


def _named(reductions: list[QuantizedReduceScatter]) -> str:
    return f"{len(reductions)} module(s), such as {reductions[0].sharded.title}"
