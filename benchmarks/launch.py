"""One training run in its own processes: configuration, launcher, progress bar, log, result.

The training script is started the way a user starts it, by the `deepspeed` launcher (or torchrun),
so the comparison goes through activation, start-up checks and all. May import the standard library
and, for the progress bar, tqdm.
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
    """A run that ended with an error or did not end; the message holds the tail of its log."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: `config` is the whole DeepSpeed configuration, `arguments` go to train.py."""

    label: str
    config: dict[str, Any]
    arguments: list[str]
    folder: Path
    world: int
    steps: int
    device: str  # "cpu" or "cuda"
    launcher: str  # "deepspeed" or "torchrun"
    timeout: float  # seconds


def folder_name(label: str) -> str:
    """A scheme label as a folder name."""
    return re.sub(r"[^\w.=+-]+", "_", label)


def has_entry_point() -> bool:
    """Whether `import torch` loads ds_quant by itself: installed, and autoloading not disabled."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    found = metadata.entry_points(group="torch.backends")
    return any(entry.value.startswith("ds_quant.") for entry in found)


def environment(device: str, *, installed: bool) -> dict[str, str]:
    """Environment of the launcher; `installed` false puts this checkout on PYTHONPATH."""
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
    """Command line of the launcher with the training script and its arguments."""
    if job.launcher == "torchrun":
        start = ["torch.distributed.run", f"--nproc_per_node={job.world}"]
    else:  # no hostfile: this machine only, also on a cluster that has one
        start = ["deepspeed.launcher.runner", f"--hostfile={os.devnull}"]
        start += [f"--num_accelerators={job.world}"]
    files = {"deepspeed_config": "ds_config.json", "progress": PROGRESS, "result": RESULT}
    return [
        sys.executable, "-m", *start, f"--master_port={port}", str(HERE / "train.py"),
        *(f"--{flag}={job.folder / name}" for flag, name in files.items()), f"--steps={job.steps}",
        *([] if installed or job.label == PLAIN else ["--plugin-import"]), *job.arguments,
    ]  # fmt: skip


def progress_bar(total: int, unit: str = "step") -> tqdm:
    """A bar over all runs; where there is no terminal it is printed twice a minute."""
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(total=total, unit=unit, leave=False, mininterval=interval, maxinterval=interval)


@contextmanager
def started(
    commands: Iterable[tuple[Sequence[str], dict[str, str]]], log: Path, cwd: Path | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start command lines with their environments; leave no process of them behind."""
    processes = []
    try:
        with log.open("wb") as output:
            for argv, env in commands:
                processes.append(subprocess.Popen(
                    argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True))  # fmt: skip
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
    """Train, adding to `bar`; the content of train.py's result file.

    Raises:
        RunFailed: the run failed, hung beyond `job.timeout` or left no result.
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
    deadline, begun = time.monotonic() + job.timeout, bar.n
    bar.set_description(f"{job.label}, starting {job.world} ranks")
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"{job.label}: no end within {job.timeout:g} s\n{_tail(job)}")
        if steps := read_progress(job.folder / PROGRESS):
            bar.set_description(f"{job.label}, loss {steps[-1]['loss']:.3f}", refresh=False)
            bar.update(begun + len(steps) - bar.n)
        time.sleep(POLL_SECONDS)


def read_progress(path: Path) -> list[dict[str, float]]:
    """The complete lines of a progress file that is still being written."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _tail(job: Job) -> str:
    path = job.folder / "log.txt"
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return "\n".join([f"--- last lines of {path} ---", *lines[-LOG_TAIL:]])


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
