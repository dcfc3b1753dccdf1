"""One rank of the self-test, run as a script: one step under ZeRO-2 or FSDP2 with a block.

Under ZeRO-2 it imports torch and DeepSpeed as a user's script does. It imports ds_quant only if
``import torch`` did not, and reports that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

_SCHEME = {"scheme": "qsdp"}
_WIDTH = 128


def main(front: str, folder: str) -> None:
    """Train one step and write the result to ``folder``/rank<RANK>.json.

    front: "ZeRO-2" or "FSDP2".
    """
    import torch

    if front == "FSDP2":
        result = _fsdp2_step()
    else:
        result = _zero_step()
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed on CPU may abort in a normal interpreter exit


def _zero_step() -> dict[str, Any]:
    """Train one step with DeepSpeed and return the result."""
    import torch

    needs_import = "ds_quant" not in sys.modules
    if needs_import:
        import ds_quant  # noqa: F401
    if not _has_gpus():
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    backend = _init_distributed()
    engine = _engine()
    inputs = torch.ones(2, _WIDTH, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    return {"imported": needs_import, "backend": backend, **_result(engine, engine.module.weight)}


def _fsdp2_step() -> dict[str, Any]:
    """Train one step with FSDP2 and return the result."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    from ds_quant import fsdp2

    device, backend = "cpu", "gloo"
    if _has_gpus():
        device, backend = "cuda", "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fsdp2.attach(model, _SCHEME, optimizer=optimizer)
    model(torch.ones(2, _WIDTH, device=device)).float().square().mean().backward()
    optimizer.step()
    weight = next(model.parameters())
    assert isinstance(weight, DTensor)  # fully_shard has sharded it
    return {"imported": False, "backend": backend, **_result(model, weight.full_tensor())}


def _has_gpus() -> bool:
    """Return True if every rank has a GPU of its own."""
    import torch

    return torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])


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
        "quantized_comm": _SCHEME,
    }
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _result(run: Any, weight: Any) -> dict[str, Any]:
    """Return the start-up line, received bytes and a digest of the weight.

    run: the engine, or the model of FSDP2.
    """
    import ds_quant

    values = weight.detach().float().cpu().numpy().tobytes()
    digest = hashlib.sha256(values).hexdigest()
    report = ds_quant.report(run)
    if report is None:
        return {"active": False, "line": None, "received": 0, "digest": digest}
    received = sum(sum(links.values()) for links in report["received_bytes"].values())
    return {"active": True, "line": report["line"], "received": received, "digest": digest}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not hide others
    main(sys.argv[1], sys.argv[2])
