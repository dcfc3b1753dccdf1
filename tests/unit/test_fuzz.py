"""Random config blocks: nothing crashes, and what is wrong is named."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_quant.config.presets import preset_names
from ds_quant.config.schema import KEY, ConfigError, json_schema, parse

ANYTHING = st.sampled_from([None, [], ["*"], [400], [3, 2], "x", {}, "auto"])


def members(name: str) -> dict[str, Any]:
    return json_schema()["$defs"][name]["properties"]


def value_of(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly valid values of a place in the schema, on and beyond its limits too."""
    if "enum" in node:
        return st.sampled_from([*node["enum"], str(node["enum"][0])[:-1], None])
    if node.get("type") in ("integer", "number"):
        limits = [node.get(limit, 1) for limit in ("minimum", "maximum")]
        near = [limit + d for limit in limits for d in (-1, 0, 1, 0.5)]
        return st.sampled_from([*near, 4, 64, 1e3]) | st.integers() | st.floats()
    if node.get("type") == "boolean":
        return st.sampled_from([True, False, 1, "true"])
    return ANYTHING


def section(name: str, **nested: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of its keys, and now and then with one too many."""
    values = {key: nested.get(key, value_of(node)) for key, node in members(name).items()}
    values |= {"bits": st.integers(0, 10), "no_such_key": st.none()}
    return st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: values[key] for key in keys})
    )


INTRA = ANYTHING | section("IntraConfig")
BLOCKS = section(
    "QuantizedCommConfig",
    scheme=st.sampled_from([*preset_names(), "qspd"]),
    weights=ANYTHING | section("WeightsConfig", intra=INTRA),
    gradients=ANYTHING | section("GradientsConfig", intra=INTRA),
    fallback=ANYTHING | section("FallbackConfig"),
)


def written(block: Any, path: str) -> bool:
    """Return True if the block holds the place of a message, such as .weights.level_steps[1]."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            block = block[key] if key else block[int(index)]
        except (KeyError, IndexError, TypeError):
            return False
    return True


@settings(max_examples=500, deadline=None, derandomize=True)
@given(block=BLOCKS, world=st.integers(1, 9), stage=st.integers(0, 4))
def test_a_random_block_works_or_is_refused_naming_a_key_that_was_written(
    block: dict[str, Any], world: int, stage: int
) -> None:
    try:
        config = parse({KEY: block})
    except ConfigError as error:
        for problem in error.problems:
            named = re.findall(rf"{KEY}((?:\.\w+|\[\d+\])+)", problem)
            assert any(written(block, path) for path in named), problem
        return
    if config is None:
        assert block["enabled"] is False
        return
    assert config.to_scheme().name == block.get("scheme", "qsdp")
    for check, number in ((config.validate_world, world), (config.validate_stage, stage)):
        try:
            check(number)
        except ConfigError as error:
            assert str(number) in str(error) and "=" in str(error)
