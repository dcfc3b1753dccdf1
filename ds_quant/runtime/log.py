"""Log lines of the plugin. Each begins with its subject, so that grep finds it.

DeepSpeed's logger would prefix time, level and file, and hides everything below a warning.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stdout(logging.StreamHandler):
    """Writes to the current ``sys.stdout``, as DeepSpeed's lines do."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def _logger() -> logging.Logger:
    logger = logging.getLogger("ds_quant.run")
    if not logger.handlers:  # a program may have added its own
        logger.addHandler(_Stdout())
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


def log_here(message: str) -> None:
    """Warn on this rank."""
    _logger().warning(message)


def log_rank0(message: str, *, first: int = 0) -> None:
    """Warn on rank 0, and on every rank before ``init_distributed``.

    first: the rank to take, of a model that only part of the ranks share.
    """
    if _is_rank(first):
        _logger().warning(message)


def info_rank0(message: str, *, first: int = 0) -> None:
    """Log at level INFO on the ranks of ``log_rank0``; shown by default."""
    if _is_rank(first):
        _logger().info(message)


def _is_rank(first: int) -> bool:
    from torch import distributed as dist

    return not dist.is_initialized() or dist.get_rank() == first
