"""One training step as a rank of a large world sees it, without the others, with real kernels.

    python benchmarks/gpu/world.py --ranks 32 --node-size 8 --json world.json

As fake_world.py, but on a real device: seconds are the host's and the kernels', never a network's.
Counts launches and collectives of one step.
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
    section = {"stage": stage, "reduce_bucket_size": 4 * width * (width + 1)}
    section |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    block = {"scheme": args.scheme, "node_size": args.node_size, "metrics": {"interval": 0}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": section,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "quantized_comm": block | {"checksum_steps": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def launches_of(step: Callable[[], None]) -> int | None:
    """CUDA kernels and copies of one step, by torch's profiler; None on the CPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync")
    return sum(event.count for event in found.key_averages() if event.key in calls)


def measure(args: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Host and whole seconds of the fastest of some steps, and what one of them launches."""
    import ds_quant

    engine = engine_of(args, stage)
    x = torch.ones(1, args.width, dtype=torch.bfloat16, device=args.device)

    def step() -> None:
        engine.backward(engine(x).float().square().mean())
        engine.step()

    def seconds() -> tuple[float, float]:
        start, host = time.perf_counter(), time.process_time()
        step()
        host = time.process_time() - host
        if args.device == "cuda":
            torch.cuda.synchronize()
        return host, time.perf_counter() - start

    for _ in range(3):
        step()
    times = [seconds() for _ in range(args.steps)]
    posted = ds_quant.report(engine)["collectives"]
    launches = launches_of(step) if args.device == "cuda" else step()
    now = ds_quant.report(engine)["collectives"]
    collectives = sum(now.values()) - sum(posted.values())
    found = {"stage": stage, "parameters": 2 * args.layers, "collectives": collectives}
    found |= {"host_seconds": min(h for h, _ in times), "seconds": min(s for _, s in times)}
    return found | {"launches": launches}


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
    os._exit(0)  # nobody to take leave of


if __name__ == "__main__":
    main()
