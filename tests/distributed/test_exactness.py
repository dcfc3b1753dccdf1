"""Saved and user-visible weights are exact, and looking at them does not disturb training.

Runs use 4-bit codes, whose error is far above bf16 rounding. What is exact is defined by the fp32
master weights, which DeepSpeed gathers by a way of its own.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import needs
from tests.distributed.harness import run
from tests.distributed.models import (
    DTYPES,
    build,
    digest,
    evaluate,
    exact,
    forward,
    masters,
    settings,
    train_step,
    watch,
)

pytestmark = pytest.mark.distributed

W4G4 = {"scheme": "qsdp_w4g4"}
STEPS = 3


# ZeRO-3 then keeps parameters after an evaluation, gathered and decoded.
KEEP = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
EXPORT = {"stage3_gather_16bit_weights_on_model_save": True, **KEEP}


def config(stage: int, dtype: str = "bf16") -> dict[str, Any]:
    return settings(stage, W4G4, dtype=dtype, zero=EXPORT if stage == 3 else {})


def live(engine: Any) -> dict[str, str]:
    """Digests of what this rank holds between steps: shards under ZeRO-3, else the replica."""
    held = {n: getattr(p, "ds_tensor", p) for n, p in engine.module.named_parameters()}
    return {n: digest(t.data) for n, t in held.items()}


# ---- checkpoints and exports, all stages ----


def exports(stage: int, dtype: str) -> dict[str, Any]:
    """Trains, evaluates, saves, trains on; once more undisturbed; once more from the save."""
    from deepspeed import comm as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    import ds_quant

    folder = Path(os.environ["TEST_SCRATCH"])
    engine = build(config(stage, dtype))
    for step in range(STEPS):
        train_step(engine, step)
    found: dict[str, Any] = {"exact": exact(engine, dtype), "live": live(engine)}
    fp32_masters = masters(engine)
    evaluate(engine)
    with ds_quant.exact_weights(engine):
        found["live_inside"] = live(engine)
    found["live_outside"] = live(engine)
    engine.save_16bit_model(str(folder), "model.bin")
    dist.barrier()
    saved = torch.load(folder / "model.bin", weights_only=True)
    found["saved"] = {n: digest(t) for n, t in saved.items()}
    found["saved_dtypes"] = {t.dtype for t in saved.values()}
    found["live_after_export"] = live(engine)
    engine.save_checkpoint(str(folder), tag="here")
    found["live_after_save"] = live(engine)
    dist.barrier()
    restored = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="here")
    found["zero_to_fp32_is_master"] = restored.keys() == fp32_masters.keys() and all(
        np.array_equal(restored[n].detach().numpy(), a) for n, a in fp32_masters.items()
    )
    found["losses"] = [train_step(engine, STEPS + more) for more in range(STEPS)]
    engine.destroy()

    undisturbed = build(config(stage, dtype))
    losses = [train_step(undisturbed, step) for step in range(2 * STEPS)]
    found["undisturbed"] = losses[STEPS:]
    undisturbed.destroy()

    fresh = build(config(stage, dtype), seed=1)  # other initial weights
    fresh.load_checkpoint(str(folder), tag="here")
    found["live_after_load"] = live(fresh)
    found["resumed"] = [train_step(fresh, STEPS + more) for more in range(STEPS)]
    return found


@pytest.fixture(
    scope="module", params=list(product((1, 2, 3), DTYPES)), ids=lambda p: f"zero{p[0]}-{p[1]}"
)
def exported(request: pytest.FixtureRequest) -> tuple[int, str, list[dict[str, Any]]]:
    stage, dtype = request.param
    return stage, dtype, run(exports, 2, stage, dtype)


def test_save_16bit_model_writes_the_cast_master_weights(exported: Any) -> None:
    _, dtype, ranks = exported
    for found in ranks:
        assert found["saved_dtypes"] == {DTYPES[dtype]}
        assert found["saved"] == found["exact"]


def test_checkpoint_holds_the_master_weights(exported: Any) -> None:
    assert all(found["zero_to_fp32_is_master"] for found in exported[2])


def test_saving_leaves_live_weights_as_they_were(exported: Any) -> None:
    stage, _, ranks = exported
    for found in ranks:
        if stage < 3:  # else there would be nothing to restore
            assert found["live"]["first.weight"] != found["exact"]["first.weight"]
        assert found["live_after_export"] == found["live"]
        assert found["live_after_save"] == found["live"]


def test_exact_weights_shows_them_inside_and_the_decoded_ones_outside(exported: Any) -> None:
    stage, _, ranks = exported
    for found in ranks:
        assert found["live_inside"] == (found["exact"] if stage < 3 else found["live"])
        assert found["live_outside"] == found["live"]


def test_losses_after_a_save_equal_those_without_one(exported: Any) -> None:
    assert all(found["losses"] == found["undisturbed"] for found in exported[2])


def test_losses_after_a_load_equal_those_of_an_uninterrupted_run(exported: Any) -> None:
    for found in exported[2]:
        assert found["live_after_load"] == found["live"]
        assert found["resumed"] == found["undisturbed"]


def skipped_step(stage: int) -> dict[str, Any]:
    """An overflow makes DeepSpeed skip a step, but count it."""
    from deepspeed import comm as dist

    import ds_quant

    checking = config(stage) | {"bf16": {"enabled": True, "check_grad_overflow": True}}
    engine = build(checking)
    for step in range(STEPS):
        train_step(engine, step)
    found = {"live": live(engine)}
    loss = forward(engine, STEPS)
    engine.backward(loss * float("nan") if dist.get_rank() == 0 else loss)
    engine.step()
    found["skipped"] = bool(engine.optimizer.overflow)
    found["live_after_skip"] = live(engine)
    with ds_quant.exact_weights(engine):
        pass
    found["live_outside"] = live(engine)
    engine.save_checkpoint(os.environ["TEST_SCRATCH"], tag="here")
    found["losses"] = train_step(engine, STEPS + 1) + train_step(engine, STEPS + 2)
    engine.destroy()
    fresh = build(checking, seed=1)
    fresh.load_checkpoint(os.environ["TEST_SCRATCH"], tag="here")
    found["live_after_load"] = live(fresh)
    found["resumed"] = train_step(fresh, STEPS + 1) + train_step(fresh, STEPS + 2)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_changes_no_weight_and_no_resume(stage: int) -> None:
    if stage == 3:
        needs.deepspeed("0.19", "takes a bf16 step with NaN under ZeRO-3")
    for found in run(skipped_step, 2, stage):
        assert found["skipped"]
        assert found["live_after_skip"] == found["live"]
        assert found["live_outside"] == found["live"]
        assert found["live_after_load"] == found["live"]
        assert found["resumed"] == found["losses"]


def failed_save(stage: int) -> dict[str, Any]:
    """A save that raises before DeepSpeed's epilogue; the user catches it and trains on."""
    from deepspeed import comm as dist

    engine = build(config(stage))
    for step in range(STEPS):
        train_step(engine, step)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    engine._save_checkpoint, save = full, engine._save_checkpoint
    with pytest.raises(OSError, match="no space"):
        engine.save_checkpoint(os.environ["TEST_SCRATCH"], tag="lost")
    engine._save_checkpoint = save
    train_step(engine, STEPS)
    found: dict[str, Any] = {"exact": exact(engine, "bf16"), "live": live(engine)}
    engine.save_16bit_model(os.environ["TEST_SCRATCH"], "model.bin")
    dist.barrier()
    saved = torch.load(Path(os.environ["TEST_SCRATCH"]) / "model.bin", weights_only=True)
    found["saved"] = {n: digest(t) for n, t in saved.items()}
    found["live_after_export"] = live(engine)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_failed_save_does_not_spoil_the_next_one(stage: int) -> None:
    for found in run(failed_save, 2, stage):
        assert found["live"]["first.weight"] != found["exact"]["first.weight"]
        assert found["saved"] == found["exact"]
        assert found["live_after_export"] == found["live"]


