"""Behaviours under FSDP2 that no other test has: each a program that users write.

A trial runs twice in one process, with FSDP2 alone and with a block. Losses, weights, the weights
that forward uses and the state of the random generator are compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from ds_quant import fsdp2
from tests.distributed.fsdp2_meshes import mesh_of
from tests.distributed.fsdp2_runs import (
    WIDTH,
    Net,
    Program,
    Run,
    rows,
    sgd,
    sharded,
)
from tests.distributed.harness import scratch

EXACT_SCHEMES = ("full_precision", "hybrid", "lossless")
SCHEMES = (*EXACT_SCHEMES, "qsdp", "sdp4bit", "eden4")

# How far a lossy scheme may be off.
LOSSES = 0.1  # of the largest loss
# Of the distance that a run has moved a parameter. 4-bit sums are off by a tenth of their norm, a
# lost or doubled gradient by half of it or more.
MOVEMENT = 0.35
# Weights of a forward: of their norm, for 8-bit weights, and of their movement, for 4-bit
# differences. A forward that misses one of three steps is off by a third of the movement.
FORWARD, FORWARD_OF_MOVEMENT = 0.03, 0.1


class Differs(AssertionError):
    """Two runs have finished and differ."""


# ---- meshes ----


def beside_tensor_parallel() -> Any:
    """Two shards of two parts of the first two layers, and of the other layers."""
    mesh = mesh_of((2, 2), "fsdp", "tp")
    model = Net()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return wrapped_on(model, mesh["fsdp"])


def two_replicas() -> Any:
    return sharded(mesh_of((2, 2), "replica", "shard"))


def four_replicated() -> Any:
    return sharded(mesh_of((4, 1), "replica", "shard"))


def experts_apart() -> Any:
    """The first layer differs between two halves of the ranks, as experts do."""
    mesh = mesh_of((2, 2), "fsdp", "ep")
    model = Net()
    with torch.no_grad():
        model.first.weight.mul_(1 + dist.get_rank() % 2)
    fully_shard(model.first, mesh=mesh["fsdp"])
    return wrapped_on(model, mesh_of((4,), "all"))


def wrapped_on(model: Net, mesh: DeviceMesh) -> Any:
    for layer in (model.first, model.second, model.third):
        if not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


REPLICAS = "replicas"
REPLICATED = "replicated"
TENSOR_PARALLEL = "tensor parallel"
EXPERTS = "experts"
# Models of four ranks, by the name of their mesh.
ON_MESHES: dict[str, Callable[[], Any]] = {
    TENSOR_PARALLEL: beside_tensor_parallel,
    EXPERTS: experts_apart,
    REPLICAS: two_replicas,
    REPLICATED: four_replicated,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a behaviour is tried.

    loop: what a user does with a model.
    model: makes the wrapped model.
    optimizer: makes its optimizer.
    block: further keys of the block.
    scheme: that `make test` tries, on two nodes of one rank. All others and nodes of two ranks are
        slow tests.
    apart: relative difference that the order of sums on four ranks may make; more where a forward
        rounds to 16 bits.
    schemes: of the slow tests.
    inside: context manager around the run with the block.
    exact: True if the block quantizes nothing, whatever the scheme.
    fails_alone_on: names of meshes on which the loop fails with FSDP2 alone.
    rough: True if the optimizer makes steps of one length from small and large gradients, so that
        noise moves the weights of a lossy scheme.
    """

    loop: Program
    model: Callable[[], Any] = sharded
    optimizer: Callable[[Any], Any] = sgd
    block: Mapping[str, Any] = field(default_factory=dict)
    scheme: str = "hybrid"
    schemes: tuple[str, ...] = SCHEMES
    apart: float = 1e-6
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    exact: bool = False
    rough: bool = False
    fails_alone_on: tuple[str, ...] = ()

    @property
    def meshes(self) -> tuple[str, ...]:
        """Names of the meshes on which the loop is tried, too: none with a model of its own."""
        if self.model is not sharded:
            return ()
        return tuple([mesh for mesh in ON_MESHES if mesh not in self.fails_alone_on])

    def play(self, scheme: str | None, mesh: str = "") -> Run:
        """Run the loop on this rank.

        scheme: None for FSDP2 alone. mesh: one of ``meshes``, or "" for one of all ranks.
        """
        torch.manual_seed(1)
        model = ON_MESHES[mesh]() if mesh else self.model()
        optimizer = self.optimizer(model)
        played = Run(model, optimizer, None)
        played.held.append(played.weights())  # at the start
        with nullcontext() if scheme is None else self.inside():
            if scheme is not None:
                block = block_of(scheme) | dict(self.block)
                if mesh == REPLICAS:  # each is a node: the mesh sets the node size
                    del block["node_size"]
                played.front = fsdp2.attach(model, block, optimizer=optimizer)
            self.loop(played)
            played.look()
        return played

    def compare(self, scheme: str, mesh: str = "") -> None:
        """Run with FSDP2 alone and with a scheme, and compare. Arguments as of ``play``.

        Raises:
            Differs: the runs differ by more than the scheme may.
        """
        plain = self.play(None, mesh)
        random_state = torch.get_rng_state()
        quantized = self.play(scheme, mesh)
        try:
            same_state = torch.equal(torch.get_rng_state(), random_state)
            assert same_state, "the user's random numbers differ"
            self._require_alike(scheme, quantized, plain)
        except AssertionError as error:
            raise Differs(str(error)) from error

    def _require_alike(self, scheme: str, quantized: Run, plain: Run) -> None:
        if not (self.exact or scheme in EXACT_SCHEMES):
            require_near(quantized, plain, rough=self.rough)
        elif dist.get_world_size() == 2:  # two summands have one order
            require_equal(quantized, plain)
        else:
            require_close(quantized, plain, self.apart)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A model that ``attach`` refuses. message: a pattern of its error."""

    model: Callable[[], Any]
    message: str

    def require(self) -> None:
        """Attach on this rank.

        Raises:
            AssertionError: it is not refused, or with another message.
        """
        model = self.model()
        with pytest.raises(ValueError, match=self.message):
            fsdp2.attach(model, "qsdp", optimizer=sgd(model))


def block_of(scheme: str) -> dict[str, Any]:
    """Return a block of two nodes."""
    node_size = dist.get_world_size() // 2
    return {
        "scheme": scheme,
        "node_size": node_size,
        "min_numel": 64,
        "allow_full_replica": True,
    }


# ---- comparisons ----


def require_equal(quantized: Run, plain: Run) -> None:
    """Losses, weights and forward weights have equal bits."""
    assert repr(quantized.losses) == repr(plain.losses), "losses"  # NaN equals NaN
    for title, found, expected in _compared_weights(quantized, plain):
        assert _bits_equal(found, expected), title


def require_close(quantized: Run, plain: Run, apart: float) -> None:
    """Losses, weights and forward weights differ by the order of sums at most."""
    torch.testing.assert_close(
        quantized.losses, plain.losses, rtol=apart, atol=apart, equal_nan=True, msg=_losses
    )
    for title, found, expected in _compared_weights(quantized, plain):
        if not _bits_equal(found, expected):
            error = _distance(found, expected)
            assert error <= apart * _norm(expected) + apart, f"{title}: {error}"


def _compared_weights(quantized: Run, plain: Run) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a title and the weights of both runs, for every look and parameter."""
    for kind in ("held", "forwards"):
        looks = zip(getattr(quantized, kind), getattr(plain, kind), strict=True)
        for place, (found, expected) in enumerate(looks):
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                yield f"weights ({kind}) of {name}, look {place}", found[name], values


