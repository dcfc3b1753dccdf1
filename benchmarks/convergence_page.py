"""The page of convergence.py: what every scheme costs in loss.

May import sections, the presets' names and, for the plot, ds_quant.tools.plot_style.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import sections

ABOUT = """\
Gap to `full_precision` in per cent, with its 95 % interval (Student's): loss of the exact weights
on text that nobody trained on, after the learning rate has fallen to 3 %. All runs begin at one
checkpoint, trained in full precision past its plateau; a pair has the same data in the same order.
The codec acts during the decay: what it costs in the first steps of a training is not in these
figures. Decoded: the same gap of the weights that ranks compute with. Random rounding adds its
noise there; nearest rounding of few bits makes training fit the decoded weights, so the exact ones
do worse. Errors are squared, over the energy: of the reduced gradients of matrices, and of the
decoded weights at the end. Bits are those of an element between nodes, scales and exact parameters
included.
"""

# Table 1 of SDP4Bit for 125 M, 350 M and 1.3 B parameters, and Table 3 for 125 M: validation loss
# against the baseline, in per cent.
PUBLISHED = {
    "qwd": (-0.05, 0.01, 0.06),
    "tlq": (0.47, 0.40, 1.19),
    "tlq_hs": (0.06, 0.09, 0.19),
    "sdp4bit": (0.09, 0.12, 0.24),
    "qw4:weights.group_size=32": (4.44, None, None),
    "qw4:weights.group_size=128": (6.68, None, None),
    "qw4": (12.17, 8.95, 6.14),
}


def shown(gap: dict[str, Any] | None) -> list[str]:
    """Mean and half-width of a gap as cells."""
    if gap is None:
        return ["", ""]
    half = gap["half_width"]
    return [f"{gap['mean']:+.3f} %", "" if half is None else f"+-{half:.3f}"]


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    size, steps = f"{result['parameters'] / 1e6:.2f} M", result["settings"]["micro_steps"]
    what = "in fine-tuning" if "tuning" in result else "in loss"
    heading = f"What a scheme costs {what}: {size} parameters, k = {steps}"
    nodes, each = result["settings"]["nodes"], result["settings"]["node_size"]
    if nodes != 2:  # then the text of a node matters, too
        heading += f", {nodes} nodes of {each * result['settings']['batch']} sequences"
    rows = [
        [f"`{row['scheme']}`", *shown(row["gap"]), str(len(row["gap"]["pairs"])),
         shown(row["gap_travelled"])[0], f"{row['gradient_error']:.2g}",
         f"{row['weight_error']:.2g}",
         f"{row['weight_bits']:.2f}", f"{row['gradient_bits']:.2f}"]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["scheme", "gap", "95 %", "pairs", "decoded", "error of gradients",
              "error of weights", "bits of weights", "bits of gradients"]  # fmt: skip
    parts = [ABOUT, setting(result), sections.table(header, rows), *published(result)]
    return heading, "\n\n".join(part.strip() for part in parts)


def setting(result: dict[str, Any]) -> str:
    """What was trained, in a sentence or two."""
    given, curve = result["settings"], result["base"]["curve"]
    ranks, half = given["nodes"] * given["node_size"], curve[len(curve) // 2]
    nbytes = ranks * given["batch"] * given["micro_steps"] * given["seq_len"]
    return (
        f"A byte-level GPT of {result['parameters'] / 1e6:.2f} M parameters on {ranks} ranks in "
        f"{given['nodes']} nodes (ZeRO-3, simulated with the bits of real ranks), bf16,\n"
        f"{nbytes} bytes of text and k = {given['micro_steps']} micro-steps per optimizer step; "
        f"{given['base_steps']} steps of AdamW at {given['lr']:g} (held out:\n"
        f"{curve[-1]['held_out']:.3f} nats per byte, {half['held_out']:.3f} at step "
        f"{half['step']}), then {given['steps']} steps of {tuned(result)}."
    )


def tuned(result: dict[str, Any]) -> str:
    """What all schemes do from the checkpoint on."""
    if "tuning" not in result:
        return "decay"
    given = result["tuning"]
    exact = [run["held_out"] for run in result["runs"] if run["scheme"] == "full_precision"]
    return (
        f"fine-tuning\nwith a new optimizer on other text ({result['arguments']['tune']}), the "
        f"rate falling from {given['lr']:g}; held out there: {given['before']:.3f}\nbefore and "
        f"{sum(exact) / len(exact):.3f} after it in full precision"
    )


def published(result: dict[str, Any]) -> list[str]:
    """Our gaps beside those of SDP4Bit's paper, which has none of fine-tuning."""
    if "tuning" in result:
        return []
    ours = {row["scheme"]: row["gap"] for row in result["rows"]}
    rows = [
        [f"`{name}`", *shown(ours[name]),
         *("" if value is None else f"{value:+.2f} %" for value in theirs)]
        for name, theirs in PUBLISHED.items() if name in ours
    ]  # fmt: skip
    header = ["scheme", "here", "95 %", "paper, 125 M", "350 M", "1.3 B"]
    about = (
        "## Beside SDP4Bit's Tables 1 and 3\n\nValidation loss against the baseline. The paper "
        "trains from the first weights under the codec, once per row; here the codec acts\n"
        "during the decay."
    )
    return [about, sections.table(header, rows), directions(ours)] if len(rows) > 1 else []


def directions(ours: dict[str, dict[str, Any]]) -> str:
    """Of every two schemes, whether the same one costs more here as in the paper at 125 M."""
    pairs = list(itertools.combinations([name for name in PUBLISHED if name in ours], 2))
    found = {
        (one, other): (PUBLISHED[one][0] < PUBLISHED[other][0])
        == (ours[one]["mean"] < ours[other]["mean"])
        for one, other in pairs
    }
    others = [f"`{one}` and `{other}`" for (one, other), alike in found.items() if not alike]
    return (
        f"Of {len(found)} pairs of these schemes {sum(found.values())} are in the paper's order at "
        f"125 M{''.join(f'; not {pair}' for pair in others)}."
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw gap against bits, of presets that cost something, if there are enough for a picture."""
    from ds_quant.tools import plot_style

    rows = [r for r in result["rows"] if ":" not in r["scheme"] and r["gap"]["mean"] > 0]
    if len(rows) < 8:
        return
    figure, axes = plot_style.pyplot().subplots(figsize=(9, 5.5))
    colors = plot_style.colors(row["scheme"] for row in rows)
    for row in rows:
        bits, gap = row["weight_bits"] + row["gradient_bits"], row["gap"]["mean"]
        color, half = colors[row["scheme"]], row["gap"]["half_width"] or 0.0
        below = min(half, 0.9 * gap)  # the axis is logarithmic
        axes.errorbar(bits, gap, [[below], [half]], fmt="none", ecolor=color, capsize=3)
        axes.plot([bits], [gap], "o", color=color)
        axes.annotate(row["scheme"], (bits, gap), xytext=(6, 3), color=color,
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set(
        xscale="log", yscale="log",
        xlabel="bits of a weight plus bits of a gradient, between nodes",
        ylabel="held-out loss above full precision, %",
        title="Weight differences and rotated gradients lose little in few bits",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        plot_style.plain_ticks(axis)
    plot_style.finish(axes)
    plot_style.save(figure, path)
