"""``state_dict()`` under ZeRO-1/2 holds decoded weights, and says so once per line of user code."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

from tests.distributed.harness import run
from tests.distributed.models import FULL, Regression, build, settings, train_step

CODES = {"scheme": "qsdp_w4g4"}


def counted() -> list[str]:
    """The state dicts that rank 0 has warned of, as they are."""
    from ds_quant.zero import log

    logged: list[str] = []
    log.log_rank0 = lambda line: logged.append(line) if "state_dict()" in line else None
    return logged


def said(stage: int, block: dict[str, Any]) -> dict[str, int]:
    """How often rank 0 has warned, after what is allowed and after what is not."""
    import ds_quant

    engine, logged = build(settings(stage, block, dtype="bf16")), counted()
    found: dict[str, int] = {}
    engine.module.state_dict()
    found["before the first step"] = len(logged)
    train_step(engine, 0)
    with ds_quant.exact_weights(engine):
        engine.module.state_dict()
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], "here")
    engine.save_16bit_model(os.environ["TEST_SCRATCH"])
    train_step(engine, 1)
    copy.deepcopy(engine.module).state_dict()
    copy.deepcopy(engine.module.second).state_dict()
    engine.module.norm.state_dict()  # travels in full precision
    found["exact, or a copy"] = len(logged)
    for read in (engine.state_dict, engine.module.state_dict, engine.module.second.state_dict):
        read()  # one line
    found["decoded"] = len(logged)
    engine.module.second.state_dict()
    found["elsewhere"] = len(logged)
    assert not logged or f"{__file__}:" in logged[0] and "lossless_w_g4" in logged[0]
    return found


@pytest.mark.parametrize("stage", (1, 2))
def test_a_decoded_state_dict_is_told_of_once_per_line(stage: int) -> None:
    for found in run(said, 2, stage, CODES):
        assert found == {
            "before the first step": 0, "exact, or a copy": 0, "decoded": 1, "elsewhere": 2,
        }  # fmt: skip


EXACT = {"full": FULL, "warm-up": {**CODES, "warmup_steps": 9}, "lossless": {"scheme": "lossless"}}


@pytest.mark.parametrize("block", EXACT.values(), ids=EXACT)
def test_an_exact_state_dict_is_not_told_of(block: dict[str, Any]) -> None:
    for found in run(said, 2, 2, block):
        assert set(found.values()) == {0}


def after_a_save() -> int:
    engine, logged = build(settings(2, {"scheme": "sdp4bit"}, dtype="bf16")), counted()
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
