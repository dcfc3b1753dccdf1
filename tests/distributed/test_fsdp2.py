"""FSDP2 with a block: equal to FSDP2 alone where nothing is quantized, near it elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from tests.distributed.fsdp2_runs import adam
from tests.distributed.harness import of_all_ranks, on_ranks, run
from tests.distributed.messages import MessageDamage
from tests.distributed.models import build, settings
from tests.thin import thinned

WIDTH = 48


class Net(nn.Module):
    """Linear layers, of which one has rows that four ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uneven = nn.Linear(WIDTH, 5 * WIDTH + 1)
        self.head = nn.Linear(5 * WIDTH + 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(torch.tanh(self.uneven(x)))


def sharded(reference: nn.Module, **options: Any) -> FSDPModule:
    """A copy of a model, every layer and the root sharded over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = copy.deepcopy(reference)
    for module in (*model.layers, model.uneven):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def train(
    model: Any, optimizer: torch.optim.Optimizer, *, steps: int, micro_steps: int = 1
) -> list[float]:
    """Losses of as many optimizer steps on the same rows; the last backward of each is declared."""
    rank = torch.distributed.get_rank()
    losses = []
    for _ in range(steps):
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(10 * micro_step + rank)
            x = torch.randn(8, WIDTH, generator=generator)
            model.set_is_last_backward(micro_step == micro_steps - 1)
            loss = (model(x) - x[:, :1]).square().mean() / micro_steps
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def trained(
    block: dict[str, Any] | None, *, steps: int = 6, micro_steps: int = 1, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any] | None]:
    """Losses, weights and report of a run with a block, or of FSDP2 alone."""
    model = sharded(new_model(), **options)
    optimizer = adam(model, lr=3e-3)
    if block is not None:
        assert fsdp2.attach(model, {"min_numel": 512, **block}, optimizer=optimizer) is not None
    losses = train(model, optimizer, steps=steps, micro_steps=micro_steps)
    return losses, weights_of(model), ds_quant.report(model)


def all_equal(weights: dict[str, torch.Tensor]) -> bool:
    """True if all ranks have computed with the same bits."""
    digests = of_all_ranks({name: value.sum().item() for name, value in weights.items()})
    return all(digest == digests[0] for digest in digests)


# ---- nothing quantized ----


@pytest.mark.parametrize(
    ("world", "scheme", "micro_steps"),
    thinned(
        [(2, "full_precision", 1), (4, "full_precision", 4), (4, "hybrid", 1), (4, "hybrid", 4)],
        lambda *case: case == (4, "hybrid", 1),
    ),
)
@on_ranks()
def test_exact_schemes_train_as_fsdp2_alone(world: int, scheme: str, micro_steps: int) -> None:
    block = {"scheme": scheme, "node_size": max(1, world // 2)}
    plain_losses, plain, _ = trained(None, micro_steps=micro_steps)
    losses, weights, _ = trained(block, micro_steps=micro_steps)
    if world == 2:  # two summands have one order
        assert losses == plain_losses
        assert all(torch.equal(weights[name], expected) for name, expected in plain.items())
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, expected in plain.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


# ---- quantized ----


COMPARED = "full_precision", "qsdp", "zeropp", "sdp4bit", "eden4"


@pytest.mark.parametrize(
    ("micro_steps", "schemes"),
    thinned(
        [(1, ("full_precision", "sdp4bit")), (1, COMPARED), (4, COMPARED)],
        lambda micro_steps, schemes: schemes is not COMPARED,
    ),
)
@on_ranks(4)
def test_schemes_train_near_fsdp2_alone_and_send_what_is_promised(
    micro_steps: int, schemes: tuple[str, ...]
) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain, _, _ = trained(None, micro_steps=micro_steps, mp_policy=bf16)
    learned = plain[0] - plain[-1]
    assert learned > 0
    received = {}
    for scheme in schemes:
        block = {"scheme": scheme, "node_size": 2}
        losses, weights, figures = trained(block, micro_steps=micro_steps, mp_policy=bf16)
        assert losses == pytest.approx(plain, abs=0.2 * learned), scheme
        assert all_equal(weights), scheme
        assert scheme == "full_precision" or losses != plain
        assert figures["steps"] == 6 and figures["line"].startswith(f"{scheme} on FSDP2")
        received[scheme] = {
            role: hops["inter"] / figures["steps"] / figures["params"]
            for role, hops in figures["received_bytes"].items()
        }
    exact = received["full_precision"]
    for scheme in {"qsdp", "sdp4bit", "eden4"} & set(schemes):
        assert sum(received[scheme].values()) < 0.6 * sum(exact.values()), (scheme, received)
    # A rank of two in a node: half of what the node receives. Gradients cross once per step,
    # whatever the micro-steps; so do weights, and the first fill of the node shards is counted.
    for scheme in {"sdp4bit", "eden4"} & set(schemes):
        assert 2 * sum(received[scheme].values()) < 1.06, (scheme, received)


@on_ranks(4)
def test_gradients_are_those_of_zero_bits_more_or_less() -> None:
    """8-bit sums differ from exact ones by a small share; FSDP2's own clipping sees them."""
    found = {}
    for scheme in ("full_precision", "qsdp"):
        model = sharded(new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fsdp2.attach(
            model, {"scheme": scheme, "node_size": 2, "min_numel": 512}, optimizer=optimizer
        )
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()
        found[scheme] = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
        assert norm > 0
    for name, exact in found["full_precision"].items():
        error = (found["qsdp"][name] - exact).norm() / exact.norm()
        assert error < 0.05, (name, error)
        assert exact.dim() < 2 or error > 0, name


@on_ranks(4)
def test_frozen_adapters_and_resharding_train_as_alone() -> None:
    def frozen() -> nn.Module:
        model = new_model()
        model.layers[0].requires_grad_(False)
        return model

    for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
        losses = []
        for block in (None, {"scheme": "hybrid", "node_size": 2}):
            model = sharded(frozen(), **options)
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=3e-3, fused=True)
            if block is not None:
                fsdp2.attach(model, block, optimizer=optimizer)
            losses.append(train(model, optimizer, steps=4))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), options


