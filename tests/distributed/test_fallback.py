"""A running job returns to full precision: after NaN or Inf, or when a file appears.

Which steps were quantized is read off the bytes that a rank has received in each of them.
"""

from __future__ import annotations

import functools
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.harness import run, run_all, run_each
from tests.distributed.models import (
    FULL,
    QSDP,
    build,
    digest,
    digests,
    forward,
    masters,
    settings,
    train_step,
    watch,
)
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STAGES = (1, 2, 3)
SCHEMES = ("qsdp", "sdp4bit")
CASES = [(1, "sdp4bit"), (2, "qsdp"), (3, "qsdp"), (3, "sdp4bit")]
STEPS, BAD_STEP, RANKS = 8, 3, 4


def quick(stage: int, scheme: str) -> bool:
    return (stage, scheme) in ((2, "qsdp"), (3, "sdp4bit"))


def fields(scheme: str, policy: str | None, **keys: Any) -> dict[str, Any]:
    """A block on two nodes of two ranks."""
    chosen = {} if policy is None else {"fallback": {"on_nonfinite": policy, "steps": 2}}
    return {"scheme": scheme, "node_size": 2, **chosen, **keys}


def spoil(engine: Any, name: str = "second.weight") -> None:
    """The last rank's gradient of one parameter is infinite in step ``BAD_STEP``."""

    def infinite(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if engine.global_steps == BAD_STEP else gradient

    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        engine.module.get_parameter(name).register_hook(infinite)


def step_bytes(engine: Any, step: int) -> dict[str, int]:
    """Bytes by role that one optimizer step has brought to this rank."""
    import ds_quant

    def received() -> dict[str, int]:
        roles = ds_quant.report(engine)["received_bytes"]
        return {role: sum(links.values()) for role, links in roles.items()}

    before = received()
    train_step(engine, step)
    return {role: after - before[role] for role, after in received().items()}


def bytes_of(stage: int) -> dict[str, dict[str, int]]:
    """Scheme -> bytes by role of an ordinary step."""
    found = {}
    for scheme in (*SCHEMES, "full_precision"):
        engine = build(settings(stage, fields(scheme, None), dtype="bf16"))
        for step in range(3):
            found[scheme] = step_bytes(engine, step)
        engine.destroy()
    return found


# ---- raise ----


def raised(stage: int, scheme: str) -> tuple[str, bool, int]:
    """The error, whether it has left the master weights alone, and steps taken."""
    engine = build(settings(stage, fields(scheme, "raise"), dtype="bf16", accumulation=2))
    spoil(engine)
    for step in range(BAD_STEP):
        train_step(engine, step)
    before = digests(masters(engine))
    try:
        train_step(engine, BAD_STEP)
    except FloatingPointError as error:
        return str(error), digests(masters(engine)) == before, engine.global_steps
    return "", False, engine.global_steps


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
def test_raise_ends_all_ranks_naming_step_and_parameter_before_weights_change(
    stage: int, scheme: str
) -> None:
    for message, untouched, steps in run(raised, RANKS, stage, scheme):
        assert f"step {BAD_STEP}: NaN or Inf in the gradient of second.weight, received" in message
        assert "by rank " in message and "last checkpoint" in message
        assert untouched and steps == BAD_STEP


def raised_by_deepspeed(stage: int) -> str:
    """Gradients that DeepSpeed reduces itself are seen by DeepSpeed alone."""
    config = settings(
        stage, fields("qsdp", "raise", node_size=1), dtype="bf16", zero={"reduce_scatter": False}
    )
    engine = build(config)
    spoil(engine)
    try:
        for step in range(STEPS):
            train_step(engine, step)
    except FloatingPointError as error:
        return str(error)
    return f"skipped {engine.skipped_steps}"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_raise_covers_gradients_that_do_not_travel_through_the_plugin(
    stage: int, world: int
) -> None:
    for message in run_all(raised_by_deepspeed, world, ((1,), (2,), (3,)))[stage,]:
        if message == "skipped 0":
            pytest.skip("this DeepSpeed skips no bf16 step: 0.19 does")
        assert f"step {BAD_STEP}" in message and "that DeepSpeed reduces itself" in message


# ---- full precision for some steps ----


def fallen_back(stage: int, scheme: str) -> tuple[list[dict], set[str], dict, int]:
    """Bytes of every step, weights that the step after the bad one sees inexactly, the report,
    and skipped steps.
    """
    import ds_quant

    engine = build(settings(stage, fields(scheme, "full_precision"), dtype="bf16"))
    spoil(engine)
    sent = [step_bytes(engine, step) for step in range(BAD_STEP + 1)]
    exact = {n: digest(torch.from_numpy(a).bfloat16()) for n, a in masters(engine).items()}
    with watch(engine) as seen:
        sent.append(step_bytes(engine, BAD_STEP + 1))
    sent += [step_bytes(engine, step) for step in range(BAD_STEP + 2, STEPS)]
    used = {s.name for s in seen if s.step == BAD_STEP + 1 and s.bits != exact[s.name]}
    return sent, used, ds_quant.report(engine), engine.skipped_steps


@functools.cache
def usual(stage: int) -> dict[str, dict[str, int]]:
    """Scheme -> bytes by role that rank 0 gets in an ordinary step."""
    return run(bytes_of, RANKS, stage)[0]


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
def test_full_precision_lasts_exactly_the_steps_asked_for(stage: int, scheme: str) -> None:
    ranks = run(fallen_back, RANKS, stage, scheme)
    if ranks[0][3] == 0:
        pytest.skip("this DeepSpeed skips no bf16 step: 0.19 does")
    quantized, full = usual(stage)[scheme], usual(stage)["full_precision"]
    sent = ranks[0][0]
    window = {BAD_STEP + 1, BAD_STEP + 2}
    for step in range(3, STEPS):
        expected = full if step in window else quantized
        assert sent[step]["gradients"] == expected["gradients"], step
    for _, inexact, report, skipped in ranks:
        assert inexact == set(), "the step after the bad one computes with exact weights"
        assert (report["nonfinite_steps"], report["exact_steps"], skipped) == (1, 2, 1)


def skipped_as_ever(stage: int) -> list[tuple[list[float], int, dict]]:
    """Losses, skipped steps and report without the plugin, and with it by default."""
    import ds_quant

    outcomes = []
    for block in (None, {"scheme": "full_precision"}):
        engine = build(settings(stage, block, dtype="bf16"))
        spoil(engine)
        losses = [loss for step in range(STEPS) for loss in train_step(engine, step)]
        outcomes.append((losses, engine.skipped_steps, ds_quant.report(engine)))
    return outcomes


@pytest.mark.parametrize("stage", STAGES)
def test_skip_is_the_default_and_leaves_the_step_to_deepspeed(stage: int) -> None:
    for plain, default in run_all(skipped_as_ever, 2, ((1,), (2,), (3,)))[stage,]:
        assert repr(default[:2]) == repr(plain[:2])  # NaN losses are equal in this sense
        assert (default[2]["nonfinite_steps"], default[2]["exact_steps"]) == (0, 0)


# ---- the kill file ----


def killed(stage: int, scheme: str, from_start: bool) -> tuple[list[dict], list[bool], dict]:
    """Bytes of every step, and ``killed`` after it; the file exists on rank 2 alone."""
    import ds_quant

    rank = torch.distributed.get_rank()
    path = Path(os.environ["TEST_SCRATCH"], f"full precision {rank}")
    os.environ["DS_QUANT_KILL_FILE"] = str(path)
    if from_start and rank == 2:
        path.touch()
    engine = build(settings(stage, fields(scheme, None), dtype="bf16"))
    sent, flags = [], []
    for step in range(STEPS):
        if rank == 2 and step == 2:
            path.touch()
        if rank == 2 and step == 5:
            path.unlink()
        sent.append(step_bytes(engine, step))
        flags.append(ds_quant.report(engine)["killed"])
    return sent, flags, ds_quant.report(engine)


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
def test_a_kill_file_on_one_rank_switches_all_at_the_next_step(stage: int, scheme: str) -> None:
    """It appears before step 2, seen when the optimizer steps, and goes before step 5."""
    ranks = run(killed, RANKS, stage, scheme, False)
    quantized, full = usual(stage)[scheme], usual(stage)["full_precision"]
    for step in (3, 4, 5):
        assert ranks[0][0][step]["gradients"] == full["gradients"], step
    node_shard = (stage, scheme) == (3, "sdp4bit")
    for step in (4, 5):  # ZeRO-1/2 and a node shard send weights when the step before ends
        weights = ranks[0][0][step - 1 if stage < 3 or node_shard else step]["weights"]
        if node_shard:  # fewer bytes than the gathers of full_precision
            assert weights > quantized["weights"], step
        else:
            assert weights == full["weights"], step
    for step in (6, 7):
        assert ranks[0][0][step] == quantized, step
    for _, flags, report in ranks:
        assert flags == [False] * 2 + [True] * 3 + [False] * 3
        assert report["exact_steps"] == 3 and "DS_QUANT_KILL_FILE watched" in report["line"]


def test_a_kill_file_that_is_there_at_the_start_counts_from_the_first_step() -> None:
    ranks = run(killed, RANKS, 2, "qsdp", True)
    for step in range(5):
        assert ranks[0][0][step]["gradients"] == usual(2)["full_precision"]["gradients"]
    assert all(flags[:5] == [True] * 5 and not flags[5] for _, flags, _ in ranks)


def watched_by_one() -> None:
    if torch.distributed.get_rank() == 1:
        os.environ["DS_QUANT_KILL_FILE"] = "/tmp/nothing"
    build(settings(2, fields("qsdp", None, node_size=1)))


def test_a_kill_file_that_only_some_ranks_watch_is_refused_by_name() -> None:
    for _, error in run_each(watched_by_one, 2):
        assert "ranks disagree" in error and "DS_QUANT_KILL_FILE=" in error


# ---- a file system that fails ----


def blind(stage: int) -> tuple[list[bool], list[str]]:
    """Per step whether the run was in full precision, and this rank's lines. From step 2 on rank 1
    cannot look for the file, which has lain there since step 1 and is gone at step 4.
    """
    from ds_quant.zero import log

    said: list[str] = []
    log.log_here = said.append
    file = Path(os.environ["TEST_SCRATCH"], "stop")
    os.environ["DS_QUANT_KILL_FILE"] = str(file)
    engine = build(settings(stage, fields("qsdp", None)))
    rank, look, killed = torch.distributed.get_rank(), Path.exists, []

    def stale(path: Path) -> bool:
        if path == file and rank == 1 and 2 <= engine.global_steps < 5:
            raise OSError(116, "Stale file handle", str(path))
        return look(path)

    Path.exists = stale
    for step in range(7):
        if rank == 0 and step in (1, 4):
            (file.touch if step == 1 else file.unlink)()
        torch.distributed.barrier()
        train_step(engine, step)
        killed.append(engine.ds_quant_plugin.state.killed)
    return killed, said


@pytest.mark.parametrize("stage", (2, 3))
def test_a_rank_that_cannot_look_for_the_file_keeps_its_vote_and_warns_once(stage: int) -> None:
    ranks = run(blind, 2, stage)
    assert [killed for killed, _ in ranks] == [[False, True, True, True, True, False, False]] * 2
    assert ranks[0][1] == []
    (line,) = ranks[1][1]
    assert "rank 1 cannot look for the file of DS_QUANT_KILL_FILE" in line
    assert "Stale file handle" in line


# ---- what a non-finite gradient leaves behind ----

POISONED, DTYPES = "second.weight", ("fp32", "bf16")
BAD = {"nan": float("nan"), "inf": float("inf")}


def poisoned(stage: int, dtype: str) -> dict[str, dict[str, Any]]:
    return {
        f"{name} {bad}": _poisoned_run(settings(stage, block, dtype=dtype), BAD[bad])
        for name, block in (("full", FULL), ("quantized", QSDP))
        for bad in BAD
    }


def _poisoned_run(config: dict[str, Any], value: float) -> dict[str, Any]:
    """One good step, one with ``value`` in one element of rank 1's gradient, one more good one."""
    from deepspeed import comm as dist
    from deepspeed.utils import safe_get_full_grad

    engine = build(config)
    parameters = dict(engine.module.named_parameters())
    train_step(engine, 0)
    before = digests(masters(engine))

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 3] = value
        return gradient

    hook = parameters[POISONED].register_hook(poison) if dist.get_rank() == 1 else None
    engine.backward(forward(engine, 1))
    gradients = {n: safe_get_full_grad(p).float().numpy().copy() for n, p in parameters.items()}
    engine.step()
    if hook is not None:
        hook.remove()
    return {
        "gradients": gradients,
        "overflow": bool(engine.optimizer.overflow),
        "before": before,
        "after": masters(engine),
        "next_loss": train_step(engine, 2)[0],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_non_finite_gradient_of_one_rank_stays_visible(stage: int, dtype: str) -> None:
    """The owner sees it, DeepSpeed treats it as in full precision, nothing else is touched."""
    for rank in run_all(poisoned, 2, tuple(product(STAGES, DTYPES)))[stage, dtype]:
        for bad in BAD:
            _check_poisoned(rank[f"full {bad}"], rank[f"quantized {bad}"])


def _check_poisoned(full: dict[str, Any], quantized: dict[str, Any]) -> None:
    element = full["gradients"][POISONED].size // 3
    for outcome in (full, quantized):
        assert not np.isfinite(outcome["gradients"][POISONED].reshape(-1)[element])
        others = [g for n, g in outcome["gradients"].items() if n != POISONED]
        assert all(np.isfinite(g).all() for g in others)
    group_size = 1024
    assert np.count_nonzero(~np.isfinite(full["gradients"][POISONED])) == 1
    assert np.count_nonzero(~np.isfinite(quantized["gradients"][POISONED])) <= group_size
    assert quantized["overflow"] == full["overflow"]
    if full["overflow"]:  # the step is skipped
        assert digests(quantized["after"]) == quantized["before"]
        assert np.isfinite(quantized["next_loss"])
        return
    for outcome in (full, quantized):
        broken = ~np.isfinite(outcome["after"][POISONED])
        assert (broken == ~np.isfinite(outcome["gradients"][POISONED])).all()
        assert np.isnan(outcome["next_loss"])
