"""Runs that must have equal results. A table of rows, see [Note: a row] in rows.py."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ds_quant
from ds_quant.comm import transport
from ds_quant.config.environment import VARIABLE
from tests.distributed.features import (
    OFFLOAD,
    Borrowed,
    Tied,
    coalesced,
    separate_experts,
    unmanaged,
)
from tests.distributed.harness import on_ranks
from tests.distributed.models import (
    FULL,
    PREFETCH,
    QSDP,
    Regression,
    Run,
    batch,
    engine_of,
    evaluate,
    forward,
    heard,
    masters,
    save,
    settings,
    train_step,
)
from tests.distributed.rows import Step, Table, Way, close, same, same_for, same_weights
from tests.distributed.scenarios import Mixture
from tests.distributed.surroundings import full_of_nan, late_messages
from tests.distributed.test_spread import Detour, small_chunks
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def as_shipped(run: Run, other: Run) -> None:
    same_weights(run, other)
    assert run.report is None and min(other.report["collectives"].values()) > 0


def sealed(run: Run, other: Run) -> None:
    """Checksums take 16 bytes per message; every collective here brings a rank one of them."""
    same_weights(run, other)
    assert other.report["collectives"] == run.report["collectives"]
    for role, messages in run.report["collectives"].items():
        plain, with_checksums = (
            sum(r.report["received_bytes"][role].values()) for r in (run, other)
        )
        assert messages > 0 and with_checksums - plain == 16 * messages, role
    assert "every message carries a checksum" in other.report["line"]
    assert "checksum" not in run.report["line"]
    key = "expected_bytes_per_param"
    assert other.report[key] == run.report[key]


def losslessly(run: Run, other: Run) -> None:
    same_weights(run, other)
    bits, line = other.report["lossless_bits"], other.report["line"]
    assert run.report["lossless_bits"] is None
    # In full precision: fp32 weights, and those of ZeRO-3 on one node.
    assert (bits is None) == ("fp32 weights" in line or "nothing to gain" in line)
    assert (bits is None) != ("depends on the learning rate" in line)
    if bits is not None:
        assert 0 < bits < 12 and 0 <= other.report["lossless_padding"] < 0.2
        most = other.report["expected_most_bytes_per_param"]
        assert most > other.report["expected_bytes_per_param"]
    assert other.report["exact_steps"] == run.report["exact_steps"]


TABLE = Table(__name__)
SDP4BIT = {"scheme": "sdp4bit", "node_size": 2}
ALONE = {"node_size": 1, "allow_full_replica": True}


# ---- full precision is DeepSpeed as shipped ----

SHIPPED = (Way(block=None), Way(block=FULL))
EXACT_WEIGHTS = Way(block={"weights": {"enabled": False}})
for dtype, k in product(("fp32", "bf16"), (1, 2)):
    # DeepSpeed divides by 2 before a sum of two terms, the plugin after it: both are exact.
    title = f"full precision, {dtype}, {k} micro-steps"
    quick = {("fp32", 1): (1, 2, 3), ("bf16", 2): (3,)}.get((dtype, k), ())
    TABLE.add(title, *SHIPPED, holds=as_shipped, dtype=dtype, accumulation=k, quick=quick)
for k in (1, 2):
    # A step adds the roundings of three divisions, two additions, up to two accumulations and the
    # update itself: 8 of quantities below 2, 2^-24 each.
    title, rounding = f"full precision on three ranks, {k} micro-steps", 3 * 8 * 2.0**-24
    TABLE.add(
        title, *SHIPPED, holds=close(rounding), world=3, dtype="fp32", accumulation=k,
        quick=None if k == 2 else (),
    )  # fmt: skip
TABLE.add("everything excluded", Way(block=FULL), Way(block={"exclude": ["*"]}), dtype="fp32")
TABLE.add(
    "warm-up", Way(block=FULL), Way(block={"warmup_steps": 2}), holds=same_for(2), accumulation=2
)
TABLE.add(
    "gradients on DeepSpeed's path", SHIPPED[0], EXACT_WEIGHTS, holds=same_weights, dtype="fp32",
    zero={"reduce_scatter": False}, top={"gradient_predivide_factor": 2.0},
)  # fmt: skip
TABLE.add(  # DeepSpeed fetches them in the first two steps
    "persistent parameters", Way(), EXACT_WEIGHTS, holds=same_weights, stages=(3,), dtype="fp32",
    zero={"stage3_param_persistence_threshold": 100_000}, steps=4,
)  # fmt: skip

# ---- what travels together, and when ----

ALIVE = {"stage3_max_live_parameters": 10**9}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "prefetch one layer": PREFETCH,
    "prefetch everything": {"stage3_prefetch_bucket_size": 200_000, **ALIVE},
    "weights kept for backward": {"stage3_max_reuse_distance": 10**9, **ALIVE},
    "small gradient buckets": {"reduce_bucket_size": 20_000},
    "overlap": {"overlap_comm": True},
    "no overlap": {"overlap_comm": False},
}
TABLE.add(
    "arrangements", *(Way(zero=zero) for zero in ARRANGEMENTS.values()), holds=same_weights,
    world=3, stages=(3,),
)  # fmt: skip
TABLE.add(
    "one gather per tensor", Way(), Way(zero={"stage3_allgather_sequential": True}),
    holds=same_weights, world=3, stages=(3,), since="0.18",
)  # fmt: skip
TWO_LEVELS = {**QSDP, "node_size": 2}
UNCHANGED = {"backend": "torch", "payload_checksum": True, "slices": 1}
TABLE.add(
    "overlap_comm, backend and checksums", Way(zero={"overlap_comm": False}),
    Way(zero={"overlap_comm": True}, block=UNCHANGED), holds=same_weights, block=TWO_LEVELS,
    world=4, quick=(2,), dtype="fp32",
)  # fmt: skip
TABLE.add(
    "slices", Way(), Way(block={"slices": 5}), holds=same_for(0), block=TWO_LEVELS, world=4,
    quick=(2,), dtype="fp32",
)  # fmt: skip


TABLE.add("empty memory", Way(), Way(inside=full_of_nan), world=3, stages=(2, 3), accumulation=2)


TABLE.add(
    "late messages", Way(), Way(inside=late_messages), block=SDP4BIT, world=4, stages=(2, 3),
    accumulation=2,
)  # fmt: skip


@contextmanager
def other_backend() -> Iterator[None]:
    """Links take gloo for a backend like NCCL: it has one gather and one all-to-all, too."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a message went from peer to peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "carries", lambda group, device: "other")
        patch.setattr(torch.distributed, "isend", forbidden)
        yield


