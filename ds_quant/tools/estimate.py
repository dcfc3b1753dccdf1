"""``ds_quant estimate``: what each scheme would bring, on paper; needs no GPU and no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ds_quant.config import ConfigError, QuantizedCommConfig, parse
from ds_quant.presets import AUTOTUNE

_GIGABIT = 1e9 / 8  # bytes per second
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_HEADERS = ("scheme", "B/param", "comm s", "step s", "speed-up", "GB more", "limited by")


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 with a sentence on standard error for settings that cannot work."""
    try:
        if arguments.validate_against is not None:
            _show_measured(arguments.validate_against, as_json=arguments.json)
        else:
            _show(_plan(arguments), arguments)
    except (OSError, ValueError) as error:
        print(f"ds_quant estimate: {error}", file=sys.stderr)
        return 1
    return 0


def _plan(arguments: argparse.Namespace) -> Any:
    """The plan that the options, a DeepSpeed config and a probe file describe together."""
    import torch

    from ds_quant.tools import models
    from ds_quant.tools.forecast import Plan

    settings = _from_deepspeed(arguments.ds_config)
    stage = _chosen("stage", arguments.stage, settings, 3)
    dtype = getattr(torch, _DTYPES[_chosen("dtype", arguments.dtype, settings, "bf16")])
    if arguments.model_config is not None:
        model = models.of_config(arguments.model_config, dtype=dtype)
    elif arguments.params is not None:
        model = models.of_size(arguments.params, dtype=dtype)
    else:
        raise ValueError("no model: give --params 7e9 or --model-config config.json")
    if arguments.step is None:
        raise ValueError(
            "--step: seconds that one optimizer step computes, without communication; measure it "
            "on one GPU, or divide 6 x parameters x tokens per GPU by the flops it reaches"
        )
    block: QuantizedCommConfig | None = settings["block"]
    cluster = _cluster(arguments)
    if block is not None:
        _check_block(block, cluster, stage, arguments.ds_config)
    return Plan(
        model=model, dtype=dtype, stage=stage, compute=arguments.step, block=block,
        micro_steps=_chosen("accumulation", arguments.accumulation, settings, 1),
        cluster=cluster,
    )  # fmt: skip


def _check_block(block: QuantizedCommConfig, cluster: Any, stage: int, path: Path) -> None:
    """Refuse what the block could not do on this cluster."""
    block.validate_stage(stage)
    if block.node_size not in (None, cluster.node_size):
        raise ConfigError(
            f"{path}: quantized_comm.node_size={block.node_size}: allowed here: --gpus, which is "
            f"{cluster.node_size}; make them equal or leave node_size out"
        )


def _chosen(name: str, given: Any, settings: dict[str, Any], default: Any) -> Any:
    """An option, else what the DeepSpeed config says, else the usual value."""
    if given is None and settings[name] == "auto":
        raise ValueError(f'--{name}: "auto" in the DeepSpeed config, which only a Trainer fills in')
    return given or settings[name] or default


def _from_deepspeed(path: Path | None) -> dict[str, Any]:
    """stage, accumulation, dtype and block of a DeepSpeed config; None for what it leaves open."""
    if path is None:
        return dict.fromkeys(("stage", "accumulation", "dtype", "block"))
    from ds_quant.cli import load

    config = load(path)
    block = parse(config)
    sections = {
        name: section if isinstance(section := config.get(name), dict) else {}
        for name in ("zero_optimization", "bf16", "fp16")
    }
    stage = sections["zero_optimization"].get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage={stage}: allowed: 1, 2 or 3")
    low = {name: sections[name].get("enabled", False) for name in ("bf16", "fp16")}
    on = [name for name, enabled in low.items() if enabled is True]
    return {
        "stage": stage,
        "accumulation": config.get("gradient_accumulation_steps"),
        "dtype": on[0] if on else "auto" if "auto" in low.values() else "fp32",
        # All that autotune chooses from has a row anyway.
        "block": None if block is not None and block.scheme == AUTOTUNE else block,
    }


def _cluster(arguments: argparse.Namespace) -> Any:
    """Rates from options, else from the probe file, else usual ones inside a node."""
    from ds_quant.cost import Cluster
    from ds_quant.tools import probe

    found = probe.load(arguments.probe) if arguments.probe else None
    nodes = arguments.nodes or (found and found.nodes) or 1
    node_size = arguments.gpus or (found and found.node_size) or 1
    between, inside = (found.inter, found.intra) if found else (None, None)
    if nodes > 1 and arguments.link is None and between is None:
        where = f"; {arguments.probe} was measured on one node" if found else ""
        raise ValueError(f"--link: Gb/s into one node is needed with {nodes} nodes{where}")
    if nodes * node_size == 1:
        raise ValueError("--nodes 1 --gpus 1: one rank sends nothing; allowed: 2 ranks or more")
    if node_size > 1 and arguments.intra is None and inside is None:
        raise ValueError(f"--intra: Gb/s into one GPU from its node, with {node_size} per node")
    latency = max((r.latency for r in (between, inside) if r is not None), default=2e-5)
    return Cluster(
        nodes=nodes, node_size=node_size, flops=1.0, encode=arguments.encode,
        link=_rate(arguments.link, between), intra_link=_rate(arguments.intra, inside),
        latency=latency if arguments.latency is None else arguments.latency,
    )  # fmt: skip


