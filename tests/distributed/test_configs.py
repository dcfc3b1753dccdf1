"""Every shipped DeepSpeed config trains; see tests/integration/test_hf.py for those with "auto"."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_quant.resources import resource_dir
from tests.distributed.harness import run
from tests.distributed.models import Regression, batch

pytestmark = pytest.mark.distributed

FILES = resource_dir("configs").glob("*.json")
CONFIGS = {path.stem: json.loads(path.read_text("utf-8")) for path in FILES}
CONFIGS = {name: config for name, config in CONFIGS.items() if "auto" not in json.dumps(config)}


def _train(config: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed import comm as dist

    import ds_quant

    # The fused CPU Adam would be compiled for a minute; on GPUs DeepSpeed's own is there.
    config["optimizer"]["params"] |= {"torch_adam": True, "lr": 5e-3}
    config["quantized_comm"].pop("warmup_steps", None)
    torch.manual_seed(0)
    model = Regression()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses = []
    for step in range(8):
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = batch(0, step, 0, dist.get_rank())
            loss = engine(x.bfloat16(), y)
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    report = ds_quant.report(engine)
    return {"losses": losses, "report": report}


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
