"""Steps of an FSDP2 model on a device with streams: nothing is read before it is written, and no
memory is taken again while another stream uses it (see ``device_model``).

A fake world of 2 x 2 ranks, FSDP2's streams and one per process group. Where an order is taken away
on purpose the model must notice.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_world
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ds_quant
from ds_quant import fsdp2
from ds_quant.comm import reduce
from ds_quant.fsdp2 import attaching, gradients
from ds_quant.fsdp2.gradients import QuantizedReduceScatter
from ds_quant.fsdp2.model import AttachedModel
from tests.distributed.harness import OWN_GROUP, on_ranks, scratch
from tests.thin import thinned

WIDTH = 32
LAYERS = 3
STEPS = 2
FLOAT32_SUMS = {"reduce_dtype": torch.float32}
ALLOWED = {"allow_full_replica": True}
SAMPLED = {"metrics": {"interval": 2, "file": "metrics"}}
WATCHED = {"fallback": {"on_nonfinite": "full_precision"}}
ALL_REDUCES = "FSDP2 all-reduces"  # name of FSDP2's stream
LOST_WAITS = {"wait": "FSDP2", "wait for all nodes": ALL_REDUCES}  # on streams of these names
LOST_RECORDS = {"record of the row": gradients, "record of the sums": reduce}


@dataclass(frozen=True)
class Case:
    """A way to train.

    world: nodes x ranks per node. replicas: every node holds one.
    block: more than the scheme.
    policy: more of the mixed precision than bf16.
    shard: of ``fully_shard``.
    prefetch: explicit, forward and backward.
    checkpointed: layers run forward again in backward.
    after_attach, before_forward, after_step: get the model, the front and the step.
    lost: "record": every record of the plugin on a stream; "record of the row" and "record of the
        sums": one on FSDP2's all-reduce stream. "wait": every wait on FSDP2's streams; "wait for
        all nodes": those on its all-reduce stream.
    """

    scheme: str
    micro_steps: int = 3
    world: str = "2x2"
    replicas: bool = False
    block: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    prefetch: bool = False
    checkpointed: bool = False
    after_attach: Any = None
    before_forward: Any = None
    after_step: Any = None
    lost: str = "nothing"


class Block(nn.Module):
    """A residual layer, of which one matrix has rows that ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.norm = nn.LayerNorm(2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Layers, and a root with parameters of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._checkpointed = case.checkpointed
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
        return self.head(x)


def _become_a_device(model: Any, lost: str) -> None:
    """From here on FSDP2 and the plugin take this process for one with the model's streams."""
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
    )

    from tests.distributed import device_model

    device_model.become_a_device(model, keeps_records=lost != "record")

    def new_stream(**options: Any) -> Any:
        # FSDP2 gives all streams a priority but that of all-reduces.
        return model.stream(f"FSDP2 {len(model.streams)}" if options else ALL_REDUCES)

    handle = SimpleNamespace(
        Stream=new_stream,
        Event=lambda *_, **__: device_model.Event(model),
        current_stream=lambda *_: model.now,
        stream=model.on,
    )
    for module in (_fsdp_collectives, _fsdp_param, _fsdp_param_group, _fsdp_state):
        if hasattr(module, "_get_device_handle"):
            module._get_device_handle = lambda *_: handle
    torch.accelerator.current_stream = lambda *_: model.now
    if lost in LOST_WAITS:
        wait = device_model._Work.wait

        def waiting_elsewhere_only(work: Any) -> None:
            if model.now.name.startswith(LOST_WAITS[lost]):
                work._tensors = []
            else:
                wait(work)

        device_model._Work.wait = waiting_elsewhere_only
    if lost in LOST_RECORDS:
        LOST_RECORDS[lost].keep_for_current_stream = lambda *_: None


