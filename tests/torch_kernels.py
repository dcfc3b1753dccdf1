"""Replaces all kernels by the torch reference, also for codecs with backend "auto"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ds_quant.kernels import dispatch, reference


@contextmanager
def only_torch() -> Iterator[None]:
    """Use no kernel, as on a machine that has none."""
    with (
        patch.object(dispatch, "cuda_runner", lambda *_: None),
        patch.object(dispatch, "on_host", lambda *_: reference),
    ):
        yield
