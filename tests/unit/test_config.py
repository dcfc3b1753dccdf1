"""The "quantized_comm" block: what passes, what it resolves to, and how mistakes are reported."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest

from ds_quant.config import presets
from ds_quant.config.presets import (
    apply_preset,
    choices,
    preset_description,
    preset_groups,
    preset_names,
)
from ds_quant.config.schema import (
    KEY,
    ConfigError,
    QuantizedCommConfig,
    json_schema,
    parse,
    parse_block,
)
from ds_quant.resources import resource_dir

LEARNED = {"levels": "learned", "rounding": "nearest"}


def fail(block: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse({KEY: block})
    return str(caught.value)


# What YAML cannot hold; all other mistakes are in golden/wrong_configs.yaml. Block, then every text
# that the message must contain.
MISTAKES = {
    "key that is no string": ({1: 2}, ["quantized_comm[1]", "string"]),
    "group size with a fraction of 0": (
        {"weights": {"group_size": 1e6}}, ["group_size=1000000", "multiple of 32"]
    ),
    "min_numel NaN": ({"min_numel": math.nan}, ["min_numel=NaN", "whole number"]),
    "min_numel infinite": ({"min_numel": math.inf}, ["min_numel=Infinity"]),
    "timeout beyond a day": ({"handshake_timeout": 1e300}, ["=1e+300", "at most 86400"]),
    "timeout infinite": ({"handshake_timeout": math.inf}, ["handshake_timeout=Infinity"]),
    "rate NaN": ({"weights": {**LEARNED, "level_rate": math.nan}}, ["level_rate=NaN", "above 0"]),
}  # fmt: skip


@pytest.mark.parametrize("block, texts", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_names_place_value_and_what_is_allowed(block: Any, texts: list[str]) -> None:
    message = fail(block)
    assert [text for text in texts if text not in message] == [], message
    assert "\n" not in message and message.isascii()


def test_long_values_are_shortened() -> None:
    assert len(fail({"exclude": "x" * 5000})) < 300


@pytest.mark.parametrize(
    "key",
    "quantised_comm quantize_comm quantized_comms quant_comm quantized-comm QuantizedComm "
    "Quantized_Comm qunatized_comm quantized_communication quantization_comm".split(),
)
@pytest.mark.parametrize("beside", [{}, {KEY: {}}], ids=["alone", "beside the right one"])
def test_misspelt_block_is_an_error(key: str, beside: dict) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=.*: unknown key.*did you mean quantized_comm"):
        parse({"train_batch_size": 8, key: {"scheme": "qsdp"}, **beside})


# Keys of DeepSpeed 0.17.6 to 0.19.8 and of Hugging Face that share words with ours.
@pytest.mark.parametrize(
    "key",
    "communication_data_type seq_parallel_communication_data_type comms_logger compile "
    "compression_training quantize_training weight_quantization quantize_weights "
    "quantization_config sparse_gradients zero_quantized_weights".split(),
)
def test_keys_of_deepspeed_are_left_alone(key: str) -> None:
    assert parse({key: {"enabled": True}}) is None


@pytest.mark.parametrize("param_dict", [{}, {"fp16": {}}, {KEY: {"enabled": False}}])
def test_nothing_to_do_is_none(param_dict: dict) -> None:
    assert parse(param_dict) is None


@pytest.mark.parametrize("stage", [0, 4, None, "auto", []])
def test_stage_without_sharded_communication_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match="zero_optimization.stage.*1, 2 or 3"):
        parse_block({}).validate_stage(stage)
    for good in (1, 2, 3):
        parse_block({}).validate_stage(good)


VALID = {
    "empty": ({}, {}),
    "integral floats": (
        {"min_numel": 1e6, "weights": {"group_size": 512.0}, "seed": 7.0, "node_size": 2.0},
        {"min_numel": 1000000, "weights.group_size": 512, "seed": 7, "node_size": 2},
    ),
    "whole seconds": ({"handshake_timeout": 5}, {"handshake_timeout": 5.0}),
    "null node size": ({"node_size": None}, {"node_size": None}),
    "user over preset": (
        {"scheme": "qsdp_w4g4", "gradients": {"bits": 6}},
        {"gradients.bits": 6, "weights.bits": 4, "gradients.rounding": "stochastic"},
    ),
    "a role turned off by the user keeps its other keys": (
        {"gradients": {"enabled": False, "bits": 4}},
        {"gradients.enabled": False, "gradients.bits": 4},
    ),
    "a role turned on again": (
        {"scheme": "full_precision", "weights": {"enabled": True, "bits": 5}},
        {"weights.enabled": True, "weights.bits": 5, "gradients.enabled": False},
    ),
    "learned levels": (
        {"weights": {**LEARNED, "bits": 3, "level_steps": [10.0, 20]}},
        {"weights.levels": "learned", "weights.level_steps": [10, 20]},
    ),
    "how often gradients cross, with nothing quantized": (
        {"scheme": "full_precision", "gradients": {"cross": "micro_step"}},
        {"gradients.cross": "micro_step", "gradients.enabled": False},
    ),
    "as published": ({"scheme": "zeropp"}, {"gradients.cross": "micro_step"}),
    "symmetric": ({"gradients": {"range": "absmax"}}, {"gradients.range": "absmax"}),
    "exclude": ({"exclude": ["*.embed*", "lm_head"]}, {"exclude": ["*.embed*", "lm_head"]}),
}


@pytest.mark.parametrize("block, expected", VALID.values(), ids=VALID.keys())
def test_valid_block_resolves_and_builds_a_scheme(block: dict, expected: dict) -> None:
    before = json.dumps(block)
    config = parse({KEY: block})
    resolved = config.resolved()
    for path, value in expected.items():
        found: Any = resolved
        for key in path.split("."):
            found = found[key]
        assert found == value and type(found) is type(value)
    assert json.loads(json.dumps(resolved)) == resolved
    assert config.to_scheme().name == config.scheme
    assert json.dumps(block) == before  # the user's dict is not modified


@pytest.mark.parametrize("name", preset_names())
def test_preset_loads_and_is_complete(name: str) -> None:
    config = parse_block({"scheme": name})
    assert config.to_scheme().name == name
    assert preset_description(name)
    written = apply_preset(name, {})
    for role in ("weights", "gradients"):
        if getattr(config, role).enabled:
            wanted = {"enabled", "bits", "group_size", "range", "rounding"}
            if written[role].get("lossless"):
                wanted = {"enabled", "lossless"}
            assert wanted <= set(written[role]), "a preset must not lean on defaults"


@pytest.fixture
def a_scheme_of_ones_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    shutil.copy(resource_dir("configs") / "presets.yaml", tmp_path)
    (tmp_path / "mine.yaml").write_text("like: sdp4bit\ngradients: {bits: 3}\n")
    monkeypatch.setattr(presets, "resource_dir", lambda name: tmp_path)
    for cached in (presets.preset_groups, presets._load):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (presets.preset_groups, presets._load):
        cached.cache_clear()


@pytest.mark.usefixtures("a_scheme_of_ones_own")
def test_a_scheme_file_of_ones_own_needs_no_description_and_is_yours() -> None:
    config = parse_block({"scheme": "mine"})
    assert (config.gradients.bits, config.gradients.rotation) == (3, 32)
    assert [*preset_groups()["yours"]] == ["mine"] and preset_description("mine")
    assert 'yours: "mine"' in choices()


def test_the_default_scheme_is_what_the_fields_say() -> None:
    assert parse_block({}) == QuantizedCommConfig() == parse_block({"scheme": "qsdp"})


def test_level_steps_reach_the_scheme_only_with_learned_levels() -> None:
    assert parse_block({}).to_scheme().level_steps == ()
    learned = parse_block({"weights": {**LEARNED, "level_steps": [3]}}).to_scheme()
    assert learned.level_steps == (3,)
    assert learned.weights.levels == "learned"


def test_what_ranks_compare_depends_on_every_effective_value_and_on_nothing_else() -> None:
    same = [{}, {"scheme": "qsdp"}, {"weights": {"bits": 8.0}}, {"gradients": {}, "seed": 0}]
    assert len({json.dumps(parse_block(block).resolved()) for block in same}) == 1
    different = [
        {}, {"seed": 1}, {"exclude": ["a"]}, {"node_size": 1}, {"weights": {"bits": 7}},
        {"gradients": {"bits": 7}}, {"scheme": "qsdp_w4g4"},
    ]  # fmt: skip
    assert len({json.dumps(parse_block(block).resolved()) for block in different}) == len(different)


def test_schema_describes_every_field_and_scheme() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["properties"][KEY] == {"$ref": "#/$defs/QuantizedCommConfig"}
    for name in ("QuantizedCommConfig", "WeightsConfig", "GradientsConfig", "FallbackConfig"):
        model = schema["$defs"][name]
        assert model["additionalProperties"] is False
        for field, node in model["properties"].items():
            assert node.get("description"), f"{name}.{field} has no description"
    scheme = schema["$defs"]["QuantizedCommConfig"]["properties"]["scheme"]
    assert scheme["enum"] == [*preset_names(), "autotune"]
    assert all(preset_description(name) in scheme["description"] for name in preset_names())


@pytest.mark.parametrize(
    "path", sorted(resource_dir("configs").glob("*.json")), ids=lambda p: p.stem
)
def test_shipped_config_is_accepted_by_deepspeed_and_by_us(path: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    param_dict = json.loads(path.read_text())
    config = parse(param_dict)
    assert config is not None
    filled = without_auto(param_dict) | {"train_micro_batch_size_per_gpu": 1}
    stage = DeepSpeedConfig(filled).zero_optimization_stage
    name, _, named_stage = path.stem.removeprefix("ds_").partition("_zero")
    assert named_stage in ("", str(stage))
    assert name == config.scheme or name not in preset_names()


def without_auto(value: Any) -> Any:
    """What Hugging Face would fill in is left to DeepSpeed's defaults."""
    if not isinstance(value, dict):
        return value
    return {key: without_auto(item) for key, item in value.items() if item != "auto"}


