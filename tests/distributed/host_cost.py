"""Counts the host's work of a training step on one rank of many: calls, launches and messages.

    python -m tests.distributed.host_cost                # the rows of test_host_cost.py
    python -m tests.distributed.host_cost --llama-layer  # one layer of Llama-7B on 4 nodes of 8

Every row is a process in a fake world, see benchmarks/fake_world.py. Counts are those of rank 0 in
one steady step. Times are CPU times of the process; they need a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import fake_world
import torch
from fake_world import World
from torch import Tensor, nn

import ds_quant
from ds_quant.comm.reduction_plan import Slicing, presumed_pace
from tests.distributed import counting, harness

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

LAYERS, WIDTH = 4, 256
WARM = 3  # ZeRO-3 records its trace in the second step
TIMED = 5
SHOWN = ("calls", "views", "launches", "torch", "messages", "all views", "all torch")

# Dimensions of a Llama-7B layer, divided by SCALE. Memory and arithmetic, which are no work of the
# host on a GPU, take a 16th; tensors, ranks and slices are those of the full size. With a larger
# SCALE shards would have fewer groups than slices, and norms would share a message.
SCALE = 4
HIDDEN, INTERMEDIATE = 4096 // SCALE, 11008 // SCALE
LLAMA_NUMEL = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN


class Block(nn.Module):
    """Six parameters: a norm and two matrices with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


class LlamaLayer(nn.Module):
    """Seven matrices and two norms. The arithmetic is a placeholder."""

    width = HIDDEN

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.RMSNorm(HIDDEN)
        self.after = nn.RMSNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.o(self.v(y) * torch.sigmoid(self.q(y) * self.k(y)))
        y = self.after(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """24 parameters."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training to count.

    block: of ``quantized_comm``; None: DeepSpeed alone.
    zero: keys of ``zero_optimization`` besides the stage.
    replicas: under FSDP2 every node holds one (HSDP).
    """

    world: World
    stage: int
    block: dict[str, Any] | None
    zero: dict[str, Any]
    model: Callable[[], nn.Module]
    replicas: bool = False

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed config."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "overlap_comm": False, **self.zero},
            "bf16": {"enabled": True},
        }
        if self.block is not None:
            config["quantized_comm"] = {
                "node_size": self.world.ranks_per_node,
                "checksum_steps": 0,
                "metrics": {"interval": 0},
                **self.block,
            }
        return config


# ---- in a rank ----


