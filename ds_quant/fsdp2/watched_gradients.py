"""Look for NaN and Inf in the gradients of a model, as its optimizers would use them.

A vote looks at ``grad`` of every parameter, because NaN and Inf also arise where no message was:
in sums of several backwards, in parameters that one rank holds alone, and in gradients that the
loop has written. Modules whose reduced gradients held them are noted, to name the first one in an
error: clipping spreads NaN to all gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from ds_quant.fsdp2.optimizers import OptimizerSteps
from ds_quant.fsdp2.sharded_module import ShardedModule, named_parameters
from ds_quant.runtime.fallback import Finding, first_nonfinite


class WatchedGradients:
    """The gradients of a model between two optimizer steps.

    flags: of the run, see ``fallback.first_nonfinite``. A vote reads and empties them.
    modules: of the model, that are served.
    optimizers: that use the gradients.

    found: NaN or Inf, on any rank, when the loop last asked for it.
    """

    def __init__(
        self,
        flags: list[tuple[str, Tensor]],
        model: nn.Module,
        modules: Sequence[ShardedModule],
        optimizers: OptimizerSteps,
    ) -> None:
        self.found = False
        self._flags = flags
        self._model_of = weakref.ref(model)
        self._modules = modules
        self._optimizers = optimizers
        # By id, gradients when a vote found NaN or Inf, with their parameters:
        self._noted: dict[int, tuple[Tensor, TensorWeakRef]] = {}
        self._unused: dict[int, TensorWeakRef] = {}  # with NaN or Inf, that no optimizer uses

    def note(self, title: str, rows: ShardedModule, row: Tensor) -> None:
        """Note the gradients of a module that were reduced and are not added up yet.

        title: of the module.
        rows: the part of the module that has gradients.
        row: the sums, of this rank's shards.
        """
        self._flags += [(title, flag) for flag in rows.finite_flags(row)]

    @property
    def are_noted(self) -> bool:
        """True if NaN or Inf was found on any rank, and some gradient of that time is left."""
        return any(_is(parameter.grad, gradient) for parameter, gradient in self._noted.values())

    @property
    def are_dropped(self) -> bool:
        """True if NaN or Inf was found on any rank, and no gradient of that time is left."""
        return bool(self._noted) and not self.are_noted

    def first_nonfinite(self) -> Finding | None:
        """Return the first gradient of this rank with NaN or Inf.

        A gradient that no optimizer uses counts once, because nobody has to drop it. Optimizers
        that step in backward have dropped all: then the reduced ones count.
        """
        module = first_nonfinite(self._flags)
        names: list[str] = []
        if not self._optimizers.have_stepped_in_backward:
            names = self._names_of_nonfinite()
            if not names:
                return None
        if module is not None:
            return Finding(module, is_origin=True)
        return Finding(names[0], is_origin=False) if names else None

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of the model and their names; none if the user has deleted it."""
        model = self._model_of()
        if model is not None:
            yield from named_parameters(model, self._modules)

    def _names_of_nonfinite(self) -> list[str]:
        held = self._optimizers.held_parameters()  # none if no optimizer is known
        names = []
        for name, parameter in _nonfinite(self._parameters()):
            if not held or id(parameter) in held:
                names.append(name)
                continue
            known = self._unused.get(id(parameter))
            if known is None or not _is(parameter.grad, known):
                assert parameter.grad is not None, "it holds NaN or Inf"
                self._unused[id(parameter)] = TensorWeakRef(parameter.grad)
                names.append(name)
        return names

    def note_found(self) -> None:
        """Note that a vote has found NaN or Inf on any rank."""
        held = self._optimizers.held_parameters()
        for _, parameter in self._parameters():
            if parameter.grad is not None and (not held or id(parameter) in held):
                self._noted[id(parameter)] = parameter, TensorWeakRef(parameter.grad)

    def drop(self, parameters: Collection[int] | None) -> None:
        """Forget the gradients of parameters, given by their ids; None for all."""
        if parameters is None:
            self.clear()
            return
        for parameter in parameters:
            self._noted.pop(parameter, None)
            self._unused.pop(parameter, None)

    def clear(self) -> None:
        """Begin the next optimizer step."""
        self.found = False
        self._flags.clear()
        self._noted.clear()


def _is(gradient: Tensor | None, other: TensorWeakRef) -> bool:
    """Return True if a gradient is the tensor of another time, to which others may be added."""
    return gradient is not None and gradient is other()


def _nonfinite(parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the names and parameters whose gradients on this rank hold NaN or Inf.

    Waits for the device.
    """
    looked_at: list[tuple[str, Tensor]] = []
    gradients: list[Tensor] = []
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient._local_tensor
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.numel():
            looked_at.append((name, parameter))
            gradients.append(gradient.detach())
    if not gradients:
        return []
    device = gradients[0].device
    norms = [norm.to(device) for norm in torch._foreach_norm(gradients, math.inf)]
    are_finite = torch.isfinite(torch.stack(norms)).tolist()
    return [found for found, is_finite in zip(looked_at, are_finite, strict=True) if not is_finite]
