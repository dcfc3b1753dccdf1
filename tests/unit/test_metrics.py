"""Traffic: what is counted, and that every engine counts for itself."""

from __future__ import annotations

import pytest

from ds_quant.comm.traffic import Traffic

ROLES, LINKS = ("weights", "gradients"), ("intra", "inter")


def test_nothing_is_counted_at_first() -> None:
    traffic = Traffic()
    assert traffic.received == {role: dict.fromkeys(LINKS, 0) for role in ROLES}
    assert traffic.collectives == dict.fromkeys(ROLES, 0)
    assert traffic.total() == 0


def test_bytes_and_collectives_add_up_by_role_and_link() -> None:
    traffic = Traffic()
    traffic.count("weights", intra=100, inter=7)
    traffic.count("weights", intra=20, inter=0)
    traffic.count("gradients", intra=0, inter=3)
    assert traffic.received == {
        "weights": {"intra": 120, "inter": 7},
        "gradients": {"intra": 0, "inter": 3},
    }
    assert traffic.collectives == {"weights": 2, "gradients": 1}
    assert traffic.total() == 130


def test_counters_are_not_shared() -> None:
    first, second = Traffic(), Traffic()
    first.count("weights", intra=1, inter=1)
    assert second.total() == 0 and second.collectives["weights"] == 0


def test_an_unknown_role_is_an_error_and_not_a_new_counter() -> None:
    with pytest.raises(KeyError, match="activations"):
        Traffic().count("activations", intra=1, inter=1)
