"""Compiles every kernel that the ZeRO sections of gpu_suite.sh launch into CuPy's cache, each once.

    python benchmarks/gpu/precompile.py --json precompile.json

Otherwise each of six ranks would compile all of them at the same time. The list of kernels comes
from engines in the worlds of fake_world.py, whose kernels are not launched.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import fake_world  # noqa: E402
import one_gpu  # noqa: E402
import report  # noqa: E402

WORLDS = (fake_world.World(1, 2), fake_world.World(2, 2))
STAGES = (3, 2)
WIDTH = 128  # of the model

Variant = tuple[str, tuple[tuple[str, int], ...]]  # a kernel and its macros


def variants(world: fake_world.World, schemes: list[str]) -> set[Variant]:
    """Return the kernels that warm-ups launch in one world. Call once per process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    import ds_quant  # noqa: F401  # activates it where the entry point is not installed
    from ds_quant.runtime.warmup import warm_up_kernels

    one_gpu.leave_out_host_operator("cpu")
    fake_world.join(world)
    node_size = world.ranks_per_node if world.nodes > 1 else None
    accumulation = 2 if world.nodes > 1 else 1
    with fake_world.without_handshake(), fake_world.faked_cuda() as runner:
        for stage, scheme in product(STAGES, schemes):
            args = argparse.Namespace(
                stage=stage, node_size=node_size, accumulation=accumulation, width=WIDTH
            )
            model = one_gpu.model_of(args)
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config=one_gpu.config_of(args, scheme),
            )
            attached = engine.ds_quant_attached
            warm_up_kernels(attached.run, attached.message_kinds(), torch.device("cpu"))
    return runner.variants


def _compile(variant: Variant) -> None:
    from ds_quant.kernels import cuda

    cuda.compiled(*variant)


def _processes(count: int) -> Executor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: list them, compile none")
    add("--schemes", nargs="+", default=["full_precision", "qsdp"])
    add("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    with _processes(len(WORLDS)) as pool:
        futures = [pool.submit(variants, world, args.schemes) for world in WORLDS]
        kernels = sorted(set[Variant]().union(*(future.result() for future in futures)))
    if args.device == "cuda":
        with _processes(min(12, os.cpu_count() or 1, len(kernels))) as pool:
            list(pool.map(_compile, kernels))
    seconds = time.perf_counter() - start
    shown = [f"{len(kernels)} kernels for {len(args.schemes)} schemes, {seconds:.0f} s"]
    print(shown[0])
    document = {"variants": kernels, "seconds": seconds, "shown": shown}
    report.write(args.json, document)


if __name__ == "__main__":
    main()
