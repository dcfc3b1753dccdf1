"""``ds_quant doctor``: check versions, devices, kernels and two training processes.

Checks of the environment only read; the self-test tries codecs and a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ds_quant
from ds_quant import leftovers
from ds_quant._autoload import DISABLE_VARIABLE, is_disabled
from ds_quant.codec import bound
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import cuda, dispatch, native
from ds_quant.tools.probe import free_port
from ds_quant.zero.version import FAULTS

# ---- checks ----


OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Check(NamedTuple):
    """One finding. What needs a fix is a ``problem``, which makes the machine unhealthy, or a
    ``warning``. details: facts as JSON types, for ``--json``.
    """

    name: str
    found: str
    details: dict[str, Any] | None = None
    fix: str = ""
    severity: str = PROBLEM  # if there is a fix

    @property
    def status(self) -> str:
        """One of OK, WARNING and PROBLEM."""
        return self.severity if self.fix else OK


def healthy(checks: Sequence[Check]) -> bool:
    """Whether no check found a problem."""
    return all(check.status != PROBLEM for check in checks)


def lines(checks: Sequence[Check]) -> list[str]:
    """One line per check, its fix below it; tracebacks at the end."""
    width = max((len(check.name) for check in checks), default=0)
    shown = []
    for check in checks:
        shown.append(f"{check.status:7}  {check.name:{width}}  {check.found}")
        if check.fix:
            shown.append(f"{'':7}  {'':{width}}  fix: {check.fix}")
    for check in checks:
        if (check.details or {}).get("traceback"):
            shown.append(f"\n{check.name}:\n{check.details['traceback']}\n")
    return shown


# ---- the environment ----


# As in setup.cfg, which a checkout on PYTHONPATH cannot read; a test compares the two.
SUPPORTED = {"python": ">=3.10", "torch": ">=2.5", "deepspeed": ">=0.17.6,<0.20", "pydantic": ">=2"}
OPTIONAL = ("numpy", "transformers", "accelerate", "peft")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
_INFINIBAND = Path("/sys/class/infiniband")
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NETWORK_VARIABLES = (*SOCKET_VARIABLES, "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_IB_HCA")


def survey() -> list[Check]:
    """All checks that only read."""
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
    checks += known_faults(found["deepspeed"])
    return [*checks, Check("other packages", shown, others)]


def version_check(name: str, version: str | None, supported: str) -> Check:
    """Verdict on one version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    details = {"version": version, "supported": supported}
    install = f"pip install '{name}{supported}'" if name != "python" else f"use Python {supported}"
    if version is None:
        return Check(name, "not installed", details, install)
    fits = SpecifierSet(supported).contains(Version(version).base_version)
    found = f"{version} ({'supported' if fits else 'not supported'}: {supported})"
    return Check(name, found, details, "" if fits else install)


def known_faults(deepspeed: str | None) -> list[Check]:
    """Gradients that this version of DeepSpeed loses, with and without the plugin."""
    return [
        Check(
            "deepspeed", f"under ZeRO-2 {where} it {fault.loses}", severity=WARNING,
            fix=f"pip install 'deepspeed>={fault.until}', or use zero_optimization.stage 1 or 3",
        )
        for fault in FAULTS
        for where in ["with an offloaded optimizer" if fault.offload else "without offload"]
        if deepspeed is not None and fault.is_in(deepspeed)
    ]  # fmt: skip


