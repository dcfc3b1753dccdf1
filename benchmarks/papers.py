"""Every claim of QSDP and SDP4Bit beside what comes out here: docs/papers.md and its two pictures.

    python benchmarks/papers.py                  # write the page and the pictures from the results
    python benchmarks/papers.py --check          # compare committed figures with the tolerances
    python benchmarks/papers.py --row S4         # measure one row now
    python benchmarks/papers.py --quick          # measure all rows that take seconds

The rows are in claims.py. --row of a row that takes hours runs the command that the row names; the
results lie where that command puts them. --quick writes OUT/papers.json, and with `--json
benchmarks/results/papers.json` the committed figures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import quick
import report
import sections
from claims import CLAIMS, MEASURED, OURS, QSDP, SDP4BIT, UNCHECKED, Claim, Point, Results

PAGE = sections.ROOT / "docs" / "papers.md"
PICTURES = {QSDP: "papers_qsdp.png", SDP4BIT: "papers_sdp4bit.png"}

ABOUT = f"""\
# What do the papers claim, and what comes out here?

One row per claim of QSDP (Markov et al., ICML 2023) and of SDP4Bit (Jia et al., NeurIPS 2024), and
two of our own. Made by `benchmarks/papers.py`; `make test` checks that the page shows the figures
of the result files, and that every row meets its tolerance or says why not.

- **Paper**: the figures of the paper. {UNCHECKED}: quoted from memory and secondary sources, not
  checked against the paper. Of QSDP only its abstract was read: up to 2.2 times as fast, up to
  1.3 B parameters, accuracy preserved, "essentially no overheads". SDP4Bit's figures were read in
  the paper.
- **Here**: ours, with the 95 % interval of a loss or half the range of a step time. Losses are
  held-out losses over that of full precision, of byte-level GPTs of 0.14 to 3.3 M parameters: see
  [results.md](results.md). Step times are those of two hosts of two CPU processes, unless
  the row says otherwise; half the range of a median is not an interval.
- **Verdict**: *as in the paper*: our figures meet the tolerance of the row. *Otherwise*: they do
  not, and the row says why. *In part*: part of the claim is not measured, see what the row needs.
  *Predicted*: nothing is measured; the figures follow from bytes or a model.
"""


# ---- what the figures say ----


def points_of(claim: Claim, results: Results) -> dict[str, Point]:
    """Return the points of a claim by label."""
    return {point.label: point for point in claim.points(results)}


VERDICTS = {"measured": "as in the paper", "partly": "in part", "predicted": "predicted"}


def verdict(claim: Claim) -> str:
    if claim.differs:
        return "otherwise"
    return "holds" if claim.paper == OURS else VERDICTS[claim.evidence]


def problems(claim: Claim, results: Results) -> list[str]:
    """Return what is wrong with a row: figures and verdict disagree, or a gap has no reason."""
    points = points_of(claim, results)
    found = []
    holds = claim.holds(points)
    if holds and claim.differs:
        found.append(
            f"{claim.id}: its figures meet the tolerance ({claim.tolerance}), but the row says why "
            "they do not: remove `differs`"
        )
    if not holds and not claim.differs:
        found.append(
            f"{claim.id}: its figures do not meet the tolerance ({claim.tolerance}): measure "
            f"again, or say why in `differs`: {_listed(points.values())}"
        )
    if claim.evidence != MEASURED and not claim.needs:
        found.append(f"{claim.id}: {claim.evidence}, and `needs` does not say what it takes")
    if not claim.needs and any(point.ours is None for point in points.values()):
        found.append(f"{claim.id}: a point without a figure of ours, and nothing in `needs`")
    return found


def _listed(points: Iterable[Point]) -> str:
    return "; ".join(f"{point.label}: {ours(point)}" for point in points)


def ours(point: Point) -> str:
    """Format our figure with its interval."""
    if point.ours is None:
        return "not measured: see *Needs*"
    text = number(point.ours, point.unit)
    if point.half is not None:
        text += f" +-{number(point.half, point.unit).lstrip('+')}"
    return text + _unit(point.unit)


def theirs(point: Point, claim: Claim) -> str:
    """Format the paper's figure."""
    if point.theirs is None:
        return ""
    mark = f" {UNCHECKED}" if claim.unchecked else ""
    return number(point.theirs, point.unit) + _unit(point.unit) + mark


def number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:+.3f}" if abs(value) < 1 else f"{value:+.2f}"
    if unit == "x":
        return f"{value:.2f}"
    return f"{value:.3g}"


def _unit(unit: str) -> str:
    return {"%": " %", "x": "x", "f": ""}.get(unit, f" {unit}")


# ---- the page ----


