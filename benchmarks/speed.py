"""Measures the step time of schemes against link rate, on hosts of the network lab (needs root).

    sudo python benchmarks/speed.py --quick          # about five minutes
    sudo python benchmarks/speed.py                  # the whole grid, resumable

A point of the grid is a stage and a topology, nodes x ranks. Its processes hold an engine per
scheme. Schemes take turns in short blocks at every rate, so that ratios compare measurements of the
same minute. Results are medians over blocks and their range. Blocks during which other programs
used the cores are left out. Without root: one point over loopback, without a rate limit.

Baselines:
full_precision   the same collectives as the quantized schemes
deepspeed_plain  DeepSpeed as shipped. Its reduce-scatter over gloo sends twice the necessary bytes;
                 that part of a speed-up is not due to the plugin
deepspeed_hpz    the same with hpZ
fsdp2            FSDP2 as shipped, sharded over all ranks. The same holds for its reduce-scatter
fsdp2_hsdp       FSDP2 as shipped, sharded inside nodes: gradients cross between nodes in the last
                 micro-step. Every node has all weights and optimizer states

qsdp_baseline    the baseline of QSDP: fp32 weights, fp16 gradients, over this plugin's collectives
sdp4bit_baseline that of SDP4Bit: bf16 weights, fp32 gradients, in the same way
sdp4bit_baseline:SCHEME  a scheme in its dtypes: what a scheme leaves in full precision has them

ddp              DDP as shipped, fp32 gradients; with --stages 0, as all of the following
ddp_bf16         the same with torch's bf16 hook
ddp_powersgd     the same with torch's PowerSGD of rank 4, in one bucket

fsdp2:SCHEME, fsdp2_hsdp:SCHEME and ddp:SCHEME are the same with the plugin; other schemes run under
DeepSpeed. Over gloo FSDP2 waits for every collective.

--overlap adds an engine to every scheme that awaits each message where it is posted, and a turn
without a rate limit, which is taken for compute. What a step takes beyond compute is exposed; the
share that a scheme hides is what it exposes less than its waiting twin.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import launch
import report
import sections
from lab import Lab, LabError, Loopback, obstacle, remove
from schemes import parse_schemes, with_overrides

DEFAULT_BASELINE = "full_precision"
MESHES = {"fsdp2": "flat", "fsdp2_hsdp": "hsdp"}  # of FSDP2, by the first word of a scheme
# Hooks of DDP, by the first word of a scheme.
DDP_HOOKS = {"ddp": "plain", "ddp_bf16": "bf16", "ddp_powersgd": "powersgd"}
RIVALS = ("deepspeed_plain", "deepspeed_hpz", *MESHES, *DDP_HOOKS)
# Baselines of the papers: keys of the DeepSpeed config that make them of full_precision.
PAPERS: dict[str, dict[str, Any]] = {
    "qsdp_baseline": {"bf16": {"enabled": False}, "communication_data_type": "fp16"},
    "sdp4bit_baseline": {"communication_data_type": "fp32"},
}
WAITING = " waiting"  # ends the name of an engine that hides no message, see --overlap
QUICK = {"stages": [3], "topologies": ["2x2"], "rates": [50.0, 400.0], "blocks": 3}


# Options of the model and its runs, which speed_worker.py reads from its plan.
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
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[50, 100, 200, 400, 800, 1600, 0],
        help="Mbit/s of every host's link; 0: not shaped",
    )
    add(
        "--schemes",
        nargs="+",
        default=["full_precision", "qsdp", "zeropp", "sdp4bit", "deepspeed_plain"],
        help="names, with keys of the block as in qsdp:payload_checksum=true; with FSDP2 as in "
        "fsdp2:qsdp",
    )
    add("--baseline", default=DEFAULT_BASELINE, help="the scheme that others are compared with")
    for name, (default, meaning) in PLANNED.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=meaning)
    add("--overlap", action="store_true", help="the share of communication that a step hides")
    add("--accumulation", type=int, default=1, help="micro-steps of an optimizer step")
    add(
        "--max-foreign",
        type=float,
        default=0.25,
        help="cores that other programs may use; blocks with more are left out",
    )
    add(
        "--reduce-bucket-size",
        type=int,
        help="elements; default: ZeRO-3 2 million, so several buckets are sent during backward, as "
        "of a large model; ZeRO-1/2 DeepSpeed's 500 million, one bucket",
    )
    add("--lr", type=float, default=1e-4, help="learning rate")
    add("--prefetch-bucket-size", type=int, default=300_000, help="elements, under ZeRO-3")
    add(
        "--reuse-distance",
        type=int,
        default=0,
        help="elements, under ZeRO-3. 0: weights are gathered again for backward, as of a large "
        "model; 1000000000, DeepSpeed's default: this small model stays gathered",
    )
    add("--loopback", action="store_true", help="no lab, even where one can be built")
    add("--timeout", type=float, default=1800, help="seconds per point")
    add("--out", type=Path, default=Path("speed_out"))
    add("--json", type=Path, help="default: OUT/speed.json")
    add("--plot", type=Path, help="default: OUT/speed.png")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    if args.overlap and 0 not in args.rates:
        args.rates = [*args.rates, 0.0]
    args.json = args.json or args.out / "speed.json"
    args.plot = args.plot or args.out / "speed.png"
    return args


def nodes_and_ranks(topology: str) -> tuple[int, int]:
    """Return nodes and ranks per node of a topology such as `2x4`."""
    nodes, x, ranks = topology.partition("x")
    if not (x and nodes.isdigit() and ranks.isdigit() and int(nodes) and int(ranks)):
        raise ValueError(f"topology {topology!r}: allowed: NODESxRANKS such as 2x2")
    return int(nodes), int(ranks)


def stage_name(stage: int) -> str:
    """Return "ZeRO-2" or, for stage 0, "DDP"."""
    return f"ZeRO-{stage}" if stage else "DDP"


def title_of(stage: int, topology: str, parameters: int, rows: Sequence[dict[str, Any]]) -> str:
    """Name the fronts of a point's schemes, its ranks and the size of its model."""
    under_fsdp2 = [row["scheme"].startswith("fsdp2") for row in rows]
    front = stage_name(stage)
    if all(under_fsdp2):
        front = "FSDP2"
    elif any(under_fsdp2):
        front = f"FSDP2 and {front}"
    return f"{front}, {topology} ranks, {parameters / 1e6:.1f} M"


