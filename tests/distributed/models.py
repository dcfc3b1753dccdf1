"""Tiny models, deterministic data and a training loop for the distributed tests.

Sizes are odd on purpose: shards end in padding, some ranks get short or empty ones. Results of a
rank are pickled through a pipe, so weights are NumPy arrays, and bits are compared by digests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

FEATURES, HIDDEN, WIDTH, TARGETS = 63, 257, 251, 61
BATCH = 16
# ZeRO-3: parameters are fetched about a layer ahead, several in one message.
PREFETCH = {"stage3_prefetch_bucket_size": 70_000, "stage3_max_live_parameters": 70_000}
QSDP = {"scheme": "qsdp"}
FULL = {"scheme": "full_precision"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Regression(nn.Module):
    """63 -> 257 -> 251 -> 61 with a LayerNorm, 97k parameters; ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, TARGETS)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.norm(self.body(x))).float() - y).square().mean()


def settings(
    stage: int,
    block: dict[str, Any] | None = None,
    *,
    dtype: str = "fp32",
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """Return a DeepSpeed config.

    ZeRO-3 releases every parameter after forward, so backward gathers it again.

    block: of ``quantized_comm``; None: without the plugin.
    zero: further keys of ``zero_optimization``.
    top: further keys of the top level.
    """
    sections: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 10**6}
    if stage == 3:
        sections |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": sections | (zero or {}),
        "zero_allow_untested_optimizer": True,
        **top,
    }
    if dtype != "fp32":  # fp16 with dynamic loss scale
        config[dtype] = {"enabled": True} | top.get(dtype, {})
    if block is not None:
        config["quantized_comm"] = block
    return config


def build(
    config: dict[str, Any],
    model: Callable[[], nn.Module] = Regression,
    *,
    seed: int = 0,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    groups: Callable[[nn.Module], Iterable[Any]] | None = None,
) -> Any:
    """Return a DeepSpeed engine on seeded weights.

    model: may have an attribute ``grid``, its model-parallel topology.
    optimizer: makes the optimizer, unless the config has one.
    groups: parameter groups of the optimizer, by default all trained parameters.
    """
    import deepspeed

    torch.manual_seed(seed)
    module = model()
    grid = getattr(module, "grid", None)
    if "optimizer" in config:
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config, mpu=grid
        )
        return engine
    if groups is None:
        params: Iterable[Any] = [p for p in module.parameters() if p.requires_grad]
    else:
        params = groups(module)
    if optimizer is None:
        made: torch.optim.Optimizer = torch.optim.AdamW(params, lr=2e-3)
    else:
        made = optimizer(params)
    engine, *_ = deepspeed.initialize(model=module, optimizer=made, config=config, mpu=grid)
    return engine


def engine_of(
    stage: int,
    block: dict[str, Any] | None = None,
    model: Callable[[], nn.Module] = Regression,
    *,
    seed: int = 0,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None,
    groups: Callable[[nn.Module], Iterable[Any]] | None = None,
    dtype: str = "bf16",
    **config: Any,
) -> Any:
    """Return an engine as ``build``, on ``settings`` in bf16. config: further ``settings``."""
    return build(
        settings(stage, block, dtype=dtype, **config),
        model,
        seed=seed,
        optimizer=optimizer,
        groups=groups,
    )


def plain_descent(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return SGD: its steps are as large as the gradients, so the loss shows a wrong factor."""
    return torch.optim.SGD(params, lr=0.5)


def batch(seed: int, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs (16, 63) and the targets (16, 61) of a fixed linear teacher, both fp32."""
    generator = torch.Generator().manual_seed(((seed * 1000 + step) * 100 + micro) * 10 + rank)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(99))
    return x, x @ teacher / FEATURES**0.5


def forward(engine: DeepSpeedEngine, step: int, micro: int = 0, *, seed: int = 0) -> Tensor:
    """Return the loss of this rank's batch. Inputs have the model's dtype."""
    from deepspeed import comm as dist

    x, y = batch(seed, step, micro, dist.get_rank())
    return engine(x.to(engine.get_data_types()[0]), y)


def train_step(engine: DeepSpeedEngine, step: int, seed: int = 0) -> list[float]:
    """Run one optimizer step. Return the losses of its micro-steps on this rank."""
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        loss = forward(engine, step, micro, seed=seed)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_steps(engine: DeepSpeedEngine, steps: int, first: int = 0) -> list[float]:
    """Run optimizer steps from step ``first`` on. Return the losses on this rank."""
    losses = []
    for step in range(first, first + steps):
        losses += train_step(engine, step)
    return losses


def evaluate(engine: DeepSpeedEngine, seed: int = 0) -> float:
    """Return the loss of a forward without gradients, on held-out data."""
    engine.eval()
    with torch.no_grad():
        loss = float(forward(engine, 999, seed=seed))
    engine.train()
    return loss


def masters(engine: DeepSpeedEngine) -> dict[str, np.ndarray]:
    """Return the full fp32 master weights of every trained parameter. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage() == 0:
        return {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}
    full = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    return {n: t.detach().clone().numpy() for n, t in full.items() if t is not None}


def gathered(params: Iterable[Any], **options: Any) -> Any:
    """Return DeepSpeed's GatheredParameters."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(params), **options)


