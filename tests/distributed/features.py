"""Features of DeepSpeed to train: models, loops and config keys. See [Note: a row] in rows.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
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
    build,
    digest,
    forward,
    plain_descent,
    settings,
    train,
    train_step,
)

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

TOKENS = 251


class Frozen(Regression):
    """Its middle layer is frozen."""

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
    """Predicts its input tokens. Embedding and head share one (251, 63) weight."""

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
    """Uses the embedding's weight as an external parameter, without a head."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.used: list[str] = []  # digests of the weight in every forward

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


def with_leaf(kind: type[nn.Module] = Bottleneck) -> nn.Module:
    """Return a model whose middle is a ZeRO-3 leaf module."""
    from deepspeed.utils import set_z3_leaf_modules

    model = Regression()
    model.second = kind()
    set_z3_leaf_modules(model, [kind])
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


class KeepsBuffer(Regression):
    """Has a buffer that bf16 would round, such as the routing bias of DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", 1 + torch.arange(WIDTH) * 2.0**-12)

    def body(self, x: Tensor) -> Tensor:
        assert self.gain.dtype == torch.float32
        hidden = super().body(x)
        return (hidden * self.gain).to(hidden.dtype)


class Dropping(Regression):
    """With dropout, whose random numbers are the user's."""

    def body(self, x: Tensor) -> Tensor:
        return functional.dropout(super().body(x), 0.1, self.training)


class Tiled(Regression):
    """Its middle is DeepSpeed's TiledLinear."""

    def __init__(self) -> None:
        import deepspeed

        super().__init__()
        self.second = deepspeed.zero.TiledLinear(
            HIDDEN, WIDTH, in_splits=2, out_splits=2, init_linear=self.second
        )


# ---- loops of one optimizer step ----