def is_measured(scheme: str, stage: int, ranks: int) -> bool:
    """Return True if a scheme fits a point.

    FSDP2 and hpZ shard weights, as stage 3 does; DDP shards nothing, which is stage 0. hpZ and HSDP
    need nodes of several ranks.
    """
    first = scheme.partition(":")[0]
    if stage == 0 or first in DDP_HOOKS:
        return stage == 0 and first in DDP_HOOKS
    if first in ("deepspeed_hpz", "fsdp2_hsdp"):
        return stage == 3 and ranks > 1
    if first == "fsdp2":
        return stage == 3
    return True


def config_of(scheme: str, stage: int, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config.json of an engine. Schemes differ in the block and in hpZ only.

    FSDP2 and DDP take the key "fsdp2" or "ddp", the batch, the optimizer and the block from it.
    """
    default_bucket = 2_000_000 if stage == 3 else 500_000_000
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "reduce_bucket_size": args.reduce_bucket_size or default_bucket,
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
        zero["stage3_max_reuse_distance"] = args.reuse_distance
        zero["stage3_prefetch_bucket_size"] = args.prefetch_bucket_size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    first, _, inner = scheme.partition(":")
    if first in MESHES:
        config["fsdp2"] = MESHES[first]
    if first in DDP_HOOKS:
        config["ddp"] = DDP_HOOKS[first]
    if scheme == "deepspeed_hpz":
        zero["zero_hpz_partition_size"] = ranks
    if scheme not in RIVALS:
        config |= PAPERS.get(first, {})
        name = scheme
        if first in MESHES or first in DDP_HOOKS or first in PAPERS:
            name = inner or DEFAULT_BASELINE
        (entry,) = parse_schemes(name)
        block = {
            "scheme": entry.name,
            "node_size": ranks,
            "allow_full_replica": True,
            "checksum_steps": 0,
        }
        config["quantized_comm"] = with_overrides(block, entry.overrides)
    return config


def run_point(stage: int, topology: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rates and schemes of one stage and topology, unless its file has them."""
    nodes, ranks = nodes_and_ranks(topology)
    folder = args.out / f"zero{stage}_{topology}"
    folder.mkdir(parents=True, exist_ok=True)
    schemes = [scheme for scheme in args.schemes if is_measured(scheme, stage, ranks)]
    if args.baseline not in schemes:
        raise LabError(
            f"--baseline {args.baseline}: {stage_name(stage)} with {topology} ranks measures "
            f"{', '.join(schemes)}: take one of these"
        )
    configs = {scheme: config_of(scheme, stage, ranks, args) for scheme in schemes}
    if args.overlap:
        under_deepspeed = [s for s in schemes if s.partition(":")[0] not in RIVALS]
        configs |= {scheme + WAITING: configs[scheme] for scheme in under_deepspeed}
    plan = {
        "stage": stage,
        "topology": topology,
        "nodes": nodes,
        "rates": args.rates,
        "schemes": configs,
        **{name: getattr(args, name) for name in PLANNED},
    }
    result_file = folder / "result.json"
    if result_file.exists():
        earlier_result = json.loads(result_file.read_text("utf-8"))
        if earlier_result["plan"] == plan:
            return earlier_result
    with (Loopback if args.loopback else Lab)(nodes) as network:
        worker_plan = {**plan, "lab": network.is_shaped}
        outcome = run_ranks(worker_plan, network, ranks, folder, args.timeout)
    result = {"plan": plan, **outcome}
    result_file.write_text(json.dumps(result), "utf-8")
    return result


def run_ranks(
    plan: dict[str, Any], network: Lab | Loopback, ranks: int, folder: Path, timeout: float
) -> dict[str, Any]:
    """Start a process per rank on its host. Return the result of rank 0.

    ranks: ranks per host.
    """
    plan_file = folder / "plan.json"
    outcome = folder / "outcome.json"
    log = folder / "log.txt"
    world = network.hosts * ranks
    plan_file.write_text(json.dumps(plan), "utf-8")
    outcome.unlink(missing_ok=True)
    worker = str(launch.HERE / "speed_worker.py")
    argv = [sys.executable, worker, str(plan_file), str(outcome)]
    environment = launch.environment("cpu", installed=launch.has_entry_point()) | {
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(launch.free_port()),
        "GLOO_SOCKET_IFNAME": network.interface,
    }
    commands = []
    for rank in range(world):
        host, local_rank = divmod(rank, ranks)
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        commands.append((network.command(host, argv), environment | of_rank))
    with launch.started(commands, log) as processes:
        _wait(processes, timeout, log, len(plan["rates"]) * plan["blocks"])
    if not outcome.exists():
        tail = log.read_text("utf-8", "replace")[-2000:]
        raise LabError(f"{folder}: the ranks left no result; the end of their log:\n{tail}")
    return json.loads(outcome.read_text("utf-8"))


def _wait(processes: Sequence[subprocess.Popen], timeout: float, log: Path, blocks: int) -> None:
    """Wait until all processes have ended, one has failed, or the time is up.

    The bar counts blocks. The worker prints a line that ends in "done" for each.
    """
    end = time.monotonic() + timeout
    with launch.progress_bar(blocks, unit="block") as bar:
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.poll() not in (None, 0) for p in processes):
                return
            bar.update(log.read_bytes().count(b" done\n") - bar.n)
            time.sleep(0.5)


