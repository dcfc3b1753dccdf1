"""The demo's own parts: batches, configs, the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts that import each other, not a package

import compare  # noqa: E402
import schemes  # noqa: E402
import text  # noqa: E402


def batch(**address: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(4096).remainder(251).to(torch.uint8)
    address = {"seed": 0, "step": 0, "rank": 0} | address
    return text.batch(tokens, batch_size=4, seq_len=16, **address)


def test_batch_is_a_function_of_all_parts_of_its_address() -> None:
    first = batch(seed=3, step=5, rank=1)[0]
    torch.rand(7)  # nothing is drawn from a shared generator
    assert torch.equal(batch(seed=3, step=5, rank=1)[0], first)
    for other in ({"seed": 1}, {"step": 1}, {"rank": 1}):
        assert not torch.equal(batch()[0], batch(**other)[0])


def test_configs_of_all_schemes_differ_in_the_block_only() -> None:
    listing = "deepspeed_plain,full_precision,qsdp_w4g4:weights.bits=3"
    args = compare.parse_args(["--schemes", listing, "--seed", "7", "--node-size", "2"])
    configs = [schemes.deepspeed_config(entry, args) for entry in args.schemes]
    blocks = [config.pop("quantized_comm", None) for config in configs]
    assert blocks[0] is None and blocks[1] == {
        "scheme": "full_precision",
        "seed": 7,
        "node_size": 2,
    }
    assert blocks[2] == {"scheme": "qsdp_w4g4", "seed": 7, "node_size": 2, "weights": {"bits": 3}}
    assert configs[0] == configs[1] == configs[2]
