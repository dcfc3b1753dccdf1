"""One rank of a speed measurement: an engine per scheme in one process, timed in turns.

speed.py starts it on a host of the network lab, with RANK, WORLD_SIZE and so on in the environment
and the plan as JSON in a file. Rank 0 sets the link rates and writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import ddp_engine
import deepspeed
import fsdp2_engine
import lab
import text
import torch
from ddp_engine import DDPEngine
from deepspeed import comm as dist
from fsdp2_engine import FSDP2Engine
from gpt import GPT, Block, GPTConfig
from speed import WAITING

import ds_quant
from ds_quant.comm.transport import Communicator


def build(config: dict[str, Any], plan: dict[str, Any]) -> Any:
    """Return the engine of a scheme on the model of the plan. All engines have equal weights."""
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            layers=plan["layers"],
            width=plan["width"],
            heads=plan["heads"],
            seq_len=plan["seq_len"],
            compute_dtype=torch.float32,
        )
    )
    if "fsdp2" in config:
        return fsdp2_engine.build(model, config, nodes=plan["nodes"])
    if "ddp" in config:
        return ddp_engine.build(model, config)
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


@cache
def tokens() -> torch.Tensor:
    """Return the text that all engines train on, as bytes."""
    return text.load(Path(text.SOURCE))


def steps(engine: Any, count: int, plan: dict[str, Any]) -> tuple[float, float]:
    """Return seconds of `count` optimizer steps and the mean loss of the last micro-step.

    Steps are timed from barrier to barrier. One more step runs first, because a step waits for the
    messages of the one before. All engines train on the same text.
    """
    dist.barrier()
    for step in range(count + 1):
        if step == 1:
            dist.barrier()
            start = time.perf_counter()
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, targets = text.batch(
                tokens(),
                seed=micro,
                step=engine.global_steps,
                rank=dist.get_rank(),
                batch_size=plan["batch"],
                seq_len=plan["seq_len"],
            )
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    finish_messages(engine)  # they would slow down the next engine
    return seconds, total(loss.item()) / dist.get_world_size()


def await_messages(engine: Any) -> None:
    """Await every message of an engine where it is posted, so that nothing overlaps."""
    traffic = engine.ds_quant_attached.run.traffic
    posted = Communicator._posted

    def awaited(communicator: Communicator, *args: Any) -> Any:
        pending = posted(communicator, *args)
        if communicator._traffic is traffic:
            pending.wait()
        return pending

    setattr(Communicator, "_posted", awaited)  # noqa: B010  # of all engines: see ``traffic``


def finish_messages(engine: Any) -> None:
    """Wait for weights that are still being sent between nodes."""
    if isinstance(engine, FSDP2Engine):
        engine.finish_messages()
        return
    attached = getattr(engine, "ds_quant_attached", None)
    node_shard = getattr(attached, "node_shard", None)
    if node_shard is not None:
        node_shard.finish()


def busy_seconds() -> float:
    """Return the busy CPU seconds of this machine since it started, all cores together."""
    total_line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, *_ = map(int, total_line.split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def total(value: float) -> float:
    """Return the sum over the ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def measure_block(engine: Any, plan: dict[str, Any]) -> dict[str, float]:
    """Time some steps. Return seconds and bytes into a host per step, and foreign CPU cores.

    Bytes are counted at the interfaces of the lab and by the plugin. Foreign cores are those that
    other programs kept busy.
    """
    count = plan["steps_per_block"]
    reads_interface = plan["lab"] and os.environ["LOCAL_RANK"] == "0"
    received_before = lab.received_bytes() if reads_interface else 0
    counted_before = counted_bytes(engine)
    own_before = time.process_time()
    busy_before = busy_seconds()
    start = time.perf_counter()
    seconds, loss = steps(engine, count, plan)
    elapsed = time.perf_counter() - start
    own = total(time.process_time() - own_before)
    busy = busy_seconds() - busy_before
    received = total((lab.received_bytes() if reads_interface else 0) - received_before)
    counted = total(counted_bytes(engine) - counted_before)
    hosts_and_steps = (count + 1) * plan["nodes"]
    return {
        "seconds": seconds / count,
        "loss": loss,
        # A loopback has no counter of bytes between hosts.
        "interface_bytes": (received if plan["lab"] else counted) / hosts_and_steps,
        "counted_bytes": counted / hosts_and_steps,
        "foreign_cores": max(0.0, busy - own) / elapsed,
    }


def counted_bytes(engine: Any) -> int:
    """Return the bytes that this rank received from other hosts, as counted by the plugin."""
    report = report_of(engine)
    if report is None:
        return 0
    return sum(by_hop["inter"] for by_hop in report["received_bytes"].values())


def report_of(engine: Any) -> dict[str, Any] | None:
    """Return the plugin's report, None without a plugin."""
    is_module = isinstance(engine, (FSDP2Engine, DDPEngine))
    return ds_quant.report(engine.module if is_module else engine)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # bypasses the network
    deepspeed.init_distributed("gloo", verbose=False)
    first = dist.get_rank() == 0
    engines = {label: build(config, plan) for label, config in plan["schemes"].items()}
    for label, engine in engines.items():
        if label.endswith(WAITING):
            await_messages(engine)
    for engine in engines.values():
        steps(engine, plan["warmup"], plan)
    results = []
    labels = list(engines)
    for rate in plan["rates"]:
        if first and plan["lab"]:
            lab.set_rate(plan["nodes"], rate)
        for block in range(plan["blocks"]):
            rotation = block % len(labels)
            for label in labels[rotation:] + labels[:rotation]:
                row = measure_block(engines[label], plan)
                results.append({"rate": rate, "block": block, "scheme": label, **row})
            if first:
                print(f"rate {rate} block {block + 1}/{plan['blocks']} done", flush=True)
    if first:
        reports = {label: report_of(engine) for label, engine in engines.items()}
        lines = {}
        for label, report in reports.items():
            lines[label] = report["line"] if report else "not ours"
        parameters = engines[labels[-1]].module.parameters()
        outcome = {
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
            "lines": lines,
            "blocks": results,
        }
        Path(sys.argv[2]).write_text(json.dumps(outcome), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


if __name__ == "__main__":
    main()