def summary(
    result: dict[str, Any], *, max_foreign: float, baseline: str = DEFAULT_BASELINE
) -> list[dict[str, Any]]:
    """Return per rate and scheme the median step, bytes, and the speed-up over the baseline.

    Speed-ups compare the same block of both schemes; their median, least and largest are returned.

    max_foreign: cores that other programs may use. Blocks with more are left out, unless a scheme
        has no others.
    """
    rows = []
    for rate in result["plan"]["rates"]:
        by_scheme: dict[str, dict[int, dict[str, Any]]] = {}
        for block in result["blocks"]:
            if block["rate"] == rate:
                by_scheme.setdefault(block["scheme"], {})[block["block"]] = block
        for scheme, blocks in by_scheme.items():
            base = by_scheme[baseline]
            base_bytes = median(block["interface_bytes"] for block in base.values())
            clean = {
                index: block
                for index, block in blocks.items()
                if block["foreign_cores"] <= max_foreign
            }
            used = clean or blocks
            ratios = [base[index]["seconds"] / block["seconds"] for index, block in used.items()]
            received = median(block["interface_bytes"] for block in blocks.values())
            counted = median(block["counted_bytes"] for block in blocks.values())
            rows.append(
                {
                    "rate": rate,
                    "scheme": scheme,
                    "seconds": median(block["seconds"] for block in used.values()),
                    "speedup": median(ratios),
                    "speedup_min": min(ratios),
                    "speedup_max": max(ratios),
                    "interface_bytes": received / result["parameters"],
                    "counted_bytes": counted / result["parameters"],
                    "bytes_bound": base_bytes / received,
                    "loss": blocks[max(blocks)]["loss"],
                    "clean_blocks": len(clean),
                }
            )
    return rows


