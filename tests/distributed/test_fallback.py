"""A running job returns to full precision: after NaN or Inf, or when a file appears.

Which steps were quantized is read off the bytes that a rank has received in each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

import ds_quant
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import (
    FULL,
    QSDP,
    Run,
    engine_of,
    evaluate,
    exact,
    heard,
    master_bits,
    train_step,
    train_steps,
    watch,
)
from tests.distributed.rows import Step, Table, Way, same_weights
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

STAGES = (1, 2, 3)
CASES = [(1, "sdp4bit"), (2, "qsdp"), (3, "qsdp"), (3, "sdp4bit")]
STEPS, BAD_STEP, RANKS = 8, 3, 4


def quick(stage: int, scheme: str) -> bool:
    return (stage, scheme) == (3, "sdp4bit")


def fields(scheme: str, policy: str | None, **keys: Any) -> dict[str, Any]:
    """A block on two nodes of two ranks."""
    chosen = {} if policy is None else {"fallback": {"on_nonfinite": policy, "steps": 2}}
    return {"scheme": scheme, "node_size": 2, **chosen, **keys}


def spoil(engine: DeepSpeedEngine, name: str = "second.weight") -> None:
    """The last rank's gradient of one parameter is infinite in the first micro-step of step
    ``BAD_STEP``.
    """

    def infinite(gradient: torch.Tensor) -> torch.Tensor:
        begins = engine.micro_steps % engine.gradient_accumulation_steps() == 0
        return gradient * float("inf") if begins and engine.global_steps == BAD_STEP else gradient

    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        engine.module.get_parameter(name).register_hook(infinite)


# ---- full precision for some steps ----


def counted(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """Bytes of gradients and of weights that a step has brought to this rank, and whether it ends
    with the kill file seen.
    """

    def received() -> list[int]:
        roles = ds_quant.report(engine)["received_bytes"]
        return [sum(roles[role].values()) for role in ("gradients", "weights")]

    before = received()
    train_step(engine, step, seed)
    now = [after - start for start, after in zip(before, received(), strict=True)]
    return [*now, ds_quant.report(engine)["killed"]]


def spoiled(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """The step after the bad one computes with exact weights."""
    if step == 0:
        spoil(engine)
    if step != BAD_STEP + 1:
        return counted(engine, step, seed)
    wanted = exact(engine, "bf16")
    with watch(engine) as seen:
        found = counted(engine, step, seed)
    assert all(s.bits == wanted[s.name] for s in seen if s.step == step)
    assert engine.skipped_steps == 1
    return found


def spoiled_uncounted(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    if step == 0:
        spoil(engine)
    return train_step(engine, step, seed)


def skips(run: Run, other: Run) -> None:
    same_weights(run, other)
    assert (other.report["nonfinite_steps"], other.report["exact_steps"]) == (0, 0)


def visible(run: Run, other: Run) -> None:
    """An element that is not finite spoils its group and nothing else, unless the step is skipped
    with and without quantization.
    """
    for found, most in ((run, 1), (other, 1024)):
        broken = {n: ~np.isfinite(values.reshape(-1)) for n, values in found.weights.items()}
        *_, skipped, after = found.losses
        assert skipped == run.losses[-2]
        assert broken[POISONED][broken[POISONED].size // 3] == np.isnan(after) == (not skipped)
        assert broken.pop(POISONED).sum() <= most and not any(map(np.any, broken.values()))


POISONED = "second.weight"


def poisoned(value: float) -> Step:
    """One element of rank 1's gradient is ``value`` in the second step."""

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 3] = value
        return gradient

    def step_with(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
        if step == 1 and torch.distributed.get_rank() == 1:
            engine.module.get_parameter(POISONED).register_hook(poison)
        losses = train_step(engine, step, seed)
        return losses if step == 0 else [*losses, engine.optimizer.overflow, evaluate(engine)]

    return step_with


@contextmanager
def kill_file(there: bool = False) -> Iterator[None]:
    """Every rank watches one of its own; that of rank 2 may be there from the start."""
    rank = torch.distributed.get_rank()
    path = scratch() / f"full precision {rank}"
    os.environ["DS_QUANT_KILL_FILE"] = str(path)
    if there and rank == 2:
        path.touch()
    yield
    del os.environ["DS_QUANT_KILL_FILE"]


def killed(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """The file appears before step 2, seen when the optimizer steps, and goes before step 5."""
    path = Path(os.environ["DS_QUANT_KILL_FILE"])
    if torch.distributed.get_rank() == 2 and step in (2, 5):
        (path.touch if step == 2 else path.unlink)()
    return counted(engine, step, seed)


TABLE = Table(__name__)
WAYS = {
    "quantized": Way(),
    "full": Way(block=FULL),
    "fallen back": Way(block={"fallback": {"on_nonfinite": "full_precision", "steps": 2}},
                       step=spoiled),
    "killed": Way(inside=kill_file, step=killed),
    "killed from the start": Way(inside=partial(kill_file, there=True), step=killed),
}  # fmt: skip
MEASURED = {f"{scheme}, ZeRO-{stage}" for stage, scheme in CASES}
for stage, scheme in CASES:
    TABLE.add(
        f"{scheme}, ZeRO-{stage}", *WAYS.values(), block=fields(scheme, None), world=RANKS,
        steps=STEPS, step=counted, since="0.19", stages=(stage,),
        quick=(stage,) if quick(stage, scheme) else (),
    )  # fmt: skip
    TABLE.add(
        f"resumed, {scheme}, ZeRO-{stage}", Way(), Way(resumes=True), holds=same_weights,
        block=fields(scheme, "full_precision"), step=spoiled_uncounted, save_at=BAD_STEP + 2,
        steps=STEPS, world=RANKS, stages=(stage,),
        quick=(stage,) if quick(stage, scheme) else (),
    )  # fmt: skip
TABLE.add(
    "skipped as ever", Way(block=None), Way(block=FULL), holds=skips, steps=STEPS,
    step=spoiled_uncounted,
)  # fmt: skip
for dtype, name in product(("fp32", "bf16"), ("nan", "inf")):
    TABLE.add(
        f"{name} in {dtype}", Way(block=FULL), Way(block=QSDP), holds=visible, dtype=dtype,
        step=poisoned(float(name)), steps=2,
    )  # fmt: skip


def ways(stage: int, scheme: str) -> list[dict[str, Run]]:
    """By rank."""
    ranks = TABLE.runs(f"{scheme}, ZeRO-{stage}", stage)
    return [dict(zip(WAYS, runs, strict=True)) for runs in ranks]


class StepBytes(NamedTuple):
    """Bytes of one step, and 1.0 if the kill file was seen in it."""

    gradients: float
    weights: float
    saw_file: float


def by_step(run: Run) -> list[StepBytes]:
    return [StepBytes(*run.losses[first : first + 3]) for first in range(0, len(run.losses), 3)]


ANY_STEP = 2  # all steps of a run without a switch move as many bytes


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
def test_full_precision_lasts_exactly_the_steps_asked_for(stage: int, scheme: str) -> None:
    ranks = ways(stage, scheme)
    quantized = by_step(ranks[0]["quantized"])[ANY_STEP]
    full = by_step(ranks[0]["full"])[ANY_STEP]
    sent = by_step(ranks[0]["fallen back"])
    for step in range(3, STEPS):
        expected = full if step in (BAD_STEP + 1, BAD_STEP + 2) else quantized
        assert sent[step].gradients == expected.gradients, step
    for report in (rank["fallen back"].report for rank in ranks):
        assert (report["nonfinite_steps"], report["exact_steps"]) == (1, 2)


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
def test_a_kill_file_on_one_rank_switches_all_at_the_next_step(stage: int, scheme: str) -> None:
    """The file is seen at the end of steps 2 to 4, so steps 3 to 5 are exact."""
    ranks = ways(stage, scheme)
    quantized = by_step(ranks[0]["quantized"])[ANY_STEP]
    full = by_step(ranks[0]["full"])[ANY_STEP]
    sent = by_step(ranks[0]["killed"])
    for step in (3, 4, 5):
        assert sent[step].gradients == full.gradients, step
    node_shard = (stage, scheme) == (3, "sdp4bit")
    for step in (4, 5):  # ZeRO-1/2 and a node shard send weights when the step before ends
        weights = sent[step - 1 if stage < 3 or node_shard else step].weights
        if node_shard:  # fewer bytes than the gathers of full_precision
            assert weights > quantized.weights, step
        else:
            assert weights == full.weights, step
    for step in (6, 7):
        assert sent[step] == quantized, step
    for found in (rank["killed"] for rank in ranks):
        seen = [step.saw_file for step in by_step(found)]
        assert seen == [False] * 2 + [True] * 3 + [False] * 3
        assert found.report["exact_steps"] == 3
        assert "DS_QUANT_KILL_FILE watched" in found.report["line"]


def test_a_kill_file_that_is_there_at_the_start_counts_from_the_first_step() -> None:
    for rank in ways(3, "sdp4bit"):
        full = by_step(rank["full"])[ANY_STEP]
        found = by_step(rank["killed from the start"])
        assert [step.gradients for step in found[:5]] == [full.gradients] * 5
        assert [step.saw_file for step in found[:6]] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("title", "stage"), [case for case in TABLE.params() if case.values[0] not in MEASURED]
)
def test_non_finite_gradients_are_seen_skipped_and_resumed_from(title: str, stage: int) -> None:
    """The owner sees that of one rank, and DeepSpeed treats it as in full precision. By default it
    skips the step; a run resumed while falling back goes on as the one that saved.
    """
    TABLE.check(title, stage)


@on_ranks()
def test_a_kill_file_that_only_some_ranks_watch_is_refused_by_name() -> None:
    if torch.distributed.get_rank() == 1:
        os.environ["DS_QUANT_KILL_FILE"] = "/tmp/nothing"
    with pytest.raises(RuntimeError, match="(?s)ranks disagree.*DS_QUANT_KILL_FILE="):
        engine_of(2, fields("qsdp", None, node_size=1))


# ---- raise ----


def spoiled_engine(stage: int, block: dict[str, Any], **zero: Any) -> Any:
    """Before the bad step."""
    engine = engine_of(stage, block, accumulation=2, zero=zero)
    spoil(engine)
    train_steps(engine, BAD_STEP)
    return engine


@pytest.mark.parametrize(("stage", "scheme"), thinned(CASES, quick))
@on_ranks(RANKS)
def test_raise_ends_all_ranks_naming_step_and_parameter_before_weights_change(
    stage: int, scheme: str
) -> None:
    engine = spoiled_engine(stage, fields(scheme, "raise"))
    before = master_bits(engine)
    said = f"step {BAD_STEP}: NaN or Inf in the gradient of second.weight, on rank "
    with pytest.raises(FloatingPointError, match=f"{said}.*last checkpoint"):
        train_step(engine, BAD_STEP)
    assert engine.global_steps == BAD_STEP and master_bits(engine) == before


@pytest.mark.parametrize(
    ("stage", "world"),
    thinned(product(STAGES, (1, 2)), lambda stage, world: world == 2 and stage != 2),
)
@on_ranks()
def test_raise_covers_gradients_that_do_not_travel_through_the_plugin(
    stage: int, world: int
) -> None:
    """DeepSpeed reduces them itself and is alone to see them."""
    engine = spoiled_engine(stage, fields("qsdp", "raise", node_size=1), reduce_scatter=False)
    try:
        train_step(engine, BAD_STEP)
    except FloatingPointError as error:
        assert f"step {BAD_STEP}" in str(error) and engine.global_steps == BAD_STEP
        assert "that DeepSpeed reduces itself" in str(error)
    else:
        assert not engine.skipped_steps
        pytest.skip("this DeepSpeed skips no bf16 step: 0.19 does")


# ---- a file system that fails ----


@pytest.mark.parametrize("stage", thinned((2, 3), lambda stage: stage == 3))
@on_ranks()
def test_a_rank_that_cannot_look_for_the_file_keeps_its_vote_and_warns_once(stage: int) -> None:
    """From step 2 on rank 1 cannot look for the file, which has lain there since step 1 and is gone
    at step 4.
    """
    said, file = heard("log_here"), scratch() / "stop"
    os.environ["DS_QUANT_KILL_FILE"] = str(file)
    engine = engine_of(stage, fields("qsdp", None), dtype="fp32")
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
        killed.append(engine.ds_quant_attached.run.state.killed)
    assert killed == [False, True, True, True, True, False, False]
    assert len(said) == rank
    for line in said:
        assert "rank 1 cannot look for the file of DS_QUANT_KILL_FILE" in line
        assert "Stale file handle" in line
