"""FSDP2 with a replica of the model in every node (HSDP), and its drift checks."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.distributed.test_fsdp2 import WIDTH, Net, new_model, sharded, weights_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def mesh_of(nodes: int, *, dimensions: int = 2) -> DeviceMesh:
    """Return a mesh of replicas and shards, or that of the shards of this rank's node alone."""
    size = torch.distributed.get_world_size() // nodes
    mesh = init_device_mesh("cpu", (nodes, size), mesh_dim_names=("replica", "shard"))
    return mesh if dimensions == 2 else mesh["shard"]


def replicated(reference: nn.Module, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Return a copy of a model, every layer and the root on the mesh."""
    model = copy.deepcopy(reference)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    micro_steps: int = 1,
    width: int = WIDTH,
) -> list[float]:
    """Train on the same rows; the last backward of a step is declared as users of HSDP do."""
    rank = torch.distributed.get_rank()
    losses = []
    for _ in range(steps):
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(10 * micro_step + rank)
            x = torch.randn(8, width, generator=generator)
            model.set_requires_all_reduce(micro_step == micro_steps - 1)
            loss = (model(x) - x[:, :1]).square().mean() / micro_steps
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(
    block: dict[str, Any] | None,
    *,
    reference: nn.Module | None = None,
    nodes: int = 2,
    dimensions: int = 2,
    steps: int = 5,
    micro_steps: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Return losses, weights and model of a run with a block, or of FSDP2's own HSDP."""
    mesh = mesh_of(nodes, dimensions=dimensions)
    model = replicated(reference or new_model(), mesh, **options)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    if block is not None:
        fsdp2.attach(model, {"min_numel": 512, **block}, optimizer=optimizer)
    losses = train(model, optimizer, steps=steps, micro_steps=micro_steps)
    return losses, weights_of(model), model


def assert_equal_on_all_ranks(weights: dict[str, torch.Tensor], case: object = None) -> None:
    """Compare the bits of full weights between all ranks."""
    own = {name: value.numpy().tobytes() for name, value in weights.items()}
    first, *others = of_all_ranks({name: zlib.crc32(bits) for name, bits in own.items()})
    for other in others:
        assert other == first, case


@pytest.mark.parametrize("micro_steps", [1, 4])
@on_ranks(4)
def test_full_precision_trains_as_hsdp_alone(micro_steps: int) -> None:
    plain_losses, plain, _ = trained(None, micro_steps=micro_steps)
    for dimensions in (1, 2):
        block = {"scheme": "full_precision"}
        losses, weights, _ = trained(block, micro_steps=micro_steps, dimensions=dimensions)
        assert_equal_on_all_ranks(weights)
        if micro_steps == 1:  # two summands inside the nodes, two between them: one order
            assert losses == plain_losses
            assert all(torch.equal(weights[name], expected) for name, expected in plain.items())
        assert losses == pytest.approx(plain_losses, rel=1e-6)
        for name, expected in plain.items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("micro_steps", [1, 4])
@on_ranks(4)
def test_replicas_end_with_equal_bits(micro_steps: int) -> None:
    reference = new_model()
    reference.layers[0].requires_grad_(False)
    reference.layers[1].bias.requires_grad_(False)
    plain, _, _ = trained(None, reference=reference, micro_steps=micro_steps)
    learned = plain[0] - plain[-1]
    for scheme in ("eden4", "sdp4bit", "qsdp"):
        losses, weights, model = trained(
            {"scheme": scheme}, reference=reference, micro_steps=micro_steps
        )
        assert_equal_on_all_ranks(weights, scheme)
        assert losses == pytest.approx(plain, abs=0.2 * learned), scheme
        assert losses != plain, scheme


# ---- bytes ----


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))


