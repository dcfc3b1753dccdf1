"""The figures and lines of a run, word by word."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import LosslessDifferences, Traffic
from ds_quant.config.schema import parse_block
from ds_quant.kernels import native
from ds_quant.policy.cost import CommVolume, ParamSpec
from ds_quant.policy.model_volume import ModelVolume
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import Scheme
from ds_quant.runtime import log, start_line
from ds_quant.runtime.figures import figures
from ds_quant.runtime.front import SentParam, Workload, saved_step
from ds_quant.runtime.run import SchemeState, StockVolume
from ds_quant.runtime.savings import Received, Savings
from ds_quant.runtime.start_line import LineParts, announce, full_line, saving, summary


def test_a_step_is_priced_once_until_other_parameters_are_trained() -> None:
    traffic = Traffic()
    savings, priced_keys = Savings(traffic), list[int]()
    own = {role: {"intra": 10.0, "inter": 0.0} for role in traffic.received}

    def ratio(key: int) -> float:
        def prices() -> tuple[Received, Received]:
            priced_keys.append(key)
            stock = {role: {"intra": 10.0 * key, "inter": 5.0} for role in own}
            return own, stock

        return savings.ratios(key, prices)["gradients"]["intra"]

    assert [ratio(key) for key in (4, 2, 4, 2)] == [4, 2, 4, 2] and priced_keys == [4, 2]
    savings.forget_prices()
    assert ratio(4) == 4 and priced_keys == [4, 2, 4]


def test_messages_that_the_formula_does_not_know_save_nothing() -> None:
    """As many bytes count as full precision would have received."""
    traffic = Traffic()
    savings = Savings(traffic)
    traffic.count("weights", intra=0, inter=100)
    none = {role: {"intra": 0.0, "inter": 0.0} for role in traffic.received}
    stock = {role: {"intra": 0.0, "inter": 5.0} for role in traffic.received}
    assert savings.total(none, stock) == none


# ---- the figures of ds_quant.report ----


def test_every_figure_has_its_own_name() -> None:
    """A front of two levels, ranks 0 to 7 and 4 to 7, as rank 4 sees it.

    ZeRO-3: 2 x 2 gathers of 1 byte, of 3 bytes at most, and two reductions of 0.5 bytes, of 1000
    parameters: 5 or 13 bytes. Of the 3000 others inside a node 4 x 4 + 2 x 2 bytes. Means over all
    4000: 5 / 4 between nodes, 13 / 4 at most, and (2 x 0.25 + 3 x 20) / 4 inside.
    """
    dense = priced(
        stage=3,
        node_size=4,
        numel=1000,
        weights_most=3.0,
        gradients_intra=0.25,
        memory=8.0,
        partial_sums=4.0,
        block=EACH_BACKWARD,
    )
    experts = priced(
        stage=3, nodes=1, node_size=4, numel=3000, weights=4.0, gradients=2.0, weights_most=4.0
    )
    volume = ModelVolume((dense, experts))
    traffic, part = Traffic(), Traffic()
    traffic.count("weights", intra=1, inter=2)
    traffic.count("gradients", intra=3, inter=4)
    traffic.count("gradients", intra=5, inter=6)
    part.count("weights", intra=7, inter=0)
    traffic.lossless = LosslessDifferences(numel=100, used=40, moved=50)
    own, stock = ({"own": {"inter": factor}} for factor in (1.0, 2.0))
    totals = {(id(own), id(stock)): {"saved": {"inter": 3.0}}}
    topology = Topology(world=8, node_size=4)
    run: Any = SimpleNamespace(
        scheme=dense.routes.scheme,
        routes=dense.routes,
        topology=topology,
        traffic=traffic,
        counted_steps=11,
        comm_volume=lambda: volume,
        received_by_formula=lambda of: own if of is volume else None,
        received_in_full_precision=lambda: stock,
        savings=SimpleNamespace(total=lambda *both: totals[tuple(map(id, both))]),
        peak_bytes=lambda of: 12.5 if of is volume else None,
        buffers=SimpleNamespace(nbytes=13),
        state=SchemeState(resyncs=14, nonfinite_steps=15, exact_steps=16, killed=True),
        levels=[
            SimpleNamespace(topology=topology, replicas=1, traffic=traffic),
            SimpleNamespace(
                topology=Topology(world=4, node_size=4, ranks=(4, 5, 6, 7)),
                replicas=2,
                traffic=part,
            ),
        ],
    )
    received = {"weights": {"intra": 1, "inter": 2}, "gradients": {"intra": 8, "inter": 10}}
    expected = {
        "scheme": "qsdp",
        "world": 8,
        "node_size": 4,
        "params": 4000,
        "steps": 11,
        "received_bytes": received,
        "saved_bytes": {"saved": {"inter": 3.0}},
        "collectives": {"weights": 1, "gradients": 2},
        "full_precision_share": 0.0,
        "expected_bytes_per_param": 1.25,
        "expected_intra_bytes_per_param": 15.125,
        "expected_most_bytes_per_param": 3.25,
        "lossless_bits": 3.2,
        "lossless_padding": 0.25,
        "kept_bytes": 17,
        "expected_kept_bytes": 8000.0,
        "held_bytes": 18,
        "expected_held_bytes": 4000.0,
        "expected_peak_bytes": 12.5,
        "buffer_bytes": 13,
        "resyncs": 14,
        "nonfinite_steps": 15,
        "exact_steps": 16,
        "killed": True,
        "levels": [
            {
                "ranks": [0, 1, 2, 3, 4, 5, 6, 7],
                "nodes": 2,
                "node_size": 4,
                "replicas": 1,
                "params": 1000,
                "received_bytes": received,
            },
            {
                "ranks": [4, 5, 6, 7],
                "nodes": 1,
                "node_size": 4,
                "replicas": 2,
                "params": 3000,
                "received_bytes": {
                    "weights": {"intra": 7, "inter": 0},
                    "gradients": {"intra": 0, "inter": 0},
                },
            },
        ],
    }
    found = figures(run, micro_steps=2, kept_bytes=17, held_bytes=18, accumulates=True)
    assert found == expected
    # One micro-step, in which gradients do not wait, and nothing that is kept.
    assert figures(run) == expected | {
        "expected_bytes_per_param": 0.625,
        "expected_intra_bytes_per_param": 7.5625,
        "expected_most_bytes_per_param": 1.625,
        "kept_bytes": 0,
        "held_bytes": 0,
        "expected_held_bytes": 0,
    }
    traffic.count("weights", intra=100, inter=100)
    assert found == expected, "figures are those of the call"
    run.levels.pop()
    with pytest.raises(ValueError, match="zip"):
        figures(run)


# ---- the facts of a front ----


def sent(dtype: torch.dtype, gradient_dtype: torch.dtype, **facts: Any) -> SentParam:
    param: Any = SimpleNamespace(
        name="w", shape=torch.Size([2, 3]), packed=True, needs_full_gradient=True, boundary=0.5
    )
    return SentParam(param, dtype, gradient_dtype, **{"trained": True, **facts})


def test_formulas_see_every_fact_of_a_parameter() -> None:
    expected = ParamSpec(
        name="w",
        shape=(2, 3),
        dtype=torch.bfloat16,
        trainable=True,
        packed=True,
        needs_full_gradient=True,
        boundary=0.5,
    )
    spec = sent(torch.bfloat16, torch.float32).spec
    assert spec == expected and type(spec.shape) is tuple
    stock = sent(torch.bfloat16, torch.float64, trained=False, stock_weights=True).spec
    assert stock == expected._replace(trainable=False, stock_weights=True, stock_gradients=True)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([[torch.float64], [torch.float16, torch.bfloat16]], torch.float16),
        ([[torch.float64], []], torch.float32),
    ],
)
def test_gradients_have_the_dtype_of_the_first_one_that_a_codec_takes(
    dtypes: list[list[torch.dtype]], expected: torch.dtype
) -> None:
    params = [[sent(torch.bfloat16, dtype) for dtype in level] for level in dtypes]
    workload = Workload(params=params, gathers=[1.0, 1.0], gather_numel=6, micro_steps=1)
    assert workload.gradient_dtype == expected and workload.stock_gradients is False


@pytest.mark.parametrize("step", [0, 1, 2**39 - 1, torch.tensor(7)])
def test_a_saved_step_is_a_whole_number(step: Any) -> None:
    found = saved_step({"step": step})
    assert found == int(step) and type(found) is int


@pytest.mark.parametrize(
    ("state", "step"),
    [({"step": -1}, "-1"), ({"step": 2**39}, "549755813888"), ({"step": True}, "True"),
     ({"step": False}, "False"), ({"step": 1.0}, "1.0"), ({"step": "1"}, "'1'"), ({}, "None"),
     ([("step", 1)], "None"), (None, "None")],
)  # fmt: skip
def test_a_state_without_a_step_is_refused(state: Any, step: str) -> None:
    with pytest.raises(ValueError) as error:
        saved_step(state)
    assert str(error.value) == (
        f"quantized_comm: front.load_state_dict: step={step}: allowed: the state that "
        "front.state_dict() has returned, with a whole number of steps"
    )


# ---- the log ----


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of the lines, as a program finds it."""
    logger = logging.getLogger("ds_quant.run")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def test_lines_go_to_the_present_standard_output_and_nowhere_else(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for say in (log.log_here, log.log_rank0, log.info_rank0):
        say("a line")
        assert capsys.readouterr() == ("a line\n", "")
    assert not caplog.records and len(logger.handlers) == 1
    with capsys.disabled():
        shown: Any = logger.handlers[0]
        assert shown.stream is sys.stdout


def test_a_program_that_has_set_up_the_log_keeps_its_settings(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.WARNING)
    log.log_here("a warning")
    log.info_rank0("a line")
    log.log_rank0("another warning")
    said = [(record.levelname, record.message) for record in caplog.records]
    assert said == [("WARNING", "a warning"), ("WARNING", "another warning")]
    assert capsys.readouterr().out == "" and logger.level == logging.WARNING


@pytest.mark.parametrize(
    ("rank", "said"),
    [(None, "here all of two info all info of two "), (0, "here all info all "), (1, "here "),
     (2, "here of two info of two ")],
)  # fmt: skip
def test_the_first_rank_of_a_model_speaks_for_it(
    logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    said: str,
) -> None:
    """And every rank before there are process groups."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    log.log_here("here")
    log.log_rank0("all")
    log.log_rank0("of two", first=2)
    log.info_rank0("info all")
    log.info_rank0("info of two", first=2)
    assert capsys.readouterr().out.replace("\n", " ") == said


# ---- the start-up lines, word by word ----

BF16, FP32 = torch.bfloat16, torch.float32


def priced(
    scheme: str = "qsdp",
    *,
    nodes: int = 2,
    node_size: int = 8,
    stage: int = 3,
    replicas: bool = False,
    kernels: Mapping[str, Any] = MappingProxyType({"backend": "torch"}),
    block: Mapping[str, Any] = MappingProxyType({}),
    **figures: Any,
) -> CommVolume:
    """Return the volume of a scheme between some ranks. figures: others than the usual ones."""
    routes = Routes(
        scheme=parse_block({"scheme": scheme, **kernels, **block}).to_scheme(),
        stage=stage,
        nodes=nodes,
        node_size=node_size,
        replicas=replicas,
    )
    usual: dict[str, Any] = {"numel": 10**9, "weights": 1.0, "gradients": 0.5, "kept": {}}
    return CommVolume(routes=routes, **usual | {"full_precision_share": 0.0} | figures)


def run_of(
    *parts: CommVolume,
    device: str = "cuda",
    dtypes: Sequence[tuple[torch.dtype, int]] = ((BF16, 10**9),),
    micro_steps: int = 1,
    world: int = 0,
    others: Mapping[str, CommVolume] = MappingProxyType({}),
    peak_bytes: float = 3.5e9,
    names: Sequence[str] = (),
    notices: Sequence[str] = (),
) -> Any:
    """Return the part of a run that its lines read.

    parts: volumes of its levels. dtypes: of its weights, with their elements.
    world: its ranks, if they are more than those of the first level.
    others: volumes of other schemes by name. The rest cost as much as the first part.

    asked: blocks of the schemes that were priced. said, warned: its lines.
    """
    levels = []
    for part in parts:
        topology = Topology(world=part.routes.ranks, node_size=part.routes.node_size)
        levels.append(SimpleNamespace(topology=topology, routes=part.routes))
    first = parts[0].routes
    run = SimpleNamespace(
        device=torch.device(device),
        scheme=first.scheme,
        routes=first,
        levels=levels,
        topology=Topology(world=world or first.ranks, node_size=first.node_size),
        workload=SimpleNamespace(
            micro_steps=micro_steps,
            params=[
                [SimpleNamespace(dtype=dtype, param=SimpleNamespace(shape=torch.Size([numel])))]
                for dtype, numel in dtypes
            ],
        ),
        params=[SimpleNamespace(name=name) for name in names],
        notices=list(notices),
        peak_bytes=lambda volume: peak_bytes if volume.parts == parts else float("nan"),
        asked=[],
        said=[],
        warned=[],
    )

    def comm_volume(scheme: Scheme) -> ModelVolume:
        run.asked.append(scheme.block)
        return ModelVolume((others.get(scheme.name, parts[0]),))

    run.comm_volume, run.info, run.log = comm_volume, run.said.append, run.warned.append
    return run


def plain(
    *parts: CommVolume, stock: float = 6.0, layout: str = "ZeRO-3", **known: Any
) -> LineParts:
    """Return the parts of a front that knows little more than its volume."""
    volume = ModelVolume(parts)
    return LineParts(layout=layout, volume=volume, stock=StockVolume(stock, "bf16"), **known)


def lines_of(run: Any, front: LineParts) -> list[str]:
    """Return the lines of the log at start-up, without their subject."""
    announce(run, front)
    summary_lines, *others = run.said
    lines = [*summary_lines.split("\n  "), *others]
    assert lines[0].startswith("quantized_comm: ")
    assert all(line.startswith("quantized_comm: ") for line in others)
    return [line.removeprefix("quantized_comm: ") for line in lines]


def test_the_lines_of_a_front_that_knows_little() -> None:
    """Two gathers of 1 byte and one reduction of 0.5 bytes between two nodes of eight GPUs.

    Half of what enters a node comes from it: (2 + 0.5) / 2. No gradients wait, so none of their
    bytes are added.
    """
    part = priced(replicas=True, partial_sums=0.5)
    run = run_of(part)
    assert lines_of(run, plain(part)) == [
        "qsdp on ZeRO-3, 2 nodes x 8 GPUs: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and step); weights stay in the node, "
        "gradients in 8 bits;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
    ]
    assert full_line(run, plain(part)) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/step (bf16 6.00), all tensors quantized; "
        "2 x 8 ranks; torch kernels; 1.25 B/param/step received per node; "
        "extra memory: up to 3.5 GB"
    )
    assert saving(run, plain(part)) == (
        "2.4 times fewer bytes between nodes (2.50 instead of 6.00 per parameter and step)"
    )
    assert run.warned == []


def test_two_processes_are_said_to_be_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-2: one exchange of 0.5 bytes and two reductions of 0.25 bytes per step."""
    monkeypatch.setattr(native, "unavailable_reason", lambda: None)
    part = priced(
        "eden4",
        nodes=1,
        node_size=2,
        stage=2,
        weights=0.5,
        gradients=0.25,
        kernels={},
    )
    run = run_of(part, device="cpu", micro_steps=2)
    front = plain(part, stock=8.0, micro_steps=2, report_of="engine", kept_bytes=2e6)
    assert lines_of(run, front) == [
        "eden4 on ZeRO-3, 1 node x 2 CPU processes: 8.0 times fewer bytes between processes",
        "(1.00 instead of 8.00 per parameter and step); weights in 4 bits, gradients in 8 bits; "
        "memory per",
        "process: 2.0 MB kept + 3.5 GB at most in a step; C++ kernels; "
        "all: ds_quant.report(engine)",
    ]
    assert full_line(run, front) == (
        "eden4 on ZeRO-3, volume 1.00 B/param/step (bf16 8.00), all tensors quantized; "
        "1 x 2 ranks; C++ kernels; 0.50 B/param/step received per rank; "
        "keeps 0.00 B/param (0.002 GB) more on every rank; extra memory: up to 3.5 GB"
    )


def test_two_nodes_of_one_process_each_are_named_in_the_singular(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And torch kernels that the block asks for are not called slow."""
    monkeypatch.setattr(native, "unavailable_reason", lambda: "were not compiled")
    part = priced("qsdp", node_size=1, block={"warmup_steps": 7})
    run = run_of(part, device="cpu")
    front = plain(part, period="backward")
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 2 nodes x 1 CPU process: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and backward); weights and gradients in 8 bits; "
        "from step",
        "7 on; memory per process: 3.5 GB at most in a step; torch kernels; "
        "all: ds_quant.report(model)",
    ]
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/backward (bf16 6.00), all tensors quantized; "
        "2 x 1 ranks; torch kernels; 1.25 B/param/backward received per node; "
        "extra memory: up to 3.5 GB; from step 7 on"
    )


def test_weights_that_stay_on_the_gpus_of_one_node_are_said_to() -> None:
    """sdp4bit gathers them from a node shard, which one node has not."""
    part = priced("sdp4bit", nodes=1, node_size=4, weights=2.0)
    part = replace(part, kept={"1-D": 1, "excluded": 2}, full_precision_share=0.8)
    run = run_of(part)
    assert lines_of(run, plain(part)) == [
        "sdp4bit on ZeRO-3, 1 node x 4 GPUs: 1.3 times fewer bytes between GPUs",
        "(4.50 instead of 6.00 per parameter and step); "
        "weights NOT compressed, gradients in 8 bits;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
    ]
    assert full_line(run, plain(part)) == (
        "sdp4bit on ZeRO-3, volume 4.50 B/param/step (bf16 6.00), "
        "all weights, 1 small tensor, 2 excluded unquantized (80.0 % of bytes); 1 x 4 ranks; "
        "torch kernels; 3.38 B/param/step received per rank; extra memory: up to 3.5 GB"
    )


def test_the_lines_of_a_front_that_knows_much() -> None:
    """Between nodes weights and partial sums once per step: 0.3 + 0.4 bytes, half are received.

    Inside a node two micro-steps: 2 x 2 gathers of 2 bytes and two reductions of 1 byte.
    Partial sums of 0.5 bytes per parameter wait for the last micro-step: 3.5 GB + 0.5 GB.
    """
    part = priced(
        "lossless_w_g3",
        weights=0.3,
        weights_most=2.0,
        gradients=0.4,
        weights_intra=2.0,
        gradients_intra=1.0,
        partial_sums=0.5,
        full_precision_share=0.125,
        kept={"small": 1, "fp32 weights": 2, "1-D": 3, "excluded": 5},
        block={"warmup_steps": 3},
    )
    run = run_of(part, micro_steps=2, notices=["a notice", "another one"])
    front = plain(
        part,
        stock=14.0,
        layout="FSDP2",
        micro_steps=2,
        kept_bytes=12.4e9,
        kept_where=" in host memory",
        report_of="engine",
        fetches="fetches are said",
        weights="weights are said",
        gradients="gradients are said",
        accumulates=True,
        reasons=["a reason"],
    )
    kept = "4 small tensors, 5 excluded, 2 fp32 weights"
    assert lines_of(run, front) == [
        "lossless_w_g3 on FSDP2, 2 nodes x 8 GPUs: 20.0 times fewer bytes between nodes",
        "(0.70 instead of 14.00 per parameter and step); weights in about 2.4 bits without loss, "
        "gradients",
        "in 3 bits; from step 3 on; memory per GPU: 12 GB kept in host memory + "
        "4.0 GB at most in a step;",
        f"NOT compressed: {kept}, 12.5 % of the bytes",
        "a reason",
        "a notice",
        "another one",
    ]
    assert full_line(run, front) == (
        "lossless_w_g3 on FSDP2, volume 0.70 B/param/step between nodes (bf16 14.00), "
        f"{kept} unquantized (12.5 % of bytes); 2 x 8 ranks; torch kernels; fetches are said; "
        "0.35 B/param/step received per node; volume inside a node 10.00 B/param; "
        "keeps 12.40 B/param (12.4 GB) more in host memory on every rank; weights are said; "
        "gradients are said; buffering them takes 0.50 B/param (0.5 GB) on every rank; "
        "extra memory: up to 3.5 GB; from step 3 on; "
        "traffic depends on the learning rate: volume 2.40 B/param/step at most; "
        "a reason; a notice; another one"
    )


def test_ranks_of_every_level_are_described_the_most_parameters_first() -> None:
    """A quarter of the parameters sends 2.5 bytes between 16 ranks, the others 4.5 between 4.

    Means: (2.5 + 3 x 4.5) / 4 and half of that.
    """
    dense = priced()
    experts = priced(node_size=2, numel=3 * 10**9, weights=1.75, gradients=1.0, replicas=True)
    run = run_of(dense, experts, world=16, others={"eden4": experts})
    front = plain(dense, experts, stock=2.0, between="replicas of")
    assert lines_of(run, front)[0] == (
        "qsdp on ZeRO-3, 2 nodes x 8 GPUs: 2.0 times more bytes between nodes"
    )
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 4.00 B/param/step (bf16 2.00), all tensors quantized; "
        "75 % of the parameters on 2 replicas of 2 of 16 ranks, 4.50 B/param; "
        "25 % of the parameters on 2 x 8 ranks, 2.50 B/param; torch kernels; "
        "2.00 B/param/step received per node; extra memory: up to 3.5 GB"
    )
    run.levels.pop()
    with pytest.raises(ValueError, match="zip"):
        full_line(run, front)


def test_one_level_between_nodes_is_enough_for_bytes_between_nodes() -> None:
    """Experts inside a node send 2.5 bytes there, and dense layers 2.5 bytes between nodes."""
    experts, dense = priced(nodes=1, node_size=4), priced(node_size=4)
    run = run_of(experts, dense, world=8)
    front = plain(experts, dense)
    assert lines_of(run, front)[0] == (
        "qsdp on ZeRO-3, 2 nodes x 4 GPUs: 4.8 times fewer bytes between nodes"
    )
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 1.25 B/param/step between nodes (bf16 6.00), "
        "all tensors quantized; "
        "50 % of the parameters on 1 x 4 of 8 ranks, 2.50 B/param; "
        "50 % of the parameters on 2 x 4 ranks, 2.50 B/param; torch kernels; "
        "0.62 B/param/step received per node; volume inside a node 1.25 B/param; "
        "extra memory: up to 3.5 GB"
    )


def test_a_block_that_leaves_out_all_tensors_has_no_advice() -> None:
    part = priced(
        node_size=1,
        full_precision_share=1.0,
        kept={"excluded": 3},
        block={"exclude": ["*", "bias", "layr*"]},
    )
    run = run_of(
        part,
        notices=["a notice"],
        names=["layer.weight"],
        others={"eden4": priced("eden4", weights=0.0, gradients=0.0)},
    )
    front = plain(part, reasons=["a reason"])
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 2 nodes x 1 GPU: 2.4 times fewer bytes between nodes",
        "(2.50 instead of 6.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "NOT compressed: 3 excluded, 100.0 % of the bytes",
        "a notice",
    ]
    assert full_line(run, front).endswith("; extra memory: up to 3.5 GB; a notice")
    assert run.asked == []
    assert run.warned == [
        'quantized_comm: exclude pattern "bias" matches no parameter; one is called layer.weight',
        'quantized_comm: exclude pattern "layr*" matches no parameter; one is called layer.weight',
    ]


def test_weights_that_the_library_gathers_itself_leave_nothing_to_lossless_differences() -> None:
    part = priced("lossless", stage=2, full_precision_share=1.0, kept={"float8": 3})
    run = run_of(part)
    assert lines_of(run, plain(part, reasons=["a reason"]))[1:] == [
        "(1.50 instead of 6.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "NOT compressed: 3 float8, 100.0 % of the bytes",
    ]


@pytest.mark.parametrize(
    ("pattern", "names", "called"),
    [
        ("heads", ["layer.weight", "head"], "head"),
        ("xyz", ["layer.weight", "head"], "layer.weight"),
        ("abcdefgh", ["zzz", "abcd5678"], "abcd5678"),  # half of the letters are alike
        ("xyz", [], "nothing"),
    ],
)
def test_a_pattern_without_a_parameter_is_compared_with_their_names(
    pattern: str, names: list[str], called: str
) -> None:
    part = priced(block={"exclude": [pattern]})
    run = run_of(part, names=names)
    announce(run, plain(part))
    assert run.warned == [
        f'quantized_comm: exclude pattern "{pattern}" matches no parameter; one is called {called}'
    ]


def test_a_scheme_that_quantizes_nothing_names_no_tensors() -> None:
    part = priced("full_precision", full_precision_share=1.0, kept={"small": 9})
    run = run_of(part, notices=["a notice"])
    front = plain(part, stock=5.0, reasons=["a reason"])
    assert lines_of(run, front) == [
        "full_precision on ZeRO-3, 2 nodes x 8 GPUs: 2.0 times fewer bytes between nodes",
        "(2.50 instead of 5.00 per parameter and step); nothing is quantized;",
        "memory per GPU: 3.5 GB at most in a step; torch kernels; all: ds_quant.report(model)",
        "a reason",
        "a notice",
    ]
    assert ", nothing quantized; 2 x 8 ranks; " in full_line(run, front)


def test_one_rank_sends_nothing_that_could_be_compared() -> None:
    part = priced(nodes=1, node_size=1, full_precision_share=1.0, kept={"small": 9})
    run = run_of(part)
    front = plain(part, kept_bytes=1e9)
    assert lines_of(run, front) == [
        "qsdp on ZeRO-3, 1 node x 1 GPU; torch kernels; all: ds_quant.report(model)"
    ]
    assert full_line(run, front) == (
        "qsdp on ZeRO-3, volume 2.50 B/param/step (bf16 6.00), "
        "9 small tensors unquantized (100.0 % of bytes); 1 x 1 ranks; torch kernels; "
        "keeps 1.00 B/param (1 GB) more on every rank"
    )


@pytest.mark.parametrize(
    ("ranks", "left"),
    [(1, "all tensors quantized"), (2, "all weights unquantized (0.0 % of bytes)")],
)
def test_weights_of_a_node_shard_are_named_where_one_node_gathers_them(
    ranks: int, left: str
) -> None:
    part = priced("sdp4bit", nodes=1, node_size=ranks)
    assert f"(bf16 6.00), {left}; 1 x {ranks} ranks; " in full_line(run_of(part), plain(part))


@pytest.mark.parametrize(
    ("scheme", "stage", "left"),
    [
        ("lossless", 2, "all gradients, 1 small tensor unquantized (50.0 % of bytes)"),
        ("lossless_w_g3", 3, "1 small tensor unquantized (50.0 % of bytes)"),
        ("sdp4bit", 0, "1 small tensor unquantized (50.0 % of bytes)"),
        ("lossless", 0, "nothing quantized"),  # DDP sends no weights
        ("hybrid", 3, "nothing quantized"),
    ],
)
def test_roles_in_full_precision_are_named_before_tensors(
    scheme: str, stage: int, left: str
) -> None:
    part = priced(scheme, stage=stage, full_precision_share=0.5, kept={"small": 1})
    assert f"(bf16 6.00), {left}; 2 x 8 ranks; " in full_line(run_of(part), plain(part))


def test_weights_that_a_block_keeps_in_full_precision_are_named() -> None:
    part = priced("qsdp", block={"weights": {"enabled": False}}, full_precision_share=0.8)
    assert ", all weights unquantized (80.0 % of bytes); " in full_line(run_of(part), plain(part))


@pytest.mark.parametrize(
    ("scheme", "stage", "share", "named"),
    [
        ("qsdp", 3, 0.05, False),
        ("qsdp", 3, 0.06, True),
        ("lossless", 3, 0.9, False),  # the line names the gradients already
        ("lossless", 0, 0.9, False),  # which are all that DDP sends
    ],
)
def test_tensors_in_full_precision_are_named_if_they_are_many_bytes(
    scheme: str, stage: int, share: float, named: bool
) -> None:
    part = priced(scheme, stage=stage, full_precision_share=share, kept={"small": 2})
    run = run_of(part)
    announce(run, plain(part))
    said = [f"quantized_comm: NOT compressed: 2 small tensors, {100 * share:.1f} % of the bytes"]
    assert run.said[1:] == (said if named else [])


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ([(BF16, 15), (FP32, 10), (FP32, 10)], "weights NOT compressed, gradients in 3 bits"),
        ([(BF16, 15), (FP32, 10)], "weights in about 2.4 bits without loss, gradients in 3 bits"),
        ([], "weights in about 2.4 bits without loss, gradients in 3 bits"),
    ],
)
def test_the_format_of_weights_is_that_of_most_of_them(
    dtypes: list[tuple[torch.dtype, int]], named: str
) -> None:
    part = priced("lossless_w_g3")
    text = summary(run_of(part, dtypes=dtypes), plain(part))
    assert f" per parameter and step); {named}; " in " ".join(text.split())


def rows(*widths: int) -> list[str]:
    """Return facts of these widths, each of one word."""
    return [letter * width for letter, width in zip("abcdefg", widths, strict=False)]


def test_facts_fill_three_lines_of_a_hundred_columns() -> None:
    """Lines behind the first one are indented by two."""
    a, b, c = rows(60, 39, 98)
    assert start_line._lines_of([a, b]) == [f"{a} {b}"]
    assert start_line._lines_of([a, f"{b}b"]) == [a, f"{b}b"]
    assert start_line._lines_of([a, b, c, c]) == [f"{a} {b}", c, c]
    a, b, c, d, e = rows(100, 60, 37, 60, 37)
    assert start_line._lines_of([a, b, c, d, e]) == [a, f"{b} {c}", f"{d} {e}"]
    assert start_line._lines_of([a, b, f"{c}c", c]) == [a, b, f"{c}c {c}"]


def test_facts_that_are_too_long_are_broken_between_words_and_the_last_ones_left_out() -> None:
    """A number stays with its unit."""
    a, b, c, d, e = rows(92, 96, 80, 96, 9)
    assert start_line._lines_of([f"{a} {b}", c]) == [a, b, c]
    assert start_line._lines_of(["x", f"{b} yy"]) == [f"x {b}", "yy"]
    assert start_line._lines_of([f"{a} at 12 GB {b}", c, d, e]) == [f"{a} at", "12 GB", b]
    assert start_line._lines_of([a, b, f"{c} {e}", d]) == [a, b, f"{c} {e}"]


SPARING: dict[str, Any] = {"weights": 3.5, "gradients": 0.5}
EACH_BACKWARD = {"gradients": {"cross": "micro_step"}}
# What is run, what is advised instead, and the advice.
ADVISED = {
    "a tenth less": (
        priced(block=EACH_BACKWARD),
        priced("eden4", block=EACH_BACKWARD, **SPARING),
        'advice: scheme "eden4" sends 4.50 bytes per parameter and step here',
    ),
    "less, for memory": (
        priced(memory=0.5),
        priced("eden4", memory=0.75, weights=1.0, gradients=0.25),
        'advice: scheme "eden4" sends 1.25 bytes per parameter and step here and keeps 0.75 in '
        "memory",
    ),
    "less, in the same memory": (
        priced(memory=0.5),
        priced("eden4", memory=0.5, weights=1.0, gradients=0.25),
        'advice: scheme "eden4" sends 1.25 bytes per parameter and step here',
    ),
    "hardly less": (
        priced(block=EACH_BACKWARD), priced("eden4", weights=4.0, gradients=0.51), None,
    ),
    "a full copy is allowed": (
        priced("sdp4bit", node_size=1, block={"allow_full_replica": True}),
        priced("eden4", node_size=1, weights=0.5, gradients=0.25),
        'advice: scheme "eden4" sends 1.00 bytes per parameter and step here',
    ),
    "no full copy is allowed": (
        priced("zeropp", node_size=1, weights=4.0),
        priced("qsdp", node_size=1, weights=0.5, gradients=0.25),
        'advice: scheme "qsdp" sends 2.50 bytes per parameter and step here',
    ),
    "one node": (
        priced("eden4", nodes=1, weights=9.0), priced("qsdp", nodes=1, weights=0.1), None,
    ),
    "recommended": (priced("eden4", weights=9.0), priced("eden4", weights=0.1), None),
    "no loss": (priced("lossless", weights=9.0), priced("eden4", weights=0.1), None),
    "for research": (priced("qsdp_w4g4", weights=9.0), priced("eden4", weights=0.1), None),
}  # fmt: skip


@pytest.mark.parametrize(("own", "other", "advice"), ADVISED.values(), ids=ADVISED)
def test_a_scheme_that_sends_clearly_less_is_advised(
    own: CommVolume, other: CommVolume, advice: str | None
) -> None:
    """In a step of two micro-steps; the own volume of "a tenth less" is 4 x 1 + 2 x 0.5."""
    run = run_of(own, micro_steps=2, others={other.routes.scheme.name: other})
    line = full_line(run, plain(own, reasons=["a reason"]))
    assert line.endswith(f"; a reason; {advice}" if advice else "; a reason")


def test_the_advised_scheme_is_priced_with_the_exceptions_of_the_block() -> None:
    part = priced(block={"exclude": ["head*"], "min_numel": 77})
    run = run_of(part)
    full_line(run, plain(part))
    (asked,) = run.asked
    assert (asked.scheme, list(asked.exclude), asked.min_numel) == ("eden4", ["head*"], 77)


@pytest.mark.parametrize(
    ("scheme", "nodes", "stage", "weights", "gradients", "advised"),
    [
        ("hybrid", 2, 3, 0.69, 0.1, True),
        ("hybrid", 2, 3, 0.7, 0.1, False),
        ("hybrid", 2, 1, 0.44, 0.15, True),  # gradients are sent once
        ("hybrid", 2, 1, 0.5, 0.15, False),
        ("hybrid", 1, 3, 0.1, 0.1, False),
        ("full_precision", 2, 3, 0.1, 0.1, False),
    ],
)
def test_lossless_is_advised_in_place_of_hybrid_alone(
    scheme: str, nodes: int, stage: int, weights: float, gradients: float, advised: bool
) -> None:
    """In three micro-steps gradients of ZeRO-3 are sent three times: 0.4 + 3 x 0.2 bytes."""
    where: dict[str, Any] = {"nodes": nodes, "stage": stage, "block": EACH_BACKWARD}
    own = priced(scheme, weights=0.4, gradients=0.2, **where)
    other = priced("lossless", weights=weights, gradients=gradients, **where)
    run = run_of(own, others={"lossless": other})
    line = full_line(run, plain(own, micro_steps=3))
    advice = '; advice: scheme "lossless" is also exact and sends less'
    assert line.endswith(advice) == advised
