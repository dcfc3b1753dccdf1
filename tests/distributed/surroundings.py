"""Accidents that a run may meet on a machine: memory full of garbage, messages that come late."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def full_of_nan() -> Iterator[None]:
    """Memory of torch.empty."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def late_messages() -> Iterator[None]:
    """Every message leaves up to 10 ms late, other ones on every rank."""
    send, draw = torch.distributed.isend, random.Random(torch.distributed.get_rank())

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.random() / 100)
        return send(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "isend", late)
        yield
