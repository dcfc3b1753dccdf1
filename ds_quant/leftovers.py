"""Find files that ended runs left behind and that harm later runs. Standard library only.

[Note: build locks] torch builds an operator under a lock file. Every other process waits for the
file silently and without a timeout. A build that was killed leaves it behind. The building process
keeps the file open, so a lock that no process of this host holds is either left over or held by
another host that shares the folder.

[Note: shared memory] DeepSpeed's shared-memory operator never removes its files: 69 MB per rank and
run that stay in memory until the machine restarts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer"


def build_folder() -> Path:
    """Return the folder of torch's builds: a folder per kind of torch, then one per operator."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) if given else Path(cache, "torch_extensions")


def idle_locks() -> list[Path]:
    """Return the build locks that no process of this host holds. See [Note: build locks]."""
    folder = build_folder()
    try:
        locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    except OSError:
        return []
    if not locks or not sys.platform.startswith("linux"):
        return []
    held = set(_open_files())
    return sorted(lock for lock in locks if lock.exists() and os.path.realpath(lock) not in held)


def lock_sentence(lock: Path) -> str:
    """Explain a lock and name the fix."""
    return (
        f"{lock} was left by a build of the operator {lock.parent.name} that did not end, and "
        "DeepSpeed waits for it without end where it needs the operator. Unless another host is "
        f"building it now, remove it: rm {lock}"
    )


def idle_buffers() -> list[Path]:
    """Return the files of this user's ended runs. See [Note: shared memory]."""
    try:
        buffers = list(SHARED_MEMORY.glob(f"{BUFFERS}_{os.getuid()}_*"))
    except OSError:
        return []
    if not buffers:
        return []
    used = set(_mapped_files())
    return sorted(path for path in buffers if str(path) not in used)


def _open_files() -> Iterable[str]:
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(entry)
        except OSError:  # the process ended, or is another user's
            continue


def _mapped_files() -> Iterable[str]:
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = entry.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if BUFFERS in line:
                yield line.split(maxsplit=5)[-1]
