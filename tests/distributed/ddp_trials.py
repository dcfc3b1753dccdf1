"""Behaviours under DDP: each a program that users write.

A trial runs in one process with DDP alone, with a block that quantizes nothing, and with lossy
schemes. Losses, gradients, weights and the state of the random generator are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ds_quant import ddp
from tests.distributed import fsdp2_trials as models
from tests.distributed.ddp_runs import (
    WIDTH,
    Net,
    Program,
    Run,
    assert_equal,
    assert_equal_on_all_ranks,
    assert_near,
    gradients_of,
    played,
    rows,
    sgd,
    three_steps,
)
from tests.distributed.surroundings import full_of_nan, late_messages

LOSSY = ("eden4", "qsdp")


class Differs(AssertionError):
    """Two runs have finished and differ."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a behaviour is tried.

    program: what a user does with a model.
    make: makes the model; options: of DistributedDataParallel.
    optimizer: makes its optimizer.
    block: further keys of the block.
    off: relative difference that the order of sums on four ranks may make.
    inside: context manager around the run with the block.
    schemes: that are tried.
    once: False if DDP rounds gradients twice and the block once.
    exact: True if the block quantizes nothing, whatever the scheme.
    rough: True if rounding errors may move the weights far.
    """

    program: Program = three_steps
    make: Callable[[], nn.Module] = Net
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    block: Mapping[str, Any] = field(default_factory=dict)
    off: float = 1e-5
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    once: bool = True
    schemes: tuple[str, ...] = ("full_precision", *LOSSY)
    exact: bool = False
    rough: bool = False

    def play(self, scheme: str | None) -> Run:
        """Run the program on this rank. scheme: None for DDP alone."""
        block = None
        if scheme is not None:
            node_size = max(1, dist.get_world_size() // 2)
            block = {"scheme": scheme, "node_size": node_size, "checksum_steps": 1, **self.block}
        torch.manual_seed(1)
        with nullcontext() if scheme is None else self.inside():
            return played(
                self.program, block, make=self.make, optimizer=self.optimizer, **self.options
            )

    @property
    def quick_schemes(self) -> tuple[str, ...]:
        """The schemes that `make test` tries: not qsdp, which is the nearest to full precision."""
        return tuple(scheme for scheme in self.schemes if scheme != "qsdp")

    def compare(self, schemes: tuple[str, ...]) -> None:
        """Run with DDP alone and with every one of ``schemes``, and compare.

        Raises:
            Differs: the runs differ by more than the scheme may.
        """
        plain = self.play(None)
        random_state = torch.get_rng_state()
        for scheme in schemes:
            found = self.play(scheme)
            try:
                same_state = torch.equal(torch.get_rng_state(), random_state)
                assert same_state, "the user's random numbers differ"
                self._require_alike(found, plain, scheme != "full_precision" and not self.exact)
            except AssertionError as error:
                raise Differs(f"{scheme}: {error}") from error

    def _require_alike(self, found: Run, plain: Run, is_lossy: bool) -> None:
        assert_equal_on_all_ranks(found.weights())
        if not is_lossy and self.once and dist.get_world_size() == 2:  # two summands have one order
            assert_equal(found, plain)
        elif not is_lossy:
            assert found.losses == pytest.approx(plain.losses, rel=1e-3, abs=self.off)
            assert_near(found, plain, off=self.off)
        elif not self.rough:
            largest = max(map(abs, plain.losses), default=1.0)
            assert found.losses == pytest.approx(plain.losses, abs=0.1 * largest)
            assert_near(found, plain, off=0.4)


# ---- programs ----


def accumulated(run: Run) -> None:
    """Every micro-step sends the gradients."""
    for seed in range(3):
        for micro_step in range(3):
            run.backward(10 * seed + micro_step, factor=1 / 3)
        run.update()


def without_sync(run: Run) -> None:
    """Whole gradients are kept on every rank until the last micro-step."""
    for seed in range(3):
        with run.model.no_sync():
            run.backward(10 * seed, factor=1 / 3)
            run.backward(10 * seed + 1, factor=1 / 3)
        run.backward(10 * seed + 2, factor=1 / 3)
        run.update()


def given_up(run: Run) -> None:
    """An accumulation is dropped, with and without messages."""
    run.step(0)
    with run.model.no_sync():
        run.backward(1)
    run.optimizer.zero_grad()
    run.backward(2)
    run.optimizer.zero_grad()
    run.step(3)


def uneven(run: Run) -> None:
    """Rank 1 has fewer batches than the others."""
    steps = 2 if dist.get_rank() == 1 else 5
    with run.model.join():
        for seed in range(steps):
            run.step(seed)
    run.gradients.clear()
    run.losses.clear()
    run.step(9)


def in_autocast(run: Run) -> None:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(rows(seed)).float().square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.update()


def loss_scaled(run: Run) -> None:
    """A gradient overflows on one rank: all of them leave the step out and lower the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(5):
        overflow = seed == 2 and dist.get_rank() == 1
        loss = run.model(rows(seed, dtype=run.dtype)).float().square().mean()
        scaler.scale(loss * (1e38 if overflow else 1.0)).backward()
        run.losses.append(0.0 if seed == 2 else float(loss.detach()))
        before = run.weights()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        is_same = all(torch.equal(before[name], p) for name, p in run.weights().items())
        assert is_same == (seed == 2)
    run.losses.append(scaler.get_scale())


