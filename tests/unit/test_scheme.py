"""Scheme: what it leaves in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_quant.config.schema import parse_block
from ds_quant.policy.scheme import Scheme


def scheme(**keys: Any) -> Scheme:
    return Scheme.of(parse_block({"scheme": "qsdp", **keys}))


@pytest.mark.parametrize(
    "name, shape, dtype, reason",
    [
        ("block.weight", (64, 64), torch.bfloat16, None),
        ("block.weight", (64, 64), torch.float32, None),
        ("conv.weight", (4, 4, 16, 16), torch.float16, None),
        ("block.weight", (64, 32), torch.bfloat16, None),  # exactly min_numel
        ("block.weight", (2047, 1), torch.bfloat16, "small"),
        ("block.weight", (0, 64), torch.bfloat16, "small"),
        ("block.bias", (100000,), torch.bfloat16, "1-D"),
        ("scale", (), torch.bfloat16, "1-D"),
        ("table", (64, 64), torch.int8, "int8"),
        ("mask", (64, 64), torch.bool, "bool"),
        ("block.weight", (64, 64), torch.float8_e4m3fn, "float8_e4m3fn"),
        ("block.weight", (64, 64), torch.float64, "float64"),
        ("lm_head.weight", (64, 64), torch.bfloat16, "excluded"),
        ("model.embed.weight", (64, 64), torch.bfloat16, "excluded"),
        ("LM_HEAD.weight", (64, 64), torch.bfloat16, None),  # patterns mind the case
    ],
)
def test_skip_reason(name: str, shape: tuple, dtype: torch.dtype, reason: str | None) -> None:
    made = scheme(exclude=["lm_head.*", "*.embed.*"])
    assert made.skip_reason(name, shape, dtype) == reason
    assert made.skip_reason(name, shape, dtype, packed=True) == "packed"


@pytest.mark.parametrize(
    ("name", "pattern", "excluded"),
    [
        ("_orig_mod.lm_head.weight", "lm_head.*", True),  # torch.compile of the model
        ("layers.0._orig_mod.mlp.weight", "layers.0.mlp.*", True),  # and of a block
        ("base_model.model.lm_head.weight", "lm_head.*", True),  # PEFT
        ("_orig_mod.base_model.model.model.embed.weight", "model.embed.weight", True),
        ("_orig_mod.lm_head.weight", "_orig_mod.lm_head.*", True),  # written as it is called
        ("my_orig_mod.lm_head.weight", "lm_head.*", False),
        ("other_base_model.model.head.weight", "head.*", False),
        ("_orig_mod.lm_head.weight", "embed.*", False),
    ],
)
def test_patterns_match_without_what_wrappers_put_into_names(
    name: str, pattern: str, excluded: bool
) -> None:
    reason = scheme(exclude=[pattern]).skip_reason(name, (64, 64), torch.bfloat16)
    assert (reason == "excluded") is excluded
