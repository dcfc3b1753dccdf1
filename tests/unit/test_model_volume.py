"""Volumes of a model whose parts have ranks of their own, and those of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_quant.config.schema import parse_block
from ds_quant.policy.cost import CommVolume, ParamSpec, comm_volume
from ds_quant.policy.model_volume import ModelVolume

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fsdp2.md"
HIDDEN, HEAD, EXPERT, EXPERTS, LAYERS, VOCABULARY = 2048, 128, 768, 128, 48, 151936
NODES = GPUS = 8
STAGE = 3  # FSDP2 shards as ZeRO-3 does


def spec(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(name, shape, torch.bfloat16, trainable=True)


def dense_part() -> Iterator[ParamSpec]:
    """Qwen3-30B-A3B without its experts."""
    for name in ("embed", "head"):
        yield spec(name, VOCABULARY, HIDDEN)
    for _ in range(LAYERS):
        yield spec("q", 4096, HIDDEN)
        yield spec("k", 512, HIDDEN)
        yield spec("v", 512, HIDDEN)
        yield spec("o", HIDDEN, 4096)
        yield spec("router", EXPERTS, HIDDEN)
        for name in ("norm", "norm2"):
            yield spec(name, HIDDEN)
        for name in ("q_norm", "k_norm"):
            yield spec(name, HEAD)
    yield spec("norm", HIDDEN)


def experts_of_a_gpu() -> Iterator[ParamSpec]:
    for _ in range(LAYERS):
        yield spec("gate_up", EXPERTS // GPUS, 2 * EXPERT, HIDDEN)
        yield spec("down", EXPERTS // GPUS, HIDDEN, EXPERT)


def volume(scheme: str, specs: Iterator[ParamSpec], *, ranks: int, node_size: int) -> CommVolume:
    """Return the volume of a part of the model that lies on ``ranks`` ranks."""
    return comm_volume(
        parse_block({"scheme": scheme}).to_scheme(),
        STAGE,
        specs,
        ranks=ranks,
        node_size=node_size,
        gradient_dtype=torch.bfloat16,
    )


def parts(scheme: str) -> ModelVolume:
    dense = volume(scheme, dense_part(), ranks=NODES * GPUS, node_size=GPUS)
    experts = volume(scheme, experts_of_a_gpu(), ranks=NODES, node_size=1)
    return ModelVolume((dense, experts))


@pytest.mark.parametrize("scheme", ["full_precision", "qsdp", "sdp4bit", "eden4", "lossless_w_g3"])
def test_the_page_has_the_volumes_of_a_mixture_of_experts(scheme: str) -> None:
    """Dense part, experts and both together, with 1 and 8 micro-steps."""
    model = parts(scheme)
    cells = []
    for micro_steps in (1, 8):
        for each in (*model.parts, model):
            cells.append(f"{each.step_bytes(STAGE, micro_steps=micro_steps):.2f}")
    kept = model.memory * model.numel / 1e9
    row = f"| `{scheme}` | {' | '.join(cells)} | {kept:.2f} |"
    assert row in PAGE.read_text("utf-8"), row


def test_a_model_of_one_part_has_its_figures_bit_for_bit() -> None:
    (dense, _) = parts("eden4").parts
    model = ModelVolume((dense,))
    for name in ("numel", "trained", "memory", "partial_sums", "full_precision_share", "kept"):
        assert getattr(model, name) == getattr(dense, name), name
    for micro_steps in (1, 4):
        for method in ("step_bytes", "intra_bytes", "received_per_node", "received"):
            figure = getattr(model, method)(3, micro_steps=micro_steps)
            assert figure == getattr(dense, method)(3, micro_steps=micro_steps), method


def test_a_part_that_stays_in_a_node_counts_inside_it() -> None:
    dense, _ = parts("full_precision").parts
    inside = volume("full_precision", experts_of_a_gpu(), ranks=2, node_size=2)
    model = ModelVolume((dense, inside))
    share = dense.numel / model.numel
    assert model.step_bytes(3) == pytest.approx(6 * share, rel=1e-3)
    assert model.intra_bytes(3) == pytest.approx(6, rel=1e-3)
    assert model.received_per_node(3, micro_steps=1) == pytest.approx(6 * share * 7 / 8, rel=1e-3)
    alone = ModelVolume((inside,))
    assert alone.step_bytes(3) == pytest.approx(6, rel=1e-3) and alone.intra_bytes(3) == 0
