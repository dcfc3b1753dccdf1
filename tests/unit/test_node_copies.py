"""The nodes' copies of weights under FSDP2: what is filled, sent, compared and said, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from ds_quant.fsdp2 import node_copies
from ds_quant.fsdp2.node_copies import NodeCopies

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


class Made:
    """Node copies of modules that note what they are asked to do.

    said: what the run has logged. asked: calls of the modules, in order.
    values: this rank's shards of every module, one per parameter.
    """

    def __init__(self, *modules: Any, device: torch.device = CPU) -> None:
        self.said: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self.is_adding = False
        self.votes: list[list[int]] = []
        self.run = SimpleNamespace(
            device=device,
            step=3,
            votes=SimpleNamespace(least=self._least),
            log=self.said.append,
            traffic=SimpleNamespace(adding=self._adding),
        )
        self.modules = modules
        for module in modules:
            module.asked = self.asked
            module.is_adding = lambda: self.is_adding
        self.copies = NodeCopies(Mock(run=self.run), modules)

    def _least(self, numbers: Tensor) -> Tensor:
        self.votes.append(numbers.tolist())
        return numbers

    @contextmanager
    def _adding(self) -> Iterator[None]:
        self.is_adding = True
        yield
        self.is_adding = False

    def taken(self) -> list[tuple[Any, ...]]:
        """Return what the modules were asked since the last call."""
        found = list(self.asked)
        self.asked.clear()
        return found


class Module:
    """A node shard of two parameters or of another number of them."""

    def __init__(
        self,
        name: str,
        trained: Sequence[bool] = (True, True),
        *,
        level: Any = None,
        dtype: torch.dtype = BF16,
        lossless: bool = False,
        is_filled: bool = True,
    ) -> None:
        self.name, self.sends_lossless, self.is_filled = name, lossless, is_filled
        self.nbytes = 1000 * len(name)
        self.values = [torch.full((5,), float(place)) for place in range(len(trained))]
        self.sharded = SimpleNamespace(
            level=level,
            dtype=dtype,
            shards=lambda: self.values,
            params=[
                SimpleNamespace(name=f"{name}.{i}", trained=one, shape=torch.Size((10**i, 617)))
                for i, one in enumerate(trained)
            ],
        )
        self.asked: list[tuple[Any, ...]] = []
        self.is_adding: Any = None

    def write(self, *places: int) -> None:
        for place in places:
            self.values[place].add_(1)

    def rows(self) -> str:
        return f"rows of {self.name}"

    def lossless_rows(self) -> str:
        return f"lossless rows of {self.name}"

    def fill(self, is_written: list[bool]) -> None:
        assert self.is_adding()
        self.is_filled = True
        self.asked.append(("fill", self.name, is_written))

    def finish_exchange(self) -> None:
        self.asked.append(("finish", self.name))

    def exchange(self) -> None:
        self.asked.append(("exchange", self.name))

    def exchange_lossless(self, post: object) -> None:
        self.asked.append(("exchange", self.name, post))


# ---- writes ----


def test_the_first_forward_fills_all_copies_and_says_nothing() -> None:
    made = Made(Module("a"), Module("b", (True,)), Module("c", (True, False)))
    made.copies.fill_written()
    assert made.taken() == [
        ("fill", "a", [True, True]), ("fill", "b", [True]), ("fill", "c", [True, True]),
    ]  # fmt: skip
    made.copies.fill_written()
    assert made.taken() == [] and made.said == []
    assert made.votes == [[0, 3, ~3], [0] * 5, [1, 3, ~3]]


def test_written_parameters_are_filled_and_reported_once() -> None:
    """Here 617 elements of bf16, and 6170 of fp32."""
    made = Made(Module("a"), Module("b", (True,)), Module("c", (True, True), dtype=FP32))
    a, _, c = made.modules
    made.copies.fill_written()
    made.taken()
    a.write(0)
    c.write(1)
    made.copies.fill_written()
    assert made.taken() == [("fill", "a", [True, False]), ("fill", "c", [False, True])]
    assert 617 * 2 + 6170 * 4 == 25_914
    assert made.said == [
        "quantized_comm: weights of 2 parameter(s), such as a.0, were written outside of an "
        "optimizer step: all nodes have received them exactly, 0.0259 MB between nodes. Each such "
        "write costs as much (logged once)"
    ]
    c.write(0, 1)
    made.copies.fill_written()
    assert made.taken() == [("fill", "c", [True, True])] and len(made.said) == 1


def test_a_fill_that_the_user_has_asked_for_is_not_reported() -> None:
    """Nor does it keep a later write from being reported."""
    made = Made(Module("a"), Module("b", (True,)))
    made.copies.fill_written()
    made.copies.resync()
    made.copies.fill_written()
    both = [("fill", "a", [True, True]), ("fill", "b", [True])]
    assert made.taken() == both * 2 and made.said == []
    made.modules[1].write(0)
    made.copies.fill_written()
    (said,) = made.said
    assert "weights of 1 parameter(s), such as b.0," in said and ", 0.00123 MB between" in said


def test_frozen_weights_are_filled_after_a_step_that_left_full_precision() -> None:
    made = Made(Module("a", (True, False)), Module("b", (True,)), Module("c", (False, False)))
    made.copies.fill_written()
    made.taken()
    made.copies.resync_frozen()
    made.copies.fill_written()
    assert made.taken() == [("fill", "a", [False, True]), ("fill", "c", [True, True])]
    assert made.said == []
    made.copies.fill_written()
    assert made.taken() == []


def test_a_write_before_an_optimizer_step_is_filled_after_it() -> None:
    made = Made(Module("a"), Module("b", (True,)))
    a, b = made.modules
    made.copies.fill_written()
    a.write(1)
    made.copies.note_writes()
    a.write(0, 1)
    b.write(0)
    made.copies.exchange()
    made.taken()
    made.copies.fill_written()
    assert made.taken() == [("fill", "a", [False, True])]


def test_what_an_exchange_does_not_send_stays_comparable() -> None:
    """Frozen weights, and modules that no forward has filled."""
    made = Made(Module("a", (True, False)), Module("b", (True,)), Module("c", (False, True)))
    a, b, c = made.modules
    made.copies.fill_written()
    a.write(0, 1)
    b.write(0)
    c.write(0, 1)
    b.is_filled = False
    made.copies.exchange()
    made.taken()
    made.copies.fill_written()
    assert made.taken() == [
        ("fill", "a", [False, True]), ("fill", "b", [True]), ("fill", "c", [True, False]),
    ]  # fmt: skip


# ---- exchanges ----


def test_modules_of_equal_ranks_and_dtype_agree_on_their_lossless_messages_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are sent by themselves, and those that no forward has filled not at all."""
    one, other = (Mock(between_nodes=f"ranks {place}") for place in (1, 2))
    made = Made(
        Module("a", level=one, lossless=True),
        Module("unfilled", level=one, lossless=True, is_filled=False),
        Module("quantized", level=one),
        Module("b", level=other, lossless=True),
        Module("c", level=one, lossless=True),
        Module("d", level=one, lossless=True, dtype=torch.float16),
    )
    agreed: list[tuple[Any, ...]] = []

    def posts(rows: list[str], *ranks: str, device: torch.device, traffic: Any) -> list[str]:
        assert device == CPU and traffic is made.run.traffic
        agreed.append((rows, *ranks))
        return [f"post of {each}" for each in rows]

    monkeypatch.setattr(node_copies, "posts", posts)
    made.copies.exchange()
    assert agreed == [
        (["lossless rows of a", "lossless rows of c"], "ranks 1", "ranks 1"),
        (["lossless rows of b"], "ranks 2", "ranks 2"),
        (["lossless rows of d"], "ranks 1", "ranks 1"),
    ]
    assert made.taken() == [
        ("finish", "a"),
        ("finish", "unfilled"),
        ("finish", "quantized"),
        ("exchange", "quantized"),
        ("finish", "b"),
        ("finish", "c"),
        ("finish", "d"),
        ("exchange", "a", "post of lossless rows of a"),
        ("exchange", "c", "post of lossless rows of c"),
        ("exchange", "b", "post of lossless rows of b"),
        ("exchange", "d", "post of lossless rows of d"),
    ]
    made.copies.finish()
    assert made.taken() == [("finish", module.name) for module in made.modules]


