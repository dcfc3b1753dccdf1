"""Which settings the start-up line advises against on a device with streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_quant.zero.report import advice


def found(monkeypatch: pytest.MonkeyPatch, connections: str = "", **config: Any) -> list[str]:
    """The settings named, for an engine of this DeepSpeed config."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)

    def offload(name: str) -> Any:
        given = config.get(name)
        return None if given is None else SimpleNamespace(**given)

    engine = SimpleNamespace(
        _config=SimpleNamespace(_param_dict=config),
        zero_offload_optimizer=lambda: offload("offload_optimizer"),
        zero_offload_param=lambda: offload("offload_param"),
    )
    return [sentence.split(" ")[0] for sentence in advice(engine)]


def test_nothing_is_said_of_what_is_right(monkeypatch) -> None:
    assert found(monkeypatch) == found(monkeypatch, "8", comms_logger={"enabled": False}) == []
    pinned = {"device": "cpu", "pin_memory": True}
    assert found(monkeypatch, offload_param=pinned, offload_optimizer=pinned) == []


def test_what_costs_time_is_named_with_its_value(monkeypatch) -> None:
    assert found(monkeypatch, "1") == ["CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert found(monkeypatch, comms_logger={"enabled": True}) == ["comms_logger.enabled=true"]
    loose = {"device": "cpu", "pin_memory": False}
    assert found(monkeypatch, offload_param=loose, offload_optimizer=loose) == [
        "zero_optimization.offload_optimizer.pin_memory=false",
        "zero_optimization.offload_param.pin_memory=false",
    ]
