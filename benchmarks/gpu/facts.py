"""What a GPU machine is: driver, versions, NVRTC, speed of a copy and of a fill; whether the
CUDA kernels work: compiles one, runs it, shows the whole traceback if not.

    python benchmarks/gpu/facts.py --json facts.json

Everything but the kernels is optional: what is missing is null. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "deepspeed", "cupy-cuda12x", "cupy-cuda13x", "triton", "numpy", "pydantic", "pytest",
    "pytest-xdist", "hypothesis",
)  # fmt: skip
BYTES = 4 << 30  # of a copy, read and written together


def or_none(find: Callable[[], Any]) -> Any:
    """What `find` returns; None if it fails, for whatever reason."""
    try:
        return find()
    except Exception:
        return None


def driver() -> str:
    query = ["--query-gpu=name,driver_version,clocks.max.sm,clocks.sm,memory.total,power.limit"]
    command = ["nvidia-smi", *query, "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()


def nvrtc() -> str:
    """Version of the NVRTC that CuPy has loaded."""
    from cupy.cuda import nvrtc as library

    return ".".join(map(str, library.getVersion()))


def ceilings(device: str, nbytes: int) -> dict[str, float]:
    """Bytes per second of a copy (read and written) and of a fill, through torch."""
    import torch
    from kernels import seconds_of

    cuda = device == "cuda"
    pool = torch.empty(2, nbytes // 2, dtype=torch.uint8, device=device)
    copy = seconds_of(lambda _: pool[1].copy_(pool[0]), 1, 10, cuda)
    fill = seconds_of(lambda _: pool[0].fill_(1), 1, 10, cuda)
    return {"copy": nbytes / copy, "fill": nbytes // 2 / fill}


def gpu() -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(0)
    names = ("name", "major", "minor", "multi_processor_count", "total_memory", "L2_cache_size")
    return {name: getattr(found, name, None) for name in names}


def failure() -> dict[str, str] | None:
    """Why the CUDA kernels do not work; None if they do."""
    import torch

    from ds_quant.kernels import cuda

    found = cuda.failure_of(torch.device("cuda", 0))
    return None if found is None else found._asdict()


def version(package: str) -> str | None:
    return or_none(lambda: metadata.version(package))


def facts(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version()}
    found |= {name: version(name) for name in PACKAGES}
    found |= {"driver": or_none(driver), "nvrtc": or_none(nvrtc)}
    found["cuda"] = or_none(lambda: __import__("torch").version.cuda)
    found["gpu"] = or_none(gpu)
    found |= {name: shutil.which(name) for name in ("ncu", "compute-sanitizer", "nvcc", "g++")}
    size = BYTES if device == "cuda" else 1 << 24
    found["bytes_per_second"] = or_none(lambda: ceilings(device, size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = facts(args.device)
    speeds = found["bytes_per_second"] or {}
    found["shown"] = [f"{name} {speed / 1e9:.0f} GB/s" for name, speed in speeds.items()]
    start = time.monotonic()
    found["kernels"] = broken = failure()
    compiled = f"kernels work, {time.monotonic() - start:.1f} s"
    found["shown"].append(compiled if broken is None else broken["reason"])
    print(json.dumps(found, indent=1))
    print(broken["traceback"] if broken else compiled)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if args.device == "cuda" and found["gpu"] is None:
        sys.exit("facts.py: torch sees no GPU")
    if args.device == "cuda" and broken is not None:
        sys.exit("facts.py: CUDA tensors would take the torch path")


if __name__ == "__main__":
    main()
