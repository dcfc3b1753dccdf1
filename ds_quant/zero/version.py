"""The running version of DeepSpeed, and known errors of DeepSpeed that lose gradients."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from packaging.version import Version

_parsed = cache(Version)  # parsed again in every exact gather otherwise


class Fault(NamedTuple):
    """An error of DeepSpeed, with and without this plugin.

    since, until: first version with the error, first version without it.
    offload: True if only offloaded optimizers have it, False if only others have it.
    accumulation: fewest micro-steps that show it, 1 if it depends on the model.
    loses: description of the lost gradients.
    """

    since: str
    until: str
    offload: bool
    accumulation: int
    loses: str

    def is_in(self, version: str) -> bool:
        """Return True if a version of DeepSpeed has the error."""
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
    """Return name and version for messages."""
    import deepspeed

    return f"DeepSpeed {deepspeed.__version__}"


def is_older(than: str) -> bool:
    """Return True if the running DeepSpeed is older than a version."""
    import deepspeed

    return _parsed(deepspeed.__version__) < _parsed(than)
