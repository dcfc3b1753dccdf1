"""Gathers of weights under FSDP2: which codecs, messages and ranges of a profiler they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_quant.codec.bound import full_precision
from ds_quant.comm.transport import Pending
from ds_quant.config.schema import parse_block
from ds_quant.fsdp2 import node_shard, weights
from ds_quant.fsdp2.node_shard import NodeShard
from ds_quant.fsdp2.weight_codecs import WeightCodecs
from ds_quant.fsdp2.weights import QuantizedAllGather
from ds_quant.policy.route import Routes
from ds_quant.runtime.param import Param

BF16 = torch.bfloat16
# Random bits between the nodes and inside them.
SHARD = {
    "scheme": "qsdp",
    "node_shard": True,
    "weights": {"rounding": "stochastic", "intra": {"bits": 8}},
}
GATHERED = {"scheme": "qsdp", "weights": {"rounding": "stochastic"}}


def params_of(block: dict[str, Any], *, nodes: int = 2) -> list[Param]:
    """Return a trained matrix and a frozen one, and a vector that is never quantized."""
    scheme = parse_block(block).to_scheme()
    routes = Routes(scheme=scheme, stage=3, nodes=nodes, node_size=2)
    shapes = (((64, 64), True), ((64, 64), False), ((9,), True))
    return [
        Param(
            index=index,
            name=str(index),
            shape=torch.Size(shape),
            trained=trained,
            tensor=None,
            routes=routes,
        )
        for index, (shape, trained) in enumerate(shapes)
    ]


class Codecs:
    """The codecs of a hop of rank 1, and the plans that they have asked for."""

    def __init__(self, block: dict[str, Any], hop: int) -> None:
        self.params = params_of(block)
        routes = self.params[0].routes
        level = SimpleNamespace(routes=routes, shards=SimpleNamespace(rank=1))
        self.run = SimpleNamespace(step=5, is_full_precision=lambda step: step == self.exact_step)
        self.exact_step = 99
        self.context = Mock(run=self.run, weights_version=(5, 0))
        self.planned: list[list[Any]] = []
        sharded: Any = SimpleNamespace(params=self.params, dtype=BF16, level=level)
        self.codecs = WeightCodecs(self.context, sharded, hop=hop)

    def of_step(self, step: int, exchanges: int = 0) -> tuple[list[Any], Any]:
        self.run.step, self.context.weights_version = step, (step, exchanges)
        return self.codecs.of_step(self._plan)

    def _plan(self, bound_codecs: Any) -> Any:
        self.planned.append(list(bound_codecs))
        return f"message {len(self.planned)}"

    def expected(self, step: int, *hops: int | None) -> list[Any]:
        """Return the codecs of parameters on a hop each; None for full precision."""
        found = []
        for param, hop in zip(self.params, hops, strict=True):
            codec = None if hop is None else param.weight_codecs(BF16, rank=1)[hop]
            found.append(param.bound_codec(codec, BF16, step))
        return found


@pytest.mark.parametrize(
    ("block", "hop", "hops"),
    [
        (SHARD, 0, (0, None, None)),  # between the nodes: frozen weights take no part
        (SHARD, -1, (-1, -1, None)),
        (GATHERED, 0, (0, 0, None)),
    ],
)
def test_codecs_of_a_hop_are_bound_once_per_step(
    block: dict[str, Any], hop: int, hops: tuple[int | None, ...]
) -> None:
    made = Codecs(block, hop)
    bound, message = made.of_step(5)
    assert bound == made.expected(5, *hops) and message == "message 1"
    assert bound[0].address.step == 5 and bound[2] == full_precision(BF16)
    assert made.of_step(5)[0] is bound
    again, _ = made.of_step(5, exchanges=1)
    assert again == bound and again is not bound
    assert made.of_step(6) == (made.expected(6, *hops), "message 1")
    assert made.planned == [made.expected(5, *hops)]


def test_a_message_is_planned_once_for_every_set_of_trained_weights() -> None:
    made = Codecs(SHARD, 0)
    made.of_step(5)
    made.params[1].set_trained(True)
    assert made.of_step(6) == (made.expected(6, 0, 0, None), "message 2")
    made.params[1].set_trained(False)
    assert made.of_step(7)[1] == "message 1" and made.of_step(7)[0] == made.expected(
        7, 0, None, None
    )


def test_remembered_codecs_do_not_change() -> None:
    made = Codecs(SHARD, 0)
    made.of_step(5)
    with pytest.raises(FrozenInstanceError):
        made.codecs._current.are_exact = True  # type: ignore


def test_a_step_in_full_precision_has_a_message_of_its_own() -> None:
    made = Codecs(SHARD, 0)
    assert not made.codecs.are_exact
    made.of_step(5)
    assert not made.codecs.are_exact
    made.exact_step = 6
    exact, message = made.of_step(6)
    assert exact == [full_precision(BF16)] * 3 and message == "message 2"
    assert made.codecs.are_exact
    assert made.of_step(7)[1] == "message 1" and not made.codecs.are_exact
    made.exact_step = 8
    assert made.of_step(8)[1] == "message 2" and made.codecs.are_exact
    assert len(made.planned) == 2


# ---- the all-gather of a module ----


class Gathers:
    """The all-gather of a module of 12 elements a row on 4 ranks, and what it asks of others.

    asked: in order. own: FSDP2's all-gather.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        shard: Any = None,
        fsdp_gathers: str = "",
        exact: bool = False,
        sealed: bool = False,
        intra: Any = None,
    ) -> None:
        self.asked: list[Any] = []
        self.own = Mock(side_effect=self._noting("own", "work of FSDP2"))
        self.group = SimpleNamespace(_all_gather_comm=self.own)
        self.flat = Mock(sealed=sealed, encoding=self._encoding)
        self.flat.count_ring = self._noting("counted", None)
        self.flat.all_gather = self._noting("gathered", self.pending("exact"))
        self.shards = Mock(flat=self.flat, intra=intra, rank=1, node_size=2)
        self.sharded: Any = SimpleNamespace(
            group=self.group, title="the root", row_numel=12, fsdp_gathers=fsdp_gathers,
            level=SimpleNamespace(shards=self.shards), layout="layout",
        )  # fmt: skip
        self.context = Mock()
        self.context.run.refuse_capture = self._noting("refuse", None)
        self.context.before_gather = self._noting("before", None)
        monkeypatch.setattr(weights, "WeightCodecs", self._codecs)
        monkeypatch.setattr(weights, "profiler_range", self._range)
        monkeypatch.setattr(weights, "plan_gather", self._noting("planned", None))
        ranks = {"group": [0, 1]}
        monkeypatch.setattr(weights.dist, "get_process_group_ranks", lambda group: ranks[group])
        self.message = Mock()
        self.message.gather = self._message
        self.bound = [Mock(codec=f"codec {place}") for place in range(2)]
        self.are_exact, self.note = exact, None
        self.front = object()
        self.gather = QuantizedAllGather(self.front, self.context, self.sharded, shard)
        self.input, self.output = torch.zeros(12, dtype=BF16), torch.zeros(48, dtype=BF16)

    def call(self, **how: Any) -> Any:
        group: Any = "group"
        return self.gather(self.output, self.input, group, **how)

    def pending(self, name: str) -> Pending[str]:
        def finish() -> str:
            self.asked.append(f"waited for {name}")
            return name

        return Pending(finish)

    def _noting(self, name: str, result: Any) -> Any:
        def noted(*args: Any, **how: Any) -> Any:
            self.asked.append((name, *args, *how.items()))
            return result

        return noted

    def _codecs(self, context: Any, sharded: Any, *, hop: int) -> Any:
        assert context is self.context and sharded is self.sharded and hop == 0
        return SimpleNamespace(of_step=self._of_step, are_exact=self.are_exact)

    def _of_step(self, plan: Any) -> Any:
        self.asked.append(("plan", plan(self.bound)))
        self.gather._weight_codecs.are_exact = self.are_exact
        return self.bound, self.message

    def _message(self, shards: Any, inputs: Any, bound: Any, outputs: Any) -> Pending[str]:
        assert shards is self.shards and bound is self.bound
        assert inputs[0] is self.input and outputs()[0] is self.output
        assert len(inputs) == len(outputs()) == 1
        self.asked.append("message")
        return self.pending("message")

    @contextmanager
    def _range(self, *names: str) -> Iterator[None]:
        self.asked.append(("begin", *names))
        yield
        self.asked.append("end")

    @contextmanager
    def _encoding(self, role: str) -> Iterator[Any]:
        self.asked.append(("encoding", role))
        yield self.note


