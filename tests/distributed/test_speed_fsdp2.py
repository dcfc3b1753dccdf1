"""The FSDP2 engines of benchmarks/speed.py: equal training, bytes, and one reduction per step."""

from __future__ import annotations

import fsdp2_engine
import pytest
import torch
from gpt import GPT, GPTConfig
from torch.distributed.fsdp import FSDPModule

import ds_quant
from tests.distributed.harness import of_all_ranks, on_ranks

BLOCK = {"scheme": "eden4", "node_size": 2, "min_numel": 256}


def trained(
    kind: str, block: dict | None, *, accumulation: int = 2
) -> tuple[list[float], fsdp2_engine.FSDP2Engine]:
    """Losses of three steps on rows of this rank, and the engine."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, seq_len=8, compute_dtype=torch.float32))
    config = {
        "fsdp2": kind,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"params": {"lr": 1e-2}},
    }
    if block is not None:
        config["quantized_comm"] = block
    engine = fsdp2_engine.build(model, config, nodes=2)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    rows = torch.randint(256, (2, 4, 8), generator=generator)
    losses = []
    for _ in range(3):
        for _ in range(accumulation):
            loss = engine(*rows)
            engine.backward(loss)
            engine.step()
        losses.append(sum(of_all_ranks(loss.item())) / 4)
    engine.finish_messages()
    return losses, engine


@pytest.mark.slow
@on_ranks(4)
def test_engines_train_alike_on_both_meshes_and_with_the_plugin() -> None:
    flat, engine = trained("flat", None)
    assert engine.global_steps == 3 and ds_quant.report(engine.module) is None
    assert flat[0] - flat[-1] > 0.1
    replicas, engine = trained("hsdp", None)
    assert replicas == pytest.approx(flat, abs=0.02)
    assert all(isinstance(block, FSDPModule) for block in engine.module.blocks)
    for kind in ("flat", "hsdp"):
        ours, engine = trained(kind, BLOCK)
        assert ours == pytest.approx(flat, abs=0.05) and ours != flat, kind
        _, without_accumulation = trained(kind, BLOCK, accumulation=1)
        assert gradient_bytes(engine) == gradient_bytes(without_accumulation) > 0, kind


def gradient_bytes(engine: fsdp2_engine.FSDP2Engine) -> int:
    """Bytes of gradients that this rank has received from other nodes in three steps."""
    report = ds_quant.report(engine.module)
    assert report is not None and report["steps"] == 3
    return report["received_bytes"]["gradients"]["inter"]
