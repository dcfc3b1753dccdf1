"""Weights that a node shard keeps, in cases that only it can get wrong."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import ds_quant
from tests.distributed.harness import run, run_all
from tests.distributed.models import Regression, build, evaluate, masters, settings, train_step

# One rank per node: the node shard is all there is, and two ranks make two nodes.
ALONE = {"node_size": 1, "allow_full_replica": True}


def frozen_later(scheme: str) -> float:
    """Relative distance of the weight in use from its master, frozen after 2 of 8 steps."""
    engine = build(
        settings(3, {"scheme": scheme, **ALONE}, dtype="bf16"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2, weight_decay=0.5),
    )
    used = []
    engine.module.second.register_forward_hook(
        lambda module, *_: used.append(module.weight.detach().float().clone())
    )
    for step in range(8):
        if step == 2:
            engine.module.second.weight.requires_grad_(False)
        train_step(engine, step)
    evaluate(engine)
    engine.module.second.weight.requires_grad_(True)  # DeepSpeed shows no other masters
    exact = torch.from_numpy(masters(engine)["second.weight"])
    return float((used[-1] - exact).norm() / exact.norm())


def test_a_parameter_frozen_during_training_goes_on_following_its_master() -> None:
    """Momentum and weight decay move it still, as they do in DeepSpeed alone."""
    for distances in run_all(frozen_later, 2, (("sdp4bit",), ("zeropp",))).values():
        assert max(distances) < 0.02


def lines() -> dict[str, str]:
    blocks = {
        "sdp4bit": {"scheme": "sdp4bit"},
        "qwd": {"scheme": "qwd"},
        "with intra": {"scheme": "sdp4bit", "weights": {"intra": {"bits": 8}}},
        "zeropp": {"scheme": "zeropp"},
        "two nodes": {"scheme": "sdp4bit", **ALONE},
    }
    return {
        name: ds_quant.report(build(settings(3, block)))["line"] for name, block in blocks.items()
    }


def test_on_one_node_the_line_says_why_weights_stay_exact_and_what_helps() -> None:
    for found in run(lines, 2):
        for name in ("sdp4bit", "qwd", "zeropp"):
            assert "), all weights, " in found[name]
            assert "set weights.intra, such as" in found[name]
        for name in ("with intra", "two nodes"):
            assert "all weights" not in found[name]


# ---- saving ----


# ---- engines rebuilt on one module ----


def nested(method: Any) -> int:
    """How many wrappers of this plugin a parameter's method has."""
    original = getattr(method, "ds_quant_wraps", None)
    return 0 if original is None else 1 + nested(original)


def node_shards() -> list[int]:
    """Bytes of every node shard alive in this process."""
    from ds_quant.zero.node_shard import NodeShard

    gc.collect()
    return [o.nbytes() for o in gc.get_objects() if isinstance(o, NodeShard)]


def rebuilt(scheme: str, destroys: bool) -> dict[str, Any]:
    module, methods = Regression(), ("all_gather_coalesced", "all_gather", "partition")
    engine, used = None, []
    for _ in range(3):
        if engine is not None and destroys:
            engine.destroy()
        engine = build(settings(3, {"scheme": scheme, **ALONE}, dtype="bf16"), lambda: module)
        used.append(evaluate(engine))
        train_step(engine, 0)
        depths = {nested(getattr(p, m)) for p in module.parameters() for m in methods}
    found = {"depths": depths, "shards": node_shards(), "used": used}
    engine.destroy()
    found["left"] = {nested(getattr(p, m)) for p in module.parameters() for m in methods}
    found["kept"] = sum(node_shards())
    return found


@pytest.mark.parametrize("destroys", (True, False))
def test_an_engine_rebuilt_on_one_module_leaves_nothing_of_the_last(destroys: bool) -> None:
    for found in run(rebuilt, 2, "sdp4bit", destroys):
        assert len([nbytes for nbytes in found["shards"] if nbytes]) == 1
        assert found["depths"] == {1}
        assert found["left"] == {0} and found["kept"] == 0
        assert found["used"][0] > found["used"][1] > found["used"][2]


def decoded_at_the_end() -> tuple[Any, Any]:
    import deepspeed

    live = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
    engine = build(settings(3, {"scheme": "qsdp_w4g4"}, zero=live))
    train_step(engine, 0)
    expected = torch.from_numpy(masters(engine)["second.weight"])
    evaluate(engine)
    engine.destroy()
    weight = engine.module.second.weight
    with deepspeed.zero.GatheredParameters([weight]):
        return expected.numpy(), weight.detach().clone().numpy()


def test_a_destroyed_engine_leaves_no_decoded_weights_behind() -> None:
    for expected, left in run(decoded_at_the_end, 2):
        assert (expected == left).all()
