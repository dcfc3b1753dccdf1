"""Step time of schemes against link rate, on hosts of the network lab (needs root).

    sudo python benchmarks/speed.py --quick          # about five minutes
    sudo python benchmarks/speed.py                  # the whole grid, resumable

Every point of the grid (stage, nodes x ranks) is one set of processes that holds an engine per
scheme; rates change under them and schemes take turns in short blocks, so that ratios compare
neighbours in time. Reported are medians over blocks and their range; blocks during which other
programs used the cores are left out. Without root: one point over loopback, without a rate limit.
Baselines: `full_precision` goes through the same collectives as the quantized schemes;
`deepspeed_plain` is DeepSpeed as shipped over gloo, whose reduce-scatter moves twice the bytes it
needs, so that difference is not ours to claim; `deepspeed_hpz` adds hpZ; `fsdp2_hsdp` is torch's
own hybrid sharding: gradients cross between nodes in the last micro-step, weights and optimizer
states lie in every node.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import launch
import report
import sections
from lab import Lab, LabError, Loopback, obstacle, remove
from schemes import parse_schemes, with_overrides

BASELINE = "full_precision"
RIVALS = ("deepspeed_plain", "deepspeed_hpz", "fsdp2_hsdp")
QUICK = {"stages": [3], "topologies": ["2x2"], "rates": [50.0, 400.0], "blocks": 3}


# Of the model and its runs, which speed_worker.py reads from its plan.
PLANNED = {
    "blocks": (5, "turns of every engine at every rate"),
    "steps_per_block": (2, None),
    "warmup": (3, "steps before the first block, per engine"),
    "layers": (6, None),
    "width": (384, None),
    "heads": (6, None),
    "seq_len": (64, None),
    "batch": (4, "sequences per rank"),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one stage, one topology, two rates")
    add("--stages", type=int, nargs="+", default=[3, 2])
    add("--topologies", nargs="+", default=["2x2", "2x1", "4x1"], help="nodes x ranks per node")
    add("--rates", type=float, nargs="+", default=[50, 100, 200, 400, 800, 1600, 0],
        help="Mbit/s of every host's link; 0: not shaped")  # fmt: skip
    add("--schemes", nargs="+",
        default=["full_precision", "qsdp", "zeropp", "sdp4bit", "deepspeed_plain"],
        help="names, with keys of the block as in qsdp:payload_checksum=true")  # fmt: skip
    for name, (default, meaning) in PLANNED.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=meaning)
    add("--accumulation", type=int, default=1, help="micro-steps of an optimizer step")
    add("--max-foreign", type=float, default=0.25, help="cores in other use, above: block left out")
    add("--reduce-bucket-size", type=int,
        help="elements; default: ZeRO-3 2 million, several that travel during backward, as a large "
        "model has; ZeRO-1/2 DeepSpeed's 500 million, which hold all of this one")  # fmt: skip
    add("--prefetch-bucket-size", type=int, default=300_000, help="elements, under ZeRO-3")
    add("--reuse-distance", type=int, default=0,
        help="elements, under ZeRO-3. 0: weights are gathered again for backward, as a large model "
        "has it; 1000000000, DeepSpeed's default: this one stays gathered")  # fmt: skip
    add("--loopback", action="store_true", help="no lab, even where one can be built")
    add("--timeout", type=float, default=1800, help="seconds per point")
    add("--out", type=Path, default=Path("speed_out"))
    add("--json", type=Path, help="default: OUT/speed.json")
    add("--plot", type=Path, help="default: OUT/speed.png")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    args.json, args.plot = args.json or args.out / "speed.json", args.plot or args.out / "speed.png"
    return args


def nodes_and_ranks(topology: str) -> tuple[int, int]:
    """`2x4` as (2, 4)."""
    nodes, x, ranks = topology.partition("x")
    if not (x and nodes.isdigit() and ranks.isdigit() and int(nodes) and int(ranks)):
        raise ValueError(f"topology {topology!r}: allowed: NODESxRANKS such as 2x2")
    return int(nodes), int(ranks)


def config_of(scheme: str, stage: int, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """ds_config.json of one engine; only block and hpZ differ."""
    bucket = args.reduce_bucket_size or (2_000_000 if stage == 3 else 500_000_000)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": bucket}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0,
                 "stage3_max_reuse_distance": args.reuse_distance,
                 "stage3_prefetch_bucket_size": args.prefetch_bucket_size}  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if scheme == "deepspeed_hpz":
        zero["zero_hpz_partition_size"] = ranks
    elif scheme == "fsdp2_hsdp":
        config["fsdp2"] = True
    elif scheme not in RIVALS:
        (entry,) = parse_schemes(scheme)
        block = {
            "scheme": entry.name, "node_size": ranks, "allow_full_replica": True,
            "checksum_steps": 0,
        }  # fmt: skip
        config["quantized_comm"] = with_overrides(block, entry.overrides)
    return config


def run_point(stage: int, topology: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rates and schemes of one stage and topology; taken from its file if that is there."""
    nodes, ranks = nodes_and_ranks(topology)
    folder = args.out / f"zero{stage}_{topology}"
    folder.mkdir(parents=True, exist_ok=True)
    sharded_in_nodes = stage == 3 and ranks > 1
    schemes = [s for s in args.schemes if sharded_in_nodes or s not in RIVALS[1:]]
    plan = {
        "stage": stage, "topology": topology, "nodes": nodes, "rates": args.rates,
        "schemes": {s: config_of(s, stage, ranks, args) for s in schemes},
        **{name: getattr(args, name) for name in PLANNED},
    }  # fmt: skip
    done = folder / "result.json"
    if done.exists() and (result := json.loads(done.read_text("utf-8")))["plan"] == plan:
        return result
    with (Loopback if args.loopback else Lab)(nodes) as network:
        outcome = run_ranks(
            {**plan, "lab": network.is_shaped}, network, ranks, folder, args.timeout
        )
    result = {"plan": plan, **outcome}
    done.write_text(json.dumps(result), "utf-8")
    return result


