"""Programs under DDP that run twice in one process: with DDP alone and with a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ds_quant import ddp
from tests.distributed.harness import of_all_ranks

WIDTH = 32
EXACT = {"scheme": "full_precision"}
# Every scheme that quantizes gradients in a way of its own.
SCHEMES = ("eden4", "eden3", "eden2", "qsdp", "qsdp_w4g4", "sdp4bit", "zeropp", "tlq", "ulq")


class Net(nn.Module):
    """Layers of several shapes, some without a bias, and a head of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(3 * WIDTH)
        self.second = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.norm(self.first(x))))
        return self.head(torch.tanh(x))


def rows(seed: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return other rows on every rank and for every seed."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(dtype)


@dataclass
class Run:
    """A model in training.

    losses: of all forwards so far. gradients: of all optimizer steps so far, by name.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    front: Any
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def backward(self, seed: int, *, factor: float = 1.0) -> None:
        """Run forward and backward on rows of a seed."""
        loss = self.model(rows(seed, dtype=self.dtype)).float().square().mean() * factor
        loss.backward()
        self.losses.append(float(loss.detach()))

    def update(self) -> None:
        """Note the gradients, step and drop the gradients."""
        self.gradients.append(gradients_of(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int, **options: Any) -> None:
        """Take an optimizer step of one backward."""
        self.backward(seed, **options)
        self.update()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}


Program = Callable[[Run], None]


def gradients_of(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one."""
    return {
        name: p.grad.detach().clone()
        for name, p in model.module.named_parameters()
        if p.grad is not None
    }


def three_steps(run: Run) -> None:
    for seed in range(3):
        run.step(seed)


def played(
    program: Program,
    block: dict[str, Any] | None,
    *,
    make: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Run:
    """Run a program with a block, or with DDP alone. options: of DistributedDataParallel."""
    model = DistributedDataParallel(make(), **options)
    front = None
    if block is not None:
        front = ddp.attach(model, {"min_numel": 64, **block})
    made = sgd(model.parameters()) if optimizer is None else optimizer(model.parameters())
    run = Run(model, made, front)
    program(run)
    return run


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_equal(found: Run, expected: Run) -> None:
    """Compare losses, gradients and weights, bit for bit."""
    assert found.losses == expected.losses
    for ours, plain in zip(found.gradients, expected.gradients, strict=True):
        assert_equal_tensors(ours, plain)
    assert_equal_tensors(found.weights(), expected.weights())


def assert_equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(_bits(found[name]), _bits(tensor)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_near(found: Run, expected: Run, *, off: float = 1e-6) -> None:
    """Compare gradients and weights. off: relative error of each tensor."""
    for ours, plain in zip(found.gradients, expected.gradients, strict=True):
        assert_near_tensors(ours, plain, off=off)
    assert_near_tensors(found.weights(), expected.weights(), off=off)


def assert_near_tensors(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, off: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if torch.equal(_bits(found[name]), _bits(tensor)):  # also bit patterns that are NaN
            continue
        error = float((found[name].double() - tensor.double()).norm())
        assert error <= off * max(float(tensor.double().norm()), 1e-3), (name, error)


def assert_equal_on_all_ranks(tensors: dict[str, Tensor]) -> None:
    """Compare the bits of tensors between all ranks."""
    for other in of_all_ranks(tensors):
        assert_equal_tensors(other, tensors)