TABLE.add(
    "collectives instead of messages", Way(), Way(inside=other_backend), stages=(2, 3),
    block={**SDP4BIT, "slices": 3}, world=4, accumulation=2,
)  # fmt: skip


# ---- gradients that travel while backward goes on: ZeRO-3 on the CPU ----


class Phases(Regression):
    """Backward in phases of its own, through one layer twice."""

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        again = checkpoint(self.second, hidden.square(), use_reentrant=True)
        return again + checkpoint(self.second, hidden, use_reentrant=True)


@contextmanager
def under_way() -> Iterator[list[int]]:
    """How many buckets are with each when the next one is posted."""
    from ds_quant.zero.overlapped_reduce_scatter import OverlappedReduceScatter

    depths, partition = list[int](), OverlappedReduceScatter.partition

    def counted(self: Any, *args: Any) -> None:
        if not self._latest.finished:
            depths.append(len(self._posted))
        partition(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappedReduceScatter, "partition", counted)
        yield depths


CAST_BY_DEEPSPEED = "overlap, shards cast by DeepSpeed"
CPU = {"offload_optimizer": OFFLOAD}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
OVERLAPPED: dict[str, dict[str, Any]] = {
    "overlap, bf16": {},
    "overlap, watched": {
        "block": {**SDP4BIT, "fallback": {"on_nonfinite": "full_precision"}}, "quick": (),
    },
    "overlap, several parameters in a bucket": {
        "zero": {"reduce_bucket_size": 70_000}, "quick": (),
    },
    "overlap, one bucket": {"zero": {"reduce_bucket_size": 10**9}, "quick": ()},
    CAST_BY_DEEPSPEED: {"top": {"data_types": {"grad_accum_dtype": "fp32"}}, "quick": ()},
    "overlap, shared parameter": {"model": Tied, "quick": ()},
    "overlap, offload": {
        "zero": {**CPU, "offload_param": OFFLOAD}, "top": TORCH_ADAM, "accumulation": 2,
        "quick": (),
    },
    "overlap, clipping": {"top": {"gradient_clipping": 0.1}, "quick": ()},
}  # fmt: skip
OWN = {"scheme": "tlq_hs", "node_size": 4}
for hops, block in (("two hops", SDP4BIT), ("one hop", QSDP), ("one hop, exact own", OWN)):
    how = {"block": block, "quick": (3,) if block is SDP4BIT else ()}
    OVERLAPPED |= {
        f"overlap, {hops}, several backwards": {
            **how,
            "dtype": "fp32",
            "accumulation": 3,
            "quick": (),
        },
        f"overlap, {hops}, a bucket each": {
            **how,
            "zero": {"reduce_bucket_size": 1},
            "quick": (),
        },
        f"overlap, {hops}, backward in phases": {**how, "model": Phases},
    }
