"""``ds_quant doctor``: check versions, devices, kernels and a training step on two processes.

Checks of the environment only read. The self-test tries codecs, and a step under every front that
this machine has: ZeRO with DeepSpeed, FSDP2 with a torch that is new enough.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import torch

import ds_quant
from ds_quant import leftovers
from ds_quant._autoload import DISABLE_VARIABLE, is_disabled
from ds_quant.codec import bound
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels import cuda, dispatch, native
from ds_quant.zero.version import FAULTS

# ---- checks ----


OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
WIDTH = 100  # columns


class Check(NamedTuple):
    """Result of a check. It is OK without a fix, else of its severity.

    found: one sentence about the machine.
    details: facts as JSON types, for ``--json``.
    severity: PROBLEM, which makes the machine unhealthy, WARNING, which costs speed or features,
        or NOTE, which no run with the plugin meets.
    """

    name: str
    found: str
    details: dict[str, Any] | None = None
    fix: str = ""
    severity: str = PROBLEM

    @property
    def status(self) -> str:
        """One of OK, NOTE, WARNING and PROBLEM."""
        return self.severity if self.fix else OK


def healthy(checks: Sequence[Check]) -> bool:
    """Return True if no check found a problem."""
    return all(check.status != PROBLEM for check in checks)


def lines(checks: Sequence[Check]) -> list[str]:
    """Return a paragraph per check with its fix below it, and tracebacks at the end."""
    width = max((len(check.name) for check in checks), default=0)
    shown = []
    tracebacks = []
    for check in checks:
        start = f"{check.status:7}  {check.name:{width}}  "
        shown += _paragraph(check.found, start)
        if check.fix:
            shown += _paragraph(f"fix: {check.fix}", " " * len(start))
        if check.details and check.details.get("traceback"):
            tracebacks.append(f"\n{check.name}:\n{check.details['traceback']}\n")
    return shown + tracebacks


def _paragraph(text: str, start: str) -> list[str]:
    """Break a text into lines of ``WIDTH`` below each other. start: before the first one."""
    return wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,  # a path is copied whole
        break_on_hyphens=False,
    ) or [start]


# ---- the environment ----


# The requirements of setup.cfg, which a checkout on PYTHONPATH cannot read.
SUPPORTED = {"python": ">=3.10", "torch": ">=2.5", "deepspeed": ">=0.17.6,<0.20", "pydantic": ">=2"}
OPTIONAL = ("numpy", "transformers", "accelerate", "peft")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
NETWORK_VARIABLES = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_HCA",
)


def survey() -> list[Check]:
    """Run all checks that only read."""
    first_device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return [
        *versions(),
        device(),
        cupy(),
        cuda_kernels(first_device),
        cpu_kernels(),
        backend(),
        builds(),
        entry_point(),
    ]


def _installed(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> list[Check]:
    """Check required packages against the supported ranges, and list optional ones."""
    checks = []
    for name, supported in SUPPORTED.items():
        if name == "python":
            version: str | None = ".".join(map(str, sys.version_info[:3]))
        else:
            version = _installed(name)
        checks.append(version_check(name, version, supported))
    checks += known_faults(_installed("deepspeed"))
    optional = {}
    for name in OPTIONAL:
        version = _installed(name)
        if version is not None:
            optional[name] = version
    shown = ", ".join(f"{name} {version}" for name, version in optional.items()) or "none"
    return [*checks, Check("other packages", shown, optional)]


def version_check(name: str, version: str | None, supported: str) -> Check:
    """Check one version against a specifier such as ">=2.5"."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    details = {"version": version, "supported": supported}
    install = f"pip install '{name}{supported}'"
    if name == "python":
        install = f"use Python {supported}"
    if version is None and name == "deepspeed":
        return Check(name, "not installed: FSDP2 and DDP only", details, install, NOTE)
    if version is None:
        return Check(name, "not installed", details, install)
    if SpecifierSet(supported).contains(Version(version).base_version):
        return Check(name, f"{version} (supported: {supported})", details)
    return Check(name, f"{version} (not supported: {supported})", details, install)


