"""Build a plan from the options of ``ds_quant estimate``, a DeepSpeed config and a probe file.

Whatever is missing is said at once.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ds_quant.config.errors import path_of, show
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import ConfigError, QuantizedCommConfig, parse
from ds_quant.policy import model, refusals
from ds_quant.policy.cost import Cluster, ParamSpec
from ds_quant.policy.model import FetchSettings, Model
from ds_quant.tools import forecast, probe
from ds_quant.tools.cli import about, load
from ds_quant.tools.forecast import GIGABIT, Buckets, Plan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# What a plan is without options and without a DeepSpeed config.
_USUAL = {"stage": 3, "dtype": "bf16", "accumulation": 1}
# What a config may leave open: which key does, what to give.
_OPEN = {
    "dtype": ("bf16.enabled or fp16.enabled", "bf16, fp16 or fp32"),
    "accumulation": ("gradient_accumulation_steps", "the number of micro-steps"),
}


def make_plan(arguments: argparse.Namespace) -> Plan:
    """See above.

    Raises:
        ValueError: naming every option that is missing, or one that cannot work.
    """
    path, config, block, given = arguments.ds_config, {}, None, dict(_USUAL)
    if path is not None:
        with about(path):
            config = load(path)
            block, given = _from_deepspeed(config, load_codecs=arguments.load_codecs)
    missing: list[str] = []
    given |= {name: value for name in _USUAL if (value := getattr(arguments, name)) is not None}
    for name, (key, fix) in _OPEN.items():
        if given[name] == "auto":
            missing.append(
                f'--{name}: "auto" in the DeepSpeed config ({key} of {path}), which only '
                f"a Trainer fills in: give {fix}"
            )
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
    stage, dtype = given["stage"], _DTYPES[given["dtype"]]
    of, zero = _model(arguments, dtype), config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    with about(path):
        buckets = _buckets(zero, of.hidden, stage)
    if block is not None:
        block.validate_stage(stage)
        if block.node_size not in (None, cluster.node_size):
            raise ConfigError(
                f"{path}: quantized_comm.node_size={block.node_size}: allowed here: "
                f"--gpus, which is {cluster.node_size}; make them equal or leave node_size out"
            )
    exact = refusals.exact_gradient_reason(stage, lambda name: zero.get(name, True))
    offloads = {name: refusals.section(zero, f"offload_{name}") for name in ("param", "optimizer")}
    plan = Plan(
        model=of, dtype=dtype, stage=stage, compute=arguments.step,
        # All that autotune chooses from has a row anyway.
        block=None if block is None or block.scheme == AUTOTUNE else block,
        micro_steps=given["accumulation"], cluster=cluster,
        allow_full_replica=block is not None and block.allow_full_replica,
        exact_gradients=exact is not None, buckets=buckets,
        gpu_memory=arguments.gpu_memory and arguments.gpu_memory * 1e9,
        offloads=frozenset(n for n, found in offloads.items() if found.get("device") == "cpu"),
    )  # fmt: skip
    return plan if arguments.measured is None else _measured(plan, arguments.measured)


def _measured(plan: Plan, step: float) -> Plan:
    """Give the slowest link the rate with which DeepSpeed as shipped takes ``step`` seconds."""
    cluster, one_node = plan.cluster, plan.cluster.nodes == 1
    name, ranks = ("intra_link", cluster.node_size) if one_node else ("link", cluster.nodes)
    shipped = forecast.forecast(replace(plan, cluster=replace(cluster, **{name: float("inf")})))[0]
    left = step - shipped.step_serial
    if left <= 0:
        raise ValueError(
            f"--measured {step:g}: no longer than the {shipped.step_serial:.3g} s that compute and "
            "everything but the link take: allowed: a whole step, with DeepSpeed as shipped"
        )
    rate = plan.counted * shipped.inter_bytes * (1 - 1 / ranks) / left
    return replace(plan, cluster=replace(cluster, **{name: rate}))


def _model(arguments: argparse.Namespace, dtype: torch.dtype) -> Model:
    if arguments.model_config is None:
        return model.of_size(arguments.params, dtype=dtype, trained=arguments.trained)
    with about(f"--model-config {arguments.model_config}"):
        return of_config(arguments.model_config, dtype=dtype, trained=arguments.trained)


def of_config(path: Path, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """The model of a Hugging Face config.json, built without memory for its weights.

    Raises:
        ValueError: transformers is missing, or the file is no config of a causal language model.
    """
    settings = json.loads(path.read_text("utf-8"))
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("no model_type, allowed: a Hugging Face config")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**settings)
        if not 1 <= config.num_hidden_layers <= 1000:  # which are built one by one
            raise ValueError(f"num_hidden_layers={config.num_hidden_layers}: allowed: 1 to 1000")
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a wrong field may raise anything
        missing = isinstance(error, ImportError)
        fix = ": pip install 'ds_quant[hf]', or give --params" if missing else ""
        raise ValueError(shorten(f"{type(error).__name__}: {error}", 200) + fix) from error
    param_specs = tuple(
        ParamSpec(name, tuple(p.shape), dtype, True) for name, p in built.named_parameters()
    )
    numels = [p.numel() for p in built.parameters()]
    name = f"{settings['model_type']} of {sum(numels) / 1e9:.3g} B parameters"
    return Model(
        name=model.named(name, trained), numel=sum(numels), layers=config.num_hidden_layers,
        param_specs=tuple(model.with_adapters(param_specs, trained)),
        trained=round(sum(numels) * trained),
        modules=len(numels), largest=max(numels), hidden=config.hidden_size,
    )  # fmt: skip


def _buckets(zero: dict[str, Any], hidden: int, stage: int) -> Buckets:
    """Read bucket sizes from the section zero_optimization; "auto" as a Trainer fills it in.

    ``allgather_bucket_size=0`` is allowed under ZeRO-3, which does not use it. What ZeRO-2 would
    take instead is then priced with the default.
    """
    known, auto = Buckets(), {"reduce": hidden**2, "stage3_prefetch": 0.9 * hidden**2}

    def read(key: str, default: int, least: int = 0) -> int:
        value = zero.get(key, default)
        if value == "auto":
            return int(auto.get(key.removesuffix("_bucket_size"), default))
        return _whole(f"zero_optimization.{key}", value, least)

    allgather = read("allgather_bucket_size", known.allgather, least=1 if stage < 3 else 0)
    fetch = {key: read(f"stage3_{key}", value) for key, value in vars(known.fetch).items()}
    return Buckets(
        reduce=read("reduce_bucket_size", known.reduce),
        allgather=allgather or known.allgather,
        fetch=FetchSettings(**fetch),
    )


def _whole(key: str, value: Any, least: int) -> int:
    """Read a whole number, also as 5e8."""
    number = refusals.number(value)
    if isinstance(value, bool) or number < least or number % 1:
        raise ConfigError(f'{key}={show(value)}: allowed: whole numbers from {least}, or "auto"')
    return int(number)


def _from_deepspeed(
    config: dict[str, Any], *, load_codecs: bool
) -> tuple[QuantizedCommConfig | None, dict[str, Any]]:
    """Read the block of a DeepSpeed config, and what it says of ``_USUAL``."""
    block, stage = parse(config, load_codecs=load_codecs), refusals.stage_of(config)
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
    on, auto = refusals.low_precision(config), refusals.automatic_precision(config)
    accumulation = config.get("gradient_accumulation_steps")
    if accumulation not in (None, "auto"):
        accumulation = _whole("gradient_accumulation_steps", accumulation, 1)
    dtype = on[0] if on else "auto" if auto else "fp32"
    return block, {"stage": stage, "dtype": dtype, "accumulation": accumulation or 1}


def _cluster(arguments: argparse.Namespace, missing: list[str]) -> Cluster:
    """Rates from options, else from the probe file, else usual ones inside a node."""
    with about(f"--probe {arguments.probe}"):
        found = arguments.probe and probe.load(arguments.probe)
    nodes = arguments.nodes or (found and found.nodes) or 1
    node_size = arguments.gpus or (found and found.node_size) or 1
    between, inside = (found.inter, found.intra) if found else (None, None)
    asked = arguments.measured is None
    if nodes > 1 and arguments.link is None and between is None and asked:
        where = f"; {arguments.probe} was measured on one node" if found else ""
        missing.append(
            f"--link: Gb/s into one node is needed with {nodes} nodes{where}; typical: 10 and 25 "
            "(Ethernet), 100 to 400 (InfiniBand, RoCE); or --measured, a step's seconds as it is"
        )
    if nodes * node_size == 1:
        missing.append("--nodes 1 --gpus 1: one rank sends nothing; allowed: 2 ranks or more")
    if node_size > 1 and arguments.intra is None and inside is None and (asked or nodes > 1):
        missing.append(
            f"--intra: Gb/s into one GPU from its node, with {node_size} per node; typical: 200 "
            "(PCIe 4), 3600 (NVLink 4)"
        )
    latency = max((r.latency for r in (between, inside) if r is not None), default=2e-5)
    return Cluster(
        nodes=nodes, node_size=node_size, encode=arguments.encode,
        link=_rate(arguments.link, between), intra_link=_rate(arguments.intra, inside),
        latency=latency if arguments.latency is None else arguments.latency,
    )  # fmt: skip


def _rate(gigabits: float | None, measured: Any) -> float:
    """Bytes per second; a link that does not exist is never waited for."""
    if gigabits is not None:
        return gigabits * GIGABIT
    return float("inf") if measured is None else measured.bytes_per_second
