"""Models whose frozen base holds bit patterns stored as floats, as other libraries do."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.distributed.models import FEATURES, TARGETS, Regression

IN, OUT = 256, 384  # of the base: 49,152 bf16 values hold 98,304 weights of 8 bits


class Foreign(nn.Parameter):
    """A Parameter subclass that is not torch's, without any mark."""


class Packed(nn.Module):
    """A frozen matrix of 8-bit integers whose bytes are stored as bf16, and how it is told.

    kind: "subclass" of Parameter, "quant_state" or "bnb_quantized" on a plain one, "module state"
    on the module (bitsandbytes), "W_q" as HQQ names it.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        codes = torch.randint(-128, 128, (2 * OUT, IN), dtype=torch.int8)
        make = Foreign if kind == "subclass" else nn.Parameter
        weight = make(codes.view(torch.bfloat16).clone(), requires_grad=False)
        if kind in ("quant_state", "bnb_quantized"):
            setattr(weight, kind, True)
        if kind == "module state":
            self.quant_state = object()
        self.name = "W_q" if kind == "W_q" else "weight"
        self.register_parameter(self.name, weight)

    def forward(self, x: Tensor) -> Tensor:
        codes = getattr(self, self.name).data.view(torch.int8)
        return x @ (codes.to(x.dtype) / 2048).T


def bitsandbytes_linear() -> nn.Module:
    """PEFT's layout for QLoRA under ZeRO-3: 4-bit weights stored as bf16."""
    import bitsandbytes as bnb

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    layer = bnb.nn.Linear4bit(
        IN, 2 * OUT, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
    )
    layer.load_state_dict(nn.Linear(IN, 2 * OUT, bias=False).state_dict())
    return layer.to("cpu").requires_grad_(False)


class Adapted(Regression):
    """A packed base between trained layers, with a trained low-rank correction."""

    def __init__(self, base: Callable[[], nn.Module]) -> None:
        super().__init__()
        del self.second, self.norm
        self.first, self.last = nn.Linear(FEATURES, IN), nn.Linear(2 * OUT, TARGETS)
        self.base = base()
        self.down = nn.Linear(IN, 16, bias=False)
        self.up = nn.Linear(16, 2 * OUT, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.last(torch.tanh(self.base(hidden) + self.up(self.down(hidden))))
        return (out.float() - y).square().mean()
