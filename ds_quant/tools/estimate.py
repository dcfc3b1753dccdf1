"""``ds_quant estimate``: predict bytes and step time of each scheme; no GPU, no cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_quant.tools import plot_style

_HEADERS = (
    "scheme", "B/param", "comm s", "step s", "speed-up", "kept GB", "peak GB", "GPU GB",
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from ds_quant.tools.planning import make_plan

    _show(make_plan(arguments), arguments)
    return 0


def _show(plan: Any, arguments: argparse.Namespace) -> None:
    from ds_quant.tools import forecast

    rows = forecast.forecast(plan)
    chosen, (links, accumulations) = forecast.best(rows), forecast.variants(plan)
    good = [row.scheme for row in rows if not row.note]
    if arguments.plot is not None:
        plot(plan, arguments.plot)
    if arguments.json:
        facts = {
            "model": plan.model.name, "parameters": plan.model.numel, "stage": plan.stage,
            "micro_steps": plan.micro_steps, "compute": plan.compute, "best": chosen.scheme,
            "gathers": plan.gathers,
            "cluster": {**asdict(plan.cluster), "flops": None}, "rows": forecast.as_json(rows),
            "links": {link: forecast.as_json(row for row in found if row.scheme in good)
                      for link, found in links.items()},
            "accumulations": {count: {row.scheme: row.inter_bytes for row in found}
                              for count, found in accumulations.items()},
        }  # fmt: skip
        print(json.dumps(_finite(facts), indent=2))
        return
    hybrid = [row.scheme for row in rows if row.scheme.startswith("HSDP")]
    lines = [
        *_tables(rows),
        *_grid("speed-up by link between nodes, nothing hidden:", "{} Gb/s", links,
               lambda row: f"{row.speedup_serial:.2f}", good),
        *_grid("B/param between nodes and step, by micro-steps k of an optimizer step:", "k = {}",
               accumulations, lambda row: f"{row.inter_bytes:.3f}", [*good, *hybrid]),
    ]  # fmt: skip
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

    offloaded = any(row.host_memory for row in rows)
    headers = (*_HEADERS, "host GB") if offloaded else _HEADERS
    good = [(*cells(row, offloaded), row.limit) for row in rows if not row.note]
    others = [(*cells(row, offloaded), row.note) for row in rows if row.note]
    lines = table(good, (*headers, "limited by"))
    if others:
        lines += ["", "not chosen by itself:", *table(others, (*headers, "because"))]
    most = [f"{row.most_bytes:.3f} B/param ({row.scheme})" for row in rows if row.most_bytes]
    if most:
        lines += ["", f"exact differences take {LOSSLESS_BITS} bits per weight, as at a learning "
                  "rate of 3e-4; fewer below it, and at most", ", ".join(most)]  # fmt: skip
    return [
        *lines, "",
        "step s and speed-up: communication fully hidden to not hidden at all; GB per GPU: kept "
        "between steps, messages and",
        "sums at most, and all with DeepSpeed's own states under Adam, without activations",
        *(["host GB: what is offloaded of a GPU, with what is kept of the weights"] * offloaded),
    ]  # fmt: skip


def _grid(
    title: str, heading: str, found: dict[int, list[Any]], cell: Callable[[Any], str],
    schemes: list[str],
) -> list[str]:  # fmt: skip
    """A column per link or accumulation."""
    if not found:
        return []
    columns = [{row.scheme: cell(row) for row in rows} for rows in found.values()]
    rows = [(name, *(column[name] for column in columns), "") for name in schemes]
    return ["", title, *table(rows, ("scheme", *map(heading.format, found), ""))]


def _advice(chosen: Any) -> list[str]:
    from ds_quant.tools import forecast

    if chosen.scheme == forecast.SHIPPED:
        fits = f" ({chosen.note})" if chosen.note else ""
        return ["", "nothing gains 2 %: this link is not what limits the step; leave the block "
                f"out{fits}"]  # fmt: skip
    less = [
        "exact, too, in fewer bytes: lossless; then lossless_w_g3, whose gradients are not exact"
    ]
    return [
        "", f"shortest step: {chosen.scheme}", *(less if chosen.scheme == "hybrid" else ()),
        "this is time only: what a scheme costs in loss is in docs/choosing.md",
    ]  # fmt: skip


def _finite(value: Any) -> Any:
    """JSON has no infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if value == float("inf") else value


def cells(row: Any, offloaded: bool = False) -> tuple[str, ...]:
    """Format a row of the table except its last column."""
    low, high = row.speedups
    return (
        row.scheme, f"{row.inter_bytes:.3f}", f"{row.communication:.3g}",
        f"{row.step_overlapped:.3g} - {row.step_serial:.3g}", f"{low:.2f} - {high:.2f}",
        f"{row.memory / 1e9:.3g}", f"{row.peak / 1e9:.3g}", f"{row.gpu_memory / 1e9:.3g}",
        *([f"{row.host_memory / 1e9:.3g}"] * offloaded),
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
