"""docs/results.md from the committed result files: every number with its origin.

    python benchmarks/make_report.py            # write
    python benchmarks/make_report.py --check    # exit 1 if the file is not up to date

The text depends on nothing but the files, so it can be compared byte for byte. May import
results_schema and the standard library.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from statistics import fmean

import results_schema as schema

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

INTRODUCTION = """\
# Measured results

Made by `make report` from `benchmarks/results/*.json`; do not edit. Times hold for the machine
named beside them. Loss is in nats per byte of text, bytes are received per parameter and optimizer
step.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, rule, *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


@singledispatch
def section(result: object) -> tuple[str, str]:
    """Heading and body of one file's part."""
    raise TypeError(f"no section for {type(result).__name__}")


@section.register
def _(result: schema.Comparison) -> tuple[str, str]:
    given = result.arguments
    rows = [
        [
            f"`{row.label}`", f"{row.final_loss:.4f}", number(row.gap_percent, "+.2f"),
            f"{row.validation_loss:.4f}", number(row.wire_bytes, ".3f"),
            f"{1e3 * row.step_seconds:.0f}",
        ]
        for row in result.summary
    ]  # fmt: skip
    header = ["scheme", "final loss", "gap %", "held-out loss", "B/param/step", "step ms"]
    heading = f"Comparison: ZeRO-{given['stage']}, {given['world']} ranks, {given['steps']} steps"
    return heading, table(header, rows)


@section.register
def _(result: schema.CodecTable) -> tuple[str, str]:
    rows = [
        [
            f"{row.codec}, {row.input}", f"{row.encode_gelem_s:.2f}", f"{row.decode_gelem_s:.2f}",
            f"{row.encode_copy_ratio:.2f} / {row.decode_copy_ratio:.2f}",
            f"{row.squared_error:.1e}", f"{row.bits_per_element:.3f}",
        ]
        for row in result.rows
    ]  # fmt: skip
    header = ["codec, input", "encode Gelem/s", "decode Gelem/s", "share of a copy's speed",
              "squared error", "bits"]  # fmt: skip
    return "Codecs", table(header, rows)


@section.register
def _(result: schema.LevelTable) -> tuple[str, str]:
    rows = [
        [str(row.bits), f"{row.error_after_0:.2e}", f"{row.error_after_1:.2e}",
         f"{row.error_after_4:.2e}", f"{row.error_after_4 / row.error_after_0:.2f}"]
        for row in result.rows
    ]  # fmt: skip
    header = ["bits", "uniform", "after 1 update", "after 4 updates", "ratio"]
    body = "Squared error of trained weights over their energy, uniform and learned levels.\n\n"
    return "Learned levels", body + table(header, rows)


@section.register
def _(result: schema.ErrorStudy) -> tuple[str, str]:
    weights = [
        [f"`{run.scheme}`, lr {run.lr:g}", f"{max(run.ratio):.3f}",
         f"{fmean(run.ratio[len(run.ratio) // 2 :]):.3f}", f"{run.loss:.3f}"]
        for run in result.runs
    ]  # fmt: skip
    gradients = [
        [f"`{name}`, lr {run.lr:g}", f"{fmean(g[name] for g in run.gradients):.4f}"]
        for run in result.runs
        if run.gradients
        for name in run.gradients[0]
    ]
    body = (
        "Error of the weights over that of a plain bf16 copy (1.00: nothing lost beyond bf16).\n\n"
        + table(["scheme", "largest", "mean of the second half", "last loss"], weights)
        + "\n\nSquared error of summed gradients over their energy, mean over the training.\n\n"
        + table(["scheme", "error"], gradients)
        + "".join(f"\n\n{part}" for part in (_layers(result.runs[0]), _bits(result.bits)) if part)
    )
    return "What the codecs lose in training", body


def _layers(run: schema.ErrorRun) -> str:
    """Errors of every matrix at the end of one training."""
    if not run.layers:
        return ""
    schemes = list(run.layers[0].gradients)
    rows = [
        [f"`{layer.name}`", f"{layer.ratio:.3f}", *[f"{layer.gradients[s]:.4f}" for s in schemes]]
        for layer in run.layers
    ]
    header = ["matrix", f"weights, `{run.scheme}`", *[f"gradients, `{name}`" for name in schemes]]
    title = f"By matrix, at the last measurement of `{run.scheme}`, lr {run.lr:g}:"
    return f"{title}\n\n{table(header, rows)}"