def digest(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def digests(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {n: hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for n, a in arrays.items()}


def master_bits(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return digests of the fp32 master weights. A collective."""
    return digests(masters(engine))


def exact(engine: DeepSpeedEngine, dtype: str) -> dict[str, str]:
    """Return digests of the master weights, cast to the training dtype. A collective."""
    return {n: digest(torch.from_numpy(a).to(DTYPES[dtype])) for n, a in masters(engine).items()}


def live(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return digests of this rank's weights: shards under ZeRO-3, else the replica."""
    named = engine.module.named_parameters()
    return {n: digest(getattr(p, "ds_tensor", p).data) for n, p in named}


def saved(engine: DeepSpeedEngine, name: str = "model") -> dict[str, Tensor]:
    """Return the weights that ``save_16bit_model`` writes. A collective."""
    from tests.distributed.harness import scratch

    assert engine.save_16bit_model(str(scratch()), f"{name}.bin")
    torch.distributed.barrier()
    weights = torch.load(scratch() / f"{name}.bin", weights_only=True)
    torch.distributed.barrier()  # all ranks have read the file before it is written again
    return weights


def heard(name: str = "log_rank0") -> list[str]:
    """Return a list that receives the plugin's messages from now on, instead of the log.

    name: function of ``runtime.log`` to replace.
    """
    from ds_quant.runtime import log

    messages: list[str] = []
    setattr(log, name, lambda message, **_: messages.append(message))
    return messages


@dataclass
class Sighting:
    """The bits of a parameter right before a module computed with it."""

    step: int
    forward: bool
    name: str
    bits: str  # digest


@contextmanager
def watch(engine: DeepSpeedEngine) -> Iterator[list[Sighting]]:
    """Record the weights that forwards, backwards and recomputes use.

    Under ZeRO-3 at every fetch, under ZeRO-1 and 2 before the forward of every module.
    """
    names = {id(p): n for n, p in engine.module.named_parameters()}
    seen: list[Sighting] = []

    def look(module: nn.Module, forward: bool) -> None:
        for p in module.parameters(recurse=False):
            name = names.get(id(p))
            if name is not None:
                seen.append(Sighting(engine.global_steps, forward, name, digest(p.data)))

    if engine.zero_optimization_stage() < 3:
        hooks = [m.register_forward_pre_hook(lambda m, _: look(m, True)) for m in engine.modules()]
        yield seen
        for hook in hooks:
            hook.remove()
        return
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    original = Coordinator.fetch_sub_module

    def fetch(self: Any, current_submodule: nn.Module, forward: bool) -> None:
        original(self, current_submodule, forward)
        look(current_submodule, forward)

    Coordinator.fetch_sub_module = fetch
    try:
        yield seen
    finally:
        Coordinator.fetch_sub_module = original


@dataclass
class Run:
    """The results of a training on one rank.

    losses: per micro-step.
    weights: fp32 master weights.
    seen: weights that modules computed with.
    report: ``ds_quant.report``; None without the plugin.
    noted: value of the context manager around the run.
    """

    losses: list[float]
    weights: dict[str, np.ndarray]
    seen: list[Sighting] = field(default_factory=list)
    report: dict[str, Any] | None = None
    noted: Any = None


def train(
    config: dict[str, Any],
    steps: int,
    model: Callable[[], nn.Module] = Regression,
    *,
    seed: int = 0,
    watched: bool = False,
    step: Callable[[Any, int, int], list[float]] = train_step,
    save_at: int | None = None,
    resumes: bool = False,
    **building: Any,
) -> Run:
    """Build an engine and train it.

    watched: True to record the weights that modules compute with.
    step: loop of one optimizer step.
    save_at: step before which a checkpoint is saved; None: no checkpoint.
    resumes: True to continue with a new engine, built on other weights, that loads the checkpoint.
    building: further arguments of ``build``.
    """
    import ds_quant

    def play(steps: range) -> None:
        with watch(engine) if watched else nullcontext([]) as seen:
            for index in steps:
                losses.extend(step(engine, index, seed))
        sightings.extend(seen)

    losses: list[float] = []
    sightings: list[Sighting] = []
    engine = build(config, model, seed=seed, **building)
    if save_at is not None:
        play(range(save_at))
        save(engine)
    if resumes:
        engine.destroy()
        engine = build(config, model, seed=7, **building)
        _, state = engine.load_checkpoint(os.environ["TEST_SCRATCH"], tag="middle")
        assert state["epoch"] == 4 and "ds_quant" not in state
    play(range(save_at or 0, steps))
    run = Run(losses, masters(engine), sightings, ds_quant.report(engine))
    engine.destroy()
    return run


def save(engine: DeepSpeedEngine) -> None:
    """Save a checkpoint with client state of the user."""
    from deepspeed import comm as dist

    engine.save_checkpoint(os.environ["TEST_SCRATCH"], "middle", {"epoch": 4})
    dist.barrier()


def mean_losses(runs: list[Run]) -> np.ndarray:
    """Return the losses averaged over ranks, (micro-steps,) float64."""
    return np.mean([run.losses for run in runs], axis=0)


def unsteady(seen: list[Sighting]) -> list[tuple[str, int]]:
    """Return every (parameter, step) that was used with different bits within the step."""
    order = sorted(seen, key=lambda s: (s.name, s.step))
    by_step = groupby(order, key=lambda s: (s.name, s.step))
    return [key for key, sightings in by_step if len({s.bits for s in sightings}) > 1]