def device() -> Check:
    """Check the device of tensors."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch {torch.__version__} " + (f"for CUDA {built}" if built else "without CUDA")
        return Check("device", f"CPU ({why})", {"cuda": False})
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability()
    found = f"{len(gpus)} x {gpus[0]}, sm_{capability[0]}{capability[1]}, CUDA {torch.version.cuda}"
    return Check("device", found, {"cuda": True, "gpus": gpus, "capability": capability})


def cupy() -> Check:
    """Whether CUDA tensors get kernels; without CuPy they take the slower torch path."""
    needed = torch.cuda.is_available()
    flavours = {name: version for name in CUPY if (version := _installed(name))}
    fix = f"pip install 'ds_quant[cuda{(torch.version.cuda or '12').split('.')[0]}]'"
    if not flavours:
        why = "CUDA tensors take the torch path" if needed else "not needed without CUDA"
        return Check("CuPy", f"not installed: {why}", {}, fix if needed else "", WARNING)
    if len(flavours) > 1:
        remove = f"pip uninstall {' '.join(flavours)}, then {fix}"
        return Check("CuPy", " and ".join(flavours), flavours, remove)
    return Check("CuPy", " ".join(*flavours.items()), flavours)


def cuda_kernels(device: torch.device) -> Check:
    """Whether tensors of a device get CuPy kernels: compiles one and runs it."""
    if device.type != "cuda":
        return Check("CUDA kernels", "not needed without CUDA", {})
    failure = cuda.failure_of(device)
    if failure is None:
        return Check("CUDA kernels", "CuPy kernels", {"works": True})
    details = {"works": False, "traceback": failure.traceback}
    found = f"CUDA tensors take the slower torch path: {failure.reason}"
    fix = failure.fix
    if failure.traceback:
        fix += ", or mend what the traceback below names"
    return Check("CUDA kernels", found, details, fix, WARNING)


def cpu_kernels() -> Check:
    """Whether CPU tensors get compiled kernels; without them plain torch does the work."""
    problem = native.unavailable_reason()
    if problem is None:
        return Check("CPU kernels", "C++ kernels", {"built": True})
    fix = "" if torch.cuda.is_available() else "install a C++ compiler, then ds_quant again"
    found = f"plain torch, slower: C++ kernels {problem}"
    return Check("CPU kernels", found, {"built": False}, fix, WARNING)


def backend() -> Check:
    """Check the communication backend."""
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    name = "nccl" if nccl else "gloo"
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "part of torch"
    there = nccl or torch.distributed.is_gloo_available()
    set_here = {name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ}
    variables = "".join(f", {key}={value}" for key, value in set_here.items())
    found = f"{name} ({version}){variables}" if there else "neither NCCL nor gloo"
    fix = "" if there else "install a torch with torch.distributed"
    return Check("backend", found, {"backend": name, "variables": set_here}, fix)


def interfaces() -> Check:
    """List network interfaces that are up, with their rates in Mbit/s; 0 means unknown."""
    import psutil

    found = {
        name: {"mbit_s": stats.speed, "mtu": stats.mtu, "up": stats.isup}
        for name, stats in sorted(psutil.net_if_stats().items())
    }
    rates = sorted(_INFINIBAND.glob("*/ports/*/rate"))
    ports = {path.parent.name: path.read_text().strip() for path in rates}
    shown = [
        f"{name} {facts['mbit_s'] or '?'} Mbit/s"
        for name, facts in found.items()
        if facts["up"] and not name.startswith("lo")
    ]
    shown += [f"InfiniBand port {port}: {rate}" for port, rate in ports.items()]
    missing = socket_problems(set(found))
    fix = f"name one of {', '.join(found)}, or unset it" if missing else ""
    seen = "; ".join(missing) or ", ".join(shown) or "loopback only"
    return Check("network", seen, {"interfaces": found, "infiniband": ports}, fix)


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


def builds() -> Check:
    """Whether builds of DeepSpeed's operators were interrupted, which stops the next ones."""
    locks = leftovers.idle_locks()
    details = {"folder": str(leftovers.build_folder()), "locks": [str(lock) for lock in locks]}
    found = " ".join(map(leftovers.lock_sentence, locks)) or "none was interrupted"
    fix = f"rm {' '.join(details['locks'])}" if locks else ""
    return Check("operator builds", found, details, fix)


def shared_memory() -> Check:
    """Check what DeepSpeed's shared-memory operator left in memory."""
    files = leftovers.idle_buffers()
    if not files:
        return Check("shared memory", "nothing left by ended DeepSpeed runs", {"files": 0})
    gigabytes = sum(path.stat().st_size for path in files) / 1e9
    pattern = f"{leftovers.SHARED_MEMORY}/{leftovers.BUFFERS}_{os.getuid()}_*"
    found = f"{len(files)} files of ended DeepSpeed runs hold {gigabytes:.2g} GB of memory"
    fix = f"when no DeepSpeed run is going on: rm {pattern}"
    return Check("shared memory", found, {"files": len(files)}, fix, WARNING)


def entry_point() -> Check:
    """Whether ``import torch`` will plant the hook. The self-test tries it."""
    details: dict[str, Any] = {"version": ds_quant.__version__, "path": ds_quant.__file__}
    by_hand = "put 'import ds_quant' before deepspeed.initialize"
    found, fix, severity = f"on: import torch loads ds_quant {ds_quant.__version__}", "", WARNING
    if is_disabled():
        found, severity = f"off: {DISABLE_VARIABLE}={os.environ[DISABLE_VARIABLE]}", PROBLEM
        fix = f"unset {DISABLE_VARIABLE} on all ranks"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        found = "by import only: TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        fix = f"unset it, or {by_hand}"
    elif not any(e.name == "ds_quant" for e in metadata.entry_points(group="torch.backends")):
        found = f"by import only: {Path(ds_quant.__file__).parent} is not installed"
        fix = f"pip install it, or {by_hand}"
    return Check("activation", found, details, fix, severity)


# ---- self-test ----


RANKS = 2
CODECS = (("minmax", 8), ("minmax", 4), ("absmax", 4))
_NUMEL = 1 << 20


