"""``ds_quant estimate``: the scheme to take, and the step of each scheme; no GPU, no cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from textwrap import wrap
from typing import Any

from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.tools import forecast
from ds_quant.tools.forecast import Plan, Row
from ds_quant.tools.planning import make_plan

LINKS = (1, 2.5, 10, 25, 100, 400)  # Gb/s into a node
WIDTH = 80


def main(arguments: argparse.Namespace) -> int:
    """Print the answer, a table of the schemes and their speed-up by link."""
    plan = make_plan(arguments)
    rows = forecast.forecast(plan)
    taken, sentences = forecast.answer(plan, rows)
    by_link = {}
    if plan.cluster.nodes > 1:
        by_link = {link: forecast.forecast(plan.with_link(link)) for link in LINKS}
        if plan.cluster.link < forecast.GIGABIT:
            sentences.append("below 1 Gb/s something else gains more: docs/slow_links.md")
    if arguments.json:
        facts = _facts(plan, rows, by_link, taken, sentences)
        print(json.dumps(facts, indent=2).replace("Infinity", "null"))  # JSON has no infinity
        return 0
    shown = rows
    if not arguments.all:
        shown = [row for row in rows if row.may_be_taken or row is taken]
    lines = []
    for sentence in sentences:
        lines += wrap(sentence, WIDTH)
    lines += ["", *_title(plan), "", *_table(shown, rows[0], arguments.all)]
    if by_link:
        lines += ["", *_grid(by_link, [row.scheme for row in shown])]
    print("\n".join([*lines, "", *_notes(plan, shown, arguments.all)]))
    return 0


def _facts(
    plan: Plan,
    rows: list[Row],
    by_link: dict[float, list[Row]],
    taken: Row,
    sentences: list[str],
) -> dict[str, Any]:
    """Return the forecast as JSON types."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.numel,
        **plan.facts,
        "micro_steps": plan.micro_steps,
        "compute": plan.compute,
        "presumed": plan.presumed,
        "gathers": plan.gathers,
        "best": taken.scheme,
        "answer": sentences,
        "cluster": asdict(plan.cluster),
        "rows": [asdict(row) for row in rows],
        "links": {link: [asdict(row) for row in rows] for link, rows in by_link.items()},
    }


def _title(plan: Plan) -> list[str]:
    """Describe the plan: the model, the ranks, the step, and settings that were not given."""
    cluster = plan.cluster
    ranks = f"{plan.front}, {cluster.nodes} x {cluster.node_size} ranks"
    if cluster.nodes > 1:
        ranks += f", {cluster.link * 8e-9:.3g} Gb/s into a node"
    step = f"{plan.compute:g} s of compute per step, {plan.micro_steps} micro-step(s)"
    if plan.stage == 3:
        step += f", {plan.gathers:.3g} gathers of the weights"
    lines = [plan.model.name, ranks]
    if list(plan.parts) != [plan]:
        lines += [_part(part) for part in plan.parts]
    lines.append(step)
    if plan.presumed:
        lines += wrap(f"by default: {', '.join(plan.presumed)}", WIDTH)
    return lines


def _part(part: Plan) -> str:
    """Describe a part of the model that GPUs of their own share."""
    cluster = part.cluster
    numel = f"{part.model.numel / 1e9:.3g} B parameters on a GPU"
    return f"{part.model.name}: {numel}, shared by {cluster.nodes} x {cluster.node_size}"


def _table(rows: list[Row], stock: Row, show_all: bool) -> list[str]:
    """Return a row per scheme, advised ones first.

    stock: the row of a run without the plugin, to which memory is relative.
    """
    columns: dict[str, Callable[[Row], str]] = {
        "scheme": lambda row: row.scheme,
        "B/param": lambda row: f"{row.inter_bytes:.3f}",
        **{name: partial(_bytes_of, name) for name in stock.by_part},
        "step s": lambda row: forecast.span(row.step_overlapped, row.step_serial, ".3g"),
        "speed-up": lambda row: forecast.span(*row.speedups, ".2f"),
        "+GB": lambda row: f"{(row.gpu_memory - stock.gpu_memory) / 1e9:.2f}",
    }
    if show_all:
        columns["kept"] = lambda row: f"{row.memory / 1e9:.3g}"
        columns["GPU GB"] = lambda row: f"{row.gpu_memory / 1e9:.3g}"
    if any(row.host_memory for row in rows):
        columns["host GB"] = lambda row: f"{row.host_memory / 1e9:.3g}"
    columns["limited by"] = lambda row: f"no: {row.note}" if row.note else row.limit
    advised_first = sorted(rows, key=lambda row: bool(row.note))
    cells = [[cell(row) for cell in columns.values()] for row in advised_first]
    return align(cells, list(columns))


def _bytes_of(part: str, row: Row) -> str:
    return f"{row.by_part[part]:.3f}"


def _grid(by_link: dict[float, list[Row]], schemes: Sequence[str]) -> list[str]:
    """Return a row per scheme and a column per link."""
    speedups: dict[str, list[str]] = {scheme: [] for scheme in schemes}
    for rows in by_link.values():
        for row in rows:
            if row.scheme in speedups:
                speedups[row.scheme].append(f"{row.speedup_serial:.2f}")
    # The last column is aligned to the left: an empty one.
    cells = [[scheme, *numbers, ""] for scheme, numbers in speedups.items()]
    headers = ["scheme", *map(str, by_link), ""]
    return ["speed-up by Gb/s between nodes, nothing hidden:", *align(cells, headers)]


def _notes(plan: Plan, rows: list[Row], show_all: bool) -> list[str]:
    """Explain the columns."""
    notes = [
        "step s and speed-up: communication fully hidden to not hidden at all.",
        "+GB per GPU: kept between steps, and messages and sums at most.",
        "This is time and memory: loss is in docs/choosing.md.",
        *plan.assumptions,
    ]
    most = [f"{row.most_bytes:.3f} ({row.scheme})" for row in rows if row.most_bytes]
    if most:
        notes.append(f"lossless: {LOSSLESS_BITS} bits per weight at a learning rate of 3e-4.")
    if most and show_all:
        notes.append("at most, in B/param: " + ", ".join(most))
    if not show_all:
        notes.append("--all shows every scheme and its memory.")
    return notes


def align(rows: list[list[str]], headers: list[str]) -> list[str]:
    """Align columns; the first and the last one to the left."""
    table = [headers, *rows]
    last = len(headers) - 1
    widths = [max(len(row[column]) for row in table) for column in range(len(headers))]
    lines = []
    for row in table:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column in (0, last) else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
