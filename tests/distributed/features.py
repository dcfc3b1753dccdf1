"""Models and engine settings, one per DeepSpeed feature, for ``test_features``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests import needs
from tests.distributed.models import (
    FEATURES,
    HIDDEN,
    WIDTH,
    Regression,
    Run,
    digest,
    plain_descent,
    settings,
    train,
)

TOKENS = 251


class Frozen(Regression):
    """A module of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)


class LowRank(Regression):
    """A frozen weight and a trained correction of rank 33, its second factor starting at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 33, bias=False)
        self.up = nn.Linear(33, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + self.up(self.down(hidden))


class Tied(nn.Module):
    """Tokens in, the same tokens out: embedding and head share one (251, 63) weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES)
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = (x[:, :16].float().abs() * 80).long().clamp(max=TOKENS - 1)
        logits = self.logits(torch.tanh(self.inner(self.embed(tokens))))
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class Borrowed(Tied):
    """Uses the embedding's weight from outside the embedding, without a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.used: list[str] = []  # bits of the weight in every forward

    def logits(self, x: Tensor) -> Tensor:
        self.used.append(digest(self.embed.weight.data))
        return functional.linear(x, self.embed.weight)


class Recomputed(Regression):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(super().body, x, use_reentrant=False)


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(HIDDEN, 65), nn.Linear(65, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(x)))


class Leaf(Regression):
    """The middle is a module that ZeRO-3 fetches as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Bottleneck()


def with_leaf() -> nn.Module:
    from deepspeed.utils import set_z3_leaf_modules

    model = Leaf()
    set_z3_leaf_modules(model, [Bottleneck])
    return model


class ZeroSize(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.first.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.first.nothing.sum().float()


class Unused(Regression):
    """A weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(HIDDEN, 65)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """How to set DeepSpeed up for a feature: ``zero`` goes into its section of the config, ``top``
    to the top level, ``groups`` makes the optimizer's parameter groups.
    """

    stages: tuple[int, ...] = (1, 2, 3)
    dtype: str = "bf16"
    accumulation: int = 1
    model: Callable[[], nn.Module] = Regression
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Iterable[Any]] | None = None
    in_zero_init: bool = False
    since: str = "0.17"  # an older DeepSpeed cannot train it, with or without the plugin

    def skip_if_too_old(self) -> None:
        needs.deepspeed(self.since, "cannot train this, with or without the plugin")

    def train(self, stage: int, block: dict[str, Any] | None, steps: int) -> Run:
        if not needs.has_deepspeed(self.since):
            raise RuntimeError(f"DeepSpeed cannot train this before {self.since}")
        config = settings(
            stage,
            block,
            dtype=self.dtype,
            accumulation=self.accumulation,
            zero=self.zero,
            **self.top,
        )
        model = partial(_born_sharded, self.model, config) if self.in_zero_init else self.model
        chosen = {"groups": self.groups, "optimizer": plain_descent}
        return train(config, steps, model, watched=True, **chosen)


def _born_sharded(model: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        return model()


OFFLOAD = {"device": "cpu"}
DEEPSPEED_FEATURES: dict[str, Feature] = {
    "clipping": Feature(top={"gradient_clipping": 0.05}),
    "frozen module": Feature(model=Frozen),
    "low-rank adapter": Feature(model=LowRank),
    "tied embeddings": Feature(model=Tied),
    "weight used by another module": Feature(model=Borrowed),
    "activation checkpointing": Feature(model=Recomputed, accumulation=2),
    # DeepSpeed 0.19.8 cannot fetch one under ZeRO-3, with or without the plugin.
    "zero-size parameter": Feature(stages=(1, 2), model=ZeroSize, since="0.19"),
    "unused parameter": Feature(model=Unused),
    "summed gradients": Feature(stages=(1, 2), top={"gradient_allreduce_op": "sum"}),
    "two parameter groups": Feature(groups=decay_groups),
    "overlap": Feature(zero={"overlap_comm": True}),
    "no overlap": Feature(zero={"overlap_comm": False}),
    "small gradient buckets": Feature(zero={"reduce_bucket_size": 20_000}),
    "small gradient buckets, accumulated": Feature(
        zero={"reduce_bucket_size": 20_000, "overlap_comm": True}, accumulation=2
    ),
    "fp32 gradients on the wire": Feature(top={"communication_data_type": "fp32"}),
    "fp32 accumulation": Feature(
        stages=(2, 3), top={"data_types": {"grad_accum_dtype": "fp32"}}, accumulation=2
    ),
    "torch autocast": Feature(
        dtype="fp32", top={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    ),
    "optimizer offload": Feature(
        zero={"offload_optimizer": OFFLOAD}, top={"zero_force_ds_cpu_optimizer": False}
    ),
    "round-robin gradients": Feature(stages=(1, 2), zero={"round_robin_gradients": True}),
    "small weight buckets": Feature(stages=(1, 2), zero={"allgather_bucket_size": 20_000}),
    "leaf modules": Feature(stages=(3,), model=with_leaf),
    "built under zero.Init": Feature(stages=(3,), in_zero_init=True),
    "one gather per tensor": Feature(
        stages=(3,), zero={"stage3_allgather_sequential": True}, since="0.18"
    ),
    "all-reduced fetches": Feature(
        stages=(3,), zero={"stage3_use_all_reduce_for_fetch_params": True}, since="0.19.8"
    ),
    "some persistent parameters": Feature(
        stages=(3,), zero={"stage3_param_persistence_threshold": 20_000}
    ),
    "all parameters persistent": Feature(
        stages=(3,), zero={"stage3_param_persistence_threshold": 100_000}
    ),
    "parameter offload": Feature(stages=(3,), zero={"offload_param": OFFLOAD}),
}
