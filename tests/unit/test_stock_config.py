"""DeepSpeed's own checks of a config, as ``ds_quant validate`` shows them; a machine without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from packaging.version import Version

from ds_quant.tools import stock_config
from ds_quant.tools.cli import main

INSTALLED = Version(Version(deepspeed.__version__).base_version)
BLOCK = {"quantized_comm": {"scheme": "qsdp"}}
MICRO_BATCH = {"train_micro_batch_size_per_gpu": 1}


def config(stage: int = 2, *, zero: dict[str, Any] | None = None, **settings: Any) -> dict:
    return {**BLOCK, "zero_optimization": {"stage": stage, **(zero or {})}, **settings}


# What DeepSpeed refuses, the beginning of its reason, and the first version that does.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a key that the section lacks": (
        config(zero={"verbose": True}), "zero_optimization.verbose=true: Extra inputs", "0"
    ),
    "a key of another section": (
        config(bf16={"enabled": True}, tensor_parallel={"enabled": True}),
        "tensor_parallel.enabled=true: Extra",
        "0",
    ),
    "a removed feature": (config(sparse_gradients=True), "Sparse compression", "0.19.7"),
    "a removed library": (
        config(compression_training={}), "The DeepSpeed compression library", "0.19.7"
    ),
    "gradients divided twice, ZeRO-2": (
        config(gradient_predivide_factor=2.0),
        "gradient_predivide_factor=2: allowed under ZeRO-2 with zero_optimization.reduce_scatter",
        "0",
    ),
    "gradients divided twice, ZeRO-3": (
        config(3, gradient_predivide_factor=2.0), "gradient_predivide_factor=2: allowed", "0"
    ),
    "gradients divided before": (config(prescale_gradients=True), "prescale_gradients=true", "0"),
    "batch sizes that never add up": (
        config(train_batch_size=8, train_micro_batch_size_per_gpu=3), "Check batch related", "0"
    ),
    "a dtype": (config(communication_data_type="fp8"), "Invalid communication_data_type", "0"),
}  # fmt: skip
ACCEPTED: dict[str, dict[str, Any]] = {
    "values of a Trainer": config(
        train_batch_size="auto",
        gradient_clipping="auto",
        zero={"reduce_bucket_size": "auto"},
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
    ),
    "batch sizes of 8 ranks": config(
        train_batch_size=48, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2
    ),
    "divided under ZeRO-1": config(1, gradient_predivide_factor=2.0, **MICRO_BATCH),
    "divided, all-reduced": config(
        zero={"reduce_scatter": False}, gradient_predivide_factor=2.0, **MICRO_BATCH
    ),
    "an older name": config(bfloat16={"enabled": True}, **MICRO_BATCH),
}


@pytest.mark.parametrize(("param_dict", "reason", "since"), REFUSED.values(), ids=REFUSED)
def test_what_deepspeed_refuses_is_refused_in_its_words(
    param_dict: dict[str, Any], reason: str, since: str, tmp_path: Path, capsys
) -> None:
    if Version(since) > INSTALLED:
        pytest.skip(f"needs deepspeed {since}")
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(param_dict))
    assert main(["validate", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: DeepSpeed {deepspeed.__version__} refuses this config: ")
    assert reason in said and said.count("\n") == 1


@pytest.mark.parametrize("param_dict", ACCEPTED.values(), ids=ACCEPTED)
def test_what_deepspeed_takes_has_no_notes(param_dict: dict[str, Any]) -> None:
    before = json.dumps(param_dict)
    assert stock_config.check(param_dict, world=None) == []
    assert json.dumps(param_dict) == before


def test_batch_sizes_are_checked_with_a_known_number_of_ranks() -> None:
    param_dict = ACCEPTED["batch sizes of 8 ranks"]
    assert stock_config.check(param_dict, world=8) == []
    with pytest.raises(stock_config.RefusedByDeepSpeed, match="48 != 3 \\* 2 \\* 4"):
        stock_config.check(param_dict, world=4)


def test_missing_batch_sizes_are_a_note() -> None:
    (note,) = stock_config.check(config(), world=None)
    assert "neither train_batch_size nor train_micro_batch_size_per_gpu is set" in note


def test_the_users_codec_is_not_imported(monkeypatch) -> None:
    """Neither that of the block nor that of DS_QUANT_BLOCK."""
    codec = {"weights": {"codec": "trap"}}
    assert stock_config.check({**config(**MICRO_BATCH), "quantized_comm": codec}, world=None) == []
    monkeypatch.setenv("DS_QUANT_BLOCK", json.dumps(codec))
    without_block = {"zero_optimization": {"stage": 2}, **MICRO_BATCH}
    assert stock_config.check(without_block, world=None) == []


def test_a_broken_installation_is_a_note(monkeypatch) -> None:
    """importlib finds a module whose import fails."""
    monkeypatch.setattr(stock_config, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (note,) = stock_config.check(config(**MICRO_BATCH), world=None)
    assert note.startswith("DeepSpeed cannot be imported (") and "were not made" in note


def test_commands_run_without_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**config(), **MICRO_BATCH}))
    commands = [
        ["validate", str(path)],
        ["migrate", str(path)],
        ["estimate", *"--params 7b --nodes 2 --link 10 --step 1 --ds-config".split(), str(path)],
        ["doctor", "--no-processes"],
    ]
    script = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from ds_quant.tools.cli import main\n"
        f"for command in {commands}: print(command[0], main(command))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for command in ("validate", "migrate", "estimate"):
        assert f"{command} 0" in lines
    assert any(line.startswith("doctor ") for line in lines)
    assert "DeepSpeed is not installed here: its own checks of this file were not made" in lines