def _rate(gigabits: float | None, measured: Any) -> float:
    """Bytes per second; a link that does not exist is never waited for."""
    if gigabits is not None:
        return gigabits * _GIGABIT
    return float("inf") if measured is None else measured.bytes_per_second


def _show(plan: Any, arguments: argparse.Namespace) -> None:
    from ds_quant.tools import forecast

    rows = forecast.forecast(plan)
    chosen = forecast.best(rows)
    if arguments.plot is not None:
        plot(plan, arguments.plot)
    if arguments.json:
        facts = {
            "model": plan.model.name, "parameters": plan.model.numel, "stage": plan.stage,
            "micro_steps": plan.micro_steps, "compute": plan.compute, "best": chosen.scheme,
            "cluster": {**asdict(plan.cluster), "flops": None}, "rows": forecast.as_json(rows),
        }  # fmt: skip
        print(json.dumps(_finite(facts), indent=2))
        return
    cluster = plan.cluster
    print(
        f"{plan.model.name}; ZeRO-{plan.stage}, {cluster.nodes} x {cluster.node_size} ranks, "
        f"{plan.micro_steps} micro-step(s), {plan.compute:g} s of compute per step"
    )
    print("\n".join(table([cells(row) for row in rows])))
    print("step s and speed-up: communication fully hidden to not hidden at all")
    if chosen.scheme == forecast.SHIPPED:
        print("nothing gains 2 %: this link is not what limits the step; leave the block out")
    else:
        print(f"shortest step: {chosen.scheme}")
        print("this is time only: what a scheme costs in loss is in docs/choosing.md")


def _finite(value: Any) -> Any:
    """JSON has no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if value == float("inf") else value


def cells(row: Any) -> tuple[str, ...]:
    """A row of the table."""
    low, high = row.speedups
    return (
        row.scheme, f"{row.inter_bytes:.3f}", f"{row.communication:.3g}",
        f"{row.step_overlapped:.3g} - {row.step_serial:.3g}", f"{low:.2f} - {high:.2f}",
        f"{row.memory / 1e9:.3g}", row.limit + (f" ({row.note})" if row.note else ""),
    )  # fmt: skip


def table(rows: list[tuple[str, ...]], headers: tuple[str, ...] = _HEADERS) -> list[str]:
    """Lines with columns one below the other; first and last column to the left."""
    every = [headers, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(headers))]
    last = len(headers) - 1
    return [
        "  ".join(
            c.ljust(w) if i in (0, last) else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def _show_measured(path: Path, *, as_json: bool) -> None:
    from ds_quant.tools import measured

    points, left_out = measured.compare(path)
    if not points:
        raise ValueError(
            f"--validate-against {path}: no scheme has points both with and without a rate limit"
        )
    if as_json:
        facts = [{**asdict(point), "error": point.error} for point in points]
        print(json.dumps({"points": facts, "left_out": left_out}, indent=2))
        return
    shown = [
        (f"ZeRO-{p.stage} {p.scheme}", f"{p.rate:g}", f"{p.measured:.3f}", f"{p.predicted:.3f}",
         f"{p.error:+.1%}")
        for p in points
    ]  # fmt: skip
    print("\n".join(table(shown, ("scheme", "Mbit/s", "measured s", "predicted s", "error"))))
    print("\n".join(f"not predicted: {line}" for line in left_out))
    print(measured.summary(points))


def plot(plan: Any, path: Path) -> None:
    """Speed-up without overlap against link rate, a hundredth to a hundred times the plan's."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'ds_quant[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ds_quant.tools.forecast import forecast

    if plan.cluster.nodes == 1:
        raise ValueError("--plot: one node has no link between nodes to vary")
    rates = [plan.cluster.link * 10 ** (i / 8) for i in range(-16, 17)]
    runs = [forecast(replace(plan, cluster=replace(plan.cluster, link=rate))) for rate in rates]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for own in zip(*runs, strict=True):
        gigabits = [rate / _GIGABIT for rate in rates]
        axes.plot(gigabits, [row.speedup_serial for row in own], label=own[0].scheme)
    axes.axvline(plan.cluster.link / _GIGABIT, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="Gb/s into a node", ylabel="predicted speed-up, no overlap",
             title=f"{plan.model.name}, ZeRO-{plan.stage}")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
