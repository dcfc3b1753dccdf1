"""Saved and user-visible weights are exact, and looking at them does not disturb training.

What is exact is defined by the fp32 master weights, which DeepSpeed gathers by a way of its own,
and by exports of a plain DeepSpeed engine that has loaded the same shards. Runs use 4-bit codes,
whose error is far above bf16 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ds_quant
from tests import needs
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import (
    HIDDEN,
    WIDTH,
    build,
    digest,
    evaluate,
    exact,
    forward,
    gathered,
    live,
    saved,
    settings,
    train_step,
    train_steps,
    watch,
)
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Two ranks as two nodes, so that differences are taken from kept weights under ZeRO-3 too.
SCHEMES = {
    name: {"scheme": name, "node_size": 1, "allow_full_replica": True}
    for name in ("qsdp_w4g4", "sdp4bit", "zeropp")
}
STEPS = 3
# ZeRO-3 then keeps parameters after an evaluation, gathered and decoded.
KEEP = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
EXPORT = {"stage3_gather_16bit_weights_on_model_save": True, **KEEP}


def config(stage: int, scheme: str | None = "qsdp_w4g4", dtype: str = "bf16") -> dict[str, Any]:
    block = None if scheme is None else SCHEMES[scheme]
    return settings(stage, block, dtype=dtype, zero=EXPORT if stage == 3 else {})


def used(engine: DeepSpeedEngine) -> dict[str, str]:
    """Digests of what an evaluation computes with."""
    with watch(engine) as seen:
        evaluate(engine)
    return {s.name: s.bits for s in seen}


# ---- exports ----


Bits = dict[str, tuple[str, tuple[int, ...], str]]


def bits_of(tensors: Mapping[str, torch.Tensor]) -> Bits:
    """dtype, shape and bits by name."""
    return {n: (str(t.dtype), tuple(t.shape), digest(t)) for n, t in tensors.items()}


def save_16bit(engine: DeepSpeedEngine, name: str) -> Bits:
    return bits_of(saved(engine, name))


def zero_to_fp32(engine: DeepSpeedEngine, name: str) -> Bits:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = str(scratch() / name)
    engine.save_checkpoint(folder, tag="exported")
    torch.distributed.barrier()
    return bits_of(get_fp32_state_dict_from_zero_checkpoint(folder, tag="exported"))


def in_memory(engine: DeepSpeedEngine, _: str) -> Bits:
    """GatheredParameters under ZeRO-3, exact_weights below."""
    named = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() == 3:
        with gathered(named.values()):
            return bits_of({n: p.data for n, p in named.items()})
    with ds_quant.exact_weights(engine):
        return bits_of(engine.module.state_dict())


Export = Callable[[Any, str], Bits]
EXPORTS: dict[str, Export] = {
    "before the first step": save_16bit,
    "in memory": in_memory,
    "16 bits": save_16bit,
    "fp32": zero_to_fp32,
}
QUANTIZED = {"first.weight", "second.weight", "last.weight"}  # all others are too small
ALL_RUNS = [
    (stage, scheme, dtype)
    for stage in (1, 2, 3)
    for scheme, dtype in (("qsdp_w4g4", "bf16"), ("qsdp_w4g4", "fp32"), ("sdp4bit", "bf16"))
]
WITHOUT_REFERENCE = [run for run in ALL_RUNS if "sdp4bit" not in run]


def of_every_stage(stage: int, scheme: str, dtype: str) -> bool:
    """Return True for the runs of make test: one of every stage, one of them with differences."""
    return dtype == "bf16" and scheme == ("sdp4bit" if stage == 3 else "qsdp_w4g4")


def exports_between_steps(engine: DeepSpeedEngine) -> Iterator[tuple[str, Export]]:
    """Yield the exports, each after one more step but the first, and after an evaluation.

    Under ZeRO-3 an evaluation leaves gathered weights behind, decoded.
    """
    for step, (name, export) in enumerate(EXPORTS.items()):
        if step:
            train_step(engine, step)
        evaluate(engine)
        yield name, export


@pytest.mark.parametrize(("stage", "scheme", "dtype"), thinned(ALL_RUNS, of_every_stage))
@on_ranks()
def test_exports_have_the_bits_of_the_master_weights(stage: int, scheme: str, dtype: str) -> None:
    engine = build(config(stage, scheme, dtype))
    for name, export in exports_between_steps(engine):
        exported = {weight: bits for weight, (*_, bits) in export(engine, name).items()}
        assert exported == exact(engine, "fp32" if name == "fp32" else dtype), name


@pytest.mark.parametrize(("stage", "scheme", "dtype"), thinned(ALL_RUNS, of_every_stage))
@on_ranks()
def test_forwards_compute_with_decoded_weights(stage: int, scheme: str, dtype: str) -> None:
    """Otherwise the exports above would be exact without any effort."""
    engine = build(config(stage, scheme, dtype))
    train_step(engine, 1)
    computed_with = used(engine)
    masters = exact(engine, dtype)
    assert len(computed_with) == len(masters) == 8
    assert {name for name, bits in computed_with.items() if bits != masters[name]} == QUANTIZED


@pytest.mark.parametrize(
    ("stage", "scheme", "dtype"),
    thinned(WITHOUT_REFERENCE, lambda stage, scheme, dtype: stage == 2 and dtype == "bf16"),
)
@on_ranks()
def test_an_export_changes_no_weight_of_the_model(stage: int, scheme: str, dtype: str) -> None:
    engine = build(config(stage, scheme, dtype))
    for name, export in exports_between_steps(engine):
        before = live(engine)
        export(engine, name)
        assert live(engine) == before, name


@pytest.mark.parametrize(
    ("stage", "scheme", "dtype"),
    thinned(WITHOUT_REFERENCE, lambda stage, scheme, dtype: stage == 2 and dtype == "bf16"),
)
@on_ranks()
def test_a_saved_checkpoint_changes_no_weight_of_the_model(
    stage: int, scheme: str, dtype: str
) -> None:
    engine = build(config(stage, scheme, dtype))
    train_step(engine, 1)
    before = live(engine)
    engine.save_checkpoint(str(scratch()), tag="saved")
    assert live(engine) == before


def losses_with_exports(stage: int, scheme: str, dtype: str) -> list[float]:
    """Return the losses of a run that evaluates, exports and saves before every step."""
    engine = build(config(stage, scheme, dtype))
    losses: list[float] = []
    for step, (name, export) in enumerate(EXPORTS.items(), start=1):
        evaluate(engine)
        export(engine, name)
        engine.save_checkpoint(str(scratch()), tag=name)
        losses += train_step(engine, step)
    losses += train_steps(engine, STEPS, len(EXPORTS) + 1)
    engine.destroy()
    return losses


def losses_without_exports(stage: int, scheme: str, dtype: str) -> list[float]:
    """Return the losses of the same steps alone."""
    engine = build(config(stage, scheme, dtype))
    return train_steps(engine, len(EXPORTS) + STEPS, 1)


@pytest.mark.parametrize(
    ("stage", "scheme", "dtype"),
    thinned(WITHOUT_REFERENCE, lambda stage, scheme, dtype: stage == 2 and dtype == "bf16"),
)
@on_ranks(timeout=120)
def test_losses_are_those_of_a_run_that_exports_nothing(
    stage: int, scheme: str, dtype: str
) -> None:
    assert losses_with_exports(stage, scheme, dtype) == losses_without_exports(stage, scheme, dtype)


@pytest.mark.parametrize("stage", thinned([1, 2, 3], lambda stage: stage == 3))
@on_ranks(timeout=120)
def test_a_save_moves_the_loss_of_a_scheme_with_differences_by_thousandths(stage: int) -> None:
    """The reference of later differences becomes exact: docs/running.md."""
    disturbed = losses_with_exports(stage, "sdp4bit", "bf16")
    undisturbed = losses_without_exports(stage, "sdp4bit", "bf16")
    assert disturbed != undisturbed
    assert disturbed == pytest.approx(undisturbed, rel=5e-3)


@pytest.mark.parametrize(("stage", "scheme", "dtype"), thinned(ALL_RUNS, of_every_stage))
@on_ranks(timeout=120)
def test_exports_are_those_of_deepspeed_without_the_plugin(
    stage: int, scheme: str, dtype: str
) -> None:
    """An engine without the block loads the same shards. Bytes, shapes and order are equal."""
    engine = build(config(stage, scheme, dtype))
    exported: dict[str, Bits] = {}
    for name, export in exports_between_steps(engine):
        exported[name] = export(engine, name)
        engine.save_checkpoint(str(scratch()), tag=name)
        torch.distributed.barrier()
    engine.destroy()
    plain = build(config(stage, None, dtype), seed=7)
    for name, export in EXPORTS.items():
        plain.load_checkpoint(str(scratch()), tag=name)
        wanted = export(plain, f"plain {name}")
        assert list(exported[name].items()) == list(wanted.items()), name


class Background:
    """A checkpoint engine that reads what it was given as late as DeepSpeed's decoupled one may."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine, self._writes = engine.checkpoint_engine, list[tuple[Any, str]]()
        self._info: Any = None
        self.commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def is_decoupled(self) -> bool:
        return True

    def create(self, info: Any) -> None:
        self._info = info

    def get_commit_info(self) -> Any:
        return self._info

    def save(self, state_dict: Any, path: str) -> None:
        self._writes.append((state_dict, path))

    def commit(self, info: Any) -> None:
        for state, path in self._writes:
            torch.save(state, path)
        self.commits += bool(self._writes)
        self._writes, self._info = [], None