def run_ranks(
    plan: dict[str, Any], network: Lab | Loopback, ranks: int, folder: Path, timeout: float
) -> dict[str, Any]:
    """Start a process per rank on its host and wait; the worker's result."""
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    outcome, log, world = folder / "outcome.json", folder / "log.txt", network.hosts * ranks
    outcome.unlink(missing_ok=True)
    argv = [sys.executable, str(launch.HERE / "speed_worker.py"), str(folder / "plan.json"),
            str(outcome)]  # fmt: skip
    shared = launch.environment("cpu", installed=launch.has_entry_point()) | {
        "WORLD_SIZE": str(world), "LOCAL_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.address(0), "MASTER_PORT": str(launch.free_port()),
        "GLOO_SOCKET_IFNAME": network.interface,
    }  # fmt: skip
    commands = [
        (network.command(rank // ranks, argv),
         shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks)})
        for rank in range(world)
    ]  # fmt: skip
    with launch.started(commands, log) as processes:
        _wait(processes, timeout, log, len(plan["rates"]) * plan["blocks"])
    if not outcome.exists():
        tail = log.read_text("utf-8", "replace")[-2000:]
        raise LabError(f"{folder}: the ranks left no result; the end of their log:\n{tail}")
    return json.loads(outcome.read_text("utf-8"))


def _wait(processes: Sequence[subprocess.Popen], timeout: float, log: Path, blocks: int) -> None:
    """Until all have ended, or one has failed, or time is up.

    The bar counts blocks: for each the worker prints a line that ends in "done".
    """
    end = time.monotonic() + timeout
    with launch.progress_bar(blocks, unit="block") as bar:
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.poll() not in (None, 0) for p in processes):
                return
            bar.update(log.read_bytes().count(b" done\n") - bar.n)
            time.sleep(0.5)


