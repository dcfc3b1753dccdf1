"""The errors of wrong configs, word by word, in golden/wrong_configs.json, at 8 ranks.

After a deliberate change of words: python -m tests.unit.test_golden_messages, and read the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_quant.config.schema import ConfigError, parse

GOLDEN = Path(__file__).with_name("golden") / "wrong_configs.json"
WORLD = 8
CASES: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text("utf-8"))


def problems_of(config: dict[str, Any]) -> list[str]:
    """Return the refusals of start-up, one sentence each."""
    with pytest.raises(ConfigError) as error:
        parsed = parse(config)
        parsed.validate_stage(config["zero_optimization"]["stage"])
        parsed.validate_world(WORLD)
    return list(error.value.problems)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_message_is_the_golden_one(case: dict[str, Any]) -> None:
    assert problems_of(case["config"]) == case["messages"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_message_names_key_value_what_is_allowed_and_the_way_out(case: dict[str, Any]) -> None:
    for message in case["messages"]:
        key, equals, rest = message.partition("=")
        assert equals, "setting=value comes first"
        shown = _shown(case["config"], key)
        if shown is not None:
            assert rest.startswith(shown), message
        assert message.isascii() and "\n" not in message
        words = ("allowed", "set ", "move ", "leave ", "use ", "did you mean", "only ")
        assert any(word in rest for word in words), message


def _shown(config: Any, key: str) -> str | None:
    """Return the value of a key in the file as the message must show it; None if the scheme has set
    it.
    """
    for part in key.split("."):
        if part not in config:
            return None
        config = config[part]
    text = json.dumps(config)
    return text if len(text) <= 60 else text[:57]


def _dump(cases: dict[str, dict[str, Any]]) -> str:
    """Configs as they stand in a file, messages one per line."""
    found = (
        f'{json.dumps(name)}: {{\n "config": {json.dumps(case["config"])},\n'
        f' "messages": {json.dumps(case["messages"], indent=2)[:-1]} ]}}'
        for name, case in cases.items()
    )
    return "{" + ",\n".join(found) + "}\n"


if __name__ == "__main__":
    for changed in CASES.values():
        changed["messages"] = problems_of(changed["config"])
    GOLDEN.write_text(_dump(CASES), "utf-8")