def hidden(result: dict[str, Any], *, max_foreign: float) -> list[dict[str, Any]]:
    """Return per rate and scheme with a waiting twin the share of communication that it hides.

    Compute is the median step without a rate limit, of either engine its own. Shares compare the
    same block of both; their median, least and largest are returned.

    max_foreign: see ``summary``.
    """
    seconds: dict[tuple[str, float], dict[int, float]] = {}
    for block in result["blocks"]:
        if block["foreign_cores"] <= max_foreign:
            engine = block["scheme"], block["rate"]
            seconds.setdefault(engine, {})[block["block"]] = block["seconds"]
    rows = []
    for scheme, rate in seconds:
        twin = scheme + WAITING
        if rate == 0 or not {(twin, rate), (scheme, 0), (twin, 0)} <= seconds.keys():
            continue
        compute = median(seconds[scheme, 0].values())
        compute_waiting = median(seconds[twin, 0].values())
        shares = []
        exposed = []
        for index in seconds[scheme, rate].keys() & seconds[twin, rate].keys():
            exposed.append(seconds[scheme, rate][index] - compute)
            shares.append(1 - exposed[-1] / (seconds[twin, rate][index] - compute_waiting))
        if shares:
            rows.append(
                {
                    "rate": rate,
                    "scheme": scheme,
                    "compute_seconds": compute,
                    "exposed_seconds": median(exposed),
                    "hidden": median(shares),
                    "hidden_min": min(shares),
                    "hidden_max": max(shares),
                }
            )
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw step time and speed-up against link rate for every point, with the bound by bytes."""
    points = result["points"]
    baseline = baseline_of(result)
    from ds_quant.config.presets import RENAMED
    from ds_quant.tools import plot_style

    figure, axes = plot_style.pyplot().subplots(2 * len(points), 1, figsize=(7, 8 * len(points)))
    for index, point in enumerate(points):
        rows = [
            row | {"scheme": RENAMED.get(row["scheme"], row["scheme"])}
            for row in point["rows"]
            if not row["scheme"].endswith(WAITING)
        ]
        shaped = [row for row in rows if row["rate"]] or rows
        times, ratios = axes[2 * index : 2 * index + 2]
        title = title_of(point["stage"], point["topology"], point["parameters"], rows)
        colors = plot_style.colors(dict.fromkeys(row["scheme"] for row in shaped))
        rates = sorted({row["rate"] for row in shaped})
        if len(rates) == 1:
            _bars(times, ratios, shaped, colors, baseline)
            link = f"{rates[0]:g} Mbit/s" if rates[0] else "not shaped"
            times.set(title=f"{title}, {link}", xlabel="seconds per step")
            ratios.set(xlabel="speed-up (whisker: spread, dotted: bytes allow)")
            continue
        for scheme, color in colors.items():
            rows_of_scheme = [row for row in shaped if row["scheme"] == scheme]
            _curves(times, ratios, rows_of_scheme, color, baseline)
        ours = [row for row in shaped if row["scheme"] not in RIVALS]
        if ours:
            best = max(ours, key=itemgetter("speedup"))
            title += f"\n{best['scheme']} is up to {best['speedup']:.1f}x as fast as {baseline}"
        times.set(title=title, xscale="log", yscale="log", ylabel="seconds per step")
        ratios.set(
            xscale="log",
            xlabel="link, Mbit/s",
            ylabel="speed-up (band: spread, dotted: bytes allow)",
        )
        for each in (times, ratios):
            plot_style.plain_ticks(each.xaxis, rates)
        plot_style.add_legend(times)  # one legend for both
        plot_style.plain_ticks(times.yaxis)
    plot_style.save(figure, path)


_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def _bars(
    times: Any,
    ratios: Any,
    rows: Sequence[dict[str, Any]],
    colors: dict[str, str],
    baseline: str,
) -> None:
    """Draw the schemes of one rate in both panels. The first scheme is on top."""
    from ds_quant.tools import plot_style

    names = [row["scheme"] for row in rows]
    shades = [colors[name] for name in names]
    labels = [plot_style.wrapped(name) for name in names]
    for axes, key in ((times, "seconds"), (ratios, "speedup")):
        bars = axes.barh(labels, [row[key] for row in rows], color=shades)
        axes.bar_label(bars, fmt="%.2f", padding=4, bbox=_ON_WHITE)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        plot_style.add_legend(axes)
    for index, row in enumerate(rows):
        spread = [row["speedup_min"], row["speedup_max"]]
        ratios.plot(spread, [index + 0.3, index + 0.3], color="0.2", linewidth=1)
        if row["scheme"] not in (baseline, *RIVALS) and row["rate"]:
            bound = row["bytes_bound"]
            ratios.plot([bound, bound], [index - 0.4, index + 0.4], ":", color="0.2")


_STROKES = {"fsdp2": "--", "fsdp2_hsdp": "-.", "ddp": "-."}  # fronts beside DeepSpeed


def _curves(
    times: Any, ratios: Any, rows: Sequence[dict[str, Any]], color: str, baseline: str
) -> None:
    """Draw one scheme in both panels."""
    scheme = rows[0]["scheme"]
    rates = [row["rate"] for row in rows]
    for axes, key in ((times, "seconds"), (ratios, "speedup")):
        axes.plot(
            rates,
            [row[key] for row in rows],
            marker="o",
            linestyle=_STROKES.get(scheme.partition(":")[0], "-"),
            label=scheme,
            color=color,
        )
    low = [row["speedup_min"] for row in rows]
    high = [row["speedup_max"] for row in rows]
    ratios.fill_between(rates, low, high, color=color, alpha=0.15, linewidth=0)
    if scheme not in (baseline, *RIVALS):
        ratios.axhline(rows[0]["bytes_bound"], color=color, linestyle=":", label="_")


USUAL = (DEFAULT_BASELINE, "qsdp", "zeropp", "sdp4bit", "deepspeed_plain")


def baseline_of(result: dict[str, Any]) -> str:
    """Return the baseline of a result file; earlier files do not name it."""
    return result["arguments"].get("baseline", DEFAULT_BASELINE)


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    points = result["points"]
    baseline = baseline_of(result)
    numbers = dict.fromkeys(point["stage"] for point in points)
    sharded = "/".join(str(stage) for stage in numbers if stage)
    fronts = [f"ZeRO-{sharded}"] if sharded else []
    if 0 in numbers:
        fronts.append("DDP")
    topologies = "/".join(dict.fromkeys(str(point["topology"]) for point in points))
    rates = [f"{rate:g}" for rate in result["arguments"]["rates"] if rate]
    links = f"{'/'.join(rates)} Mbit/s" if rates else "not shaped"
    schemes = result["arguments"]["schemes"]
    unusual = "".join(f", {name}" for name in schemes if name not in USUAL)
    heading = f"Step times: {' and '.join(fronts)}, {topologies} ranks, {links}{unusual}"
    parts = []
    for point in points:
        parts.append(f"## {point['title']}\n\n{sections.table(*cells(point['rows'], baseline))}")
        if point.get("overlap"):
            parts.append(f"{ABOUT_HIDDEN}\n\n{sections.table(*hidden_cells(point['overlap']))}")
    of_baseline = "in full precision" if baseline == DEFAULT_BASELINE else f"of `{baseline}`"
    fsdp2_note = ""
    if any(name.partition(":")[0] in MESHES for name in schemes):
        fsdp2_note = (
            " Over gloo FSDP2 waits for every collective:\nnothing overlaps. As shipped its "
            "reduce-scatter over all ranks sends as many bytes as an\nall-reduce, over gloo only."
        )
    return heading, (
        f"Seconds of a step {of_baseline}, and speed-ups over it in the same block: median and\n"
        f'range of {result["arguments"]["blocks"]} blocks. "bytes allow": by the bytes at the\n'
        f"interfaces.{fsdp2_note}\n\n" + "\n\n".join(parts)
    )


ABOUT_HIDDEN = """\
Share of the communication that a step hides, against the same engine with every message awaited
where it is posted; compute: a step without a rate limit."""


def hidden_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of hidden communication."""
    lines = []
    for row in rows:
        low, high = 100 * row["hidden_min"], 100 * row["hidden_max"]
        lines.append(
            [
                f"{row['rate']:g} Mbit/s, `{row['scheme']}`",
                f"{row['compute_seconds']:.3f}",
                f"{row['exposed_seconds']:.3f}",
                f"{100 * row['hidden']:.0f} % ({low:.0f} to {high:.0f})",
            ]
        )
    return ["link, scheme", "compute s", "exposed s", "hidden"], lines


