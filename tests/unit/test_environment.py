"""The block of ``attach``: an object, a text or a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_quant.config.environment import block_of
from ds_quant.config.errors import ConfigError

TWICE = '{"scheme": "qsdp", "scheme": "eden4"}'


def test_a_block_of_a_file_or_a_text_sets_every_key_once(tmp_path: Path) -> None:
    path = tmp_path / "block.json"
    path.write_text(TWICE, "utf-8")
    for given in (path, str(path), TWICE):
        with pytest.raises(ConfigError, match="^scheme: set twice in one object: leave one out$"):
            block_of(given)


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_text_is_no_block(given: str) -> None:
    with pytest.raises(ConfigError, match='^block="": allowed: a block such as'):
        block_of(given)


def test_keys_that_other_programs_may_have_stand_beside_the_block() -> None:
    config = block_of({"quantized_comm": {"scheme": "eden4"}, "seed": 3, "metrics": {}})
    assert config is not None and config.seed == 0


@pytest.mark.parametrize("key", ["scheme", "weights", "gradients", "exclude", "min_numel"])
def test_a_key_of_the_block_beside_it_is_refused(key: str) -> None:
    """Nobody would read it."""
    whole = {"quantized_comm": {"scheme": "eden4"}, key: {}, "train_batch_size": 8}
    for given in (whole, json.dumps(whole)):
        with pytest.raises(ConfigError, match=f"^{key}={{}}: move {key} into quantized_comm$"):
            block_of(given)
    del whole[key]
    config = block_of(whole)
    assert config is not None and config.scheme == "eden4"