def clipped(run: Run) -> None:
    for seed in range(3):
        run.backward(seed)
        run.losses.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)))
        run.update()


def two_forwards(run: Run) -> None:
    """Two forwards, one backward."""
    for seed in range(3):
        losses = [run.model(rows(10 * seed + part)).square().mean() for part in range(2)]
        sum(losses).backward()
        run.losses += [float(loss.detach()) for loss in losses]
        run.update()


def closed_over(run: Run) -> None:
    """The optimizer calls forward and backward."""
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.model(rows(seed)).square().mean()
            loss.backward()
            run.losses.append(float(loss.detach()))
            return loss

        run.optimizer.step(closure)
        run.gradients.append(gradients_of(run.model))


def schedule(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for seed in range(3):
        run.step(seed)
        scheduler.step()


def written_weights(run: Run) -> None:
    """All ranks write weights alike, and take them back."""
    for seed in range(2):
        run.step(seed)
        kept = copy.deepcopy(run.model.module.state_dict())
        with torch.no_grad():
            for p in run.model.parameters():
                p.data.mul_(0.5)
        with torch.no_grad():
            run.losses.append(float(run.model(rows(7)).square().mean()))
        run.model.module.load_state_dict(kept)
    run.step(5)


def perturbed(run: Run) -> None:
    """SAM: a second backward at weights that were moved along the first gradient."""
    for seed in range(3):
        run.backward(seed)
        moves = [0.05 * p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                p.add_(move)
        run.backward(seed)
        with torch.no_grad():
            for p, move in zip(run.model.parameters(), moves, strict=True):
                p.sub_(move)
        run.update()


def rolled_back(run: Run) -> None:
    three_steps(run)
    weights = copy.deepcopy(run.model.module.state_dict())
    states = copy.deepcopy(run.optimizer.state_dict())
    run.step(3)
    run.model.module.load_state_dict(weights)
    run.optimizer.load_state_dict(states)
    run.step(4)


def evaluated(run: Run) -> None:
    for seed in range(3):
        with torch.inference_mode(), run.model.no_sync():
            run.losses.append(float(run.model.eval()(rows(7)).square().mean()))
        run.model.train()
        run.step(seed)


def step_left_out(run: Run) -> None:
    """A gradient of one rank is not finite, so all ranks leave the step out."""
    run.step(0)
    for seed, value in ((1, float("inf")), (2, float("nan"))):
        run.backward(seed, factor=value if dist.get_rank() == 1 else 1.0)
        assert not nn.utils.clip_grad_norm_(run.model.parameters(), 1.0).isfinite()
        run.losses[-1] = 0.0
        run.optimizer.zero_grad()
        run.step(seed)


def averaged(run: Run) -> None:
    """An average of the weights is swapped in for an evaluation."""
    average = copy.deepcopy(run.model.module.state_dict())
    for seed in range(3):
        run.step(seed)
        kept = copy.deepcopy(run.model.module.state_dict())
        for name, values in kept.items():
            average[name].lerp_(values, 0.5)
        run.model.module.load_state_dict(average)
        with torch.no_grad():
            run.losses.append(float(run.model(rows(7)).square().mean()))
        run.model.module.load_state_dict(kept)


def not_finite_once(run: Run) -> None:
    """NaN is in the weights for one evaluation."""
    for seed in range(3):
        run.step(seed)
        weight = run.model.module.second.weight.data
        kept = weight.clone()
        weight[:2] = float("nan")
        with torch.no_grad():
            assert run.model(rows(7)).isnan().all()
        weight.copy_(kept)


def read_between(run: Run) -> None:
    """Gradients are read and scaled between two backwards, of which the last one sends them."""
    for seed in range(3):
        with run.model.no_sync():
            run.backward(10 * seed)
        for p in run.model.parameters():
            run.losses.append(float(p.grad.norm()))
            p.grad.mul_(0.5)
        run.backward(10 * seed + 1)
        run.update()


def several_optimizers(run: Run) -> None:
    """Two optimizers, and a third one that is made anew."""
    head = list(run.model.module.head.parameters())
    others = [p for p in run.model.parameters() if all(p is not each for each in head)]
    first = sgd(others)
    for seed in range(3):
        second = torch.optim.SGD(head, lr=0.05)
        run.backward(seed)
        first.step()
        second.step()
        run.gradients.append(gradients_of(run.model))
        run.model.zero_grad()


def generated(run: Run) -> None:
    """Methods of the module run between steps, past DDP's forward."""
    for seed in range(3):
        with torch.no_grad():
            run.losses.append(float(run.model.module.forward(rows(7)).square().mean()))
        run.step(seed)


def frozen_between(run: Run) -> None:
    """A parameter is frozen, and thawed: DDP must look for parameters without a gradient."""
    for seed in range(4):
        run.model.module.second.weight.requires_grad_(seed != 1)
        run.step(seed)


def with_a_frozen_teacher(run: Run) -> None:
    teacher = Net().requires_grad_(False)
    for seed in range(3):
        loss = (run.model(rows(seed)) - teacher(rows(seed))).square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.update()


def with_an_opponent(run: Run) -> None:
    """Two models are trained in turn, both with the block or both without."""
    other = DistributedDataParallel(Net())
    if run.front is not None:
        ddp.attach(other, {**run.front.run.scheme.block.model_dump(exclude_unset=True)})
    optimizer = sgd(other.parameters())
    for seed in range(3):
        loss = (other(rows(seed)) - run.model(rows(seed)).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))
        run.step(seed)


def failing_backward(run: Run) -> None:
    """A backward raises on all ranks before it has made a gradient; the loop goes on."""

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    for seed in range(3):
        run.step(seed)
        output = run.model(rows(seed))
        output.register_hook(fail)
        with pytest.raises(ArithmeticError):
            output.square().mean().backward()
        run.optimizer.zero_grad()


# ---- models ----


class PartlyUsed(Net):
    """A layer that some ranks use, one that none uses, and one that changes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if (self.forwards + dist.get_rank()) % 2:
            x = x + self.sometimes(x)
        return super().forward(x)


class Int8Base(Net):
    """A frozen int8 weight beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(WIDTH * WIDTH, dtype=torch.int8).view(WIDTH, WIDTH)
        self.base = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.01 * torch.tanh(x @ self.base.float() / 128))


class FrozenPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class Tied(Net):
    """One matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) + 4 * dist.get_rank()
        return super().forward(torch.tanh(self.out(x)) + self.table(places))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = checkpoint(self.first, x, use_reentrant=False)
        return self.head(torch.tanh(self.second(torch.tanh(self.norm(hidden)))))


class Normed(Net):
    """With running statistics, which DDP broadcasts from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class TwoDtypes(Net):
    """A head in bf16 and one in fp64, both trained: buckets of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(5, 8).bfloat16()
        self.double_head = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        small = self.small(super().forward(x).bfloat16())
        return self.double_head(small.double()).float()


class Empty(Net):
    """With a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class Convolved(nn.Module):
    """Weights and gradients that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 8, 3)
        self.second = nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(4, 4, 4, 2).repeat(1, 1, 2, 4).contiguous(memory_format=torch.channels_last)
        return self.second(functional.relu(self.first(image)))


def compiled() -> nn.Module:
    net = Net()
    net.compile(backend="eager")
    return net


def bf16() -> nn.Module:
    return Net().bfloat16()


def fp16() -> nn.Module:
    return Net().half()


# ---- optimizers ----


def zero_redundancy(parameters: Any) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)


def without_states(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def decay_groups(parameters: Any) -> torch.optim.Optimizer:
    tensors = list(parameters)
    groups = [
        {"params": [p for p in tensors if p.dim() > 1], "weight_decay": 0.1, "lr": 0.1},
        {"params": [p for p in tensors if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def trained_only(parameters: Any) -> torch.optim.Optimizer:
    return sgd([p for p in parameters if p.requires_grad])


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Every rank has whole gradients. Vectors are left as they are."""
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)


UNUSED = {"find_unused_parameters": True}

