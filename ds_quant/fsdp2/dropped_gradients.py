"""Let the methods that drop gradients drop their partial sums, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

Undo = Callable[[], None]


class KeepsGradients(Protocol):
    """A model that keeps partial sums of gradients."""

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of parameters, given by their ids."""


def drop_with_module(module: nn.Module, front: KeepsGradients) -> list[Undo]:
    """Wrap ``zero_grad`` of a module, and ``reset_iter_state``, with which a loop recovers from an
    exception. Returns the functions that undo it.
    """
    undo = [_drop_before(module, "zero_grad", front)]
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):  # torch 2.13
        undo.append(_drop_before(module, "reset_iter_state", front))
    return undo


def _drop_before(module: nn.Module, name: str, front: KeepsGradients) -> Undo:
    """Drop the partial sums of a module before every call of its method ``name``.

    Does not keep ``front`` alive, which the module may outlive. What it returns does not keep the
    module alive.
    """
    original = getattr(module, name)
    attached = [weakref.ref(front)]  # empty once it is undone

    def call(*args: Any, **kwargs: Any) -> Any:
        for reference in attached:
            front = reference()
            if front is not None:
                front.discard_gradients({id(parameter) for parameter in module.parameters()})
        return original(*args, **kwargs)

    setattr(module, name, call)
    module_of, method_of = weakref.ref(module), weakref.ref(call)

    def undo() -> None:
        attached.clear()
        kept, method = module_of(), method_of()
        if kept is None or method is None:
            return
        if vars(kept).get(name) is method:
            delattr(kept, name)

    return undo
