"""Let the methods that drop gradients drop their partial sums, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

Undo = Callable[[], None]


class KeepsGradients(Protocol):
    """A model that keeps partial sums of gradients."""

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of parameters, given by their ids."""


class FollowsOptimizers(Protocol):
    """The optimizer steps of such a model."""

    def before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run before an optimizer drops its gradients."""

    def after_zero_grad(self) -> None:
        """Run after an optimizer has dropped its gradients."""


def drop_with_module(module: nn.Module, front: KeepsGradients) -> list[Undo]:
    """Wrap ``zero_grad`` of a module, and ``reset_iter_state``, with which a loop recovers from an
    exception. Returns the functions that undo it.
    """

    def drop(front: KeepsGradients) -> None:
        front.discard_gradients({id(parameter) for parameter in module.parameters()})

    undo = [_run_around(module, "zero_grad", front, before=drop)]
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):  # torch 2.13
        undo.append(_run_around(module, "reset_iter_state", front, before=drop))
    return undo


def drop_with_optimizer(optimizer: Optimizer, steps: FollowsOptimizers) -> Undo:
    """Wrap ``zero_grad`` of an optimizer. Returns the function that undoes it."""

    def before(steps: FollowsOptimizers) -> None:
        steps.before_zero_grad(optimizer)

    def after(steps: FollowsOptimizers) -> None:
        steps.after_zero_grad()

    return _run_around(optimizer, "zero_grad", steps, before=before, after=after)


Target = TypeVar("Target")


def _run_around(
    owner: object,
    name: str,
    target: Target,
    *,
    before: Callable[[Target], None],
    after: Callable[[Target], None] = lambda target: None,
) -> Undo:
    """Call functions with ``target`` around every call of a method, as long as ``target`` lives.

    Does not keep ``target`` alive, which the owner may outlive. What it returns does not keep the
    owner alive: an optimizer that the user drops frees its states.
    """
    original = getattr(owner, name)
    attached = [weakref.ref(target)]  # empty once it is undone

    def call(*args: Any, **kwargs: Any) -> Any:
        living = [target for reference in attached if (target := reference()) is not None]
        for target in living:
            before(target)
        result = original(*args, **kwargs)
        for target in living:
            after(target)
        return result

    setattr(owner, name, call)
    owner_of, method_of = weakref.ref(owner), weakref.ref(call)

    def undo() -> None:
        attached.clear()
        kept, method = owner_of(), method_of()
        if kept is None or method is None:
            return
        if vars(kept).get(name) is method:
            delattr(kept, name)

    return undo