@pytest.mark.parametrize("scheme", ["qsdp_w4g4", "sdp4bit"])
@on_ranks()
def test_a_checkpoint_written_in_the_background_is_exact(scheme: str) -> None:
    """Where decoded weights return after a save, that has to be over; differences stay exact."""
    engine, returns = build(config(2, scheme)), scheme == "qsdp_w4g4"
    engine.checkpoint_engine = Background(engine)
    train_step(engine, 0)
    before, masters = live(engine), exact(engine, "bf16")
    engine.save_checkpoint(str(scratch()), tag="here")
    assert (live(engine) == before) == returns
    if engine.global_rank == 0:
        assert engine.checkpoint_engine.commits == returns
    train_step(engine, 1)
    states = torch.load(scratch() / "here" / "mp_rank_00_model_states.pt", weights_only=False)
    assert {n: digest(t) for n, t in states["module"].items()} == masters


@pytest.mark.parametrize(
    ("stage", "scheme"),
    thinned(
        product([1, 2, 3], ["qsdp_w4g4", "sdp4bit"]),
        lambda *case: case in ((2, "qsdp_w4g4"), (3, "sdp4bit")),
    ),
)
@on_ranks()
def test_a_skipped_step_changes_no_weight_and_no_resume(stage: int, scheme: str) -> None:
    """An overflow makes DeepSpeed skip a step, but count it."""
    if stage == 3:
        needs.deepspeed("0.19", "takes a bf16 step with NaN under ZeRO-3")
    checking = config(stage, scheme) | {"bf16": {"enabled": True, "check_grad_overflow": True}}
    engine = build(checking)
    train_steps(engine, STEPS)
    before = used(engine), live(engine)
    loss = forward(engine, STEPS)
    engine.backward(loss * float("nan") if engine.global_rank == 0 else loss)
    engine.step()
    assert engine.optimizer.overflow
    after = live(engine)
    assert (used(engine), after) == before
    with ds_quant.exact_weights(engine):
        pass
    outside = live(engine)
    engine.save_checkpoint(str(scratch()), tag="here")
    losses = train_steps(engine, 2, STEPS + 1)
    engine.destroy()
    fresh = build(checking, seed=1)
    fresh.load_checkpoint(str(scratch()), tag="here")
    if scheme != "sdp4bit":  # whose replica is exact after an export
        assert outside == live(fresh) == after
    assert train_steps(fresh, 2, STEPS + 1) == losses


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks()
def test_a_failed_save_does_not_spoil_the_next_one(stage: int) -> None:
    """It raises before DeepSpeed's epilogue; the user catches it and trains on."""
    engine = build(config(stage))
    train_steps(engine, STEPS)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    engine._save_checkpoint, save = full, engine._save_checkpoint
    with pytest.raises(OSError, match="no space"):
        engine.save_checkpoint(str(scratch()), tag="lost")
    engine._save_checkpoint = save
    train_step(engine, STEPS)
    masters, before = exact(engine, "bf16"), live(engine)
    assert before["first.weight"] != masters["first.weight"]
    assert {n: digest(t) for n, t in saved(engine).items()} == masters
    assert live(engine) == before


