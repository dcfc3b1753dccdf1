"""A model under FSDP2, with the interface of a DeepSpeed engine that speed_worker.py uses.

May import torch, ds_quant and gpt.
"""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from ds_quant import fsdp2
from ds_quant.fsdp2.attaching import front_of
from ds_quant.fsdp2.model import AttachedModel

# Shards and optimizer states are fp32; weights are gathered and gradients reduced in bf16.
# The model computes in fp32, as under the other engines: see gpt.py.
PRECISION = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
)


class FSDP2Engine:
    """A sharded model with its optimizer. ``step`` is called after every micro-step."""

    def __init__(
        self,
        model: FSDPModule,
        optimizer: Optimizer,
        front: AttachedModel | None,
        accumulation: int,
    ) -> None:
        self.module: Any = model
        self.front = front
        self.global_steps = 0
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._micro_step = 0

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def __call__(self, *inputs: Tensor) -> Tensor:
        is_last = self._micro_step == self._accumulation - 1
        self.module.set_is_last_backward(is_last)
        # Without the plugin replicas exchange gradients in every backward, unless told otherwise.
        self.module.set_requires_all_reduce(is_last)
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()

    def step(self) -> None:
        self._micro_step = (self._micro_step + 1) % self._accumulation
        if self._micro_step == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.global_steps += 1

    def finish_messages(self) -> None:
        """Wait for weights that are still being sent between nodes. Gathers inside nodes do."""
        if self.front is not None and self.front.copies is not None:
            self.front.copies.finish()


def build(model: GPT, config: dict[str, Any], *, nodes: int) -> FSDP2Engine:
    """Shard a model over all ranks, or over the ranks of a node with replicas between nodes.

    config: "fsdp2" is "flat" or "hsdp". "quantized_comm", if there, is the block of the plugin.
    """
    mesh = _mesh(config["fsdp2"], nodes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=PRECISION)
    sharded = fully_shard(model, mesh=mesh, mp_policy=PRECISION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["optimizer"]["params"]["lr"])
    front = None
    if "quantized_comm" in config:
        fsdp2.attach(model, config["quantized_comm"], optimizer=optimizer)
        front = front_of(model)
    return FSDP2Engine(sharded, optimizer, front, config["gradient_accumulation_steps"])


def _mesh(kind: str, nodes: int) -> DeviceMesh:
    world = torch.distributed.get_world_size()
    if kind == "hsdp":
        return init_device_mesh(
            "cpu", (nodes, world // nodes), mesh_dim_names=("replicate", "shard")
        )
    return init_device_mesh("cpu", (world,))
