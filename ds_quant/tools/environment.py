"""What this machine has: versions, devices, CuPy, backends, network interfaces, activation.

Everything is read, nothing is changed; what works is for selftest.py. May import anything, inside
functions.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_quant import leftovers
from ds_quant._autoload import DISABLE_VARIABLE
from ds_quant.tools.checks import OK, PROBLEM, WARNING, Check

if TYPE_CHECKING:
    import torch

# As in setup.cfg, which a checkout on PYTHONPATH cannot read; a test compares the two.
SUPPORTED = {"python": ">=3.10", "torch": ">=2.5", "deepspeed": ">=0.17.6,<0.20", "pydantic": ">=2"}
OPTIONAL = ("numpy", "transformers", "accelerate", "peft")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NETWORK_VARIABLES = (*SOCKET_VARIABLES, "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_IB_HCA")


def survey() -> list[Check]:
    """All checks that only read."""
    import torch

    place = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kernels = [cupy(), cuda_kernels(place), cpu_kernels()]
    machine = [device(), *kernels, backend(), interfaces(), builds(), shared_memory()]
    return [*versions(), *machine, entry_point()]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> list[Check]:
    """Required packages against the supported ranges."""
    found = {name: _installed(name) for name in (*SUPPORTED, *OPTIONAL) if name != "python"}
    found["python"] = ".".join(map(str, sys.version_info[:3]))
    checks = [version_check(name, found[name], spec) for name, spec in SUPPORTED.items()]
    others = {name: found[name] for name in OPTIONAL if found[name]}
    shown = ", ".join(f"{name} {version}" for name, version in others.items()) or "none"
    return [*checks, Check(name="other packages", status=OK, found=shown, details=others)]


def version_check(name: str, version: str | None, supported: str) -> Check:
    """Verdict on one version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    details = {"version": version, "supported": supported}
    install = f"pip install '{name}{supported}'" if name != "python" else f"use Python {supported}"
    if version is None:
        return Check(name=name, status=PROBLEM, found="not installed", fix=install, details=details)
    fits = SpecifierSet(supported).contains(Version(version).base_version)
    return Check(
        name=name, status=OK if fits else PROBLEM, details=details,
        found=f"{version} ({'supported' if fits else 'not supported'}: {supported})",
        fix="" if fits else install,
    )  # fmt: skip


