"""DS_QUANT_BLOCK: a block for DeepSpeed configs that nobody can edit."""

from __future__ import annotations

import json
import os

import pytest
import torch

import ds_quant
from ds_quant.config.environment import VARIABLE
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import Regression, build, engine_of, heard, settings, train_steps

BLOCK = {"scheme": "sdp4bit", "node_size": 2}
GIVEN = {VARIABLE: json.dumps(BLOCK)}


@on_ranks()
def test_a_file_is_read() -> None:
    """Trained with a block of the environment: see test_equal_runs.py."""
    (scratch() / "block.json").write_text(json.dumps({"quantized_comm": BLOCK}))
    os.environ[VARIABLE] = str(scratch() / "block.json")
    line = ds_quant.report(engine_of(2))["line"]
    assert line.startswith("sdp4bit on ZeRO-2") and f"from {VARIABLE}" in line


@on_ranks(environment=GIVEN)
def test_a_block_in_the_config_wins() -> None:
    line = ds_quant.report(engine_of(2, {"scheme": "qsdp"}))["line"]
    assert line.startswith("qsdp on ZeRO-2") and VARIABLE not in line
    assert ds_quant.report(engine_of(2, {"enabled": False})) is None


@on_ranks(environment=GIVEN)
def test_stage_0_and_engines_without_an_optimizer_stay_as_they_are() -> None:
    import deepspeed

    logged, config = heard(), settings(0)
    config["zero_optimization"] = {"stage": 0}
    engine = build(config)
    first, second = train_steps(engine, 2)
    assert first != second
    frozen = deepspeed.initialize(model=Regression(), config=settings(3, dtype="bf16"))[0]
    with torch.no_grad():
        frozen(torch.ones(1, 63, dtype=torch.bfloat16), torch.ones(1, 61))
    first, second = logged
    assert "has no effect on an engine at stage 0" in first
    assert "has no effect without an optimizer" in second
    assert ds_quant.report(engine) is ds_quant.report(frozen) is None


@on_ranks(environment=GIVEN)
def test_the_handshake_compares_it() -> None:
    if torch.distributed.get_rank() == 1:
        os.environ[VARIABLE] = '{"scheme": "qsdp", "seed": 1}'
    with pytest.raises(RuntimeError, match="(?s)ranks disagree.*seed"):
        engine_of(2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'scheme': 1}", "allowed: a block such as"),
        ("/nowhere/block.json", "No such file or directory"),
        ('{"scheme": "qspd"}', r'did you mean "qsdp"\?'),
        ("[1]", "allowed: a block such as"),
    ],
)
@on_ranks()
def test_a_wrong_one_ends_the_job_like_a_wrong_block(value: str, said: str) -> None:
    from ds_quant.config.errors import ConfigError

    os.environ[VARIABLE] = value
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: .*{said}"):
        engine_of(2)
