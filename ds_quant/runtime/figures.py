"""Figures of ``ds_quant.report`` that both fronts compute alike."""

from __future__ import annotations

from collections.abc import Mapping

from ds_quant.config.schema import parse_block
from ds_quant.policy.scheme import Scheme

Received = Mapping[str, Mapping[str, float]]  # bytes by role and link, as in ``Traffic``


def in_full_precision(scheme: Scheme) -> Scheme:
    """Return the scheme of the same collectives with nothing quantized."""
    cross = {"cross": scheme.block.gradients.cross}
    return parse_block({"scheme": "full_precision", "gradients": cross}).to_scheme()


def saved_bytes(
    received: Received, own: Received, full_precision: Received
) -> dict[str, dict[str, float]]:
    """Return the bytes that full precision would have received besides.

    received: so far, scaled by the formula's ratio of full precision to this scheme.
    own, full_precision: of a step, by formula.
    """
    saved: dict[str, dict[str, float]] = {}
    for role, links in received.items():
        saved[role] = {}
        for link, nbytes in links.items():
            saved[role][link] = 0.0
            if own[role][link]:
                ratio = full_precision[role][link] / own[role][link]
                saved[role][link] = nbytes * (ratio - 1)
    return saved