@on_ranks(4)
def test_a_step_is_priced_by_the_gathers_that_it_makes() -> None:
    """A root keeps its weights for the backward, if the user does not choose."""
    for gathers, options in (
        (1.5, {}),
        (1, {"reshard_after_forward": False}),
        (2, {"reshard_after_forward": True}),
        (1, {"reshard_after_forward": 2}),  # then FSDP2 gathers again among two ranks
    ):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        fully_shard(model[0], **options)
        fully_shard(model, **options)
        optimizer = adam(model)
        front = fsdp2.attach(model, {"scheme": "full_precision"}, optimizer=optimizer)
        run = front.run
        assert run.workload.gathers == [gathers], options
        train(model, optimizer, steps=3, micro_steps=2)
        assert run.workload.gathers == [gathers], options
        expected = run.received_by_formula(run.comm_volume())["weights"]["intra"]
        among_two = 0.0
        if options.get("reshard_after_forward") == 2:
            assert "gathers the weights of 2 module(s) again for the backward" in front.line
            among_two = 2 * 4 * sum(p.numel() for p in model.parameters()) / 2
        figures = front.figures()
        received = figures["received_bytes"]["weights"]["intra"]
        assert received == pytest.approx(3 * (expected + among_two)), options
        assert figures["saved_bytes"]["weights"]["intra"] == pytest.approx(0, abs=1e-6 * received)


# ---- beside ZeRO-3 ----


class Even(nn.Module):
    """Shapes whose shards of dim 0 are the shards of ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.uneven = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.uneven(x)


def rows(step: int) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize(
    "scheme", thinned(["qsdp", "sdp4bit", "eden4"], lambda scheme: scheme == "sdp4bit")
)
@on_ranks(4)
def test_losses_are_bit_for_bit_those_of_zero3(scheme: str) -> None:
    """The same sums and the same decoded weights, in fp32 and with plain gradient descent."""
    block = {"scheme": scheme, "node_size": 2, "min_numel": 512}
    torch.manual_seed(0)
    reference = Even()
    model = sharded(reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, block, optimizer=optimizer)
    found = []
    for step in range(4):
        loss = model(rows(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    engine = build(
        settings(3, block),
        lambda: reference,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    expected = []
    for step in range(4):
        loss = engine(rows(step)).square().mean()
        engine.backward(loss)
        engine.step()
        expected.append(float(loss.detach()))
    assert found == expected


# ---- checkpoints ----


@on_ranks(4)
def test_a_loaded_checkpoint_resumes_bit_for_bit_and_is_exact() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    block = {"scheme": "sdp4bit", "node_size": 2, "min_numel": 512}

    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = sharded(new_model())
        optimizer = adam(model, lr=3e-3)
        return model, optimizer, fsdp2.attach(model, block, optimizer=optimizer)

    model, optimizer, front = made()
    train(model, optimizer, steps=3)
    state = copy.deepcopy(get_state_dict(model, optimizer))
    own, exact = front.state_dict(), weights_of(model)
    expected = train(model, optimizer, steps=3)
    model, optimizer, front = made()
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    for name, value in weights_of(model).items():
        assert torch.equal(value, exact[name])
    front.load_state_dict(own)
    assert ds_quant.report(model)["steps"] == 3
    assert train(model, optimizer, steps=3) == expected


def _save(folder: str) -> dict[str, np.ndarray]:
    """Train with a block on this rank, save, and return the exact weights."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = sharded(new_model())
    optimizer = adam(model, lr=3e-3)
    block = {"scheme": "eden4", "node_size": 2, "min_numel": 512}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    train(model, optimizer, steps=2)
    dcp.save({"model": get_model_state_dict(model), "quantized_comm": front}, checkpoint_id=folder)
    return {name: value.numpy() for name, value in weights_of(model).items()}


