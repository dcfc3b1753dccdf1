"""One training step as a rank of a large world sees it, without the others, with real kernels.

    python benchmarks/gpu/world.py --ranks 32 --node-size 8 --json world.json

The world is that of fake_world.py, on a real device. Seconds are those of the host and the kernels;
there is no network. Counts launches and collectives of one step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import report  # noqa: E402
from fake_world import World, join, without_handshake  # noqa: E402


def engine_of(args: argparse.Namespace, stage: int) -> Any:
    import deepspeed

    import ds_quant  # noqa: F401  # activates it where the entry point is not installed

    torch.manual_seed(0)
    width = args.width
    layers = (torch.nn.Linear(width, width) for _ in range(args.layers))
    model = torch.nn.Sequential(*layers).to(args.device)
    zero = {"stage": stage, "reduce_bucket_size": 4 * width * (width + 1)}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "quantized_comm": {
            "scheme": args.scheme,
            "node_size": args.node_size,
            "metrics": {"interval": 0},
            "checksum_steps": 0,
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def launches_of(step: Callable[[], None], device: str) -> int | None:
    """Run a step. Return the CUDA kernels and copies that it launches, None on the CPU."""
    if device == "cpu":
        step()
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")
    return sum(event.count for event in recorded.key_averages() if event.key in calls)


def measure(args: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Return host and total seconds of the fastest step, and launches and collectives of a step."""
    import ds_quant

    engine = engine_of(args, stage)
    x = torch.ones(1, args.width, dtype=torch.bfloat16, device=args.device)

    def step() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    def seconds() -> tuple[float, float]:
        start = time.perf_counter()
        host_start = time.process_time()
        step()
        host = time.process_time() - host_start
        if args.device == "cuda":
            torch.cuda.synchronize()
        return host, time.perf_counter() - start

    for _ in range(3):
        step()
    times = [seconds() for _ in range(args.steps)]
    collectives_before = sum(ds_quant.report(engine)["collectives"].values())
    launches = launches_of(step, args.device)
    collectives = sum(ds_quant.report(engine)["collectives"].values()) - collectives_before
    return {
        "stage": stage,
        "parameters": 2 * args.layers,
        "collectives": collectives,
        "host_seconds": min(host for host, _ in times),
        "seconds": min(total for _, total in times),
        "launches": launches,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--ranks", type=int, default=32)
    add("--node-size", type=int, default=8)
    add("--scheme", default="sdp4bit")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=2048)
    add("--steps", type=int, default=5)
    add("--json", type=Path)
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = args.device
    join(World(args.ranks // args.node_size, args.node_size))
    with without_handshake():
        rows = [measure(args, stage) for stage in (3, 2)]
    shown = [
        f"ZeRO-{row['stage']}, {args.ranks} ranks: {1e3 * row['host_seconds']:.1f} ms of host, "
        f"{1e3 * row['seconds']:.1f} ms, {row['launches']} launches, "
        f"{row['collectives']} collectives"
        for row in rows
    ]
    print("\n".join(shown))
    document = {"ranks": args.ranks, "scheme": args.scheme, "worlds": rows, "shown": shown}
    report.write(args.json, document)
    sys.stdout.flush()
    os._exit(0)  # the other ranks do not exist


if __name__ == "__main__":
    main()
