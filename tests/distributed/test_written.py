"""The replica of ZeRO-1/2 in user's hands: weights that user code writes stay, in exports too,
until the next step; a ``state_dict()`` of decoded weights is told of once per line of user code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_quant
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import (
    FULL,
    Regression,
    digest,
    engine_of,
    exact,
    heard,
    live,
    saved,
    train_step,
)

BLOCKS = {
    "full_precision": FULL,
    "lossless": {"scheme": "lossless"},
    "qsdp": {"scheme": "qsdp", "node_size": 1},
    "sdp4bit": {"scheme": "sdp4bit", "node_size": 1},
}


def exported(engine: Any) -> dict[str, str]:
    return {n: digest(t) for n, t in saved(engine).items()}


def in_place(p: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        p.copy_(values)


def through_data(p: Tensor, values: Tensor) -> None:
    p.data.copy_(values)


def other_storage(p: Tensor, values: Tensor) -> None:
    p.data = values.clone()


WAYS: tuple[Callable[[Tensor, Tensor], None], ...] = (in_place, through_data, other_storage)


@pytest.mark.parametrize(("stage", "name"), [(1, "qsdp"), *((2, name) for name in BLOCKS)])
@on_ranks()
def test_an_average_in_the_module_is_exported_and_stays(stage: int, name: str) -> None:
    """It goes in, is exported, and goes out again; the next step takes over."""
    engine = engine_of(stage, BLOCKS[name])
    params = dict(engine.module.named_parameters())
    for step, write in enumerate(WAYS):
        train_step(engine, step)
        before = {n: (p.data, p.data.clone()) for n, p in params.items()}
        for p in params.values():
            write(p, (p.detach().float() * 0.75).to(p.dtype))
        average = live(engine)
        assert exported(engine) == average == live(engine)
        for n, p in params.items():
            p.data, values = before[n]
            p.data.copy_(values)
    train_step(engine, len(WAYS))
    assert exported(engine) == exact(engine, "bf16")


@pytest.mark.parametrize("name", ["qsdp", "sdp4bit"])
@on_ranks()
def test_what_was_not_written_is_exact_in_exports(name: str) -> None:
    """One parameter is written; the others are exact in files and decoded afterwards."""
    engine, logged = engine_of(2, BLOCKS[name]), heard()
    train_step(engine, 0)
    engine.module.second.weight.data[:, 0] = 0.0
    before, masters = live(engine), exact(engine, "bf16")
    wanted = {**masters, "second.weight": before["second.weight"]}
    assert exported(engine) == wanted
    engine.save_checkpoint(str(scratch()), "here")
    torch.distributed.barrier()
    states = torch.load(scratch() / "here" / "mp_rank_00_model_states.pt", weights_only=False)
    assert {n: digest(t) for n, t in states["module"].items()} == wanted
    assert before["first.weight"] != masters["first.weight"]
    # Differences stay exact: see [Note: differences] of replica.py.
    assert live(engine) == (before if name == "qsdp" else wanted)
    if engine.global_rank == 0:
        assert len(logged) == 1 and "such as second.weight" in logged[0]
    with ds_quant.exact_weights(engine):
        engine.module.last.bias.data.zero_()
        written = digest(engine.module.last.bias)
        assert exported(engine) == {**wanted, "last.bias": written}
    assert digest(engine.module.last.bias) == written
    ds_quant.resync(engine)
    assert live(engine) == masters


# ---- state dicts ----

CODES = {"scheme": "qsdp_w4g4"}
EXACT = {"full": FULL, "warm-up": {**CODES, "warmup_steps": 9}, "lossless": {"scheme": "lossless"}}


def warnings() -> list[str]:
    """The state dicts that rank 0 is warned of from here on, as they are."""
    from ds_quant.zero import log

    logged: list[str] = []
    log.log_rank0 = lambda line: logged.append(line) if "state_dict()" in line else None
    return logged


@pytest.mark.parametrize(
    ("stage", "block", "decodes"),
    [(1, CODES, True), (2, CODES, True), *((2, block, False) for block in EXACT.values())],
    ids=["ZeRO-1", "ZeRO-2", *EXACT],
)
@on_ranks()
def test_a_decoded_state_dict_is_told_of_once_per_line(
    stage: int, block: dict[str, Any], decodes: bool
) -> None:
    engine, logged = engine_of(stage, block), warnings()
    engine.module.state_dict()
    assert logged == [], "before the first step"
    train_step(engine, 0)
    with ds_quant.exact_weights(engine):
        engine.module.state_dict()
    engine.save_checkpoint(str(scratch()), "here")
    engine.save_16bit_model(str(scratch()))
    train_step(engine, 1)
    copy.deepcopy(engine.module).state_dict()
    copy.deepcopy(engine.module.second).state_dict()
    engine.module.norm.state_dict()  # travels in full precision
    assert logged == [], "exact, or a copy"
    for read in (engine.state_dict, engine.module.state_dict, engine.module.second.state_dict):
        read()  # one line
    assert len(logged) == decodes
    engine.module.second.state_dict()
    assert len(logged) == 2 * decodes
    assert not logged or f"{__file__}:" in logged[0] and "lossless_w_g4" in logged[0]


@on_ranks()
def test_differences_are_exact_after_a_save_until_the_next_step() -> None:
    engine, logged = engine_of(2, {"scheme": "sdp4bit"}), warnings()
    train_step(engine, 0)
    engine.save_checkpoint(str(scratch()), "here")
    engine.module.state_dict()
    assert logged == []
    train_step(engine, 1)
    engine.module.state_dict()
    assert len(logged) == 1


@on_ranks(1)
def test_what_is_no_engine_is_refused_by_name() -> None:
    engine = engine_of(2, CODES)
    for function in (ds_quant.exact_weights, ds_quant.resync, ds_quant.report):
        for wrong in (engine.module, Regression(), "nonsense", None):
            said = f"ds_quant.{function.__name__} takes the engine.*not {type(wrong).__name__}$"
            with pytest.raises(TypeError, match=said):
                function(wrong)
    assert ds_quant.report(engine_of(2, dtype="fp32")) is None
