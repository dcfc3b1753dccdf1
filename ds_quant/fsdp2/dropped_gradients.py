"""Let the methods that drop gradients drop their partial sums, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

Undo = Callable[[], None]


class KeepsGradients(Protocol):
    """A model that keeps partial sums of gradients."""

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of parameters, given by their ids."""


def drop_with_module(module: nn.Module, front: KeepsGradients) -> list[Undo]:
    """Wrap ``zero_grad`` of a module, and ``reset_iter_state``, with which a loop recovers from an
    exception. Returns the functions that undo it.
    """
    undo = [_drop_before(module, "zero_grad", module.parameters, front)]
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):  # torch 2.13
        undo.append(_drop_before(module, "reset_iter_state", module.parameters, front))
    return undo


def drop_with_optimizer(
    optimizer: Optimizer, parameters: Callable[[Optimizer], Iterable[Tensor]], front: KeepsGradients
) -> Undo:
    """Wrap ``zero_grad`` of an optimizer. parameters: returns those of an optimizer."""
    return _drop_before(optimizer, "zero_grad", partial(parameters, optimizer), front)


def _drop_before(
    owner: object, name: str, parameters: Callable[[], Iterable[Tensor]], front: KeepsGradients
) -> Undo:
    """Drop the partial sums of some parameters before a method runs.

    Does not keep the model of ``front`` alive, which the owner may outlive. What it returns does
    not keep the owner alive: an optimizer that the user drops frees its states.
    """
    original = getattr(owner, name)
    attached = [weakref.ref(front)]  # empty once it is undone

    def drop_first(*args: Any, **kwargs: Any) -> Any:
        for reference in attached:
            target = reference()
            if target is not None:
                target.discard_gradients({id(parameter) for parameter in parameters()})
        return original(*args, **kwargs)

    setattr(owner, name, drop_first)
    owner_of, method_of = weakref.ref(owner), weakref.ref(drop_first)

    def undo() -> None:
        attached.clear()
        kept, method = owner_of(), method_of()
        if kept is None or method is None:
            return
        if vars(kept).get(name) is method:
            delattr(kept, name)

    return undo
