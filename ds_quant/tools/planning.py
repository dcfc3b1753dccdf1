"""Build a plan from the options of ``ds_quant estimate``, a DeepSpeed config and a probe file.

Options that have a default may be left out, and the plan names the values that it presumes. All
others that are missing are named in one error, with an example of a complete command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from ds_quant.policy.timing import Rate
from ds_quant.tools import forecast, probe
from ds_quant.tools.ddp_plan import DdpPlan
from ds_quant.tools.files import about, load
from ds_quant.tools.forecast import GIGABIT, Buckets, Plan
from ds_quant.tools.fsdp2_plan import Fsdp2Plan

KINDS = {"zero": Plan, "fsdp2": Fsdp2Plan, "ddp": DdpPlan}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LATENCY = 2e-5  # seconds per collective, unless probed
PCIE_4 = 200.0  # Gb/s into one GPU from its node, unless given or probed
# Options of a complete command in their order, with examples of those without a default.
_OPTIONS = (
    "front", "params", "expert_params", "model_config", "tp", "ep", "ds_config", "stage", "nodes",
    "gpus", "link", "intra", "probe", "step", "measured",
)  # fmt: skip
_EXAMPLE = {"params": "7b", "nodes": "2", "gpus": "8", "link": "10", "step": "4"}


def _presumed() -> dict[str, str]:
    """Return the default options of a plan without a config."""
    return {"dtype": "--dtype bf16", "accumulation": "--accumulation 1"}


@dataclass(kw_only=True)
class _Settings:
    """Settings of the run, by default those of a plan without options and without a config.

    zero: the section zero_optimization of the config.
    presumed: options that nothing replaces, with their values.
    """

    stage: int = 3
    dtype: str = "bf16"
    accumulation: int = 1
    block: QuantizedCommConfig | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    presumed: dict[str, str] = field(default_factory=_presumed)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan. Options have priority over the config and the probe file.

    Raises:
        ValueError: naming every option that is missing, or one that cannot work.
    """
    if arguments.front != "zero":
        _refuse_deepspeed_settings(arguments)
    _refuse_parts(arguments)
    path = arguments.ds_config
    settings = _read_settings(arguments)
    missing = _missing_options(arguments)
    cluster = _cluster(arguments, missing, settings.presumed)
    if missing:
        lines = "".join(f"\n  {line}" for line in missing.values() if line)
        command = _complete_command(arguments, missing)
        raise ValueError(f"options are missing:{lines}\nfor example: {command}")
    stage = settings.stage
    dtype = DTYPES[settings.dtype]
    planned_model = _model(arguments, dtype)
    with about(path):
        buckets = buckets_of(settings.zero, planned_model.hidden, stage)
    block = settings.block
    if block is not None:
        block.validate_stage(stage)
        if block.node_size not in (None, cluster.node_size):
            raise ConfigError(
                f"{path}: quantized_comm.node_size={block.node_size}: allowed here: "
                f"--gpus, which is {cluster.node_size}; make them equal or leave node_size out"
            )
    _refuse_parts_without_experts(arguments, planned_model)
    stock_reason = refusals.stock_gradients_reason(stage, lambda key: settings.zero.get(key, True))
    parts = {}
    if arguments.front == "fsdp2":
        parts = {"tensor_parallel": arguments.tp or 1, "expert_parallel": arguments.ep or 1}
    plan = KINDS[arguments.front](
        model=planned_model,
        dtype=dtype,
        stage=stage,
        micro_steps=1 if arguments.front == "ddp" else settings.accumulation,
        compute=arguments.step,
        cluster=cluster,
        # The schemes from which autotune chooses have rows in every table.
        block=None if block is None or block.scheme == AUTOTUNE else block,
        allow_full_replica=block is not None and block.allow_full_replica,
        exact_gradients=stock_reason is not None,
        gpu_memory=None if arguments.gpu_memory is None else arguments.gpu_memory * 1e9,
        offloads=_offloads(settings.zero),
        presumed=tuple(settings.presumed.values()),
        buckets=buckets,
        **parts,
    )
    if not plan.parts:
        raise ValueError(
            f"--tp {arguments.tp}: allowed with {plan.ranks} GPUs: at most {plan.ranks // 2}: the "
            "block sends what two or more GPUs share"
        )
    if arguments.measured is None:
        return plan
    return _with_measured_link(plan, arguments.measured)


