"""Models on the meshes that users give ``fully_shard``, and their training beside FSDP2 alone.

Every set-up is sharded over two ranks or more beside tensor or expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ds_quant import fsdp2
from tests.distributed.fsdp2_runs import adam
from tests.distributed.harness import of_all_ranks

WIDTH = 64
FP32 = MixedPrecisionPolicy()


@cache
def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """Return a mesh, made once per process: its process groups hold threads until that ends."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Block(nn.Module):
    """Two matrices, which tensor parallelism cuts by columns and by rows, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 2)
        self.down = nn.Linear(2 * WIDTH + 2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Two blocks and a head, which tensor parallelism copies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Mixture(nn.Module):
    """A dense layer, experts that differ between two halves of the ranks, and a dense head."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12)
        torch.manual_seed(expert)
        self.experts = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return self.head(x + torch.tanh(self.experts(x)))


# ---- set-ups ----


def dense(
    mesh: DeviceMesh, *, tensor_parallel: DeviceMesh | None = None, **options: Any
) -> nn.Module:
    """Shard every block and the root over ``mesh``."""
    model = Net()
    if tensor_parallel is not None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in (model.first, model.second):
            parallelize_module(block, tensor_parallel, plan)
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mixture(
    mesh: DeviceMesh, experts: DeviceMesh, expert: int, *, by_group: bool = False, **options: Any
) -> nn.Module:
    """Shard the dense part over ``mesh`` and the experts over ``experts``.

    by_group: in one call of ``fully_shard``, which makes two groups of parameters.
    """
    model = Mixture(expert)
    if not by_group:
        fully_shard(model.experts, mesh=experts, **options)
        fully_shard(model.dense, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    record = FSDPMeshInfo(mesh=experts, shard_mesh_dim=0)
    own = set(model.experts.parameters())

    def placement(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(parameter.ndim - 1), record) if parameter in own else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=placement, **options)


@dataclass(frozen=True)
class Setup:
    """A model on a mesh.

    make: shards it, with options of ``fully_shard``.
    source: the rows of a step by rank: ranks of tensor parallelism get equal ones.
    node_size: of the block. pairs: True if all sums have two summands, which have one order.
    """

    make: Callable[..., nn.Module]
    source: Callable[[int], int]
    node_size: int = 2
    pairs: bool = True


def tensor_parallel_inside(**options: Any) -> nn.Module:
    mesh = mesh_of((2, 2), "fsdp", "tp")
    return dense(mesh["fsdp"], tensor_parallel=mesh["tp"], **options)


def tensor_parallel_outside(**options: Any) -> nn.Module:
    mesh = mesh_of((2, 2), "tp", "fsdp")
    return dense(mesh["fsdp"], tensor_parallel=mesh["tp"], **options)


def three_dimensions(**options: Any) -> nn.Module:
    mesh = mesh_of((2, 2, 2), "replica", "fsdp", "tp")
    return dense(mesh["replica", "fsdp"], tensor_parallel=mesh["tp"], **options)


def experts_apart(*, by_group: bool = False, **options: Any) -> nn.Module:
    mesh = mesh_of((2, 2), "fsdp", "ep")
    whole = mesh_of((4,), "dp")
    return mixture(whole, mesh["fsdp"], 1 + dist.get_rank() % 2, by_group=by_group, **options)


def experts_in_one_module(**options: Any) -> nn.Module:
    return experts_apart(by_group=True, **options)


def experts_on_one_rank(**options: Any) -> nn.Module:
    mesh = mesh_of((1, 4), "fsdp", "ep")
    return mixture(mesh_of((4,), "dp"), mesh["fsdp"], 1 + dist.get_rank(), **options)


def last_dimension(**options: Any) -> nn.Module:
    """Shard the last dimension where that is even, as FSDP2 wants it."""
    ranks = dist.get_world_size()

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(0 if parameter.shape[-1] % ranks else parameter.ndim - 1)

    return dense(mesh_of((ranks,), "fsdp"), shard_placement_fn=placement, **options)