def _load(folder: str, block: dict[str, Any] | None) -> dict[str, np.ndarray]:
    """Load what `_save` has saved, on other ranks and with another block or none."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = sharded(new_model())
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if block is not None:
        optimizer = adam(model, lr=3e-3)
        state["quantized_comm"] = fsdp2.attach(model, block, optimizer=optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    if block is not None:
        assert ds_quant.report(model)["steps"] == 2
        assert model(torch.ones(2, WIDTH)).isfinite().all()
        model.reshard()
    return {name: value.numpy() for name, value in weights_of(model).items()}


def test_a_saved_model_is_loaded_on_fewer_ranks_with_and_without_the_plugin(tmp_path: Path) -> None:
    saved, *_ = run(_save, 4, str(tmp_path))
    two_nodes = {"scheme": "sdp4bit", "node_size": 1, "allow_full_replica": True}
    for block in (None, two_nodes):
        for loaded in run(_load, 2, str(tmp_path), block):
            assert loaded.keys() == saved.keys()
            for name, value in saved.items():
                assert np.array_equal(loaded[name], value), name


# ---- refusals ----


@on_ranks(2)
def test_a_block_that_cannot_work_is_refused_by_name() -> None:
    model = sharded(new_model())
    for block, message in (
        ({"gradients": {"levels": "learned"}}, 'gradients.levels="learned": not supported'),
        ({"schem": "qsdp"}, "schem"),
    ):
        with pytest.raises(ds_quant.ConfigError, match=message):
            fsdp2.attach(model, block, optimizer=[])


@on_ranks(2)
def test_models_that_cannot_be_served_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Net holds no module that fully_shard was called on"):
        fsdp2.attach(new_model(), {}, optimizer=[])
    model = fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy(pin_memory=False))
    message = (
        r"module \(root\) has offload_policy=CPUOffloadPolicy\(...\): allowed: OffloadPolicy\(\), "
        "the default; leave offload_policy out"
    )
    with pytest.raises(ValueError, match=message):
        fsdp2.attach(model, {}, optimizer=[])
    with pytest.raises(ValueError, match="module 0 has offload_policy=CPUOffloadPolicy"):
        fsdp2.attach(fully_shard(nn.Sequential(model)), {}, optimizer=[])


@on_ranks(4)
def test_gradients_left_inside_the_nodes_end_the_step() -> None:
    model = sharded(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, {"scheme": "eden4", "node_size": 2}, optimizer=optimizer)
    model.set_is_last_backward(False)
    model(torch.ones(2, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError, match=r"set_is_last_backward\(True\)"):
        optimizer.step()
    ds_quant.report(model)


@on_ranks(2)
def test_ranks_with_other_blocks_are_named() -> None:
    model = sharded(new_model())
    scheme = "qsdp" if torch.distributed.get_rank() == 0 else "zeropp"
    with pytest.raises(RuntimeError, match='rank 1: quantized_comm.*scheme="zeropp"'):
        fsdp2.attach(model, {"scheme": scheme}, optimizer=[])


@on_ranks(2, environment={"DS_QUANT_BLOCK": '{"scheme": "zeropp", "payload_checksum": true}'})
def test_the_block_of_the_environment_is_attached_and_messages_are_checked() -> None:
    model = sharded(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.attach(model, optimizer=optimizer)
    damage = MessageDamage("weights", sender=0)
    train(model, optimizer, steps=1)
    damage.armed = torch.distributed.get_rank() == 1
    with pytest.raises(RuntimeError, match="from rank 0 were changed on their way to rank 1"):
        train(model, optimizer, steps=1)
