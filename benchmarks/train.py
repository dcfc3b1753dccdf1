"""Training script of the demo: a plain DeepSpeed script with a log of losses and counters.

The "quantized_comm" block of the DeepSpeed configuration switches ds_quant on, not this file. A
checkout that is not installed has no entry point to load the plugin; there pass --plugin-import and
set PYTHONPATH. Run it with a launcher:

    deepspeed --num_accelerators 4 benchmarks/train.py --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from task import HELD_OUT, Batch, add_flags, load_task

LOG_INTERVAL = 10  # steps between two log writes; each costs one all-reduce of 10 losses
VALIDATION_BATCHES = 8  # per rank


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line of one training run. Sizes are per rank and micro-step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--deepspeed_config", required=True, help="ds_config.json")
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add_flags(parser)
    add("--progress", type=Path, help="JSON lines, one per step, as they happen")
    add("--result", type=Path, help="JSON written at the end")
    add("--profile", type=Path, help="Chrome trace of the last step on rank 0")
    add("--plugin-import", action="store_true", help="import ds_quant by name")
    return parser.parse_args(argv)


def train_step(engine: deepspeed.DeepSpeedEngine, batch: Batch, step: int) -> torch.Tensor:
    """Run one optimizer step. Return the mean loss of this rank's micro-steps, a scalar fp32."""
    total = torch.zeros((), device=engine.device)
    accumulation = engine.gradient_accumulation_steps()
    for micro_step in range(step * accumulation, (step + 1) * accumulation):
        loss = engine(*next_batch(engine, batch, micro_step))
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    return total / accumulation


def next_batch(engine: deepspeed.DeepSpeedEngine, batch: Batch, step: int) -> list[torch.Tensor]:
    """Return this rank's tensors of micro-step `step`, on its device."""
    tensors = batch(step, dist.get_rank(), engine.train_micro_batch_size_per_gpu())
    return [tensor.to(engine.device) for tensor in tensors]


def mean_over_ranks(values: list[torch.Tensor]) -> list[float]:
    """Return the means over ranks of scalar tensors, with one collective."""
    stacked = torch.stack(values).float()  # (len(values),)
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


def train(
    engine: deepspeed.DeepSpeedEngine, batch: Batch, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Run all steps. Return the losses, mean over ranks, and this rank's seconds, per step."""
    losses: list[float] = []
    seconds: list[float] = []
    pending: list[torch.Tensor] = []
    for step in range(args.steps):
        start = time.perf_counter()
        with profiled(args.profile if step == args.steps - 1 else None):
            pending.append(train_step(engine, batch, step))
            get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
        if len(pending) == LOG_INTERVAL or step == args.steps - 1:
            means = mean_over_ranks(pending)
            if args.progress is not None and dist.get_rank() == 0:
                write_progress(args.progress, len(losses), means)
            losses += means
            pending.clear()
    return losses, seconds


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Write a Chrome trace of the code inside on rank 0. path: None to record nothing."""
    if path is None or dist.get_rank() != 0:
        yield
        return
    with torch.profiler.profile() as recorded:
        yield
    recorded.export_chrome_trace(str(path))


def write_progress(path: Path, first: int, losses: list[float]) -> None:
    """Append losses to the file. first: step of the first one."""
    with path.open("a", encoding="utf-8") as file:
        for step, loss in enumerate(losses, start=first):
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def validate(engine: deepspeed.DeepSpeedEngine, batch: Batch) -> float:
    """Return the loss on held-out batches, mean over ranks. Weights are sent as in training."""
    engine.eval()
    losses = []
    with torch.no_grad():
        for step in range(HELD_OUT, HELD_OUT + VALIDATION_BATCHES):
            losses.append(engine(*next_batch(engine, batch, step)).detach())
    return sum(mean_over_ranks(losses)) / len(losses)


def plugin_reports(engine: deepspeed.DeepSpeedEngine) -> list[dict[str, Any]] | None:
    """Return the plugin's counters of every rank, or None if it does not act on this engine."""
    report = None
    if "ds_quant" in sys.modules:
        report = sys.modules["ds_quant"].report(engine)
    reports: list[dict[str, Any] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    found = [report for report in reports if report is not None]
    return found if len(found) == len(reports) else None


def main() -> None:
    """Train. Write losses, times and counters to `--result`."""
    args = parse_args()
    if args.plugin_import:
        importlib.import_module("ds_quant")
    model, batch, whole_layers = load_task(args, on_cpu=get_accelerator().device_name() == "cpu")
    if whole_layers:
        deepspeed.utils.set_z3_leaf_modules(model, whole_layers)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    losses, seconds = train(engine, batch, args)
    result = {
        "parameters": num_parameters,
        "losses": losses,
        "seconds": seconds,
        "reports": plugin_reports(engine),  # before validation, which gathers weights too
        "validation_loss": validate(engine, batch),
        "device": get_accelerator().device_name(),
    }
    if args.result is not None and dist.get_rank() == 0:
        args.result.write_text(json.dumps(result), encoding="utf-8")
    engine.destroy()
    # Without these two a CPU process may abort at exit, after its work is done.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
