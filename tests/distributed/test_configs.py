"""Every shipped DeepSpeed config trains, and what ``ds_quant migrate`` writes; see
tests/integration/test_hf.py for those with "auto".
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hjson
import pytest
import yaml

import ds_quant
from ds_quant.config.schema import KEY
from ds_quant.resources import resource_dir
from ds_quant.tools import migrate
from tests.distributed.harness import on_ranks
from tests.distributed.models import BATCH, build, train_step, train_steps
from tests.thin import thinned

FILES = resource_dir("configs").glob("*.json")
CONFIGS = {path.stem: json.loads(path.read_text("utf-8")) for path in FILES}
CONFIGS = {name: config for name, config in CONFIGS.items() if "auto" not in json.dumps(config)}


# On one rank per node the node shard of SDP4Bit would be a full copy.
WORLDS = {name: 4 if "8gpu" in name or name == "ds_sdp4bit_zero3" else 2 for name in CONFIGS}


# A stage each, with a node shard and without.
QUICK_CONFIGS = ("ds_qsdp_zero1", "ds_2x1_10gbe_zero2", "ds_qsdp_zero3", "ds_sdp4bit_zero3")


@pytest.mark.parametrize(
    ("name", "world"),
    thinned(sorted(WORLDS.items()), lambda name, world: name in QUICK_CONFIGS),
)
@on_ranks()
def test_shipped_config_trains_with_its_scheme(name: str, world: int) -> None:
    os.environ["LOCAL_SIZE"] = str(world // 2)
    config = CONFIGS[name]
    # The fused CPU Adam would be compiled for a minute; on GPUs DeepSpeed's own is there.
    config["optimizer"]["params"] |= {"torch_adam": True, "lr": 5e-3}
    config["quantized_comm"].pop("warmup_steps", None)
    engine = build(config)
    losses = [train_step(engine, step)[-1] for step in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    report = ds_quant.report(engine)
    assert report["line"].startswith(f"{config['quantized_comm']['scheme']} on ZeRO-")
    assert (report["world"], report["node_size"]) == (world, world // 2)
    for role in ("weights", "gradients"):
        assert report["received_bytes"][role]["inter"] > 0
    assert report["full_precision_share"] < 0.05


# ---- translated from ZeRO++ ----

MIGRATED = yaml.safe_load((Path(__file__).parents[1] / "migrated.yaml").read_text("utf-8"))


def config_of(name: str) -> dict[str, Any]:
    """Translated, in bf16, for nodes of two ranks; full precision at the start takes a step."""
    config = hjson.loads(MIGRATED[name]["config"])
    found = migrate.translate(config).config
    for key in ("fp16", "train_batch_size", "optimizer"):
        found.pop(key, None)
    if "warmup_steps" in found[KEY]:
        found[KEY]["warmup_steps"] = 1
    found[KEY]["node_size"] = 2
    more = {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    return {**found, **more, "train_micro_batch_size_per_gpu": BATCH}


# What make test trains: every kind of compression that is translated.
QUICK = [
    "ZeRO++ tutorial",
    "hpZ test",
    "MiCS with hierarchical gathers",
    "a cast for communication",
]


@pytest.mark.parametrize(
    "names",
    thinned(
        [QUICK, [name for name in MIGRATED if name not in QUICK]], lambda names: names is QUICK
    ),
    ids=["quick", "others"],
)
@on_ranks(4, timeout=240)
def test_translated_configs_train(names: list[str]) -> None:
    for name in names:
        engine = build(config_of(name))
        losses = train_steps(engine, 6)
        assert engine.ds_quant_attached.run.scheme.name == MIGRATED[name]["block"]["scheme"]
        assert losses[-1] < 0.9 * losses[0], name
        engine.destroy()