def cost(case: Case) -> dict[str, float]:
    """Return counts and CPU milliseconds of a steady step of rank 0."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    fake_world.join(case.world)
    with fake_world.without_handshake(), fake_world.faked_cuda() as runner:
        model = case.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=case.config())[0]
        for _ in range(WARM):
            _step(engine)
        runner.launches.clear()
        before = _messages(engine)
        with counting.calls() as counts:
            _step(engine)
        counts["messages"] = _messages(engine) - before
        counts["launches"] = runner.launches.total()
        with counting.operations() as operations:
            _step(engine)
        milliseconds = min(_timed(engine) for _ in range(TIMED))
        if engine.skipped_steps:
            raise RuntimeError(f"{engine.skipped_steps} steps were skipped")
    parameters = sum(1 for _ in model.parameters())
    return {**counts, **operations, "parameters": parameters, "milliseconds": milliseconds}


def _step(engine: DeepSpeedEngine) -> None:
    x = torch.ones(1, engine.module.width, dtype=torch.bfloat16)
    engine.backward(engine(x).sum())
    engine.step()


def _timed(engine: DeepSpeedEngine) -> float:
    start = time.process_time()
    _step(engine)
    return 1e3 * (time.process_time() - start)


def fsdp2_cost(case: Case) -> dict[str, float]:
    """Return counts of a steady step of rank 0 under FSDP2.

    The model is one wrapped module in a root without parameters, so that its weights are gathered
    for forward and again for backward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from ds_quant.fsdp2 import attaching

    fake_world.join(case.world)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    block = dict(case.block or {})
    if case.replicas:
        shape = case.world.nodes, case.world.ranks_per_node
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cpu", (case.world.ranks,))
        block["node_size"] = case.world.ranks_per_node
    root = nn.Sequential(fully_shard(case.model(), mesh=mesh, mp_policy=bf16))
    model = fully_shard(root, mesh=mesh, mp_policy=bf16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    answer = patch.object(attaching, "handshake", return_value=case.world.ranks_per_node)
    with answer, fake_world.faked_cuda() as runner:
        front = attaching.attach(model, block, optimizer=optimizer)
        assert front is not None

        def step() -> None:
            model(torch.ones(1, root[0].width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM):
            step()
        runner.launches.clear()
        before = sum(front.run.traffic.collectives.values())
        with counting.calls() as counts:
            step()
        counts["messages"] = sum(front.run.traffic.collectives.values()) - before
        counts["launches"] = runner.launches.total()
        with counting.operations() as operations:
            step()
    return {**counts, **operations, "parameters": sum(1 for _ in model.parameters())}


def _messages(engine: DeepSpeedEngine) -> int:
    """Return the number of collectives of the plugin so far, 0 without it."""
    report = ds_quant.report(engine)
    return sum(report["collectives"].values()) if report else 0


# ---- in the parent process ----


def measure(case: Case) -> dict[str, float]:
    """Run a case in a new process."""
    return harness.run(cost, 1, case, environment=harness.OWN_GROUP)[0]


def measure_fsdp2(case: Case) -> dict[str, float]:
    """Run a case in a new process, under FSDP2."""
    return harness.run(fsdp2_cost, 1, case, environment=harness.OWN_GROUP)[0]


def small_layers(world: World, stage: int, scheme: str | None) -> Case:
    """Return a case of small layers. ZeRO-3: buckets of about a layer; else DeepSpeed's default."""
    zero = {}
    if stage == 3:
        bucket = 2 * WIDTH * WIDTH + 8 * WIDTH
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket}
    block = None if scheme is None else {"scheme": scheme}
    return Case(world=world, stage=stage, block=block, zero=zero, model=Blocks)


def llama_layer(scheme: str | None) -> Case:
    """Return a case of one Llama layer under ZeRO-3.

    Norms persist and weights are fetched again for backward. There is one bucket of gradients, in
    the number of slices that the full size has over NVLink.
    """
    block = None
    if scheme is not None:
        nvlink = Slicing(pace=presumed_pace(torch.device("cuda"), "nccl"))
        block = {"scheme": scheme, "slices": nvlink.slices(LLAMA_NUMEL * SCALE**2)}
    zero = {
        "stage3_param_persistence_threshold": HIDDEN,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 50_000_000 // SCALE**2,
        "reduce_bucket_size": 2 * LLAMA_NUMEL,
    }
    return Case(world=World(4, 8), stage=3, block=block, zero=zero, model=LlamaLayer)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--schemes", nargs="+", default=["none", "qsdp", "sdp4bit"], help="none: DeepSpeed alone")
    add("--llama-layer", action="store_true", help="that, under ZeRO-3 on 4 nodes of 8 ranks")
    args = parser.parse_args(argv)
    for name in args.schemes:
        scheme = None if name == "none" else name
        if args.llama_layer:
            _show(name, llama_layer(scheme))
        else:
            for stage, n in product((2, 3), (2, 4, 8)):
                _show(name, small_layers(World(n, n), stage, scheme))
    return 0


def _show(name: str, case: Case) -> None:
    found = measure(case)
    calls, views, launches, others, messages, all_views, all_others = (
        round(found.get(key, 0)) for key in SHOWN
    )
    print(
        f"{name} ZeRO-{case.stage} {case.world}: {found['milliseconds']:.1f} ms, "
        f"{messages} messages; {calls} calls ({calls / found['parameters']:.1f} per parameter), "
        f"{views} views and {launches} + {others} kernels of the plugin; {all_views} views and "
        f"{launches + all_others} kernels in all",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
