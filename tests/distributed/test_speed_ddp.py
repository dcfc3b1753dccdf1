"""The DDP engines of benchmarks/speed.py: equal training, and one reduction per step."""

from __future__ import annotations

import copy

import ddp_engine
import power_sgd
import pytest
import torch
from gpt import GPT, GPTConfig
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ds_quant
from tests.distributed.harness import of_all_ranks, on_ranks


def trained(kind: str, block: dict | None = None) -> tuple[list[float], ddp_engine.DDPEngine]:
    """Return losses of six steps on rows of this rank, and the engine."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, seq_len=8, compute_dtype=torch.float32))
    config = {
        "ddp": kind,
        "gradient_accumulation_steps": 2,
        "optimizer": {"params": {"lr": 3e-3}},
    }
    if block is not None:
        config["quantized_comm"] = block
    engine = ddp_engine.build(model, config)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    rows = torch.randint(256, (2, 4, 8), generator=generator)
    losses = []
    for _ in range(6):
        for _ in range(2):
            loss = engine(*rows)
            engine.backward(loss)
            engine.step()
        losses.append(sum(of_all_ranks(loss.item())) / 2)
    return losses, engine


@pytest.mark.slow
@on_ranks(2)
def test_engines_train_alike_with_hooks_of_torch_and_with_the_plugin() -> None:
    plain, engine = trained("plain")
    assert engine.global_steps == 6 and ds_quant.report(engine.module) is None
    assert plain[0] - plain[-1] > 0.3
    exact, _ = trained("plain", {"scheme": "full_precision"})
    assert exact == plain
    for kind, block in (("bf16", None), ("powersgd", None), ("plain", {"scheme": "eden4"})):
        found, engine = trained(kind, block)
        assert found == pytest.approx(plain, abs=0.5 if kind == "powersgd" else 0.02), kind
        assert found != plain, kind
    report = ds_quant.report(engine.module)
    assert report is not None and report["steps"] == 6  # of twelve micro-steps


@pytest.mark.slow
@on_ranks(2)
def test_power_sgd_of_simulated_ranks_is_that_of_torch() -> None:
    """In the study of convergence.py, from the same first Q on."""
    shape = torch.Size((24, 40))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(*reversed(shape)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    parameters = list(model.parameters())
    simulated = power_sgd.PowerSGD(parameters, ranks=2, rank=4, seed=0)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(6):
        x = torch.randn(8, shape[1], generator=generator)
        target = torch.randn(8, shape[0], generator=generator)
        if step == 2:  # torch is about to draw its first Q
            numbers = copy.deepcopy(state.rng)
            drawn = torch.Generator().manual_seed(int(numbers.randint(1_000_000_000)))
            columns = torch.randn(1, shape[1], 4, generator=drawn)[0]
            first = {**simulated.state(), "columns": [columns, None]}
            simulated.load_state(first)
        own = nn.Linear(*reversed(shape))
        own.load_state_dict(model.module.state_dict())
        (own(x) - target).square().mean().backward()
        of_ranks = of_all_ranks([p.grad for p in own.parameters()])
        model.zero_grad()
        (model(x) - target).square().mean().backward()
        if step < 2:
            continue
        found = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(
            simulated.reduce(of_ranks, is_last=True), found, rtol=1e-4, atol=1e-6
        )
        assert not torch.equal(
            found[: shape.numel()], torch.stack([g[0] for g in of_ranks]).mean(0).reshape(-1)
        )
