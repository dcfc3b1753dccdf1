"""Tiny models, deterministic data and a training loop for the distributed tests.

Sizes are odd on purpose: shards end in padding, some ranks get short or empty ones. What a rank
returns must cross a pipe, so weights travel as NumPy arrays and bit-identity as digests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
    """A DeepSpeed config; ``block`` is ``quantized_comm``. ZeRO-3 releases and re-fetches every
    parameter, so that backward has gathers of its own.
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
    """A DeepSpeed engine on seeded weights; ``groups`` picks what the optimizer is given, if none
    is in the config. A model may have the model-parallel ``grid`` that it lies on.
    """
    import deepspeed

    torch.manual_seed(seed)
    module = model()
    given = {"model": module, "config": config, "mpu": getattr(module, "grid", None)}
    if "optimizer" in config:
        return deepspeed.initialize(model_parameters=module.parameters(), **given)[0]
    chosen = groups(module) if groups else [p for p in module.parameters() if p.requires_grad]
    make = optimizer or (lambda params: torch.optim.AdamW(params, lr=2e-3))
    return deepspeed.initialize(optimizer=make(chosen), **given)[0]


def engine_of(
    stage: int,
    block: dict[str, Any] | None = None,
    model: Callable[[], nn.Module] = Regression,
    **given: Any,
) -> Any:
    """Of ``settings`` in bf16; what ``build`` takes goes to it."""
    building = {name: given.pop(name) for name in ("seed", "optimizer", "groups") if name in given}
    return build(settings(stage, block, **{"dtype": "bf16", **given}), model, **building)


def plain_descent(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Unlike Adam's, its steps are as large as the gradients: a wrong factor shows in the loss."""
    return torch.optim.SGD(params, lr=0.5)


def batch(seed: int, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs (16, 63) and the targets (16, 61) of a fixed linear teacher, both fp32."""
    generator = torch.Generator().manual_seed(((seed * 1000 + step) * 100 + micro) * 10 + rank)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, TARGETS, generator=torch.Generator().manual_seed(99))
    return x, x @ teacher / FEATURES**0.5


def forward(engine: Any, step: int, micro: int = 0, *, seed: int = 0) -> Tensor:
    """Loss of this rank's batch; inputs in the model's dtype."""
    from deepspeed import comm as dist

    x, y = batch(seed, step, micro, dist.get_rank())
    return engine(x.to(engine.get_data_types()[0]), y)


def train_step(engine: Any, step: int, seed: int = 0) -> list[float]:
    """One optimizer step; the losses of its micro-steps on this rank."""
    losses = []
    for micro in range(engine.gradient_accumulation_steps()):
        loss = forward(engine, step, micro, seed=seed)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_steps(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of so many optimizer steps on this rank, from step ``first`` on."""
    return [loss for step in range(first, first + steps) for loss in train_step(engine, step)]


def evaluate(engine: Any, seed: int = 0) -> float:
    """Loss of one forward without gradients, on data that training never sees."""
    engine.eval()
    with torch.no_grad():
        loss = float(forward(engine, 999, seed=seed))
    engine.train()
    return loss


def masters(engine: Any) -> dict[str, np.ndarray]:
    """The full fp32 master weight of every trained parameter. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if engine.zero_optimization_stage() == 0:
        return {n: p.detach().float().numpy().copy() for n, p in engine.module.named_parameters()}
    full = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    return {n: t.detach().clone().numpy() for n, t in full.items() if t is not None}


def gathered(params: Iterable[Any], **options: Any) -> Any:
    """DeepSpeed's GatheredParameters."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(params), **options)


def digest(tensor: Tensor) -> str:
    """Equal for equal bits."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def digests(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {n: hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for n, a in arrays.items()}


def master_bits(engine: Any) -> dict[str, str]:
    """Digests of the fp32 masters. A collective."""
    return digests(masters(engine))


def exact(engine: Any, dtype: str) -> dict[str, str]:
    """Digests of the fp32 masters, cast to the training dtype. A collective."""
    return {n: digest(torch.from_numpy(a).to(DTYPES[dtype])) for n, a in masters(engine).items()}


def live(engine: Any) -> dict[str, str]:
    """Digests of what this rank holds between steps: shards under ZeRO-3, else the replica."""
    named = engine.module.named_parameters()
    return {n: digest(getattr(p, "ds_tensor", p).data) for n, p in named}


def saved(engine: Any, name: str = "model") -> dict[str, Tensor]:
    """What ``save_16bit_model`` writes."""
    from tests.distributed.harness import scratch

    assert engine.save_16bit_model(str(scratch()), f"{name}.bin")
    torch.distributed.barrier()
    found = torch.load(scratch() / f"{name}.bin", weights_only=True)
    torch.distributed.barrier()  # before anybody writes it again
    return found


def heard(name: str = "log_rank0") -> list[str]:
    """What the plugin says in this process from here on, by that function of ``runtime.log``."""
    from ds_quant.runtime import log

    said: list[str] = []
    setattr(log, name, said.append)
    return said


@dataclass
class Sighting:
    """Bits of a parameter when a module was about to compute with it."""

    step: int
    forward: bool
    name: str
    bits: str


@contextmanager
def watch(engine: Any) -> Iterator[list[Sighting]]:
    """Records what forwards, backwards and recomputes see: at every fetch under ZeRO-3, before
    every module's forward under ZeRO-1 and 2.
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
    """What one rank saw of a training run. ``losses`` has one entry per micro-step."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    seen: list[Sighting] = field(default_factory=list)
    report: dict[str, Any] | None = None
    noted: Any = None  # by what was entered around it


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
    """Build an engine and train it; ``building`` goes to ``build``. Before step ``save_at`` a
    checkpoint is saved, and if it ``resumes``, loaded by an engine on other weights that goes on.
    """
    import ds_quant

    def play(places: range) -> None:
        with watch(engine) if watched else nullcontext([]) as seen:
            losses.extend(loss for place in places for loss in step(engine, place, seed))
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


def save(engine: Any) -> None:
    """With client state of the user's own."""
    from deepspeed import comm as dist

    engine.save_checkpoint(os.environ["TEST_SCRATCH"], "middle", {"epoch": 4})
    dist.barrier()


def mean_losses(runs: list[Run]) -> np.ndarray:
    """Losses averaged over ranks, (micro-steps,) float64."""
    return np.mean([run.losses for run in runs], axis=0)


def unsteady(seen: list[Sighting]) -> list[tuple[str, int]]:
    """(parameter, step) that were fetched with different bits within the step."""
    order = sorted(seen, key=lambda s: (s.name, s.step))
    by_step = groupby(order, key=lambda s: (s.name, s.step))
    return [key for key, sightings in by_step if len({s.bits for s in sightings}) > 1]
