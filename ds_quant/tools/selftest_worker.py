"""One rank of the self-test, run as a script: one step under ZeRO-2 with the block in the config.

Imports torch and DeepSpeed as a user's script does. Imports ds_quant only if ``import torch`` did
not, and reports that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(folder: str) -> None:
    """Train one step and write the result to ``folder``/rank<RANK>.json."""
    import torch

    needs_import = "ds_quant" not in sys.modules
    if needs_import:
        import ds_quant  # noqa: F401
    if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    backend = _init_distributed()
    engine = _engine()
    inputs = torch.ones(2, 128, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    result = {"imported": needs_import, "backend": backend, **_result(engine)}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


def _init_distributed() -> str:
    """Initialize communication: NCCL if every rank has a GPU, else gloo. Return the backend."""
    import deepspeed
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # The plugin defers this build of 30 s, but may be inactive here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "gloo"
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    deepspeed.init_distributed(backend, verbose=False)
    return backend


def _engine() -> Any:
    """Return the DeepSpeed engine of one linear layer, with a block in its config."""
    import deepspeed
    import torch

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


def _result(engine: Any) -> dict[str, Any]:
    """Return the start-up line, received bytes and a digest of the weights."""
    import ds_quant

    weights = engine.module.weight.detach().float().cpu().numpy().tobytes()
    digest = hashlib.sha256(weights).hexdigest()
    report = ds_quant.report(engine)
    if report is None:
        return {"active": False, "line": None, "received": 0, "digest": digest}
    received = sum(sum(links.values()) for links in report["received_bytes"].values())
    return {"active": True, "line": report["line"], "received": received, "digest": digest}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not hide others
    main(sys.argv[1])