def known_faults(deepspeed: str | None) -> list[Check]:
    """Warn of gradients that this version of DeepSpeed loses, with and without the plugin."""
    if deepspeed is None:
        return []
    checks = []
    for fault in FAULTS:
        if fault.is_in(deepspeed):
            setup = "with an offloaded optimizer" if fault.offload else "without offload"
            found = f"under ZeRO-2 {setup} it {fault.loses}"
            fix = f"pip install 'deepspeed>={fault.until}', or use zero_optimization.stage 1 or 3"
            checks.append(Check("deepspeed", found, fix=fix, severity=WARNING))
    return checks


def device() -> Check:
    """Name the device of tensors."""
    cuda_version = torch.version.cuda
    if not torch.cuda.is_available():
        build = f"for CUDA {cuda_version}" if cuda_version else "without CUDA"
        return Check("device", f"CPU (torch {torch.__version__} {build})", {"cuda": False})
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability()
    major, minor = capability
    found = f"{len(gpus)} x {gpus[0]}, sm_{major}{minor}, CUDA {cuda_version}"
    return Check("device", found, {"cuda": True, "gpus": gpus, "capability": capability})


def cupy() -> Check:
    """Check that one CuPy is installed; without it CUDA tensors take the slower torch path."""
    flavours = {}
    for name in CUPY:
        version = _installed(name)
        if version is not None:
            flavours[name] = version
    cuda_major = (torch.version.cuda or "12").split(".")[0]
    install = f"pip install 'ds_quant[cuda{cuda_major}]'"
    if not flavours and not torch.cuda.is_available():
        return Check("CuPy", "not installed: not needed without CUDA", {})
    if not flavours:
        found = "not installed: CUDA tensors take the torch path"
        return Check("CuPy", found, {}, install, WARNING)
    if len(flavours) > 1:
        fix = f"pip uninstall {' '.join(flavours)}, then {install}"
        return Check("CuPy", " and ".join(flavours), flavours, fix)
    found = " ".join(f"{name} {version}" for name, version in flavours.items())
    return Check("CuPy", found, flavours)


def cuda_kernels(device: torch.device) -> Check:
    """Check that tensors of a device get CuPy kernels: compiles one and runs it."""
    if device.type != "cuda":
        return Check("CUDA kernels", "not needed without CUDA", {})
    failure = cuda.failure_of(device)
    if failure is None:
        return Check("CUDA kernels", "CuPy kernels", {"works": True})
    details = {"works": False, "traceback": failure.traceback}
    found = f"CUDA tensors take the slower torch path: {failure.reason}"
    fix = failure.fix
    if failure.traceback:
        fix += ", or fix the cause in the traceback below"
    return Check("CUDA kernels", found, details, fix, WARNING)


def cpu_kernels() -> Check:
    """Check that CPU tensors get C++ kernels; without them they take the slower torch path."""
    problem = native.unavailable_reason()
    if problem is None:
        return Check("CPU kernels", "C++ kernels", {"built": True})
    found = f"plain torch, slower: C++ kernels {problem}"
    fix = "install a C++ compiler, then ds_quant again"
    if torch.cuda.is_available():
        fix = ""  # tensors are on GPUs, so nothing is to be mended
    return Check("CPU kernels", found, {"built": False}, fix, WARNING)


def backend() -> Check:
    """Name the communication backend, and the variables that choose its network."""
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    if has_nccl:
        name = "nccl"
        found = f"nccl ({'.'.join(map(str, torch.cuda.nccl.version()))})"
    else:
        name = "gloo"
        found = "gloo (part of torch)"
    variables = {key: os.environ[key] for key in NETWORK_VARIABLES if key in os.environ}
    details = {"backend": name, "variables": variables}
    if not has_nccl and not torch.distributed.is_gloo_available():
        fix = "install a torch with torch.distributed"
        return Check("backend", "neither NCCL nor gloo", details, fix)
    for key, value in variables.items():
        found += f", {key}={value}"
    return Check("backend", found, details)


def builds() -> Check:
    """Find locks of interrupted operator builds, for which DeepSpeed's next builds wait."""
    locks = leftovers.idle_locks()
    details = {"folder": str(leftovers.build_folder()), "locks": [str(lock) for lock in locks]}
    if not locks:
        return Check("operator builds", "none was interrupted", details)
    found = " ".join(map(leftovers.lock_sentence, locks))
    fix = f"rm {' '.join(map(str, locks))}"
    return Check("operator builds", found, details, fix, NOTE)