# ---- GatheredParameters under ZeRO-3 ----


@on_ranks(3)
def test_gathered_parameters_are_exact_and_harmless() -> None:
    """After a training step and after an evaluation."""
    made = settings(3, {"scheme": "qsdp_w4g4"}, dtype="bf16", zero=EXPORT)
    engine = build(made)
    train_steps(engine, STEPS)
    named = dict(engine.module.named_parameters())

    def look(modifier: int | None) -> dict[str, str]:
        with gathered(named.values(), modifier_rank=modifier):
            return {n: digest(p.data) for n, p in named.items()}

    masters, before = exact(engine, "bf16"), live(engine)
    assert look(None) == masters
    for modifier in (None, 0):
        evaluate(engine)
        left = named["first.weight"]
        assert left.ds_status.name == "AVAILABLE"
        assert digest(left.data) != masters["first.weight"]  # decoded, still there
        assert look(modifier) == masters and live(engine) == before
    losses = train_steps(engine, STEPS, STEPS)
    engine.destroy()
    assert train_steps(build(made), 2 * STEPS)[STEPS:] == losses


@on_ranks()
def test_versions_that_await_the_last_gather_only_gather_one_by_one() -> None:
    """Before 0.19.8 the others may arrive later on the CPU. Counted are the parameters that
    DeepSpeed's own gather is given at a time for GatheredParameters.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    engine, given, original = build(config(3)), list[int](), Init._all_gather

    def gather(self: Any, params: list[Any], *args: Any, **kwargs: Any) -> Any:
        given.append(len(params))
        return original(self, params, *args, **kwargs)

    train_step(engine, 0)
    Init._all_gather, params = gather, list(engine.module.parameters())
    for deepspeed.__version__, wanted in (("0.19.7", [1] * len(params)), ("0.19.8", [len(params)])):
        given.clear()
        with gathered(params):
            pass
        assert given == wanted


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks()
def test_edits_inside_gathered_parameters_arrive_in_shards_and_forward(scheme: str) -> None:
    """Rank 0 writes a weight and a bias, after an evaluation."""
    engine = build(config(3, scheme))
    train_steps(engine, STEPS)
    evaluate(engine)
    edits = {n: engine.module.get_parameter(n) for n in ("second.weight", "last.bias")}
    with gathered(edits.values(), modifier_rank=0):
        weight = torch.linspace(-1, 1, WIDTH * HIDDEN).view(WIDTH, HIDDEN).bfloat16()
        wanted = {"second.weight": weight, "last.bias": 0.5 * edits["last.bias"].data.clone()}
        if engine.global_rank == 0:
            for name, p in edits.items():
                p.data.copy_(wanted[name])
    written = {n: digest(t) for n, t in wanted.items()}
    with gathered(edits.values()):
        assert {n: digest(p.data) for n, p in edits.items()} == written
    seen = used(engine)
    # Biases travel exactly; what a node shard keeps is set by the writing rank at once.
    decoded = {n for n, bits in written.items() if seen[n] != bits}
    assert decoded == (set() if scheme != "qsdp_w4g4" else {"second.weight"})
