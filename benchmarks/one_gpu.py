"""Several ranks on one GPU: ZeRO-2 and ZeRO-3 over gloo with CUDA tensors.

    python benchmarks/one_gpu.py --world 4 --stage 3 --json out.json
    python benchmarks/one_gpu.py --world 2 --stage 2 --device cpu         # dry run

NCCL refuses two ranks on one GPU, and gloo copies CUDA tensors through the host, so times mean
nothing: losses are compared. Every scheme trains the same small model on the same data.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import report
import torch

SCHEMES = ("full_precision", "qsdp")


def leave_out_host_operator(device: str) -> None:
    """Keep DeepSpeed from compiling an operator at start-up that training never calls.

    Only on the CPU: CUDA has no such operator, and reading the table of operators tries all of
    them, which takes a minute there.
    """
    if device == "cpu":
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    width = args.width
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    )


def config_of(args: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """Return the ds_config.json of a scheme."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": args.accumulation,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "quantized_comm": {"enabled": True, "scheme": scheme},
    }
    if args.node_size:
        config["quantized_comm"] |= {"node_size": args.node_size, "allow_full_replica": True}
    return config


def worker(rank: int, args: argparse.Namespace, scheme: str, folder: str) -> None:
    """Train as one rank. Rank 0 writes its losses to the folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.world), LOCAL_RANK="0")
    os.environ["DS_ACCELERATOR"] = args.device
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import deepspeed

    import ds_quant  # noqa: F401  # activates it where the entry point is not installed

    leave_out_host_operator(args.device)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(0)
    store = torch.distributed.FileStore(f"{folder}/store", args.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=args.world)
    torch.manual_seed(0)
    model, config = model_of(args), config_of(args, scheme)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    generator = torch.Generator().manual_seed(rank)
    width = args.width
    target = torch.randn(width, width, generator=torch.Generator().manual_seed(7)) / width**0.5
    losses = []
    x = torch.randn(4, width, generator=generator)  # a single batch, whose loss must fall
    for _ in range(args.steps * args.accumulation):
        y = (x @ target).to(device, torch.bfloat16)
        loss = (engine(x.to(device, torch.bfloat16)) - y).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(args: argparse.Namespace, scheme: str) -> list[float]:
    """Train a scheme on all ranks. Return the losses of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            worker, (args, scheme, folder), nprocs=args.world, start_method="spawn"
        )
        return json.loads((Path(folder) / "losses.json").read_text())


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps of a step")
    parser.add_argument("--node-size", type=int, help="ranks of a node; default: one node")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--at-once", type=int, default=1, help="schemes trained side by side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    document = {"world": args.world, "stage": args.stage, "losses": losses, "failed": failed}
    with ThreadPoolExecutor(args.at_once) as pool:
        running = {pool.submit(train, args, scheme): scheme for scheme in args.schemes}
        for done in as_completed(running):
            scheme = running[done]
            error = done.exception()
            if error is None:
                losses[scheme] = done.result()
            else:
                failed[scheme] = f"{type(error).__name__}: {error}"[-2000:]
                print(f"{scheme}: {error}")
            report.write(args.json, document)  # a run that is ended leaves the results it has
    passed = not failed
    exact = losses.get("full_precision")
    for scheme, values in losses.items():
        head = f"world {args.world} stage {args.stage} {scheme}"
        print(f"{head}: {values[0]:.4f} -> {values[-1]:.4f}")
        is_active = values is exact or values != exact
        if values[-1] >= values[0] or not is_active:
            passed = False
    if not passed:
        raise SystemExit("one_gpu.py: a scheme failed or was not active, or a loss did not fall")


if __name__ == "__main__":
    main()
