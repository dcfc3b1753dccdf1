"""Checksums are those of the wire page: messages come back as they were, and no accident passes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from ds_quant.comm.checksum import (
    MessageError,
    MessageErrors,
    describe_changed,
    seal,
    sealed_bytes,
    unseal,
)
from tests.unit import wire_oracle as oracle

SIZES = [0, 1, 16, 40, 40, 40, 0, 208]  # bytes that ranks 0 to 7 send


def message(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def received() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the messages of eight ranks, and those that one of them receives."""
    plain = [message(nbytes, rank) for rank, nbytes in enumerate(SIZES)]
    return plain, torch.cat([seal(m, [m.numel()], sender=r) for r, m in enumerate(plain)])


def test_checksum_is_that_of_the_page() -> None:
    sealed = seal(torch.cat([message(n) for n in SIZES]), SIZES, sender=3).numpy().tobytes()
    page = [oracle.sealed(message(n).numpy().tobytes(), 3) for n in SIZES]
    assert sealed == b"".join(page)


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


def words(sealed: torch.Tensor, *order: int) -> torch.Tensor:
    """Return a sealed message with its words in this order and the rest behind them."""
    found = sealed.view(torch.int64)
    return torch.cat([found[list(order)], found[len(order) :]]).view(torch.uint8)


ACCIDENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "a lost tail": lambda sealed: torch.cat([sealed[:64], torch.zeros_like(sealed[64:])]),
    "words exchanged": lambda sealed: words(sealed, 0, 1, 9, 3, 4, 5, 6, 7, 8, 2),
    "moved by a word": lambda sealed: words(sealed, 25, *range(25)),
    "of another rank": lambda sealed: seal(message(208), [208], sender=1),
}


@pytest.mark.parametrize("accident", ACCIDENTS.values(), ids=ACCIDENTS)
def test_other_accidents_are_found(accident: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sealed = seal(message(208), [208], sender=0)
    assert not unseal(sealed, [208])[1].item()
    assert unseal(accident(sealed), [208])[1].item()


CPU = torch.device("cpu")


def told(role: str, sender: int) -> MessageError:
    return MessageError(
        role, sender, "were changed on their way to rank {}: their checksum is wrong"
    )


def note(message_errors: MessageErrors, role: str, *changed: bool) -> None:
    """From ranks 4, 5, ..."""
    senders = [4 + place for place in range(len(changed))]
    message_errors.note(role, senders, torch.tensor(changed).view(-1, 1), describe_changed)


def test_findings_name_the_first_changed_message_once() -> None:
    message_errors = MessageErrors()
    assert message_errors.first() is None and not message_errors.any_error(CPU)
    note(message_errors, "weights", False, False)
    assert not message_errors.any_error(CPU)
    note(message_errors, "gradients", False, True)
    note(message_errors, "weights", True, True)
    assert message_errors.any_error(CPU)
    assert message_errors.first() == told("gradients", 5)
    assert message_errors.first() is None and not message_errors.any_error(CPU)


def test_findings_of_engines_without_steps_are_told_when_noted() -> None:
    message_errors, seen = MessageErrors(), []
    message_errors.at_once = seen.append
    note(message_errors, "weights", False, False)
    note(message_errors, "weights", False, True)
    assert seen == [told("weights", 5)]


def test_outcomes_are_read_behind_the_streams_that_write_them(monkeypatch) -> None:
    """On the stream of the optimizer, which runs beside that of the gathers."""
    waited: list[str] = []
    stream = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "gathers")
    message_errors = MessageErrors()
    message_errors.note("weights", [0], SimpleNamespace(is_cuda=True, device=CPU), describe_changed)
    message_errors._noted.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    message_errors.any_error(CPU)
    assert waited == ["gathers"]