for title, how in OVERLAPPED.items():
    zero = {"reduce_bucket_size": 17_000} | how.get("zero", {})  # two to four buckets
    TABLE.add(
        title, Way(zero={"overlap_comm": False}),
        Way(zero={"overlap_comm": True}, inside=under_way),
        **{"block": SDP4BIT, "world": 4, "stages": (3,), **how, "zero": zero},
    )  # fmt: skip

# ---- the exchange of a node shard, at once after a step or spread over the next forward ----

EVERYTHING = {"stage3_prefetch_bucket_size": 200_000, **ALIVE}
AHEAD = {"no prefetch": {}, "a layer ahead": PREFETCH, "everything ahead": EVERYTHING}
for model, ahead in product((Regression, Detour), AHEAD):
    whole = ahead == "a layer ahead"  # else the end of the last exchange is never posted
    chunks = partial(small_chunks, in_flight=99 if whole else 2)
    ways = partial(chunks, at_once=True), chunks, partial(chunks, streams=True)
    some = (model, ahead) in ((Regression, "a layer ahead"), (Detour, "no prefetch"))
    for world, node_size in ((4, 2), (2, 1), (3, 1)) if some else ((4, 2),):
        TABLE.add(
            f"spread, {model.__name__}, {ahead}, {world // node_size} x {node_size}",
            *(Way(inside=way) for way in ways), holds=same if whole else same_weights,
            block={**SDP4BIT, **ALONE, "node_size": node_size}, world=world, steps=4,
            quick=(3,) if world == 3 and whole else (), stages=(3,), model=model,
            zero=AHEAD[ahead],
        )  # fmt: skip


def undrifted(run: Run, other: Run) -> None:
    same_weights(run, other)
    assert run.report["resyncs"] == other.report["resyncs"] == 0


def modify(engine: DeepSpeedEngine) -> None:
    import deepspeed

    weight = engine.module.second.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            weight.data.mul_(1.5)


def load(engine: DeepSpeedEngine) -> None:
    save(engine)
    engine.load_checkpoint(os.environ["TEST_SCRATCH"], tag="middle")


