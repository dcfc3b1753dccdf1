"""Compares schemes by training: one small GPT per scheme, same start, same data, one by one.

    python benchmarks/compare.py                     # the demo: three schemes, a few minutes
    python benchmarks/compare.py --schemes full_precision,qsdp:weights.bits=6 --stage 2 --steps 500
    python benchmarks/compare.py --model my_model:build --world 2 --node-size 1   # your own model

Prints a table with conclusions. Writes a JSON file with all figures and a PNG of the loss curves.
`--model` names a function: see task.py.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

import launch
import report
import sections
import task
import text
from schemes import SchemeEntry, block_of, deepspeed_config, parse_schemes

DEMO = "full_precision,qsdp,sdp4bit"
MODEL_FLAGS = ("layers", "width", "heads", "seq_len", "seed", "model")  # of train.py too


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line. Without arguments it is the demo."""
    parser = report.parser(__doc__)
    add = parser.add_argument
    add(
        "--schemes",
        type=_schemes,
        metavar="A,B:KEY=VALUE,...",
        help=f"default, the demo: {DEMO}, on two pretended nodes",
    )
    add("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage")
    add("--world", type=int, default=4, help="ranks")
    add("--node-size", type=int, help="ranks per (pretended) node; must divide --world")
    task.add_flags(parser)
    add("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--batch", type=int, default=8, help="sequences per rank and micro-step")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if it has a GPU for every rank",
    )
    add("--launcher", choices=("deepspeed", "torchrun"), default="deepspeed")
    add("--timeout", type=float, default=3600, help="seconds after which a run is ended")
    add("--out", type=Path, default=Path("demo_out"), help="folder for logs and results")
    add("--json", type=Path, help="default: OUT/compare.json")
    add("--plot", type=Path, help="default: OUT/compare.png")
    args = parser.parse_args(argv)
    args.json = args.json or args.out / "compare.json"
    args.plot = args.plot or args.out / "compare.png"
    if args.schemes is None:
        args.schemes = parse_schemes(DEMO)
        if args.node_size is None and args.world % 2 == 0:
            args.node_size = args.world // 2  # two nodes: bytes between nodes matter most
    return args


def _schemes(listing: str) -> list[SchemeEntry]:
    try:
        return parse_schemes(listing)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check(args: argparse.Namespace) -> None:
    """Refuse wrong blocks and models before the first run.

    Raises:
        ValueError: (ConfigError) names the key and the allowed values.
    """
    from ds_quant.config.schema import parse

    if args.model:
        task.find(args.model)
    for entry in args.schemes:
        config = parse(deepspeed_config(entry, args))
        if config is not None:
            config.validate_world(args.world)


def choose_device(args: argparse.Namespace) -> str:
    """Return the accelerator of all runs."""
    if args.device != "auto":
        return args.device
    import torch

    return "cuda" if torch.cuda.device_count() >= args.world else "cpu"


def run_all(args: argparse.Namespace, device: str, corpus: Path) -> list[dict[str, Any]]:
    """Train every scheme. Return label, block, seconds and result of train.py of each.

    corpus: file with the text to train on.
    """
    model_flags = {name: getattr(args, name) for name in MODEL_FLAGS}
    arguments = [*report.flags(model_flags), f"--text={corpus}"]
    bar = launch.progress_bar(len(args.schemes) * args.steps)
    runs = []
    for number, entry in enumerate(args.schemes):
        job = launch.Job(
            label=entry.label,
            config=deepspeed_config(entry, args),
            arguments=arguments,
            folder=args.out.resolve() / launch.folder_name(entry.label),
            world=args.world,
            steps=args.steps,
            device=device,
            launcher=args.launcher,
            timeout=args.timeout,
        )
        bar.n = number * args.steps
        start = time.monotonic()
        result = launch.run(job, bar)
        runs.append(
            {
                "label": entry.label,
                "block": block_of(entry, args),
                "run_seconds": time.monotonic() - start,
                "result": result,
            }
        )
    bar.close()
    return runs


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Return 0 if every scheme finished."""
    args = parse_args(argv)
    try:
        check(args)
        device = choose_device(args)
        args.out.mkdir(parents=True, exist_ok=True)
        tokens = text.load(args.text)
        corpus = args.out.resolve() / "text.bin"  # built once, not once per rank
        corpus.write_bytes(tokens.numpy().tobytes())
        trained_on = {"bytes": len(tokens), "sha256": text.fingerprint(tokens)}
        runs = run_all(args, device, corpus)
    except (ValueError, OSError, launch.RunFailed) as error:
        print(error, file=sys.stderr)
        return 1
    show(args, runs, device=device, text=trained_on)
    return 0


def cells(summary: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table. Bytes from other nodes come first, if there are any."""
    has_nodes = any(row["inter_bytes"] for row in summary)
    header = ["scheme"]
    if has_nodes:
        header.append("B/param between nodes")
    header += ["B/param all links", "final loss", "gap %", "held-out loss", "step ms"]
    rows = []
    for row in summary:
        line = [f"`{row['label']}`"]
        if has_nodes:
            line.append(report.number(row["inter_bytes"], ".3f"))
        line += [
            report.number(row["wire_bytes"], ".3f"),
            f"{row['final_loss']:.4f}",
            report.gap(row),
            f"{row['validation_loss']:.4f}",
            f"{1e3 * row['step_seconds']:.0f}",
        ]
        rows.append(line)
    return header, rows


def section(result: dict[str, Any]) -> tuple[str, str]:
    """Return heading and body of the page: see sections.py."""
    given = result["arguments"]
    heading = f"Comparison: ZeRO-{given['stage']}, {given['world']} ranks, {given['steps']} steps"
    return heading, (
        "Bytes received by a rank per parameter and optimizer step. Loss in nats per byte of\n"
        f"text, mean of the last 50 steps.\n\n{sections.table(*cells(result['summary']))}"
    )


def title(result: dict[str, Any]) -> str:
    """Describe the training in one line."""
    given = result["arguments"]
    parameters = result["runs"][0]["result"]["parameters"]
    size = given.get("node_size")
    nodes = "" if size is None else f" in {given['world'] // size} nodes"
    return (
        f"ZeRO-{given['stage']}, {given['world']} ranks{nodes}, {given.get('model') or 'GPT'} with "
        f"{parameters / 1e6:.2f} M parameters, {given['dtype']}, seed {given['seed']}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot of a result file."""
    report.plot(result["runs"], title(result), path)


def show(args: argparse.Namespace, runs: list[dict[str, Any]], **about: Any) -> None:
    """Print the table. Write the result file and the plot.

    about: further content of the result file.
    """
    summary = report.rows(runs)
    arguments = {**vars(args), "schemes": [entry.label for entry in args.schemes]}
    result = report.save(
        args.json, "compare", arguments, commas=("schemes",), **about, summary=summary, runs=runs
    )
    draw(result, args.plot)
    report.show(*cells(summary))
    print(title(result), *report.conclusions(summary, world=args.world), sep="\n")
    print(f"curves: {args.plot}\nresults: {args.json}\nlogs: {args.out}/*/log.txt")


if __name__ == "__main__":
    # The default action would leave the ranks running. An exception ends them: see launch.run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.exit(main())