def require_near(quantized: Run, plain: Run, *, rough: bool) -> None:
    """A lossy run moves as the exact one does, and computes with its own weights."""
    largest = max(abs(loss) for loss in plain.losses if math.isfinite(loss))
    torch.testing.assert_close(
        quantized.losses, plain.losses, rtol=0, atol=LOSSES * largest, equal_nan=True, msg=_losses
    )
    begin, end, own = plain.held[0], plain.held[-1], quantized.held[-1]
    for name, values in end.items():
        if not rough and not _bits_equal(own[name], values):
            error = _distance(own[name], values)
            moved = _distance(values, begin[name])
            assert error <= MOVEMENT * moved, f"weights of {name} are off by {error} of {moved}"
    looks = zip(quantized.forwards, quantized.held[1:], strict=True)
    for place, (forward, held) in enumerate(looks):
        for name, values in forward.items():
            if _bits_equal(values, held[name].to(values.dtype)):
                continue
            moved = _distance(held[name], begin[name])
            allowed = FORWARD * _norm(held[name]) + FORWARD_OF_MOVEMENT * moved
            error = _distance(values, held[name])
            assert error <= allowed, f"forward of {name}, look {place}: {error}, not {allowed}"


def _losses(message: str) -> str:
    return f"losses: {message}"