def acting(act: Callable[[Any], Any]) -> Step:
    """Something reads the kept weights in the middle of an exchange, then training goes on."""

    def step_with(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
        losses = train_step(engine, step, seed)
        if step == 2:
            act(engine)
        return losses if step < 4 else [*losses, evaluate(engine)]

    return step_with


READERS: dict[str, Callable[[Any], Any]] = {
    "modified": modify, "saved": save, "loaded": load, "resynced": ds_quant.resync,
    "evaluated": evaluate, "read exactly": masters,
}  # fmt: skip
for (name, act), size in product(READERS.items(), (2, 1)):
    if size == 2 or name in ("modified", "evaluated"):
        TABLE.add(
            f"in an exchange, {name}, 2 x {size}", Way(inside=partial(small_chunks, at_once=True)),
            Way(block={"checksum_steps": 2}, inside=small_chunks), holds=undrifted,
            block={**SDP4BIT, **ALONE, "node_size": size, "checksum_steps": 0}, world=2 * size,
            steps=5, step=acting(act), stages=(3,), zero=PREFETCH,
            quick=(3,) if size == 2 and name == "evaluated" else (),
        )  # fmt: skip

# ---- exact differences train as full precision, whatever else is set ----


def skipping(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """The loss is NaN on one rank before the third step: DeepSpeed skips the update."""
    if step == 2:
        loss = forward(engine, step)
        bad = torch.distributed.get_rank() == 1
        engine.backward(loss * (float("nan") if bad else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
    return train_step(engine, step, seed)


CHECKED = {"bf16": {"check_grad_overflow": True}}
LOSSLESS = {"scheme": "lossless"}
LOSSLESS_ROWS: dict[str, dict[str, Any]] = {
    "warm-up": {"block": {"warmup_steps": 2}, "quick": ()},
    "checksums": {"block": {"payload_checksum": True}, "quick": ()},
    "accumulation": {"accumulation": 4, "quick": (3,)},
    "fp32 weights": {"dtype": "fp32", "quick": ()},
    "fallback": {
        "block": {"fallback": {"on_nonfinite": "full_precision", "steps": 2}}, "step": skipping,
        "top": CHECKED, "since": "0.19", "steps": 7, "quick": (),
    },
    "experts on 2 ranks": {"stages": (2,), "model": partial(Mixture, 2), "quick": ()},
    "experts on 4 ranks": {"stages": (2,), "model": partial(Mixture, 4), "quick": ()},
    "low-bit gradients": {"quick": (2,)},
}  # fmt: skip
LOW_BITS = {"scheme": "tlq_hs"}, {"scheme": "sdp4bit", "weights": {"lossless": True}}
for name, how in LOSSLESS_ROWS.items():
    pair = LOW_BITS if name == "low-bit gradients" else (FULL, LOSSLESS)
    more = {"groups": separate_experts} if "model" in how else {}
    block = {**ALONE, "node_size": 2} | how.get("block", {})
    TABLE.add(
        f"lossless, {name}", *(Way(block=scheme) for scheme in pair), holds=losslessly,
        alike="experts" not in name,
        **{"world": 4, "steps": 4, "quick": (2, 3), **how, **more, "block": block},
        zero={"allgather_bucket_size": 50_000},
    )  # fmt: skip

for (nodes, size), stage in product(((2, 2), (4, 1), (2, 1), (1, 2)), (1, 2, 3)):
    block, world = {**ALONE, "node_size": size}, nodes * size
    TABLE.add(
        f"lossless and resumed, {nodes} x {size}, ZeRO-{stage}", Way(block=FULL),
        Way(block=LOSSLESS), Way(block=LOSSLESS, resumes=True), holds=losslessly, block=block,
        world=world, steps=12, save_at=7, step=skipping, top=CHECKED, since="0.19",
        stages=(stage,), zero={"allgather_bucket_size": 50_000},
        quick=(stage,) if (stage, nodes, size) == (3, 2, 1) else (),
    )  # fmt: skip
for stage in (1, 2, 3):
    TABLE.add(
        f"200 steps of ZeRO-{stage}, lossless", Way(block=FULL), Way(block=LOSSLESS), steps=200,
        holds=losslessly, block={**ALONE, "node_size": 2}, world=4, stages=(stage,), quick=(),
    )  # fmt: skip

# ---- resumed runs end as those that saved and went on ----

SCHEDULE = {"rounding": "nearest", "levels": "learned", "level_steps": [2, 5]}
LEARNED = {**QSDP, "weights": {"bits": 4, **SCHEDULE}}
KEEPS = {**ALONE, **SDP4BIT}


# Learned levels, the steps that address random bits, kept weights, which both saving and loading
# make exact, a weight that another module borrows, a window of full precision.
for title, stage, block, how in (
    ("learned levels", 2, LEARNED, {"accumulation": 2, "quick": ()}),
    ("learned levels", 3, LEARNED, {"accumulation": 2}),
    ("borrowed", 3, QSDP, {"model": Borrowed, "quick": ()}),
    ("kept", 1, KEEPS, {"accumulation": 2}),
    ("kept and borrowed", 3, KEEPS, {"model": Borrowed}),
    ("learned levels, fp32", 1, LEARNED, {"dtype": "fp32", "accumulation": 2, "quick": ()}),
    ("qsdp", 1, QSDP, {"accumulation": 2, "quick": ()}),
    ("qsdp, fp32", 2, QSDP, {"dtype": "fp32", "accumulation": 2, "quick": ()}),
    ("learned levels, fp32", 3, LEARNED, {"dtype": "fp32", "accumulation": 2, "quick": ()}),
    ("qsdp", 3, QSDP, {"accumulation": 2, "quick": ()}),
    ("kept", 2, KEEPS, {"quick": ()}),
    ("kept, accumulated", 3, KEEPS, {"accumulation": 2, "quick": ()}),
):
    TABLE.add(
        f"resumed, {title}, ZeRO-{stage}", Way(), Way(resumes=True), block=block, stages=(stage,),
        holds=same_weights, save_at=3, **{"world": 4 if "node_size" in block else 3, **how},
        steps=6,
    )  # fmt: skip

# ---- what only watches ----

for place, stage in product(range(2), (1, 2, 3)):
    own, world = (QSDP, {"scheme": "sdp4bit"})[(place + stage) % 2], 2 + 2 * place
    TABLE.add(
        f"checksums, {own['scheme']}, ZeRO-{stage}", Way(), Way(block={"payload_checksum": True}),
        holds=sealed, block={**ALONE, **own, "node_size": world // 2}, world=world,
        stages=(stage,), accumulation=2, quick=(stage,) if (world, stage) == (2, 3) else (),
    )  # fmt: skip
FILE = {"file": "/dev/null"}
SAMPLED = (Way(block={"metrics": {**FILE, "interval": interval}}) for interval in (0, 1))
TABLE.add("metrics", *SAMPLED, block={**SDP4BIT, **ALONE}, stages=(2, 3), dtype="fp32")


def evaluated(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """With evaluations before a step, which draw nothing from the user's generator."""
    generator = torch.get_rng_state()
    assert evaluate(engine) == evaluate(engine) == inferred(engine)
    losses = train_step(engine, step, seed)
    assert torch.equal(generator, torch.get_rng_state())
    return losses


def inferred(engine: DeepSpeedEngine) -> float:
    engine.eval()
    with torch.inference_mode():
        loss = float(forward(engine, 999))
    engine.train()
    return loss


for block in (QSDP, {**SDP4BIT, **ALONE}):
    TABLE.add(
        f"evaluations, {block['scheme']}", Way(), Way(step=evaluated), holds=same_weights,
        block=block, steps=5, accumulation=2, quick=(1,) if block is QSDP else (3,),
    )  # fmt: skip


def followed(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """Autograd follows the replica, as DeepSpeed 0.18.9 makes it: several of its slices may not be
    written then.
    """
    for flat in engine.optimizer.bit16_groups_flat:
        flat.requires_grad_(True)
    return train_step(engine, step, seed)


for stage, scheme in ((1, "sdp4bit"), (2, "qsdp")):
    title = f"followed by autograd, {scheme}"
    TABLE.add(title, Way(), Way(step=followed), block={"scheme": scheme}, stages=(stage,))


@contextmanager
def given_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, json.dumps(SDP4BIT))
        yield


TABLE.add(
    "a block of the environment", Way(), Way(block=None, inside=given_outside), block=SDP4BIT,
    world=4, stages=(2, 3),
)  # fmt: skip

_REFERENCES: list[Any] = []


def beside_a_reference(engine: DeepSpeedEngine, step: int, seed: int) -> list[float]:
    """A second, frozen engine at stage 0, as preference trainers build it: it stays inactive and
    says so.
    """
    import deepspeed

    if step == 0:
        frozen, logged = Regression().requires_grad_(False), heard()
        config = settings(0, QSDP, dtype="bf16")
        _REFERENCES[:] = [deepspeed.initialize(model=frozen, config=config)[0]]
        (line,) = logged
        assert "inactive in an engine at stage 0 without an optimizer" in line
        assert ds_quant.report(_REFERENCES[0]) is None
    with torch.no_grad():
        forward(_REFERENCES[0], step)
    return train_step(engine, step, seed)


TABLE.add("beside a frozen reference", Way(), Way(step=beside_a_reference), stages=(2, 3))

# ---- crossing between nodes once per optimizer step: sums in another order, and nothing else ----


def micro_step(engine: DeepSpeedEngine, step: int, micro: int) -> float:
    loss = forward(engine, step, micro)
    engine.backward(loss)
    return float(loss.detach())


def in_between(act: Callable[[Any, int, int], Any]) -> Step:
    """Something happens after each of three micro-steps: ``act(engine, step, micro)``, before the
    engine steps. What it returns, if anything, counts as losses do.
    """

    def stepped(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
        losses = []
        for micro in range(3):
            losses.append(micro_step(engine, step, micro))
            losses += act(engine, step, micro) or []
            engine.step()
        engine.module.first.weight.requires_grad_(True)
        return losses

    return stepped


def freeze(engine: DeepSpeedEngine, step: int, micro: int) -> None:
    """A layer, after the first micro-step: what it has is used."""
    engine.module.first.weight.requires_grad_(step > 0)


def read(engine: DeepSpeedEngine, step: int, micro: int) -> list[float]:
    """Gradients; under ZeRO-3 between micro-steps too, where they are zeros if they wait.
    DeepSpeed's ZeRO-2 has none to show before the boundary.
    """
    from deepspeed.utils import safe_get_full_grad

    if micro < 2 and engine.zero_optimization_stage() < 3:
        return []
    found = [safe_get_full_grad(p).double() for p in engine.module.parameters()]
    if micro == 2:
        return [float(gradient.square().sum()) for gradient in found]
    waits = engine.ds_quant_attached.run.scheme.block.gradients.cross == "step"
    assert any(gradient.any() for gradient in found) != waits
    return []


def abandoned(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """A micro-step fails after the first one; its user drops the gradients and goes on. ZeRO-2 of
    DeepSpeed keeps what it has added up.
    """
    losses = []
    for micro in range(3):
        losses.append(micro_step(engine, step, micro))
        engine.step()
        if step == 0 and micro == 0:
            broken = engine.module.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                forward(engine, step, 1)
            broken.remove()
            engine.optimizer.zero_grad()
    return losses


def announced(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """The boundary is said before every backward, as accelerate does: not where the engine would
    have put it.
    """
    losses, count = [], (3, 1, 2)[step]
    for micro in range(count):
        engine.set_gradient_accumulation_boundary(micro == count - 1)
        losses.append(micro_step(engine, step, micro))
    engine.step()
    return losses


def announced_late(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """The boundary is said when the last backward is over: nothing may be lost."""
    engine.set_gradient_accumulation_boundary(False)
    losses = [micro_step(engine, step, micro) for micro in range(3)]
    if engine.zero_optimization_stage() < 3:  # of DeepSpeed itself, which would find no gradient
        engine.set_gradient_accumulation_boundary(True)
        losses.append(micro_step(engine, step, 3))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return losses


CALLER = {"managed_gradient_accumulation": False}
UNMANAGED = {"step": unmanaged, "method": "managed_gradient_accumulation"}
NO_OVERLAP = {"overlap_comm": False}
LOOPS: dict[str, dict[str, Any]] = {
    "abandoned": {"step": abandoned, "accumulation": 3},
    "offload": {"accumulation": 3, "zero": CPU, "top": TORCH_ADAM, "quick": ()},
    "the caller alone steps": {**UNMANAGED, "top": CALLER, "zero": NO_OVERLAP, "quick": ()},
    "the caller alone steps, offloaded": {
        **UNMANAGED, "top": CALLER | TORCH_ADAM, "zero": NO_OVERLAP | CPU, "quick": ()
    },
    "announced": {"step": announced, "accumulation": 2, "quick": ()},
    "announced late": {"step": announced_late, "accumulation": 2},
    "coalesced": {
        "step": coalesced, "accumulation": 2, "method": "coalesce_grad_reduction", "quick": ()
    },
    "frozen between": {"step": in_between(freeze), "accumulation": 3},
    "read between": {"step": in_between(read), "accumulation": 3},
}  # fmt: skip
CROSSINGS = [Way(block={"gradients": {"cross": when}}) for when in ("micro_step", "step")]
for (name, how), stage in product(LOOPS.items(), (2, 3)):
    zero = {"reduce_bucket_size": 20_000} | how.get("zero", {})
    # ZeRO-2 itself forgets gradients before these versions: see below.
    since = "0.17" if stage == 3 else "0.19" if CPU.items() <= zero.items() else "0.18.3"
    TABLE.add(
        f"crossing once, {name}, ZeRO-{stage}", *CROSSINGS, holds=close(2e-6), world=4,
        stages=(stage,), dtype="fp32", since=since, block={**FULL, "node_size": 2},
        **{"quick": (3,), **how, "zero": zero},
    )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_runs_end_alike(title: str, stage: int) -> None:
    TABLE.check(title, stage)


def test_bits_are_watched_while_they_change() -> None:
    """Guards the test above: weights move in every step, and are fetched again in backward."""
    (of_first, *_), *_ = TABLE.runs("arrangements", 3)
    by_name = defaultdict(set)
    for sighting in of_first.seen:
        by_name[sighting.name].add(sighting.bits)
    assert {len(bits) for name, bits in by_name.items() if "weight" in name} == {3}
    assert len({s.forward for s in of_first.seen}) == 2


def test_arrangements_are_arrangements() -> None:
    for runs in TABLE.runs("arrangements", 3):
        reports = dict(zip(ARRANGEMENTS, (run.report["collectives"] for run in runs), strict=True))
        gathers = {name: counts["weights"] for name, counts in reports.items()}
        assert gathers["default"] == 2 * 4 * 3  # modules, steps
        assert gathers["prefetch everything"] < gathers["prefetch one layer"] < gathers["default"]
        assert gathers["weights kept for backward"] < gathers["default"]
        small = reports["small gradient buckets"]["gradients"]
        assert small > reports["default"]["gradients"]


@pytest.mark.parametrize("title", thinned(OVERLAPPED, lambda title: TABLE.is_quick(title, 3)))
def test_gradients_travel_while_backward_goes_on(title: str) -> None:
    for _, overlapped in TABLE.runs(title, 3):
        waits = "gradients are not reduced during backward" in overlapped.report["line"]
        assert waits == title.endswith("one bucket")
        assert (overlapped.noted == []) == (title == CAST_BY_DEEPSPEED)
        if title.endswith("a bucket each"):
            assert max(overlapped.noted) == 2


# ---- micro-steps that DeepSpeed forgets ----

WORLD, MICRO_STEPS = 4, 3


def plain_means() -> dict[str, torch.Tensor]:
    """Gradients over ranks, summed over micro-steps, of a model on initial weights that knows
    nothing of DeepSpeed.
    """
    torch.manual_seed(0)
    model = Regression()
    for rank, micro in product(range(WORLD), range(MICRO_STEPS)):
        (model(*batch(0, 0, micro, rank)) / MICRO_STEPS / WORLD).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@on_ranks(WORLD)
def test_the_line_says_if_deepspeed_forgets_micro_steps() -> None:
    """So it does in some versions, and not where gradients cross once per step. Compared is what
    the optimizer gets of three micro-steps.
    """
    from deepspeed.utils import safe_get_full_grad

    means = plain_means()
    cases = [(2, "step", False, 4)]
    cases += product((1, 2), ("step",), (False, True), (2,))
    cases += product((2,), ("micro_step",), (False, True), (2,))
    for case in cases:
        stage, cross, offloaded, node_size = case
        zero = {"reduce_bucket_size": 20_000}
        zero |= {"offload_optimizer": {"device": "cpu"}} if offloaded else {}
        block = {"scheme": "full_precision", "node_size": node_size, "gradients": {"cross": cross}}
        engine = engine_of(
            stage, block, dtype="fp32", accumulation=MICRO_STEPS, zero=zero,
            zero_force_ds_cpu_optimizer=False,
            # Adam would divide by gradients near zero, whose rounding is all they are.
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        for micro in range(MICRO_STEPS):
            engine.backward(forward(engine, 0, micro))
            if micro < MICRO_STEPS - 1:
                engine.step()
        right = [
            np.allclose(safe_get_full_grad(p), means[name], rtol=1e-4, atol=1e-6)
            for name, p in engine.module.named_parameters()
        ]
        forgets = "forgets the gradients of all micro-steps" in ds_quant.report(engine)["line"]
        assert right == [not forgets] * len(right), case
        if (stage, cross) != (2, "micro_step"):
            assert not forgets, case
        engine.destroy()
