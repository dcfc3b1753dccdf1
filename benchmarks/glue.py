"""Python time that the plugin adds per parameter and optimizer step, against plain DeepSpeed.

    python benchmarks/glue.py                      # ZeRO-1, 2 and 3, 2,000 tiny parameters
    python benchmarks/glue.py --cases 3 --profile  # where it goes
    python benchmarks/glue.py --worlds 2x2 8x8 16x8 --width 64 --layers 100 --codecs cuda

Both engines live in one process, in a world whose process group sends nothing (see fake_world.py),
and take turns step by step; what counts is the CPU time of the process. So neither the transport
nor waiting is in the figures: only what happens around a collective. Other jobs on the machine
still slow a step by half, so besides the median of the rounds there is the difference of the
fastest steps, which they have disturbed least. The world has two ranks or is one of --worlds, nodes
x ranks per node, each in a process of its own; in a large one --width must be large enough for
every rank to get a share. Three codecs:

    full precision   what small parameters take: values are copied, as DeepSpeed copies them
    empty            every matrix is "quantized", by codecs that do nothing
    cuda             the same, and codecs prepare the launches of their CUDA kernels

ZeRO-3 gathers every parameter twice (none persists or is kept), many in one message as DeepSpeed
prefetches them, or ("3 by layer") one layer at a time.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import report
import sections
from fake_world import World, faked_cuda, join, without_handshake
from rich.console import Console
from rich.table import Table

WIDTH = 4
CODECS = ("full precision", "empty", "cuda")
BY_LAYER = {"stage3_max_live_parameters": 0}
CASES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3 by layer": {"stage": 3, **BY_LAYER},
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", default=list(CASES), choices=list(CASES), help="ZeRO stages")
    add("--codecs", nargs="+", default=list(CODECS[:2]), choices=CODECS)
    add("--scheme", default="qsdp", help="of the codecs empty and cuda")
    add(
        "--worlds", nargs="+", type=lambda text: str(World.parse(text)), default=["1x2"],
        metavar="NODESxRANKS",
        help="this process is rank 0 of that many nodes and ranks per node, such as 8x8",
    )  # fmt: skip
    add("--layers", type=int, default=1000, help="of two parameters each")
    add("--width", type=int, default=WIDTH, help="of the layers' square matrices")
    add("--rounds", type=int, default=30, help="turns of either engine")
    add("--steps", type=int, default=1, help="optimizer steps of a turn")
    add("--profile", action="store_true", help="print where the time of the plugin's steps goes")
    add("--json", type=Path, default=Path("glue.json"))
    return parser.parse_args(argv)


def zero_section(case: str) -> dict[str, Any]:
    section = {"reduce_bucket_size": 10**6, **CASES[case]}
    if section["stage"] == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return section


def block(codec: str, scheme: str) -> dict[str, Any]:
    """The ``quantized_comm`` block; without sampled steps, of which one in 100 is slower, and
    without checksums of weights, as many.
    """
    found = {"scheme": "full_precision", "metrics": {"interval": 0}, "checksum_steps": 0}
    return found if codec == "full precision" else {**found, "scheme": scheme, "min_numel": 0}


@contextmanager
def emptied(codec: str) -> Iterator[None]:
    """The quantizer does nothing inside, but for zeros: what memory happens to hold may be NaN, and
    DeepSpeed would skip the optimizer's step.
    """
    from ds_quant.codec.bound import Coding
    from ds_quant.codec.codec import GroupCodec

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def zeros(_codec: Any, _wire: Any, out: Any, **__: Any) -> None:
        out.detach().zero_()

    does = {"encode": nothing, "decode": zeros, "decode_sum": zeros} if codec == "empty" else {}
    with ExitStack() as stack:
        for name, function in does.items():
            stack.enter_context(patch.object(GroupCodec, name, function))
        if codec == "empty":
            stack.enter_context(patch.object(Coding, "recode", nothing))
        if codec == "cuda":
            stack.enter_context(faked_cuda())
        yield


def build(
    case: str, layers: int, quantized_comm: dict[str, Any] | None, *, width: int = WIDTH
) -> Any:
    """A DeepSpeed engine of ``layers`` square layers with biases."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_section(case),
        "zero_allow_untested_optimizer": True,
        # Nothing arrives here, so gradients hold whatever memory held; no step may be skipped.
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }
    if quantized_comm is not None:
        config["quantized_comm"] = quantized_comm
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def seconds(engine: Any, steps: int) -> float:
    """CPU time of one optimizer step. Without garbage collection, which would hit any engine."""
    import torch

    x = torch.ones(1, engine.module[0].in_features, dtype=torch.bfloat16)
    gc.collect()
    gc.disable()
    start = time.process_time()
    for _ in range(steps):
        engine.backward(engine(x).sum())
        engine.step()
    taken = (time.process_time() - start) / steps
    gc.enable()
    return taken


