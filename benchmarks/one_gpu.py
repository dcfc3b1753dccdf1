"""Several ranks on one GPU: ZeRO-2, ZeRO-3 and FSDP2 over gloo with CUDA tensors.

    python benchmarks/one_gpu.py --world 4 --stage 3 --json out.json
    python benchmarks/one_gpu.py --world 4 --front fsdp2 --node-size 2 --replicas
    python benchmarks/one_gpu.py --world 2 --stage 2 --device cpu         # dry run

NCCL refuses two ranks on one GPU, and gloo copies CUDA tensors through the host, so times mean
nothing: losses are compared. Every scheme trains the same small model on the same data. `--record`
keeps the losses in a file, `--beside` compares with those of the same settings there.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import report
import torch

SCHEMES = ("full_precision", "qsdp")
BLOCKS = 4  # layers that FSDP2 shards on their own
# Of the first loss. bf16 keeps 8 bits of every product and sum, and devices differ in their order.
ALLOWED_DIFFERENCE = 0.05


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


# ---- one rank ----


class Data:
    """A single batch of a rank, whose loss must fall."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        width = args.width
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
        target = torch.randn(width, width, generator=torch.Generator().manual_seed(7))
        self.x = x.to(device, torch.bfloat16)
        self.y = (x @ target / width**0.5).to(device, torch.bfloat16)

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return (model(self.x) - self.y).float().square().mean()


def losses_of_zero(
    args: argparse.Namespace, scheme: str, data: Data, device: torch.device
) -> list[float]:
    """Train under DeepSpeed. Return the loss of every micro-step."""
    os.environ["DS_ACCELERATOR"] = args.device
    import deepspeed

    import ds_quant  # noqa: F401  # activates it where the entry point is not installed

    leave_out_host_operator(args.device)
    torch.manual_seed(0)
    model = model_of(args)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(args, scheme)
    )
    losses = []
    for _ in range(args.steps * args.accumulation):
        loss = data.loss(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses_of_fsdp2(
    args: argparse.Namespace, scheme: str, data: Data, device: torch.device
) -> list[float]:
    """Train under FSDP2 with messages checked. Return the loss of every micro-step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from ds_quant import fsdp2

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(model_of(args) for _ in range(BLOCKS))).to(device)
    node_size = args.node_size or args.world
    block: dict[str, Any] = {"scheme": scheme, "checksum_steps": 2, "payload_checksum": True}
    if args.replicas:
        shape = (args.world // node_size, node_size)
        mesh = init_device_mesh(args.device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(args.device, (args.world,))
        block["node_size"] = node_size
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fsdp2.attach(model, block, optimizer=optimizer)
    losses = []
    for _ in range(args.steps):
        for micro_step in range(args.accumulation):
            is_last = micro_step == args.accumulation - 1
            model.set_is_last_backward(is_last)
            model.set_requires_all_reduce(is_last)
            loss = data.loss(model)
            (loss / args.accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def worker(rank: int, args: argparse.Namespace, scheme: str, folder: str) -> None:
    """Train as one rank. Rank 0 writes its losses to the folder."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.world), LOCAL_RANK="0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(0)
    store = torch.distributed.FileStore(f"{folder}/store", args.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=args.world)
    train_front = losses_of_fsdp2 if args.front == "fsdp2" else losses_of_zero
    losses = train_front(args, scheme, Data(args, rank, device), device)
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- all ranks ----


def train(args: argparse.Namespace, scheme: str) -> list[float]:
    """Train a scheme on all ranks. Return the losses of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            worker, (args, scheme, folder), nprocs=args.world, start_method="spawn"
        )
        return json.loads((Path(folder) / "losses.json").read_text())


def settings_of(args: argparse.Namespace) -> str:
    """Return the options on which losses depend, but for the device and the scheme."""
    names = ["front", "world", "node_size", "replicas", "accumulation", "steps", "width"]
    if args.front == "zero":
        names.insert(1, "stage")
    return " ".join(report.flags({name: getattr(args, name) for name in names}))


def compared(losses: dict[str, list[float]], recorded: dict[str, list[float]]) -> list[str]:
    """Return a line per scheme that is recorded, and print what differs too much.

    Raises:
        SystemExit: a loss differs by more than ALLOWED_DIFFERENCE of the first one.
    """
    lines = []
    failed = []
    for scheme, values in losses.items():
        others = recorded.get(scheme)
        if others is None:
            lines.append(f"{scheme}: not recorded")
            continue
        differences = [abs(a - b) for a, b in zip(values, others, strict=True)]
        largest = max(differences) / others[0]
        lines.append(
            f"{scheme}: last loss {values[-1]:.4f}, recorded {others[-1]:.4f}, "
            f"largest difference {100 * largest:.2f} % of the first loss"
        )
        if largest > ALLOWED_DIFFERENCE:
            failed.append(scheme)
    if failed:
        print("\n".join(lines))
        allowed = f"{100 * ALLOWED_DIFFERENCE:g} %"
        raise SystemExit(f"one_gpu.py: losses of {', '.join(failed)} differ by more than {allowed}")
    return lines


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--front", choices=("zero", "fsdp2"), default="zero")
    add("--world", type=int, default=2)
    add("--stage", type=int, choices=(2, 3), default=3, help="of ZeRO")
    add("--steps", type=int, default=30)
    add("--accumulation", type=int, default=1, help="micro-steps of a step")
    add("--node-size", type=int, help="ranks of a node; default: one node")
    add("--replicas", action="store_true", help="FSDP2: a replica in every node")
    add("--width", type=int, default=256)
    add("--schemes", nargs="+", default=list(SCHEMES))
    add("--at-once", type=int, default=1, help="schemes trained side by side")
    add("--record", type=Path, help="add the losses to this file")
    add("--beside", type=Path, help="compare with the losses of this file")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    if args.replicas and args.front == "zero":
        parser.error("--replicas: allowed with --front fsdp2")
    return args


def main() -> None:
    args = parse_args()
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    settings = settings_of(args)
    document = {"settings": settings, "losses": losses, "failed": failed}
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
        print(f"{settings} {scheme}: {values[0]:.4f} -> {values[-1]:.4f}")
        is_active = values is exact or values != exact
        if values[-1] >= values[0] or not is_active:
            passed = False
    if not passed:
        raise SystemExit("one_gpu.py: a scheme failed or was not active, or a loss did not fall")
    if args.record:
        known = json.loads(args.record.read_text("utf-8")) if args.record.exists() else {}
        known[settings] = known.get(settings, {}) | losses
        report.write(args.record, known)
    if args.beside:
        known = json.loads(args.beside.read_text("utf-8"))
        print("\n".join(compared(losses, known.get(settings, {}))))


if __name__ == "__main__":
    main()
