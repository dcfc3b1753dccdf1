"""One rank of the self-test, run as a script: one step under ZeRO-2 with the block in the config.

Imports torch and DeepSpeed as a user's script does and looks whether the plugin is there; only if
it is not, imports it and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path


def main(folder: str) -> None:
    """Write the outcome to ``folder``/rank<RANK>.json."""
    import torch

    imported = "ds_quant" not in sys.modules
    if imported:
        import ds_quant  # noqa: F401
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    import deepspeed

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a 30 s build, not used
    backend = _prepare(torch, deepspeed)
    engine = _engine(torch, deepspeed)
    inputs = torch.ones(2, 128, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    report = sys.modules["ds_quant"].report(engine)
    weights = engine.module.weight.detach().float().cpu().numpy().tobytes()
    received = 0
    if report is not None:
        received = sum(sum(links.values()) for links in report["received_bytes"].values())
    found = {
        "active": report is not None, "imported": imported, "backend": backend,
        "line": report and report["line"], "received": received,
        "digest": hashlib.sha256(weights).hexdigest(),
    }  # fmt: skip
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


def _prepare(torch: object, deepspeed: object) -> str:
    """Initialise communication; NCCL where there is a GPU for every rank."""
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed("nccl", verbose=False)
        return "nccl"
    deepspeed.init_distributed("gloo", verbose=False)
    return "gloo"


def _engine(torch: object, deepspeed: object) -> object:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "quantized_comm": {"scheme": "qsdp"},
    }
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose module names are not meant to be found
    main(sys.argv[1])
