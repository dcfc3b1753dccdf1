"""One rank of a speed measurement: all schemes in one process, timed in interleaved blocks.

Started by speed.py on a host of the network lab, with RANK, WORLD_SIZE and so on in the
environment and the plan as JSON in a file. Rank 0 switches the link rates and writes the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import lab
import torch
from deepspeed import comm as dist
from gpt import GPT, VOCABULARY, Block, GPTConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ds_quant


class FSDP2:
    """torch's own hybrid sharding, with what a measurement asks of a DeepSpeed engine: weights
    gathered and gradients reduced in bf16, between nodes in the last micro-step only.
    """

    def __init__(self, model: GPT, config: dict[str, Any], nodes: int) -> None:
        mesh = init_device_mesh(
            "cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard")
        )
        precision = MixedPrecisionPolicy(  # computes in fp32 as the others: see gpt.py
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
        )
        for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
            fully_shard(module, mesh=mesh, mp_policy=precision)
        self.module, self.global_steps, self._micro_steps = model, 0, 0
        self._accumulation = config["gradient_accumulation_steps"]
        rate = config["optimizer"]["params"]["lr"]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.module.set_requires_all_reduce(self._micro_steps == self._accumulation - 1)
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()

    def step(self) -> None:
        self._micro_steps = (self._micro_steps + 1) % self._accumulation
        if self._micro_steps == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.global_steps += 1


def build(config: dict[str, Any], plan: dict[str, Any]) -> Any:
    """An engine of one scheme on the model of the plan; the same weights for all."""
    torch.manual_seed(0)
    sizes = {key: plan[key] for key in ("layers", "width", "heads", "seq_len")}
    model = GPT(GPTConfig(**sizes, compute_dtype=torch.float32))
    if "fsdp2" in config:
        return FSDP2(model, config, plan["nodes"])
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def steps(engine: Any, count: int, plan: dict[str, Any]) -> tuple[float, float]:
    """Seconds of `count` optimizer steps, from one barrier to the next, after one that is not
    timed: a step waits for what the one before left on its way. And the loss of the last
    micro-step; all engines train on the same tokens.
    """
    shape = (plan["batch"], plan["seq_len"])
    generator = torch.Generator().manual_seed(engine.global_steps * 1000 + dist.get_rank())
    dist.barrier()
    for step in range(count + 1):
        if step == 1:
            dist.barrier()
            start = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(
                *(torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
            )
            engine.backward(loss)
            engine.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    if (node := getattr(getattr(engine, "ds_quant_plugin", None), "node", None)) is not None:
        node.finish()  # else it would travel beside the next engine
    return seconds, total(loss.item()) / dist.get_world_size()


def busy_seconds() -> float:
    """CPU seconds that this machine has spent on anything, all cores."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def total(value: float) -> float:
    """Sum over the ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def measure_block(engine: Any, plan: dict[str, Any]) -> dict[str, float]:
    """Seconds per step, bytes into a host per step (interface and plugin), foreign CPU cores."""
    count, at_interface = plan["steps_per_block"], plan["lab"] and os.environ["LOCAL_RANK"] == "0"
    read = lab.received_bytes if at_interface else lambda: 0  # loopback has no such counter
    before, counted = read(), counted_bytes(engine)
    own, busy, start = time.process_time(), busy_seconds(), time.perf_counter()
    seconds, loss = steps(engine, count, plan)
    elapsed = time.perf_counter() - start
    used, busy = total(time.process_time() - own), busy_seconds() - busy
    per_host = (count + 1) * plan["nodes"]
    received, counted = total(read() - before), total(counted_bytes(engine) - counted)
    return {
        "seconds": seconds / count,
        "loss": loss,
        "interface_bytes": (received if plan["lab"] else counted) / per_host,
        "counted_bytes": counted / per_host,
        "foreign_cores": max(0.0, busy - used) / elapsed,
    }


def counted_bytes(engine: Any) -> int:
    """Bytes that this rank has received from other hosts, as the plugin counts."""
    report = report_of(engine) or {"received_bytes": {}}
    return sum(links["inter"] for links in report["received_bytes"].values())


def report_of(engine: Any) -> dict[str, Any] | None:
    """The plugin's report; None without it."""
    return None if isinstance(engine, FSDP2) else ds_quant.report(engine)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would bypass the network
    deepspeed.init_distributed("gloo", verbose=False)
    first = dist.get_rank() == 0
    engines = {label: build(config, plan) for label, config in plan["schemes"].items()}
    for engine in engines.values():
        steps(engine, plan["warmup"], plan)
    results, labels = [], list(engines)
    for rate in plan["rates"]:
        if first and plan["lab"]:
            lab.set_rate(plan["nodes"], rate)
        for block in range(plan["blocks"]):
            turn = block % len(labels)
            for label in labels[turn:] + labels[:turn]:
                row = measure_block(engines[label], plan)
                results.append({"rate": rate, "block": block, "scheme": label, **row})
            if first:
                print(f"rate {rate} block {block + 1}/{plan['blocks']} done", flush=True)
    if first:
        reports = {label: report_of(engine) for label, engine in engines.items()}
        outcome = {
            "parameters": sum(
                getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()
            ),
            "lines": {k: r["line"] if r else "not ours" for k, r in reports.items()},
            "blocks": results,
        }
        Path(sys.argv[2]).write_text(json.dumps(outcome), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


if __name__ == "__main__":
    main()
