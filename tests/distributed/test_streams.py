"""Steps of every kind of scheme on a device with streams.

Nothing is read before it is written, no memory is taken again while another stream uses it (see
``device_model``), and the host waits for nothing. The world is a fake one of 2 x 2 ranks, with
DeepSpeed's streams and one per process group. The model must notice an order that is taken away.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import fake_world
import pytest
import torch
from torch import Tensor

from ds_quant.zero import accelerator
from tests.distributed import counting
from tests.distributed.features import ALL_FEATURES, Feature
from tests.distributed.harness import OWN_GROUP, on_ranks, scratch
from tests.distributed.models import (
    PREFETCH,
    build,
    forward,
    settings,
    train_step,
)
from tests.distributed.test_offload_states import INCLUDE
from tests.distributed.test_spread import small_chunks
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# The first micro-step, one between and the last take different branches.
MICRO_STEPS = 3
SEPARATE_GRADIENTS = {"contiguous_gradients": False}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _become_a_device(model: Any, lost: str) -> None:
    """From here on DeepSpeed and the plugin take this process for one with the model's streams.

    lost: an order to take away, "barrier" or "recorded", or "nothing".
    """
    from ds_quant.zero.accelerator import StepBarrier
    from tests.distributed.device_model import become_a_device, become_deepspeeds_device

    become_deepspeeds_device(model)
    become_a_device(model, keeps_records=lost != "recorded")
    if lost == "barrier":
        StepBarrier.wait = lambda _: None


def faults(
    stage: int,
    scheme: str,
    feature: Feature,
    *,
    micro_steps: int = MICRO_STEPS,
    lost: str = "nothing",
    world: str = "2x2",
    more: dict[str, Any] | None = None,
) -> list[str]:
    """Return the faults of three optimizer steps.

    feature: one with a loop of its own keeps it.
    more: further keys of the block.
    """
    ranks = fake_world.World.parse(world)
    fake_world.join(ranks)
    import deepspeed  # noqa: F401  # before the accelerator changes

    from tests.distributed.device_model import Model

    model = Model()
    _become_a_device(model, lost)
    block = {"scheme": scheme, "node_size": ranks.ranks_per_node, "backend": "torch"}
    block |= {"checksum_steps": 0, "metrics": {"interval": 0}, **(more or {})}
    # Parameters of ZeRO-3 are larger than this bucket: their gradients lie outside it.
    overlapping = {"overlap_comm": True, "reduce_bucket_size": 20_000 if stage == 3 else 10**6}
    if feature.step is train_step:
        feature = replace(feature, accumulation=micro_steps)
    feature = replace(
        feature,
        zero=overlapping | feature.zero,
        top={"zero_force_ds_cpu_optimizer": False} | feature.top,
    )
    with fake_world.without_handshake(), small_chunks(in_flight=16, streams=True):
        engine = feature.engine(stage, block)
        with model:
            for step in range(3):
                feature.step(engine, step, 0)
    assert len(model.streams) >= 3  # DeepSpeed's own and one of a process group
    return sorted(set(model.faults))


QUICK = [  # that make test runs
    (3, "sdp4bit", PREFETCH),
    (2, "sdp4bit", OFFLOAD),
    (2, "lossless_w_g3", {}),
]


@pytest.mark.parametrize(
    ("stage", "scheme", "zero"),
    thinned(
        [
            (3, "sdp4bit", PREFETCH),
            (3, "lossless_w_g3", PREFETCH),
            (3, "qsdp", PREFETCH),
            (3, "eden3", PREFETCH),
            (3, "zeropp", PREFETCH),
            (3, "hybrid", PREFETCH),
            (3, "full_precision", {}),
            (3, "sdp4bit", OFFLOAD),
            (3, "sdp4bit", SEPARATE_GRADIENTS),
            (3, "lossless_w_g3", SEPARATE_GRADIENTS),
            (2, "sdp4bit", {}),
            (2, "lossless_w_g3", {}),
            (2, "eden3", {}),
            (2, "sdp4bit", OFFLOAD),
        ],
        lambda *case: case in QUICK,
    ),
    ids=str,
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_operation_knows_that_what_it_touches_is_done(
    stage: int, scheme: str, zero: dict[str, Any]
) -> None:
    assert faults(stage, scheme, Feature(zero=zero)) == []


# Of the rows make test takes those whose gradients go another way.
QUICK_ROWS = "small gradient buckets", "`reduce_scatter: false`"
ROWS = [(title, stage) for title, row in ALL_FEATURES.items() for stage in row.stages]
OTHERS = "lossless_w_g3", "qsdp", "zeropp", "hybrid", "eden3", "full_precision", "sdp4bit"
# Each row with another scheme and number of micro-steps, in turn.
IN_TURN = [
    (title, stage, OTHERS[place % len(OTHERS)], 1 + place % MICRO_STEPS)
    for place, (title, stage) in enumerate(ROWS)
]


@pytest.mark.parametrize(
    ("title", "stage", "scheme", "micro_steps"),
    thinned(
        dict.fromkeys([(*row, "sdp4bit", MICRO_STEPS) for row in ROWS] + IN_TURN),
        lambda title, stage, scheme, micro_steps: (
            title in QUICK_ROWS and stage == 3 and scheme == "sdp4bit"
        ),
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_feature_knows_that_what_it_touches_is_done(
    title: str, stage: int, scheme: str, micro_steps: int
) -> None:
    assert faults(stage, scheme, ALL_FEATURES[title], micro_steps=micro_steps) == []


def away_and_back(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """States leave the device after every micro-step and come back to it as copies."""
    losses = []
    for micro in range(MICRO_STEPS):
        losses.append(forward(engine, step, micro))
        engine.backward(losses[-1])
        engine.step()
        _offload_and_reload(engine)
    return [float(loss.detach()) for loss in losses]


def _offload_and_reload(engine: DeepSpeedEngine) -> None:
    from tests.distributed.device_model import is_ours

    to = Tensor.to

    def copied(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        moved = to(tensor, *args, **options)
        return moved.clone() if moved is tensor and is_ours(1) else moved

    engine.optimizer.offload_states(include=INCLUDE[engine.zero_optimization_stage()])
    accelerator.synchronize()  # the host waits for what it is given
    Tensor.to = copied
    engine.optimizer.reload_states()
    Tensor.to = to


def given_up(engine: DeepSpeedEngine, step: int, _: int) -> list[float]:
    """The gradients of all micro-steps but the last are dropped, and their memory is used again.

    The sums come back from the host in the first micro-step: then another stream owns them.
    """
    for micro in range(MICRO_STEPS):
        loss = forward(engine, step, micro)
        engine.backward(loss)
        if micro == MICRO_STEPS - 2:
            engine.optimizer.zero_grad()
            torch.zeros(1)  # takes memory that is free
        engine.step()
        if micro == 0:
            _offload_and_reload(engine)
    return [float(loss.detach())]


LEARNED = {"weights": {"levels": "learned", "level_steps": [1, 2], "rounding": "nearest"}}
WATCHED = {"fallback": {"on_nonfinite": "full_precision"}}
SAMPLED = {"metrics": {"interval": 2, "file": "metrics"}}
WHOLE = {"allow_full_replica": True}
AWAY = Feature(accumulation=MICRO_STEPS, step=away_and_back)
GIVEN_UP = Feature(accumulation=MICRO_STEPS, step=given_up)
AHEAD = Feature(zero=PREFETCH)


class Way(NamedTuple):
    """A way to run.

    world: nodes x ranks of a node.
    block: further keys of the block.
    """

    scheme: str
    feature: Feature = AHEAD
    world: str = "2x2"
    block: dict[str, Any] = {}


WAYS = {
    "payload checksums": Way("sdp4bit", block={"payload_checksum": True}),
    "payload checksums, lossless": Way("lossless_w_g3", block={"payload_checksum": True}),
    "compared copies": Way("sdp4bit", block={"checksum_steps": 1}),
    "compared copies, lossless": Way("lossless_w_g3", block={"checksum_steps": 1}),
    "metrics": Way("sdp4bit", block=SAMPLED),
    "metrics, lossless": Way("lossless_w_g3", block=SAMPLED),
    "fallback": Way("sdp4bit", block=WATCHED),
    "learned levels": Way("qsdp", block=LEARNED),
    "warm-up": Way("sdp4bit", block={"warmup_steps": 1}),
    "states off the device": Way("sdp4bit", AWAY),
    "states off the device, lossless": Way("lossless_w_g3", AWAY),
    "accumulation given up": Way("sdp4bit", GIVEN_UP),
    "accumulation given up, lossless": Way("lossless_w_g3", GIVEN_UP),
    "one node": Way("sdp4bit", world="1x4"),
    "one node, zeropp": Way("zeropp", world="1x4"),
    "one rank per node": Way("sdp4bit", world="4x1", block=WHOLE),
    "one rank per node, qsdp": Way("qsdp", world="4x1"),
    "one rank per node, lossless": Way("lossless_w_g3", world="4x1", block=WHOLE),
}
QUICK_WAYS = [
    ("states off the device", 3),
    ("accumulation given up", 3),
    ("one rank per node", 2),
]


@pytest.mark.parametrize(
    ("title", "stage"),
    thinned(
        [(title, stage) for title in WAYS for stage in (1, 2, 3)],
        lambda title, stage: (title, stage) in QUICK_WAYS,
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_way_to_run_knows_that_what_it_touches_is_done(title: str, stage: int) -> None:
    way = WAYS[title]
    os.chdir(scratch())  # of the file of metrics
    assert faults(stage, way.scheme, way.feature, world=way.world, more=way.block) == []


# ---- partial sums that were away ----

MEMBER = ("parameter", -1)


def bucket_of_sums() -> Any:
    """Return a bucket with partial sums of one gradient, made on the current stream."""
    from ds_quant.zero.partial_gradients import PartialBucket

    return PartialBucket(
        members=[MEMBER],
        values=torch.ones(64),
        reduction=None,
        reduce_between_nodes=lambda: [(MEMBER, torch.ones(64))],
    )


@contextmanager
def reduced_sums() -> Iterator[tuple[Any, Any]]:
    """Yield the model of a device, and partial gradients that hold sums of its default stream.

    The sums are reduced between the nodes, because their parameter has changed its bucket.
    """
    from ds_quant.zero.partial_gradients import PartialGradients
    from tests.distributed.device_model import Model, become_deepspeeds_device, record_streams

    model = Model()
    become_deepspeeds_device(model)
    record_streams(model)
    partial_gradients = PartialGradients(SimpleNamespace(global_steps=0))
    with model:
        partial_gradients.pop("the first bucket of a step", [])
        partial_gradients.keep("bucket of the first micro-step", bucket_of_sums())
        partial_gradients.pop("bucket of the second micro-step", [MEMBER])
        yield model, partial_gradients


@on_ranks(1)
def test_sums_are_kept_for_the_stream_that_adds_to_them() -> None:
    with reduced_sums() as (model, partial_gradients):
        partial_gradients.keep("bucket of the second micro-step", bucket_of_sums())
        reducing = model.stream("reducing")
        reducing.wait_stream(model.default)
        with model.on(reducing):
            partial_gradients.pop("bucket of the third micro-step", [MEMBER])
        torch.zeros(64)  # takes memory that is free
    assert model.faults == []


@on_ranks(1)
def test_sums_are_kept_for_the_stream_that_reads_them() -> None:
    with reduced_sums() as (model, partial_gradients):
        reducing = model.stream("reducing")
        reducing.wait_stream(model.default)
        with model.on(reducing):
            partial_gradients.pop_reduced([MEMBER])[MEMBER].mul(2)
        torch.zeros(64)  # takes memory that is free
    assert model.faults == []


# ---- an order that is taken away ----


@pytest.mark.parametrize(
    ("lost", "scheme"),
    thinned(
        [("barrier", "qsdp"), ("barrier", "sdp4bit"), ("recorded", "sdp4bit")],
        lambda lost, scheme: lost == "recorded",
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_a_lost_order_is_noticed(lost: str, scheme: str) -> None:
    prefetching = Feature(zero=PREFETCH)
    assert any("ds_quant/" in fault for fault in faults(3, scheme, prefetching, lost=lost))


# ---- waits of the host ----


def waits(stage: int, block: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Return the waits of one step of two micro-steps by function, and its lossless messages."""
    from ds_quant.comm.lossless_gather import LosslessGather

    posted: list[int] = []
    post = LosslessGather.post

    def noted(gathers: Any, index: int, *args: Any) -> Any:
        posted.append(index)
        return post(gathers, index, *args)

    LosslessGather.post = noted
    fake_world.join(fake_world.World(2, 2))
    config = settings(
        stage, {"node_size": 2, "metrics": {"interval": 0}, "checksum_steps": 0, **block},
        dtype="bf16", accumulation=2, zero={"allgather_bucket_size": 16_384},
    )  # fmt: skip
    with fake_world.without_handshake(), fake_world.faked_cuda(), small_chunks(streams=True):
        engine = build(config)
        for step in range(2):
            train_step(engine, step)
        posted.clear()
        with counting.waits() as counts:
            train_step(engine, 2)
    return dict(counts), len(posted)


# Waits for the vote on written weights: once per step, under ZeRO-3 once per micro-step.
WRITTEN = {2: {"_differing": 1}, 3: {"written": 2}}


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, environment=OWN_GROUP)
def test_lossless_differences_wait_twice_per_step_whatever_the_messages(stage: int) -> None:
    found, messages = waits(stage, {"scheme": "lossless_w_g3"})
    assert messages > 3
    assert {name.rpartition(".")[2]: count for name, count in found.items()} == {
        "_agree": 1,  # the lengths
        "check_messages": 1,  # whether any rank could not decode
        **WRITTEN[stage],
    }


@pytest.mark.parametrize(
    ("scheme", "stage"),
    thinned(
        product(("full_precision", "qsdp", "sdp4bit", "eden3"), (2, 3)),
        lambda scheme, stage: stage == (2 if scheme in ("full_precision", "eden3") else 3),
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_nothing_else_waits(scheme: str, stage: int) -> None:
    found, messages = waits(stage, {"scheme": scheme})
    keeps_weights = scheme in ("sdp4bit", "eden3")
    assert {name.rpartition(".")[2]: count for name, count in found.items()} == (
        WRITTEN[stage] if keeps_weights else {}
    )
    assert messages == 0
