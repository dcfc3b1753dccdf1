"""Follow the optimizers that hold parameters of a model.

[Note: any optimizer] A model may be moved by several optimizers, by one for every parameter during
backward, or by one that was made after ``attach``. So every optimizer of the process reports its
steps to all attached models, and a model takes those of optimizers that hold its parameters.

[Note: one optimizer step] Optimizers that step one after the other, without a reduction of
gradients between them, make up one optimizer step. It ends when all optimizers that have ever
stepped have done so, and then the new weights are sent; or with the next forward, if some have not
stepped this time. torch's ``get_state_dict`` and ``set_state_dict`` step a new optimizer with a
learning rate of 0 to make its state. Such a step is not counted: no gradients were reduced before
it, or all of them were dropped, or they wait for the last backward. The ``zero_grad`` after it
drops the zeros that torch has made for it, and no gradients that wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import getattr_static
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ds_quant.fsdp2 import torch_names
from ds_quant.fsdp2.dropped_gradients import GradientsBefore, KeepsGradients

# Attached models, in the order of ``attach``, which is the same on all ranks.
_following: list[weakref.ref[OptimizerSteps]] = []


class Followed(KeepsGradients, Protocol):
    """A model whose optimizers are followed."""

    def parameter_ids(self) -> Iterable[int]:
        """Yield the ids of the sharded parameters, as they are now."""

    def before_step(self, optimizer: Optimizer, *, has_moved: bool) -> None:
        """Run before an optimizer steps. has_moved: another one has, since weights were sent."""

    def after_step(self, *, is_new: bool) -> None:
        """Run after optimizers have stepped. is_new: a step that is not counted yet."""

    def has_waiting_gradients(self) -> bool:
        """Return True if gradients wait for a backward that is declared the last one."""


class OptimizerSteps:
    """The optimizer steps of one model: see [Note: one optimizer step].

    has_reduced: gradients were reduced since the last step of any optimizer, and not all of them
        are dropped.
    have_stepped_in_backward: an optimizer has stepped in a backward of this optimizer step.
    """

    def __init__(self, front: Followed) -> None:
        self._front = front
        self._ids: set[int] = set()  # of the model's parameters, when last looked up
        self._known: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()  # in this optimizer step
        self.has_reduced = False
        self.have_stepped_in_backward = False
        self._is_new = False  # an optimizer step has begun that is not counted
        self._is_pending = False  # weights have moved and are not sent
        # The optimizer whose last step has made its state, until its ``zero_grad``.
        self._with_new_state: weakref.ref[Optimizer] | None = None

    def follow(self, given: Iterable[Optimizer]) -> None:
        """Begin to follow all optimizers. given: those that are known already."""
        self.know(given)
        _follow(self)

    def know(self, given: Iterable[Optimizer]) -> None:
        """Count the steps of optimizers before their first one."""
        self._known.update(given)

    def after_reduction(self) -> None:
        """Note that gradients were reduced."""
        self.has_reduced = True
        self._with_new_state = None

    def before_forward(self) -> None:
        """End an optimizer step that not all optimizers have taken part in."""
        self._with_new_state = None
        if self._is_pending:
            self._end()

    @property
    def begun(self) -> int:
        """Return 1 if an optimizer step has begun that is not counted yet, else 0."""
        return int(self._is_new)

    def stop(self) -> None:
        """Follow no optimizer any more."""
        _following[:] = [each for each in _following if each() not in (self, None)]

    # ---- hooks of torch ----

    def before(self, optimizer: Optimizer) -> None:
        """Run before ``optimizer`` steps."""
        if self._holds_parameters(optimizer) and not self._makes_state(optimizer):
            self._front.before_step(optimizer, has_moved=self._is_pending)

    def after(self, optimizer: Optimizer) -> None:
        """Run after ``optimizer`` has stepped."""
        self._with_new_state = None
        if not self._holds_parameters(optimizer):
            return
        if self._makes_state(optimizer):
            self._with_new_state = weakref.ref(optimizer)
            return
        self._known.add(optimizer)
        if self.has_reduced or optimizer in self._stepped or not self._stepped:
            self._stepped = WeakSet()
            self._is_new = True
        self.has_reduced = False
        self._stepped.add(optimizer)
        self._is_pending = True
        if torch_names.in_backward():
            self.have_stepped_in_backward = True
        elif set(self._known) <= set(self._stepped):
            self._end()

    def _end(self) -> None:
        is_new = self._is_new
        self._is_new = False
        self._is_pending = False
        self._front.after_step(is_new=is_new)
        self.have_stepped_in_backward = False

    # ---- optimizers ----

    def holds_any(self, optimizer: Optimizer) -> bool:
        """Return True if an optimizer holds a parameter of the model, as it is now."""
        self._ids = set(self._front.parameter_ids())
        return any(id(parameter) in self._ids for parameter in parameters_of(optimizer))

    def _holds_parameters(self, optimizer: Optimizer) -> bool:
        for group in optimizer.param_groups:
            if group["params"]:
                if id(group["params"][0]) in self._ids:
                    return True
                break
        return self.holds_any(optimizer)

    def _makes_state(self, optimizer: Optimizer) -> bool:
        """Return True if this step only makes the optimizer's state."""
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        # Reading a rate that is a tensor on a device would wait for the device.
        if any([rate is None or (not isinstance(rate, Tensor) and rate != 0) for rate in rates]):
            return False
        if self.has_reduced and not self._front.has_waiting_gradients():
            return False
        return all([float(rate) == 0 for rate in rates])

    def held_parameters(self) -> set[int]:
        """Return the ids of the parameters of all optimizers that are known."""
        return {id(p) for optimizer in self._known for p in parameters_of(optimizer)}

    def before_zero_grad(self, optimizer: Optimizer, *, drops_all: bool) -> GradientsBefore | None:
        """Look at the gradients of ``optimizer`` before its ``zero_grad``; None to drop nothing.

        drops_all: the method is torch's.
        """
        if self._with_new_state is not None and self._with_new_state() is optimizer:
            return None  # it drops the zeros with which it has made its state
        # A class that wraps another optimizer may have no groups.
        if not hasattr(optimizer, "param_groups") or not self._holds_parameters(optimizer):
            return None
        return GradientsBefore(parameters_of(optimizer), self._front, drops_all=drops_all)

    def after_zero_grad(self, gradients: GradientsBefore | None) -> None:
        """Drop the partial sums of the gradients that an optimizer has dropped."""
        self._with_new_state = None
        if gradients is not None:
            self._front.discard_gradients(gradients.dropped())


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---- all models of the process ----


