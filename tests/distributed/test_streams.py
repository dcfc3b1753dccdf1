"""What a device with streams would do with the steps of every kind of scheme: nothing is read
before it is written, no memory is taken again while another stream uses it (see
``device_model``), the host waits for nothing, and kernels are compiled before the first step.

A fake world of 2 x 2 ranks, DeepSpeed's streams and one per process group. Where an order is taken
away on purpose the model must notice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_world
import pytest
import torch
from torch import Tensor

import ds_quant
from ds_quant.comm.reduction_plan import presumed_pace
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import QuantizedCommConfig
from tests.distributed import counting
from tests.distributed.features import ALL_FEATURES, Feature
from tests.distributed.harness import OWN_GROUP, on_ranks, scratch
from tests.distributed.models import PREFETCH, QSDP, build, engine_of, settings, train_step
from tests.distributed.test_spread import small_chunks
from tests.thin import thinned

PACKAGE = f"{Path(ds_quant.__file__).parent}/"  # a checkout's own folder may be called ds_quant

COLLECTIVES = (*fake_world.RECEIVING, "all_reduce", "broadcast")
# The first micro-step, one between and the last take different branches.
MICRO_STEPS = 3
SEPARATE_GRADIENTS = {"contiguous_gradients": False}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _is_ours(depth: int) -> bool:
    return sys._getframe(1 + depth).f_code.co_filename.startswith(PACKAGE)


def _receiving_evenly(all_to_all: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective of a fake group with a payload as large as what arrives: the group
    refuses to bring anything to a rank that sends nothing.
    """

    def receive(*tensors: Tensor, **options: Any) -> Any:
        given = [options.pop(name) for name in ("output", "input") if name in options]
        received = [*tensors, *given][0]
        options["input_split_sizes"] = options.get("output_split_sizes")
        return all_to_all(received, torch.zeros_like(received), **options)

    return receive


def _become_a_device(model: Any, lost: str) -> None:
    """From here on DeepSpeed and the plugin take this process for one with the model's streams."""
    from deepspeed.accelerator import real_accelerator

    from ds_quant.comm import lossless_gather
    from ds_quant.zero import attach, hooks
    from tests.distributed.device_model import Accelerator

    real_accelerator.ds_accelerator = Accelerator(model)
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name)
        if name == "all_to_all_single":
            original = _receiving_evenly(original)
        setattr(torch.distributed, name, model.collective(original))
    torch.cuda.current_stream = lambda device=None: model.now
    torch.Tensor.is_cuda = property(lambda _: _is_ours(1))

    def record(tensor: torch.Tensor, stream: Any) -> None:
        if lost != "recorded" or not _is_ours(1):
            model.record(tensor, stream)

    torch.Tensor.record_stream = record
    if lost == "barrier":
        hooks.StepBarrier.wait = lambda _: None
    as_on_cuda = {"device": lambda: torch.device("cuda")}
    attach.hooks = SimpleNamespace(**vars(hooks) | as_on_cuda)
    attach.warm_up_rank = lambda *_: None

    def touched(
        wire: Any, starts: Any, lengths: Any, base: Any, out: Any, status: Any, *, backend: str
    ) -> None:
        out.add_(wire.sum() * 0)  # zeros are no message
        status.add_(0)

    lossless_gather.decode_lossless = touched
    lossless_gather.LosslessGather._agree = fake_world._at_full_length(
        lossless_gather.LosslessGather._agree
    )


def faults(
    stage: int,
    scheme: str,
    feature: Feature,
    *,
    micro_steps: int = MICRO_STEPS,
    lost: str = "nothing",
) -> list[str]:
    """Return the faults of three optimizer steps. A feature with a loop of its own keeps it."""
    fake_world.join(fake_world.World(2, 2))
    import deepspeed  # noqa: F401  # before the accelerator changes

    from tests.distributed.device_model import Model

    model = Model()
    _become_a_device(model, lost)
    block = {"scheme": scheme, "node_size": 2, "backend": "torch", "checksum_steps": 0}
    block |= {"metrics": {"interval": 0}}
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
    assert len(model.streams) >= 4
    return sorted(set(model.faults))


