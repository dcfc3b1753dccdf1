"""Weights that user code writes under ZeRO-1/2 stay, in exports too, until the next step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.harness import run
from tests.distributed.models import FULL, build, digest, exact, heard, settings, train_step

BLOCKS = {
    "full_precision": FULL,
    "lossless": {"scheme": "lossless"},
    "qsdp": {"scheme": "qsdp", "node_size": 1},
    "sdp4bit": {"scheme": "sdp4bit", "node_size": 1},
}
Bits = dict[str, str]


def live(engine: Any) -> Bits:
    return {n: digest(p) for n, p in engine.module.named_parameters()}


def exported(engine: Any) -> Bits:
    from deepspeed import comm as dist

    engine.save_16bit_model(os.environ["TEST_SCRATCH"], "model.bin")
    dist.barrier()
    saved = torch.load(Path(os.environ["TEST_SCRATCH"]) / "model.bin", weights_only=True)
    dist.barrier()  # before anybody writes it again
    return {n: digest(t) for n, t in saved.items()}


def in_place(p: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        p.copy_(values)


def through_data(p: Tensor, values: Tensor) -> None:
    p.data.copy_(values)


def other_storage(p: Tensor, values: Tensor) -> None:
    p.data = values.clone()


WAYS = (in_place, through_data, other_storage)


def swapped(engine: Any, write: Callable[[Tensor, Tensor], None]) -> dict[str, Bits]:
    """An average goes in, is exported, and goes out again."""
    params = dict(engine.module.named_parameters())
    before = {n: p.data for n, p in params.items()}
    copies = {n: p.clone() for n, p in before.items()}
    for p in params.values():
        write(p, (p.detach().float() * 0.75).to(p.dtype))
    found = {"average": live(engine), "exported": exported(engine), "live": live(engine)}
    for n, p in params.items():
        p.data = before[n]
        p.data.copy_(copies[n])
    return found


def averaged(stage: int, block: dict[str, Any]) -> dict[str, Any]:
    engine, found = build(settings(stage, block, dtype="bf16")), {}
    for step, write in enumerate(WAYS):
        train_step(engine, step)
        found[write.__name__] = swapped(engine, write)
    train_step(engine, len(WAYS))
    found["trained"] = exported(engine), exact(engine, "bf16")
    return found


@pytest.mark.parametrize(("stage", "name"), [(1, "qsdp"), *((2, name) for name in BLOCKS)])
def test_an_average_in_the_module_is_exported_and_stays(stage: int, name: str) -> None:
    for found in run(averaged, 2, stage, BLOCKS[name]):
        exported, masters = found.pop("trained")
        assert exported == masters  # the next step has taken over
        assert list(found) == [write.__name__ for write in WAYS]
        for way in found.values():
            assert way["exported"] == way["average"] and way["live"] == way["average"]


def surgery(block: dict[str, Any]) -> dict[str, Any]:
    """One parameter is written; the others are exact in files and decoded afterwards."""
    from deepspeed import comm as dist

    import ds_quant

    engine, folder = build(settings(2, block, dtype="bf16")), os.environ["TEST_SCRATCH"]
    logged = heard()
    train_step(engine, 0)
    engine.module.second.weight.data[:, 0] = 0.0
    found: dict[str, Any] = {"before": live(engine), "masters": exact(engine, "bf16")}
    found["exported"] = exported(engine)
    engine.save_checkpoint(folder, "here")
    dist.barrier()
    states = torch.load(Path(folder) / "here" / "mp_rank_00_model_states.pt", weights_only=False)
    found["checkpoint"] = {n: digest(t) for n, t in states["module"].items()}
    found["live"], found["logged"] = live(engine), list(logged)
    with ds_quant.exact_weights(engine):
        engine.module.last.bias.data.zero_()
        found["written inside"] = digest(engine.module.last.bias)
        found["exported inside"] = exported(engine)
    found["kept"] = digest(engine.module.last.bias)
    ds_quant.resync(engine)
    found["resynced"] = live(engine)
    return found


@pytest.mark.parametrize("name", ["qsdp", "sdp4bit"])
def test_what_was_not_written_is_exact_in_exports(name: str) -> None:
    first, second = run(surgery, 2, BLOCKS[name])
    assert len(first["logged"]) == 1 and "such as second.weight" in first["logged"][0]
    for found in (first, second):
        before, masters = found["before"], found["masters"]
        wanted = {**masters, "second.weight": before["second.weight"]}
        assert found["exported"] == wanted and found["checkpoint"] == wanted
        assert before["first.weight"] != masters["first.weight"]
        # Differences stay exact: see [Note: differences] of replica.py.
        assert found["live"] == (before if name == "qsdp" else wanted)
        assert found["exported inside"] == {**wanted, "last.bias": found["written inside"]}
        assert found["kept"] == found["written inside"]
        assert found["resynced"] == masters
