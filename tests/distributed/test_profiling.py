"""Ranges that a profiler shows for every message of a step."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from torch.profiler import ProfilerActivity, profile

from ds_quant import fsdp2
from ds_quant.comm import profiling
from tests.distributed.harness import on_ranks
from tests.distributed.models import engine_of, train_step
from tests.distributed.test_fsdp2_between_steps import rows, sgd, sharded
from tests.thin import thinned

TWO_HOPS = {
    *(f"{action} weights {hop}" for action in ("encode", "all_gather", "wait", "decode")
      for hop in ("intra", "inter")),
    *(f"{action} gradients {hop}" for action in ("encode", "all_to_all", "wait")
      for hop in ("intra", "inter")),
    "sum gradients inter",
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "scheme", "expected"),
    thinned(
        [
            (3, "sdp4bit", TWO_HOPS),
            (3, "lossless_w_g3", TWO_HOPS),
            # ZeRO-2 gathers weights over all ranks after the optimizer step.
            (2, "sdp4bit", {name for name in TWO_HOPS if "weights intra" not in name}),
        ],
        lambda stage, scheme, _: scheme == "sdp4bit",
    ),
)
@on_ranks(4)
def test_a_trace_names_every_action_with_its_role_and_hop(
    stage: int, scheme: str, expected: set[str]
) -> None:
    engine = engine_of(stage, {"scheme": scheme, "node_size": 2})
    train_step(engine, 0)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train_step(engine, 1)
    names = {event.name for event in recorded.events() if event.name.startswith("ds_quant::")}
    found = {name.removeprefix("ds_quant::") for name in names}
    assert expected <= found
    if stage == 3:
        for action in ("gather", "reduce"):  # the first parameter of what is posted
            assert any(f"{action} {name}" in found for name, _ in engine.module.named_parameters())


@on_ranks(4)
def test_a_trace_under_fsdp2_names_the_modules() -> None:
    model = sharded()
    optimizer = sgd(model)
    fsdp2.attach(model, {"scheme": "sdp4bit", "node_size": 2}, optimizer=optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(rows(0)).sum().backward()
    names = {event.name for event in recorded.events()}
    expected = {f"{action} {module}" for action in ("gather", "reduce")
                for module in ("first", "second", "third", "the root")}  # fmt: skip
    assert expected <= {name.removeprefix("ds_quant::") for name in names}


@on_ranks(2)
def test_no_range_is_entered_without_a_profiler() -> None:
    engine = engine_of(3, {"scheme": "qsdp"})
    with patch.object(profiling, "record_function", side_effect=AssertionError("entered")):
        train_step(engine, 0)
