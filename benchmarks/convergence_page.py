"""The page of convergence.py: the loss that every scheme costs.

May import sections, the presets' names and, for the plot, ds_quant.tools.plot_style.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import sections

ABOUT = """\
Gap to `full_precision` in per cent, with its 95 % interval (Student's): loss of the exact weights
on text that nobody trained on, after the learning rate has fallen to 3 %. {beginning}
figures. Decoded: the same gap of the weights that ranks compute with. Random rounding adds its
noise there; nearest rounding of few bits makes training fit the decoded weights, so the exact ones
do worse. Errors are squared, over the energy: of the reduced gradients of matrices, and of the
decoded weights at the end. Bits are those of an element between nodes, scales and exact parameters
included.
"""
FROM_CHECKPOINT = """\
All runs begin at one
checkpoint, trained in full precision past its plateau; a pair has the same data in the same order.
The codec acts during the decay: what it costs in the first steps of a training is not in these"""
FROM_THE_FIRST_STEP = """\
All runs begin at the
same initial weights; a pair has the same data in the same order. The codec acts from the first
step on, so two runs drift apart and pairs scatter more than after a common checkpoint: see the"""

POWER_SGD = """\
`powersgd:rank=R` is PowerSGD with error feedback, whose factors of rank R are sent in fp32.
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
    """Return mean and half-width of a gap as cells."""
    if gap is None:
        return ["", ""]
    half = gap["half_width"]
    return [f"{gap['mean']:+.3f} %", "" if half is None else f"+-{half:.3f}"]


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    settings = result["settings"]
    size = f"{result['parameters'] / 1e6:.2f} M"
    task = "in fine-tuning" if "tuning" in result else "in loss"
    way = settings.get("sums", "zero3")
    task += "" if way == "zero3" else f" under {way.upper()}"
    task += "" if settings["base_steps"] else " from the first step"
    heading = f"What a scheme costs {task}: {size} parameters, k = {settings['micro_steps']}"
    nodes = settings["nodes"]
    if nodes != 2:
        heading += f", {nodes} nodes of {settings['node_size'] * settings['batch']} sequences"
    rows = []
    for row in result["rows"]:
        decoded_gap, _ = shown(row["gap_travelled"])
        rows.append(
            [
                f"`{row['scheme']}`",
                *shown(row["gap"]),
                str(len(row["gap"]["pairs"])),
                decoded_gap,
                f"{row['gradient_error']:.2g}",
                f"{row['weight_error']:.2g}",
                f"{row['weight_bits']:.2f}",
                f"{row['gradient_bits']:.2f}",
            ]
        )
    header = [
        "scheme",
        "gap",
        "95 %",
        "pairs",
        "decoded",
        "error of gradients",
        "error of weights",
        "bits of weights",
        "bits of gradients",
    ]
    beginning = FROM_CHECKPOINT if settings["base_steps"] else FROM_THE_FIRST_STEP
    about = ABOUT.format(beginning=beginning)
    if any(row["scheme"].startswith("powersgd") for row in result["rows"]):
        about += POWER_SGD
    parts = [about, setting(result), sections.table(header, rows), *published(result)]
    return heading, "\n\n".join(part.strip() for part in parts)


def setting(result: dict[str, Any]) -> str:
    """Describe the training in two sentences."""
    given = result["settings"]
    ranks = given["nodes"] * given["node_size"]
    way = {"zero3": "ZeRO-3"}.get(given.get("sums", "zero3"), given.get("sums", "").upper())
    nbytes = ranks * given["batch"] * given["micro_steps"] * given["seq_len"]
    return (
        f"A byte-level GPT of {result['parameters'] / 1e6:.2f} M parameters on {ranks} ranks in "
        f"{given['nodes']} nodes ({way}, simulated with the bits of real ranks), bf16,\n"
        f"{nbytes} bytes of text and k = {given['micro_steps']} micro-steps per optimizer step; "
        f"{schedule(result)}."
    )


def schedule(result: dict[str, Any]) -> str:
    """Describe the steps of the base model and of the runs."""
    given = result["settings"]
    if not given["base_steps"]:
        return (
            f"{given['steps']} steps of AdamW, the\nrate rising to {given['lr']:g} over the first "
            f"{max(1, given['steps'] // 40)} and then falling"
        )
    curve = result["base"]["curve"]
    half = curve[len(curve) // 2]
    return (
        f"{given['base_steps']} steps of AdamW at {given['lr']:g} (held out:\n"
        f"{curve[-1]['held_out']:.3f} nats per byte, {half['held_out']:.3f} at step "
        f"{half['step']}), then {given['steps']} steps of {tuned(result)}"
    )


def tuned(result: dict[str, Any]) -> str:
    """Describe the training of all schemes from the checkpoint on."""
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
    """Return a comparison with the gaps of SDP4Bit's paper, which has none of fine-tuning."""
    if "tuning" in result:
        return []
    ours = {row["scheme"]: row["gap"] for row in result["rows"]}
    rows = []
    for name, theirs in PUBLISHED.items():
        if name in ours:
            cells = ["" if value is None else f"{value:+.2f} %" for value in theirs]
            rows.append([f"`{name}`", *shown(ours[name]), *cells])
    if len(rows) < 2:
        return []
    header = ["scheme", "here", "95 %", "paper, 125 M", "350 M", "1.3 B"]
    acts = "during the decay" if result["settings"]["base_steps"] else "from there on, too"
    about = (
        "## Beside SDP4Bit's Tables 1 and 3\n\nValidation loss against the baseline. The paper "
        "trains from the first weights under the codec, once per row; here the codec acts\n"
        f"{acts}."
    )
    return [about, sections.table(header, rows), directions(ours)]


def directions(ours: dict[str, dict[str, Any]]) -> str:
    """Count the pairs of schemes with the same order of gaps as in the paper at 125 M."""
    pairs = list(itertools.combinations([name for name in PUBLISHED if name in ours], 2))
    other_order = []
    for one, other in pairs:
        in_paper = PUBLISHED[one][0] < PUBLISHED[other][0]
        here = ours[one]["mean"] < ours[other]["mean"]
        if in_paper != here:
            other_order.append(f"; not `{one}` and `{other}`")
    same_order = len(pairs) - len(other_order)
    return (
        f"Of {len(pairs)} pairs of these schemes {same_order} are in the paper's order at "
        f"125 M{''.join(other_order)}."
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw gap against bits of the presets with a gap above 0, if there are enough of them."""
    from ds_quant.tools import plot_style

    rows = [row for row in result["rows"] if ":" not in row["scheme"] and row["gap"]["mean"] > 0]
    if len(rows) < 8:
        return
    figure, axes = plot_style.pyplot().subplots(figsize=(9, 5.5))
    colors = plot_style.colors(row["scheme"] for row in rows)
    for row in rows:
        bits = row["weight_bits"] + row["gradient_bits"]
        gap = row["gap"]["mean"]
        half = row["gap"]["half_width"] or 0.0
        color = colors[row["scheme"]]
        below = min(half, 0.9 * gap)  # the axis is logarithmic
        axes.errorbar(bits, gap, [[below], [half]], fmt="none", ecolor=color, capsize=3)
        axes.plot([bits], [gap], "o", color=color)
        axes.annotate(
            row["scheme"],
            (bits, gap),
            xytext=(6, 3),
            color=color,
            textcoords="offset points",
            fontsize=9,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bits of a weight plus bits of a gradient, between nodes",
        ylabel="held-out loss above full precision, %",
        title="Weight differences and rotated gradients lose little in few bits",
    )
    for axis in (axes.xaxis, axes.yaxis):
        plot_style.plain_ticks(axis)
    plot_style.add_legend(axes)
    plot_style.save(figure, path)
