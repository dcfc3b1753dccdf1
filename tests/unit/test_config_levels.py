"""Presets of two levels as the papers give them, and what their settings refuse."""

from __future__ import annotations

import pytest

from ds_quant.codec.codec import GroupCodec
from ds_quant.config.schema import ConfigError, parse_block
from ds_quant.policy import refusals


def absmax(bits: int, group_size: int, rounding: str) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=group_size, range="absmax", rounding=rounding)


def minmax(bits: int, rounding: str) -> GroupCodec:
    return GroupCodec(bits=bits, group_size=1024, rounding=rounding)


W4, W4_PAPER = absmax(4, 2048, "nearest"), absmax(4, 2048, "stochastic")
G4, G8 = absmax(4, 128, "stochastic"), absmax(8, 128, "stochastic")
ZEROPP = absmax(4, 4096, "nearest")
GAUSSIAN = {
    bits: GroupCodec(bits=bits, group_size=128, range="gaussian", rounding="nearest")
    for bits in (2, 3, 4)
}
# scheme: weights, gradients, gradients inside a node, difference, node shard, rotation
PRESETS = {
    "full_precision": (None, None, None, False, False, 0),
    "qsdp": (minmax(8, "random_shift"), minmax(8, "stochastic"), None, False, False, 0),
    "qsdp_w4g4": (minmax(4, "random_shift"), minmax(4, "stochastic"), None, False, False, 0),
    **{f"eden{bits}": (W4, codec, G8, True, True, 128) for bits, codec in GAUSSIAN.items()},
    "sdp4bit": (W4, G4, G8, True, True, 32),
    "sdp4bit_paper": (W4_PAPER, G4, G8, True, True, 32),
    "tlq": (None, G4, G8, False, False, 0),
    "tlq_hs": (None, G4, G8, False, False, 32),
    "ulq": (None, G4, G4, False, False, 0),
    "qwd": (W4, None, None, True, True, 0),
    "qw4": (W4, None, None, False, False, 0),
    "zeropp": (absmax(8, 8192, "nearest"), ZEROPP, ZEROPP, False, True, 0),
    "lossless": (None, None, None, False, True, 0),
    **{f"lossless_w_g{b}": (None, codec, G8, False, True, 128) for b, codec in GAUSSIAN.items()},
}
LOSSLESS = (
    "lossless",
    "lossless_w_g4",
    "lossless_w_g3",
    "lossless_w_g2",
)  # presets with exact weight differences


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_what_its_comment_says(name: str) -> None:
    s = parse_block({"scheme": name}).to_scheme()
    found = (
        s.weights,
        s.gradients,
        s.gradients_intra,
        s.difference,
        s.block.keeps_node_shard,
        s.block.gradients.rotation,
    )
    assert found == PRESETS[name]
    assert s.lossless == (name in LOSSLESS)


def test_lossless_differences_on_one_rank_per_node_need_a_full_copy() -> None:
    config, where = parse_block({"scheme": "lossless"}), {"world": 2, "node_size": 1}
    with pytest.raises(ConfigError, match="weights.lossless=true with one rank per node"):
        refusals.refuse_full_replica(config, **where, model_bytes=None)


def test_hybrid_on_one_rank_per_node_is_told_what_else_is_exact() -> None:
    with pytest.raises(ConfigError) as caught:
        refusals.refuse_full_replica(
            parse_block({"scheme": "hybrid"}), world=2, node_size=1, model_bytes=14e9
        )
    said = str(caught.value)
    for text in ("14 GB", "stage 2", '"full_precision"; "lossless" under stage 2 is exact, too'):
        assert text in said


def test_lossless_differences_take_the_place_of_quantized_ones() -> None:
    s = parse_block({"scheme": "sdp4bit", "weights": {"lossless": True}}).to_scheme()
    assert (s.weights, s.difference, s.lossless, s.gradients) == (None, False, True, G4)
