"""Links, full precision and prices of one run, as one of 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_quant.comm.reduction_plan import presumed_pace
from ds_quant.comm.traffic import LosslessDifferences, Traffic
from ds_quant.config.presets import preset_names
from ds_quant.config.schema import parse_block
from ds_quant.kernels import native
from ds_quant.policy import in_words
from ds_quant.policy.cost import LOSSLESS_BITS
from ds_quant.runtime import run as run_module
from ds_quant.runtime.run import Run, SchemeState, StockVolume
from ds_quant.runtime.savings import Savings
from ds_quant.runtime.start_line import LineParts, announce, full_line, summary
from tests.world import SimulatedRank, World


def world(**keys: Any) -> World:
    """Two micro-steps under ZeRO-2, with a weight of 64 x 64."""
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    return World(2, 2, module=module, stage=2, micro_steps=2, scheme="full_precision", **keys)


def rank_of(**keys: Any) -> SimulatedRank:
    return world(**keys).ranks[0]


@pytest.mark.parametrize(
    ("warmup", "until", "killed", "exact"),
    [(0, 0, False, 0), (3, 0, False, 3), (0, 2, False, 2), (2, 4, False, 4), (4, 2, False, 4),
     (0, 0, True, 6)],
)  # fmt: skip
def test_full_precision_lasts_for_the_warm_up_the_fallback_and_the_kill_file(
    warmup: int, until: int, killed: bool, exact: int
) -> None:
    made = rank_of(warmup_steps=warmup)
    made.run.state.exact_until, made.run.state.killed = until, killed
    assert [made.run.is_full_precision(step) for step in range(6)] == [
        step < exact for step in range(6)
    ]


def test_an_entry_of_a_schedule_is_due_once() -> None:
    state = SchemeState()
    due = [state.due((2, 5), step) for step in (1, 2, 3, 6, 7, 4)]  # step 5 is loaded over
    assert due == [False, True, False, True, False, False]
    assert state.learned_at == 7


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")])
def test_slices_are_as_long_as_device_and_backend_need(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "carries", lambda process_group, device: backend)
    made = world()
    made.engine.device = torch.device(kind)
    network = made.ranks[0].network
    scheme = made.ranks[0].run.scheme
    run = SimulatedRank(made.engine, scheme, rank=0, network=network).run
    assert run.slicing.pace == presumed_pace(torch.device(kind), backend)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 2]])
def test_the_world_has_two_levels_and_a_part_of_it_one(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world()
    first, part = made.ranks[0], made.communicator(ranks, 0)
    monkeypatch.setattr(first.run, "communicator", lambda group: part)
    hierarchy = first.run.level(object()).hierarchy
    assert (hierarchy.intra is None) == (hierarchy.inter is None) == (len(ranks) < 4)


@pytest.mark.parametrize("cross", ["step", "micro_step"])
def test_what_is_saved_is_compared_with_full_precision_that_crosses_as_often(
    cross: str,
) -> None:
    """64 x 64 in fp32 over 2 x 2 ranks: half of a node's gradients comes from the other one."""
    made = rank_of(gradients={"cross": cross})
    made.engine.communication_data_type = torch.float32
    found = made.run.received_in_full_precision()["gradients"]
    own = made.run.received_by_formula(made.run.comm_volume())
    traffic = Traffic()
    savings = Savings(traffic)
    for at, nbytes in own["gradients"].items():
        traffic.received["gradients"][at] = 4 * int(nbytes)  # of four steps
        traffic.exact["gradients"][at] = int(nbytes)  # one in full precision
        traffic.added["gradients"][at] = int(nbytes)  # one for nothing
    saved = savings.total(own, made.run.received_in_full_precision())["gradients"]
    for at in ("inter", "intra"):
        one_step = found[at] - own["gradients"][at]
        assert saved[at] == pytest.approx(2 * one_step - own["gradients"][at])
    crossings = 1 if cross == "step" else 2
    assert found["inter"] == crossings * 4 * 64 * 64 / 2 / 2
    assert found["intra"] == 2 * 4 * 64 * 64 / 2


def test_a_settled_step_keeps_its_savings_when_others_are_priced_otherwise() -> None:
    traffic = Traffic()
    savings = Savings(traffic)
    own = {role: {"intra": 10.0, "inter": 0.0} for role in traffic.received}
    for step, factor in enumerate((4, 2, 4)):
        traffic.count("gradients", intra=10, inter=0)
        stock = {role: {"intra": 10.0 * factor, "inter": 5.0} for role in own}
        savings.settle(savings.ratios(factor, lambda stock=stock: (own, stock)))
        expected = [30, 40, 70][step]
        assert savings.total(own, own)["gradients"] == {"intra": expected, "inter": 0}
    savings.forget_prices()
    traffic.count("gradients", intra=10, inter=0)
    savings.settle(savings.ratios(4, lambda: (own, own)))
    with traffic.adding():
        traffic.count("gradients", intra=7, inter=3)
    assert savings.total(own, own)["gradients"] == {"intra": 63, "inter": -3}