def in_turns(engines: Sequence[Any], rounds: int, steps: int = 1) -> list[tuple[float, ...]]:
    """Per round the seconds of a step of every engine."""
    for engine in engines:
        seconds(engine, 3)  # ZeRO-3 records its trace in the second one
    return [tuple(seconds(engine, steps) for engine in engines) for _ in range(rounds)]


def measure_world(world: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one world, in this process."""
    join(World.parse(world))
    return [
        {"world": world, **measure(case, codec, args)}
        for case in args.cases
        for codec in args.codecs
    ]


def measure(case: str, codec: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: seconds of both engines, added microseconds per parameter in every round."""
    parameters = 2 * args.layers
    with emptied(codec), without_handshake():
        blocks = None, block(codec, args.scheme)
        plain, ours = (build(case, args.layers, b, width=args.width) for b in blocks)
        pairs = in_turns((plain, ours), args.rounds, args.steps)
        if plain.skipped_steps or ours.skipped_steps:
            raise RuntimeError(
                f"ZeRO-{case}, {codec}: steps were skipped for want of finite gradients, "
                f"{plain.skipped_steps} without the plugin and {ours.skipped_steps} with it"
            )
        if args.profile:
            with cProfile.Profile() as profile:
                seconds(ours, 1)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        for engine in (plain, ours):
            engine.destroy()
    added = [1e6 * (b - a) / parameters for a, b in pairs]
    low, _, high = quantiles(added, n=4)
    return {
        "case": case, "codec": codec, "scheme": args.scheme, "parameters": parameters,
        "plain_seconds": median(a for a, _ in pairs), "seconds": median(b for _, b in pairs),
        "added_us": median(added), "added_us_low": low, "added_us_high": high,
        "added_us_least": 1e6 * (min(b for _, b in pairs) - min(a for a, _ in pairs)) / parameters,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Table:
    grid = Table(title="CPU time per optimizer step")
    for header in (
        "world", "ZeRO", "codec", "plain ms", "with plugin ms", "times",
        "added us per parameter", "fastest steps",
    ):  # fmt: skip
        grid.add_column(header, justify="right")
    for row in rows:
        spread = f"{row['added_us_low']:.1f} to {row['added_us_high']:.1f}"
        grid.add_row(
            row["world"], row["case"], row["codec"], f"{1e3 * row['plain_seconds']:.1f}",
            f"{1e3 * row['seconds']:.1f}", f"{row['seconds'] / row['plain_seconds']:.2f}",
            f"{row['added_us']:.1f} ({spread})", f"{row['added_us_least']:.1f}",
        )  # fmt: skip
    return grid


def section(result: dict[str, Any]) -> tuple[str, str]:
    """See sections.py."""
    rows = [
        [f"{row.get('world', '1x2')}, ZeRO-{row['case']}, {row['codec']}",
         f"{1e3 * row['plain_seconds']:.0f}", f"{1e3 * row['seconds']:.0f}",
         f"{row['added_us']:.1f} ({row['added_us_low']:.1f} to {row['added_us_high']:.1f})",
         f"{row['added_us_least']:.1f}"]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["ranks, case, codec", "DeepSpeed ms", "with plugin ms", "added us per parameter",
              "of the fastest steps"]  # fmt: skip
    return "Python time around the collectives", (
        f"CPU time of an optimizer step with {result['rows'][0]['parameters']} tiny parameters, "
        'without transport;\nmedian and quartiles. "empty": matrices take a quantizer that does '
        f"nothing, which leaves\nwhat Python does for it.\n\n{sections.table(header, rows)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    # Forked from a process without torch; a fork ends without the interpreter's exit, in which
    # DeepSpeed on CPU may abort.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        measured = pool.starmap(measure_world, [(world, args) for world in args.worlds], 1)
    rows = [row for world in measured for row in world]
    console.print(table(rows))
    report.save(args.json, "glue", args, rows=rows)
    console.print(f"results: {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
