"""What a test needs that a machine may lack. A skip says what is missing."""

from __future__ import annotations

import pytest

from ds_quant.kernels import native

native_kernels = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"the C++ kernels {native.unavailable_reason()}"
)