def entry_point() -> Check:
    """Check that ``import torch`` activates the plugin. The self-test tries it."""
    details: dict[str, Any] = {"version": ds_quant.__version__, "path": ds_quant.__file__}
    by_hand = "put 'import ds_quant' before deepspeed.initialize"
    if is_disabled():
        found = f"off: {DISABLE_VARIABLE}={os.environ[DISABLE_VARIABLE]}"
        return Check("activation", found, details, f"unset {DISABLE_VARIABLE} on all ranks")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        found = "by import only: TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return Check("activation", found, details, f"unset it, or {by_hand}", WARNING)
    entry_points = metadata.entry_points(group="torch.backends")
    if not any(entry.name == "ds_quant" for entry in entry_points):
        found = f"by import only: {Path(ds_quant.__file__).parent} is not installed"
        return Check("activation", found, details, f"pip install it, or {by_hand}", WARNING)
    found = f"on: import torch loads ds_quant {ds_quant.__version__}"
    return Check("activation", found, details)


# ---- self-test ----


RANKS = 2
ZERO, FSDP2 = "ZeRO-2", "FSDP2"  # fronts, of which selftest_worker.py trains a step
CODECS = (("minmax", 8), ("minmax", 4), ("absmax", 4))
_NUMEL = 1 << 20


