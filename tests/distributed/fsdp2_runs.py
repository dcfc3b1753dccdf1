"""Programs under FSDP2 that run twice in one process: with FSDP2 alone and with a block.

Losses, weights and the weights that forward uses are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ds_quant import fsdp2
from tests.distributed.harness import of_all_ranks

WIDTH = 32
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EXACT = {"scheme": "full_precision"}
EXACT_GRADIENTS = {"gradients": {"enabled": False}}
# Schemes whose nodes keep copies of the weights, here with exact gradients, and how far a forward
# may be from the weights.
COPIES = {"hybrid": 0.0, "lossless": 0.0, "eden4": 0.03, "sdp4bit": 0.03}


class Net(nn.Module):
    """Three layers of equal shape, one of them without a bias, and a head of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.head(x)


def sharded(mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Wrap every layer but the head, and the root with the head."""
    model = Net()
    for layer in (model.first, model.second, model.third):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def rows(seed: int) -> Tensor:
    """Return other rows on every rank and for every seed."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


@dataclass
class Run:
    """A model in training.

    front: of the block; None with FSDP2 alone.
    losses: of all forwards so far.
    forwards: weights that forward used, at each look.
    held: exact weights of the model, at each look. A trial begins with those of the start.
    """

    model: Any
    optimizer: Any
    front: Any
    losses: list[float] = field(default_factory=list)
    forwards: list[dict[str, Tensor]] = field(default_factory=list)
    held: list[dict[str, Tensor]] = field(default_factory=list)

    def backward(self, seed: int, *, last: bool = True, factor: float = 1.0) -> None:
        """Run forward and backward on rows of a seed."""
        self.model.set_is_last_backward(last)
        loss = self.model(rows(seed)).float().square().mean() * factor
        loss.backward()
        self.losses.append(float(loss.detach()))

    def update(self) -> None:
        """Step and zero the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int) -> None:
        """Take an optimizer step of one backward."""
        self.backward(seed)
        self.update()

    def evaluate(self, seed: int = 7, *, reshard: bool = True) -> None:
        """Run a forward without gradients.

        reshard: False leaves the root gathered, as FSDP2 does.
        """
        with torch.no_grad():
            self.losses.append(float(self.model(rows(seed)).float().square().mean()))
        if reshard:
            self.model.reshard()

    def look(self, *exact: str) -> None:
        """Note the weights that the next forward uses. exact: names of those that are exact."""
        found = forward_weights(self.model)
        weights = self.weights()
        self.forwards.append(found)
        self.held.append(weights)
        for name in exact:
            assert torch.equal(found[name], weights[name].to(found[name].dtype)), name

    def weights(self) -> dict[str, Tensor]:
        """Return the exact full weights."""
        return masters(self.model)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights that the optimizer moves."""
    found = {}
    for name, p in model.named_parameters():
        full = p.full_tensor() if isinstance(p, DTensor) else p
        found[name] = full.detach().clone()
    return found


def forward_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights that forward uses."""
    found = {}
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    for prefix, module in modules:
        module.unshard()
        for name, p in module.named_parameters(prefix):
            if not hasattr(p, "to_local"):
                found[name] = p.detach().clone()
        module.reshard()
    return found


Program = Callable[[Run], None]


def played(
    program: Program,
    block: dict[str, Any] | None,
    *,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Run:
    """Run a program with a block, or with FSDP2 alone."""
    model = sharded(mesh, **options)
    prepare(model)
    made = adam(model) if optimizer is None else optimizer(model)
    front = None
    if block is not None:
        block = {"node_size": max(1, dist.get_world_size() // 2), "min_numel": 64, **block}
        if block["scheme"] in ("eden4", "sdp4bit"):
            block = {**EXACT_GRADIENTS, **block}
        if mesh is not None:
            del block["node_size"]
        front = fsdp2.attach(model, block, optimizer=made)
    run = Run(model, made, front)
    program(run)
    return run


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """Return AdamW that updates all parameters in one operator.

    DTensor plans every operator anew for every shape, which is most of the time of a first step.
    """
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_near(run: Run, plain: Run, *, off: float = 0.0, case: object = None) -> None:
    """Compare a run with that of FSDP2 alone. off: relative error of the forward weights."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if off == 0 else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(run.losses, plain.losses, msg=lambda m: f"{case}: {m}", **tolerance)
    weights = run.weights()
    for name, expected in plain.weights().items():
        expected = expected.double()
        error = float((weights[name] - expected).norm() / expected.norm().clamp(min=1e-3))
        assert error <= max(off, 1e-5), (case, name, error)
    for found, expected_weights in zip(run.forwards, plain.forwards, strict=True):
        for name, expected in expected_weights.items():
            error = float((found[name] - expected).norm() / expected.norm().clamp(min=1e-3))
            assert error <= max(off, 1e-5), (case, name, error)


def with_copies(scheme: str, world: int) -> dict[str, Any]:
    """Return a block of two nodes, of one rank each if there are two ranks."""
    return {"scheme": scheme, "node_size": world // 2, "allow_full_replica": True}


def assert_equal_on_all_ranks(weights: dict[str, Tensor], case: object) -> None:
    """Compare the sums of full weights between all ranks."""
    own = {name: value.double().sum().item() for name, value in weights.items()}
    assert all(other == own for other in of_all_ranks(own)), case


def logged() -> list[str]:
    """Return a list that gets the log lines of this rank from now on."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("ds_quant.run").addHandler(Handler())
    return lines