def summary(result: dict[str, Any], *, max_foreign: float) -> list[dict[str, Any]]:
    """Per rate and scheme: median step, paired speed-up over the baseline with range, bytes."""
    plan, rows = result["plan"], []
    for rate in plan["rates"]:
        blocks = [b for b in result["blocks"] if b["rate"] == rate]
        by_scheme: dict[str, dict[int, dict]] = {}
        for block in blocks:
            by_scheme.setdefault(block["scheme"], {})[block["block"]] = block
        for scheme, own in by_scheme.items():
            clean = {i: b for i, b in own.items() if b["foreign_cores"] <= max_foreign} or own
            base = by_scheme[BASELINE]
            ratios = [base[i]["seconds"] / b["seconds"] for i, b in clean.items()]
            received = median(b["interface_bytes"] for b in own.values())
            rows.append({
                "rate": rate, "scheme": scheme,
                "seconds": median(b["seconds"] for b in clean.values()),
                "speedup": median(ratios), "speedup_min": min(ratios), "speedup_max": max(ratios),
                "interface_bytes": received / result["parameters"],
                "counted_bytes": median(b["counted_bytes"] for b in own.values())
                / result["parameters"],
                "bytes_bound": median(b["interface_bytes"] for b in base.values()) / received,
                "loss": own[max(own)]["loss"],
                "clean_blocks": sum(b["foreign_cores"] <= max_foreign for b in own.values()),
            })  # fmt: skip
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    """Per point: step time and speed-up against link rate, with what the bytes allow."""
    points = result["points"]
    from ds_quant.config.presets import RENAMED
    from ds_quant.tools import plot_style

    figure, axes = plot_style.pyplot().subplots(
        2, len(points), figsize=(6 * len(points), 8), squeeze=False
    )
    for column, point in enumerate(points):
        rows = [
            row | {"scheme": RENAMED.get(row["scheme"], row["scheme"])} for row in point["rows"]
        ]
        shaped = [row for row in rows if row["rate"]] or rows
        times, ratios = axes[0][column], axes[1][column]
        colors = plot_style.colors(dict.fromkeys(row["scheme"] for row in shaped))
        rates = sorted({row["rate"] for row in shaped})
        if len(rates) == 1:
            _bars(times, ratios, shaped, colors)
            link = f"{rates[0]:g} Mbit/s" if rates[0] else "not shaped"
            times.set(title=f"{point['title']}, {link}", xlabel="seconds per step")
            ratios.set(xlabel="speed-up (whisker: spread, dotted: bytes allow)")
            continue
        for scheme, color in colors.items():
            own = [row for row in shaped if row["scheme"] == scheme]
            _curves(times, ratios, own, scheme, color)
        best = max((row for row in shaped if row["scheme"] not in RIVALS),
                   key=lambda row: row["speedup"], default=None)  # fmt: skip
        found = "" if best is None else (
            f"\n{best['scheme']} is up to {best['speedup']:.1f}x as fast as {BASELINE}"
        )  # fmt: skip
        times.set(title=point["title"] + found, xscale="log", yscale="log",
                  ylabel="seconds per step")  # fmt: skip
        ratios.set(xscale="log", xlabel="link, Mbit/s",
                   ylabel="speed-up (band: spread, dotted: bytes allow)")  # fmt: skip
        for each in (times, ratios):
            plot_style.plain_ticks(each.xaxis, rates)
            plot_style.finish(each)
        plot_style.plain_ticks(times.yaxis)
    plot_style.save(figure, path)


_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def _bars(times: Any, ratios: Any, rows: Sequence[dict[str, Any]], colors: dict[str, str]) -> None:
    """Draw the schemes of one rate in both panels, the first one on top."""
    from ds_quant.tools import plot_style

    names = [row["scheme"] for row in rows]
    shades = [colors[name] for name in names]
    labels = [plot_style.wrapped(name) for name in names]
    for axes, key in ((times, "seconds"), (ratios, "speedup")):
        bars = axes.barh(labels, [row[key] for row in rows], color=shades)
        axes.bar_label(bars, fmt="%.2f", padding=4, bbox=_ON_WHITE)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        plot_style.finish(axes)
    for place, row in enumerate(rows):
        low, high = row["speedup_min"], row["speedup_max"]
        ratios.plot([low, high], [place + 0.3] * 2, color="0.2", linewidth=1)
        if row["scheme"] not in (BASELINE, *RIVALS) and row["rate"]:
            ratios.plot([row["bytes_bound"]] * 2, [place - 0.4, place + 0.4], ":", color="0.2")