def _bits_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if the bits are equal, those of NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _norm(values: Tensor) -> float:
    return float(values.double().norm())


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm())


# ---- loops ----


def three_steps(run: Run) -> None:
    for seed in range(3):
        run.step(seed)


def clipped(run: Run) -> None:
    for seed in range(3):
        run.backward(seed)
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.losses.append(float(norm.full_tensor()))
        run.update()


def summed(run: Run) -> None:
    """The user turns the mean over ranks into a sum, and scales the loss instead."""
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            module.set_gradient_divide_factor(1.0)
    for seed in range(3):
        run.backward(seed, factor=1 / dist.get_world_size())
        run.update()


def without_sync(run: Run) -> None:
    """Whole gradients are kept on every rank until the last micro-step."""
    for seed in range(3):
        for micro_step in range(3):
            run.model.set_requires_gradient_sync(micro_step == 2)
            run.backward(10 * seed + micro_step, last=micro_step == 2, factor=1 / 3)
        run.update()


def accumulated(run: Run) -> None:
    for seed in range(3):
        for micro_step in range(3):
            run.backward(10 * seed + micro_step, last=micro_step == 2, factor=1 / 3)
        run.update()


def in_autocast(run: Run) -> None:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.model(rows(seed)).float().square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.update()


def rolled_back(run: Run) -> None:
    """Weights and states of the optimizer are taken back to those of two steps before."""
    three_steps(run)
    weights = [p.detach().to_local().clone() for p in run.model.parameters()]
    states = copy.deepcopy(run.optimizer.state_dict())
    run.step(3)
    run.step(4)
    with torch.no_grad():
        for p, values in zip(run.model.parameters(), weights, strict=True):
            p.to_local().copy_(values)
    run.optimizer.load_state_dict(states)
    run.evaluate()
    run.look()
    run.step(5)


def not_finite_once(run: Run) -> None:
    """NaN and infinities are in the weights for one evaluation."""
    three_steps(run)
    for value in (float("nan"), float("inf")):
        weight = run.model.second.weight.detach().to_local()
        kept = weight.clone()
        weight[:2] = value
        run.evaluate()
        weight.copy_(kept)
        run.evaluate()
        run.look()
        run.step(3)


def step_left_out(run: Run) -> None:
    """A gradient of one rank is not finite, so all ranks leave the step out."""
    run.step(0)
    for seed, value in ((1, float("inf")), (2, float("nan"))):
        run.backward(seed, factor=value if dist.get_rank() == 1 else 1.0)
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 1.0).full_tensor()
        assert not norm.isfinite()
        run.losses[-1] = 0.0
        run.optimizer.zero_grad()
        run.step(seed)


def loss_scaled(run: Run) -> None:
    """Dynamic loss scaling, as for fp16: a step whose gradients overflow is left out."""
    scale = 2.0**10
    for seed in range(5):
        factor = 1e30 if seed == 2 and dist.get_rank() == 1 else 1.0
        run.backward(seed, factor=scale * factor)
        run.losses[-1] /= scale * factor
        gradients = [p.grad.to_local() for p in run.model.parameters()]
        found = torch.tensor(float(not all(bool(g.isfinite().all()) for g in gradients)))
        dist.all_reduce(found)
        if found:
            scale /= 2
            run.optimizer.zero_grad()
            continue
        torch._foreach_mul_(gradients, 1 / scale)
        run.update()
    run.losses.append(scale)


