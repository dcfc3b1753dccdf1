"""FSDP2 where every rank holds all parameters: ``replicate()``, and replicas of one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from tests import needs
from tests.distributed.fsdp2_meshes import mesh_of
from tests.distributed.fsdp2_runs import adam
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.thin import thinned

WIDTH = 64
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Two layers, a norm and a head of uneven rows. hidden: width between the layers."""

    def __init__(self, hidden: int = 2 * WIDTH + 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.norm(self.first(x)))))


def replicated(model: Net | None = None, **options: Any) -> Any:
    """Call ``replicate()`` on the layers and on the root."""
    mesh = mesh_of((dist.get_world_size(),), "replica")
    return _wrapped(model or Net(), replicate, mesh, options)


def in_shards_of_one_rank(**options: Any) -> Any:
    """Call ``fully_shard`` with a mesh of replicas of one rank."""
    mesh = mesh_of((dist.get_world_size(), 1), "replica", "shard")
    return _wrapped(Net(), fully_shard, mesh, options)


def _wrapped(
    model: Net, wrap: Callable[..., Any], mesh: DeviceMesh, options: dict[str, Any]
) -> Any:
    for layer in (model.first, model.second):
        wrap(layer, mesh=mesh, **options)
    return wrap(model, mesh=mesh, **options)


MODELS = {"replicate()": replicated, "(N, 1)": in_shards_of_one_rank}


def rows(seed: int) -> Tensor:
    """Return other rows on every rank and for every seed."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator)


def backward(model: Any, seed: int) -> float:
    x = rows(seed)
    loss = (model(x).float() - x[:, :5]).square().mean()
    loss.backward()
    return float(loss.detach())


def train(
    kind: str,
    block: dict[str, Any] | None,
    *,
    steps: int = 5,
    micro_steps: int = 1,
    declare: str = "set_requires_all_reduce",
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> tuple[Any, list[float]]:
    """Return a model that has trained on the same rows in every step, and the losses of this rank.

    block: None for FSDP2 alone. declare: method that declares the last backward of a step.
    prepare: is called with the model before it trains.
    """
    model = MODELS[kind](**options)
    prepare(model)
    optimizer = adam(model)
    if block is not None:
        fsdp2.attach(model, {"min_numel": 64, **block}, optimizer=optimizer)
    losses = []
    for _ in range(steps):
        for micro_step in range(micro_steps):
            getattr(model, declare)(micro_step == micro_steps - 1)
            losses.append(backward(model, micro_step))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Compare the bits of all weights between the ranks."""
    own = {name: p.to_local().detach().tolist() for name, p in model.named_parameters()}
    first, *others = of_all_ranks(own)
    assert all(other == first for other in others)


# ---- nothing quantized ----


@pytest.mark.parametrize(
    ("kind", "micro_steps"), thinned(product(MODELS, (1, 2)), lambda _, micro_steps: True)
)
@on_ranks(2)
def test_full_precision_trains_as_fsdp2_alone_bit_for_bit(kind: str, micro_steps: int) -> None:
    plain, plain_losses = train(kind, None, micro_steps=micro_steps)
    block = {"scheme": "full_precision", "node_size": 1}
    model, losses = train(kind, block, micro_steps=micro_steps)
    assert losses == plain_losses
    expected = weights_of(plain)
    assert all(torch.equal(found, expected[name]) for name, found in weights_of(model).items())


@pytest.mark.parametrize(
    ("kind", "node_size", "micro_steps"),
    thinned(product(MODELS, (1, 2, 4), (1, 2)), lambda *case: case == ("replicate()", 2, 2)),
)
@on_ranks(4)
def test_full_precision_trains_as_fsdp2_alone_on_four_ranks(
    kind: str, node_size: int, micro_steps: int
) -> None:
    plain, plain_losses = train(kind, None, micro_steps=micro_steps)
    block = {"scheme": "full_precision", "node_size": node_size}
    model, losses = train(kind, block, micro_steps=micro_steps)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_equal_on_all_ranks(model)
    expected = weights_of(plain)
    for name, found in weights_of(model).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=2e-5)


