"""Which gradients a version of DeepSpeed loses by itself, with which settings."""

from __future__ import annotations

from types import SimpleNamespace

import deepspeed
import pytest

from ds_quant.zero.optimizer_hooks import lost_gradients


@pytest.mark.parametrize(
    ("version", "stage", "accumulation", "offloaded", "said"),
    [
        ("0.17.6", 2, 2, False, ["forgets"]), ("0.17.6", 2, 1, False, []),
        ("0.17.6", 1, 2, False, []), ("0.18.2", 2, 2, False, ["forgets"]),
        ("0.18.3", 2, 2, False, ["8224"]), ("0.19.3", 2, 1, False, ["8224"]),
        ("0.19.3", 1, 1, False, []), ("0.19.4", 2, 1, False, []),
        ("0.18.9", 2, 3, True, ["forgets"]), ("0.18.9", 2, 2, True, []),
        ("0.19.0", 2, 3, True, []),
    ],
)  # fmt: skip
def test_the_line_names_the_version_that_loses_gradients_and_the_setting(
    monkeypatch, version: str, stage: int, accumulation: int, offloaded: bool, said: list[str]
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    engine = SimpleNamespace(gradient_accumulation_steps=lambda: accumulation)
    optimizer = SimpleNamespace(partition_gradients=stage == 2, cpu_offload=offloaded)
    lines = list(lost_gradients(engine, optimizer, waiting=False))
    assert len(lines) == len(said)
    for line, word in zip(lines, said, strict=True):
        assert word in line and line.startswith(f"DeepSpeed {version} ")
        assert word != "forgets" or f"gradient_accumulation_steps={accumulation} needs" in line