def _bits(bits: dict[str, dict[str, float]]) -> str:
    """Effective bits of every scheme's codecs."""
    if not bits:
        return ""
    roles = list(dict.fromkeys(role for codecs in bits.values() for role in codecs))
    rows = [
        [f"`{name}`", *[number(codecs.get(role), ".3f") for role in roles]]
        for name, codecs in bits.items()
    ]
    return f"Effective bits per element, scales included:\n\n{table(['scheme', *roles], rows)}"


@section.register
def _(result: schema.Convergence) -> tuple[str, str]:
    given = result.arguments
    rows = [
        [f"`{gap.label}`", *[f"{value:+.2f}" for value in gap.gaps], f"{gap.mean:+.3f}",
         "n/a" if gap.half_width is None else f"+-{gap.half_width:.2f}", f"{gap.spread:.2f}"]
        for gap in result.gaps
    ]  # fmt: skip
    header = ["scheme", *[f"seed {seed}" for seed in given["seed"]], "mean gap %", "95 %", "spread"]
    heading = f"Convergence: ZeRO-{given['stage']}, {given['world']} ranks, {given['steps']} steps"
    body = (
        "Gap of the mean loss of the last 50 steps to full precision, paired seed by seed; the\n"
        "interval is Student's. Where it contains 0, these seeds show no difference.\n\n"
    )
    return heading, body + table(header, rows)


@section.register
def _(result: schema.Speed) -> tuple[str, str]:
    header = ["Mbit/s, scheme", "step s", "speed-up (range)", "bytes allow", "B/param in",
              "counted", "quiet blocks"]  # fmt: skip
    parts = []
    for point in result.points:
        rows = [
            [f"{row.rate:g} `{row.scheme}`" if row.rate else f"unshaped `{row.scheme}`",
             f"{row.seconds:.3f}",
             f"{row.speedup:.2f} ({row.speedup_min:.2f}-{row.speedup_max:.2f})",
             f"{row.bytes_bound:.2f}", f"{row.interface_bytes:.3f}",
             number(row.counted_bytes or None, ".3f"),
             f"{row.clean_blocks} of {result.arguments['blocks']}"]
            for row in point.rows
        ]  # fmt: skip
        parts.append(f"### {point.title}\n\n{table(header, rows)}")
    body = (
        "Speed-up over `full_precision` in the same block, median and range; the bound follows\n"
        "from the bytes that the interfaces counted. With no quiet block, others used the\n"
        "processor throughout and the times are worth little.\n\n"
    )
    return "Step times against link rate", body + "\n\n".join(parts)


@section.register
def _(result: schema.Overlap) -> tuple[str, str]:
    header = ["Mbit/s, scheme", "step s", "waiting", "compute s", "waiting", "exposed s", "waiting",
              "ratio (range)", "quiet blocks"]  # fmt: skip
    rows = [
        [f"{row.rate:g} `{row.scheme}`", f"{row.seconds:.3f}", f"{row.seconds_waiting:.3f}",
         f"{row.compute:.3f}", f"{row.compute_waiting:.3f}", f"{row.exposed:.3f}",
         f"{row.exposed_waiting:.3f}",
         f"{row.ratio:.2f} ({row.ratio_min:.2f}-{row.ratio_max:.2f})",
         f"{row.clean_blocks} of {result.arguments['blocks']}"]
        for row in result.rows
    ]  # fmt: skip
    body = (
        f'{result.title}. "Waiting" is the same engine with every message awaited where it is\n'
        "posted. Compute is the step without a rate limit, exposed what a step takes beyond it;\n"
        "the ratio is that of both exposed times, median of neighbouring blocks and range.\n\n"
    )
    return "Exposed communication", body + table(header, rows)


