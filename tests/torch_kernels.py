"""The torch reference in place of all kernels, for codecs that were made for whatever works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ds_quant.kernels import dispatch, reference


@contextmanager
def only_torch() -> Iterator[None]:
    """Inside, no tensor takes a kernel, as on a machine that has none."""
    with (
        patch.object(dispatch, "cuda_runner", lambda *_: None),
        patch.object(dispatch, "on_host", lambda *_: reference),
    ):
        yield
