"""Find build locks that ended runs left behind. Standard library only.

[Note: build locks] torch builds an operator under a lock file. Every other process waits until the
file is gone, silently and without a timeout. A build that was killed leaves it behind. The building
process keeps the file open, so a lock that no process of this host holds is either left over or
held by another host that shares the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path


def build_folder() -> Path:
    """Return the folder of torch's builds: a folder per build of torch, then one per operator."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder:
        return Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "torch_extensions")


def idle_locks() -> list[Path]:
    """Return the build locks that no process of this host holds. See [Note: build locks]."""
    folder = build_folder()
    try:
        locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    except OSError:
        return []
    if not locks or not sys.platform.startswith("linux"):
        return []
    open_files = set(_open_files())
    return sorted(
        lock for lock in locks if lock.exists() and os.path.realpath(lock) not in open_files
    )


def lock_sentence(lock: Path) -> str:
    """Explain a lock and name the fix."""
    return (
        f"{lock} was left by a build of the operator {lock.parent.name} that did not end, and "
        "DeepSpeed waits for it without end where it needs the operator. Unless another host is "
        f"building it now, remove it: rm {lock}"
    )


def _open_files() -> Iterable[str]:
    """Yield the paths of the files that processes of this user keep open."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(entry)
        except OSError:  # the process ended, or is another user's
            continue