@on_ranks(4)
def test_hsdp_receives_four_bytes_between_nodes_and_eden4_one() -> None:
    """Per parameter and step of bf16 gradients from infinitely many nodes: of two, the half."""
    reduced = 0
    all_reduce = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *who: Any, **how: Any) -> Any:
        nonlocal reduced
        reduced += tensor.nbytes
        return all_reduce(tensor, *who, **how)

    torch.distributed.all_reduce = counted
    model = replicated(wide(), mesh_of(2), mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=1, micro_steps=2, width=512)
    numel = sum(p.numel() for p in model.parameters())
    # A ring over all nodes sends every byte twice; a rank has half of the parameters of its node.
    assert 2 * reduced / (numel / 2) == 4.0
    reduced = 0
    block = {"scheme": "eden4", "checksum_steps": 0}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=2, micro_steps=4, width=512)
    assert reduced == 0
    figures = ds_quant.report(model)
    received = figures["received_bytes"]
    assert received["weights"]["inter"] == 0
    per_node = 2 * received["gradients"]["inter"] / figures["steps"] / figures["params"]
    volume = figures["expected_bytes_per_param"]
    assert 1.0 < volume < 1.06
    assert per_node == pytest.approx(volume / 2, rel=0.02)
    assert front.line.startswith(
        f"eden4 on FSDP2 with replicas, volume {volume:.2f} B/param/step between nodes "
        "(bf16 4.00); 2 replicas of 2 ranks; "
    )
    assert "weights stay in the node, exact; " in front.line
    assert f"{volume / 2:.2f} B/param/step received per node" in front.line
    inside = sum(hops["intra"] for hops in received.values())
    expected = front.comm_volume().received(3, micro_steps=4)
    expected_inside = sum(hops["intra"] for hops in expected.values())
    assert inside / figures["steps"] == pytest.approx(expected_inside, rel=0.05)


# ---- drift ----


@on_ranks(4)
def test_replicas_that_differ_end_the_run_on_all_ranks() -> None:
    block = {"scheme": "eden4", "checksum_steps": 2}
    model = replicated(new_model(), mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=4)
    if torch.distributed.get_rank() == 3:
        with torch.no_grad():
            model.layers[1].weight.to_local()[0, 0] += 1
    train(model, optimizer, steps=1)
    with pytest.raises(RuntimeError, match=r"step 6: the weights of rank\(s\) \[1, 3\] differ"):
        train(model, optimizer, steps=1)


@on_ranks(4)
def test_replicas_that_begin_with_other_weights_end_after_the_first_step() -> None:
    torch.manual_seed(torch.distributed.get_rank() // 2)
    model = replicated(Net(), mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="step 1: .* differ from those of the other replicas"):
        train(model, optimizer, steps=1)


@on_ranks(4)
def test_weights_that_nodes_keep_are_brought_back_from_a_drift() -> None:
    block = {"scheme": "eden4", "node_size": 2, "checksum_steps": 2, "min_numel": 512}
    model = sharded(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    front = fsdp2.attach(model, block, optimizer=optimizer)
    refills = []
    refill = front.resync
    front.resync = lambda: (refills.append(front.step), refill())
    train(model, optimizer, steps=3)
    if torch.distributed.get_rank() == 2:
        front.node_shards[1].rows()[0, 5] += 1
    train(model, optimizer, steps=3)
    assert refills == [4]
    copies = [node_shard.rows().clone() for node_shard in front.node_shards]
    held = of_all_ranks([rows.sum().item() for rows in copies])
    assert held[0] == held[2] and held[1] == held[3]


# ---- refusals ----


@on_ranks(4)
def test_meshes_that_make_no_replicas_are_refused_by_name() -> None:
    def refused(mesh: DeviceMesh, block: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fsdp2.attach(replicated(new_model(), mesh), block, optimizer=[])

    refused(mesh_of(4), {}, "mesh of fully_shard has one rank: allowed: several")
    refused(mesh_of(2), {"node_size": 1}, "node_size=1: allowed with replicas of 2 ranks: 2")
    scattered = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replica", "shard"))
    refused(scattered, {}, r"has ranks \[\d, \d\] of 4: allowed: consecutive ranks")
