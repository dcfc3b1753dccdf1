"""Bytes that full precision would have received besides, for ``ds_quant.report``.

A quantized message is scaled by the formula's ratio of full precision to the scheme. The ratio
changes with the parameters that are trained and with the micro-steps of a step, so a front whose
steps differ settles each of them by its own ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ds_quant.comm.traffic import Traffic

Received = dict[str, dict[str, float]]  # bytes by role and link, as ``Traffic`` has them


class Savings:
    """The savings of a run. traffic: its counters."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._ratios: dict[Hashable, Received] = {}
        # Quantized bytes of settled steps, and their savings.
        self._settled: Received = traffic.quantized()
        self._saved: Received = traffic.quantized()

    def settle(self, key: Hashable, prices: Callable[[], tuple[Received, Received]]) -> None:
        """Settle the messages since the last call.

        Args:
            key: what the ratios depend on beside the trained parameters.
            prices: returns what a rank receives in such a step, by formula: of the scheme, and in
                full precision. Called once per key.
        """
        ratios = self._ratios.get(key)
        if ratios is None:
            ratios = self._ratios[key] = _ratios(*prices())
        self._saved = self._with_unsettled(ratios)
        self._settled = self._traffic.quantized()

    def forget_prices(self) -> None:
        """Let the next steps be priced anew: other parameters are trained."""
        self._ratios.clear()

    def total(self, own: Received, full_precision: Received) -> Received:
        """Return what was saved so far, less what full precision would not receive.

        own, full_precision: received in a step, by formula, for messages that are not settled.
        """
        total = self._with_unsettled(_ratios(own, full_precision))
        for role, links in self._traffic.added.items():
            for link, nbytes in links.items():
                total[role][link] -= nbytes
        return total

    def _with_unsettled(self, ratios: Received) -> Received:
        total: Received = {}
        for role, links in self._traffic.quantized().items():
            total[role] = {}
            for link, nbytes in links.items():
                unsettled = nbytes - self._settled[role][link]
                saved = unsettled * (ratios[role][link] - 1)
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