@pytest.mark.parametrize(
    ("stage", "scheme", "zero"),
    [
        (3, "sdp4bit", PREFETCH),
        (3, "lossless_g3", PREFETCH),
        (3, "qsdp", PREFETCH),
        (3, "eden3", PREFETCH),
        (3, "zeropp", PREFETCH),
        (3, "hybrid", PREFETCH),
        (3, "full_precision", {}),
        (3, "sdp4bit", OFFLOAD),
        (3, "sdp4bit", SEPARATE_GRADIENTS),
        (3, "lossless_w_g3", SEPARATE_GRADIENTS),
        (2, "sdp4bit", {}),
        (2, "lossless_g3", {}),
        (2, "eden3", {}),
        (2, "sdp4bit", OFFLOAD),
    ],
    ids=str,
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_operation_knows_that_what_it_touches_is_done(
    stage: int, scheme: str, zero: dict[str, Any]
) -> None:
    assert faults(stage, scheme, Feature(zero=zero)) == []


# Of the rows make test takes those whose gradients go another way.
QUICK_ROWS = "small gradient buckets", "`reduce_scatter: false`"


@pytest.mark.parametrize(
    ("title", "stage"),
    thinned(
        [(title, stage) for title, row in ALL_FEATURES.items() for stage in row.stages],
        lambda title, stage: title in QUICK_ROWS and stage != 1,
    ),
)
@on_ranks(1, environment=OWN_GROUP)
def test_every_feature_knows_that_what_it_touches_is_done(title: str, stage: int) -> None:
    assert faults(stage, "sdp4bit", ALL_FEATURES[title]) == []


@pytest.mark.parametrize(
    ("lost", "scheme"), [("barrier", "qsdp"), ("barrier", "sdp4bit"), ("recorded", "sdp4bit")]
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


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1, environment=OWN_GROUP)
def test_lossless_differences_wait_twice_per_step_whatever_the_messages(stage: int) -> None:
    found, messages = waits(stage, {"scheme": "lossless_g3"})
    assert messages > 3
    assert {name.rpartition(".")[2]: count for name, count in found.items()} == {
        "_agree": 1,  # the lengths
        "minimum": 1,  # whether any rank could not decode
    }


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("scheme", ["full_precision", "qsdp", "sdp4bit", "eden3"])
@on_ranks(1, environment=OWN_GROUP)
def test_nothing_else_waits(scheme: str, stage: int) -> None:
    assert waits(stage, {"scheme": scheme}) == ({}, 0)


# ---- rehearsed kernels ----


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_kernels_are_rehearsed_once_on_cuda_where_something_is_sent(world: int, kind: str) -> None:
    from ds_quant.zero import attach

    seen: list[tuple[Any, torch.device]] = []
    attach.warm_up_rank = lambda *args: seen.append(args)
    device = torch.device(kind)
    attach.hooks = SimpleNamespace(**vars(attach.hooks) | {"device": lambda: device})
    engine = engine_of(2, QSDP)
    rehearsed = kind == "cuda" and world > 1
    assert seen == ([(engine.ds_quant_plugin, device)] if rehearsed else [])


@on_ranks(1)
def test_slices_are_those_of_the_device_and_of_what_carries_its_tensors() -> None:
    from ds_quant.zero import plugin as module

    scheme = QuantizedCommConfig(scheme="sdp4bit").to_scheme()
    alone = SimpleNamespace(module=torch.nn.Linear(2, 2), zero_optimization_stage=lambda: 2)
    for kind, backend in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
        module.hooks.device = lambda kind=kind: torch.device(kind)
        module.backend = lambda backend=backend: backend
        plugin = module.Plugin(alone, scheme, Topology(world=1, node_size=1))
        assert plugin.slicing.pace == presumed_pace(torch.device(kind), backend)


@on_ranks(4)
def test_the_first_rank_of_a_node_compiles_and_every_link_is_used() -> None:
    from ds_quant.comm.transport import Communicator
    from ds_quant.zero import warmup

    rank, seen, sent, posted = torch.distributed.get_rank(), [], [], Communicator._posted
    first = rank - rank % 2

    def compiling(plugin: Any, device: torch.device) -> None:
        seen.append("found" if (scratch() / f"by {first}").exists() else "compiles")
        if rank == first:
            time.sleep(0.5)
            (scratch() / f"by {rank}").touch()

    def noted(self: Communicator, payload: torch.Tensor, *args: Any) -> Any:
        sent.append((self.size, payload.numel()))
        return posted(self, payload, *args)

    plugin = engine_of(3, {"scheme": "sdp4bit", "node_size": 2}).ds_quant_plugin
    warmup.warm_up, Communicator._posted = compiling, noted
    before = dict(plugin.traffic.collectives)
    for _ in range(2):  # as by two engines of a process
        warmup.warm_up_rank(plugin, torch.device("cpu"))
    assert plugin.traffic.collectives == before
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
    from ds_quant.zero import warmup, world

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
    world.hooks = SimpleNamespace(**vars(world.hooks) | {"has_streams": lambda: True})
    warmup.warm_up = lambda *_: None
    engine = engine_of(stage, {"scheme": scheme, "node_size": 2, "checksum_steps": 1})
    warmup.warm_up_rank(engine.ds_quant_plugin, torch.device("cpu"))
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
