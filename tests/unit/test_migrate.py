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
            if after[section].get(key, "gone") != value:
                assert f"{section}.{key}" in said
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


def translated(
    folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> tuple[int, str, dict[str, Any] | None]:
    """Exit code, output and new config of the command; None if it wrote none."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    code = main(["migrate", str(path)])
    written = folder / "ds_config.ds_quant.json"
    after = json.loads(written.read_text()) if written.exists() else None
    return code, capsys.readouterr().out, after


@pytest.mark.parametrize(
    ("zero", "block"),
    [
        ({"zero_hpz_partition_size": 4}, {"scheme": "hybrid", "node_size": 8}),
        ({"zero_quantized_weights": True, "zero_quantized_gradients": True},
         {"scheme": "zeropp", "node_size": 8}),
    ],
)  # fmt: skip
def test_the_size_of_mics_shards_is_the_one_explained_and_written(
    zero: dict[str, Any], block: dict[str, Any], tmp_path: Path, capsys
) -> None:
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 8, **zero}}
    code, said, after = translated(tmp_path, capsys, config)
    assert code == 0 and after == {"zero_optimization": {"stage": 3}, KEY: block}
    assert f"mics_shard_size=8: scheme {block['scheme']}: weights stay in nodes" in said
    if "zero_hpz_partition_size" in zero:
        assert "zero_hpz_partition_size=4: mics_shard_size=8 sets quantized_comm.node_size" in said
    assert said.count("of that many ranks") == 0


def test_a_block_that_is_there_is_offered_no_other(tmp_path: Path, capsys) -> None:
    kept = {"zero_optimization": {"stage": 3}, KEY: {"scheme": "eden4"}}
    config = {**kept, "communication_data_type": "bf16"}
    code, said, after = translated(tmp_path, capsys, config)
    assert (code, after) == (0, kept)
    assert "communication_data_type" in said and "translation" not in said and "qsdp" not in said


def test_what_start_up_refuses_is_named_if_nothing_is_translated(tmp_path: Path, capsys) -> None:
    zero = {"stage": 2, "zenflow": {"topk_ratio": 0.1}}
    config = {"zero_optimization": zero, KEY: {"scheme": "eden4"}}
    code, said, after = translated(tmp_path, capsys, config)
    assert (code, after) == (1, None)
    assert "nothing to translate" in said
    assert "still refused: quantized_comm cannot be used with zero_optimization.zenflow" in said


@pytest.mark.parametrize(("stage", "after"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_an_optimizer_of_1_bit_brings_a_stage_only_where_there_is_none(
    stage: int, after: int, tmp_path: Path, capsys
) -> None:
    config = {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"stage": stage}}
    _, _, written = translated(tmp_path, capsys, config)
    assert written["zero_optimization"]["stage"] == after
