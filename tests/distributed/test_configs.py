"""Every shipped DeepSpeed config trains, and what ``ds_quant migrate`` writes; see
tests/integration/test_hf.py for those with "auto".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hjson
import pytest
import yaml

from ds_quant.config.schema import KEY
from ds_quant.resources import resource_dir
from ds_quant.tools import migrate
from tests.distributed.harness import run
from tests.distributed.models import BATCH, Regression, build, train_step

FILES = resource_dir("configs").glob("*.json")
CONFIGS = {path.stem: json.loads(path.read_text("utf-8")) for path in FILES}
CONFIGS = {name: config for name, config in CONFIGS.items() if "auto" not in json.dumps(config)}


def _train(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch

    import ds_quant

    # The fused CPU Adam would be compiled for a minute; on GPUs DeepSpeed's own is there.
    config["optimizer"]["params"] |= {"torch_adam": True, "lr": 5e-3}
    config["quantized_comm"].pop("warmup_steps", None)
    torch.manual_seed(0)
    model = Regression()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses = [train_step(engine, step)[-1] for step in range(8)]
    return {"losses": losses, "report": ds_quant.report(engine)}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_shipped_config_trains_with_its_scheme(name: str) -> None:
    config = CONFIGS[name]
    world, node = (4, 2) if "8gpu" in name else (2, 1)
    if name == "ds_sdp4bit_zero3":
        world, node = 4, 2  # on one rank per node its node shard would be a full copy
    environment = {"LOCAL_SIZE": str(node)}
    for rank in run(_train, world, config, environment=environment):
        report = rank["report"]
        assert report["line"].startswith(f"{config['quantized_comm']['scheme']} on ZeRO-")
        assert (report["world"], report["node_size"]) == (world, node)
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]
        for role in ("weights", "gradients"):
            assert report["received_bytes"][role]["inter"] > 0
        assert report["full_precision_share"] < 0.05


# ---- translated from ZeRO++ ----

MIGRATED = yaml.safe_load((Path(__file__).parents[1] / "migrated.yaml").read_text("utf-8"))


def config_of(name: str) -> dict[str, Any]:
    """Translated, in bf16, for nodes of two ranks; full precision at the start takes a step."""
    config = hjson.loads(MIGRATED[name]["config"])
    found = hjson.loads(migrate.rewritten(config, migrate.translate(config)))
    for key in ("fp16", "train_batch_size"):
        found.pop(key, None)
    if "warmup_steps" in found[KEY]:
        found[KEY]["warmup_steps"] = 1
    found[KEY]["node_size"] = 2
    more = {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
    return {**found, **more, "train_micro_batch_size_per_gpu": BATCH}


def _migrated_rank() -> dict[str, tuple[list[float], str]]:
    found = {}
    for name in MIGRATED:
        engine = build(config_of(name))
        losses = [train_step(engine, step)[0] for step in range(6)]
        found[name] = losses, engine.ds_quant_plugin.scheme.name
        engine.destroy()
    return found


def test_every_translated_config_trains() -> None:
    for results in run(_migrated_rank, 4, timeout=240):
        for name, (losses, scheme) in results.items():
            assert scheme == MIGRATED[name]["block"]["scheme"]
            assert losses[-1] < 0.9 * losses[0], name
