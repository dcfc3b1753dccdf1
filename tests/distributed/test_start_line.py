"""The whole start-up line, every figure of it by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn

from tests.distributed.harness import run
from tests.distributed.models import build, heard, settings


class Small(nn.Module):
    """Weights of 8192 and 4096 elements and a bias of 128: 12,416 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32, bias=False)


def config(stage: int, scheme: str, node_size: int, micro_steps: int, **block: Any) -> dict:
    fields = {"scheme": scheme, "node_size": node_size, "backend": "torch", **block}
    zero = {"overlap_comm": stage == 3 and scheme == "qsdp"}
    return settings(stage, fields, dtype="bf16", accumulation=micro_steps, zero=zero)


# Bytes of the up weight, the down weight and the bias, which is sent in bf16: 256. Codes and scales
# are filled up to 16 bytes each.
LINES = {
    # 4 rows of 2048 + 16 + 16 and of 1024 + 16 + 16: 8320 + 4224 + 256 = 12,800 for weights and for
    # gradients. A micro-step gathers twice and reduces once: 38,400 / 12,416. In full precision
    # 512 of 25,600.
    "qsdp ZeRO-3": (
        config(3, "qsdp", 4, 2),
        "qsdp on ZeRO-3, 3.09 B/param/micro-step (bf16 6.00), 1 small tensor unquantized "
        "(2.0 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 times per "
        "micro-batch; gradients are not reduced during backward: reduce_bucket_size=1000000 holds "
        "all 12416 elements (try 1552)",
    ),
    # Between nodes: weights once, 4160 + 2112 + 256 = 6528; gradients once, 4352 + 2176 + 256 =
    # 6784: 13,312 / 12,416, and 512 of 13,312 in full precision. Inside: 4 gathers in bf16, 24,832;
    # gradients twice, 8448 + 4224 + 256 = 12,928: 125,184 / 12,416. Half of the weights is kept,
    # half of the gradients is held in fp32.
    "sdp4bit ZeRO-3": (
        config(3, "sdp4bit", 2, 2, warmup_steps=7),
        "sdp4bit on ZeRO-3, 1.07 B/param/step between nodes (bf16 12.00), 1 small tensor "
        "unquantized (3.8 % of bytes); 2 x 2 ranks; torch kernels; weights fetched 2 times per "
        "micro-batch; 10.08 B/param inside a node; keeps 1.00 B/param (1.24e-05 GB) more on every "
        "rank; gradients are sent between nodes once per optimizer step; buffering them takes "
        "2.00 B/param (2.48e-05 GB) on every rank; from step 7 on",
    ),
    # One row: weights 4112 + 2064 + 256 = 6432, gradients 6784 once: 13,216 / 12,416, and
    # 512 of 13,216 in full precision. Inside: the same weights, gradients 12,928 per micro-step:
    # 45,216 / 12,416.
    "sdp4bit ZeRO-2": (
        config(2, "sdp4bit", 2, 3),
        "sdp4bit on ZeRO-2, 1.06 B/param/step between nodes (bf16 14.00), 1 small tensor "
        "unquantized (3.9 % of bytes); 2 x 2 ranks; torch kernels; 3.64 B/param inside a node; "
        "gradients are sent between nodes once per optimizer step; buffering them takes "
        "2.00 B/param (2.48e-05 GB) on every rank",
    ),
    # One row: 8256 + 4128 + 256 = 12,640 for weights and, in each of three micro-steps, for
    # gradients: 50,560 / 12,416 in a step, though nothing waits. In full precision 512 of 25,280.
    "qsdp ZeRO-2 on one node": (
        config(2, "qsdp", 4, 3),
        "qsdp on ZeRO-2, 4.07 B/param/step (bf16 14.00), 1 small tensor unquantized "
        "(2.0 % of bytes); 1 x 4 ranks; torch kernels",
    ),
    # 2.36 bits of every weight: 2417 + 1209 + 38 = 3664 bytes, gradients 24,832 bytes once:
    # 28,496 / 12,416, and with 16 bits 4.00; inside the node in each of three micro-steps:
    # 78,160 / 12,416. In full precision 24,832 of 28,496.
    "lossless ZeRO-2": (
        config(2, "lossless", 2, 3),
        "lossless on ZeRO-2, 2.30 B/param/step between nodes (bf16 14.00), all gradients "
        "unquantized (87.1 % of bytes); 2 x 2 ranks; torch kernels; 6.30 B/param inside a node; "
        "gradients are sent between nodes once per optimizer step; buffering them takes "
        "2.00 B/param (2.48e-05 GB) on every rank; traffic depends on the learning rate: "
        "4.00 B/param/step at most",
    ),
    # Two gathers in bf16, 49,664, and gradients of 8448 + 4224 + 256 = 12,928: 62,592 / 12,416. In
    # full precision 24,832 + 256 of 37,760, gathers counted once.
    "sdp4bit ZeRO-3 on one node": (
        config(3, "sdp4bit", 4, 1),
        "sdp4bit on ZeRO-3, 5.04 B/param/micro-step (bf16 6.00), all weights, 1 small tensor "
        "unquantized (66.4 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 times per "
        "micro-batch; weights are sent in full precision: this scheme compresses them between "
        'nodes only, and there is one node; set weights.intra, such as {"bits": 8}, or use scheme '
        '"qsdp"',
    ),
    "lossless ZeRO-3 on one node": (
        config(3, "lossless", 4, 1),
        "lossless on ZeRO-3, 6.00 B/param/micro-step (bf16 6.00), all weights, all gradients "
        "unquantized (100.0 % of bytes); 1 x 4 ranks; torch kernels; weights fetched 2 times per "
        "micro-batch; nothing to gain on one node: remove the block, or use "
        "zero_optimization.stage 2, where they are compressed on one node too",
    ),
}


def _logged_rank() -> dict[str, tuple[list[str], dict]]:
    """By case what was logged at start-up, on this rank if it were rank 0, and what is reported."""
    import ds_quant

    logged = heard("info_rank0")
    found = {}
    for name, (settings_of_case, _) in LINES.items():
        logged.clear()
        engine = build(settings_of_case, Small)
        found[name] = list(logged), ds_quant.report(engine)
        engine.destroy()
    return found


@cache
def logged() -> list[dict[str, tuple[list[str], dict]]]:
    return run(_logged_rank, 4)


@pytest.mark.parametrize("case", LINES)
def test_the_line_says_what_crosses_the_wire_and_what_is_kept(case: str) -> None:
    line = LINES[case][1]
    for found in logged():
        lines, report = found[case]
        assert lines == [f"quantized_comm: {report['line']}"]
        peak = f"; extra memory: up to {report['expected_peak_bytes'] / 1e9:.2g} GB"
        assert report["line"].replace(peak, "", 1) == line and peak in report["line"]
