"""Settings every test shares: the CPU accelerator without CUDA, one thread, loud GPU skips."""

from __future__ import annotations

import gc
import os

# Two cores run many test processes; both variables are read when torch and deepspeed are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


# "file.py::test_function" of every collected test -> True if `make test` runs one of its cases.
COLLECTED: dict[str, bool] = {}
NOT_IN_MAKE_TEST = ("gpu", "slow", "clients", "alone")


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, not deselect: a missing GPU must be visible in the report."""
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        is_quick = not any(item.get_closest_marker(marker) for marker in NOT_IN_MAKE_TEST)
        COLLECTED[name] = COLLECTED.get(name, False) or is_quick
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs cuda"))


def pytest_collection_finish() -> None:
    exclude_from_collection()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        exclude_from_collection()


def exclude_from_collection() -> None:
    """Exclude all present objects from garbage collection.

    Collected tests and cached results live until the end. The PTX machine alone caches a million
    objects.
    """
    gc.collect()
    gc.freeze()