TRIALS: dict[str, Trial] = {
    # Rows of the table of behaviours.
    "MoE, every rank all experts": Trial(make=models.Experts, options=UNUSED),
    "Ulysses: one sequence over all ranks": Trial(make=models.SplitSequence),
    "frozen int8 base": Trial(make=Int8Base, optimizer=trained_only),
    "frozen bf16 base, fp32 adapter": Trial(
        make=models.MixedDtypes, optimizer=trained_only, off=1e-3
    ),
    "frozen module": Trial(make=FrozenPart, optimizer=trained_only),
    "unused parameter": Trial(make=PartlyUsed, options=UNUSED),
    "a method other than forward, such as `generate`": Trial(program=generated),
    "low-rank adapter": Trial(make=models.LowRank, optimizer=trained_only),
    "QLoRA: 4-bit base stored as bf16 (bitsandbytes)": Trial(
        make=models.PackedBase, optimizer=trained_only
    ),
    "tied embeddings": Trial(make=Tied),
    "weight used by another module": Trial(make=models.Borrowing),
    "activation checkpointing": Trial(make=Checkpointed),
    "a layer that runs twice in a forward": Trial(make=models.Twice),
    "layers that run in some forwards only": Trial(make=PartlyUsed, options=UNUSED),
    "zero-size parameter": Trial(make=Empty),
    "dropout": Trial(make=models.Dropping),
    "`keep_in_fp32_modules`: buffers that bf16 would round": Trial(make=models.WithBuffer),
    "gradient accumulation": Trial(program=accumulated),
    "accumulation of whole gradients (`no_sync`)": Trial(program=without_sync),
    "fp16 with dynamic loss scale": Trial(program=loss_scaled, make=Net, off=1e-3),
    "torch autocast": Trial(program=in_autocast, off=0.05),
    "compiled layers, backend eager": Trial(make=compiled),
    "clipping": Trial(program=clipped),
    "two forwards before one backward": Trial(program=two_forwards),
    "small gradient buckets": Trial(options={"bucket_cap_mb": 0.005}),
    "small gradient buckets, accumulated": Trial(
        program=without_sync, options={"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True}
    ),
    "order of gathers and reductions (prefetch, overlap)": Trial(options={"static_graph": True}),
    "SGD": Trial(),
    "Adagrad": Trial(optimizer=adagrad, rough=True),
    "Muon": Trial(optimizer=muon, rough=True, off=1e-3),
    "two parameter groups": Trial(optimizer=decay_groups),
    "a schedule of learning rates": Trial(program=schedule),
    "a step that calls forward and backward (closure)": Trial(program=closed_over),
    "several optimizers, one made anew, one per parameter in backward, none of torch's": Trial(
        program=several_optimizers
    ),
    "averaged weights, swapped in for an evaluation": Trial(program=averaged),
    "NaN or infinity that is in the weights once": Trial(program=not_finite_once),
    "gradients read between micro-steps": Trial(program=read_between),
    "a first forward in inference mode": Trial(program=evaluated),
    "weights that user code writes, by any means": Trial(program=written_weights),
    "weights perturbed between two forwards of a step (SAM)": Trial(program=perturbed),
    "rollback in memory": Trial(program=rolled_back),
    "a step left out for gradients that are not finite": Trial(program=step_left_out),
    "parameters frozen between steps or micro-steps": Trial(program=frozen_between, options=UNUSED),
    "an accumulation that is given up": Trial(program=given_up),
    "evaluations between steps": Trial(program=evaluated),
    "a frozen reference or teacher beside the model": Trial(program=with_a_frozen_teacher),
    "several models in one process, trained in turn": Trial(program=with_an_opponent),
    "`exclude`": Trial(block={"exclude": ["*"]}, exact=True),
    "`warmup_steps`": Trial(block={"warmup_steps": 9}, exact=True),
    "`payload_checksum`": Trial(block={"payload_checksum": True}),
    "`metrics`": Trial(block={"metrics": {"file": "/dev/null", "interval": 1}}),
    "`slices`": Trial(block={"slices": 3}),
    "`backend`": Trial(block={"backend": "torch"}),
    "memory that is not zeroed": Trial(program=accumulated, inside=full_of_nan),
    "messages that arrive late": Trial(
        program=accumulated, inside=late_messages, options={"bucket_cap_mb": 0.005}
    ),
    "a codec of your own": Trial(
        block={"weights": {"codec": "fp8"}, "gradients": {"codec": "fp8"}},
        inside=models.codec_of_the_page,
        schemes=("qsdp", "zeropp"),
    ),
    # Of DDP alone.
    # Joined ranks have other states of the optimizer, with or without the block.
    "uneven inputs (`join`)": Trial(program=uneven, optimizer=without_states),
    "parameters unused on some ranks, `find_unused_parameters`": Trial(
        program=without_sync, make=PartlyUsed, options=UNUSED
    ),
    "`gradient_as_bucket_view`": Trial(
        program=accumulated, options={"gradient_as_bucket_view": True}
    ),
    "one large bucket": Trial(options={"bucket_cap_mb": 1000}),
    "bf16 weights": Trial(make=bf16, off=0.02),
    "fp16 weights": Trial(make=fp16, off=0.02, once=False),
    "gradients of several dtypes": Trial(make=TwoDtypes, off=0.02),
    "buffers that DDP broadcasts": Trial(make=Normed),
    "`channels_last`": Trial(make=Convolved),
    "`ZeroRedundancyOptimizer`": Trial(optimizer=zero_redundancy),
    "a backward that raises": Trial(program=failing_backward),
}
