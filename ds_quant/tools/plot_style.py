"""One style of all plots: plain ticks, a legend beside the axes, colours that differ in hue.

matplotlib is imported on first use, so that commands without a plot do not need it.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart, in the order of use.
PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5b3a")


def shade(color: str, amount: float) -> str:
    """Mix "#rrggbb" with white.

    amount: share of white, 0 to 1; if negative, share of black.
    """
    target = 255 if amount > 0 else 0
    mixed = "#"
    for start in (1, 3, 5):
        channel = int(color[start : start + 2], 16)
        mixed += f"{round(channel + (target - channel) * abs(amount)):02x}"
    return mixed


# A hue per family, and a shade per scheme of it: the fewer bits, the darker. "." skips a shade.
_FAMILIES = {
    "#666666": "deepspeed_plain hybrid full_precision deepspeed_hpz",
    "#8c8cb4": "fsdp2 fsdp2_hsdp ddp_bf16 ddp",
    PALETTE[0]: "qsdp_shard qsdp qsdp_w4g4",
    PALETTE[1]: "sdp4bit_paper sdp4bit",
    PALETTE[2]: ". zeropp",
    PALETTE[3]: ". eden4 eden3 eden2",
    PALETTE[4]: "lossless lossless_w_g4 lossless_w_g3 lossless_w_g2",
    PALETTE[5]: ". qwd qw4",
    PALETTE[6]: "tlq tlq_hs ulq",
}
_FRONTS = ("fsdp2", "fsdp2_hsdp", "ddp")
_SHADES = (0.35, 0.0, -0.35, -0.6)
COLORS = {
    scheme: shade(hue, amount)
    for hue, schemes in _FAMILIES.items()
    for scheme, amount in zip(schemes.split(), _SHADES, strict=False)
}
# matplotlib's settings: no box around the axes, a light grid, a legend beside the axes.
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.loc": "center left",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 120,
}


def pyplot() -> Any:
    """Import matplotlib.pyplot, drawing into files only.

    Raises:
        ValueError: matplotlib is missing; the message names the extra that brings it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'ds_quant[bench]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update(_STYLE)
    from matplotlib import pyplot

    return pyplot


def colors(names: Iterable[str]) -> dict[str, str]:
    """Return one colour per name.

    A scheme has the same colour in every plot, and a lighter one with settings
    (``qsdp:weights.bits=6``) or under another front (``fsdp2:qsdp``). Other names take unused
    colours.
    """
    wanted = list(names)
    chosen = {name: COLORS[name] for name in wanted if name in COLORS}
    palette = itertools.cycle(PALETTE)
    for name in wanted:
        if name in chosen:
            continue
        scheme = _scheme_of(name)
        color = COLORS[scheme] if scheme in COLORS else next(palette)
        while color in chosen.values():
            color = shade(color, 0.25)
        chosen[name] = color
    return chosen


def _scheme_of(name: str) -> str:
    """Return the scheme of a name such as "qsdp:weights.bits=6", "fsdp2:qsdp" or "ddp:qsdp"."""
    first, *others = name.split(":")
    if first in _FRONTS and others and others[0] in COLORS:
        return others[0]
    return first


def add_legend(axes: Any) -> None:
    """Put a legend to the right of the axes, if anything in them has a label."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        # With ``legend.loc`` of the style this is the middle of the legend's left edge.
        axes.legend(handles, map(wrapped, names), bbox_to_anchor=(1, 0.5))


def plain_ticks(axis: Any, marks: Sequence[float] | None = None) -> None:
    """Mark values of a logarithmic axis, written as plain numbers: 10, 50, 200.

    marks: the values; by default 1, 2 and 5 times powers of ten.
    """
    from matplotlib import ticker

    if marks:
        axis.set_major_locator(ticker.FixedLocator(list(marks)))
    else:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def wrapped(name: str) -> str:
    """Break a long name, such as a scheme with settings, into lines of about 28 characters."""
    spaced = re.sub(r"([,:])(?=\S)", r"\1 ", name)
    return "\n".join(textwrap.wrap(spaced, 28, break_long_words=False, break_on_hyphens=False))


def save(figure: Any, path: Path, *, dpi: float | None = None) -> None:
    """Write the figure in the format of the file's name, and free it.

    dpi: by default that of the style.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot().close(figure)