def with_a_frozen_teacher(run: Run) -> None:
    """Another model is evaluated beside the one that trains."""
    teacher = sharded()
    teacher.requires_grad_(False)
    if run.front is not None:
        fsdp2.attach(teacher, block_of(run.front.run.scheme.name), optimizer=[])
    for seed in range(3):
        with torch.no_grad():
            target = teacher(rows(seed))
        loss = (run.model(rows(seed)) - 0.5 * target).square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.update()


def with_an_opponent(run: Run) -> None:
    """Two models train in turns, one through the other, as in a GAN."""
    other = sharded()
    its_optimizer = sgd(other)
    if run.front is not None:
        fsdp2.attach(other, block_of(run.front.run.scheme.name), optimizer=its_optimizer)
    for seed in range(3):
        made = run.model(rows(seed))
        made = functional.pad(made, (0, WIDTH - made.shape[1]))  # as wide as the opponent's rows
        loss = other(made).square().mean()
        loss.backward()
        run.update()
        its_optimizer.zero_grad()  # of the loss of the first model
        its_loss = other(rows(10 + seed)).square().mean() - other(made.detach()).mean()
        its_loss.backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
        run.losses += [float(loss.detach()), float(its_loss.detach())]


def prefetched(run: Run) -> None:
    model = run.model
    layers = [model.first, model.second, model.third]
    model.set_modules_to_forward_prefetch(layers[:1])
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[2].set_modules_to_backward_prefetch(layers[:2][::-1])
    accumulated(run)
    run.evaluate()
    run.step(5)


def kept_after_backward(run: Run) -> None:
    """Weights stay gathered between micro-steps."""
    for seed in range(3):
        for micro_step in range(3):
            last = micro_step == 2
            run.model.set_reshard_after_backward(last)
            run.backward(10 * seed + micro_step, last=last, factor=1 / 3)
        run.update()


def gathered_ahead(run: Run) -> None:
    for seed in range(3):
        for module in (run.model, run.model.first, run.model.second):
            handle = module.unshard(async_op=True)
            if handle is not None:
                handle.wait()
        run.step(seed)


def two_forwards(run: Run) -> None:
    """One backward of two forwards, as contrastive losses have."""
    for seed in range(3):
        one, other = run.model(rows(seed)), run.model(rows(10 + seed))
        loss = (one - other).square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        run.update()


def two_losses(run: Run) -> None:
    """Two backwards through one forward."""
    for seed in range(3):
        out = run.model(rows(seed))
        run.model.set_is_last_backward(False)
        out.square().mean().backward(retain_graph=True)
        run.model.set_is_last_backward(True)
        out.abs().mean().backward()
        run.losses.append(float(out.detach().sum()))
        run.update()


def another_entry(run: Run) -> None:
    """A method other than forward, as generation has."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(run.model, "generate")
    three_steps(run)
    with torch.no_grad():
        run.losses.append(float(run.model.generate(rows(7)).sum()))
    run.model.reshard()
    run.step(3)


def reduced_by_the_user(run: Run) -> None:
    """Parameters that ``fully_shard`` was told to ignore."""
    for seed in range(3):
        run.backward(seed)
        for p in run.model.ignored:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        run.update()


def schedule(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    for seed in range(4):
        run.step(seed)
        scheduler.step()


def closed_over(run: Run) -> None:
    """The optimizer's step calls forward and backward, as L-BFGS does."""
    for seed in range(3):

        def closure(seed: int = seed) -> float:
            run.optimizer.zero_grad()
            run.backward(seed)
            return run.losses[-1]

        run.optimizer.step(closure)
    run.optimizer.zero_grad()


# ---- models ----


def wrapped(make: Callable[[], nn.Module], *, layers: tuple[str, ...] = (), **options: Any) -> Any:
    """Make a model and wrap it. layers: those that are wrapped apart; by default all children."""
    torch.manual_seed(0)
    model = make()
    for name, layer in model.named_children():
        if not layers or name in layers:
            fully_shard(layer, **options)
    return fully_shard(model, **options)


class LowRank(Net):
    """A frozen weight and a trained correction, its second factor starting at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 9, bias=False)
        self.up = nn.Linear(9, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(hidden) + self.up(self.down(hidden)))
        return self.head(torch.tanh(self.third(hidden)))


class MixedDtypes(LowRank):
    """A frozen bf16 base with an fp32 adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.second.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        base = self.second(hidden.bfloat16()).float()
        hidden = torch.tanh(base + self.up(self.down(hidden)))
        return self.head(torch.tanh(self.third(hidden)))


