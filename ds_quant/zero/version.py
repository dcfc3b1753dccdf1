"""Which DeepSpeed runs."""

from __future__ import annotations

from packaging.version import Version


def deepspeed_version() -> str:
    """Return the version for messages."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"


def is_older(than: str) -> bool:
    """Whether it is older than a version."""
    import deepspeed

    return Version(deepspeed.__version__) < Version(than)
