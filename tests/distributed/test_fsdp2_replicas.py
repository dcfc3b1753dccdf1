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
from tests.distributed.test_fsdp2 import WIDTH, new_model, weights_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def mesh_of(nodes: int, *, dimensions: int = 2) -> DeviceMesh:
    """Return a mesh of replicas and shards, or that of the shards of this rank's node alone."""
    size = torch.distributed.get_world_size() // nodes
    mesh = init_device_mesh("cpu", (nodes, size), mesh_dim_names=("replica", "shard"))
    return mesh if dimensions == 2 else mesh["shard"]


def replicated(reference: nn.Module, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Return a copy of a model, every layer and the root on the mesh."""
    model = copy.deepcopy(reference)
    for module in (*model.layers, model.uneven):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    model: Any, optimizer: torch.optim.Optimizer, *, steps: int, micro_steps: int = 1
) -> list[float]:
    """Train on the same rows; the last backward of a step is declared as users of HSDP do."""
    rank = torch.distributed.get_rank()
    losses = []
    for _ in range(steps):
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(10 * micro_step + rank)
            x = torch.randn(8, WIDTH, generator=generator)
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