def page(results: Results) -> str:
    """Return docs/papers.md."""
    rows = []
    for claim in CLAIMS:
        mark = f" {UNCHECKED}" if claim.unchecked else ""
        rows.append(
            [
                f"[{claim.id}](#{claim.id.lower()})",
                claim.name,
                f"{claim.theirs}{mark}",
                summary(claim, results),
                verdict(claim),
            ]
        )
    parts = [ABOUT.strip(), table(["", "claim", "paper", "here", "verdict"], rows)]
    hours = sum(claim.hours for claim in CLAIMS)
    parts.append(f"The figures of rows that say so took {hours:.1f} hours together.")
    for paper, picture in PICTURES.items():
        parts.append(f"![{paper}: figures of the paper beside ours]({picture})")
    parts += [details(claim, results) for claim in CLAIMS]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of text."""
    return sections.table(header, rows).replace("---:", "---")


def summary(claim: Claim, results: Results) -> str:
    """Return the points of a claim for the table at the top."""
    points = points_of(claim, results)
    return _listed(points[label] for label in claim.shown or list(points)[:2])


def details(claim: Claim, results: Results) -> str:
    """Return the section of a claim."""
    points = points_of(claim, results)
    has_theirs = any(point.theirs is not None for point in points.values())
    header = ["", "paper", "here"] if has_theirs else ["", "here"]
    rows = []
    for point in points.values():
        cells = [point.label, theirs(point, claim), ours(point)]
        rows.append(cells if has_theirs else [cells[0], cells[2]])
    lines = [
        f"## {claim.id}",
        f"**{claim.name}**" + ("" if claim.paper == OURS else f" {claim.paper}, {claim.place}."),
        sections.table(header, rows),
    ]
    if claim.differs:
        lines.append(f"**Otherwise.** {claim.differs}")
    facts = [f"- How: {claim.how}.", f"- Tolerance: {claim.tolerance}."]
    if claim.measure is not None:
        facts.append(f"- Seconds: `python benchmarks/papers.py --row {claim.id}`")
    if claim.command:
        facts.append(f"- Command: `{claim.command}`")
    if claim.needs:
        facts.append(f"- Needs: {claim.needs}.")
    if claim.hours:
        facts.append(f"- Took: about {60 * claim.hours:.0f} minutes.")
    lines.append("\n".join(facts))
    return "\n\n".join(lines)


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page of papers.json: see sections.py."""
    rows = []
    for claim_id, figures in result["figures"].items():
        for label, figure in figures.items():
            if not label.startswith("step "):  # points of curves
                rows.append([claim_id, label, f"{figure:.4g}"])
    about = (
        "Measured in seconds, for [docs/papers.md](../../docs/papers.md), which says what each is."
    )
    return "Rows of the papers that take seconds", f"{about}\n\n{table(['row', '', ''], rows)}"


# ---- pictures ----


def draw_qsdp(results: Results, path: Path) -> None:
    """Draw the stall, the losses at low widths, and the speed-ups of QSDP."""
    from ds_quant.tools import plot_style

    figure, (stall, low_widths, speed_ups) = plot_style.pyplot().subplots(3, 1, figsize=(7, 13))
    curves: dict[str, list[tuple[int, float]]] = {}
    for label, f in results.quick("Q1").items():
        if label.startswith("step "):
            step, _, rounding = label.removeprefix("step ").partition(", ")
            curves.setdefault(rounding, []).append((int(step), f))
    shades = plot_style.colors(curves)
    for rounding, points in curves.items():
        stall.plot(*zip(*points, strict=True), color=shades[rounding], label=rounding)
    stall.set(
        yscale="log",
        xlabel="step",
        ylabel="f",
        title=f"Q1: on points {quick.CURVE_GRID:g} apart nearest rounding stalls",
    )
    by_id = {claim.id: claim for claim in CLAIMS}
    low = points_of(by_id["Q3"], results)
    widths = (4, 5, 6)
    names = [f"{name}, {kind}" for name in ("shift", "nearest", "learned") for kind in KINDS]
    shades = plot_style.colors(names)
    for name in names:
        rounding, _, kind = name.partition(", ")
        found = [low[f"{bits} bits, {rounding}, {kind} weights"] for bits in widths]
        low_widths.errorbar(
            widths,
            [point.ours for point in found],
            [point.half or 0.0 for point in found],
            color=shades[name],
            marker="o" if kind == "exact" else "s",
            linestyle="-" if kind == "exact" else ":",
            capsize=3,
            label=f"{rounding}, {kind} weights",
        )
    low_widths.set(
        yscale="log",
        xlabel="bits of the weights",
        ylabel="loss above full precision, %",
        title="Q3: learned levels help the decoded weights",
    )
    low_widths.set_xticks(widths)
    plot_style.plain_ticks(low_widths.yaxis)
    speeds: dict[str, Point] = {}
    for claim_id in ("Q6", "Q7"):
        for label, point in points_of(by_id[claim_id], results).items():
            if "50 Mbit/s" not in label:  # near those of 10 Mbit/s
                speeds[f"{claim_id}, {label}"] = point
    _dots(speed_ups, speeds, "speed-up", "Q6, Q7: speed-ups")
    for axes in (stall, low_widths, speed_ups):
        plot_style.add_legend(axes)
    figure.suptitle("QSDP: figures of the paper beside ours")
    plot_style.save(figure, path)


KINDS = ("exact", "decoded")