# ---- GatheredParameters under ZeRO-3 ----


def gathered() -> dict[str, Any]:
    """What GatheredParameters shows after a training step and after an evaluation."""
    import deepspeed

    engine = build(config(3))
    for step in range(STEPS):
        train_step(engine, step)
    named = dict(engine.module.named_parameters())

    def look(modifier: int | None) -> dict[str, str]:
        with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=modifier):
            return {n: digest(p.data) for n, p in named.items()}

    found: dict[str, Any] = {"exact": exact(engine, "bf16"), "live": live(engine)}
    found["after_step"] = look(None)
    for modifier in (None, 0):
        evaluate(engine)
        found[f"left_{modifier}"] = {
            n: digest(p.data) for n, p in named.items() if p.ds_status.name == "AVAILABLE"
        }
        found[f"after_eval_{modifier}"] = look(modifier)
        found[f"live_{modifier}"] = live(engine)
    losses = [train_step(engine, STEPS + more) for more in range(STEPS)]
    engine.destroy()
    undisturbed = build(config(3))
    expected = [train_step(undisturbed, step) for step in range(2 * STEPS)][STEPS:]
    found["losses"], found["undisturbed"] = losses, expected
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gathered_parameters_are_exact_and_harmless(world: int) -> None:
    for found in run(gathered, world):
        assert found["after_step"] == found["exact"]
        for modifier in (None, 0):
            left = found[f"left_{modifier}"]
            assert left["first.weight"] != found["exact"]["first.weight"]  # decoded, still there
            assert found[f"after_eval_{modifier}"] == found["exact"]
            assert found[f"live_{modifier}"] == found["live"]
        assert found["losses"] == found["undisturbed"]


