"""A model whose training has equal bits on any CPU: no result depends on the order of a sum.

Matrix products, sums of floats and random normals differ between AVX2 and AVX-512. Here gradients
are elementwise, the loss is a sum of integers, and data are shifted integers. Learning rate and
momentum of ``sgd`` are powers of two, so a fused multiply-add rounds the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

FRACTION_BITS = 13  # of data: multiples of 2^-13 up to 2
LOSS_UNIT = 2.0**-30

# Odd shapes: shards end in padding, matrices have one to seven groups of 8192 or fewer elements,
# and the small parameters share a message in full precision.
SHAPES = (
    {"weight": (131, 389), "bias": (389,)},
    {"weight": (61, 53), "bias": (61,)},
    {"weight": (29,), "bias": (29,)},
    {"weight": (7, 5, 3, 3)},
    {"weight": (257, 129), "bias": (129,)},
    {"weight": (1,)},
    {"weight": (1000, 3), "bias": (3,)},
)


def shifted_integers(shape: Iterable[int], seed: int) -> Tensor:
    """Return fp32 values of -2 to 2 over seven octaves: one scale per group loses some bits."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    values = torch.randint(-255, 256, shape, generator=generator)
    octaves = torch.randint(0, 7, shape, generator=generator)
    return torch.bitwise_left_shift(values, octaves).float() * 2.0**-FRACTION_BITS


class _Quadratic(torch.autograd.Function):
    """x + sum of w^2 / 2 + data w, in fixed point."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, data: Tensor) -> Tensor:
        ctx.save_for_backward(weight, data)
        w = weight.float()
        terms = ((0.5 * w + data) * w).double()
        total = (terms / LOSS_UNIT).round().long().sum()
        return x + total.double() * LOSS_UNIT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, data = ctx.saved_tensors
        return gradient, (gradient.float() * (weight.float() + data)).to(weight.dtype), None


class Layer(nn.Module):
    """Parameters with a quadratic loss around data that differ by rank and micro-step."""

    def __init__(self, index: int, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.seed = 100 * index
        for i, (name, shape) in enumerate(shapes.items()):
            values = shifted_integers(shape, seed=self.seed + i)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x: Tensor, seed: int) -> Tensor:
        for i, parameter in enumerate(self.parameters(recurse=False)):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            data = shifted_integers(shape, seed=10_000 * (seed + 1) + self.seed + i)
            x = _Quadratic.apply(x, parameter, data)
        return x


class ExactModel(nn.Module):
    """91 k parameters in 12 tensors. ``forward`` returns the loss on the data of ``seed``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, shapes) for i, shapes in enumerate(SHAPES))

    def forward(self, seed: int) -> Tensor:
        x = torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            x = layer(x, seed)
        return x


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return SGD: unlike Adam, its steps depend on the size of the gradients."""
    return torch.optim.SGD(parameters, lr=2.0**-4, momentum=0.5)