def _curves(
    times: Any, ratios: Any, own: Sequence[dict[str, Any]], scheme: str, color: str
) -> None:
    """One scheme in both panels."""
    rates = [row["rate"] for row in own]
    times.plot(rates, [row["seconds"] for row in own], marker="o", label=scheme, color=color)
    ratios.plot(rates, [row["speedup"] for row in own], marker="o", label=scheme, color=color)
    low, high = ([row[key] for row in own] for key in ("speedup_min", "speedup_max"))
    ratios.fill_between(rates, low, high, color=color, alpha=0.15, linewidth=0)
    if scheme not in (BASELINE, *RIVALS):
        ratios.axhline(own[0]["bytes_bound"], color=color, linestyle=":", label="_")


USUAL = (BASELINE, "qsdp", "zeropp", "sdp4bit", "deepspeed_plain")


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py; step times and ranges are in the file."""
    points = result["points"]
    stages, topologies = ({str(p[key]): None for p in points} for key in ("stage", "topology"))
    schemes, rates = (result["arguments"][key] for key in ("schemes", "rates"))
    links = "/".join(f"{rate:g}" for rate in rates if rate)
    links = f"{links} Mbit/s" if links else "not shaped"
    others = "".join(f", {name}" for name in schemes if name not in USUAL)
    heading = f"Step times: ZeRO-{'/'.join(stages)}, {'/'.join(topologies)} ranks, {links}{others}"
    parts = [f"## {p['title']}\n\n{sections.table(*cells(p['rows']))}" for p in points]
    return heading, (
        "Seconds of a step in full precision, and speed-ups over it in the same block: median and\n"
        f'range of {result["arguments"]["blocks"]} blocks. "bytes allow": by the bytes at the\n'
        "interfaces.\n\n" + "\n\n".join(parts)
    )


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of a point: a line per rate, a column per scheme."""
    by_rate: dict[float, dict[str, Any]] = {}
    for row in rows:
        by_rate.setdefault(row["rate"], {})[row["scheme"]] = row
    first = next(iter(by_rate.values()))
    names = [name for name in first if name != BASELINE]
    found = [
        [f"{rate:g} Mbit/s" if rate else "not shaped", f"{by_scheme[BASELINE]['seconds']:.3f}",
         *(_speed_up(by_scheme[name]) for name in names)]
        for rate, by_scheme in by_rate.items()
    ]  # fmt: skip
    found.append(["bytes allow", "", *(f"{first[name]['bytes_bound']:.2f}" for name in names)])
    last = by_rate[rows[-1]["rate"]]
    if "loss" in last[BASELINE]:
        losses = (f"{last[name]['loss']:.4f}" for name in (BASELINE, *names))
        found.append(["loss of the last step", *losses])
    return ["link", f"`{BASELINE}`, s", *(f"`{name}`" for name in names)], found


def _speed_up(row: dict[str, Any]) -> str:
    noise = "" if row["clean_blocks"] else " (no quiet block)"
    return f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f}){noise}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    reason = "--loopback" if args.loopback else obstacle()
    args.loopback = reason is not None
    if args.loopback:
        # Rivals are left out: without interfaces nobody counts its bytes.
        args.rates, args.schemes = [0], [s for s in args.schemes if s not in RIVALS]
        print(
            f"speed.py: warning: no network lab: {reason}. Over loopback instead: one point without"
            " a rate limit, bytes as the plugin counts them"
        )
    points = []
    try:
        for stage, topology in itertools.product(args.stages, args.topologies):
            print(f"ZeRO-{stage}, {topology}: {args.out}/zero{stage}_{topology}/log.txt")
            result = run_point(stage, topology, args)
            rows = summary(result, max_foreign=args.max_foreign)
            title = f"ZeRO-{stage}, {topology} ranks, {result['parameters'] / 1e6:.1f} M"
            report.show(*cells(rows), title)
            points.append({"title": title, "stage": stage, "topology": topology,
                           "parameters": result["parameters"], "lines": result["lines"],
                           "rows": rows})  # fmt: skip
    except LabError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 1
    finally:
        if not args.loopback:
            remove()
    draw(report.save(args.json, "speed", args, points=points), args.plot)
    print(f"results: {args.json}, plot: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
