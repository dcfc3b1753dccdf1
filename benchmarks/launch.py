"""One training run in its own processes: configuration, launcher, progress bar, log, result.

The training script is started as by a user, with the `deepspeed` launcher or torchrun, so a
comparison includes activation and start-up checks. May import the standard library and, for the
progress bar, tqdm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PLAIN = "deepspeed_plain"  # pseudo-scheme: DeepSpeed as shipped, no block at all
PROGRESS, RESULT = "progress.jsonl", "result.json"
POLL_SECONDS = 0.3
PATIENCE = 10  # seconds for a launcher to end its ranks
LOG_TAIL = 40  # lines shown when a run fails


class RunFailed(Exception):
    """A run ended with an error or did not end. The message has the end of its log."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    label: str
    config: dict[str, Any]  # content of ds_config.json
    arguments: list[str]  # of train.py
    folder: Path
    world: int  # ranks
    steps: int
    device: str  # "cpu" or "cuda"
    launcher: str  # "deepspeed" or "torchrun"
    timeout: float  # seconds


def folder_name(label: str) -> str:
    """Return the folder name of a scheme label."""
    return re.sub(r"[^\w.=+-]+", "_", label)


def has_entry_point() -> bool:
    """Return True if `import torch` loads ds_quant: it is installed and autoloading is enabled."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    entry_points = metadata.entry_points(group="torch.backends")
    return any(entry.value.startswith("ds_quant.") for entry in entry_points)


def environment(device: str, *, installed: bool) -> dict[str, str]:
    """Return the environment of the launcher.

    installed: False to put this checkout on PYTHONPATH.
    """
    env = dict(os.environ)
    env["DS_ACCELERATOR"] = device
    # DeepSpeed imports a torch.compile'd optimizer that is not used here: saves 2 s per process.
    env["TORCHDYNAMO_DISABLE"] = "1"
    if device == "cpu":
        env.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    if not installed:
        paths = (str(HERE.parent), env.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


def command(job: Job, *, port: int, installed: bool) -> list[str]:
    """Return the command line of the launcher with the training script and its arguments."""
    if job.launcher == "torchrun":
        launcher = ["torch.distributed.run", f"--nproc_per_node={job.world}"]
    else:
        # Without a hostfile: this machine only, also on a cluster that has one.
        launcher = ["deepspeed.launcher.runner", f"--hostfile={os.devnull}"]
        launcher.append(f"--num_accelerators={job.world}")
    script = [
        str(HERE / "train.py"),
        f"--deepspeed_config={job.folder / 'ds_config.json'}",
        f"--progress={job.folder / PROGRESS}",
        f"--result={job.folder / RESULT}",
        f"--steps={job.steps}",
    ]
    if not installed and job.label != PLAIN:
        script.append("--plugin-import")
    return [
        sys.executable,
        "-m",
        *launcher,
        f"--master_port={port}",
        *script,
        *job.arguments,
    ]


def progress_bar(total: int, unit: str = "step") -> tqdm:
    """Return a bar over all runs. Without a terminal it is printed twice a minute."""
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(total=total, unit=unit, leave=False, mininterval=interval, maxinterval=interval)


@contextmanager
def started(
    commands: Iterable[tuple[Sequence[str], dict[str, str]]], log: Path, cwd: Path | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start command lines with their environments. On exit end all of their processes."""
    processes = []
    try:
        with log.open("wb") as output:
            for argv, env in commands:
                process = subprocess.Popen(
                    argv,
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                processes.append(process)
        yield processes
    finally:
        for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, None)):
            for process in processes:
                with suppress(ProcessLookupError):  # all of it has ended
                    os.killpg(process.pid, number)
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience)


def run(job: Job, bar: tqdm) -> dict[str, Any]:
    """Train. Return the content of train.py's result file. bar: advances by the steps.

    Raises:
        RunFailed: the run failed, took longer than `job.timeout` or left no result.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    for stale in (PROGRESS, RESULT):
        (job.folder / stale).unlink(missing_ok=True)
    (job.folder / "ds_config.json").write_text(json.dumps(job.config, indent=2) + "\n", "utf-8")
    installed = has_entry_point()
    line = command(job, port=free_port(), installed=installed)
    env = environment(job.device, installed=installed)
    with started([(line, env)], job.folder / "log.txt") as (process,):
        _follow(job, process, bar)
    path = job.folder / RESULT
    if process.returncode != 0 or not path.exists():
        raise RunFailed(f"{job.label}: failed with exit code {process.returncode}\n{_tail(job)}")
    return json.loads(path.read_text("utf-8"))


def _follow(job: Job, process: subprocess.Popen[bytes], bar: tqdm) -> None:
    deadline = time.monotonic() + job.timeout
    steps_before = bar.n
    bar.set_description(f"{job.label}, starting {job.world} ranks")
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"{job.label}: no end within {job.timeout:g} s\n{_tail(job)}")
        if steps := read_progress(job.folder / PROGRESS):
            bar.set_description(f"{job.label}, loss {steps[-1]['loss']:.3f}", refresh=False)
            bar.update(steps_before + len(steps) - bar.n)
        time.sleep(POLL_SECONDS)


def read_progress(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of a progress file that may still be written."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _tail(job: Job) -> str:
    path = job.folder / "log.txt"
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return "\n".join([f"--- last lines of {path} ---", *lines[-LOG_TAIL:]])


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