def _refuse_deepspeed_settings(arguments: argparse.Namespace) -> None:
    """Refuse options of DeepSpeed in a plan under FSDP2 or DDP.

    Raises:
        ValueError: naming each option, its value and the way out.
    """
    front = arguments.front
    shards = {
        "fsdp2": "FSDP2 shards weights, gradients and optimizer states, as stage 3 does",
        "ddp": "DDP shards nothing",
    }
    problems = []
    if arguments.stage is not None:
        problems.append(
            f"--stage {arguments.stage}: allowed with --front {front}: none; leave it out: "
            f"{shards[front]}"
        )
    if arguments.ds_config is not None:
        problems.append(
            f"--ds-config {arguments.ds_config}: allowed with --front {front}: none; give --dtype "
            "and --accumulation instead"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _refuse_parts(arguments: argparse.Namespace) -> None:
    """Refuse options of tensor and expert parallelism where they have no meaning.

    Raises:
        ValueError: naming each option, its value and the way out.
    """
    problems = []
    for option in ("tp", "ep", "expert_params"):
        value = getattr(arguments, option)
        if value is not None and arguments.front != "fsdp2":
            problems.append(
                f"--{option.replace('_', '-')} {value}: allowed with --front {arguments.front}: "
                "none; leave it out, or take --front fsdp2"
            )
    expert_params = arguments.expert_params
    if expert_params is not None and not problems:
        if arguments.model_config is not None:
            problems.append(
                f"--expert-params {expert_params}: allowed with --model-config: none; leave it "
                "out: the config says which parameters are experts"
            )
        elif arguments.params is not None and expert_params >= arguments.params:
            problems.append(
                f"--expert-params {expert_params}: allowed: fewer than --params, which are "
                f"{arguments.params}"
            )
    if problems:
        raise ValueError("; ".join(problems))


def _refuse_parts_without_experts(arguments: argparse.Namespace, planned: Model) -> None:
    """Refuse expert parallelism of a model without experts.

    Raises:
        ValueError
    """
    if arguments.ep is not None and arguments.ep > 1 and not planned.experts:
        raise ValueError(
            f"--ep {arguments.ep}: allowed without experts: 1; give their parameters as "
            "--expert-params 29b, or a --model-config that has experts"
        )


def _missing_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return a sentence per option about the model that has no default and that nothing replaces.

    Options of the cluster are added by ``_cluster``.
    """
    missing = {}
    if arguments.params is None and arguments.model_config is None:
        missing["params"] = "--params 7b, or --model-config config.json: the model"
    if arguments.step is None:
        missing["step"] = (
            "--step: seconds that one optimizer step computes, without communication; measure it "
            "on one GPU, or divide 6 x parameters x tokens per GPU by the flops it reaches"
        )
    return missing


def _complete_command(arguments: argparse.Namespace, missing: Iterable[str]) -> str:
    """Return a command with the options that were given, and examples of those that are missing."""
    words = ["ds_quant estimate"]
    for name in _OPTIONS:
        value = getattr(arguments, name)
        if name in missing:
            value = _EXAMPLE[name]
        if value is None or (name, value) == ("front", "zero"):
            continue
        if isinstance(value, int | float):
            value = f"{value:g}".replace("e+0", "e").replace("e+", "e")
        words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def _with_measured_link(plan: Plan, step: float) -> Plan:
    """Give the slowest link the rate at which a run without the plugin takes ``step`` seconds."""
    unlimited, ranks = _with_slowest_link(plan, float("inf"))
    stock = forecast.forecast(unlimited)[0]
    seconds = step - stock.step_serial
    if seconds <= 0:
        raise ValueError(
            f"--measured {step:g}: no longer than the {stock.step_serial:.3g} s that compute and "
            f"everything but the link take: allowed: a whole step, with {plan.stock}"
        )
    # Bytes that arrive at one end of the slowest link: a 1 / ranks of all are its own.
    rate = plan.counted * stock.inter_bytes * (1 - 1 / ranks) / seconds
    limited, _ = _with_slowest_link(plan, rate)
    return limited


def _with_slowest_link(plan: Plan, rate: float) -> tuple[Plan, int]:
    """Return the plan with a rate of its slowest link, and the number of nodes or ranks on it."""
    if plan.cluster.nodes > 1:
        return replace(plan, cluster=replace(plan.cluster, link=rate)), plan.cluster.nodes
    return replace(plan, cluster=replace(plan.cluster, intra_link=rate)), plan.cluster.node_size


# ---- the model ----


def _model(arguments: argparse.Namespace, dtype: torch.dtype) -> Model:
    if arguments.model_config is None:
        return model.of_size(
            arguments.params,
            dtype=dtype,
            trained=arguments.trained,
            experts=arguments.expert_params or 0,
        )
    with about(f"--model-config {arguments.model_config}"):
        return of_config(arguments.model_config, dtype=dtype, trained=arguments.trained)


def of_config(path: Path, *, dtype: torch.dtype, trained: float = 1.0) -> Model:
    """Return the model of a Hugging Face config.json, built without memory for its weights.

    Raises:
        ValueError: transformers is missing, or the file is no config of a causal language model.
    """
    settings = json.loads(path.read_text("utf-8"))
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("no model_type, allowed: a Hugging Face config")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**settings)
        if not 1 <= config.num_hidden_layers <= 1000:  # layers are built one by one
            raise ValueError(f"num_hidden_layers={config.num_hidden_layers}: allowed: 1 to 1000")
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a wrong field may raise anything
        fix = ""
        if isinstance(error, ImportError):
            fix = ": pip install 'ds_quant[hf]', or give --params"
        raise ValueError(shorten(f"{type(error).__name__}: {error}", 200) + fix) from error
    param_specs = tuple(
        ParamSpec(name, tuple(parameter.shape), dtype, True)
        for name, parameter in module.named_parameters()
    )
    numels = [parameter.numel() for parameter in module.parameters()]
    name = f"{settings['model_type']} of {sum(numels) / 1e9:.3g} B parameters"
    return Model(
        name=model.named(name, trained),
        numel=sum(numels),
        layers=config.num_hidden_layers,
        param_specs=tuple(model.with_adapters(param_specs, trained)),
        trained=round(sum(numels) * trained),
        modules=len(numels),
        largest=max(numels),
        hidden=config.hidden_size,
        experts=sum(
            parameter.numel()
            for name, parameter in module.named_parameters()
            if model.is_of_experts(name)
        ),
    )


# ---- the DeepSpeed config ----


def _read_settings(arguments: argparse.Namespace) -> _Settings:
    """Read the DeepSpeed config, if given, and the options that replace its settings."""
    settings = _Settings()
    if arguments.front == "ddp":  # models under DDP are fp32, or bf16 without fp32 masters
        settings = _Settings(stage=0, dtype="fp32", presumed={"dtype": "--dtype fp32"})
    if arguments.ds_config is not None:
        with about(arguments.ds_config):
            config = load(arguments.ds_config)
            settings = _settings_of(config, load_codecs=arguments.load_codecs)
    elif arguments.front == "zero":
        settings.presumed["stage"] = f"--stage {settings.stage}"
    for option in ("stage", "dtype", "accumulation"):
        value = getattr(arguments, option)
        if value is not None:
            setattr(settings, option, value)
            settings.presumed.pop(option, None)
    return settings


def _settings_of(config: dict[str, Any], *, load_codecs: bool) -> _Settings:
    """Return the settings of a DeepSpeed config."""
    block = parse(config, load_codecs=load_codecs)
    stage = refusals.stage_of(config)
    if stage not in (1, 2, 3):
        written = " is not set" if stage is None else f"={show(stage)}"
        raise ConfigError(f"zero_optimization.stage{written}: allowed: 1, 2 or 3")
    if block is not None:
        refusals.refuse(config, block)
        if block.own_codecs and not load_codecs:
            role, module = next(iter(block.own_codecs.items()))
            raise ConfigError(
                f"{path_of((role, 'codec'))}={show(module)}: only its code knows its bytes: "
                "give --load-codecs, which imports it, or leave codec out"
            )
    presumed = {}
    dtype = "fp32"
    low_precision = refusals.low_precision(config)
    if low_precision:
        dtype = low_precision[0]
    elif refusals.automatic_precision(config):
        dtype = _Settings.dtype
        presumed["dtype"] = f'--dtype {dtype} ("auto" in the config)'
    accumulation = config.get("gradient_accumulation_steps")
    if accumulation is None:
        accumulation = _Settings.accumulation
        presumed["accumulation"] = f"--accumulation {accumulation}"
    elif accumulation == "auto":
        accumulation = _Settings.accumulation
        presumed["accumulation"] = f'--accumulation {accumulation} ("auto" in the config)'
    else:
        accumulation = _whole_number("gradient_accumulation_steps", accumulation, least=1)
    return _Settings(
        stage=stage,
        dtype=dtype,
        accumulation=accumulation,
        block=block,
        zero=refusals.whole_section(config, "zero_optimization"),
        presumed=presumed,
    )


def buckets_of(zero: dict[str, Any], hidden: int, stage: int) -> Buckets:
    """Read bucket sizes from the section zero_optimization; "auto" as a Trainer fills it in.

    ``allgather_bucket_size=0`` is allowed under ZeRO-3, which does not use it. Then ZeRO-1 and 2
    are predicted with the default.

    hidden: width of the model, from which a Trainer computes sizes.
    """
    default = Buckets()
    fetch = default.fetch
    fetch_settings = FetchSettings(
        max_reuse_distance=_size(
            zero, "stage3_max_reuse_distance", fetch.max_reuse_distance, auto=None
        ),
        max_live_parameters=_size(
            zero, "stage3_max_live_parameters", fetch.max_live_parameters, auto=None
        ),
        prefetch_bucket_size=_size(
            zero, "stage3_prefetch_bucket_size", fetch.prefetch_bucket_size, auto=0.9 * hidden**2
        ),
    )
    least_allgather = 1 if stage < 3 else 0
    allgather = _size(
        zero, "allgather_bucket_size", default.allgather, auto=None, least=least_allgather
    )
    return Buckets(
        reduce=_size(zero, "reduce_bucket_size", default.reduce, auto=hidden**2),
        allgather=allgather or default.allgather,
        fetch=fetch_settings,
    )


def _size(
    zero: dict[str, Any], key: str, default: int, *, auto: float | None, least: int = 0
) -> int:
    """Read a size in elements.

    auto: the size that a Trainer fills in for "auto"; None for the default.
    """
    value = zero.get(key, default)
    if value != "auto":
        return _whole_number(f"zero_optimization.{key}", value, least)
    return default if auto is None else int(auto)


def _whole_number(key: str, value: object, least: int) -> int:
    """Read a whole number, also as 5e8."""
    number = refusals.number(value)
    if isinstance(value, bool) or number < least or number % 1:
        raise ConfigError(f'{key}={show(value)}: allowed: whole numbers from {least}, or "auto"')
    return int(number)


def _offloads(zero: dict[str, Any]) -> frozenset[str]:
    """Return the parts in host memory, of "param" and "optimizer"."""
    return frozenset(
        part
        for part in ("param", "optimizer")
        if refusals.section(zero, f"offload_{part}").get("device") == "cpu"
    )


# ---- the cluster ----


def _cluster(
    arguments: argparse.Namespace, missing: dict[str, str], presumed: dict[str, str]
) -> Cluster:
    """Return nodes and rates from options, else from the probe file.

    missing: gets a sentence per option that is needed and not given; "" for an option of which the
        sentence of another one speaks.
    presumed: gets an option, as written on a command line, for every number of nodes or GPUs and
        every rate that is assumed.
    """
    probed = None
    inter: Rate | None = None
    intra: Rate | None = None
    if arguments.probe is not None:
        with about(f"--probe {arguments.probe}"):
            probed = probe.load(arguments.probe)
        inter = probed.inter
        intra = probed.intra
    nodes, node_size = _sizes(arguments, probed, missing, presumed)
    is_measured = arguments.measured is not None  # then the slowest link is computed
    if nodes > 1 and arguments.link is None and inter is None and not is_measured:
        probed_one_node = ""
        if probed is not None:
            probed_one_node = f"; {arguments.probe} was measured on one node"
        missing["link"] = (
            f"--link: Gb/s into one node from the others{probed_one_node}; typical: 1, 2.5, 10 and "
            "25 (Ethernet), 100 to 400 (InfiniBand, RoCE); or --measured, the seconds of a step "
            "without ds_quant"
        )
    intra_gigabits = arguments.intra
    needs_intra = node_size > 1 and (nodes > 1 or not is_measured)
    if needs_intra and intra_gigabits is None and intra is None:
        intra_gigabits = PCIE_4
        presumed["intra"] = f"--intra {PCIE_4:g} (PCIe 4; NVLink 4: 3600)"
    latency = arguments.latency
    if latency is None:
        probed_latencies = [rate.latency for rate in (inter, intra) if rate is not None]
        latency = max(probed_latencies, default=LATENCY)
    return Cluster(
        nodes=nodes,
        node_size=node_size,
        link=_bytes_per_second(arguments.link, inter),
        intra_link=_bytes_per_second(intra_gigabits, intra),
        encode=arguments.encode,
        latency=latency,
    )


def _sizes(
    arguments: argparse.Namespace,
    probed: probe.ProbeResult | None,
    missing: dict[str, str],
    presumed: dict[str, str],
) -> tuple[int, int]:
    """Return the number of nodes and of GPUs per node. missing, presumed: as of ``_cluster``."""
    nodes = node_size = 1
    if probed is not None:
        nodes = probed.nodes
        node_size = probed.node_size
    elif arguments.nodes is None:
        presumed["nodes"] = "--nodes 1"
    elif arguments.gpus is None:
        presumed["gpus"] = "--gpus 1"
    nodes = arguments.nodes or nodes
    node_size = arguments.gpus or node_size
    if nodes * node_size == 1:
        missing["nodes"] = "--nodes, --gpus (per node): one GPU sends nothing"
        missing["gpus"] = ""
        # Sizes of an example, so that a missing rate is found, too.
        nodes = int(_EXAMPLE["nodes"])
        node_size = int(_EXAMPLE["gpus"])
    return nodes, node_size


def _bytes_per_second(gigabits: float | None, probed: Rate | None) -> float:
    """Return the rate of a link; infinite if there is no such link."""
    if gigabits is not None:
        return gigabits * GIGABIT
    if probed is not None:
        return probed.bytes_per_second
    return float("inf")