def test_a_module_without_a_lossless_message_ends_the_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(Module("a", level=Mock(), lossless=True))
    monkeypatch.setattr(node_copies, "posts", lambda *_, **__: [])
    with pytest.raises(ValueError, match="shorter"):
        made.copies.exchange()


def test_a_device_compares_weights_after_the_optimizer_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gathers need not wait for the stream of the optimizer. The CPU has no streams."""
    noted: list[Any] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def record(self) -> None:
            noted.append(("recorded", self.device.type))

        def wait(self) -> None:
            noted.append("waited")

    def written(*_: Any, **__: Any) -> list[int]:
        noted.append("compared")
        return []

    monkeypatch.setattr(node_copies, "Event", Event)
    for kind in ("meta", "cpu"):
        made = Made(Module("a"), device=torch.device(kind))
        made.copies._written = Mock(written=written)
        made.copies.fill_written()
        made.copies.note_writes()
        made.copies.fill_written()
        made.copies.exchange()
        made.copies.fill_written()
    recorded = ("recorded", "meta")
    on_device = ["compared", recorded, "waited", "compared", recorded, "waited", "compared"]
    assert noted == on_device + ["compared"] * 3


# ---- what is held ----


def test_ranks_of_equal_place_hold_equal_rows_of_the_modules_of_their_level() -> None:
    one, other = (Mock(between_nodes=SimpleNamespace(ranks=ranks)) for ranks in ([1, 3], [0, 1]))
    made = Made(
        Module("a", level=one),
        Module("bb", level=other),
        Module("unfilled", level=other, is_filled=False),
        Module("c", level=one),
    )
    assert list(made.copies.comparable_weights()) == [
        (1, ["rows of a", "rows of c"]), (0, ["rows of bb"])
    ]  # fmt: skip
    assert made.copies.rows() == ["rows of a", "rows of bb", "rows of c"]
    assert made.copies.nbytes == 1000 * (1 + 2 + 8 + 1)
