"""Build a plan from the options of ``ds_quant estimate``, a DeepSpeed config and a probe file.

Whatever is missing is said at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_quant.config.errors import path_of, show
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import ConfigError, QuantizedCommConfig, parse
from ds_quant.policy import refusals
from ds_quant.policy.cost import Cluster
from ds_quant.policy.gathers import FetchSettings
from ds_quant.tools import forecast, probe
from ds_quant.tools.cli import about, load
from ds_quant.tools.forecast import GIGABIT, Buckets, Plan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class _Settings:
    """Settings of a DeepSpeed config; None for what it leaves open. zero: its section."""

    path: Path | None = None
    stage: Any = None
    accumulation: Any = None
    dtype: str | None = None
    block: QuantizedCommConfig | None = None
    zero: dict[str, Any] = field(default_factory=dict)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """See above.

    Raises:
        ValueError: naming every option that is missing, or one that cannot work.
    """
    with about(arguments.ds_config):
        settings = _from_deepspeed(arguments.ds_config, load_codecs=arguments.load_codecs)
    missing: list[str] = []
    stage = arguments.stage or settings.stage or 3
    dtype = _chosen("dtype", "bf16", arguments.dtype, settings, missing)
    accumulation = _chosen("accumulation", 1, arguments.accumulation, settings, missing)
    if arguments.params is None and arguments.model_config is None:
        missing.append("no model: give --params 7b or --model-config config.json")
    if arguments.step is None:
        missing.append(
            "--step: seconds that one optimizer step computes, without communication; measure it "
            "on one GPU, or divide 6 x parameters x tokens per GPU by the flops it reaches"
        )
    cluster = _cluster(arguments, missing)
    if missing:
        lines = "".join(f"\n  {line}" for line in missing)
        raise ValueError(missing[0] if len(missing) == 1 else f"{len(missing)} are missing:{lines}")
    model = _model(arguments, _DTYPES[dtype])
    with about(arguments.ds_config):
        buckets = _buckets(settings.zero, model.hidden)
    block = settings.block
    if block is not None:
        _check_block(block, cluster, stage, arguments.ds_config)
    tuned = block is not None and block.scheme == AUTOTUNE
    return Plan(
        model=model, dtype=_DTYPES[dtype], stage=stage, compute=arguments.step,
        block=None if tuned else block,  # all that autotune chooses from has a row anyway
        micro_steps=accumulation, cluster=cluster,
        allow_full_replica=block is not None and block.allow_full_replica,
        exact_gradients=_keeps_gradients_exact(stage, settings.zero),
        gpu_memory=arguments.gpu_memory and arguments.gpu_memory * 1e9,
        offloads=_offloads(settings.zero), buckets=buckets,
    )  # fmt: skip


def _offloads(zero: dict[str, Any]) -> frozenset[str]:
    """What is in host memory, of "param" and "optimizer"."""
    sections = {name: zero.get(f"offload_{name}") for name in ("param", "optimizer")}
    of = {name: found for name, found in sections.items() if isinstance(found, dict)}
    return frozenset(name for name, found in of.items() if found.get("device") == "cpu")


def _model(arguments: argparse.Namespace, dtype: torch.dtype) -> forecast.Model:
    if arguments.model_config is None:
        return forecast.of_size(arguments.params, dtype=dtype, trained=arguments.trained)
    with about(f"--model-config {arguments.model_config}"):
        return forecast.of_config(arguments.model_config, dtype=dtype, trained=arguments.trained)


def _keeps_gradients_exact(stage: int, zero: dict[str, Any]) -> bool:
    return refusals.exact_gradient_reason(stage, lambda name: zero.get(name, True)) is not None


def _buckets(zero: dict[str, Any], hidden: int) -> Buckets:
    """Read bucket sizes from the section zero_optimization; "auto" as a Trainer fills it in."""
    known = Buckets()

    def read(key: str, default: int, automatic: float) -> int:
        value = zero.get(key, default)
        return int(automatic) if value == "auto" else _whole(f"zero_optimization.{key}", value, 0)

    fetch = known.fetch
    return Buckets(
        reduce=read("reduce_bucket_size", known.reduce, hidden**2),
        allgather=read("allgather_bucket_size", known.allgather, known.allgather),
        persistence=read("stage3_param_persistence_threshold", known.persistence, 10 * hidden),
        fetch=FetchSettings(
            max_reuse_distance=read(
                "stage3_max_reuse_distance", fetch.max_reuse_distance, fetch.max_reuse_distance
            ),
            max_live_parameters=read(
                "stage3_max_live_parameters", fetch.max_live_parameters, fetch.max_live_parameters
            ),
            prefetch_bucket_size=read(
                "stage3_prefetch_bucket_size", fetch.prefetch_bucket_size, 0.9 * hidden**2
            ),
        ),
    )


def _whole(key: str, value: Any, least: int) -> int:
    """Read a whole number, also as 5e8."""
    number = refusals.number(value)
    if isinstance(value, bool) or number < least or number % 1:
        raise ConfigError(f'{key}={show(value)}: allowed: whole numbers from {least}, or "auto"')
    return int(number)


def _check_block(block: QuantizedCommConfig, cluster: Cluster, stage: int, path: Path) -> None:
    """Refuse what the block could not do on this cluster."""
    block.validate_stage(stage)
    if block.node_size not in (None, cluster.node_size):
        raise ConfigError(
            f"{path}: quantized_comm.node_size={block.node_size}: allowed here: --gpus, which is "
            f"{cluster.node_size}; make them equal or leave node_size out"
        )


_AUTO = {  # option -> key of the DeepSpeed config, what to give
    "accumulation": ("gradient_accumulation_steps", "give the number of micro-steps"),
    "dtype": ("bf16.enabled or fp16.enabled", "give bf16, fp16 or fp32"),
}


def _chosen(name: str, default: Any, given: Any, settings: _Settings, missing: list[str]) -> Any:
    """An option, else what the DeepSpeed config says, else the usual value."""
    found = getattr(settings, name)
    if given is None and found == "auto":
        key, fix = _AUTO[name]
        missing.append(
            f'--{name}: "auto" in the DeepSpeed config ({key} of {settings.path}), which only a '
            f"Trainer fills in: {fix}"
        )
    return given or found or default


def _from_deepspeed(path: Path | None, *, load_codecs: bool) -> _Settings:
    if path is None:
        return _Settings()
    config = load(path)
    block = parse(config, load_codecs=load_codecs)
    stage = refusals.stage_of(config)
    if stage not in (1, 2, 3):
        found = " is not set" if stage is None else f"={show(stage)}"
        raise ConfigError(f"zero_optimization.stage{found}: allowed: 1, 2 or 3")
    if block is not None:
        refusals.refuse(config, block)
        if block.own_codecs and not load_codecs:
            role, module = next(iter(block.own_codecs.items()))
            raise ConfigError(
                f"{path_of((role, 'codec'))}={show(module)}: only its code knows its bytes: "
                "give --load-codecs, which imports it, or leave codec out"
            )
    sections = {n: s if isinstance(s := config.get(n), dict) else {} for n in ("bf16", "fp16")}
    switches = [section.get("enabled") for section in sections.values()]
    on = refusals.low_precision(config)
    zero = config.get("zero_optimization")
    accumulation = config.get("gradient_accumulation_steps")
    if accumulation not in (None, "auto"):
        accumulation = _whole("gradient_accumulation_steps", accumulation, 1)
    return _Settings(
        path=path, stage=stage, accumulation=accumulation,
        dtype=on[0] if on else "auto" if "auto" in switches else "fp32", block=block,
        zero=zero if isinstance(zero, dict) else {},
    )  # fmt: skip


def _cluster(arguments: argparse.Namespace, missing: list[str]) -> Cluster:
    """Rates from options, else from the probe file, else usual ones inside a node."""
    with about(f"--probe {arguments.probe}"):
        found = arguments.probe and probe.load(arguments.probe)
    nodes = arguments.nodes or (found and found.nodes) or 1
    node_size = arguments.gpus or (found and found.node_size) or 1
    between, inside = (found.inter, found.intra) if found else (None, None)
    if nodes > 1 and arguments.link is None and between is None:
        where = f"; {arguments.probe} was measured on one node" if found else ""
        missing.append(
            f"--link: Gb/s into one node is needed with {nodes} nodes{where}; typical: 10 and 25 "
            "(Ethernet), 100 to 400 (InfiniBand, RoCE)"
        )
    if nodes * node_size == 1:
        missing.append("--nodes 1 --gpus 1: one rank sends nothing; allowed: 2 ranks or more")
    if node_size > 1 and arguments.intra is None and inside is None:
        missing.append(
            f"--intra: Gb/s into one GPU from its node, with {node_size} per node; typical: 200 "
            "(PCIe 4), 3600 (NVLink 4)"
        )
    latency = max((r.latency for r in (between, inside) if r is not None), default=2e-5)
    return Cluster(
        nodes=nodes, node_size=node_size, flops=1.0, encode=arguments.encode,
        link=_rate(arguments.link, between), intra_link=_rate(arguments.intra, inside),
        latency=latency if arguments.latency is None else arguments.latency,
    )  # fmt: skip


def _rate(gigabits: float | None, measured: Any) -> float:
    """Bytes per second; a link that does not exist is never waited for."""
    if gigabits is not None:
        return gigabits * GIGABIT
    return float("inf") if measured is None else measured.bytes_per_second