def codecs() -> Check:
    """Encode and decode with the device's kernels; every byte must be that of plain torch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.randn(1, _NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    path = dispatch.describe(device)
    differ = {f"{bits}-bit {kind}": _bytes_that_differ(values, kind, bits) for kind, bits in CODECS}
    wrong = ", ".join(f"{name} {count}" for name, count in differ.items() if count)
    found = f"bytes that differ from plain torch: {wrong}" if wrong else "the bytes of plain torch"
    fix = 'set "backend": "torch" in the block and report this with the output of doctor --json'
    details = {"device": device.type, "path": path, "differing_bytes": differ}
    return Check("encode, decode", f"{path} on {device.type}: {found}", details, wrong and fix)


def _bytes_that_differ(values: torch.Tensor, value_range: str, bits: int) -> int:

    codec, found = GroupCodec(bits=bits, group_size=1024, range=value_range), []
    for backend in ("auto", "torch"):
        wire = values.new_empty(1, codec.wire_bytes(_NUMEL), dtype=torch.uint8)
        decoded = torch.empty_like(values)
        bound.encode(codec, values, wire, backend=backend)
        bound.decode(codec, wire, decoded, backend=backend)
        found.append((wire, decoded.view(torch.uint8)))
    return sum(int((ours != plain).sum()) for ours, plain in zip(*found, strict=True))


def patience(load: float) -> float:
    """Seconds to wait for the two processes on a host with this load per core."""
    return 120.0 * min(10.0, max(1.0, load))


def exchange(timeout: float) -> Check:
    """Train one step with two processes under ZeRO-2, with the block in the config and no other
    line.
    """
    with tempfile.TemporaryDirectory() as folder:
        failure = _run_ranks(folder, timeout)
        if failure:
            fix = "see the last line; doctor --timeout SECONDS waits longer"
            return Check("two processes", failure, fix=fix)
        ranks = [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(RANKS)]
    return verdict(ranks)


def verdict(ranks: list[dict]) -> Check:
    """Judge what the two ranks wrote (see selftest_worker.py)."""
    first, details = ranks[0], {"ranks": ranks}
    if not all(rank["active"] for rank in ranks):
        return Check(
            "two processes",
            "the block had no effect: the plugin is not active in a script without 'import "
            "ds_quant'", details,
            "pip install ds_quant into this environment, unset DS_QUANT_DISABLE and "
            "TORCH_DEVICE_BACKEND_AUTOLOAD, or import ds_quant before deepspeed.initialize",
        )  # fmt: skip
    if len({rank["digest"] for rank in ranks}) != 1 or not first["received"]:
        found = f"weights differ after a step, or nothing moved ({first['received']} bytes)"
        fix = "set DS_QUANT_DISABLE=1 and report this with the output of doctor --json"
        return Check("two processes", found, details, fix)
    found = f"{first['line']}; {first['received']} bytes over {first['backend']}"
    if not any(rank["imported"] for rank in ranks):
        return Check("two processes", found, details)
    fix = "put 'import ds_quant' into your script, or install the package"
    return Check("two processes", f"{found}; needed import ds_quant", details, fix, WARNING)


def _run_ranks(folder: str, timeout: float) -> str:
    """Start the ranks; returns what went wrong, or nothing."""
    port = free_port()
    script = Path(__file__).with_name("selftest_worker.py")
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
            "LOCAL_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with open(Path(folder, f"log{rank}"), "wb") as log:
            command = [sys.executable, str(script), folder]
            both = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, **both))
    late = False
    try:
        for process in processes:
            process.wait(timeout)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [r for r, process in enumerate(processes) if process.returncode]
    if not failed:
        return ""
    tail = Path(folder, f"log{failed[0]}").read_text("utf-8", "replace").strip().splitlines()
    why = f"not done after {timeout:g} s" if late else "failed"
    return f"rank {failed[0]} {why}: {' | '.join(tail[-3:]) or 'no output'}"


# ---- the command ----


def main(arguments: argparse.Namespace) -> int:
    """Check and print; 1 if there is a problem."""
    if not torch.cuda.is_available():
        # DeepSpeed guesses the accelerator from what is installed; the machine has none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = survey()
    found.append(codecs())
    if not arguments.no_processes:
        seconds = arguments.timeout or patience(os.getloadavg()[0] / (os.cpu_count() or 1))
        print(f"training a step on two processes, up to {seconds:.0f} s", file=sys.stderr)
        found.append(exchange(seconds))
    good = healthy(found)
    if arguments.json:
        keys = ("name", "status", "found", "fix", "details")
        shown = [{key: getattr(check, key) for key in keys} for check in found]
        facts = {"healthy": good, "host": platform.node(), "checks": shown}
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(lines(found)))
        print("healthy" if good else "not healthy: see the lines marked problem")
    return 0 if good else 1
