"""``ds_quant estimate``: predict bytes and step time of each scheme; no GPU, no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_quant.tools import plot_style

_HEADERS = (
    "scheme", "B/param", "comm s", "step s", "speed-up", "kept GB", "peak GB", "GPU GB",
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 with a sentence on standard error for settings that cannot work."""
    try:
        from ds_quant.tools.planning import make_plan

        _show(make_plan(arguments), arguments)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"ds_quant estimate: {error}", file=sys.stderr)
        return 1
    return 0


def _show(plan: Any, arguments: argparse.Namespace) -> None:
    from ds_quant.tools import forecast

    rows = forecast.forecast(plan)
    chosen = forecast.best(rows)
    links = forecast.by_link(plan) if plan.cluster.nodes > 1 else {}
    accumulated = forecast.by_micro_steps(plan) if plan.cluster.nodes > 1 else {}
    if arguments.plot is not None:
        plot(plan, arguments.plot)
    if arguments.json:
        facts = {
            "model": plan.model.name, "parameters": plan.model.numel, "stage": plan.stage,
            "micro_steps": plan.micro_steps, "compute": plan.compute, "best": chosen.scheme,
            "gathers": plan.gathers,
            "cluster": {**asdict(plan.cluster), "flops": None}, "rows": forecast.as_json(rows),
            "links": {str(link): forecast.as_json(found) for link, found in links.items()},
            "accumulations": {str(count): found for count, found in accumulated.items()},
        }  # fmt: skip
        print(json.dumps(_finite(facts), indent=2))
        return
    shown = [row.scheme for row in rows if not row.note or row.scheme.startswith("HSDP")]
    lines = [*_tables(rows), *_link_table(links), *_accumulation_table(accumulated, shown)]
    print("\n".join([_title(plan), *lines, *_advice(chosen)]))


def _title(plan: Any) -> str:
    cluster = plan.cluster
    gathers = f", {plan.gathers:.3g} gathers of the weights each" if plan.stage == 3 else ""
    return (
        f"{plan.model.name}; ZeRO-{plan.stage}, {cluster.nodes} x {cluster.node_size} ranks, "
        f"{plan.micro_steps} micro-step(s){gathers}, {plan.compute:g} s of compute per step"
    )


def _tables(rows: list[Any]) -> list[str]:
    """Format the schemes that may be chosen, and the others apart."""
    from ds_quant.policy.cost import LOSSLESS_BITS

    good = [(*cells(row), row.limit) for row in rows if not row.note]
    others = [(*cells(row), row.note) for row in rows if row.note]
    lines = table(good, (*_HEADERS, "limited by"))
    if others:
        lines += ["", "not recommended:", *table(others, (*_HEADERS, "because"))]
    for row in rows:
        if row.most_bytes is not None:
            lines += ["", f"{row.scheme}: exact differences of {LOSSLESS_BITS} bits per weight, as "
                      "at a learning rate of 3e-4; fewer below it, and at most "
                      f"{row.most_bytes:.3f} B/param"]  # fmt: skip
    return [
        *lines, "",
        "step s and speed-up: communication fully hidden to not hidden at all; GB per GPU: kept "
        "between steps, messages and",
        "sums at most, and all with DeepSpeed's own states under Adam, without activations",
    ]  # fmt: skip


def _link_table(links: dict[int, list[Any]]) -> list[str]:
    """Speed-up over DeepSpeed as shipped, nothing hidden, by Gb/s into a node."""
    if not links:
        return []
    columns = [[f"{row.speedup_serial:.2f}" for row in found] for found in links.values()]
    schemes = [row.scheme for row in next(iter(links.values()))]
    rows = [(name, *own, "") for name, *own in zip(schemes, *columns, strict=True)]
    headers = ("scheme", *(f"{link} Gb/s" for link in links), "")
    return ["", "speed-up by link between nodes, nothing hidden:", *table(rows, headers)]


def _accumulation_table(accumulated: dict[int, dict[str, float]], schemes: list[str]) -> list[str]:
    """Bytes between nodes by micro-steps of an optimizer step."""
    if not accumulated:
        return []
    rows = [
        (scheme, *(f"{found[scheme]:.3f}" for found in accumulated.values()), "")
        for scheme in schemes
    ]
    headers = ("scheme", *(f"k = {count}" for count in accumulated), "")
    title = "B/param between nodes and step, by micro-steps k of an optimizer step:"
    return ["", title, *table(rows, headers)]


