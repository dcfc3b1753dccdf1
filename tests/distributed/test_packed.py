"""Packed weights, which are bit patterns stored as floats (QLoRA), never lose a byte."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ds_quant.config.presets import AUTOTUNE, preset_names
from tests.distributed.harness import run
from tests.distributed.models import build, digest, settings, train_step, watch
from tests.distributed.packed import Adapted, Packed, bitsandbytes_linear

pytestmark = pytest.mark.distributed

KINDS = ["subclass", "quant_state", "bnb_quantized", "module state", "W_q"]
STEPS = 3
# Every preset; gathers inside a node quantized; autotune where qsdp is what it can take.
BLOCKS: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name, "node_size": 2} for name in (*preset_names(), AUTOTUNE)},
    "intra": {"scheme": "sdp4bit", "node_size": 2, "weights": {"intra": {"bits": 8}}},
    "intra, one node": {"scheme": "sdp4bit", "weights": {"intra": {"bits": 8}}},
    "learned": {
        "scheme": "qsdp",
        "weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [1]},
    },
}


def base_of(kind: str) -> Any:
    return bitsandbytes_linear if kind == "bitsandbytes" else partial(Packed, kind)


def packed_bits(model: torch.nn.Module) -> dict[str, str]:
    return {n: digest(p.data) for n, p in model.named_parameters() if n.startswith("base.")}


def seen(kind: str, names: list[str]) -> dict[str, tuple[dict, set, list[float], str]]:
    """By block: bits of the base before, all bits seen in forward and backward, losses, line."""
    import ds_quant

    found = {}
    for name in names:
        before: dict[str, str] = {}

        def model(before: dict[str, str] = before) -> torch.nn.Module:
            module = Adapted(base_of(kind)).to(torch.bfloat16)
            before.update(packed_bits(module))
            return module

        engine = build(settings(3, BLOCKS.get(name), dtype="bf16"), model)
        with watch(engine) as sightings:
            losses = [loss for step in range(STEPS) for loss in train_step(engine, step)]
        bits = {(s.name, s.bits) for s in sightings if s.name in before}
        report = ds_quant.report(engine)
        found[name] = before, bits, losses, report["line"] if report else ""
        engine.destroy()
    return found


def check(kind: str, names: list[str]) -> None:
    for ranks in run(seen, 4, kind, ["none", *names], timeout=280):
        for name in names:
            before, bits, losses, line = ranks[name]
            assert before and bits == set(before.items()), name
            assert losses[0] == pytest.approx(ranks["none"][2][0], rel=0.05), name
            counted = name != "lossless" and "nothing quantized" not in line
            assert ("1 packed" in line) == counted, line


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_known_by_each_mark(kind: str) -> None:
    check(kind, ["qsdp", "intra"])


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_weights_packed_by_bitsandbytes_keep_every_byte_under_every_scheme() -> None:
    check("bitsandbytes", list(BLOCKS))


def resumed(name: str) -> tuple[dict, list[set], list[float], list[float]]:
    """Bits of the base at first, those seen in a run that saves and in one that loads what it has
    saved; losses of both after that.
    """
    from deepspeed import comm as dist

    folder, losses, found, first = os.environ["TEST_SCRATCH"], [], [], {}
    for loads in (False, True):

        def model(loads: bool = loads) -> torch.nn.Module:
            module = Adapted(partial(Packed, "subclass")).to(torch.bfloat16)
            if loads:
                module.base.weight.data.zero_()
            else:
                first.update(packed_bits(module))
            return module

        engine = build(settings(3, BLOCKS[name], dtype="bf16"), model)
        if loads:
            engine.load_checkpoint(folder, "middle")
        else:
            train_step(engine, 0)
            engine.save_checkpoint(folder, "middle")
            dist.barrier()
        with watch(engine) as sightings:
            losses.append([loss for step in (1, 2) for loss in train_step(engine, step)])
        found.append({(s.name, s.bits) for s in sightings if s.name in first})
        engine.destroy()
    return first, found, *losses


@pytest.mark.parametrize("name", ["qsdp", "sdp4bit", "intra"])
def test_packed_weights_are_saved_and_resumed_as_they_are(name: str) -> None:
    for first, found, went_on, loaded in run(resumed, 4, name):
        assert first and found == [set(first.items())] * 2
        assert went_on == loaded
