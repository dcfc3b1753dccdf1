"""Compare schemes by training: one small GPT per scheme, same start, same data, one after another.

    python benchmarks/compare.py                     # the demo: three schemes, a few minutes
    python benchmarks/compare.py --schemes full_precision,qsdp:weights.bits=6 --stage 2 --steps 500
    python benchmarks/compare.py --model my_model:build --world 2 --node-size 1   # your own model

Prints a table and what it means, writes a JSON file with everything and a PNG of the loss curves.
`--model` names a function as `task.load_task` describes it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launch
import report
import sections
import task
import text
from schemes import block_of, deepspeed_config, parse_override, parse_schemes

DEMO = "full_precision,qsdp,sdp4bit"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; without arguments it is the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--schemes",
        type=_or_error(parse_schemes),
        metavar="A,B:KEY=VALUE,...",
        help=f"default, the demo: {DEMO}, on two pretended nodes",
    )
    add(
        "--override",
        type=_or_error(parse_override),
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="into the block of every scheme; may be repeated",
    )
    add("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage")
    add("--world", type=int, default=4, help="ranks")
    add(
        "--node-size",
        type=int,
        help="ranks per (pretended) node; must divide --world",
    )
    add("--steps", type=int, default=150, help="optimizer steps per scheme")
    add("--accumulation", type=int, default=1, help="micro-steps per optimizer step")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--seed", type=int, default=0, help="of initial weights, data order and rounding")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--batch", type=int, default=8, help="sequences per rank and micro-step")
    add("--seq-len", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--tied", action="store_true", help="share embedding and output head")
    add("--model", metavar="MODULE:FUNCTION", help="train your own model instead of the GPT")
    add("--text", type=Path, help="file to train on; default: the documentation of CPython")
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
            args.node_size = args.world // 2  # between the nodes is where bytes count
    return args


def _or_error(parse: Any) -> Any:
    def checked(value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def check(args: argparse.Namespace) -> None:
    """Refuse a wrong block now, not when its turn comes minutes later.

    Raises:
        ValueError: (ConfigError) names the key and what is allowed.
    """
    sys.path.append(str(launch.HERE.parent))  # last: an installed ds_quant comes first
    from ds_quant.config.schema import parse

    if args.model:
        task.find(args.model)
    for entry in args.schemes:
        config = parse(deepspeed_config(entry, args))
        if config is not None:
            config.validate_world(args.world)


def choose_device(args: argparse.Namespace) -> str:
    """The accelerator of all runs: `--device`, with auto resolved."""
    if args.device != "auto":
        return args.device
    import torch

    return "cuda" if torch.cuda.device_count() >= args.world else "cpu"


def run_all(args: argparse.Namespace, device: str, corpus: Path) -> list[dict[str, Any]]:
    """Train every scheme in turn; label, block, result of train.py and seconds of each."""
    model = [f"--{name}={getattr(args, name)}" for name in ("layers", "width", "heads", "seed")]
    arguments = [*model, f"--seq-len={args.seq_len}", f"--text={corpus}"]
    arguments += ["--tied"] if args.tied else []
    arguments += [f"--model={args.model}"] if args.model else []
    progress = launch.Progress(runs=len(args.schemes), steps=args.steps)
    runs = []
    for entry in args.schemes:
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
        start = time.monotonic()
        result = launch.run(job, progress)
        seconds = time.monotonic() - start
        runs.append(
            {
                "label": entry.label,
                "block": block_of(entry, args),
                "run_seconds": seconds,
                "result": result,
            }
        )
    progress.close()
    return runs


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; 0 when every scheme finished."""
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


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The command line as JSON types, without the paths of this machine."""
    values = {name: value for name, value in vars(args).items() if name not in _PATHS}
    values["schemes"] = [entry.label for entry in args.schemes]
    values["text"] = None if args.text is None else args.text.name
    return values


_PATHS = ("out", "json", "plot")


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    given = result["arguments"]
    rows = [
        [
            f"`{row['label']}`", f"{row['final_loss']:.4f}",
            report.number(row["gap_percent"], "+.2f"), f"{row['validation_loss']:.4f}",
            report.number(row["wire_bytes"], ".3f"),
            f"{1e3 * row['step_seconds']:.0f}",
        ]
        for row in result["summary"]
    ]  # fmt: skip
    header = ["scheme", "final loss", "gap %", "held-out loss", "B/param/step", "step ms"]
    heading = f"Comparison: ZeRO-{given['stage']}, {given['world']} ranks, {given['steps']} steps"
    return heading, (
        "Loss in nats per byte of text, mean of the last 50 steps; bytes received by a rank per\n"
        f"parameter and optimizer step.\n\n{sections.table(header, rows)}"
    )


def show(args: argparse.Namespace, runs: list[dict[str, Any]], **about: Any) -> None:
    """Print the table, write the JSON file and the picture."""
    from rich.console import Console

    rows = report.rows(runs)
    summary = [asdict(row) for row in rows]
    arguments = _arguments(args)
    report.save(
        args.json, "compare", arguments, commas=("schemes",), **about, summary=summary, runs=runs
    )
    millions = runs[0]["result"]["parameters"] / 1e6
    model = args.model or "GPT"
    nodes = "" if args.node_size is None else f" in {args.world // args.node_size} nodes"
    title = (
        f"ZeRO-{args.stage}, {args.world} ranks{nodes}, {model} with {millions:.2f} M parameters, "
        f"{args.dtype}, seed {args.seed}"
    )
    report.plot(runs, title, args.plot)
    console = Console()
    console.print(report.table(rows))
    for line in (title, *report.conclusions(rows, world=args.world)):
        console.print(line, highlight=False)
    print(f"curves: {args.plot}\nresults: {args.json}\nlogs: {args.out}/*/log.txt")


if __name__ == "__main__":
    # The default action would leave the ranks running; an exception ends them (launch.run).
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.exit(main())
