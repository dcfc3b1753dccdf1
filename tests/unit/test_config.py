"""The "quantized_comm" block: what passes and what it resolves to. What mistakes are told is in
golden/wrong_configs.json.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from ds_quant.codec.codec import GroupCodec
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
from ds_quant.tools.cli import main

LEARNED = {"levels": "learned", "rounding": "nearest"}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({1: 2}, "quantized_comm[1]: Keys should be strings"),
        ({"weights": {"group_size": 1e6}}, "group_size=1000000: allowed: a multiple of 32"),
    ],
)
def test_what_is_written_otherwise_than_it_is_shown_is_named(block: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({KEY: block})
    assert said in str(caught.value)


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


VALID = {
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


# ---- presets ----


def absmax(bits: int, group_size: int, rounding: str) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


def minmax(bits: int, rounding: str) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=1024, rounding=rounding)


W4, W4_PAPER = absmax(4, 2048, "nearest"), absmax(4, 2048, "stochastic")
G4, G8 = absmax(4, 128, "stochastic"), absmax(8, 128, "stochastic")
ZEROPP = absmax(4, 4096, "nearest")
GAUSSIAN = {
    bits: GroupCodec(bits=bits, group_size=128, range="gaussian", rounding="nearest")
    for bits in (2, 3, 4)  # presets
}
# scheme: weights, gradients, gradients inside a node, difference, node shard, rotation
PRESETS = {
    "full_precision": (None, None, None, False, False, 0),
    "hybrid": (None, None, None, False, True, 0),
    "qsdp": (minmax(8, "random_shift"), minmax(8, "stochastic"), None, False, False, 0),
    "qsdp_w4g4": (minmax(4, "random_shift"), minmax(4, "stochastic"), None, False, False, 0),
    "qsdp_shard": (minmax(8, "random_shift"), minmax(8, "stochastic"), None, False, True, 0),
    **{f"eden{bits}": (W4, codec, G8, True, True, 128) for bits, codec in GAUSSIAN.items()},
    "sdp4bit": (W4, G4, G8, True, True, 32),
    "sdp4bit_paper": (W4_PAPER, G4, G8, True, True, 32),
    "tlq": (None, G4, G8, False, False, 0),
    "tlq_hs": (None, G4, G8, False, False, 32),
    "ulq": (None, G4, G4, False, False, 0),
    "qwd": (W4, None, None, True, True, 0),
    "qw4": (W4, None, None, False, False, 0),
    "zeropp": (absmax(8, 8192, "nearest"), ZEROPP, ZEROPP, False, True, 0),
    "lossless": (None, None, None, False, True, 0),
    **{f"lossless_w_g{b}": (None, codec, G8, False, True, 128) for b, codec in GAUSSIAN.items()},
}


@pytest.mark.parametrize("name", preset_names())
def test_preset_is_what_the_papers_say_and_complete(name: str) -> None:
    config = parse_block({"scheme": name})
    s = config.to_scheme()
    assert s.name == name and preset_description(name)
    found = s.weights, s.gradients, s.gradients_intra, s.difference
    found += s.block.keeps_node_shard, s.block.gradients.rotation
    assert found == PRESETS[name]
    assert s.lossless == name.startswith("lossless")
    written = apply_preset(name, {})
    for role in ("weights", "gradients"):
        if getattr(config, role).enabled:
            wanted = {"enabled", "bits", "group_size", "range", "rounding"}
            if written[role].get("lossless"):
                wanted = {"enabled", "lossless"}
            assert wanted <= set(written[role]), "a preset must not lean on defaults"


def test_lossless_differences_take_the_place_of_quantized_ones() -> None:
    s = parse_block({"scheme": "sdp4bit", "weights": {"lossless": True}}).to_scheme()
    assert (s.weights, s.difference, s.lossless, s.gradients) == (None, False, True, G4)


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
    assert schema["$schema"].startswith("https://json-schema.org/") and schema["type"] == "object"
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
def test_shipped_config_is_valid_and_named_by_its_scheme_and_stage(path: Any, capsys) -> None:
    assert main(["validate", str(path)]) == 0 and capsys.readouterr().err == ""
    param_dict = json.loads(path.read_text())
    name, _, stage = path.stem.removeprefix("ds_").partition("_zero")
    assert stage in ("", str(param_dict["zero_optimization"]["stage"]))
    if name in preset_names():
        assert name == parse(param_dict).scheme


def test_autotune_keeps_what_was_written_for_the_scheme_that_it_picks() -> None:
    written = {"exclude": ["a"], "fallback": {"on_nonfinite": "raise"}, "seed": 3}
    tuned = parse_block({"scheme": "autotune", **written})
    for name in ("full_precision", "sdp4bit"):
        assert tuned.with_scheme(name) == parse_block({"scheme": name, **written})
    with pytest.raises(ConfigError, match="before links are measured"):
        tuned.to_scheme()


@pytest.mark.parametrize("fp16", [{"enabled": False}, {"enabled": True, "loss_scale": 128}, None])
def test_raise_is_taken_where_the_loss_scale_is_fixed(fp16: Any) -> None:
    block = {"fallback": {"on_nonfinite": "raise"}}
    assert parse({KEY: block, "fp16": fp16}).fallback.on_nonfinite == "raise"


@pytest.mark.parametrize(("world", "shown"), [(120, "60, 120"), (65536, "16384, 32768, ...")])
def test_a_wrong_node_size_names_sixteen_allowed_ones_at_most(world: int, shown: str) -> None:
    """120 has sixteen divisors, 65536 has one more."""
    with pytest.raises(ConfigError, match=f"allowed with {world} ranks: 1, 2, .*, {shown}$"):
        parse_block({"node_size": 7}).validate_world(world)