def coalesced(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """Reduce once after two backwards."""
    losses = []
    with engine.coalesce_grad_reduction():
        for micro in range(2):
            losses.append(forward(engine, step, micro))
            engine.backward(losses[-1])
    engine.step()
    return [float(loss.detach()) for loss in losses]


def unmanaged(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """Let the caller decide when to step, with another number of micro-steps every time."""
    count = (2, 1, 3)[step % 3]
    losses = []
    for micro in range(count):
        losses.append(forward(engine, step, micro))
        engine.backward(losses[-1] / count)
    engine.step()
    return [float(loss.detach()) for loss in losses]


def bare(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """Call ``loss.backward()`` instead of ``engine.backward(loss)``."""
    loss = forward(engine, step)
    loss.backward()
    engine.step()
    return [float(loss.detach())]


def two_forwards(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """One backward of two forwards, as contrastive losses have."""
    loss = (forward(engine, step, 0) + forward(engine, step, 1)) / 2
    engine.backward(loss)
    engine.step()
    return [float(loss.detach())]


def scheduled(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """The learning rate falls after every step."""
    losses = train_step(engine, step, seed)
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.8
    return losses


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


def separate_experts(model: nn.Module) -> list[dict[str, Any]]:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    return split({"params": list(model.parameters()), "name": "parameters"})


@dataclass(frozen=True, kw_only=True)
class Feature:
    """How to set DeepSpeed up for a feature.

    stages: ZeRO stages that support it.
    risk: the stage that `make test` trains; None: the highest, where weights and gradients travel.
    accumulation: micro-steps of an optimizer step.
    model, optimizer: make them; the optimizer takes parameters or groups.
    zero: keys of ``zero_optimization``.
    top: keys of the top level of the config.
    groups: makes the optimizer's parameter groups of a model.
    in_zero_init: True to build the model under zero.Init.
    since: first DeepSpeed that can train it, with or without the plugin.
    step: loop of one optimizer step.
    method: a method of engines that it needs and some versions of DeepSpeed lack.
    said: part of the start-up line, if gradients stay on DeepSpeed's own path.
    """

    stages: tuple[int, ...] = (1, 2, 3)
    risk: int | None = None
    dtype: str = "bf16"
    accumulation: int = 1
    model: Callable[[], nn.Module] = Regression
    optimizer: Callable[[Iterable[Any]], Any] = plain_descent
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Iterable[Any]] | None = None
    in_zero_init: bool = False
    since: str = "0.17"
    step: Callable[[Any, int, int], list[float]] = train_step
    method: str = "backward"
    said: str = ""

    @property
    def riskiest_stage(self) -> int:
        """Stage at which most of the plugin works for the feature."""
        return max(self.stages) if self.risk is None else self.risk

    def skip_if_too_old(self) -> None:
        needs.deepspeed(self.since, "cannot train this, with or without the plugin")
        if not needs.has_engine_method(self.method):
            pytest.skip(f"this DeepSpeed has no engine.{self.method}")

    def train(
        self,
        stage: int,
        block: dict[str, Any] | None,
        steps: int,
        *,
        save_at: int | None = None,
        resumes: bool = False,
    ) -> Run:
        """Train it on this rank: see ``models.train``. block: None for DeepSpeed as shipped."""
        config, model = self._prepared(stage, block)
        return train(
            config,
            steps,
            model,
            watched=True,
            step=self.step,
            save_at=save_at,
            resumes=resumes,
            groups=self.groups,
            optimizer=self.optimizer,
        )

    def engine(self, stage: int, block: dict[str, Any] | None) -> Any:
        """Return an engine with this feature that has not trained yet."""
        config, model = self._prepared(stage, block)
        return build(config, model, groups=self.groups, optimizer=self.optimizer)

    def _prepared(
        self, stage: int, block: dict[str, Any] | None
    ) -> tuple[dict[str, Any], Callable[[], nn.Module]]:
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
        if self.in_zero_init:
            return config, partial(_built_in_zero_init, self.model, config)
        return config, self.model


def _built_in_zero_init(model: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        return model()


OFFLOAD = {"device": "cpu"}
DEEPSPEED_FEATURES: dict[str, Feature] = {
    "clipping": Feature(risk=2, top={"gradient_clipping": 0.05}),
    "frozen module": Feature(model=Frozen),
    "low-rank adapter": Feature(model=LowRank),
    "tied embeddings": Feature(risk=1, model=Tied),
    "weight used by another module": Feature(model=Borrowed),
    "activation checkpointing": Feature(model=Recomputed, accumulation=2),
    # DeepSpeed 0.19.8 cannot fetch one under ZeRO-3, with or without the plugin.
    "zero-size parameter": Feature(stages=(1, 2), model=ZeroSize, since="0.19"),
    "unused parameter": Feature(model=Unused),
    "summed gradients": Feature(stages=(1, 2), top={"gradient_allreduce_op": "sum"}),
    "two parameter groups": Feature(risk=1, groups=decay_groups),
    "overlap": Feature(risk=2, zero={"overlap_comm": True}),
    "no overlap": Feature(risk=1, zero={"overlap_comm": False}),
    "small gradient buckets": Feature(risk=2, zero={"reduce_bucket_size": 20_000}),
    "small gradient buckets, accumulated": Feature(
        zero={"reduce_bucket_size": 20_000, "overlap_comm": True}, accumulation=2
    ),
    "fp32 gradients on the wire": Feature(risk=2, top={"communication_data_type": "fp32"}),
    "fp32 accumulation": Feature(
        stages=(2, 3), top={"data_types": {"grad_accum_dtype": "fp32"}}, accumulation=2
    ),
    "torch autocast": Feature(
        dtype="fp32", top={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    ),
    "optimizer offload": Feature(
        risk=2, zero={"offload_optimizer": OFFLOAD}, top={"zero_force_ds_cpu_optimizer": False}
    ),
    "round-robin gradients": Feature(stages=(1, 2), zero={"round_robin_gradients": True}),
    "small weight buckets": Feature(stages=(1, 2), zero={"allgather_bucket_size": 20_000}),
    "`parameter_alignment`": Feature(
        stages=(1, 2), zero={"parameter_alignment": True}, since="0.19.8"
    ),
    "`keep_in_fp32_modules`": Feature(
        model=KeepsBuffer, top={"data_types": {"keep_in_fp32_modules": ["gain"]}}, since="0.19.8"
    ),
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
    "`reduce_scatter: false`": Feature(
        risk=2,
        zero={"reduce_scatter": False},
        top={"gradient_predivide_factor": 2.0},
        said="gradients stay exact: zero_optimization.reduce_scatter is false",
    ),
}
NO_OVERLAP = {"overlap_comm": False}
# Some of these have no row in the table of behaviours.
ALL_FEATURES = {
    **DEEPSPEED_FEATURES,
    "tiled linear": Feature(stages=(3,), model=Tiled),
    "small sub-groups": Feature(stages=(3,), zero={"sub_group_size": 10_000}),
    "one reduction of two backwards": Feature(
        stages=(2, 3), accumulation=2, step=coalesced, method="coalesce_grad_reduction"
    ),
    "the caller alone steps": Feature(
        stages=(3, 2), step=unmanaged, method="managed_gradient_accumulation",
        top={"managed_gradient_accumulation": False}, zero=NO_OVERLAP,
    ),
    "loss.backward()": Feature(stages=(2, 3), step=bare, since="0.18.3"),
    "dropout": Feature(model=Dropping),
    "two forwards before one backward": Feature(step=two_forwards),
    "a schedule of learning rates": Feature(step=scheduled),
}  # fmt: skip
