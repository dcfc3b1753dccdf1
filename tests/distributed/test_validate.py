"""``ds_quant validate`` refuses what start-up refuses under every front, with the same sentence;
start-up does so before any collective that a refusal could leave half done.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ds_quant import ConfigError, ddp, fsdp2
from ds_quant.policy import refusals
from ds_quant.tools.cli import main
from tests.distributed.behaviours import refused_configs
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import QSDP, Regression, build, settings
from tests.distributed.test_guard import collectives_issued
from tests.distributed.test_support import INSTALLED

WORLD = 2
NUMEL = sum(p.numel() for p in Regression().parameters())
SDP = {"scheme": "sdp4bit", "node_size": 1}
CPU = {"device": "cpu"}
LISTED = {  # in docs/support.md
    f"{name}, {stage}": (cell.config(stage, QSDP), cell.parts)
    for name, cell in refused_configs()
    for stage in cell.stages
    if INSTALLED >= cell.since
}
TABLE: dict[str, dict[str, Any]] = {
    **{name: config for name, (config, _) in LISTED.items()},
    "stage 0": settings(0, QSDP),
    "bits 9": settings(2, {"weights": {"bits": 9}}),
    "misspelt key": settings(2) | {"quantised_comm": QSDP},
    "block inside zero_optimization": settings(2, zero={"quantized_comm": QSDP}),
    "node_size 4 of 2": settings(3, {"node_size": 4}),
    "no stage": {**settings(2, QSDP), "zero_optimization": {}},
    "stage as a boolean": {**settings(2, QSDP), "zero_optimization": False},
    "two ZeRO++ flags": settings(
        3, QSDP, zero={"zero_quantized_weights": True, "zero_hpz_partition_size": 2}
    ),
    "flag in words": settings(3, QSDP, zero={"zero_quantized_weights": "true"}),
    "full replica": settings(3, SDP),
    "full replica, bf16": settings(3, SDP, dtype="bf16"),
    "full replica, node_shard": settings(3, {"node_shard": True, "node_size": 1}),
    "difference without a node shard": settings(3, {"scheme": "sdp4bit", "node_shard": False}),
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "values of a Trainer": settings(3, QSDP, zero={"zero_hpz_partition_size": "auto"}),
    "offload": settings(3, QSDP, zero={"offload_param": CPU}),
    "full replica": settings(3, {**SDP, "allow_full_replica": True}),
    "ZeRO-2": settings(2, SDP),
    "zeropp, one node": settings(3, {"scheme": "zeropp"}),
}


def started(config: dict[str, Any]) -> tuple[str, int]:
    """Return the error of start-up for a config, "" where it accepts it, and the collectives by
    then, since the plugin looked at the engine for the last time.
    """
    before, message = collectives_issued(), ""

    def noted(*args: Any, **how: Any) -> None:
        nonlocal before
        before = collectives_issued()
        refuse(*args, **how)

    refuse = refusals.refuse_unsupported
    with patch.object(refusals, "refuse_unsupported", noted):
        try:
            build(config).destroy()
        except Exception as error:
            message = str(error)
            assert "ConfigError" in type(error).__name__, message  # or DeepSpeed's own
    return message, collectives_issued() - before


def validated(config: dict[str, Any], *options: str) -> str:
    path = scratch() / f"{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(config))
    with redirect_stderr(StringIO()) as said:
        code = main(
            ["validate", str(path), "--world", str(WORLD), "--params", str(NUMEL), *options]
        )
    assert bool(said.getvalue()) == code
    return said.getvalue().removeprefix(f"{path}: ").rstrip("\n")


@on_ranks(WORLD, timeout=180)
def test_validate_refuses_what_start_up_refuses() -> None:
    for name, config in TABLE.items():
        message, collectives = started(config)
        assert message and collectives == 0, name
        _, parts = LISTED.get(name, (None, ()))
        assert [part for part in parts if part not in message] == [], message
        if "MiCS" not in name:  # which DeepSpeed 0.19 refuses by itself
            assert validated(config) == message, name


@on_ranks(WORLD, timeout=180)
def test_validate_accepts_what_start_up_accepts() -> None:
    for name, config in ACCEPTED.items():
        assert started(config)[0] == validated(config) == "", name


# ---- FSDP2 and DDP ----

BLOCKS: dict[str, dict[str, Any]] = {
    "an unknown key and an unknown value": {"weights": {"bit": 4}, "scheme": "eden"},
    "a DeepSpeed config with a misspelt block": {"quantised_comm": QSDP},
    "a DeepSpeed config whose block is in a section": {"zero": {"quantized_comm": QSDP}},
    "node_size 4 of 2": {"quantized_comm": {"node_size": 4}},
    "two settings": {"scheme": "sdp4bit", "node_shard": False, "node_size": 4},
    "difference without a node shard": {"scheme": "sdp4bit", "node_shard": False},
    "full replica": SDP,
    "autotune with weights": {"scheme": "autotune", "weights": {"bits": 4}},
    "lossless": {"scheme": "lossless_w_g3", "allow_full_replica": True},
    "hybrid": {"scheme": "hybrid", "node_size": 2},
}
TAKEN = {
    "fsdp2": {"lossless", "hybrid"},
    "ddp": {"lossless", "hybrid", "difference without a node shard", "full replica"},
}


def attached(block: dict[str, Any], front: str) -> tuple[str, int]:
    """Return the error of ``attach`` for a block, "" if it accepts it; and collectives by then."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    attach = partial(fsdp2.attach, model, block, optimizer=[])
    if front == "fsdp2":
        fully_shard(model)
    else:
        attach = partial(ddp.attach, DistributedDataParallel(model), block)
    before = collectives_issued()
    try:
        attach()
    except ConfigError as error:
        return str(error), collectives_issued() - before
    return "", 0


@pytest.mark.parametrize("front", ["fsdp2", "ddp"])
@on_ranks(WORLD)
def test_validate_refuses_what_attach_refuses(front: str) -> None:
    taken = set()
    for name, block in BLOCKS.items():
        message, collectives = attached(block, front)
        assert collectives == 0, name
        said = validated(block, "--front", front, "--params", str(64 * 64))
        assert said == message, name
        if not message:
            taken.add(name)
    assert taken == TAKEN[front]
