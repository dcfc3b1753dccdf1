"""Exports are those of an engine without the plugin that holds the same shards, byte for byte.

The quantized run is saved and the checkpoint loaded into a plain DeepSpeed engine, which exports
too. Before every export an evaluation leaves decoded weights behind, where the stage keeps any.
One start of the ranks per stage and scheme plays all exports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run
from tests.distributed.models import build, digest, evaluate, settings, train_step, watch

pytestmark = pytest.mark.distributed

# Two nodes of one rank, so that differences are taken from kept weights under ZeRO-3 too.
SCHEMES = {
    "qsdp": {"scheme": "qsdp", "node_size": 1},
    "sdp4bit": {"scheme": "sdp4bit", "node_size": 1, "allow_full_replica": True},
}
GATHERED = {  # parameters stay gathered and decoded after an evaluation
    "stage3_gather_16bit_weights_on_model_save": True,
    "stage3_max_reuse_distance": 10**9,
    "stage3_max_live_parameters": 10**9,
}
Bits = dict[str, tuple[str, tuple[int, ...], str]]


def bits_of(tensors: Mapping[str, torch.Tensor]) -> Bits:
    """dtype, shape and bits by name."""
    return {n: (str(t.dtype), tuple(t.shape), digest(t)) for n, t in tensors.items()}


def save_16bit(engine: Any, folder: Path) -> Bits:
    from deepspeed import comm as dist

    assert engine.save_16bit_model(str(folder), "model.bin")
    dist.barrier()
    return bits_of(torch.load(folder / "model.bin", weights_only=True))


def zero_to_fp32(engine: Any, folder: Path) -> Bits:
    from deepspeed import comm as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine.save_checkpoint(str(folder), tag="exported")
    dist.barrier()
    return bits_of(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="exported"))


def in_memory(engine: Any, folder: Path) -> Bits:
    """GatheredParameters under ZeRO-3, exact_weights below."""
    import deepspeed

    import ds_quant

    named = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return bits_of({n: p.data for n, p in named.items()})
    with ds_quant.exact_weights(engine):
        return bits_of(engine.module.state_dict())


EXPORTS = {"in memory": in_memory, "save_16bit_model": save_16bit, "zero_to_fp32": zero_to_fp32}


def _exported(stage: int, block: dict) -> dict[str, tuple[Bits, Bits, dict[str, str]]]:
    """By export: what the quantized and the plain engine write, and what an evaluation saw before
    the former.
    """
    from deepspeed import comm as dist

    scratch = Path(os.environ["TEST_SCRATCH"])
    zero = GATHERED if stage == 3 else {}
    engine = build(settings(stage, block, dtype="bf16", zero=zero))
    quantized = {}
    train_step(engine, 0)
    for step, (name, export) in enumerate(EXPORTS.items(), start=1):
        train_step(engine, step)  # before every one: an export makes kept weights exact
        with watch(engine) as seen:
            evaluate(engine)
        used = {s.name: s.bits for s in seen}
        quantized[name] = export(engine, scratch / f"quantized {name}"), used
        engine.save_checkpoint(str(scratch), tag=name)
        dist.barrier()
    engine.destroy()

    engine = build(settings(stage, None, dtype="bf16", zero=zero), seed=7)
    found = {}
    for name, export in EXPORTS.items():
        engine.load_checkpoint(str(scratch), tag=name)
        bits, used = quantized[name]
        found[name] = bits, export(engine, scratch / f"plain {name}"), used
    return found


@cache
def exported(stage: int, scheme: str) -> list[dict[str, tuple[Bits, Bits, dict[str, str]]]]:
    return run(_exported, 2, stage, SCHEMES[scheme])


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_export_equals_that_of_a_plain_engine_with_the_same_shards(
    stage: int, scheme: str, name: str
) -> None:
    for quantized, plain, seen in (rank[name] for rank in exported(stage, scheme)):
        assert list(quantized) == list(plain) and len(plain) == len(seen) == 8
        assert quantized == plain
        if name != "zero_to_fp32":  # else bits of fp32 and bf16 differ anyway
            decoded = {n for n, (*_, bits) in quantized.items() if bits != seen[n]}
            assert decoded == {"first.weight", "second.weight", "last.weight"}
