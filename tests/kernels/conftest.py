"""The shim, once per session: every variant of a kernel is compiled once."""

from __future__ import annotations

import pytest

from tests.kernels.shim import Shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """Runner of launches on the CPU."""
    return Shim(tmp_path_factory.mktemp("shim"))
