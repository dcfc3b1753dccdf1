"""``ds_quant migrate``: every change explained, every other key kept."""

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


def migrated(folder: Path, text: str, *options: str) -> tuple[int, str]:
    """Exit code and the new file."""
    path = folder / "ds_config.json"
    path.write_text(text)
    code = main(["migrate", str(path), *options])
    assert path.read_text() == text
    new = folder / "ds_config.ds_quant.json"
    return code, new.read_text() if new.exists() else ""


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_deepspeed_becomes_a_block_that_start_up_takes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hjson.loads(CASES[name]["config"])
    code, text = migrated(tmp_path, CASES[name]["config"])
    after, said = json.loads(text), capsys.readouterr().out
    assert code == 0 and after[KEY] == CASES[name]["block"]
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


WRITTEN = """{
  // how it was written
  "bf16": {"enabled": true},   "steps": 1e3,
  "zero_optimization": {"zero_hpz_partition_size": 8, "stage": 3},
  "list": [1, {"a": [2.50,  3]}]
}
"""


def test_every_other_key_stays_in_its_order(tmp_path: Path, capsys: Any) -> None:
    after = hjson.loads(WRITTEN)
    after["zero_optimization"] = {"stage": 3}
    after[KEY] = {"scheme": "hybrid", "node_size": 8}
    code, text = migrated(tmp_path, WRITTEN)
    assert code == 0 and list(json.loads(text).items()) == list(after.items())
    assert '"a": [2.5, 3]' in text and "comments of the old file" in capsys.readouterr().out


def test_a_file_that_exists_is_overwritten_with_o_only(tmp_path: Path, capsys: Any) -> None:
    text = CASES["MiCS test"]["config"]
    taken = tmp_path / "ds_config.ds_quant.json"
    taken.write_text("mine")
    assert migrated(tmp_path, text) == (1, "mine")
    assert "-o FILE" in capsys.readouterr().err
    assert migrated(tmp_path, text, "-o", str(taken))[0] == 0 and "hybrid" in taken.read_text()


def test_nothing_to_translate_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    assert migrated(tmp_path, '{"zero_optimization": {"stage": 2}}') == (0, "")
    assert "nothing to translate" in capsys.readouterr().out


def test_what_is_not_known_is_named_and_stays(tmp_path: Path, capsys: Any) -> None:
    zero = {"stage": 3, "mics_shard_size": 2, "mics_new": 1}
    params = {"lr": 1, "odd": 2}
    config = {"zero_optimization": zero, "optimizer": {"type": "OneBitAdam", "params": params}}
    code, text = migrated(tmp_path, json.dumps({**config, KEY: {"scheme": "qsdp"}}))
    said, after = capsys.readouterr().out, json.loads(text)
    assert code == 0 and after[KEY] == {"scheme": "qsdp"}
    assert after["zero_optimization"]["mics_new"] == 1 and after["optimizer"]["params"] == params
    for line in ("mics_new=1: not known here", "params.odd=2: not known", "is there already"):
        assert line in said


def test_what_start_up_would_still_refuse_is_said(tmp_path: Path, capsys: Any) -> None:
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zenflow": {}}}
    assert migrated(tmp_path, json.dumps(config))[0] == 1
    assert "still refused: quantized_comm cannot be used with" in capsys.readouterr().out
