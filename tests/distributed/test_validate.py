"""``ds_quant validate`` refuses what start-up refuses, with the same sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_quant.tools.cli import main
from tests.distributed.harness import run
from tests.distributed.models import QSDP, Regression, build, settings
from tests.distributed.support import REFUSED
from tests.distributed.test_guard import AT_PARSING, AT_THE_ENGINE
from tests.distributed.test_support import INSTALLED

pytestmark = pytest.mark.distributed
WORLD = 2
NUMEL = sum(p.numel() for p in Regression().parameters())
SDP = {"scheme": "sdp4bit", "node_size": 1}
CPU = {"device": "cpu"}
TABLE: dict[str, dict[str, Any]] = {
    **AT_PARSING,
    **{name: config for name, (world, config, _) in AT_THE_ENGINE.items() if world == WORLD},
    **{
        row.feature: row.config(row.stages[-1], QSDP)
        for row in REFUSED
        if INSTALLED >= row.since and row.feature != "MiCS"  # DeepSpeed 0.19 refuses it by itself
    },
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


def started(configs: list[dict[str, Any]]) -> list[str]:
    """What start-up says to each config; nothing where it accepts it."""
    said = []
    for config in configs:
        try:
            build(config).destroy()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def validated(config: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    code = main(["validate", str(path), "--world", str(WORLD), "--params", str(NUMEL)])
    message = capsys.readouterr().err
    assert bool(message) == code
    return message.removeprefix(f"{path}: ").rstrip("\n")


def test_validate_refuses_what_start_up_refuses(tmp_path: Path, capsys) -> None:
    for said in run(started, WORLD, list(TABLE.values()), timeout=180):
        for (name, config), expected in zip(TABLE.items(), said, strict=True):
            assert expected, f"{name}: start-up accepts it"
            assert validated(config, tmp_path, capsys) == expected, name


def test_validate_accepts_what_start_up_accepts(tmp_path: Path, capsys) -> None:
    configs = list(ACCEPTED.values())
    assert run(started, WORLD, configs, timeout=180) == [[""] * len(configs)] * WORLD
    assert [validated(config, tmp_path, capsys) for config in configs] == [""] * len(configs)
