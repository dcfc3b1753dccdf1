"""Let the methods that drop gradients drop their partial sums, too.

[Note: a zero_grad of a user] A ``zero_grad`` that a user has written may keep some gradients, or
all of them until a condition holds. So ``.grad`` is compared before and after the call. A gradient
was dropped if it is None afterwards, another tensor, or of another version. A parameter whose
gradient FSDP2 keeps outside of ``.grad`` gets a placeholder there during the call. All placeholders
share one piece of memory, because nobody reads their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ds_quant.fsdp2 import torch_names

Undo = Callable[[], None]


class KeepsGradients(Protocol):
    """A model that keeps partial sums of gradients."""

    def discard_gradients(self, parameters: Collection[int] | None = None) -> None:
        """Drop the partial sums of parameters, given by their ids."""

    def kept_gradients(self) -> set[int]:
        """Return the ids of parameters whose gradients FSDP2 keeps outside of ``.grad``."""


class GradientsBefore:
    """The gradients of parameters before a ``zero_grad``: see [Note: a zero_grad of a user].

    drops_all: the method is torch's, which keeps no gradient.
    """

    def __init__(
        self, parameters: Iterable[Tensor], front: KeepsGradients, *, drops_all: bool
    ) -> None:
        self._parameters = list(parameters)
        self._placeholders: list[Tensor] = []  # parameters that have one
        self._versions: list[tuple[Tensor | None, int]] | None = None
        if drops_all:
            return
        kept = front.kept_gradients()
        self._placeholders = [p for p in self._parameters if id(p) in kept and p.grad is None]
        _give_placeholders(self._placeholders)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[tuple[Tensor | None, int]]:
        gradients = [parameter.grad for parameter in self._parameters]
        return [(each, -1 if each is None else each._version) for each in gradients]

    def dropped(self) -> set[int]:
        """Return the ids of the parameters whose gradients were dropped since. Called once."""
        if self._versions is None:
            return {id(parameter) for parameter in self._parameters}
        dropped: set[int] = set()
        rows = zip(self._parameters, self._versions, self._versions_now(), strict=True)
        for parameter, (before, version), (now, version_now) in rows:
            if now is None or now is not before or version != version_now:
                dropped.add(id(parameter))
        for parameter in self._placeholders:
            parameter.grad = None
        return dropped


def _give_placeholders(parameters: Iterable[Tensor]) -> None:
    """Give parameters gradients that share one piece of memory per dtype and device."""
    locals_of = {p: p.to_local() if isinstance(p, DTensor) else p.detach() for p in parameters}
    # torch refuses a gradient of another dtype than ``grad_dtype``; None allows any.
    dtypes = {p: getattr(p, "grad_dtype", None) or p.dtype for p in locals_of}
    largest: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter, local in locals_of.items():
        kind = dtypes[parameter], local.device
        largest[kind] = max(largest.get(kind, 0), local.numel())
    memory = {
        (dtype, device): torch.zeros(numel, dtype=dtype, device=device).untyped_storage()
        for (dtype, device), numel in largest.items()
    }
    for parameter, local in locals_of.items():
        shared = memory[dtypes[parameter], local.device]
        # Unlike a view, it has a version of its own.
        placeholder = local.new_empty(0, dtype=dtypes[parameter])
        placeholder.set_(shared, 0, local.shape, torch.empty(local.shape, device="meta").stride())
        if isinstance(parameter, DTensor):
            placeholder = DTensor.from_local(
                placeholder,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = placeholder


# ---- methods of modules ----


def drop_with_module(module: nn.Module, front: KeepsGradients) -> list[Undo]:
    """Wrap ``zero_grad`` of a module, and ``reset_iter_state``, with which a loop recovers from an
    exception. Returns the functions that undo it.
    """
    undo = [_wrap(module, "zero_grad", front, _zero_grad)]
    if isinstance(module, FSDPModule) and hasattr(module, "reset_iter_state"):  # torch 2.13
        undo.append(_wrap(module, "reset_iter_state", front, _reset_iter_state))
    return undo


def _zero_grad(module: nn.Module, front: KeepsGradients, original: partial[Any]) -> Any:
    drops_all = getattr(original.func, "__func__", None) is nn.Module.zero_grad
    gradients = GradientsBefore(module.parameters(), front, drops_all=drops_all)
    try:
        return original()
    finally:
        front.discard_gradients(gradients.dropped())


def _reset_iter_state(module: nn.Module, front: KeepsGradients, original: partial[Any]) -> Any:
    """Drop all gradients, also those of a backward that an error has ended: FSDP2 leaves them in
    the gathered parameters, and would add them to the next ones.
    """
    result = original()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in torch_names.param_groups(part):
                for member in group.fsdp_params:
                    torch_names.drop_gradient(member)
    front.discard_gradients({id(parameter) for parameter in module.parameters()})
    return result


def _wrap(
    module: nn.Module,
    name: str,
    front: KeepsGradients,
    call: Callable[[nn.Module, KeepsGradients, partial[Any]], Any],
) -> Undo:
    """Wrap the method ``name`` of a module in ``call``, as long as ``front`` lives.

    Does not keep ``front`` alive, which the module may outlive. What it returns does not keep the
    module alive.
    """
    original = getattr(module, name)
    is_of_instance = name in vars(module)
    attached = [weakref.ref(front)]  # empty once it is undone

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        living = attached[0]() if attached else None
        if living is None:
            return original(*args, **kwargs)
        return call(module, living, partial(original, *args, **kwargs))

    setattr(module, name, wrapped)
    module_of, method_of = weakref.ref(module), weakref.ref(wrapped)

    def undo() -> None:
        attached.clear()
        kept, method = module_of(), method_of()
        if kept is None or method is None:
            return
        is_last = vars(kept).get(name) is method
        if is_last and is_of_instance:
            setattr(kept, name, method.__wrapped__)
        elif is_last:
            delattr(kept, name)

    return undo