def _advice(chosen: Any) -> list[str]:
    from ds_quant.tools import forecast

    if chosen.scheme == forecast.SHIPPED:
        fits = f" ({chosen.note})" if chosen.note else ""
        return ["", "nothing gains 2 %: this link is not what limits the step; leave the block "
                f"out{fits}"]  # fmt: skip
    return [
        "", f"shortest step: {chosen.scheme}",
        "this is time only: what a scheme costs in loss is in docs/choosing.md",
    ]  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if value == float("inf") else value


def cells(row: Any) -> tuple[str, ...]:
    """Format a row of the table except its last column."""
    low, high = row.speedups
    return (
        row.scheme, f"{row.inter_bytes:.3f}", f"{row.communication:.3g}",
        f"{row.step_overlapped:.3g} - {row.step_serial:.3g}", f"{low:.2f} - {high:.2f}",
        f"{row.memory / 1e9:.3g}", f"{row.peak / 1e9:.3g}", f"{row.gpu_memory / 1e9:.3g}",
    )  # fmt: skip


def table(rows: list[tuple[str, ...]], headers: tuple[str, ...] = _HEADERS) -> list[str]:
    """Align columns; first and last column to the left."""
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


def plot(plan: Any, path: Path) -> None:
    """Plot speed-up without overlap against link rate, for the schemes that may be chosen."""
    from ds_quant.tools import forecast

    pyplot = plot_style.pyplot()
    if plan.cluster.nodes == 1:
        raise ValueError("--plot: one node has no link between nodes to vary")
    own = plan.cluster.link / forecast.GIGABIT
    rates = _rates(own)
    curves = _curves(plan, rates)
    colors = plot_style.colors(curves)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.axhline(1, color="0.4", linestyle="--", linewidth=1.5)
    axes.annotate("DeepSpeed as shipped", (rates[0], 1), xytext=(6, -14), color="0.4",
                  textcoords="offset points")  # fmt: skip
    for scheme, speedups in curves.items():
        axes.plot(rates, speedups, color=colors[scheme], linewidth=2)
        at = 0 if scheme in plot_style.COLORS else len(rates) // 4  # two curves may be equal
        axes.annotate(scheme, (rates[at], speedups[at]), xytext=(6, 5), color=colors[scheme],
                      textcoords="offset points", weight="bold")  # fmt: skip
    axes.axvline(own, color="0.7", linestyle=":")
    axes.annotate(f"{own:g} Gb/s", (own, 0), xycoords=("data", "axes fraction"), xytext=(4, 6),
                  textcoords="offset points", color="0.4")  # fmt: skip
    axes.set(xscale="log", xlabel="Gb/s into a node from the others", ylim=(0, None),
             ylabel="predicted speed-up, nothing hidden", xlim=(rates[0], rates[-1]),
             title=f"{plan.model.name}, ZeRO-{plan.stage}")  # fmt: skip
    marks = (0.1, 1, 2, 5, 10, 25, 50, 100, 200, 400, 1000)
    plot_style.plain_ticks(axes.xaxis, [mark for mark in marks if rates[0] <= mark <= rates[-1]])
    plot_style.finish(axes)
    plot_style.save(figure, path)


def _rates(own: float) -> list[float]:
    """Gb/s from 1 to 400, further where the plan's own link lies there."""
    low, high = min(1.0, own / 2), max(400.0, own * 2)
    return [low * (high / low) ** (i / 60) for i in range(61)]


def _curves(plan: Any, rates: list[float]) -> dict[str, list[float]]:
    """Return speed-ups by scheme; what DeepSpeed as shipped would hide is left out."""
    from ds_quant.tools import forecast

    runs = [forecast.forecast(forecast.at_link(plan, rate)) for rate in rates]
    found = {
        rows[0].scheme: [row.speedup_serial for row in rows]
        for rows in zip(*runs, strict=True)
        if not rows[0].note
    }
    return {name: line for name, line in found.items() if max(line) > forecast.WORTH_IT}