def _follow(steps: OptimizerSteps) -> None:
    if not _following:
        _register()
    _following[:] = [each for each in _following if each() is not None]
    _following.append(weakref.ref(steps))


_registered: list[Any] = []


def _register() -> None:
    """Register the hooks of all optimizers, once per process."""
    if not _registered:
        # A compiled step runs its hooks: they must not be compiled with it.
        disable = torch.compiler.disable
        _registered.append(register_optimizer_step_pre_hook(disable(_before)))
        _registered.append(register_optimizer_step_post_hook(disable(_after)))
        _wrap_class(Optimizer)
        Optimizer.__init_subclass__ = classmethod(_wrap_new_class)  # type: ignore[assignment]


# ---- zero_grad ----

# torch has no hook for ``zero_grad``, and a class may have one that calls no other. So the method
# is wrapped in every class of optimizers.
_wrapped: WeakSet[Callable[..., Any]] = WeakSet()


def _wrap_class(kind: type[Optimizer]) -> None:
    """Wrap ``zero_grad`` of a class and of its subclasses, where they have their own."""
    zero_grad = getattr_static(kind, "zero_grad")
    if isinstance(zero_grad, FunctionType) and zero_grad not in _wrapped:
        wrapped = torch.compiler.disable(_dropping(zero_grad, drops_all=kind is Optimizer))
        _wrapped.add(wrapped)
        kind.zero_grad = wrapped  # type: ignore[method-assign]
    for subclass in kind.__subclasses__():
        _wrap_class(subclass)


def _wrap_new_class(kind: type[Optimizer], **keywords: Any) -> None:
    """Wrap ``zero_grad`` of a class that is defined now."""
    super(Optimizer, kind).__init_subclass__(**keywords)
    _wrap_class(kind)


def _dropping(zero_grad: Callable[..., Any], *, drops_all: bool) -> Callable[..., Any]:
    """Return a ``zero_grad`` that also drops the partial sums of all models.

    drops_all: it drops every gradient, as torch's own.
    """

    @wraps(zero_grad)
    def zero_and_drop(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        following = [steps for each in list(_following) if (steps := each()) is not None]
        noted = [steps.before_zero_grad(optimizer, drops_all=drops_all) for steps in following]
        try:
            return zero_grad(optimizer, *args, **kwargs)
        finally:
            for steps, gradients in zip(following, noted, strict=True):
                steps.after_zero_grad(gradients)

    return zero_and_drop


# ---- hooks of all optimizers ----


def _before(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_following):
        steps = each()
        if steps is not None:
            steps.before(optimizer)


def _after(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_following):
        steps = each()
        if steps is not None:
            steps.after(optimizer)
