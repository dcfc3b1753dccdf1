"""Measurements of seconds for papers.py: theory, bytes by formula, kernels on one core.

Every function returns figures by name. May import theory, table2, kernels, simulated, the plugin.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import kernels
import table2
import theory
import torch
from gpt import GPT, GPTConfig
from simulated import Simulation
from torch import Tensor

from ds_quant.codec.bound import BoundCodec, Rotation
from ds_quant.codec.codec import CastCodec, GroupCodec
from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import Decode, Encode, Offsets
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.policy import cost
from ds_quant.policy.model import block_param_specs

GRIDS = theory.STEPS_OF_GRID
LAST = 300  # steps over which the end of a stall is averaged
CURVE_GRID, CURVE_EVERY = 0.1, 20  # of the curves in the picture
LEARNING_RATES = (6e-4, 1.2e-4, 1e-5)
NODE_COUNTS = (4, 6, 8, 12, 16)  # of Fig. 7

# ---- theory ----


def stall() -> dict[str, float]:
    """Return where SGD on quantized weights ends, and points of three curves."""
    figures = {}
    for grid in GRIDS:
        for rounding in theory.ROUNDINGS:
            values = list(theory.stall(rounding, grid))
            figures[f"grid {grid:g}, {rounding}"] = fmean(values[-LAST:])
            if grid == CURVE_GRID:
                for step in range(0, len(values), CURVE_EVERY):
                    figures[f"step {step}, {rounding}"] = values[step]
    return figures


def differences() -> dict[str, float]:
    """Return the ends of the counterexample and the lag of replicas of random walks."""
    figures = {f"counterexample, {way}": end for way, end in theory.counterexample().items()}
    for rounding in ("nearest", "stochastic"):
        codec = GroupCodec(bits=4, group_size=2048, range="absmax", rounding=rounding)
        for lr in LEARNING_RATES:
            figures[f"lag at {lr:g}, {rounding}"] = theory.random_walk(lr, codec)
    return figures


def smoothing() -> dict[str, float]:
    """Return errors of two-level sums without and with the Hadamard transform."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, 8, 1 << 15, generator=generator)
    # Student's t of 3 degrees: a normal over the root of the mean of three squares.
    heavy = normal() / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()
    figures = {}
    for name, sources in (("Gaussian", normal()), ("Student's t", heavy)):
        for block, way in ((0, "without"), (32, "with")):
            figures[f"{name}, {way}"] = theory.two_level_error(sources, block=block)
    return figures


# ---- bytes by formula ----


def volume(
    scheme: str,
    stage: int,
    *,
    weights: torch.dtype = torch.bfloat16,
    gradients: torch.dtype = torch.bfloat16,
    without: str | None = None,
) -> cost.CommVolume:
    """Return the bytes of a transformer block on 16 nodes of 8 ranks.

    weights, gradients: dtypes in full precision.
    without: role that is not quantized.
    """
    block: dict[str, Any] = {"scheme": scheme}
    if without is not None:
        block[without] = {"enabled": False}
    return cost.comm_volume(
        parse_block(block).to_scheme(),
        stage,
        block_param_specs(4096, dtype=weights),
        ranks=128,
        node_size=8,
        gradient_dtype=gradients,
    )


def qsdp_bytes() -> dict[str, float]:
    """Return what the bytes of W8G8 allow, against both baselines."""
    ours = volume("qsdp", 3).step_bytes(3)
    papers = volume("full_precision", 3, weights=torch.float32, gradients=torch.float16)
    return {
        "against bf16": volume("full_precision", 3).step_bytes(3) / ours,
        "against fp32 weights and fp16 gradients": papers.step_bytes(3) / ours,
    }


def one_role_bytes() -> dict[str, float]:
    """Return what the bytes of W8G8 allow against bf16, with both roles and with one."""
    exact = volume("full_precision", 3).step_bytes(3)
    return {
        "weights alone": exact / volume("qsdp", 3, without="gradients").step_bytes(3),
        "gradients alone": exact / volume("qsdp", 3, without="weights").step_bytes(3),
        "both": exact / volume("qsdp", 3).step_bytes(3),
    }


def sdp4bit_bytes() -> dict[str, float]:
    """Return what the bytes allow against bf16 weights and fp32 gradients, under ZeRO-1."""
    schemes = {"qWD alone": "qwd", "TLq-HS alone": "tlq_hs", "both": "sdp4bit"}
    exact = volume("full_precision", 1, gradients=torch.float32).step_bytes(1)
    return {
        label: exact / volume(scheme, 1, gradients=torch.float32).step_bytes(1)
        for label, scheme in schemes.items()
    }


def kept_bytes() -> dict[str, float]:
    """Return the memory that SDP4Bit keeps between steps, in bytes per parameter."""
    return {f"ZeRO-{stage}": volume("sdp4bit", stage).memory for stage in (1, 2, 3)}


def published_speedups() -> dict[str, float]:
    """Return Table 2 as bytes and one link rate per cluster predict it."""
    figures = {}
    for entry in table2.ENTRIES:
        gigabits = table2.fitted_gigabits(entry.cluster)
        figures[f"{entry.cluster} {entry.model}"] = entry.predicted(gigabits)
    for cluster in table2.CLUSTERS:
        figures[f"{cluster}, fitted Gb/s into a node"] = table2.fitted_gigabits(cluster)
    return figures