def codecs() -> Check:
    """Encode and decode with the device's kernels, and compare every byte with plain torch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.randn(1, _NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    kernels = dispatch.describe(device)
    differing_bytes = {}
    for value_range, bits in CODECS:
        count = _differing_bytes(values, value_range, bits)
        differing_bytes[f"{bits}-bit {value_range}"] = count
    details = {"device": device.type, "path": kernels, "differing_bytes": differing_bytes}
    wrong = [f"{name} {count}" for name, count in differing_bytes.items() if count]
    if not wrong:
        found = f"{kernels} on {device.type}: the bytes of plain torch"
        return Check("encode, decode", found, details)
    found = f"{kernels} on {device.type}: bytes that differ from plain torch: {', '.join(wrong)}"
    fix = 'set "backend": "torch" in the block and report this with the output of doctor --json'
    return Check("encode, decode", found, details, fix)


def _differing_bytes(values: torch.Tensor, value_range: str, bits: int) -> int:
    """Count the bytes of messages and of decoded values that differ from plain torch."""
    codec = GroupCodec(bits=bits, group_size=1024, range=value_range)
    wire, decoded = _encoded_and_decoded(codec, values, backend="auto")
    plain_wire, plain_decoded = _encoded_and_decoded(codec, values, backend="torch")
    return int((wire != plain_wire).sum()) + int((decoded != plain_decoded).sum())


def _encoded_and_decoded(
    codec: GroupCodec, values: torch.Tensor, *, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the message and the decoded values, both as bytes."""
    wire = values.new_empty(1, codec.wire_bytes(_NUMEL), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    bound.encode(codec, values, wire, backend=backend)
    bound.decode(codec, wire, decoded, backend=backend)
    return wire, decoded.view(torch.uint8)


def patience(load: float) -> float:
    """Return the seconds to wait for the two processes, whole minutes.

    load: processes that want to run, per core of the host.
    """
    return 60.0 * math.ceil(2 * min(10.0, max(1.0, load)))


def fronts() -> list[str]:
    """Return the fronts that this machine has, of ZERO and FSDP2."""
    found = []
    if _installed("deepspeed") is not None:
        found.append(ZERO)
    if has_fsdp2():
        found.append(FSDP2)
    return found


def has_fsdp2() -> bool:
    """Return True if this torch has an FSDP2 that the plugin serves."""
    try:
        importlib.import_module("ds_quant.fsdp2")
    except ImportError:
        return False
    return True


def no_front() -> Check:
    """Report a machine on which nothing can train with the plugin."""
    found = f"not tried: no DeepSpeed, and torch {torch.__version__} has no FSDP2 for the plugin"
    fix = f"pip install 'deepspeed{SUPPORTED['deepspeed']}', or torch 2.10 or newer for FSDP2"
    return Check("two processes", found, fix=fix)


def exchange(front: str, timeout: float) -> Check:
    """Train one step on two processes under a front, with the block as their only setting."""
    name = f"{front}, two processes"
    with tempfile.TemporaryDirectory() as folder:
        failure = _run_ranks(front, folder, timeout)
        if failure:
            fix = "see the last line; doctor --timeout SECONDS waits longer"
            return Check(name, failure, fix=fix)
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return verdict(name, ranks)


def verdict(name: str, ranks: list[dict[str, Any]]) -> Check:
    """Return the verdict on the results of the two ranks (see selftest_worker.py)."""
    first = ranks[0]
    details = {"ranks": ranks}
    if not all(rank["active"] for rank in ranks):
        found = (
            "the block had no effect: the plugin is not active in a script without 'import "
            "ds_quant'"
        )
        fix = (
            "pip install ds_quant into this environment, unset DS_QUANT_DISABLE and "
            "TORCH_DEVICE_BACKEND_AUTOLOAD, or import ds_quant before deepspeed.initialize"
        )
        return Check(name, found, details, fix)
    if len({rank["digest"] for rank in ranks}) != 1 or not first["received"]:
        found = f"weights differ after a step, or nothing was sent ({first['received']} bytes)"
        fix = "set DS_QUANT_DISABLE=1 and report this with the output of doctor --json"
        return Check(name, found, details, fix)
    scheme = first["line"].partition(",")[0]  # all of it is in the details
    found = (
        f"{scheme}: equal weights after a step, {first['received']} bytes received over "
        f"{first['backend']}"
    )
    if any(rank["imported"] for rank in ranks):
        fix = "put 'import ds_quant' into your script, or install the package"
        return Check(name, f"{found}; needed import ds_quant", details, fix, WARNING)
    return Check(name, found, details)


def _run_ranks(front: str, folder: str, timeout: float) -> str:
    """Run the ranks; return the reason of a failure, "" for none."""
    port = free_port()
    processes = [_start_rank(front, rank, folder, port) for rank in range(RANKS)]
    is_late = False
    try:
        for process in processes:
            process.wait(timeout)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return ""
    log = Path(folder, f"log{failed[0]}").read_text("utf-8", "replace").strip().splitlines()
    reason = f"not done after {timeout:g} s" if is_late else "failed"
    return f"rank {failed[0]} {reason}: {' | '.join(log[-3:]) or 'no output'}"


def _start_rank(front: str, rank: int, folder: str, port: str) -> subprocess.Popen[bytes]:
    """Start selftest_worker.py in ``folder``, where it writes its result and its log."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("selftest_worker.py")
    with open(Path(folder, f"log{rank}"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(script), front, folder],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def free_port() -> str:
    """Return a TCP port of this machine that no process uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


# ---- the command ----


def main(arguments: argparse.Namespace) -> int:
    """Check and print; return 1 if there is a problem."""
    if not torch.cuda.is_available():
        # DeepSpeed would choose by installed packages.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    checks = [*survey(), codecs()]
    if not arguments.no_processes:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        timeout = arguments.timeout or patience(load)
        tried = fronts()
        for front in tried:
            print(
                f"{front}: training a step on two processes; gives up after {timeout:.0f} s, "
                "which --timeout sets",
                file=sys.stderr,
            )
            checks.append(exchange(front, timeout))
        if not tried:
            checks.append(no_front())
    is_healthy = healthy(checks)
    if arguments.json:
        print(json.dumps(_facts(checks), indent=2))
    else:
        print("\n".join(lines(checks)))
        print("healthy" if is_healthy else "not healthy: see the lines marked problem")
    return 0 if is_healthy else 1


def _facts(checks: Sequence[Check]) -> dict[str, Any]:
    """Return all facts as JSON types."""
    shown = [
        {
            "name": check.name,
            "status": check.status,
            "found": check.found,
            "fix": check.fix,
            "details": check.details,
        }
        for check in checks
    ]
    return {"healthy": healthy(checks), "host": platform.node(), "checks": shown}
