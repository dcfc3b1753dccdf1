"""Uncaught mistakes of the user, told once: a message from rank 0 instead of a traceback per rank.

[Note: what is shortened] Only errors that are messages to the user by their type: a wrong setting,
and ranks that do not fit together at start-up. Everything else goes to the hook that was there:
Python's or the one of torch.distributed. A program with another one of its own keeps that. Other
ranks stay short only if rank 0 has said the very same thing; with a mistake of their own, or
without an answer, they tell it themselves.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ds_quant.config import ConfigError
from ds_quant.zero.handshake import Board, StartError

_PATIENCE = 3.0  # seconds for ranks that fail together to hear of each other


def install_hook() -> None:
    """Shorten what Python or torch.distributed would print. Idempotent."""
    previous = sys.excepthook
    of_torch = getattr(previous, "__module__", "").startswith("torch.distributed")
    if previous is sys.__excepthook__ or of_torch:
        sys.excepthook = functools.partial(_hook, previous)


def _hook(
    previous: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    if kind not in (ConfigError, StartError):
        previous(kind, error, traceback)
        return
    rank, world = _place()
    if rank and _said_by_rank0(rank, str(error)):
        print(f"rank {rank} ends: see the message of rank 0", file=sys.stderr, flush=True)
        return
    who = f"{kind.__name__} on rank {rank}" if rank else kind.__name__
    print(f"{who}: {error}", file=sys.stderr, flush=True)
    if world > 1 and not rank:
        _tell(str(error), world)


def _place() -> tuple[int, int]:
    """Rank and world, by the launcher where processes have not met yet."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() else 0, int(world) if world.isdigit() else 1


def _board(message: str) -> Board | None:
    if not torch.distributed.is_initialized():
        return None
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return Board(store, "ds_quant/said/" + hashlib.sha256(message.encode()).hexdigest()[:16])


def _tell(message: str, world: int) -> None:
    """Rank 0, whose process may hold the store, waits for those who ask."""
    board = _board(message)
    if board is not None:
        board.put("said", "")
        board.arrive([f"heard/{rank}" for rank in range(1, world)], _PATIENCE)


def _said_by_rank0(rank: int, message: str) -> bool:
    board = _board(message)
    if board is None:
        return False
    try:
        said = board.arrive(["said"], _PATIENCE)
        board.put(f"heard/{rank}", "")
    except RuntimeError:  # the store is gone with rank 0, which has said something then
        return False
    return said