def summed(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            module.set_gradient_divide_factor(1.0)


def unused_head_weight(model: Any) -> None:
    model.head.forward = lambda x: x[:, :5] + model.head.bias


@pytest.mark.parametrize("prepare", [summed, unused_head_weight])
@on_ranks(2)
def test_factors_and_unused_parameters_are_those_of_fsdp2(prepare: Callable[[Any], None]) -> None:
    plain, plain_losses = train("replicate()", None, prepare=prepare)
    model, losses = train("replicate()", {"scheme": "full_precision"}, prepare=prepare)
    assert losses == plain_losses
    expected = weights_of(plain)
    assert all(torch.equal(found, expected[name]) for name, found in weights_of(model).items())


class Branches(nn.Module):
    """Each rank may take another branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        hidden = self.trunk(x)
        return hidden if branch is None else hidden + self.branches[branch](x)


@on_ranks(2)
def test_branches_that_some_ranks_use_may_be_frozen_before_the_last_backward() -> None:
    """A rank that has not used a branch keeps zeros for it, which the last backward reduces."""
    needs.torch("2.13", "has no set_reduce_scatter_unused_params")
    rank = dist.get_rank()
    mesh = mesh_of((2, 1), "replica", "shard")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fully_shard(Branches(), mesh=mesh, mp_policy=bf16)
    model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fsdp2.attach(
        model, {"scheme": "full_precision", "allow_full_replica": True}, optimizer=optimizer
    )
    beside = Branches().bfloat16()
    model.set_is_last_backward(False)
    for each in (model, beside):
        each(rows(0).bfloat16(), rank).float().square().mean().backward()
    expected = [[p.grad for p in branch.parameters()] for branch in beside.branches]
    model.branches.requires_grad_(False)
    model.set_is_last_backward(True)
    model(rows(1), None).float().square().mean().backward()
    for branch, of_branch in zip(model.branches, expected, strict=True):
        for parameter, own in zip(branch.parameters(), of_branch, strict=True):
            total = torch.zeros_like(parameter.full_tensor()) if own is None else own.float()
            dist.all_reduce(total)
            torch.testing.assert_close(parameter.grad.full_tensor(), total / 2)


# ---- lossy schemes ----


@pytest.mark.parametrize(
    ("kind", "scheme", "node_size", "micro_steps"),
    thinned(
        product(MODELS, ("eden4", "qsdp", "sdp4bit"), (1, 2, 4), (1, 2)),
        lambda *case: case in (("replicate()", "eden4", 2, 2), ("(N, 1)", "qsdp", 1, 1)),
    ),
)
@on_ranks(4)
def test_lossy_schemes_train_and_all_ranks_hold_equal_bits(
    kind: str, scheme: str, node_size: int, micro_steps: int
) -> None:
    plain, plain_losses = train(kind, None, steps=8, micro_steps=micro_steps)
    block = {"scheme": scheme, "node_size": node_size}
    model, losses = train(kind, block, steps=8, micro_steps=micro_steps)
    assert_equal_on_all_ranks(model)
    assert losses != plain_losses
    assert plain_losses[-1] < 0.5 * plain_losses[0]
    assert losses == pytest.approx(plain_losses, abs=0.05 * plain_losses[0])


# ---- a first checkpoint ----


class OwnZeroGrad(torch.optim.AdamW):
    """An optimizer that drops gradients in its own way."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class WithoutSuper(torch.optim.AdamW):
    """An optimizer whose ``zero_grad`` calls no other."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@pytest.mark.parametrize(
    ("kind", "optimizer_class"),
    thinned(
        product(MODELS, (torch.optim.AdamW, OwnZeroGrad, WithoutSuper)),
        lambda kind, optimizer_class: (kind == "(N, 1)") == (optimizer_class is WithoutSuper),
    ),
)
@on_ranks(2)
def test_a_first_checkpoint_amid_an_accumulation_drops_no_gradients(
    kind: str, optimizer_class: type[torch.optim.AdamW]
) -> None:
    """torch makes gradients of zeros, steps the optimizer for its state, and drops them."""

    def trained(block: Any, *, seeds: tuple[int, ...], gives_up: bool) -> dict[str, Tensor]:
        """gives_up: drop the gradients of all backwards before the last one."""
        model = MODELS[kind]()
        optimizer = optimizer_class(model.parameters(), lr=1e-2)
        if block is not None:
            fsdp2.attach(model, block, optimizer=optimizer)
        *earlier, last = seeds
        model.set_requires_all_reduce(False)
        for seed in earlier:
            backward(model, seed)
        get_state_dict(model, optimizer)
        if gives_up:
            optimizer.zero_grad()
        model.set_requires_all_reduce(True)
        backward(model, last)
        optimizer.step()
        return weights_of(model)

    for seeds, gives_up, as_alone in (((0, 1), False, (0, 1)), ((0, 1), True, (1,))):
        found = trained({"scheme": "full_precision"}, seeds=seeds, gives_up=gives_up)
        expected = trained(None, seeds=as_alone, gives_up=False)
        for name, weights in found.items():
            assert torch.equal(weights, expected[name]), (name, gives_up)


# ---- bytes ----


@pytest.mark.parametrize("node_size", [1, 2])
@on_ranks(4)
def test_the_bytes_of_a_step_are_those_of_the_formula(node_size: int) -> None:
    """The matrices are large enough for their padding to be small."""
    steps = 3
    block = {"scheme": "eden4", "node_size": node_size, "checksum_steps": 0}
    model, _ = train(
        "replicate()", block, steps=steps, micro_steps=2, mp_policy=BF16, model=Net(2**12)
    )
    front = fsdp2.attaching.front_of(model)
    expected = front.run.comm_volume().received(0, micro_steps=1)
    received = ds_quant.report(model)["received_bytes"]
    assert received["weights"] == {"intra": 0, "inter": 0} == expected["weights"]
    for link, nbytes in expected["gradients"].items():
        total = sum(of_all_ranks(received["gradients"][link])) / 4 / steps
        assert total == pytest.approx(nbytes, rel=0.03), link


@on_ranks(2)
def test_fsdp2_reduces_no_gradients_itself() -> None:
    reduced = []
    all_reduce = dist.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    for kind in MODELS:
        train(kind, {"scheme": "eden4"}, steps=2)
    assert not any(dtype.is_floating_point for dtype in reduced)  # votes are integers


@on_ranks(2)
def test_the_start_up_line_tells_that_no_weights_are_sent() -> None:
    model, _ = train("replicate()", {"scheme": "eden4", "node_size": 1}, steps=0, mp_policy=BF16)
    line = ds_quant.report(model)["line"]
    assert "(fp32 8.00)" in line and "every rank holds all weights; " in line
    assert ds_quant.report(model)["replicas"] == 2


# ---- gradients that wait ----


class _Drops:
    """A ``zero_grad`` that calls no other, to be mixed in."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _class_made_since(model: Any) -> torch.optim.Optimizer:
    class MadeSince(WithoutSuper):
        def zero_grad(self, set_to_none: bool = True) -> None:
            WithoutSuper.zero_grad(self)

    return MadeSince(model.parameters())


def _mixed_in_since(model: Any) -> torch.optim.Optimizer:
    return type("Mixed", (_Drops, torch.optim.SGD), {})(model.parameters())


DROPS = {
    "model": lambda model: model,
    "optimizer": adam,
    "own zero_grad": lambda model: WithoutSuper(model.parameters()),
    "class made since": _class_made_since,
    "mixed in since": _mixed_in_since,
}


@pytest.mark.parametrize(
    ("declare", "drops"),
    [("set_requires_all_reduce", "model"), *[("set_is_last_backward", drops) for drops in DROPS]],
)
@on_ranks(2)
def test_a_declared_backward_sends_nothing_and_may_be_dropped(declare: str, drops: str) -> None:
    """Gradients of one step alone are those of a step after an accumulation that is given up.

    drops: its ``zero_grad`` is called, of an optimizer made after ``attach``.
    """
    model, _ = train("replicate()", {"scheme": "full_precision"}, steps=1, mp_policy=BF16)
    backward(model, 1)
    expected = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    front = fsdp2.attaching.front_of(model)
    received = front.figures()["received_bytes"]["gradients"]
    getattr(model, declare)(False)
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    assert front.figures()["received_bytes"]["gradients"] == received
    with pytest.raises(RuntimeError, match="the model is detached while gradients of 3 module"):
        front.detach()
    DROPS[drops](model).zero_grad()
    getattr(model, declare)(True)
    backward(model, 1)
    found = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@on_ranks(2)
def test_detach_gives_fsdp2_its_all_reduce_back() -> None:
    plain, plain_losses = train("replicate()", None, steps=4)
    model, losses = train("replicate()", {"scheme": "full_precision"}, steps=2)
    optimizer = adam(model)
    front = fsdp2.attaching.front_of(model)
    front.detach()
    backward(model, 0)
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    fsdp2.attach(model, {"scheme": "full_precision"}, optimizer=optimizer)
    backward(model, 0)
    again = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(again, gradients, strict=True))
    assert losses == plain_losses[:2] and plain is not model


