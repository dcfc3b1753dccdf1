"""Print errors of the user once and without a traceback, under every front.

[Note: short messages] Errors whose type is a message to the user are printed without a
traceback: a wrong setting, and ranks that cannot start together. All other errors go to the
previous hook, Python's or torch.distributed's. A program with its own hook keeps it. A rank other
than 0 prints one short line if rank 0 has printed the same message, else its own message. The exit
code is that of any error.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

import torch
from torch.distributed import PrefixStore

from ds_quant.config.errors import AttachError, ConfigError
from ds_quant.runtime.handshake import StartError, plugin_store

_SHORT = (ConfigError, StartError, AttachError)
_PATIENCE = 3.0  # seconds that ranks which fail together wait for each other
_PAUSE = 0.05  # seconds between two questions to the store


def shorten_messages() -> None:
    """Print errors of the user without a traceback: see [Note: short messages]. Idempotent."""
    previous = sys.excepthook
    module = getattr(previous, "__module__", None) or ""
    is_torchs = module.startswith("torch.distributed")
    if previous is sys.__excepthook__ or is_torchs:
        sys.excepthook = functools.partial(_print_short, previous)


def _print_short(
    previous: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Print an error of the user; call ``previous`` for any other error."""
    if kind not in _SHORT:
        previous(kind, error, traceback)
    elif not torch.distributed.is_initialized():
        _print_error(kind, error, rank=int(os.environ.get("RANK") or 0))  # the launcher's
    elif torch.distributed.get_rank() == 0:
        _print_error(kind, error, rank=0)
        store = _store_of_error(error)
        store.set("printed", "")
        # This process may hold the store: wait for its readers.
        readers = range(1, torch.distributed.get_world_size())
        _poll(store, [f"read/{rank}" for rank in readers])
    else:
        rank = torch.distributed.get_rank()
        store = _store_of_error(error)
        printed = _poll(store, ["printed"])
        with suppress(RuntimeError):  # the store is gone with rank 0
            store.set(f"read/{rank}", "")
        if printed:
            print(f"rank {rank} ends: see the message of rank 0", file=sys.stderr, flush=True)
        else:
            _print_error(kind, error, rank=rank)


def _poll(store: PrefixStore, keys: Sequence[str]) -> bool:
    """Return True if all keys are set within ``_PATIENCE``.

    ``store.wait`` would print warnings of torch between the messages.
    """
    end = time.monotonic() + _PATIENCE
    with suppress(RuntimeError):  # the store is gone with the rank that held it
        while not store.check(list(keys)):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE)
        return True
    return False


def _store_of_error(error: BaseException) -> PrefixStore:
    """Return a store that ranks with equal messages share."""
    digest = hashlib.sha256(str(error).encode()).hexdigest()[:16]
    return plugin_store(f"errors/{digest}")


def _print_error(kind: type[BaseException], error: BaseException, *, rank: int) -> None:
    subject = f"{kind.__name__} on rank {rank}" if rank else kind.__name__
    print(f"{subject}: {error}", file=sys.stderr, flush=True)
