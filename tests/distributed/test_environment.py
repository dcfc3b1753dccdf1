"""DS_QUANT_BLOCK: a block for DeepSpeed configs that nobody can edit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_quant.config.environment import VARIABLE
from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    Regression,
    build,
    digests,
    heard,
    masters,
    settings,
    train_step,
)

BLOCK = {"scheme": "sdp4bit", "node_size": 2}
GIVEN = {VARIABLE: json.dumps(BLOCK)}


def _trained(block: dict[str, Any] | None, stage: int) -> tuple[list[float], Any, str]:
    """Losses, digests of the weights and the start-up line, empty without the plugin."""
    import ds_quant

    engine = build(settings(stage, block, dtype="bf16"))
    losses = [train_step(engine, step)[0] for step in range(3)]
    report = ds_quant.report(engine)
    return losses, digests(masters(engine)), "" if report is None else report["line"]


def test_a_file_is_read_and_a_block_in_the_config_wins(tmp_path: Path) -> None:
    path = tmp_path / "block.json"
    path.write_text(json.dumps({"quantized_comm": BLOCK}))
    (_, _, line), _ = run(_trained, 2, None, 2, environment={VARIABLE: str(path)})
    assert line.startswith("sdp4bit on ZeRO-2") and f"from {VARIABLE}" in line
    (_, _, line), _ = run(_trained, 2, {"scheme": "qsdp"}, 2, environment=GIVEN)
    assert line.startswith("qsdp on ZeRO-2") and VARIABLE not in line
    (_, _, line), _ = run(_trained, 2, {"enabled": False}, 2, environment=GIVEN)
    assert line == ""


def _elsewhere() -> list[Any]:
    """What rank 0 logs and whether there is a plugin: stage 0, and ZeRO-3 without an optimizer."""
    import deepspeed

    import ds_quant

    logged = heard()
    config = settings(0)
    config["zero_optimization"] = {"stage": 0}
    engine = build(config)
    losses = [train_step(engine, step)[0] for step in range(2)]
    frozen = deepspeed.initialize(model=Regression(), config=settings(3, dtype="bf16"))[0]
    with torch.no_grad():
        frozen(torch.ones(1, 63, dtype=torch.bfloat16), torch.ones(1, 61))
    return [*logged, ds_quant.report(engine), ds_quant.report(frozen), losses[1] != losses[0]]


def test_stage_0_and_engines_without_an_optimizer_stay_as_they_are() -> None:
    for first, second, *rest in run(_elsewhere, 2, environment=GIVEN):
        assert "has no effect on an engine at stage 0" in first
        assert "has no effect without an optimizer" in second
        assert rest == [None, None, True]


def _other_block(rank_1: str) -> None:
    if torch.distributed.get_rank() == 1:
        os.environ[VARIABLE] = rank_1
    build(settings(2))


def test_the_handshake_compares_it() -> None:
    for _, error in run_each(_other_block, 2, '{"scheme": "qsdp", "seed": 1}', environment=GIVEN):
        assert "ranks disagree" in error and "seed" in error


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'scheme': 1}", "allowed: a block such as"),
        ("/nowhere/block.json", "No such file or directory"),
        ('{"scheme": "qspd"}', 'did you mean "qsdp"?'),
        ("[1]", "allowed: a block such as"),
    ],
)
def test_a_wrong_one_ends_the_job_like_a_wrong_block(value: str, said: str) -> None:
    for _, error in run_each(_trained, 2, None, 2, environment={VARIABLE: value}):
        assert f"ConfigError: {VARIABLE}: " in error and said in error
