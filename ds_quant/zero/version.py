"""Which DeepSpeed runs."""

from __future__ import annotations

from functools import cache

from packaging.version import Version

_parsed = cache(Version)  # asked for as often as in every exact gather


def deepspeed_version() -> str:
    """Return the version for messages."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"


def is_older(than: str) -> bool:
    """Whether it is older than a version."""
    import deepspeed

    return _parsed(deepspeed.__version__) < _parsed(than)