def test_lossless_weights_save_what_full_precision_receives_besides() -> None:
    """However long they are: here twice as long as the formula expects."""
    traffic = Traffic()
    savings = Savings(traffic)
    by_formula = 8000 * LOSSLESS_BITS / 8
    nbytes = int(2 * by_formula)
    expected = {role: {"intra": 0.0, "inter": by_formula} for role in traffic.received}
    stock = {role: {"intra": 0.0, "inter": 16000.0} for role in traffic.received}
    counted = LosslessDifferences(
        numel=12_000,
        received_numel={"intra": 0, "inter": 8000},
        received={"intra": 0, "inter": nbytes},
    )
    for is_exact in (False, True):
        traffic.is_exact = is_exact
        traffic.count_lossless(counted)
        traffic.count("weights", intra=0, inter=nbytes)
    assert savings.total(expected, stock)["weights"]["inter"] == pytest.approx(16000 - nbytes)


# ---- the start-up lines ----


def parts_of(run: Run, *, period: str = "step") -> LineParts:
    """Return the parts of a front that keeps memory and accumulates gradients."""
    return LineParts(
        layout="ZeRO-3",
        volume=run.comm_volume(),
        stock=StockVolume(14.0, "bf16"),
        micro_steps=2,
        period=period,
        kept_bytes=12.3e9,
        gradients="gradients are sent between nodes once per optimizer step",
        accumulates=True,
    )


def text_of(run: Run, *, period: str = "step") -> str:
    """Return the start-up lines."""
    return summary(run, parts_of(run, period=period))


@pytest.mark.parametrize("scheme", preset_names())
def test_the_start_up_lines_of_every_scheme_fit_on_three_lines_of_a_terminal(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    stage = 3 if parse_block({"scheme": scheme}).keeps_node_shard else 2
    made = World(2, 2, module=module, stage=stage, scheme=scheme, warmup_steps=1000).ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    for period in ("step", "micro-step"):
        lines = text_of(made.run, period=period).split("\n")
        assert len(lines) <= 3 and max(map(len, lines)) <= 100, lines
        assert lines[0].startswith(f"quantized_comm: {scheme} on ZeRO-3, 2 nodes x 2 CPU processes")
        text = " ".join(map(str.strip, lines))
        assert "; from step 1000 on; " in text
        assert "memory per process: 12 GB kept + 3" in text


@pytest.mark.parametrize(
    ("stock_bytes", "sent_bytes", "nodes", "said"),
    [
        (5.7, 1.02, 2, "5.6 times fewer bytes between nodes"),
        (8.0, 5.04, 1, "1.6 times fewer bytes between GPUs"),
        (4.0, 4.1, 1, "as many bytes between GPUs as without it"),
        (4.0, 6.0, 2, "1.5 times more bytes between nodes"),
        (4.0, 0.0, 2, "no bytes between nodes"),
    ],
)
def test_bytes_are_compared_with_a_run_without_the_block(
    stock_bytes: float, sent_bytes: float, nodes: int, said: str
) -> None:
    assert in_words.saving(stock_bytes, sent_bytes, nodes=nodes) == said


def test_amounts_of_memory_have_the_unit_that_fits() -> None:
    amounts = (0, 12_416, 1.26e6, 13e6, 999e6, 1.68e9, 24e9)
    assert [in_words.amount(nbytes) for nbytes in amounts] == [
        "0.0 kB", "12 kB", "1.3 MB", "13 MB", "999 MB", "1.7 GB", "24 GB",
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", preset_names())
def test_a_single_rank_has_start_up_lines_in_every_scheme(scheme: str) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    made = World(1, 1, module=module, stage=2, scheme=scheme).ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    text = text_of(made.run)
    assert text.startswith(f"quantized_comm: {scheme} on ZeRO-3, 1 node x 1 CPU process;")
    whole = full_line(made.run, parts_of(made.run))
    assert "extra memory" not in whole and "received per" not in whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lossless_is_advised_where_it_sends_less_than_hybrid(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in fp32 are sent whole by both."""
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64, dtype=dtype))})
    made = World(2, 2, module=module, stage=3, scheme="hybrid").ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    advice = 'advice: scheme "lossless" is also exact and sends less'
    assert (advice in full_line(made.run, parts_of(made.run))) == (dtype == torch.bfloat16)


def test_slow_kernels_have_a_line_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterDict({"w": nn.Parameter(torch.empty(64, 64))})
    made = World(2, 2, module=module, stage=3, scheme="qsdp").ranks[0]
    made.engine.communication_data_type = torch.bfloat16
    monkeypatch.setattr(made.run, "peak_bytes", lambda volume: 34.5e9)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "were not compiled")
    lines: list[str] = []
    monkeypatch.setattr(made.run, "info", lines.append)
    announce(made.run, parts_of(made.run))
    assert "quantized_comm: torch kernels are slow: C++ ones were not compiled" in lines
