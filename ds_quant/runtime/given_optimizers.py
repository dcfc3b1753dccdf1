"""The optimizers that a user gives to ``attach``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from ds_quant.config.errors import KEY, AttachError


def optimizers_of(given: object) -> list[Optimizer]:
    """Return the optimizers of an argument of ``attach``: one, several, or wrappers of some.

    Raises:
        AttachError: something else.
    """
    # A wrapper such as Accelerate's runs no hooks of its own; the optimizer inside does.
    unwrapped = getattr(given, "optimizer", given)
    if isinstance(unwrapped, Optimizer):
        return [unwrapped]
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Tensor, type)):
        return [optimizer for each in given for optimizer in optimizers_of(each)]
    is_short = given is None or isinstance(given, (str, int, float))
    shown = repr(given) if is_short else type(given).__name__
    raise AttachError(
        f"{KEY}: optimizer={shown}: allowed: the optimizer of the model's parameters, a list of "
        "several, or [] for a model that is only evaluated"
    )
