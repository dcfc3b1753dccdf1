"""Blocks of engines: where they are read, and at which stages they stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ds_quant.config.environment import VARIABLE
from ds_quant.runtime import log
from ds_quant.zero import install

Around = Callable[..., Any]


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Around]:
    """Return the functions that would go around DeepSpeed's methods, by their names."""
    found: dict[str, Around] = {}
    wrap = lambda owner, name, around: found.update({name: around})  # noqa: E731
    monkeypatch.setattr(install, "wrap_once", wrap)
    for name in ("shorten_messages", "defer_operator"):
        monkeypatch.setattr(install, name, lambda: None)
    monkeypatch.setattr(log, "log_rank0", lambda said: None)
    install.install()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("variable", [False, True])
def test_a_block_stays_at_every_stage_that_shards(
    variable: bool, stage: int, wrappers: dict[str, Around], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the environment too."""
    block = {"scheme": "qsdp"}
    given: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if variable:
        monkeypatch.setenv(VARIABLE, json.dumps(block))
    else:
        given["quantized_comm"] = block
    config = SimpleNamespace()
    wrappers["_initialize_params"](lambda self, given: None, config, given)
    assert config.quantized_comm.scheme == "qsdp"
    assert config.quantized_comm_from_variable == variable
    engine = SimpleNamespace(
        _config=config, zero_optimization_stage=lambda: stage, optimizer_name=lambda: None
    )
    wrappers["_do_sanity_check"](lambda self: None, engine)
    assert (config.quantized_comm is None) == (stage == 0)
