"""Which DeepSpeed runs, and which gradients it is known to lose by itself."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from packaging.version import Version

_parsed = cache(Version)  # asked for as often as in every exact gather


class Fault(NamedTuple):
    """An error of DeepSpeed, with and without this plugin, from one version until before another.

    offload: whether it needs an offloaded optimizer, or needs one that is not. accumulation: how
    many micro-steps it needs, 1 if it depends on the model.
    """

    since: str
    until: str
    offload: bool
    accumulation: int
    loses: str

    def is_in(self, version: str) -> bool:
        """Whether a version of DeepSpeed has it."""
        return _parsed(self.since) <= _parsed(version) < _parsed(self.until)


_FORGETS = "forgets the gradients of all micro-steps but"
_REUSED = "loses gradients of a module that a step uses more than once (DeepSpeed issue 8224)"
# Under ZeRO-2.
FAULTS = (
    Fault("0", "0.18.3", False, 2, f"{_FORGETS} the last one"),
    Fault("0", "0.19", True, 3, f"{_FORGETS} the first and the last one"),
    Fault("0.18.3", "0.19.4", False, 1, _REUSED),
)


def deepspeed_version() -> str:
    """Return the version for messages."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"


def is_older(than: str) -> bool:
    """Whether it is older than a version."""
    import deepspeed

    return _parsed(deepspeed.__version__) < _parsed(than)
