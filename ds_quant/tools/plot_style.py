"""Draw every plot in one style: plain ticks, names beside the lines, colours that stay apart.

matplotlib is imported on first use, so that commands without a plot do not need it.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Apart for colour-blind readers too (Okabe and Ito), in the order in which lines take them.
PALETTE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5b3a")


def shade(color: str, amount: float) -> str:
    """Mix "#rrggbb" with white, or with black where ``amount`` (-1 to 1) is negative."""
    target = 255 if amount > 0 else 0
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (target - part) * abs(amount)):02x}" for part in parts)


# A hue per family, and in it a shade per scheme: the fewer bits, the darker.
_FAMILIES = {
    "#666666": "deepspeed_plain hybrid full_precision deepspeed_hpz",
    "#8c8cb4": ". fsdp2_hsdp",
    PALETTE[0]: "qsdp_shard qsdp qsdp_w4g4",
    PALETTE[1]: "sdp4bit_paper sdp4bit",
    PALETTE[2]: ". zeropp",
    PALETTE[3]: ". eden4 eden3 eden2",
    PALETTE[4]: "lossless lossless_w_g4 lossless_w_g3 lossless_w_g2",
    PALETTE[5]: ". qwd qw4",
    PALETTE[6]: "tlq tlq_hs ulq",
}
_SHADES = (0.35, 0.0, -0.35, -0.6)
COLORS = {
    scheme: shade(hue, amount)
    for hue, schemes in _FAMILIES.items()
    for scheme, amount in zip(schemes.split(), _SHADES, strict=False)
}
# Of matplotlib: no box around the axes, a light grid, names beside the lines.
_STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.loc": "center left", "legend.frameon": False, "legend.fontsize": 9,
    "figure.constrained_layout.use": True, "savefig.dpi": 120,
}  # fmt: skip


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
    """Return one colour per name: a scheme has the same one in every plot, and with settings
    (``qsdp:weights.bits=6``) a lighter one.
    """
    wanted = list(names)
    found = {name: COLORS[name] for name in wanted if name in COLORS}
    spare = itertools.cycle(PALETTE)
    for name in wanted:
        color = found.get(name) or COLORS.get(name.partition(":")[0]) or next(spare)
        while name not in found and color in found.values():
            color = shade(color, 0.25)
        found[name] = color
    return found


def finish(axes: Any) -> None:
    """Name the lines beside the axes."""
    lines, names = axes.get_legend_handles_labels()
    if lines:
        axes.legend(lines, map(wrapped, names), bbox_to_anchor=(1, 0.5))


def plain_ticks(axis: Any, marks: Sequence[float] | None = None) -> None:
    """Mark these values of a logarithmic axis, or 1, 2 and 5 times powers of ten, and write them as
    people do: 10, 50, 200.
    """
    from matplotlib import ticker

    round_ones = ticker.LogLocator(subs=(1, 2, 5))
    axis.set_major_locator(ticker.FixedLocator(list(marks)) if marks else round_ones)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def wrapped(name: str) -> str:
    """In lines of about 28 characters: a scheme with settings is longer than a plot has room."""
    spaced = re.sub(r"([,:])(?=\S)", r"\1 ", name)
    return "\n".join(textwrap.wrap(spaced, 28, break_long_words=False, break_on_hyphens=False))


def save(figure: Any, path: Path) -> None:
    """Write the figure in the format of the file's name, and free it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    finally:
        pyplot().close(figure)