# ---- hooks and checks ----


@on_ranks(2)
def test_a_hook_of_the_user_sees_the_sums() -> None:
    model = replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, "eden4", optimizer=optimizer)
    seen: list[float] = []
    model.first.set_all_reduce_hook(lambda row: seen.append(float(row.sum())))
    backward(model, 0)
    assert len(seen) == 1
    first, second = of_all_ranks(seen[0])
    assert first == second


@on_ranks(4)
def test_ranks_that_drift_apart_end_the_run() -> None:
    block = {"scheme": "eden4", "checksum_steps": 1, "node_size": 2}
    model, _ = train("replicate()", block, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.first.weight.to_local()[0, 0] += 1
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"the weights of rank\(s\) \[3\] differ"):
        optimizer.step()
        backward(model, 0)


@on_ranks(4)
def test_beside_tensor_parallelism_and_shards() -> None:
    """One part of a model is replicated, another one sharded, both over the same ranks."""

    def made() -> Any:
        model = Net()
        mesh = mesh_of((4,), "dp")
        replicate(model.first, mesh=mesh)
        fully_shard(model.second, mesh=mesh)
        return nn.Sequential(model.first, model.norm, model.second)

    losses = []
    for block in (None, {"scheme": "full_precision", "node_size": 2}):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if block is not None:
            fsdp2.attach(model, block, optimizer=optimizer)
        run = []
        for seed in (0, 1, 0):
            x = rows(seed)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(float(loss.detach()))
        losses.append(run)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