def device() -> Check:
    """What tensors will live on."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} " + (f"for CUDA {built}" if built else "without CUDA")
        return Check(name="device", status=OK, found=f"CPU ({why})", details={"cuda": False})
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability()
    return Check(
        name="device", status=OK, details={"cuda": True, "gpus": gpus, "capability": capability},
        found=f"{len(gpus)} x {gpus[0]}, sm_{capability[0]}{capability[1]}, "
        f"CUDA {torch.version.cuda}",
    )  # fmt: skip


def cupy() -> Check:
    """Whether CUDA tensors get kernels; without CuPy they take the slower torch path."""
    import torch

    needed = torch.cuda.is_available()
    flavours = {name: version for name in CUPY if (version := _installed(name))}
    extra = f"cuda{(torch.version.cuda or '12').split('.')[0]}"
    fix = f"pip install 'ds_quant[{extra}]'"
    if not flavours:
        return Check(
            name="CuPy", status=WARNING if needed else OK, details={}, fix=fix if needed else "",
            found="not installed: "
            + ("CUDA tensors take the torch path" if needed else "not needed without CUDA"),
        )  # fmt: skip
    if len(flavours) > 1:
        both = " and ".join(flavours)
        remove = f"pip uninstall {' '.join(flavours)}, then {fix}"
        return Check(name="CuPy", status=PROBLEM, found=both, fix=remove, details=flavours)
    shown = " ".join(*flavours.items())
    try:
        from cupy.cuda import nvrtc

        compiler = ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # a broken CUDA installation raises anything
        status = WARNING if needed else OK
        return Check(
            name="CuPy", status=status, found=f"{shown}, NVRTC does not load: {error}",
            fix=fix if needed else "", details=flavours,
        )  # fmt: skip
    return Check(
        name="CuPy", status=OK, found=f"{shown}, NVRTC {compiler}",
        details={**flavours, "nvrtc": compiler},
    )  # fmt: skip


def cuda_kernels(device: torch.device) -> Check:
    """Whether tensors of a device get CuPy kernels: compiles one and runs it."""
    import torch

    from ds_quant.kernels import cuda

    if device.type != "cuda":
        return Check(name="CUDA kernels", status=OK, found="not needed without CUDA", details={})
    failure = cuda.failure_of(device)
    if failure is None:
        return Check(name="CUDA kernels", status=OK, found="CuPy kernels", details={"works": True})
    extra = f"cuda{(torch.version.cuda or '12').split('.')[0]}"
    return Check(
        name="CUDA kernels", status=WARNING,
        details={"works": False, "traceback": failure.traceback},
        found=f"CUDA tensors take the slower torch path: {failure.reason}",
        fix=f"pip install 'ds_quant[{extra}]', or mend what the traceback below names",
    )  # fmt: skip


def cpu_kernels() -> Check:
    """Whether CPU tensors get compiled kernels; without them plain torch does the work."""
    import torch

    from ds_quant.kernels import native

    problem = native.problem()
    if problem is None:
        return Check(name="CPU kernels", status=OK, found="C++ kernels", details={"built": True})
    on_gpu = torch.cuda.is_available()
    return Check(
        name="CPU kernels", status=OK if on_gpu else WARNING, details={"built": False},
        found=f"plain torch, slower: C++ kernels {problem}",
        fix="" if on_gpu else "install a C++ compiler, then ds_quant again",
    )  # fmt: skip


def backend() -> Check:
    """The library that will carry the bytes."""
    import torch
    import torch.distributed as dist

    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    name = "nccl" if nccl else "gloo"
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "part of torch"
    there = nccl or dist.is_gloo_available()
    set_here = {name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ}
    variables = "".join(f", {key}={value}" for key, value in set_here.items())
    return Check(
        name="backend", status=OK if there else PROBLEM,
        found=f"{name} ({version}){variables}" if there else "neither NCCL nor gloo",
        fix="" if there else "install a torch with torch.distributed",
        details={"backend": name, "variables": set_here},
    )  # fmt: skip


def interfaces() -> Check:
    """Network interfaces that are up, with their rates in Mbit/s; 0 means not known."""
    import psutil

    found = {
        name: {"mbit_s": stats.speed, "mtu": stats.mtu, "up": stats.isup}
        for name, stats in sorted(psutil.net_if_stats().items())
    }
    ports = {str(path.parent.name): path.read_text().strip() for path in _infiniband()}
    shown = [
        f"{name} {facts['mbit_s'] or '?'} Mbit/s"
        for name, facts in found.items()
        if facts["up"] and not name.startswith("lo")
    ]
    shown += [f"InfiniBand port {port}: {rate}" for port, rate in ports.items()]
    missing = socket_problems(set(found))
    return Check(
        name="network", status=PROBLEM if missing else OK,
        found="; ".join(missing) or ", ".join(shown) or "loopback only",
        fix=f"name one of {', '.join(found)}, or unset it" if missing else "",
        details={"interfaces": found, "infiniband": ports},
    )  # fmt: skip


def socket_problems(present: set[str]) -> list[str]:
    """Interfaces that NCCL or gloo are told to use and that do not exist, one sentence each."""
    problems = []
    for variable in SOCKET_VARIABLES:
        value = os.environ.get(variable, "")
        if not value or value[0] == "^":  # NCCL: all but these
            continue
        exact = value.startswith("=") or variable.startswith("GLOO")
        for name in value.lstrip("=").split(","):
            if not any(i == name if exact else i.startswith(name) for i in present):
                problems.append(f"{variable}={value}: no interface {name}")
    return problems


def _infiniband() -> list[Path]:
    return sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))


def builds() -> Check:
    """Whether builds of DeepSpeed's operators were interrupted, which stops the next ones."""
    locks = leftovers.idle_locks()
    details = {"folder": str(leftovers.build_folder()), "locks": [str(lock) for lock in locks]}
    return Check(
        name="operator builds", status=PROBLEM if locks else OK, details=details,
        found=" ".join(map(leftovers.lock_sentence, locks)) or "none was interrupted",
        fix=f"rm {' '.join(details['locks'])}" if locks else "",
    )  # fmt: skip


def shared_memory() -> Check:
    """What DeepSpeed's shared-memory operator has left in memory."""
    files = leftovers.idle_buffers()
    gigabytes = sum(path.stat().st_size for path in files) / 1e9
    pattern = f"{leftovers.SHARED_MEMORY}/{leftovers.BUFFERS}_{os.getuid()}_*"
    return Check(
        name="shared memory", status=WARNING if files else OK, details={"files": len(files)},
        found=f"{len(files)} files of ended DeepSpeed runs hold {gigabytes:.2g} GB of memory"
        if files else "nothing left by ended DeepSpeed runs",
        fix=f"when no DeepSpeed run is going on: rm {pattern}" if files else "",
    )  # fmt: skip


def entry_point() -> Check:
    """Whether ``import torch`` will plant the hook. selftest.py tries it."""
    import ds_quant

    details: dict[str, Any] = {"version": ds_quant.__version__, "path": ds_quant.__file__}
    if os.environ.get(DISABLE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no"):
        return Check(
            name="activation", status=PROBLEM, details=details,
            found=f"off: {DISABLE_VARIABLE}={os.environ[DISABLE_VARIABLE]}",
            fix=f"unset {DISABLE_VARIABLE} on all ranks",
        )  # fmt: skip
    by_hand = "put 'import ds_quant' before deepspeed.initialize"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return Check(
            name="activation", status=WARNING, details=details,
            found="by import only: TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            fix=f"unset it, or {by_hand}",
        )  # fmt: skip
    if not any(e.name == "ds_quant" for e in metadata.entry_points(group="torch.backends")):
        return Check(
            name="activation", status=WARNING, details=details,
            found=f"by import only: {Path(ds_quant.__file__).parent} is not installed",
            fix=f"pip install it, or {by_hand}",
        )  # fmt: skip
    return Check(
        name="activation", status=OK, details=details,
        found=f"on: import torch loads ds_quant {ds_quant.__version__}",
    )  # fmt: skip