class PackedBase(LowRank):
    """As ``LowRank``, on a base of bit patterns stored as bf16."""

    def __init__(self) -> None:
        from tests.distributed.test_packed import IN, Packed

        super().__init__()
        self.second = Packed("module state")
        self.into = nn.Linear(WIDTH, IN)
        self.width = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        base = self.second(self.into(hidden))[:, : self.width]
        hidden = torch.tanh(base + self.up(self.down(hidden)))
        return self.head(torch.tanh(self.third(hidden)))


class Borrowing(Net):
    """The root uses the weight of a module that has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(torch.tanh(self.first(x)), self.table.weight)
        x = self.third(torch.tanh(self.second(torch.tanh(x))))
        return functional.linear(self.head(x), self.table.weight[:, :5])


class Twice(Net):
    """One layer runs twice in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first, self.third):
            x = torch.tanh(layer(x))
        return self.head(x)


class WithBuffer(Net):
    """A buffer that bf16 would round, and counts of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", 1 + torch.arange(5) * 2.0**-12)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        assert self.gain.dtype == torch.float32
        self.calls += 1
        return super().forward(x) * self.gain


class Dropping(Net):
    """With dropout, whose random numbers are the user's."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = functional.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return self.head(x)


class Experts(Net):
    """Four experts, to which ranks send other rows; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        weights, chosen = self.gate(hidden).softmax(-1).max(-1)
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows_of_expert = (chosen == index).nonzero().flatten()
            out = expert(hidden[rows_of_expert]) * weights[rows_of_expert, None]
            mixed = mixed.index_add(0, rows_of_expert, out)
        return self.head(torch.tanh(self.third(torch.tanh(self.second(hidden + mixed)))))


class SplitSequence(Net):
    """Ranks share one sequence: each has part of it, and exchanges heads for tokens (Ulysses)."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        world = dist.get_world_size()
        tokens, width = x.shape
        hidden = torch.tanh(self.first(x)).view(tokens, world, width // world)
        heads = hidden.transpose(0, 1).contiguous()
        whole = all_to_all_single(torch.empty_like(heads), heads).flatten(0, 1)
        mixed = torch.softmax(whole @ whole.T, -1) @ whole
        back = mixed.view(world, tokens, width // world)
        back = all_to_all_single(torch.empty_like(back), back.contiguous())
        x = back.transpose(0, 1).reshape(tokens, width)
        return self.head(torch.tanh(self.third(torch.tanh(self.second(x)))))


class Generating(Net):
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.head(x)


def with_ignored() -> Any:
    """The second layer and the head's bias are left out of sharding."""
    torch.manual_seed(0)
    model: Any = Net()
    ignored = {model.second.weight, model.head.bias}
    fully_shard(model.first)
    fully_shard(model.third)
    model = fully_shard(model, ignored_params=ignored)
    model.ignored = [model.second.weight, model.head.bias]
    return model


def offloaded() -> Any:
    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


def compiled_layers() -> Any:
    model = sharded()
    for layer in (model.first, model.second, model.third):
        layer.compile(backend="eager")
    return model


# ---- optimizers ----


def decay_groups(model: Any) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "lr": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.05},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def trained_only(model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def adagrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


class GatheringMuon(torch.optim.Optimizer):
    """Muon as users write it for DTensors: every rank orthogonalizes whole matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad
                if p.dim() == 2:
                    whole = orthogonal(p.grad.full_tensor())
                    update = distribute_tensor(whole, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix after five Newton-Schulz iterations."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        squared = x @ x.T
        x = 3.4445 * x + (-4.7750 * squared + 2.0315 * squared @ squared) @ x
    return x


def gathering_muon(model: Any) -> torch.optim.Optimizer:
    return GatheringMuon(model.parameters())


# ---- surroundings ----


@contextmanager
def codec_of_the_page() -> Iterator[None]:
    """The module of docs/adding_a_codec.md can be imported."""
    from tests.distributed.test_module_codec import install

    install(scratch() / f"codec {dist.get_rank()}")
    yield
