"""The "quantized_comm" block: what passes, what it resolves to, and how mistakes are reported."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.codec.codec import GroupCodec
from ds_quant.config.presets import apply_preset, preset_description, preset_names
from ds_quant.config.schema import (
    KEY,
    ConfigError,
    QuantizedCommConfig,
    WeightsConfig,
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


# block, then every text that the message must contain
MISTAKES = {
    # spelling of keys and values
    "unknown key": (
        {"wieghts": {}},
        ["quantized_comm.wieghts={}: unknown", "quantized_comm.weights?"],
    ),
    "unknown nested key": ({"weights": {"bit": 4}}, ["weights.bit=4: unknown", "weights.bits?"]),
    "key of both roles at the top": (
        {"bits": 4},
        ["quantized_comm.bits=4: unknown", "weights.bits or quantized_comm.gradients.bits?"],
    ),
    "top key inside a role": ({"weights": {"seed": 1}}, ["mean quantized_comm.seed?"]),
    "key like nothing else": (
        {"x": 1},
        ["quantized_comm.x=1: unknown", "allowed: enabled, scheme"],
    ),
    "key that is no string": ({1: 2}, ["quantized_comm[1]", "string"]),
    "unknown scheme": ({"scheme": "qspd"}, ['scheme="qspd"', '"full_precision"', 'mean "qsdp"?']),
    "scheme in capitals": ({"scheme": "QSDP"}, ['mean "qsdp"?']),
    "scheme like nothing": ({"scheme": "zzz"}, ['scheme="zzz"', '"qsdp_w4g4"']),
    "scheme of a wrong type": ({"scheme": 3}, ["scheme=3", '"qsdp"']),
    "rounding": (
        {"weights": {"rounding": "stocastic"}},
        ["weights.rounding", 'mean "stochastic"?'],
    ),
    "rounding, short": ({"weights": {"rounding": "shift"}}, ['mean "random_shift"?']),
    "range with a dash": ({"gradients": {"range": "min-max"}}, ['"absmax"', 'mean "minmax"?']),
    "levels": ({"weights": {"levels": "learn"}}, ['mean "learned"?']),
    # numbers
    "bits too small": ({"weights": {"bits": 1}}, ["weights.bits=1", "from 2 to 8"]),
    "bits too large": ({"gradients": {"bits": 9}}, ["gradients.bits=9", "from 2 to 8"]),
    "bits as text": ({"weights": {"bits": "4"}}, ['weights.bits="4"', "a whole number from"]),
    "bits as words": ({"weights": {"bits": "four"}}, ['weights.bits="four"', "from 2 to 8"]),
    "bits with a fraction": ({"weights": {"bits": 4.5}}, ["weights.bits=4.5", "whole number"]),
    "bits as a boolean": ({"weights": {"bits": True}}, ["weights.bits=true", "whole number"]),
    "bits missing": ({"weights": {"bits": None}}, ["weights.bits=null"]),
    "group size": (
        {"weights": {"group_size": 33}},
        ["group_size=33", "multiple of 32"],
    ),
    "group size 0": ({"weights": {"group_size": 0}}, ["from 32 to 65536"]),
    "group size large": (
        {"weights": {"group_size": 1e6}},
        ["group_size=1000000", "multiple of 32"],
    ),
    "min_numel negative": ({"min_numel": -5}, ["min_numel=-5", "at least 0"]),
    "min_numel NaN": ({"min_numel": math.nan}, ["min_numel=NaN", "whole number"]),
    "min_numel infinite": ({"min_numel": math.inf}, ["min_numel=Infinity"]),
    "policy": ({"fallback": {"on_nonfinite": "rais"}}, ['on_nonfinite="rais"', 'mean "raise"?']),
    "policy without its key": ({"fallback": "raise"}, ["fallback=", "keys on_nonfinite, steps"]),
    "no steps to fall back": ({"fallback": {"steps": 0}}, ["fallback.steps=0", "at least 1"]),
    "warm-up negative": ({"warmup_steps": -1}, ["warmup_steps=-1", "at least 0"]),
    "seed beyond 64 bit": ({"seed": 2**70}, ["seed=1180591620717411303424", "from 0 to"]),
    "seed negative": ({"seed": -1}, ["seed=-1"]),
    "node size 0": ({"node_size": 0}, ["node_size=0", "at least 1 or null"]),
    "node size as a boolean": ({"node_size": True}, ["node_size=true"]),
    "timeout 0": ({"handshake_timeout": 0}, ["handshake_timeout=0", "above 0"]),
    "timeout beyond a day": ({"handshake_timeout": 1e300}, ["=1e+300", "at most 86400"]),
    "timeout infinite": ({"handshake_timeout": math.inf}, ["handshake_timeout=Infinity"]),
    "timeout as a boolean": ({"handshake_timeout": True}, ["handshake_timeout=true"]),
    "rate NaN": ({"weights": {**LEARNED, "level_rate": math.nan}}, ["level_rate=NaN", "above 0"]),
    "rate as a boolean": ({"weights": {**LEARNED, "level_rate": True}}, ["level_rate=true"]),
    "rate too large": ({"weights": {**LEARNED, "level_rate": 1}}, ["level_rate=1", "below 1"]),
    # booleans, lists, objects
    "enabled as text": ({"enabled": "true"}, ['enabled="true"', "true or false"]),
    "enabled as a number": ({"enabled": 0}, ["enabled=0", "true or false"]),
    "exclude as text": ({"exclude": "lm_head"}, ['exclude="lm_head"', "allowed: a list"]),
    "exclude of numbers": ({"exclude": ["a", 1]}, ["quantized_comm.exclude[1]=1", "a string"]),
    "exclude of nothing": ({"exclude": [""]}, ["exclude[0]", "not empty"]),
    "steps as a number": (
        {"weights": {**LEARNED, "level_steps": 5}},
        ["level_steps=5", "allowed: a list"],
    ),
    "steps falling": ({"weights": {**LEARNED, "level_steps": [5, 3]}}, ["increasing order"]),
    "steps repeated": ({"weights": {**LEARNED, "level_steps": [5, 5]}}, ["increasing order"]),
    "steps empty": ({"weights": {**LEARNED, "level_steps": []}}, ["one or more step numbers"]),
    "steps from 0": (
        {"weights": {**LEARNED, "level_steps": [0, 3]}},
        ["level_steps[0]=0", "least 1"],
    ),
    "role as a boolean": ({"weights": False}, ["weights=false", "keys enabled, codec"]),
    "role as a number": (
        {"gradients": 8},
        ["gradients=8", "an object with the keys enabled, codec, bits"],
    ),
    "role missing": ({"gradients": None}, ["gradients=null"]),
    # the block itself
    "block is true": (True, ["quantized_comm=true", "an object such as"]),
    "block is a scheme": ("qsdp", ['quantized_comm="qsdp"', 'mean {"scheme": "qsdp"}?']),
    "block is some text": ("on", ['quantized_comm="on"', 'such as {"scheme": "qsdp"}']),
    "block is a list": ([{}], ["quantized_comm=[{}]", "an object"]),
    "block is null": (None, ["quantized_comm=null", "an object"]),
    "block is a number": (8, ["quantized_comm=8", "an object"]),
    # "auto" is Hugging Face's, and accelerate raises on it in blocks it does not know
    "auto at the top": ({"scheme": "auto"}, ['scheme="auto"', "accelerate", "leave the key out"]),
    "auto inside": ({"weights": {"bits": "auto"}}, ['weights.bits="auto"', "accelerate"]),
    "auto in a list": ({"exclude": ["a", "auto"]}, ['exclude[1]="auto"']),
    "auto as the block": ("auto", ['quantized_comm="auto"']),
    # combinations
    "learned and shifted": (
        {"weights": {"levels": "learned", "rounding": "random_shift"}},
        ['levels="learned" conflicts with', 'rounding="random_shift":', 'rounding to "nearest"'],
    ),
    "learned and shifted by the scheme": (
        {"weights": {"levels": "learned"}},
        ['quantized_comm.weights.rounding="random_shift" (set by the scheme)', '"nearest"'],
    ),
    "learned and symmetric": (
        {"weights": {**LEARNED, "range": "absmax"}},
        ['levels="learned" conflicts', 'range="absmax"', 'range to "minmax"'],
    ),
    "shifted and symmetric": (
        {"gradients": {"range": "absmax", "rounding": "random_shift"}},
        ['gradients.range="absmax" conflicts', 'gradients.rounding="random_shift"', '"minmax"'],
    ),
    "learned gradients": ({"gradients": {"levels": "learned"}}, ["gradients must stay unbiased"]),
    "steps for gradients": ({"gradients": {"level_steps": [1]}}, ["gradients must stay unbiased"]),
    "bits of a role the scheme turns off": (
        {"scheme": "full_precision", "weights": {"bits": 4}},
        ["weights.bits=4: no effect", "enabled=false (set by scheme full_precision)"],
    ),
    "steps of uniform levels": (
        {"weights": {"level_steps": [3]}},
        ["level_steps=[3]: no effect with uniform levels", 'levels to "learned"'],
    ),
    # off is not a licence for typos
    "typo in a disabled block": ({"enabled": False, "sed": 1}, ["quantized_comm.seed?"]),
    "bad value in a disabled block": ({"enabled": False, "seed": "x"}, ['seed="x"']),
}


@pytest.mark.parametrize("block, texts", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_names_place_value_and_what_is_allowed(block: Any, texts: list[str]) -> None:
    message = fail(block)
    assert [text for text in texts if text not in message] == [], message
    assert "\n" not in message and message.isascii()


def test_all_mistakes_are_reported_at_once() -> None:
    message = fail({"scheme": "qspd", "weights": {"bits": 1, "x": 1}, "gradients": {"bits": 9}})
    lines = message.splitlines()
    assert lines[0].startswith("4 mistakes")
    assert len(lines) == 5
    for text in ("qspd", "weights.bits=1", "weights.x", "gradients.bits=9"):
        assert text in message


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "qsdp", "minmax", "learned", "random_shift", "8", "1e400", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
_ROLE_KEYS = st.sampled_from([*WeightsConfig.model_fields, "bit", "intra_node"])
_ROLE = st.dictionaries(_ROLE_KEYS, _JSON | st.integers(2, 8), max_size=4)
_BLOCK = st.dictionaries(
    st.sampled_from([*QuantizedCommConfig.model_fields, "bits", "schema"]),
    _JSON | _ROLE,
    max_size=5,
)


@settings(deadline=None)  # the machine may be busy
@given(block=_JSON | _BLOCK)
def test_any_json_is_accepted_or_refused_with_a_config_error(block: Any) -> None:
    try:
        config = parse({KEY: block})
    except ConfigError as error:
        assert error.problems and all(problem.startswith(KEY) for problem in error.problems)
    else:
        assert config is None or config.to_scheme()


def test_long_values_are_shortened() -> None:
    assert len(fail({"exclude": "x" * 5000})) < 300


@pytest.mark.parametrize(
    "key",
    [
        "quantised_comm",
        "quantize_comm",
        "quantized_comms",
        "quant_comm",
        "quantized-comm",
        "QuantizedComm",
        "Quantized_Comm",
        "qunatized_comm",
        "quantized_communication",
        "quantization_comm",
    ],
)
@pytest.mark.parametrize("beside", [{}, {KEY: {}}], ids=["alone", "beside the right one"])
def test_misspelt_block_is_an_error(key: str, beside: dict) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=.*: unknown key.*did you mean quantized_comm"):
        parse({"train_batch_size": 8, key: {"scheme": "qsdp"}, **beside})


# Keys of DeepSpeed 0.17.6 to 0.19.8 and of Hugging Face that share words with ours.
@pytest.mark.parametrize(
    "key",
    [
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "comms_logger",
        "compression_training",
        "quantize_training",
        "weight_quantization",
        "quantize_weights",
        "quantization_config",
        "sparse_gradients",
        "zero_quantized_weights",
        "compile",
    ],
)
def test_keys_of_deepspeed_are_left_alone(key: str) -> None:
    assert parse({key: {"enabled": True}}) is None


def test_block_below_the_top_level_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="zero_optimization.quantized_comm=.*: move quantized_comm"
    ):
        parse({"zero_optimization": {"stage": 3, KEY: {}}})


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


def test_presets_are_the_published_settings() -> None:
    names = ("full_precision", "qsdp", "qsdp_w4g4")
    exact, qsdp, low = (parse_block({"scheme": name}).to_scheme() for name in names)
    assert (exact.weights, exact.gradients) == (None, None)
    for scheme, bits in ((qsdp, 8), (low, 4)):
        assert scheme.weights == GroupCodec(bits=bits, group_size=1024, rounding="random_shift")
        assert scheme.gradients == GroupCodec(bits=bits, group_size=1024, rounding="stochastic")


def test_the_default_scheme_is_what_the_fields_say() -> None:
    assert parse_block({}) == QuantizedCommConfig() == parse_block({"scheme": "qsdp"})


def test_level_steps_reach_the_scheme_only_with_learned_levels() -> None:
    assert parse_block({}).to_scheme().level_steps == ()
    learned = parse_block({"weights": {**LEARNED, "level_steps": [3]}}).to_scheme()
    assert learned.level_steps == (3,)
    assert learned.weights.levels == "learned"


def test_digest_depends_on_every_effective_value_and_on_nothing_else() -> None:
    same = [{}, {"scheme": "qsdp"}, {"weights": {"bits": 8.0}}, {"gradients": {}, "seed": 0}]
    assert len({parse_block(block).digest() for block in same}) == 1
    different = [
        {},
        {"seed": 1},
        {"exclude": ["a"]},
        {"node_size": 1},
        {"weights": {"bits": 7}},
        {"gradients": {"bits": 7}},
        {"scheme": "qsdp_w4g4"},
    ]
    digests = {parse_block(block).digest() for block in different}
    assert len(digests) == len(different)
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


def test_config_is_frozen_and_hashable() -> None:
    config = parse_block({"exclude": ["a"]})
    assert hash(config) == hash(parse_block({"exclude": ["a"]}))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


@pytest.mark.parametrize("node_size, world, fits", [(None, 7, True), (2, 4, True), (4, 4, True)])
def test_node_size_that_divides_the_world(node_size: int | None, world: int, fits: bool) -> None:
    parse_block({"node_size": node_size}).validate_world(world)


@pytest.mark.parametrize("node_size, world", [(3, 8), (16, 8), (8, 6)])
def test_node_size_that_does_not_divide_the_world(node_size: int, world: int) -> None:
    with pytest.raises(ConfigError, match=f"node_size={node_size}: .* {world} ranks: 1, 2"):
        parse_block({"node_size": node_size}).validate_world(world)


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