def gathered_by_version() -> dict[str, list[int]]:
    """How many parameters DeepSpeed's own gather is given at a time for GatheredParameters."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    engine, found = build(config(3)), {}
    train_step(engine, 0)
    original, running = Init._all_gather, deepspeed.__version__
    for deepspeed.__version__ in ("0.19.7", "0.19.8"):
        given = found[deepspeed.__version__] = []

        def gather(self: Any, params: list[Any], *args: Any, **kwargs: Any) -> Any:
            given.append(len(params))  # noqa: B023
            return original(self, params, *args, **kwargs)

        Init._all_gather = gather
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            pass
    Init._all_gather, deepspeed.__version__ = original, running
    found["all"] = [len(list(engine.module.parameters()))]
    engine.destroy()
    return found


def test_versions_that_await_the_last_gather_only_gather_one_by_one() -> None:
    """Before 0.19.8 the others may arrive later on the CPU."""
    for found in run(gathered_by_version, 2):
        assert found["0.19.7"] == [1] * found["all"][0]
        assert found["0.19.8"] == found["all"]


def edited() -> dict[str, Any]:
    """Rank 0 changes a weight and a bias inside GatheredParameters, after an evaluation."""
    import deepspeed
    from deepspeed import comm as dist

    engine = build(config(3))
    for step in range(STEPS):
        train_step(engine, step)
    before = evaluate(engine)
    edits = [engine.module.last.weight, engine.module.last.bias]
    with deepspeed.zero.GatheredParameters(edits, modifier_rank=0):
        wanted = [0.5 * p.data.clone() for p in edits]
        if dist.get_rank() == 0:
            for p in edits:
                p.data.mul_(0.5)
    with deepspeed.zero.GatheredParameters(edits):
        arrived = all(torch.equal(p.data, w) for p, w in zip(edits, wanted, strict=True))
    with watch(engine) as seen:
        after = evaluate(engine)
    used = {s.name: s.bits for s in seen}
    return {
        "arrived": arrived,
        "losses": (before, after),
        "bias_used": used["last.bias"] == digest(wanted[1]),
    }


def test_edits_inside_gathered_parameters_arrive_in_shards_and_forward() -> None:
    for found in run(edited, 2):
        assert found["arrived"]
        assert found["bias_used"]  # biases travel exactly
        assert found["losses"][0] != found["losses"][1]


# ---- before the first step ----


def exported_at_once(stage: int) -> dict[str, Any]:
    """Saves 16-bit weights and a checkpoint before any step, then trains; once more undisturbed."""
    from deepspeed import comm as dist

    folder = Path(os.environ["TEST_SCRATCH"])
    engine = build(config(stage))
    found: dict[str, Any] = {"exact": exact(engine, "bf16"), "live": live(engine)}
    engine.save_16bit_model(str(folder), "model.bin")
    found["live_after_export"] = live(engine)
    engine.save_checkpoint(str(folder), tag="first")
    found["live_after_save"] = live(engine)
    dist.barrier()
    saved = torch.load(folder / "model.bin", weights_only=True)
    found["saved"] = {n: digest(t) for n, t in saved.items()}
    found["losses"] = [train_step(engine, step) for step in range(2)]
    engine.destroy()
    undisturbed = build(config(stage))
    found["undisturbed"] = [train_step(undisturbed, step) for step in range(2)]
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_an_export_before_the_first_step_is_exact_and_harmless(stage: int) -> None:
    for found in run(exported_at_once, 2, stage):
        assert found["saved"] == found["exact"]
        assert found["live_after_export"] == found["live_after_save"] == found["live"]
        assert found["losses"] == found["undisturbed"]
