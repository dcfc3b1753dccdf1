"""The rehearsal: before the first step it launches every variant of a kernel that training
launches, and connects the ranks that training connects.

Without a GPU the variants are those that the launcher asks for: every use of a kernel is also
handed to it, with a runner that writes down the macros.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ds_quant import fsdp2
from ds_quant.comm.transport import Communicator
from ds_quant.kernels import dispatch, launch_batch
from ds_quant.runtime import warmup
from ds_quant.runtime.run import Run
from ds_quant.runtime.warmup import MessageKinds, message_kinds, warm_up_kernels
from ds_quant.zero import front as zero_front
from tests.distributed.features import separate_experts
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import QSDP, engine_of, plain_descent, train_steps
from tests.distributed.scenarios import Mixture
from tests.thin import thinned

LEARNED = {"rounding": "nearest", "levels": "learned", "level_steps": [1]}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"scheme": "qsdp", "gradients": {"rotation_signs": True}},  # of no rotation: none
    {"scheme": "qsdp_w4g4", "weights": LEARNED},
    {"scheme": "sdp4bit", "gradients": {"rotation_signs": True}},
    {"scheme": "zeropp"},
    {"scheme": "qw4"},
    {"scheme": "lossless", "gradients": {"enabled": True}},
    {"scheme": "eden3"},
    {"scheme": "lossless_w_g3"},
)

# What make test trains: a replica, buckets of few owners, a node shard, and exact differences.
QUICK = (("qsdp_w4g4", 1), ("zeropp", 2), ("sdp4bit", 3), ("lossless_w_g3", 3))


class Recorder:
    """Hands every use of a kernel to the launcher too."""

    def __init__(self) -> None:
        self.variants: set[tuple] = set()
        encode = dispatch.encode_lossless
        dispatch.encode_lossless = lambda *args, **how: self._encode_lossless(encode, *args, **how)
        decode = dispatch.decode_lossless
        dispatch.decode_lossless = lambda *args, **how: self._decode_lossless(decode, *args, **how)
        compile_tasks = dispatch.compile_tasks
        dispatch.compile_tasks = lambda *args: self._compile(compile_tasks, *args)

    def _tables(self, tables: Any) -> None:
        for table in tables:
            for work in table.launches():
                self.variants.add((work.kernel, work.macros))

    def _encode_lossless(self, original: Any, *args: Any, **options: Any) -> None:
        launch_batch.encode_lossless(*args, run_tables=self._tables)
        original(*args, **options)

    def _decode_lossless(self, original: Any, *args: Any, **options: Any) -> None:
        launch_batch.decode_lossless(*args, run_tables=self._tables)
        original(*args, **options)

    def _compile(self, original: Any, tasks: Any, buffers: Any, backend: str) -> Any:
        """Tables of operations, alone or several."""
        covered = [task for task in tasks if launch_batch.covers(task[0], buffers)]
        launched = launch_batch.compile_tasks(covered, buffers, self._tables)
        kernels, left = original(tasks, buffers, backend)
        return [*kernels, launched], left


def check(run: Run, kinds: MessageKinds, train: Callable[[], object]) -> None:
    """Compare the kernels of a training with those of the warm-up."""
    recorder = Recorder()
    warm_up_kernels(run, kinds, torch.device("cpu"))
    rehearsed, recorder.variants = recorder.variants, set()
    train()
    new = sorted(recorder.variants - rehearsed)
    assert recorder.variants and not new, "\n".join(f"{kernel}: {dict(how)}" for kernel, how in new)


@pytest.mark.parametrize(
    ("place", "stage"),
    thinned(
        product(range(len(SCHEMES)), (1, 2, 3)),
        lambda place, stage: (SCHEMES[place]["scheme"], stage) in QUICK,
    ),
)
@on_ranks(4)
def test_training_launches_nothing_new(place: int, stage: int) -> None:
    """In steps of two micro-steps, whose sums are held."""
    node_size = (1, 2, 4)[(place + stage) % 3]  # each scheme and stage has all
    block = {**SCHEMES[place], "node_size": node_size, "allow_full_replica": True}
    # Buckets of few owners under ZeRO-2: there, ranks also deliver sums to each other.
    zero = {"reduce_bucket_size": 20_000} if stage == 2 else {}
    engine = engine_of(stage, block, accumulation=2, zero=zero)
    attached = engine.ds_quant_attached
    check(attached.run, attached.message_kinds(), lambda: train_steps(engine, 3))


@on_ranks(4)
def test_training_of_experts_launches_nothing_new() -> None:
    """Split over the ranks of a node. Their gradients take one level, those of all others two."""
    block = {"scheme": "qsdp", "node_size": 2}
    how = {"optimizer": plain_descent, "groups": separate_experts}
    engine = engine_of(2, block, lambda: Mixture(2), **how)
    attached = engine.ds_quant_attached
    check(attached.run, attached.message_kinds(), lambda: train_steps(engine, 3))


@pytest.mark.parametrize(
    ("scheme", "replicas"),
    thinned(
        product(("qsdp", "sdp4bit", "zeropp", "lossless_w_g3", "eden4"), (1, 2)),
        lambda *case: case in (("lossless_w_g3", 1), ("eden4", 2)),
    ),
)
@on_ranks(4)
def test_training_under_fsdp2_launches_nothing_new(scheme: str, replicas: int) -> None:
    """In steps of two micro-steps, whose sums are held."""
    mesh = init_device_mesh("cpu", (4,))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(130, 67), nn.Tanh(), nn.Linear(67, 130))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=bf16)
    model = fully_shard(model, mesh=mesh, mp_policy=bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = {"scheme": scheme, "min_numel": 512}
    if replicas == 1:
        block["node_size"] = 2
    front = fsdp2.attach(model, block, optimizer=optimizer)

    def train() -> None:
        for _ in range(3):
            for is_last in (False, True):
                model.set_requires_all_reduce(is_last)
                model(torch.randn(4, 130)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check(front.run, message_kinds(front.run, front.run.levels), train)


# ---- when kernels are compiled ----


@pytest.mark.parametrize(
    ("kind", "world", "rehearsals"), [("cuda", 2, 1), ("cuda", 1, 0), ("cpu", 2, 0), ("cpu", 1, 0)]
)
@on_ranks()
def test_kernels_are_compiled_before_the_first_step_on_cuda_if_anything_is_sent(
    kind: str, world: int, rehearsals: int
) -> None:
    from ds_quant.zero import attach

    rehearsed: list[Run] = []
    attach.warm_up = lambda run, _: rehearsed.append(run)
    on_kind = {"device": lambda: torch.device(kind)}
    attach.accelerator = SimpleNamespace(**vars(attach.accelerator) | on_kind)
    engine = engine_of(2, QSDP)
    assert rehearsed == [engine.ds_quant_attached.run] * rehearsals


@on_ranks(4)
def test_the_other_ranks_of_a_node_find_the_kernels_of_the_first() -> None:
    """A kernel is compiled once per node. A second engine of the process rehearses again."""
    rank = torch.distributed.get_rank()
    first_of_node = rank - rank % 2
    found: list[bool] = []

    def compile_slowly(*_: Any) -> None:
        found.append((scratch() / f"kernels of rank {first_of_node}").exists())
        if rank == first_of_node:
            time.sleep(0.5)
            (scratch() / f"kernels of rank {rank}").touch()

    attached = engine_of(3, {"scheme": "sdp4bit", "node_size": 2}).ds_quant_attached
    warmup.warm_up_kernels = compile_slowly
    for _ in range(2):
        warmup.warm_up(attached.run, attached.message_kinds())
    assert found == [rank != first_of_node, True]


# ---- which ranks are connected ----


class Connection(NamedTuple):
    """A collective over a process group. Groups of the whole world are one."""

    collective: str
    process_group: Any


OVER_THE_WORLD = Connection("all_to_all", "world")


def note_connections() -> set[Connection]:
    """Return a set to which every collective of this process is added from now on."""
    used: set[Connection] = set()

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Communicator, name)

        def noted(communicator: Communicator, *args: Any, **kwargs: Any) -> Any:
            is_world = communicator.size == torch.distributed.get_world_size()
            used.add(Connection(name, "world" if is_world else communicator.process_group))
            return original(communicator, *args, **kwargs)

        return noted

    Communicator.all_gather = noting("all_gather")
    Communicator.all_to_all = noting("all_to_all")
    return used


class Connections(NamedTuple):
    """The connections of a rehearsal, and those of three steps after it."""

    rehearsed: set[Connection]
    trained: set[Connection]


def connections(stage: int, scheme: str) -> Connections:
    """Rehearse and train on two nodes of two ranks, as on a device with streams.

    There gradients have a communicator of their own inside the node.
    """
    used = note_connections()
    with_streams = {"has_streams": lambda: True}
    zero_front.accelerator = SimpleNamespace(**vars(zero_front.accelerator) | with_streams)
    warmup.warm_up_kernels = lambda *_: None
    engine = engine_of(stage, {"scheme": scheme, "node_size": 2, "checksum_steps": 1})
    attached = engine.ds_quant_attached
    warmup.warm_up(attached.run, attached.message_kinds())
    rehearsed = set(used)
    used.clear()
    train_steps(engine, 3)
    return Connections(rehearsed, trained=used)


CONNECTED = [(3, "sdp4bit"), (3, "full_precision"), (2, "sdp4bit")]


@pytest.mark.parametrize(("stage", "scheme"), CONNECTED)
@on_ranks(4)
def test_training_uses_no_connection_that_was_not_rehearsed(stage: int, scheme: str) -> None:
    """NCCL would connect the ranks in the middle of a step, which takes seconds."""
    rehearsed, trained = connections(stage, scheme)
    assert {connection.collective for connection in trained} == {"all_gather", "all_to_all"}
    assert trained <= rehearsed


@pytest.mark.parametrize(("stage", "scheme"), CONNECTED)
@on_ranks(4)
def test_the_rehearsal_connects_no_ranks_that_training_does_not(stage: int, scheme: str) -> None:
    """But for the world: its gathers carry checksums only if the ranks keep weights, and its
    exchanges under ZeRO-1 and 2 the sums that ranks add up for others.
    """
    rehearsed, trained = connections(stage, scheme)
    assert rehearsed - trained <= {Connection("all_gather", "world"), OVER_THE_WORLD}


@pytest.mark.parametrize("scheme", ["sdp4bit", "full_precision"])
@on_ranks(4)
def test_no_rank_is_connected_to_all_others_under_zero_3(scheme: str) -> None:
    """An all-to-all over the world would connect each of 512 GPUs to 511 others."""
    assert OVER_THE_WORLD not in connections(3, scheme).rehearsed


@on_ranks(4)
def test_ranks_that_may_add_up_sums_for_others_are_connected_under_zero_2() -> None:
    assert OVER_THE_WORLD in connections(2, "sdp4bit").rehearsed


@on_ranks(4)
def test_a_rehearsal_is_not_counted_as_traffic() -> None:
    attached = engine_of(3, {"scheme": "sdp4bit", "node_size": 2}).ds_quant_attached
    before = dict(attached.run.traffic.collectives)
    used = note_connections()
    warmup.warm_up(attached.run, attached.message_kinds())
    assert used, "nothing was sent, so there was nothing to count"
    assert attached.run.traffic.collectives == before
