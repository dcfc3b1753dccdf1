"""Settings every test shares: the CPU accelerator without CUDA, one thread, loud GPU skips."""

from __future__ import annotations

import os

# Two cores run many test processes; both variables are read when torch and deepspeed are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, not deselect: a missing GPU must be visible in the report."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs cuda"))
