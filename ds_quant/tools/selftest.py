"""Tries what a run needs: codecs on this machine's device, then a training step of two processes.

May import torch, codec, rng; the two processes import DeepSpeed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ds_quant.tools.checks import OK, PROBLEM, WARNING, Check

RANKS = 2
CODECS = (("minmax", 8), ("minmax", 4), ("absmax", 4))
_NUMEL = 1 << 20


def codecs() -> Check:
    """Encode and decode on the device; no element may be off by more than half a step."""
    import torch

    from ds_quant.kernels import dispatch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = torch.randn(1, _NUMEL, generator=torch.Generator().manual_seed(0)).to(device)
    worst = {}
    for value_range, bits in CODECS:
        worst[f"{bits}-bit {value_range}"] = _worst_error(values, value_range, bits)
    wrong = {name: steps for name, steps in worst.items() if not steps <= 0.51}
    path = dispatch.describe(device)
    shown = ", ".join(f"{name} {steps:.2f}" for name, steps in (wrong or worst).items())
    return Check(
        name="encode, decode", status=PROBLEM if wrong else OK,
        found=f"{path} on {device.type}; largest error in steps: {shown}",
        fix="set DS_QUANT_DISABLE=1 and report this with the output of doctor --json"
        if wrong else "",
        details={"device": device.type, "path": path, "worst_error_steps": worst},
    )  # fmt: skip


def _worst_error(values: object, value_range: str, bits: int) -> float:
    """Largest |decoded - value| in units of its group's step."""
    import torch

    from ds_quant.codec import GroupCodec

    codec = GroupCodec(bits=bits, group_size=1024, range=value_range)
    wire = torch.empty(1, codec.wire_bytes(_NUMEL), dtype=torch.uint8, device=values.device)
    decoded = torch.empty_like(values)
    codec.encode(values, wire)
    codec.decode(wire, decoded)
    groups = values.view(-1, codec.group_size)
    if value_range == "minmax":
        step = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
    else:
        step = groups.abs().amax(1) / (2 ** (bits - 1) - 1)
    errors = (decoded - values).view_as(groups).abs().amax(1)
    return float((errors / step).max())


def exchange(timeout: float) -> Check:
    """Two processes train one step under ZeRO-2 with the block in the config and no other line."""
    with tempfile.TemporaryDirectory() as folder:
        failure = _run_ranks(folder, timeout)
        if failure:
            return Check(
                name="two processes", status=PROBLEM, found=failure,
                fix="see the last line; doctor --timeout SECONDS waits longer",
            )  # fmt: skip
        ranks = [json.loads(Path(folder, f"rank{r}.json").read_text()) for r in range(RANKS)]
    return verdict(ranks)


def verdict(ranks: list[dict]) -> Check:
    """What the two ranks found, as they wrote it (see exchange.py)."""
    first, details = ranks[0], {"ranks": ranks}
    if not all(rank["active"] for rank in ranks):
        return Check(
            name="two processes", status=PROBLEM, details=details,
            found="the block had no effect: the plugin is not active in a script without "
            "'import ds_quant'",
            fix="pip install ds_quant into this environment, unset DS_QUANT_DISABLE and "
            "TORCH_DEVICE_BACKEND_AUTOLOAD, or import ds_quant before deepspeed.initialize",
        )  # fmt: skip
    if len({rank["digest"] for rank in ranks}) != 1 or not first["received"]:
        return Check(
            name="two processes", status=PROBLEM, details=details,
            found=f"weights differ after a step, or nothing moved ({first['received']} bytes)",
            fix="set DS_QUANT_DISABLE=1 and report this with the output of doctor --json",
        )  # fmt: skip
    by_import = any(rank["imported"] for rank in ranks)
    return Check(
        name="two processes", status=WARNING if by_import else OK, details=details,
        found=f"{first['line']}; {first['received']} bytes over {first['backend']}"
        + ("; needed import ds_quant" if by_import else ""),
        fix="put 'import ds_quant' into your script, or install the package" if by_import else "",
    )  # fmt: skip


def _run_ranks(folder: str, timeout: float) -> str:
    """Start the ranks; what went wrong, or nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("exchange.py")
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
            "LOCAL_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with open(Path(folder, f"log{rank}"), "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), folder],
                    env=environment,
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
            )
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