@section.register
def _(result: schema.Collectives) -> tuple[str, str]:
    header = ["Mbit/s, operation, bf16 bytes, scheme", "ms (range)", "bus MB/s", "wire MB/s",
              "speed-up"]  # fmt: skip
    rows = [
        [f"{f'{row.rate:g}' if row.rate else 'unshaped'} {row.operation} {2 * row.numel} "
         f"`{row.scheme}`",
         f"{1e3 * row.seconds:.1f} ({1e3 * row.fastest:.1f}-{1e3 * row.slowest:.1f})",
         f"{row.bus_bandwidth / 1e6:.1f}", f"{row.wire_bandwidth / 1e6:.1f}",
         f"{row.speedup:.2f}"]
        for row in result.rows
    ]  # fmt: skip
    body = (
        f"On {result.arguments['topology']} ranks. Bus bandwidth is what nccl-tests call so, on\n"
        "the bytes of the tensor in bf16; wire bandwidth is on the bytes that a rank received.\n"
        "Encoding and decoding are part of the time.\n\n"
    )
    return "Bandwidth of collectives", body + table(header, rows)


@section.register
def _(result: schema.Glue) -> tuple[str, str]:
    rows = [
        [f"ZeRO-{row.case}, {row.codec}", f"{1e3 * row.plain_seconds:.0f}",
         f"{1e3 * row.seconds:.0f}",
         f"{row.added_us:.1f} ({row.added_us_low:.1f} to {row.added_us_high:.1f})",
         f"{row.added_us_least:.1f}"]
        for row in result.rows
    ]  # fmt: skip
    header = ["case, codec", "DeepSpeed ms", "with plugin ms", "added us per parameter",
              "of the fastest steps"]  # fmt: skip
    body = (
        f"CPU time of an optimizer step with {result.rows[0].parameters} tiny parameters, without "
        'transport;\nmedian and quartiles. "empty": matrices take a quantizer that does nothing, '
        "which leaves\nwhat Python does for it.\n\n"
    )
    return "Python time around the collectives", body + table(header, rows)


@section.register
def _(result: schema.Threshold) -> tuple[str, str]:
    header = ["stage, scheme, elements", "added us (quartiles)", "saved bytes", "pays below Mbit/s"]
    rows = [
        [f"ZeRO-{row.stage} `{row.scheme}` {row.numel}",
         f"{row.added_us:.0f} ({row.added_us_low:.0f} to {row.added_us_high:.0f})",
         f"{row.saved_bytes:.0f}", number(row.break_even, ".0f")]
        for row in result.rows
    ]  # fmt: skip
    body = (
        "CPU time that a quantized matrix adds to an optimizer step, against one in full\n"
        "precision through the same collectives, and the bytes that a rank no longer receives\n"
        "(two ranks). Below that link rate it is better quantized: `min_numel`.\n\n"
    )
    return "From which size on a matrix is worth quantizing", body + table(header, rows)


@section.register
def _(result: schema.LosslessBits) -> tuple[str, str]:
    header = ["learning rate", "unchanged", "codec", "entropy", "given the exponent"]
    rows = [
        [f"{row.lr:g}", f"{100 * row.unchanged:.0f} %",
         *(f"{bits:.2f}" for bits in (row.bits, row.entropy, row.entropy_given_exponent))]
        for row in result.rows
    ]  # fmt: skip
    body = (
        "Bits per weight and step of the exact differences between the bf16 roundings of the\n"
        f"{result.rows[0].numel} weights of a GPT in training, and entropies of the same data.\n\n"
    )
    return "Exact weights: bits per difference", body + table(header, rows)


