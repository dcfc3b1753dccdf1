"""``ds_quant migrate``: every change explained; golden/commands.yaml has what it says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hjson
import pytest
import yaml

from ds_quant.config.schema import KEY, ConfigError, parse, parse_block
from ds_quant.policy import refusals
from ds_quant.tools.cli import main

CASES = yaml.safe_load((Path(__file__).parents[1] / "migrated.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_deepspeed_becomes_a_block_that_start_up_takes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = tmp_path / "ds_config.json", hjson.loads(CASES[name]["config"])
    path.write_text(CASES[name]["config"])
    assert main(["migrate", str(path)]) == 0
    after = json.loads((tmp_path / "ds_config.ds_quant.json").read_text())
    said = capsys.readouterr().out
    assert after[KEY] == CASES[name]["block"]
    refusals.refuse(after, parse(after))
    for section in ("zero_optimization", "optimizer", "fp16"):
        for key, value in before.get(section, {}).items():
            kept = after[section].get(key, "gone")
            assert kept == value or f"{section}.{key}" in said
    unchanged = {"train_batch_size", "gradient_clipping", "steps_per_print"} & set(before)
    assert {key: after[key] for key in unchanged} == {key: before[key] for key in unchanged}


@pytest.mark.parametrize(
    ("zero", "setting"),
    [
        ({"zero_hpz_partition_size": 4}, "zero_hpz_partition_size=4"),
        ({"mics_shard_size": 4}, "mics_shard_size"),
        ({}, "optimizer.type=OneBitAdam"),
    ],
)
def test_the_refusal_at_start_up_names_the_command(zero: dict[str, Any], setting: str) -> None:
    config = {"zero_optimization": {"stage": 3, **zero}}
    config |= {} if zero else {"optimizer": {"type": "OneBitAdam"}}
    with pytest.raises(ConfigError) as caught:
        refusals.refuse(config, parse_block({}))
    assert setting in str(caught.value) and "ds_quant migrate ds_config.json" in str(caught.value)
