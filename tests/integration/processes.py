"""Starts processes without access to the checkout, as on a user's machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

_HIDDEN = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "DS_QUANT_DISABLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE",
)  # fmt: skip

QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
LAUNCHERS = {
    "deepspeed": ("deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port"),
    "torchrun": ("torch.distributed.run", "--nproc_per_node", "2", "--master_port"),
    "accelerate": ("accelerate.commands.launch", "--main_process_port"),
}


def run(*command: str | Path, cwd: Path, timeout: float = 240, **environment: str) -> str:
    """Run a command. Return its standard output; fail with all of its output."""
    return run_both(*command, cwd=cwd, timeout=timeout, **environment)[0]


def run_both(
    *command: str | Path, cwd: Path, timeout: float = 240, **environment: str
) -> tuple[str, str]:
    """Run a command. Return its standard output and standard error."""
    inherited = {k: v for k, v in os.environ.items() if k not in _HIDDEN}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def free_port() -> str:
    """Return a free port for a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def losses(printed: str) -> list[float]:
    """Return the losses in the output of the examples' loops or of Trainer."""
    return [float(loss) for loss in re.findall(r"(?:\bloss |'loss': '?)(\d+\.\d+)", printed)]