SETUPS = {
    "tp inside a node": Setup(tensor_parallel_inside, source=lambda rank: rank // 2),
    "tp in one node": Setup(tensor_parallel_inside, source=lambda rank: rank // 2, node_size=4),
    "tp around": Setup(tensor_parallel_outside, source=lambda rank: rank % 2, node_size=1),
    "experts apart": Setup(experts_apart, source=lambda rank: rank, pairs=False),
    "two groups": Setup(experts_in_one_module, source=lambda rank: rank, pairs=False),
    "experts on one rank": Setup(experts_on_one_rank, source=lambda rank: rank, pairs=False),
    "dim 1": Setup(last_dimension, source=lambda rank: rank, pairs=False),
}


# ---- training ----


@dataclass
class Trained:
    """A model after some steps. shards: of this rank, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    front: Any
    losses: list[float]

    @property
    def shards(self) -> dict[str, Tensor]:
        return local_shards(self.model)


def local_shards(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shards."""
    shards = {}
    for name, p in model.named_parameters():
        shards[name] = (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
    return shards


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights in full."""
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    return weights


def block_of(setup: Setup, scheme: str, **keys: Any) -> dict[str, Any]:
    return {
        "scheme": scheme,
        "node_size": setup.node_size,
        "min_numel": 64,
        "allow_full_replica": True,
        **keys,
    }


def rows(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(
    setup: Setup,
    block: Mapping[str, Any] | None,
    *,
    steps: int = 5,
    micro_steps: int = 1,
    policy: MixedPrecisionPolicy = FP32,
    **options: Any,
) -> Trained:
    """Train with a block, or with FSDP2 alone if it is None. options: of ``fully_shard``.

    Every step has the same rows, so that a few steps lower the loss.
    """
    model = setup.make(mp_policy=policy, **options)
    optimizer = adam(model)
    front = None if block is None else fsdp2.attach(model, block, optimizer=optimizer)
    trained = Trained(model, optimizer, front, [])
    for _ in range(steps):
        for micro_step in range(micro_steps):
            take_backward(trained, setup, seed=micro_step, last=micro_step == micro_steps - 1)
        optimizer.step()
        optimizer.zero_grad()
    return trained


def take_backward(trained: Trained, setup: Setup, seed: int, last: bool = True) -> None:
    """Run forward and backward on the rows of this rank. seed: of the rows."""
    model: Any = trained.model
    model.set_is_last_backward(last)
    x = rows(100 * seed + setup.source(dist.get_rank()))
    loss = (model(x).float() - x[:, :12]).square().mean()
    loss.backward()
    trained.losses.append(float(loss.detach()))


def assert_trains_alike(found: Trained, plain: Trained, *, exactly: bool) -> None:
    """Compare losses and shards of a run in full precision with those of FSDP2 alone."""
    if exactly:
        assert found.losses == plain.losses
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-6, atol=1e-6)
    expected = plain.shards
    for name, shard in found.shards.items():
        if exactly:
            assert torch.equal(shard, expected[name]), name
        torch.testing.assert_close(shard, expected[name], rtol=1e-4, atol=2e-5)


def assert_copies_are_equal(trained: Trained, axis: DeviceMesh) -> None:
    """Compare the parameters that tensor parallelism copies between its ranks, bit for bit."""
    own = {
        name: shard
        for name, shard in trained.shards.items()
        if "up" not in name and name.rpartition(".")[0].rpartition(".")[2] != "down"
    }
    assert own
    for name, shard in own.items():
        others = [torch.empty_like(shard) for _ in range(axis.size())]
        dist.all_gather(others, shard.contiguous(), group=axis.get_group())
        assert all(torch.equal(other, shard) for other in others), name


def total_received(trained: Trained, link: str) -> int:
    """Return the bytes that all ranks have received over a link."""
    received = trained.front.figures()["received_bytes"]
    return sum(of_all_ranks(sum(links[link] for links in received.values())))