BEGIN = ("begin", "gather", "the root")
PLAN = [("planned", "layout", ("codec 0", "codec 1"), 1, 2), ("plan", None)]


@pytest.mark.parametrize(
    "how", [{}, {"exact": True, "sealed": True}, {"exact": True, "intra": "two levels"}]
)
def test_a_gather_sends_a_message_inside_a_range_of_the_profiler(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an exact one that has a checksum, or crosses two levels."""
    made = Gathers(monkeypatch, **how)
    assert made.call() is None
    begun = [("refuse",), ("before", made.sharded), BEGIN, *PLAN, "message", "end"]
    assert made.asked == [*begun, "waited for message"]
    made.asked.clear()
    work = made.call(async_op=True)
    assert isinstance(work, torch.distributed.Work) and made.asked == begun
    assert work.wait() is True and made.asked[-1] == "waited for message"


@pytest.mark.parametrize("noted", [False, True])
def test_exact_weights_are_gathered_in_place(noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gathers(monkeypatch, exact=True)
    notes: list[Any] = []
    made.note = (lambda *args: notes.append(args)) if noted else None  # type: ignore[assignment]
    assert made.call() is None
    assert made.asked[2:6] == [BEGIN, *PLAN, ("encoding", "weights")]
    gathered, *rest = made.asked[6:]
    assert rest == ["end", "waited for exact"]
    name, payload, role, (into_name, into) = gathered
    assert (name, role, into_name) == ("gathered", ("role", "weights"), "into")
    for sent, whole, numel in ((payload, made.input, 24), (into, made.output, 96)):
        assert sent.dtype == torch.uint8 and sent.numel() == numel
        assert sent.data_ptr() == whole.data_ptr()
    if noted:
        ((error, values, wire),) = notes
        assert error is made.bound[0].error and values is made.input
        assert wire.data_ptr() == payload.data_ptr() and wire.dtype == torch.uint8
    else:
        assert notes == []


def test_a_module_with_rows_of_the_node_is_gathered_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Mock()
    made = Gathers(monkeypatch, shard=shard)
    shard.gather = lambda output: made.pending("node" if output is made.output else "other")
    assert made.call() is None
    assert made.asked == [("refuse",), ("before", made.sharded), BEGIN, "end", "waited for node"]


@pytest.mark.parametrize("async_op", [False, True])
def test_weights_that_the_codecs_do_not_serve_are_gathered_by_fsdp2(
    async_op: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of several dtypes by all ranks, and decoded ones again by some."""
    made = Gathers(monkeypatch, fsdp_gathers="several dtypes")
    assert made.call(async_op=async_op) == "work of FSDP2"
    before = [("refuse",), ("before", made.sharded)]
    counted = ("counted", 96, ("role", "weights"))
    assert made.asked[:3] == [*before, counted]
    own = made.asked[3]
    assert own[0] == "own" and own[1] is made.output and own[2] is made.input
    assert own[3:] == ("group", async_op) and len(made.asked) == 4
    made = Gathers(monkeypatch)
    made.input = torch.zeros(24, dtype=BF16)
    assert made.call(async_op=async_op) == "work of FSDP2"
    assert made.asked[2] == (*counted, ("among", [0, 1]))
    own = made.asked[3]
    assert own[0] == "own" and own[1] is made.output and own[2] is made.input
    assert own[3:] == ("group", async_op) and len(made.asked) == 4


def test_fsdp2_gets_its_all_gather_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gathers(monkeypatch)
    device = torch.device("cpu")
    made.own.allocate.return_value = "memory"
    assert made.gather.allocate([3], dtype=BF16, device=device) == "memory"
    made.own.allocate.assert_called_once_with([3], dtype=BF16, device=device)
    assert made.gather.front is made.front
    made.gather.connect()
    assert made.group._all_gather_comm is made.gather
    made.gather.disconnect()
    assert made.group._all_gather_comm is made.own


# ---- the rows of a node ----


class Rows:
    """A node shard of rank 2, the first of the second node, on three nodes of two ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sends_lossless: bool = True) -> None:
        self.codecs = Mock()
        monkeypatch.setattr(node_shard, "WeightCodecs", self.codecs)
        self.params = [SimpleNamespace(trained=one) for one in (True, False, True)]
        routes = SimpleNamespace(sends_lossless=lambda dtype: sends_lossless and dtype == BF16)
        topology = SimpleNamespace(nodes=3, node_size=2)
        self.level = SimpleNamespace(
            topology=topology, routes=routes, hierarchy=SimpleNamespace(rank=2, intra=None),
            between_nodes="ranks of equal place",
        )  # fmt: skip
        self.own = [torch.arange(3.0), torch.arange(3.0, 5), torch.arange(5.0, 9)]
        self.sharded: Any = SimpleNamespace(
            level=self.level, dtype=BF16, row_numel=9, params=self.params, title="layers.0",
            widths=(3, 2, 4), offsets=[0, 3, 5], layout="layout", shards=lambda: self.own,
        )  # fmt: skip
        self.run = SimpleNamespace(
            step=4, is_full_precision=lambda step: step < 4, device=torch.device("cpu"),
            buffers=SimpleNamespace(empty=torch.empty),
        )  # fmt: skip
        self.planned: list[Any] = []
        self.sent: list[Any] = []
        monkeypatch.setattr(node_shard, "plan_exchange", self._plan)
        self.context = Mock(run=self.run)
        self.shard = NodeShard(self.context, self.sharded)

    def _plan(self, *args: Any) -> Any:
        self.planned.append(args)
        return SimpleNamespace(gather=self._gather)

    def _gather(self, ranks: Any, buffers: Any, bound: Any, outputs: Any) -> Pending[None]:
        flat, own = buffers
        (target,) = outputs()
        assert ranks == "ranks of equal place" and target is flat and flat.shape == (27,)
        assert own.dtype == flat.dtype == BF16 and own.tolist() == list(range(9))
        return Pending(lambda: self.sent.append(list(bound)))


def test_the_rows_of_a_node_are_filled_exactly_and_can_be_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the first forward is an evaluation."""
    made = Rows(monkeypatch)
    assert not made.shard.is_filled and made.shard.nbytes == 3 * 9 * 2
    with torch.inference_mode(), torch.device("meta"):
        made.shard.fill([True, False, True])
    exact = full_precision(BF16)
    assert made.sent == [[exact] * 3] and made.shard.is_filled
    assert made.planned == [("layout", (exact.codec, None, exact.codec), (False,) * 3, 1, 0, 2)]
    rows = made.shard.rows()
    assert rows.shape == (3, 9) and rows.dtype == BF16 and not rows.is_inference()
    assert rows.device == made.run.device and not rows.any()
    rows.fill_(7)
    made.shard.fill([False, True, False])
    assert made.shard.rows() is rows and len(made.sent) == 2


def test_rows_have_codecs_of_the_first_hop_and_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen weights have one hop, which is inside the node."""
    made = Rows(monkeypatch)
    assert [call.args for call in made.codecs.call_args_list] == [(made.context, made.sharded)] * 2
    assert [call.kwargs for call in made.codecs.call_args_list] == [{"hop": 0}, {"hop": -1}]


def test_every_parameter_is_said_to_be_written_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="shorter"):
        Rows(monkeypatch).shard.fill([True])


def test_rows_that_no_forward_has_filled_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as error:
        Rows(monkeypatch).shard.rows()
    assert str(error.value) == (
        "quantized_comm: layers.0 is gathered for the backward of a forward before attach: call "
        "ds_quant.fsdp2.attach before the forward"
    )


def test_an_exchange_is_waited_for_once_and_before_the_rows_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Rows(monkeypatch)
    made.shard.fill([True] * 3)
    waited: list[str] = []
    made.shard.exchange_lossless(lambda: Pending(lambda: waited.append("rows")))
    assert waited == []
    made.shard.rows()
    made.shard.finish_exchange()
    assert waited == ["rows"] and made.shard._exchange is None  # which frees its message
    made.shard.exchange_lossless(lambda: Pending(lambda: waited.append("filled")))
    made.shard.fill([True] * 3)
    assert waited == ["rows", "filled"]


def test_an_exchange_after_a_step_leaves_out_frozen_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Rows(monkeypatch)
    made.shard.fill([True] * 3)
    bound = [SimpleNamespace(codec=f"codec {i}", difference=i == 0) for i in range(3)]
    made.shard._between = Mock(of_step=lambda plan: (bound, plan(bound)))
    made.shard.exchange()
    made.shard.finish_exchange()
    assert made.planned[-1] == (
        "layout", ("codec 0", None, "codec 2"), (True, False, False), 1, 0, 2
    )  # fmt: skip
    assert made.sent[-1] == bound


@pytest.mark.parametrize(
    ("lossless", "trained", "step", "sends"),
    [
        (True, True, 4, True),
        (False, True, 4, False),
        (True, False, 4, False),
        (True, True, 3, False),
    ],
)
def test_lossless_differences_are_those_of_trained_weights(
    lossless: bool, trained: bool, step: int, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in full precision sends none."""
    made = Rows(monkeypatch, sends_lossless=lossless)
    made.run.step = step
    made.params[0].trained = made.params[2].trained = trained
    assert made.shard.sends_lossless == sends


def test_a_lossless_message_has_the_columns_of_trained_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Rows(monkeypatch)
    made.shard.fill([True] * 3)
    made.shard.rows().copy_(torch.arange(27.0).view(3, 9))
    given: list[Any] = []
    monkeypatch.setattr(node_shard, "LosslessRows", lambda *args: given.append(args))
    made.shard.lossless_rows()
    ((old, node, new),) = given
    assert node == 1 and [each.tolist() for each in new()] == [[0, 1, 2], [5, 6, 7, 8]]
    first, second = (each.tolist() for each in old)
    assert first == [[0, 1, 2], [9, 10, 11], [18, 19, 20]]
    assert second == [[5, 6, 7, 8], [14, 15, 16, 17], [23, 24, 25, 26]]


def test_one_rank_per_node_holds_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rows(monkeypatch)
    made.shard.fill([True] * 3)
    made.shard.rows().copy_(torch.arange(27.0).view(3, 9))
    output = torch.zeros(27, dtype=BF16)
    assert made.shard.gather(output).wait() is output and output.tolist() == list(range(27))


def test_a_gather_stays_inside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rows(monkeypatch)
    made.shard.fill([True] * 3)
    made.level.hierarchy.intra = "ranks of the node"
    planned: list[Any] = []
    monkeypatch.setattr(node_shard, "plan_node_gather", lambda *args: planned.append(args))
    bound = [SimpleNamespace(codec=f"codec {i}") for i in range(3)]
    message = Mock()

    def of_step(plan: Any) -> Any:
        plan(bound)
        return bound, message

    made.shard._inside = Mock(of_step=of_step)
    output = torch.zeros(54, dtype=BF16)
    assert made.shard.gather(output) is message.gather.return_value
    ranks, (rows,), codecs, outputs = message.gather.call_args.args
    assert ranks == "ranks of the node" and codecs is bound and outputs() == [output]
    assert rows.shape == (27,) and rows.data_ptr() == made.shard.rows().data_ptr()
    assert planned == [("layout", ("codec 0", "codec 1", "codec 2"), 0, 2)]
