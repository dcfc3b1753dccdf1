"""checksum.py: messages come back as they were, and no accident passes."""

from __future__ import annotations

import pytest
import torch

from ds_quant.comm.checksum import Findings, seal, sealed_bytes, unseal

SIZES = [0, 1, 16, 40, 40, 40, 0, 208]  # bytes that ranks 0 to 7 send


def message(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def received() -> tuple[list[torch.Tensor], torch.Tensor]:
    """What eight ranks have sent, and how it arrives at one of them."""
    plain = [message(nbytes, rank) for rank, nbytes in enumerate(SIZES)]
    return plain, torch.cat([seal(m, [m.numel()], sender=r) for r, m in enumerate(plain)])


def test_messages_come_back_whatever_their_sizes() -> None:
    plain, sealed = received()
    assert sealed.numel() == sum(map(sealed_bytes, SIZES)) == 32 + 32 + 3 * 64 + 224
    payload, changed = unseal(sealed, SIZES)
    assert torch.equal(payload, torch.cat(plain))
    assert changed.tolist() == [False] * 8


def test_one_call_seals_what_one_rank_sends_to_several() -> None:
    plain = [message(nbytes) for nbytes in SIZES]
    together = seal(torch.cat(plain), SIZES, sender=5)
    assert torch.equal(together, torch.cat([seal(m, [m.numel()], sender=5) for m in plain]))


def test_every_single_flipped_bit_is_found_and_ascribed_to_its_sender() -> None:
    _, sealed = received()
    owners = [rank for rank, nbytes in enumerate(SIZES) for _ in range(sealed_bytes(nbytes))]
    for byte, owner in enumerate(owners):
        for bit in range(8):
            sealed[byte] ^= 1 << bit
            changed = unseal(sealed, SIZES)[1]
            assert changed.nonzero().flatten().tolist() == [owner], (byte, bit)
            sealed[byte] ^= 1 << bit


def _zeros(sealed: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(sealed)


def _lost_tail(sealed: torch.Tensor) -> torch.Tensor:
    return torch.cat([sealed[:64], torch.zeros_like(sealed[64:])])


def _words_exchanged(sealed: torch.Tensor) -> torch.Tensor:
    words = sealed.view(torch.int64).clone()
    words[[2, 9]] = words[[9, 2]]
    return words.view(torch.uint8)


def _moved_by_a_word(sealed: torch.Tensor) -> torch.Tensor:
    return torch.cat([sealed.view(torch.int64)[:-2].roll(1), sealed.view(torch.int64)[-2:]]).view(
        torch.uint8
    )


def _of_another_rank(sealed: torch.Tensor) -> torch.Tensor:
    return seal(message(208), [208], sender=1)


@pytest.mark.parametrize(
    "accident", [_zeros, _lost_tail, _words_exchanged, _moved_by_a_word, _of_another_rank]
)
def test_other_accidents_are_found(accident: object) -> None:
    sealed = seal(message(208), [208], sender=0)
    assert not unseal(sealed, [208])[1].item()
    assert unseal(accident(sealed), [208])[1].item()


def test_findings_name_the_first_changed_message_once() -> None:
    findings = Findings()
    assert findings.first() is None
    findings.note("weights", [4, 6], torch.tensor([False, False]))
    findings.note("gradients", [4, 6], torch.tensor([False, True]))
    findings.note("weights", [4, 6], torch.tensor([True, True]))
    assert findings.first() == ("gradients", 6)
    assert findings.first() is None


def test_findings_of_engines_without_steps_are_told_when_noted() -> None:
    findings, told = Findings(), []
    findings.at_once = lambda role, sender: told.append((role, sender))
    findings.note("weights", [0, 1], torch.tensor([False, False]))
    findings.note("weights", [0, 1], torch.tensor([False, True]))
    assert told == [("weights", 1)]