def draw_sdp4bit(results: Results, path: Path) -> None:
    """Draw losses and speed-ups of SDP4Bit, the paper's beside ours."""
    from ds_quant.tools import plot_style

    figure, (loss, speed_ups) = plot_style.pyplot().subplots(2, 1, figsize=(7, 14))
    by_id = {claim.id: claim for claim in CLAIMS}
    losses: dict[str, Point] = {}
    for claim_id in ("S1", "S2"):
        for label, point in points_of(by_id[claim_id], results).items():
            losses[f"{claim_id}, {label.replace('`', '')}"] = point
    _dots(loss, losses, "loss above the baseline, %", "S1, S2: what a scheme costs in loss")
    loss.set_xscale("symlog", linthresh=0.1)
    loss.set_xlim(-0.3, 20)
    loss.set_xticks([-0.05, 0, 0.05, 0.1, 1, 10], ["-0.05", "0", "0.05", "0.1", "1", "10"])
    speeds: dict[str, Point] = {}
    for claim_id in ("S5", "S6", "S7"):
        for label, point in points_of(by_id[claim_id], results).items():
            if point.theirs is not None:
                speeds[f"{claim_id}, {label}"] = point
    _dots(
        speed_ups, speeds, "speed-up", "S5 to S7: by bytes; S5, S7 with one link rate per cluster"
    )
    for axes in (loss, speed_ups):
        plot_style.add_legend(axes)
    figure.suptitle("SDP4Bit: figures of the paper beside ours")
    plot_style.save(figure, path)


def _dots(axes: Any, points: dict[str, Point], unit: str, title: str) -> None:
    """Draw the paper's figures as hollow marks and ours as filled ones, a row per point."""
    from ds_quant.tools import plot_style

    points = {label: p for label, p in points.items() if (p.ours, p.theirs) != (None, None)}
    shades = plot_style.colors(("the paper", "here"))
    for kind, marker, filled in (("the paper", "D", "none"), ("here", "o", shades["here"])):
        rows, found, halves = [], [], []
        for row, point in enumerate(points.values()):
            figure = point.theirs if kind == "the paper" else point.ours
            if figure is not None:
                rows.append(row)
                found.append(figure)
                halves.append((point.half or 0.0) if kind == "here" else 0.0)
        axes.errorbar(
            found,
            rows,
            xerr=halves,
            fmt=marker,
            color=shades[kind],
            markerfacecolor=filled,
            capsize=3,
            label=kind,
        )
    axes.set_yticks(range(len(points)), [plot_style.wrapped(label) for label in points])
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw nothing: papers.json has no picture of its own. See sections.py."""


# ---- the command ----


def measured(chosen: Sequence[Claim]) -> dict[str, dict[str, float]]:
    """Measure claims of seconds. Return their figures by claim."""
    figures = {}
    for claim in chosen:
        assert claim.measure is not None  # chosen for it
        print(f"{claim.id}: {claim.name}", flush=True)
        figures[claim.id] = claim.measure()
        for label, figure in figures[claim.id].items():
            if not label.startswith("step "):
                print(f"    {label}: {figure:.4g}", flush=True)
    return figures


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    ids = [claim.id for claim in CLAIMS]
    add("--row", choices=ids, metavar="ID", help=f"measure one row: {', '.join(ids)}")
    add("--quick", action="store_true", help="measure all rows that take seconds")
    add("--check", action="store_true", help="compare figures and page, write nothing")
    add("--results", type=Path, default=sections.RESULTS, help="folder of result files")
    add("--page", type=Path, default=PAGE)
    add("--out", type=Path, default=Path("papers_out"))
    add("--json", type=Path, help="of --quick; default: OUT/papers.json")
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "papers.json"
    return args


def run(claim: Claim) -> int:
    """Run the command of a row, which may take hours and goes on where it stopped."""
    words = shlex.split(claim.command)
    python = words.index("python")
    words[python] = sys.executable
    return subprocess.run(words, cwd=sections.ROOT).returncode


def check(results: Results, path: Path) -> int:
    """Print what is wrong with rows and page. Return 1 if something is."""
    found = [problem for claim in CLAIMS for problem in problems(claim, results)]
    if not path.exists() or path.read_text("utf-8") != page(results):
        found.append(f"{path} is not up to date: run benchmarks/papers.py")
    for problem in found:
        print(f"papers.py: {problem}", file=sys.stderr)
    return int(bool(found))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    results = Results(args.results)
    if args.row is not None:
        (claim,) = [claim for claim in CLAIMS if claim.id == args.row]
        print(details(claim, results), flush=True)
        if claim.measure is not None:
            measured([claim])
            return 0
        return run(claim)
    if args.quick:
        figures = measured([claim for claim in CLAIMS if claim.measure is not None])
        report.save(args.json, "papers", {"quick": True}, figures=figures)
        return 0
    if args.check:
        return check(results, args.page)
    args.page.write_text(page(results), "utf-8")
    draw_qsdp(results, args.page.with_name(PICTURES[QSDP]))
    draw_sdp4bit(results, args.page.with_name(PICTURES[SDP4BIT]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
