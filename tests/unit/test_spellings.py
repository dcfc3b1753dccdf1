"""Older spellings of a DeepSpeed config mean here what DeepSpeed's own parser makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config

from ds_quant.config.schema import ConfigError, parse_block
from ds_quant.policy import refusals
from ds_quant.tools.cli import main
from ds_quant.tools.migrate import translate
from ds_quant.tools.planning import _offloads, buckets_of

SPELLINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"bfloat16": {"enabled": True}},
    "bfloat16 off": {"bfloat16": {"enabled": "false"}},
    "bf16 goes first": {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
    "bf16 without keys goes first": {"bf16": {}, "bfloat16": {"enabled": True}},
    "bf16 is null": {"bf16": None, "bfloat16": {"enabled": True}},
    "ZeRO as a flag": {"zero_optimization": True},
    "ZeRO as a flag, with a size": {"zero_optimization": True, "allgather_size": 30_000},
    "ZeRO switched off": {"zero_optimization": False},
    "a size without the flag": {"zero_optimization": {"stage": 1}, "allgather_size": 30_000},
    "offloaded optimizer": {"zero_optimization": {"stage": 2, "cpu_offload": True}},
    "offloaded optimizer, in words": {"zero_optimization": {"stage": 2, "cpu_offload": "true"}},
    "optimizer not offloaded": {"zero_optimization": {"stage": 2, "cpu_offload": False}},
    "offloaded parameters": {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
    "parameters not offloaded": {"zero_optimization": {"stage": 3, "cpu_offload_param": None}},
    "prefetch": {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 30_000}},
    "live parameters": {"zero_optimization": {"stage": 3, "max_live_parameters": 30_000}},
    "reuse distance": {"zero_optimization": {"stage": 3, "max_reuse_distance": 30_000}},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_config_is_read_as_deepspeed_reads_it(name: str) -> None:
    config = SPELLINGS[name]
    zero = get_zero_config(config)
    assert (refusals.stage_of(config) or 0) == zero.stage
    precisions = {"bf16": get_bfloat16_config(config), "fp16": get_float16_config(config)}
    enabled = [precision for precision, section in precisions.items() if section.enabled]
    assert refusals.low_precision(config) == enabled
    section = refusals.whole_section(config, "zero_optimization")
    offloads = {"param": zero.offload_param, "optimizer": zero.offload_optimizer}
    assert _offloads(section) == {part for part, offload in offloads.items() if offload}
    buckets = buckets_of(section, hidden=64, stage=zero.stage)
    assert buckets.allgather == zero.allgather_bucket_size
    assert buckets.fetch.prefetch_bucket_size == zero.prefetch_bucket_size
    assert buckets.fetch.max_live_parameters == zero.max_live_parameters
    assert buckets.fetch.max_reuse_distance == zero.max_reuse_distance


def test_every_older_name_of_deepspeed_is_known() -> None:
    """A deprecated field, or one that may be given by its name besides its alias."""
    older = set()
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        if field.alias is not None:
            older.add(name)
        if (field.json_schema_extra or {}).get("deprecated"):
            older.add(name)
    # DeepSpeed warns of this one, and does not use it.
    older.remove("cpu_offload_use_pin_memory")
    assert older <= refusals._RENAMED_ZERO_KEYS.keys() | refusals._OFFLOAD_FLAGS.keys()
    aliases = {field.alias for field in DeepSpeedZeroConfig.model_fields.values()}
    for name in older & refusals._RENAMED_ZERO_KEYS.keys():
        assert refusals._RENAMED_ZERO_KEYS[name] in aliases, name


@pytest.mark.parametrize("dtype", [value for member in DtypeEnum for value in member._all_values])
@pytest.mark.parametrize("bf16", ["bf16", "bfloat16"])
@pytest.mark.parametrize("offload", [{}, {"cpu_offload": True}])
def test_fp32_sums_are_refused_by_every_name(bf16: str, dtype: Any, offload: dict) -> None:
    config = {
        bf16: {"enabled": True},
        "data_types": {"grad_accum_dtype": dtype},
        "zero_optimization": {"stage": 1, **offload},
    }
    is_bf16_optimizer = DtypeEnum(dtype) is DtypeEnum.fp32 and not offload
    try:
        refusals.refuse(config, parse_block({"scheme": "qsdp"}))
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert ("BF16_Optimizer" in refused) == is_bf16_optimizer


def test_validate_prices_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for precision, itemsize in (("bf16", 2), ("bfloat16", 2), ("neither", 4)):
        config = {
            precision: {"enabled": True},
            "zero_optimization": {"stage": 2},
            "quantized_comm": {"scheme": "qsdp"},
        }
        path = tmp_path / f"{precision}.json"
        path.write_text(json.dumps(config), "utf-8")
        assert main(["validate", str(path)]) == 0
        assert f"full precision ({itemsize} bytes each)" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["fp32", "FP32"])
def test_migrate_reads_dtypes_in_any_case(dtype: str) -> None:
    """As DeepSpeed does. Gradients in fp32 are not what a block would replace."""
    config = {"communication_data_type": dtype, "zero_optimization": {"stage": 2}}
    assert translate(config).block == {}


def test_migrate_keeps_a_flag_of_zero(tmp_path: Path) -> None:
    config: dict[str, Any] = {"zero_optimization": True, "optimizer": {"type": "OneBitAdam"}}
    translate(config)
    assert config["zero_optimization"] is True
    assert refusals.stage_of(config) == get_zero_config(config).stage == 1
