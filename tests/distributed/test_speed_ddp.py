"""The DDP engines of benchmarks/speed.py: equal training, and one reduction per step."""

from __future__ import annotations

import ddp_engine
import pytest
import torch
from gpt import GPT, GPTConfig

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
