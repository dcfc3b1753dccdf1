"""Models, optimizers and loops of features that need more than a config, for ``support.py``."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.models import (
    FEATURES,
    HIDDEN,
    TARGETS,
    WIDTH,
    Regression,
    batch,
    forward,
    train_step,
)

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# ---- experts ----


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 127), nn.Linear(127, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(Regression):
    """Four experts over the hidden activations."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(
            HIDDEN, Expert(), num_experts=4, ep_size=ep_size, k=1, use_rts=False, drop_tokens=False
        )

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        mixed, _, _ = self.moe(hidden)
        return self.second(hidden + mixed)


class _Experts(nn.Module):
    """Four experts in two parameters, the layout of transformers."""

    def __init__(self, inner: int = 127) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * inner, HIDDEN) / HIDDEN**0.5)
        self.down_proj = nn.Parameter(torch.randn(4, HIDDEN, inner) / inner**0.5)


class AutoMixture(Regression):
    """Four experts that AutoEP finds and replaces by its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="mixtral", num_local_experts=4, num_experts_per_tok=1, hidden_act="silu"
        )
        self.moe = nn.Module()
        self.moe.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.moe.experts = _Experts()

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        mixed = self.moe(hidden.unsqueeze(0))
        return self.second(hidden + mixed.view_as(hidden))


AUTO_EXPERTS = {
    "expert_parallel": {
        "enabled": True, "autoep_size": 2, "use_grouped_mm": False, "top_k": 1,
        "moe_layer_pattern": "moe", "router_pattern": "gate", "expert_pattern": "experts",
        "expert_w1": "gate_up_proj", "expert_w2": "down_proj",
    },
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},  # DeepSpeed splits its groups
}  # fmt: skip


# ---- pipeline ----


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.float() - targets).square().mean()


def pipeline() -> nn.Module:
    from deepspeed.pipe import PipelineModule

    layers = [
        nn.Linear(FEATURES, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, WIDTH),
        nn.Linear(WIDTH, TARGETS),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=mean_square, partition_method="uniform")


def piped(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    x, y = batch(0, step, 0, engine.grid.get_data_parallel_rank())
    return [float(engine.train_batch(iter([(x.to(engine.get_data_types()[0]), y)])))]


# ---- tensor and sequence parallel ----


def neighbours() -> SimpleNamespace:
    """Return the interface of Megatron's mpu for model-parallel groups of two neighbours."""
    from deepspeed import comm as dist

    world = dist.get_world_size()
    rank = dist.get_rank()

    def own_of(groups: Iterable[range]) -> Any:
        """Make all groups, as every rank must. Return the one of this rank."""
        own = None
        for ranks in groups:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                own = group
        return own

    model = own_of(range(first, first + 2) for first in range(0, world, 2))
    data = own_of(range(index, world, 2) for index in range(2))
    return SimpleNamespace(
        get_model_parallel_group=lambda: model,
        get_tensor_model_parallel_group=lambda: model,
        get_model_parallel_rank=lambda: rank % 2,
        get_model_parallel_world_size=lambda: 2,
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=lambda: rank // 2,
        get_data_parallel_world_size=lambda: world // 2,
    )


class _Sum(torch.autograd.Function):
    """Sums over a group. The gradient is unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Sliced(nn.Module):
    """A hidden layer split over the ranks of a model-parallel group, as in Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = neighbours()
        torch.manual_seed(self.grid.get_model_parallel_rank())
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, TARGETS, bias=False)
        for p in self.parameters():
            p.model_parallel = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = _Sum.apply(self.down(torch.tanh(self.up(x))), self.grid.get_model_parallel_group())
        return (total.float() - y).square().mean()


class Copied(Regression):
    """Every rank of a model-parallel group has all weights, reduced in its data-parallel group."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = neighbours()


def neighbourly(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """Train a step in which the ranks of a model-parallel group have equal batches."""
    x, y = batch(0, step, 0, torch.distributed.get_rank() // 2)
    loss = engine(x.to(engine.get_data_types()[0]), y)
    engine.backward(loss)
    engine.step()
    return [float(loss.detach())]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 256), nn.Linear(256, TARGETS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))).float() - y).square().mean()


AUTO_TENSOR_PARALLEL = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [".*up\\.weight$"], "partition_type": "column"},
            {"patterns": [".*down\\.weight$"], "partition_type": "row"},
        ],
    },
}


# ---- parameters ----


class Quantized(Regression):
    """Has a frozen int8 weight with a scale, as the quantized base of an adapter.

    It is not the first parameter: ZeRO-3 takes the dtype of that one for the model's on devices
    that support fp16.
    """

    def __init__(self) -> None:
        super().__init__()
        whole = (self.second.weight.detach() * 2000).round().clamp(-127, 127).to(torch.int8)
        self.base = nn.Module()
        self.base.codes = nn.Parameter(whole, requires_grad=False)
        self.second.weight = nn.Parameter(torch.zeros(WIDTH, HIDDEN))

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + functional.linear(
            hidden, self.base.codes.to(hidden.dtype) / 2000
        )


class MixedDtypes(Regression):
    """Has a frozen bf16 base with an fp32 adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.second.bfloat16().requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 33, bias=False)
        self.up = nn.Linear(33, WIDTH, bias=False)

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden.bfloat16()).float() + self.up(self.down(hidden))


# ---- optimizers and loops ----


def matrices_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of Muon: matrices, and all other parameters."""
    groups = []
    for chosen in (True, False):
        params = [p for p in model.parameters() if (p.dim() == 2) == chosen]
        for p in params:
            p.use_muon = chosen
        groups.append({"params": params, "use_muon": chosen, "lr": 2e-2 if chosen else 2e-3})
    return groups


def muon(groups: Iterable[Any]) -> Any:
    """Return Muon. With a config DeepSpeed would compile FusedAdam, too."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    torch.compiler.set_stance("force_eager")  # compiling its iteration takes minutes on two cores
    return MuonWithAuxAdam(groups)


def no_sync(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    with engine.no_sync():
        losses = [forward(engine, step, 0)]
        engine.backward(losses[0])
    losses.append(forward(engine, step, 1))
    engine.backward(losses[1])
    engine.step()
    return [float(loss.detach()) for loss in losses]


def compiled(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    if step == 0:
        engine.compile(backend="eager")
    return train_step(engine, step, seed)
