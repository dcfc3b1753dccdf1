"""Warnings about names that a later release removes: see docs/stability.md."""

from __future__ import annotations

import os
import warnings


def warn_deprecated(old: str, new: str, *, removal: str, reason: str) -> None:
    """Warn that a name of the public interface has a successor, on the first rank of a job.

    A ``FutureWarning``, because Python hides a ``DeprecationWarning`` from most users.

    old, new: the two names as the user writes them, such as 'scheme "lossless_w_g3"'.
    removal: first release without the old name.
    reason: the difference between the names, in a sentence without a full stop.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    warnings.warn(
        f"quantized_comm: {old} is now called {new}: {reason}. ds_quant {removal} removes the "
        "earlier name",
        FutureWarning,
        stacklevel=2,
    )