@section.register
def _(result: schema.Scaling) -> tuple[str, str]:
    given = result.arguments
    ranks, node_size = max(row.ranks for row in result.rows), max(given["node_sizes"])
    header = ["model, ZeRO, scheme", *[f"{rate:g} Gb/s" for rate in given["rates"]]]
    found = {
        (row.model, row.stage, row.scheme, row.rate): row
        for row in result.rows
        if (row.ranks, row.node_size) == (ranks, node_size)
    }
    rows = [
        [f"{model}, {stage}, `{scheme}`",
         *[f"{row.speedup_no_overlap:.2f} / {row.speedup_full_overlap:.2f}"
           for rate in given["rates"] if (row := found.get((model, stage, scheme, rate)))]]
        for model, stage, scheme in dict.fromkeys(key[:3] for key in found)
    ]  # fmt: skip
    papers = [
        [f"{row.cluster} {row.model}", f"{row.published:.2f}",
         f"{number(row.at_stated_rate, '.2f')} ({row.stated_rate:g} Gb/s)",
         f"{row.at_fitted_rate:.2f} ({row.fitted_rate:.0f} Gb/s)", row.verdict]
        for row in result.published
    ]  # fmt: skip
    body = (
        "A cost model, nothing measured: speed-up over bf16 without and with perfect overlap,\n"
        f"{ranks} GPUs, {node_size} per node; assumptions are in the command.\n\n"
        + table(header, rows)
        + "\n\nSDP4Bit's Table 2, whose baseline reduces fp32 gradients (6 B/param/step), with the"
        "\nlink rate its clusters state, and with one rate per cluster fitted to its rows:\n\n"
        + table(["row", "published", "stated rate", "fitted rate", "verdict"], papers)
        + _lab(result.lab)
    )
    return "Predicted for larger clusters", body


def _lab(points: Sequence[schema.LabPoint]) -> str:
    """The model against the network lab."""
    if not points:
        return ""
    rows = [
        [f"{p.topology}, {p.stage}, `{p.scheme}`", f"{p.rate:g}", f"{p.measured:.3f}",
         f"{p.predicted:.3f}", f"{p.error:+.1%}"]
        for p in points
    ]  # fmt: skip
    close = sum(abs(p.error) <= 0.15 for p in points)
    return (
        "\n\nThe network lab: seconds per step as measured and as predicted from counted bytes,\n"
        "the link rate and the step without a rate limit. "
        f"{close} of {len(points)} points lie within 15 %,\nthe mean error is "
        f"{fmean(abs(p.error) for p in points):.1%}.\n\n"
        + table(["ranks, ZeRO, scheme", "Mbit/s", "measured", "predicted", "error"], rows)
    )


@section.register
def _(result: schema.PeerSuite) -> tuple[str, str]:
    body = (
        f"Tests of DeepSpeed {result.tree_version} without and with the plugin; every difference "
        "is explained in\n[peer_suite.md](peer_suite.md).\n\n"
    )
    return "DeepSpeed's own tests", body + peer_totals(result)


def peer_totals(result: schema.PeerSuite) -> str:
    """The counts of all files of the peer's suite, one row per scheme."""
    names = list(schema.PeerCounts.model_fields)
    rows = [
        [f"`{scheme}`", *[str(counts[name]) for name in names]]
        for scheme, counts in result.totals().items()
    ]
    return table(["scheme", *[name.replace("_", " ") for name in names]], rows)


def page(paths: Sequence[Path], target: Path) -> str:
    """The whole text, files in the order of their names; links are relative to `target`.

    Raises:
        ResultError: a file cannot be read.
    """
    parts = [INTRODUCTION]
    for path in sorted(paths):
        result = schema.load(path)
        heading, body = section(result)
        about = result.about()
        parts.append(
            f"## {heading}\n\n{body}\n\n{_picture(path, heading, target)}"
            f"- File: [`{path.name}`]({_link(path, target)})\n- Date: {about.date}\n"
            f"- Hardware: {about.hardware}\n- Versions: {about.versions}\n"
            f"- Command: `{about.command}`\n"
        )
    return "\n".join(parts)


def _picture(path: Path, heading: str, target: Path) -> str:
    plot = path.with_suffix(".png")
    return f"![{heading}]({_link(plot, target)})\n\n" if plot.exists() else ""


def _link(path: Path, target: Path) -> str:
    return Path(os.path.relpath(path, target.parent)).as_posix()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--out", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    try:
        text = page(list(args.results.glob("*.json")), args.out)
    except schema.ResultError as error:
        print(f"make_report.py: {error}", file=sys.stderr)
        return 1
    if args.check:
        current = args.out.read_text("utf-8") if args.out.exists() else ""
        if current != text:
            print(f"make_report.py: {args.out} is not up to date: run make report", file=sys.stderr)
        return int(current != text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
