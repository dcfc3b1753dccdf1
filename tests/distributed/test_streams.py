"""What a device with streams would do with the steps of every kind of scheme: nothing is read
before it is written, no memory is taken again while another stream uses it (see
``device_model``), the host waits for nothing, and kernels are compiled before the first step.

A fake world of 2 x 2 ranks, DeepSpeed's streams and one per process group. Where an order is taken
away on purpose the model must notice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import fake_world
import pytest
import torch
from torch import Tensor

from ds_quant.comm.reduction_plan import presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.zero import accelerator
from tests.distributed import counting
from tests.distributed.features import ALL_FEATURES, Feature
from tests.distributed.harness import OWN_GROUP, on_ranks, scratch
from tests.distributed.models import (
    PREFETCH,
    QSDP,
    build,
    engine_of,
    forward,
    settings,
    train_step,
)
from tests.distributed.test_offload_states import INCLUDE
from tests.distributed.test_spread import small_chunks
from tests.thin import thinned

# The first micro-step, one between and the last take different branches.
MICRO_STEPS = 3
SEPARATE_GRADIENTS = {"contiguous_gradients": False}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _become_a_device(model: Any, lost: str) -> None:
    """From here on DeepSpeed and the plugin take this process for one with the model's streams."""
    from deepspeed.accelerator import real_accelerator

    from ds_quant.zero import accelerator, attach
    from tests.distributed.device_model import Accelerator, become_a_device

    real_accelerator.ds_accelerator = Accelerator(model)
    become_a_device(model, keeps_records=lost != "recorded")
    if lost == "barrier":
        accelerator.StepBarrier.wait = lambda _: None
    as_on_cuda = {"device": lambda: torch.device("cuda")}
    attach.accelerator = SimpleNamespace(**vars(accelerator) | as_on_cuda)
    attach.warm_up = lambda *_: None


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
    """Return the faults of three optimizer steps. A feature with a loop of its own keeps it.
    ``more``: what else is in the block.
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


def away_and_back(engine: Any, step: int, _: int) -> list[float]:
    """States leave the device after every micro-step and come back to it as copies."""
    from tests.distributed.device_model import is_ours

    losses, to = [], Tensor.to

    def copied(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        moved = to(tensor, *args, **options)
        return moved.clone() if moved is tensor and is_ours(1) else moved

    for micro in range(MICRO_STEPS):
        losses.append(forward(engine, step, micro))
        engine.backward(losses[-1])
        engine.step()
        engine.optimizer.offload_states(include=INCLUDE[engine.zero_optimization_stage()])
        accelerator.synchronize()  # the host waits for what it is given
        Tensor.to = copied
        engine.optimizer.reload_states()
        Tensor.to = to
    return [float(loss.detach()) for loss in losses]


LEARNED = {"weights": {"levels": "learned", "level_steps": [1, 2], "rounding": "nearest"}}
WATCHED = {"fallback": {"on_nonfinite": "full_precision"}}
SAMPLED = {"metrics": {"interval": 2, "file": "metrics"}}
WHOLE = {"allow_full_replica": True}
AWAY = Feature(accumulation=MICRO_STEPS, step=away_and_back)
AHEAD = Feature(zero=PREFETCH)
# By title: scheme, feature, world, what else is in the block.
WAYS: dict[str, tuple[str, Feature, str, dict[str, Any]]] = {
    "payload checksums": ("sdp4bit", AHEAD, "2x2", {"payload_checksum": True}),
    "payload checksums, lossless": ("lossless_w_g3", AHEAD, "2x2", {"payload_checksum": True}),
    "compared copies": ("sdp4bit", AHEAD, "2x2", {"checksum_steps": 1}),
    "compared copies, lossless": ("lossless_w_g3", AHEAD, "2x2", {"checksum_steps": 1}),
    "metrics": ("sdp4bit", AHEAD, "2x2", SAMPLED),
    "metrics, lossless": ("lossless_w_g3", AHEAD, "2x2", SAMPLED),
    "fallback": ("sdp4bit", AHEAD, "2x2", WATCHED),
    "learned levels": ("qsdp", AHEAD, "2x2", LEARNED),
    "warm-up": ("sdp4bit", AHEAD, "2x2", {"warmup_steps": 1}),
    "states off the device": ("sdp4bit", AWAY, "2x2", {}),
    "states off the device, lossless": ("lossless_w_g3", AWAY, "2x2", {}),
    "one node": ("sdp4bit", AHEAD, "1x4", {}),
    "one node, zeropp": ("zeropp", AHEAD, "1x4", {}),
    "one rank per node": ("sdp4bit", AHEAD, "4x1", WHOLE),
    "one rank per node, qsdp": ("qsdp", AHEAD, "4x1", {}),
    "one rank per node, lossless": ("lossless_w_g3", AHEAD, "4x1", WHOLE),
}
QUICK_WAYS = [("states off the device", 3), ("one rank per node", 2)]


@pytest.mark.parametrize(
    ("title", "stage"),
    thinned(
        [(title, stage) for title in WAYS for stage in (1, 2, 3)],
        lambda title, stage: (title, stage) in QUICK_WAYS,
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_way_to_run_knows_that_what_it_touches_is_done(title: str, stage: int) -> None:
    scheme, feature, world, more = WAYS[title]
    os.chdir(scratch())
    assert faults(stage, scheme, feature, world=world, more=more) == []


@on_ranks(1)
def test_sums_that_were_away_are_kept_for_the_stream_that_reduces() -> None:
    """Those of a parameter that has changed its bucket."""
    from deepspeed.accelerator import real_accelerator

    from ds_quant.zero.partial_gradients import PartialBucket, PartialGradients
    from tests.distributed.device_model import Accelerator, Model

    model = Model()
    real_accelerator.ds_accelerator = Accelerator(model)
    torch.Tensor.record_stream = lambda tensor, stream: model.record(tensor, stream)
    reducing, member = model.stream("reducing"), ("parameter", -1)
    store = PartialGradients(SimpleNamespace(global_steps=0))

    def bucket() -> PartialBucket:
        crossing = lambda: [(member, torch.ones(64))]  # noqa: E731
        return PartialBucket(
            members=[member], values=torch.ones(64), reduction=None, reduce_between_nodes=crossing
        )

    with model:
        store.pop("any", [])
        store._reduced[member] = torch.ones(64)  # made on the default stream
        store.keep("before", bucket())
        reducing.wait_stream(model.default)
        with model.on(reducing):
            assert store.pop("now", [member]) is None  # added to the reduced sums
        torch.zeros(64)
        store._reduced[member] = torch.ones(64)
        reducing.wait_stream(model.default)
        with model.on(reducing):
            store.pop_reduced([member])[member].mul(2)
        torch.zeros(64)
    assert model.faults == []


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
    """By function, in one step of two micro-steps; and its messages of weights between nodes."""
    from ds_quant.comm.lossless_gather import LosslessGather

    posted, post = [], LosslessGather.post
    LosslessGather.post = lambda *args: posted.append(args[1]) or post(*args)
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


# Whether weights that ranks keep were written: once per step, under ZeRO-3 once per micro-step.
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


# ---- rehearsed kernels ----


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_kernels_are_rehearsed_once_on_cuda_where_something_is_sent(world: int, kind: str) -> None:
    from ds_quant.zero import attach

    seen: list[Any] = []
    attach.warm_up = lambda run, _: seen.append(run)
    device = torch.device(kind)
    attach.accelerator = SimpleNamespace(**vars(attach.accelerator) | {"device": lambda: device})
    engine = engine_of(2, QSDP)
    rehearsed = kind == "cuda" and world > 1
    assert seen == ([engine.ds_quant_attached.run] if rehearsed else [])


@on_ranks(1)
def test_slices_are_those_of_the_device_and_of_what_carries_its_tensors() -> None:
    from ds_quant.runtime import run as module
    from ds_quant.zero.front import EngineFront

    scheme = QuantizedCommConfig(scheme="sdp4bit").to_scheme()
    alone = SimpleNamespace(module=torch.nn.Linear(2, 2), zero_optimization_stage=lambda: 2)
    for kind, backend in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
        accelerator.device = lambda kind=kind: torch.device(kind)
        module.carries = lambda *_, backend=backend: backend
        front = EngineFront(alone, Topology(world=1, node_size=1), scheme)
        assert front.run.slicing.pace == presumed_pace(torch.device(kind), backend)


@on_ranks(4)
def test_the_first_rank_of_a_node_compiles_and_every_link_is_used() -> None:
    from ds_quant.comm.transport import Communicator
    from ds_quant.runtime import warmup

    rank, seen, sent, posted = torch.distributed.get_rank(), [], [], Communicator._posted
    first = rank - rank % 2

    def compiling(*_: Any) -> None:
        seen.append("found" if (scratch() / f"by {first}").exists() else "compiles")
        if rank == first:
            time.sleep(0.5)
            (scratch() / f"by {rank}").touch()

    def noted(self: Communicator, payload: torch.Tensor, *args: Any) -> Any:
        sent.append((self.size, payload.numel()))
        return posted(self, payload, *args)

    attached = engine_of(3, {"scheme": "sdp4bit", "node_size": 2}).ds_quant_attached
    warmup.warm_up_kernels, Communicator._posted = compiling, noted
    before = dict(attached.run.traffic.collectives)
    for _ in range(2):  # as by two engines of a process
        warmup.warm_up(attached.run, attached.message_kinds())
    assert attached.run.traffic.collectives == before
    assert seen == ["found" if rank % 2 else "compiles", "found"]
    assert sent


@pytest.mark.parametrize(
    ("stage", "scheme"), [(3, "sdp4bit"), (3, "full_precision"), (2, "sdp4bit")]
)
@on_ranks(4)
def test_ranks_are_connected_as_training_needs_them_and_no_further(stage: int, scheme: str) -> None:
    """An all-to-all over the world would connect each of 512 GPUs to 511 others."""
    from torch.distributed import distributed_c10d as c10d

    from ds_quant.comm.transport import Communicator
    from ds_quant.runtime import warmup
    from ds_quant.zero import front as module

    used: set[tuple[str, str]] = set()  # collectives with the names of their groups

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(Communicator, name)

        def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            whole = self.size == torch.distributed.get_world_size()  # DeepSpeed may have two
            used.add((name, "world" if whole else c10d._world.pg_names[self.process_group]))
            return original(self, *args, **kwargs)

        return call

    Communicator.all_gather, Communicator.all_to_all = noted("all_gather"), noted("all_to_all")
    # Gradients have a communicator of their own inside the node.
    streams = {"has_streams": lambda: True}
    module.accelerator = SimpleNamespace(**vars(module.accelerator) | streams)
    warmup.warm_up_kernels = lambda *_: None
    engine = engine_of(stage, {"scheme": scheme, "node_size": 2, "checksum_steps": 1})
    attached = engine.ds_quant_attached
    warmup.warm_up(attached.run, attached.message_kinds())
    rehearsed = set(used)
    used.clear()
    for step in range(3):
        train_step(engine, step)
    assert used <= rehearsed
    spare = {("all_gather", "world")}  # of checksums, if any weights are kept
    if stage < 3:
        spare.add(("all_to_all", "world"))  # of sums that others than their owners have added up
    assert rehearsed - used <= spare
    assert (("all_to_all", "world") in rehearsed) == (stage < 3)
    assert {name for name, _ in rehearsed - spare} == {"all_gather", "all_to_all"}