def cells(
    rows: Sequence[dict[str, Any]], baseline: str = DEFAULT_BASELINE
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of a point: a line per rate, a column per scheme."""
    by_rate: dict[float, dict[str, Any]] = {}
    rows = [row for row in rows if not row["scheme"].endswith(WAITING)]
    for row in rows:
        by_rate.setdefault(row["rate"], {})[row["scheme"]] = row
    first = next(iter(by_rate.values()))
    names = [name for name in first if name != baseline]
    lines = []
    for rate, by_scheme in by_rate.items():
        link = f"{rate:g} Mbit/s" if rate else "not shaped"
        speed_ups = [_speed_up(by_scheme[name]) for name in names]
        lines.append([link, f"{by_scheme[baseline]['seconds']:.3f}", *speed_ups])
    lines.append(["bytes allow", "", *(f"{first[name]['bytes_bound']:.2f}" for name in names)])
    last = by_rate[rows[-1]["rate"]]
    if "loss" in last[baseline]:
        losses = [f"{last[name]['loss']:.4f}" for name in (baseline, *names)]
        lines.append(["loss of the last step", *losses])
    return ["link", f"`{baseline}`, s", *(f"`{name}`" for name in names)], lines


def _speed_up(row: dict[str, Any]) -> str:
    noise = "" if row["clean_blocks"] else " (no quiet block)"
    return f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f}){noise}"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    reason = "--loopback" if args.loopback else obstacle()
    args.loopback = reason is not None
    if args.loopback:
        # Without interfaces only the plugin counts bytes, so rivals are left out.
        args.rates = [0]
        args.schemes = [scheme for scheme in args.schemes if scheme not in RIVALS]
        print(
            f"speed.py: warning: no network lab: {reason}. Over loopback instead: one point without"
            " a rate limit, bytes as the plugin counts them"
        )
    points = []
    try:
        for stage, topology in itertools.product(args.stages, args.topologies):
            print(f"{stage_name(stage)}, {topology}: {args.out}/zero{stage}_{topology}/log.txt")
            result = run_point(stage, topology, args)
            rows = summary(result, max_foreign=args.max_foreign, baseline=args.baseline)
            title = title_of(stage, topology, result["parameters"], rows)
            report.show(*cells(rows, args.baseline), title)
            point = {
                "title": title,
                "stage": stage,
                "topology": topology,
                "parameters": result["parameters"],
                "lines": result["lines"],
                "rows": rows,
            }
            if args.overlap:
                point["overlap"] = hidden(result, max_foreign=args.max_foreign)
                report.show(*hidden_cells(point["overlap"]), "hidden communication")
            points.append(point)
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
