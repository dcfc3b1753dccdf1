"""A model under DDP, with the interface of a DeepSpeed engine that speed_worker.py uses.

May import torch, ds_quant and gpt.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from gpt import GPT
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ds_quant import ddp

POWER_SGD_RANK = 4
# PowerSGD's hook posts collectives from callbacks, which over gloo ends with several buckets.
ONE_BUCKET_MB = 100_000


class DDPEngine:
    """A replicated model with its optimizer. ``step`` is called after every micro-step."""

    def __init__(
        self, model: DistributedDataParallel, optimizer: Optimizer, accumulation: int
    ) -> None:
        self.module = model
        self.global_steps = 0
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._micro_step = 0

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def __call__(self, *inputs: Tensor) -> Tensor:
        is_last = self._micro_step == self._accumulation - 1
        with nullcontext() if is_last else self.module.no_sync():
            loss: Tensor = self.module(*inputs)
        return loss

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()

    def step(self) -> None:
        self._micro_step = (self._micro_step + 1) % self._accumulation
        if self._micro_step == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.global_steps += 1


def build(model: GPT, config: dict[str, Any]) -> DDPEngine:
    """Wrap a model whose weights and gradients are fp32.

    config: "ddp" is "plain", "bf16" or "powersgd": the hook of torch. "quantized_comm", if there,
        is the block of the plugin.
    """
    kind = config["ddp"]
    cap = ONE_BUCKET_MB if kind == "powersgd" else None
    replicated = DistributedDataParallel(model, bucket_cap_mb=cap)
    if kind == "bf16":
        replicated.register_comm_hook(None, send_in_bf16)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=2
        )
        replicated.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["optimizer"]["params"]["lr"])
    if "quantized_comm" in config:
        ddp.attach(replicated, config["quantized_comm"], optimizer=optimizer)
    return DDPEngine(replicated, optimizer, config["gradient_accumulation_steps"])


def send_in_bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
    """Run torch's bf16 hook, which DDP refuses by its name where there is no CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)