def test_autotune_keeps_what_was_written_for_the_scheme_that_it_picks() -> None:
    written = {"exclude": ["a"], "fallback": {"on_nonfinite": "raise"}, "seed": 3}
    tuned = parse_block({"scheme": "autotune", **written})
    for name in ("full_precision", "sdp4bit"):
        assert tuned.picked(name) == parse_block({"scheme": name, **written})
    with pytest.raises(ConfigError, match="before links are measured"):
        tuned.to_scheme()


@pytest.mark.parametrize("key", ["weights", "gradients", "node_shard"])
def test_autotune_leaves_no_choice_to_the_block(key: str) -> None:
    value = True if key == "node_shard" else {"enabled": False}
    with pytest.raises(ConfigError, match=f'{key}=.*conflicts with .*scheme="autotune"'):
        parse_block({"scheme": "autotune", key: value})


@pytest.mark.parametrize("fp16", [{"enabled": True}, {"enabled": True, "loss_scale": 0}])
def test_raise_is_refused_where_the_loss_scale_is_found_by_overflowing(fp16: dict) -> None:
    block = {"fallback": {"on_nonfinite": "raise"}}
    with pytest.raises(ConfigError, match="conflicts with fp16.loss_scale=0.*skip.*full_precision"):
        parse({KEY: block, "fp16": fp16})
    for other in ({"enabled": False}, {"enabled": True, "loss_scale": 128}, None):
        assert parse({KEY: block, "fp16": other}).fallback.on_nonfinite == "raise"
