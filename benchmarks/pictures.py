"""Draw docs/speedup.png, the picture of README: what ``ds_quant estimate`` predicts, by link.

python benchmarks/pictures.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ds_quant.policy.cost import Cluster
from ds_quant.policy.model import of_size
from ds_quant.tools import forecast, plot_style
from ds_quant.tools.forecast import Plan
from ds_quant.tools.planning import LATENCY, buckets_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "speedup.png"
SCHEME = "eden4"
LINKS = (1, 2, 5, 10, 25, 50, 100)  # Gb/s into a node, marked on the axis
GIGABIT = 1e9 / 8
ENCODE = 1e11  # parameters per second, the default of ``ds_quant estimate``
# As in README's row of 7 B parameters on 2 x 8 GPUs with NVLink: bf16, 4.2 s of compute.
NODES, NODE_SIZE, NVLINK, COMPUTE = 2, 8, 1800, 4.2


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PATH, help="picture to write")
    return parser.parse_args()


def plan() -> Plan:
    """Return the run of the picture."""
    model = of_size(7 * 10**9, dtype=torch.bfloat16)
    return Plan(
        model=model,
        dtype=torch.bfloat16,
        stage=3,
        micro_steps=1,
        compute=COMPUTE,
        cluster=Cluster(
            nodes=NODES,
            node_size=NODE_SIZE,
            link=GIGABIT,
            intra_link=NVLINK * GIGABIT,
            encode=ENCODE,
            latency=LATENCY,
        ),
        buckets=buckets_of({}, model.hidden, 3),
    )


def band(gigabits: float) -> tuple[float, float]:
    """Return the lowest and the highest speed-up at a link."""
    (row,) = (row for row in forecast.forecast(plan().with_link(gigabits)) if row.scheme == SCHEME)
    return row.speedups


def draw(path: Path) -> None:
    """Write the picture."""
    pyplot = plot_style.pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 3.4))
    links = [10 ** (step / 30) for step in range(61)]
    lowest, highest = zip(*map(band, links), strict=True)
    color = plot_style.COLORS[SCHEME]
    axes.fill_between(links, lowest, highest, color=color, alpha=0.35, linewidth=0)
    axes.plot(links, lowest, color=color)
    axes.plot(links, highest, color=color)
    axes.axhline(1, color="0.3", linestyle="--")
    axes.text(1.1, 0.9, "without the block", va="top", color="0.3", fontsize=11)
    axes.text(1.1, 3.9, "nothing hidden", va="top", color=color, fontsize=11)
    axes.text(9, 4.7, "communication hidden\nbehind compute", color=color, fontsize=11)
    axes.set_xscale("log")
    axes.set_xlim(links[0], links[-1])
    axes.set_ylim(0, 6)
    plot_style.plain_ticks(axes.xaxis, LINKS)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("Gb/s into a node from the others", fontsize=11)
    axes.set_ylabel("times as fast", fontsize=11)
    title = "Predicted speed-up of a step with eden4\n7 B parameters, 2 x 8 GPUs, ZeRO-3"
    axes.set_title(title, fontsize=12)
    plot_style.save(figure, path, dpi=160)


if __name__ == "__main__":
    draw(parse_args().out)
