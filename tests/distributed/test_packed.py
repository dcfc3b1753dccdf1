"""Packed weights, which are bit patterns stored as floats (QLoRA), never lose a byte."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_quant.config.presets import AUTOTUNE, preset_names
from tests.distributed.models import FEATURES, TARGETS, Regression, Run
from tests.distributed.rows import Table, Way, same_weights, seen_in

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


def adapted(kind: str) -> nn.Module:
    base = bitsandbytes_linear if kind == "bitsandbytes" else partial(Packed, kind)
    return Adapted(base).to(torch.bfloat16)


TABLE = Table(__name__)
KINDS = ["subclass", "quant_state", "bnb_quantized", "module state", "W_q"]
QUICK = ("module state",)
QSDP, INTRA = {"scheme": "qsdp"}, {"scheme": "sdp4bit", "weights": {"intra": {"bits": 8}}}
LEARNED = {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [1]}
# Every preset; gathers inside a node quantized; autotune where qsdp is what it can take.
BLOCKS: list[dict[str, Any]] = [
    *({"scheme": name, "node_size": 2} for name in (*preset_names(), AUTOTUNE)),
    {"node_size": 2, **INTRA}, INTRA, {**QSDP, "weights": LEARNED},
]  # fmt: skip


def keeps_every_byte(run: Run, other: Run) -> None:
    """All that forward and backward see of the base is what they see without the plugin."""
    before, after = (
        {entry[1:] for entry in seen_in(r) if "base." in entry[1]} for r in (run, other)
    )
    assert after == before and len(before) == len({name for name, _ in before}) > 0
    assert other.losses[0] == pytest.approx(run.losses[0], rel=0.05)
    line = other.report["line"]
    counted = other.report["scheme"] != "lossless" and "nothing quantized" not in line
    assert ("1 packed" in line) == counted, line


for kind, blocks in (*((kind, [QSDP, BLOCKS[-3]]) for kind in KINDS), ("bitsandbytes", BLOCKS)):
    TABLE.add(
        kind if kind in KINDS else f"{kind}, every scheme", Way(block=None),
        *(Way(block=block) for block in blocks), holds=keeps_every_byte, block={}, world=4,
        quick=(3,) if kind in QUICK else (),
        model=partial(adapted, kind), stages=(3,),
    )  # fmt: skip
for name, block in {"qsdp": QSDP, "sdp4bit": {"scheme": "sdp4bit"}, "intra": INTRA}.items():
    TABLE.add(
        f"resumed {name}", Way(), Way(resumes=True), holds=same_weights, save_at=1, world=4,
        block={"node_size": 2, **block}, model=partial(adapted, "subclass"), stages=(3,),
        quick=(3,) if name == "sdp4bit" else (),
    )  # fmt: skip


@pytest.mark.parametrize(("title", "stage"), TABLE.params())
def test_packed_weights_keep_every_byte(title: str, stage: int) -> None:
    """They are known by each mark, and saved and resumed as they are."""
    if "bitsandbytes" in title and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    TABLE.check(title, stage)
