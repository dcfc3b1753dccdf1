"""What ``ds_quant migrate`` writes trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hjson
import pytest
import yaml

from ds_quant.config.schema import KEY
from ds_quant.tools import migrate
from tests.distributed.harness import run
from tests.distributed.models import BATCH, build, train_step

pytestmark = pytest.mark.distributed

CASES = yaml.safe_load((Path(__file__).parents[1] / "migrated.yaml").read_text("utf-8"))


def config_of(name: str) -> dict[str, Any]:
    """Translated, in bf16, for nodes of two ranks; full precision at the start takes a step."""
    config = hjson.loads(CASES[name]["config"])
    found = hjson.loads(migrate.rewritten(config, migrate.translate(config)))
    for key in ("fp16", "train_batch_size"):
        found.pop(key, None)
    if "warmup_steps" in found[KEY]:
        found[KEY]["warmup_steps"] = 1
    found[KEY]["node_size"] = 2
    more = {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    return {**found, **more, "train_micro_batch_size_per_gpu": BATCH}


def _rank() -> dict[str, tuple[list[float], str]]:
    found = {}
    for name in CASES:
        engine = build(config_of(name))
        losses = [train_step(engine, step)[0] for step in range(6)]
        found[name] = losses, engine.ds_quant_plugin.scheme.name
        engine.destroy()
    return found


def test_every_translated_config_trains() -> None:
    for results in run(_rank, 4, timeout=240):
        for name, (losses, scheme) in results.items():
            assert scheme == CASES[name]["block"]["scheme"]
            assert losses[-1] < 0.9 * losses[0], name
