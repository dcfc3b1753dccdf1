"""Bytes that full precision would have received besides, for ``ds_quant.report``.

A quantized message is scaled by the formula's ratio of full precision to the scheme. The formula
knows the length of every message but that of lossless weights, which depends on the values: those
are scaled from the length that the formula expects. The ratio changes with the parameters that are
trained and with the micro-steps of a step, so a front whose steps differ settles each of them by
its own ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ds_quant.comm.traffic import Traffic
from ds_quant.policy.cost import LOSSLESS_BITS

Received = dict[str, dict[str, float]]  # bytes by role and link, as ``Traffic`` has them


class Savings:
    """The savings of a run. traffic: its counters."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._ratios: dict[Hashable, Received] = {}
        # Of settled steps: quantized bytes, the bytes that the formula expects, and the savings.
        self._settled: Received = traffic.quantized()
        self._settled_by_formula: Received = traffic.quantized()
        self._saved: Received = traffic.quantized()

    def ratios(self, key: Hashable, prices: Callable[[], tuple[Received, Received]]) -> Received:
        """Return how many times as many bytes full precision receives in a step.

        Args:
            key: what the ratios depend on beside the trained parameters.
            prices: returns what a rank receives in such a step, by formula: of the scheme, and in
                full precision. Called once per key.
        """
        ratios = self._ratios.get(key)
        if ratios is None:
            ratios = self._ratios[key] = _ratios(*prices())
        return ratios

    def settle(self, ratios: Received) -> None:
        """Settle the messages since the last call."""
        received = self._traffic.quantized()
        by_formula = self._by_formula(received)
        self._saved = self._with_unsettled(ratios, received, by_formula)
        self._settled = received
        self._settled_by_formula = by_formula

    def forget_prices(self) -> None:
        """Let the next steps be priced anew: other parameters are trained."""
        self._ratios.clear()

    def total(self, own: Received, full_precision: Received) -> Received:
        """Return what was saved so far, less what full precision would not receive.

        own, full_precision: received in a step, by formula, for messages that are not settled.
        """
        received = self._traffic.quantized()
        ratios = _ratios(own, full_precision)
        total = self._with_unsettled(ratios, received, self._by_formula(received))
        for role, links in self._traffic.added.items():
            for link, nbytes in links.items():
                total[role][link] -= nbytes
        return total

    def _by_formula(self, received: Received) -> Received:
        """Return the received bytes, with the length of lossless messages that is expected."""
        lossless = self._traffic.lossless
        if not lossless.numel:
            return received
        weights = dict(received["weights"])
        for link, numel in lossless.received_numel.items():
            weights[link] += numel * LOSSLESS_BITS / 8 - lossless.received[link]
        return {**received, "weights": weights}

    def _with_unsettled(
        self, ratios: Received, received: Received, by_formula: Received
    ) -> Received:
        """Return the savings so far, those since the last settled step by ``ratios``."""
        total: Received = {}
        for role, links in received.items():
            total[role] = {}
            for link, nbytes in links.items():
                unsettled = by_formula[role][link] - self._settled_by_formula[role][link]
                full_precision = unsettled * ratios[role][link]
                saved = full_precision - (nbytes - self._settled[role][link])
                total[role][link] = self._saved[role][link] + saved
        return total


def _ratios(own: Received, full_precision: Received) -> Received:
    """Return how many times as many bytes full precision receives; 1 where nothing is sent."""
    ratios: Received = {}
    for role, links in own.items():
        ratios[role] = {}
        for link, nbytes in links.items():
            ratios[role][link] = full_precision[role][link] / nbytes if nbytes else 1.0
    return ratios
