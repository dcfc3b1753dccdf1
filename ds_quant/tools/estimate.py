"""``ds_quant estimate``: what to take, and the step of each scheme; no GPU, no cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.tools import forecast, plot_style
from ds_quant.tools.forecast import Plan, Row
from ds_quant.tools.planning import make_plan

LINKS = (10, 25, 100, 200, 400)  # Gb/s into a node
MICRO_STEPS = (1, 4, 16)


def main(arguments: argparse.Namespace) -> int:
    """Print the answer, and the table below it."""
    plan = make_plan(arguments)
    rows = forecast.forecast(plan)
    taken, said = forecast.answer(plan, rows)
    said += forecast.other_stage(plan, taken)
    several = plan.cluster.nodes > 1
    if several and plan.cluster.link < forecast.GIGABIT:
        said.append("below 1 Gb/s something else gains more: docs/slow_links.md")
    links = {link: forecast.forecast(plan.at(link=link)) for link in LINKS * several}
    counts = {k: forecast.forecast(plan.at(micro_steps=k)) for k in MICRO_STEPS * several}
    if arguments.plot is not None:
        plot(plan, arguments.plot)
    if arguments.json:
        facts = {
            "model": plan.model.name, "parameters": plan.model.numel, "stage": plan.stage,
            "micro_steps": plan.micro_steps, "compute": plan.compute, "gathers": plan.gathers,
            "best": taken.scheme, "answer": said, "cluster": asdict(plan.cluster),
            "rows": list(map(asdict, rows)),
            "links": {link: list(map(asdict, of)) for link, of in links.items()},
            "accumulations": {k: {r.scheme: r.inter_bytes for r in of} for k, of in counts.items()},
        }  # fmt: skip
        print(json.dumps(facts, indent=2).replace("Infinity", "null"))  # which JSON lacks
        return 0
    shown = [
        row
        for row in rows  # what may be taken, whether it fits or not
        if arguments.all or row is taken or not row.note or row.note.startswith("needs ")
    ]
    names = {row.scheme for row in shown}
    lines = [line for text in said for line in wrap(text, 80)]
    lines += ["", *_title(plan), "", *_table(shown, rows[0], arguments.all)]
    lines += _grid("speed-up by Gb/s between nodes, nothing hidden:", links, names,
                   lambda row: f"{row.speedup_serial:.2f}")  # fmt: skip
    if arguments.all:
        lines += _grid("B/param between nodes by micro-steps of an optimizer step:", counts, names,
                       lambda row: f"{row.inter_bytes:.3f}")  # fmt: skip
    print("\n".join([*lines, "", *_notes(shown, arguments.all)]))
    return 0


def _title(plan: Plan) -> list[str]:
    cluster = plan.cluster
    link = f", {cluster.link * 8e-9:.3g} Gb/s into a node" * (cluster.nodes > 1)
    gathers = f", {plan.gathers:.3g} gathers of the weights" * (plan.stage == 3)
    return [
        plan.model.name,
        f"ZeRO-{plan.stage}, {cluster.nodes} x {cluster.node_size} ranks{link}",
        f"{plan.compute:g} s of compute per step, {plan.micro_steps} micro-step(s){gathers}",
    ]


def _table(rows: list[Row], base: Row, every: bool) -> list[str]:
    """The schemes that may be taken, then those that are not to be."""
    columns: dict[str, Callable[[Row], str]] = {
        "scheme": lambda row: row.scheme,
        "B/param": lambda row: f"{row.inter_bytes:.3f}",
        "step s": lambda row: forecast.span(row.step_overlapped, row.step_serial, ".3g"),
        "speed-up": lambda row: forecast.span(*row.speedups, ".2f"),
        "+GB": lambda row: f"{(row.gpu_memory - base.gpu_memory) / 1e9:.2f}",
    }
    if every:
        columns["kept"] = lambda row: f"{row.memory / 1e9:.3g}"
        columns["GPU GB"] = lambda row: f"{row.gpu_memory / 1e9:.3g}"
    if any(row.host_memory for row in rows):
        columns["host GB"] = lambda row: f"{row.host_memory / 1e9:.3g}"
    columns["limited by"] = lambda row: f"no: {row.note}" if row.note else row.limit
    ordered = sorted(rows, key=lambda row: bool(row.note))
    return align([[cell(row) for cell in columns.values()] for row in ordered], list(columns))


def _grid(
    title: str, found: Mapping[int, list[Row]], shown: set[str], cell: Callable[[Row], str]
) -> list[str]:
    """A column per link or accumulation."""
    if not found:
        return []
    names = [row.scheme for row in next(iter(found.values()))]
    columns = [names, *([cell(row) for row in rows] for rows in found.values()), [""] * len(names)]
    rows = [list(row) for row in zip(*columns, strict=True) if row[0] in shown]
    return ["", title, *align(rows, ["scheme", *map(str, found), ""])]


def _notes(rows: list[Row], every: bool) -> list[str]:
    most = [f"{row.most_bytes:.3f} ({row.scheme})" for row in rows if row.most_bytes]
    return [
        "step s and speed-up: communication fully hidden to not hidden at all.",
        "+GB per GPU: kept between steps, and messages and sums at most.",
        "This is time and memory: loss is in docs/choosing.md.",
        *[f"lossless: {LOSSLESS_BITS} bits per weight at a learning rate of 3e-4."] * bool(most),
        "at most, in B/param: " + ", ".join(most)
        if every
        else "--all shows every scheme, memory and accumulation.",
    ]


def align(rows: list[list[str]], headers: list[str]) -> list[str]:
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


def plot(plan: Plan, path: Path) -> None:
    """Plot speed-up without overlap against link rate, for the schemes that may be taken."""
    pyplot = plot_style.pyplot()
    if plan.cluster.nodes == 1:
        raise ValueError("--plot: one node has no link between nodes to vary")
    own, rates = plan.cluster.link * 8e-9, [400 ** (i / 60) for i in range(61)]
    runs = zip(*(forecast.forecast(plan.at(link=rate)) for rate in rates), strict=True)
    good = {of[0].scheme: [row.speedup_serial for row in of] for of in runs if not of[0].note}
    curves = {name: line for name, line in good.items() if max(line) > forecast.WORTH_IT}
    colors = plot_style.colors(curves)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.axhline(1, color="0.4", linestyle="--", linewidth=1.5)
    axes.annotate("DeepSpeed as shipped", (rates[0], 1), xytext=(6, -14), color="0.4",
                  textcoords="offset points")  # fmt: skip
    for scheme, speedups in curves.items():
        axes.plot(rates, speedups, color=colors[scheme], linewidth=2)
        at = 0 if scheme in plot_style.COLORS else len(rates) // 4  # two curves may be equal
        axes.annotate(scheme, (rates[at], speedups[at]), xytext=(6, 5), color=colors[scheme],
                      textcoords="offset points", weight="bold")  # fmt: skip
    if rates[0] <= own <= rates[-1]:
        axes.axvline(own, color="0.7", linestyle=":")
    axes.set(xscale="log", xlabel="Gb/s into a node from the others", ylim=(0, None),
             ylabel="predicted speed-up, nothing hidden", xlim=(rates[0], rates[-1]),
             title=f"{plan.model.name}, ZeRO-{plan.stage}")  # fmt: skip
    plot_style.plain_ticks(axes.xaxis, (1, 2, 5, 10, 25, 50, 100, 200, 400))
    plot_style.save(figure, path)