def speedups_over_nodes() -> dict[str, float]:
    """Return the averages of Fig. 7 as bytes and one link rate per cluster predict them."""
    return {
        f"{cluster} {model}": table2.over_node_counts(cluster, model, NODE_COUNTS)
        for cluster, model in (("A100", "6.7B"), ("A100", "13B"), ("H800", "6.7B"), ("H800", "13B"))
    }


# ---- kernels on one core ----

ROUNDS = 31  # of interleaved timings


def ratios(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the time of the first way over that of each, the median of interleaved calls.

    Other programs disturb all ways alike.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    first = next(iter(ways))
    for round in range(ROUNDS + 1):
        seconds = {}
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - start
        for name in ways if round else ():  # the first call allocates
            samples[name].append(seconds[first] / seconds[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def codec_speed() -> dict[str, float]:
    """Return the speed of QSDP's codecs on one core as a share of a copy of as many bytes."""
    torch.set_num_threads(1)
    bench = kernels.Bench(torch.device("cpu"), 1 << 20, ("auto",))
    numel = 1 << 22
    figures = {}
    for role, rounding in (("weights", "random_shift"), ("gradients", "stochastic")):
        codec = GroupCodec(bits=8, group_size=1024, rounding=rounding)
        for name, operation in (
            ("encode", bench.encode(codec, numel, torch.bfloat16)),
            ("decode", bench.decode(codec, numel, torch.bfloat16)),
        ):
            copy = bench.copy(operation.nbytes)
            ways = {
                "copy": partial(copy.ways["copy"], 0),
                "codec": partial(operation.ways["auto"], 0),
            }
            figures[f"{name} of {role}"] = ratios(ways)["codec"]
    return figures


def hadamard_fusion() -> dict[str, float]:
    """Return how much less time a fused Hadamard transform takes than a separate one."""
    torch.set_num_threads(1)
    numel = 1 << 22
    codec = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    between = torch.empty(numel)
    plain = Encode(codec, numel, values=0, wire=1, stream=0)
    fused = Encode(codec, numel, values=0, wire=1, stream=0, block=32)
    rotate = Encode(CastCodec(torch.float32), numel, values=0, wire=1, stream=0, block=32)
    run_plain = _runner(plain, codec, 0)
    run_fused = _runner(fused, codec, 32)
    run_rotate = _runner(rotate, codec, 32)

    def separate() -> None:
        run_rotate(values, between.view(torch.uint8))
        run_plain(between, wire)

    share = ratios({"fused": lambda: run_fused(values, wire), "separate": separate})["separate"]
    exact = volume("full_precision", 1, gradients=torch.float32)
    ours = volume("tlq_hs", 1, gradients=torch.float32)
    return {
        "time saved by fusing the transform, encoding": 100 * (1 - share),
        "fewer bytes of gradients between nodes": exact.gradients / ours.gradients,
    }


def hadamard_cost() -> dict[str, float]:
    """Return the speed of the kernels with the transform as a share of that without."""
    torch.set_num_threads(1)
    figures = {}
    codec = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
    for megabytes in (8, 16, 64):
        numel = megabytes * 1_000_000 // 4 // 128 * 128
        values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
        run_plain = _runner(Encode(codec, numel, values=0, wire=1, stream=0), codec, 0)
        run_with = _runner(Encode(codec, numel, values=0, wire=1, stream=0, block=32), codec, 32)
        ways = {
            "without": partial(run_plain, values, wire),
            "with": partial(run_with, values, wire),
        }
        figures[f"{megabytes} MB"] = ratios(ways)["with"]
    return figures


def _runner(
    operation: Encode | Decode, codec: GroupCodec, block: int
) -> Callable[[Tensor, Tensor], object]:
    """Return a call that encodes its first tensor into its second."""
    operations = Operations([(operation, Offsets())])
    rotation = Rotation(block=block) if block else None
    rng_state = RngState([BoundCodec(codec, kernels.ADDRESS)], [rotation])
    return lambda values, wire: operations.run([values, wire], rng_state)


# ---- HSDP and ZeRO-3 ----


def equal_fronts() -> dict[str, float]:
    """Return the largest difference of losses between HSDP and ZeRO-3 in full precision."""
    losses = {}
    for sums in ("zero3", "hsdp"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=1, width=64, seq_len=32, compute_dtype=torch.float32))
        scheme = parse_block({"scheme": "full_precision", "node_size": 2}).to_scheme()
        simulation = Simulation(
            model.bfloat16(),
            scheme,
            partial(torch.optim.SGD, lr=0.1),
            topology=Topology(world=4, node_size=2),
            sums=sums,
        )
        losses[sums] = [simulation.step(_tokens)[0] for _ in range(10)]
    differences = [
        abs(ours / other - 1) for ours, other in zip(losses["hsdp"], losses["zero3"], strict=True)
    ]
    return {"largest difference of 10 losses": max(differences)}


def _tokens(micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 256, (4, 33), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
