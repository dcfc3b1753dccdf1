"""DDP with a block beside DDP alone: exact values, equal replicas, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_quant
from tests.distributed.ddp_runs import (
    EXACT,
    SCHEMES,
    WIDTH,
    Run,
    assert_equal,
    assert_equal_on_all_ranks,
    assert_near,
    played,
    rows,
    three_steps,
)
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.thin import thinned

# ---- exact ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(2)
def test_nothing_quantized_trains_as_ddp_alone_bit_for_bit(dtype: str) -> None:
    def made() -> nn.Module:
        from tests.distributed.ddp_runs import Net

        return Net().to(getattr(torch, dtype))

    plain = played(three_steps, None, make=made)
    for scheme in ("full_precision", "lossless", "qwd"):
        for options in ({}, {"bucket_cap_mb": 0.01}, {"gradient_as_bucket_view": True}):
            found = played(three_steps, {"scheme": scheme}, make=made, **options)
            assert_equal(found, plain)
            assert (
                f'scheme "{scheme}" quantizes nothing under DDP: take "eden4"' in found.front.line
            )


@on_ranks(2)
def test_sums_of_fp16_gradients_are_rounded_once() -> None:
    """DDP divides before it adds up, which rounds the smallest values twice."""

    def one_step(run: Run) -> None:
        run.backward(0, factor=1e-3)

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(WIDTH, 5).half()

    def gradient(block: dict[str, Any] | None) -> Tensor:
        return played(one_step, block, make=made).model.module.weight.grad

    alone = made()
    (alone(rows(0, dtype=torch.float16)).float().square().mean() * 1e-3).backward()
    exact = alone.weight.grad.double()
    dist.all_reduce(exact)
    rounded = (exact / 2).half()
    assert torch.equal(gradient(EXACT), rounded)
    assert not torch.equal(gradient(None), rounded)


@pytest.mark.parametrize("node_size", [2, 4])
@on_ranks(4)
def test_nothing_quantized_trains_as_ddp_alone_on_four_ranks(node_size: int) -> None:
    plain = played(three_steps, None)
    found = played(three_steps, {**EXACT, "node_size": node_size})
    assert_near(found, plain, off=1e-6)
    assert_equal_on_all_ranks(found.weights())


# ---- replicas ----


def rough_steps(run: Run) -> None:
    """Take 60 steps with a high learning rate, some of them on outliers of one rank."""
    for seed in range(60):
        outlier = 30.0 if seed % 7 == 3 and dist.get_rank() == 1 else 1.0
        run.step(seed, factor=outlier)


# Two hops with the codecs of both, one of them rotated: what make test trains.
TWO_HOPS = (4, 2, ("eden4", "qsdp", "sdp4bit"))


@pytest.mark.parametrize(
    ("world", "node_size", "schemes"),
    thinned(
        [TWO_HOPS, (2, 2, SCHEMES), (2, 1, SCHEMES), (4, 2, SCHEMES)],
        lambda *case: case == TWO_HOPS,
    ),
)
@on_ranks(timeout=240)
def test_replicas_keep_equal_bits(world: int, node_size: int, schemes: tuple[str, ...]) -> None:
    for scheme in schemes:
        block = {"scheme": scheme, "node_size": node_size, "checksum_steps": 0}
        run = played(rough_steps, block, bucket_cap_mb=0.01)
        assert_equal_on_all_ranks(run.weights())
        assert_equal_on_all_ranks(run.gradients[-1])


@on_ranks(4)
def test_gradients_are_near_and_unbiased() -> None:
    """Errors of independent steps average out: of 16 steps about a 16th is left."""

    def one_step(run: Run) -> None:
        for _ in range(16):
            run.backward(0)
            run.gradients.append({n: p.grad.clone() for n, p in run.model.named_parameters()})
            run.optimizer.zero_grad()

    exact = played(one_step, None).gradients[0]["module.first.weight"]
    for scheme, most in (("eden4", 0.03), ("qsdp", 0.001), ("sdp4bit", 0.08)):
        found = played(one_step, {"scheme": scheme, "node_size": 2}).gradients
        matrices = torch.stack([each["module.first.weight"] for each in found])
        error = (matrices - exact).square().sum() / len(matrices) / exact.square().sum()
        bias = (matrices.mean(0) - exact).square().sum() / exact.square().sum()
        assert 0 < error < most, (scheme, float(error))
        assert bias < 2 / 16 * error, (scheme, float(bias), float(error))


# ---- bytes ----


class Wide(nn.Module):
    """Two matrices of 2^16 elements each, and two biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 2048)
        self.second = nn.Linear(2048, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("world, node_size", [(2, 2), (4, 4), (4, 2), (2, 1)])
@on_ranks()
def test_received_bytes_are_those_of_the_formula(world: int, node_size: int) -> None:
    for scheme in ("full_precision", "eden4", "qsdp", "sdp4bit", "lossless_w_g3"):
        block = {"scheme": scheme, "node_size": node_size, "checksum_steps": 0}
        run = played(three_steps, block, make=Wide)
        found = ds_quant.report(run.model)
        assert found is not None and found["steps"] == 3 and found["front"] == "ddp"
        expected = run.front.run.received_by_formula(run.front.run.comm_volume())
        received = found["received_bytes"]
        assert received["weights"] == expected["weights"] == {"intra": 0, "inter": 0}
        for link, nbytes in received["gradients"].items():
            total = sum(of_all_ranks(nbytes)) / world / 3
            assert total == pytest.approx(expected["gradients"][link], rel=0.01), (scheme, link)
        # A step takes two collectives per level, independent of the number of parameters.
        levels = 2 if world > node_size > 1 else 1
        assert found["collectives"]["gradients"] == 3 * 2 * levels


@pytest.mark.parametrize("world, node_size", [(2, 2), (4, 4), (4, 2)])
@on_ranks()
def test_eden4_receives_a_seventh_of_the_bytes_of_ddp(world: int, node_size: int) -> None:
    """Small tensors aside, which take 8 bytes per parameter as under DDP."""
    run = played(three_steps, {"scheme": "eden4", "node_size": node_size}, make=Wide)
    volume = run.front.run.comm_volume()
    small = sum(p.numel() for p in run.model.parameters() if p.dim() == 1)
    quantized = volume.step_bytes(0) - 8 * small / volume.numel
    if node_size < world:
        assert quantized < 1.2
        return
    per_rank = volume.received_per_node(0, micro_steps=1) - 2 * (world - 1) / world * 4 * (
        small / volume.numel
    )
    assert per_rank <= 2 * (world - 1) / world * 0.6


# ---- complex parameters ----


class Phases(nn.Module):
    """A model with complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phases = nn.ParameterList(
            [nn.Parameter(torch.randn(size, dtype=torch.complex64)) for size in (1, 5, 4096)]
        )
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        rotated = sum((phase.real.sum() + 2 * phase.imag.sum()) for phase in self.phases)
        return self.linear(x) * rotated


@on_ranks(2)
def test_complex_gradients_are_reduced_whole_and_exactly() -> None:
    """DDP hands over a complex bucket as its real view, of twice as many elements."""

    def gradients(block: dict[str, Any] | None) -> list[Tensor]:
        def one_backward(run: Run) -> None:
            torch.manual_seed(dist.get_rank())
            (run.model(torch.randn(4, 64)) ** 2).mean().backward()

        run = played(one_backward, block, make=Phases)
        return [parameter.grad for parameter in run.model.parameters()]

    plain = gradients(None)
    for scheme in ("full_precision", "eden4"):
        found = gradients({"scheme": scheme, "min_numel": 64})
        for ours, theirs in zip(found, plain, strict=True):
            if ours.is_complex():
                assert torch.equal(ours, theirs), scheme