def _model(case: Case, ranks: fake_world.World) -> Any:
    """Return the model of a case, sharded."""
    if case.replicas:
        mesh = init_device_mesh(
            "cpu", (ranks.nodes, ranks.ranks_per_node), mesh_dim_names=("replica", "shard")
        )
    else:
        mesh = init_device_mesh("cpu", (ranks.ranks,))
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**(bf16 | case.policy))}
    torch.manual_seed(0)
    model = Net(case)
    for layer in model.layers:
        fully_shard(layer, **options, **case.shard)
    return fully_shard(model, **options, **case.shard)


def trained(case: Case) -> Any:
    """Return the device after two optimizer steps."""
    ranks = fake_world.World.parse(case.world)
    fake_world.join(ranks)
    from tests.distributed.device_model import Model

    device = Model()
    _become_a_device(device, case.lost)
    model = _model(case, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    block = {"scheme": case.scheme, "backend": "torch", "min_numel": 512, "checksum_steps": 0}
    block |= {"metrics": {"interval": 0}, **case.block}
    if not case.replicas:
        block["node_size"] = ranks.ranks_per_node
    with ExitStack() as stack:
        nodes = patch.object(attaching, "handshake", return_value=ranks.ranks_per_node)
        stack.enter_context(nodes)
        stack.enter_context(device)
        front = fsdp2.attach(model, block, optimizer=optimizer)
        if case.prefetch:
            _prefetch(model.layers)
        _call(case.after_attach, model, front, 0)
        for step in range(STEPS):
            for micro_step in range(case.micro_steps):
                is_last = micro_step == case.micro_steps - 1
                _call(case.before_forward, model, front, step)
                _backward(model, is_last=is_last)
            optimizer.step()
            optimizer.zero_grad()
            _call(case.after_step, model, front, step)
    assert len(device.streams) >= 5  # FSDP2's and one of a process group
    return device


def faults(case: Case) -> list[str]:
    """Return the faults of two optimizer steps."""
    return sorted(set(trained(case).faults))


def _call(function: Any, *args: Any) -> None:
    if function is not None:
        function(*args)


def _backward(model: Any, *, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
    model.set_requires_all_reduce(is_last)
    model(torch.randn(4, WIDTH)).float().square().mean().backward()


def _prefetch(layers: Any) -> None:
    """Gather every layer while the one before it computes, in forward and in backward."""
    for first, second in zip(layers[:-1], layers[1:], strict=True):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


def unshard_ahead(model: Any, front: AttachedModel, step: int) -> None:
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    for handle in handles[:2]:
        handle.wait()


def unshard_asynchronously(model: FSDPModule, front: AttachedModel, step: int) -> None:
    model._set_unshard_async_op(True)


def keep_two_inputs(model: FSDPModule, front: AttachedModel, step: int) -> None:
    model.set_reduce_scatter_max_input_buffers(2)


def reduce_in_another_group(model: FSDPModule, front: AttachedModel, step: int) -> None:
    model.set_separate_reduce_scatter_group(True)


def give_up_an_accumulation(model: Any, front: AttachedModel, step: int) -> None:
    _backward(model, is_last=False)
    front.discard_gradients()
    for numel in (5000, 20_000):
        torch.zeros(numel)


def resync(model: Any, front: AttachedModel, step: int) -> None:
    ds_quant.resync(model)


def evaluate(model: Any, front: AttachedModel, step: int) -> None:
    with torch.inference_mode():
        model(torch.randn(4, WIDTH))
    with torch.no_grad():
        model.layers[2](torch.randn(4, WIDTH))


def write_weights(model: Any, front: AttachedModel, step: int) -> None:
    with torch.no_grad():
        for parameter in model.layers[1].parameters():
            parameter.to_local().mul_(0.5)


def freeze_in_turns(model: Any, front: AttachedModel, step: int) -> None:
    """Other parameters have gradients in every backward of a step."""
    frozen = model.layers[1].up.weight
    frozen.requires_grad_(not frozen.requires_grad)


def hook_of_the_user(model: Any, front: AttachedModel, step: int) -> None:
    model.layers[0].set_all_reduce_hook(lambda gradients: gradients.mul_(0.5))


SCHEMES = (
    "sdp4bit", "eden4", "qsdp", "zeropp", "hybrid", "full_precision", "lossless_w_g3", "lossless",
)  # fmt: skip
CASES = {
    **{scheme: Case(scheme) for scheme in SCHEMES},
    **{f"{scheme}, prefetched": Case(scheme, prefetch=True) for scheme in SCHEMES},
    **{
        f"replicas, {scheme}": Case(scheme, replicas=True, prefetch=True)
        for scheme in ("eden4", "qsdp", "hybrid", "full_precision", "lossless_w_g4")
    },
    "replicas": Case("eden4", replicas=True),
    "replicas, fp32 sums": Case("eden4", replicas=True, policy=FLOAT32_SUMS),
    "replicas, one micro-step": Case("eden4", 1, replicas=True, prefetch=True),
    "replicas, slices": Case("eden4", 2, replicas=True, block={"slices": 3}),
    "replicas, payload checksums": Case(
        "eden4", 2, replicas=True, block={"payload_checksum": True}
    ),
    "replicas, watched": Case("eden4", 2, replicas=True, block=WATCHED),
    "replicas, frozen in turns": Case("eden4", replicas=True, before_forward=freeze_in_turns),
    "replicas, a hook": Case("eden4", 2, replicas=True, after_attach=hook_of_the_user),
    "fp32 sums": Case("sdp4bit", policy=FLOAT32_SUMS),
    "one micro-step": Case("sdp4bit", 1),
    "payload checksums": Case("sdp4bit", block={"payload_checksum": True}),
    "payload checksums, lossless": Case("lossless_w_g3", block={"payload_checksum": True}),
    "compared copies": Case("sdp4bit", 2, block={"checksum_steps": 1}),
    "compared replicas": Case("eden4", 2, replicas=True, block={"checksum_steps": 1}),
    "metrics": Case("sdp4bit", 2, block=SAMPLED),
    "warm-up": Case("sdp4bit", 2, block={"warmup_steps": 1}),
    "slices": Case("sdp4bit", block={"slices": 3}),
    "one node": Case("qsdp", 2, "1x4", prefetch=True),
    "one rank per node": Case("sdp4bit", 2, "4x1", block=ALLOWED, prefetch=True),
    "one rank per node, qsdp": Case("qsdp", 2, "4x1", prefetch=True),
    "one rank per node, lossless": Case("lossless_w_g3", 2, "4x1", block=ALLOWED, prefetch=True),
    "unshard ahead": Case("sdp4bit", before_forward=unshard_ahead),
    "unshard asynchronously": Case("sdp4bit", after_attach=unshard_asynchronously),
    "no reshard after forward": Case("sdp4bit", shard={"reshard_after_forward": False}),
    "reshard to 2 ranks": Case("sdp4bit", shard={"reshard_after_forward": 2}),
    "reshard to 2 ranks, qsdp": Case("qsdp", shard={"reshard_after_forward": 2}),
    "two inputs of reductions": Case("sdp4bit", after_attach=keep_two_inputs),
    "another group for reductions": Case("sdp4bit", after_attach=reduce_in_another_group),
    "activation checkpointing": Case("sdp4bit", checkpointed=True, prefetch=True),
    "an accumulation given up": Case("sdp4bit", after_step=give_up_an_accumulation),
    "an accumulation given up, replicas": Case(
        "eden4", replicas=True, after_step=give_up_an_accumulation
    ),
    "resync": Case("sdp4bit", 2, after_step=resync, prefetch=True),
    "evaluation": Case("sdp4bit", 2, after_step=evaluate, prefetch=True),
    "written weights": Case("sdp4bit", 2, after_step=write_weights, prefetch=True),
}
QUICK = "sdp4bit, prefetched", "replicas, eden4"


@pytest.mark.parametrize("title", thinned(CASES, lambda title: title in QUICK))
@on_ranks(1, environment=OWN_GROUP)
def test_every_way_to_train_knows_that_what_it_touches_is_done(title: str) -> None:
    os.chdir(scratch())
    assert faults(CASES[title]) == []


PREFETCHED = Case("sdp4bit", prefetch=True)
CONTROLS = {
    "records": replace(PREFETCHED, lost="record"),
    "records, lossless": Case("lossless_w_g3", prefetch=True, lost="record"),
    "waits": replace(PREFETCHED, lost="wait"),
    "waits, no prefetch": Case("sdp4bit", lost="wait"),
    "waits, lossless": Case("lossless_w_g3", prefetch=True, lost="wait"),
    "waits, qsdp": Case("qsdp", prefetch=True, lost="wait"),
    "waits, replicas": Case("eden4", replicas=True, prefetch=True, lost="wait"),
    "waits for all nodes": Case("eden4", 1, replicas=True, lost="wait for all nodes"),
    "records, replicas": Case("eden4", 1, replicas=True, lost="record"),
    "record of the row": Case("eden4", 2, replicas=True, lost="record of the row"),
    "record of the sums": Case("eden4", 1, replicas=True, lost="record of the sums"),
}


@pytest.mark.parametrize("title", thinned(CONTROLS, lambda title: title == "records"))
@on_ranks(1, environment=OWN_GROUP)
def test_a_lost_order_is_noticed(title: str) -> None:
    assert any("ds_quant/" in fault for fault in faults(CONTROLS[title]))


@pytest.mark.parametrize("waits", [False, True], ids=["as it is", "control"])
@on_ranks(1, environment=OWN_GROUP)
def test_no_reduce_scatter_waits_for_the_sums_of_other_nodes(waits: bool) -> None:
    """Nor does the compute before it, for which it waits.

    waits: True to wait for the sums in the reduce-scatter, which the test must notice.
    """
    not_awaited: list[int] = []  # operations between the nodes, by reduce-scatter
    call = QuantizedReduceScatter.__call__

    def watch(model: Any, front: AttachedModel, step: int) -> None:
        inter = f"group {id(front.run.world.hierarchy.inter.process_group)}"

        def called(self: Any, output_tensor: Tensor, *args: Any, **options: Any) -> None:
            call(self, output_tensor, *args, **options)
            if waits:
                self.all_reduce(None, output_tensor)
            stream = torch.cuda.current_stream()
            posted = stream._model.streams[inter].clock[inter]
            not_awaited.append(posted - stream.clock.get(inter, 0))

        QuantizedReduceScatter.__call__ = called  # the process of a rank ends with the test

    assert faults(Case("eden4", 1, replicas=True, after_attach=watch)) == []
    modules = LAYERS + 1
    assert len(not_awaited) == STEPS * modules
    for first in range(0, len(not_awaited), modules):
        of_step = not_awaited[first : first + modules]
        if waits:
            assert of_step == [0] * modules
        else:  # those of the module and of all before it
            assert 0 < of_step[0] and all(less < more for less, more in pairwise(of_step)), of_step


# Without a node shard or replicas a gather or reduction is waited for on the stream that has posted
# it, so its memory needs no record and a control has none to lose. Not so where the user unshards
# modules ahead: the next gather, on FSDP2's stream, waits for their hop between nodes.
WITHOUT_RECORDS = {
    "qsdp": Case("qsdp", prefetch=True),
    "qsdp, unshard asynchronously": Case(
        "qsdp", prefetch=True, after_attach=unshard_asynchronously
    ),
}


@pytest.mark.parametrize("title", thinned(WITHOUT_RECORDS, lambda title: title == "qsdp"))
@on_ranks(1, environment=OWN_GROUP)
def test_what_its_own_stream_waits_for_needs_no_record(title: str) -> None:
    device = trained(WITHOUT_RECORDS[title])
    assert device.records == 0
    assert device.faults == []


@on_ranks(1, environment=OWN_GROUP)
def test_what_another_stream_waits_for_records_its_memory() -> None:
    """An exchange that is posted after the optimizer step ends on FSDP2's stream of gathers."""
    assert trained(PREFETCHED).records > 0
