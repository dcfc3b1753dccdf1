"""``module.state_dict()`` under ZeRO-1/2 holds decoded weights, and says so once."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

from tests.distributed.harness import run
from tests.distributed.models import FULL, Regression, build, settings, train_step

pytestmark = pytest.mark.distributed

CODES = {"scheme": "qsdp_w4g4"}


def said(stage: int, block: dict[str, Any]) -> dict[str, int]:
    """How often rank 0 warns, after what is allowed and after what is not."""
    import ds_quant
    from ds_quant.zero import log

    engine = build(settings(stage, block, dtype="bf16"))
    logged: list[str] = []
    log.log_rank0 = logged.append
    warnings: dict[str, int] = {}

    def count(name: str) -> None:
        warnings[name] = sum("module.state_dict()" in line for line in logged)

    engine.module.state_dict()
    count("before the first step")
    train_step(engine, 0)
    with ds_quant.exact_weights(engine):
        engine.module.state_dict()
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], "here")
    engine.save_16bit_model(os.environ["TEST_SCRATCH"])
    train_step(engine, 1)
    copy.deepcopy(engine.module).state_dict()
    count("exact, or a copy")
    engine.module.state_dict()
    engine.module.state_dict()
    count("decoded")
    return warnings


@pytest.mark.parametrize("stage", (1, 2))
def test_a_decoded_state_dict_is_told_of_once(stage: int) -> None:
    for warnings in run(said, 2, stage, CODES):
        assert warnings == {"before the first step": 0, "exact, or a copy": 0, "decoded": 1}


@pytest.mark.parametrize("block", [FULL, {**CODES, "warmup_steps": 9}], ids=["full", "warm-up"])
def test_an_exact_state_dict_is_not_told_of(block: dict[str, Any]) -> None:
    for warnings in run(said, 2, 2, block):
        assert set(warnings.values()) == {0}


def after_a_save() -> int:
    from ds_quant.zero import log

    engine = build(settings(2, {"scheme": "sdp4bit"}, dtype="bf16"))
    logged: list[str] = []
    log.log_rank0 = logged.append
    train_step(engine, 0)
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], "here")
    engine.module.state_dict()
    before = len(logged)
    train_step(engine, 1)
    engine.module.state_dict()
    return len(logged) - before if before == 0 else -1


def test_differences_are_exact_after_a_save_until_the_next_step() -> None:
    assert run(after_a_save, 2) == [1, 1]


def mistaken() -> list[str]:
    import ds_quant

    engine, messages = build(settings(2, CODES, dtype="bf16")), []
    for function in (ds_quant.exact_weights, ds_quant.resync, ds_quant.report):
        for wrong in (engine.module, Regression(), "nonsense", None):
            with pytest.raises(TypeError) as caught:
                function(wrong)
            messages.append(str(caught.value))
    assert ds_quant.report(build(settings(2))) is None
    return messages


def test_what_is_no_engine_is_refused_by_name() -> None:
    for messages in run(mistaken, 1):
        assert messages[0].startswith("ds_quant.exact_weights takes the engine")
        assert messages[-2].endswith("not str") and "ds_quant.report" in messages[-2]
