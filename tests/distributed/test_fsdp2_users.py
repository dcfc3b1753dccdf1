"""Texts and figures for users of FSDP2: the start-up line, the report and the metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from ds_quant.config.errors import AttachError
from ds_quant.runtime.handshake import StartError
from tests.distributed.fsdp2_runs import adam, logged
from tests.distributed.harness import on_ranks, scratch
from tests.distributed.models import heard
from tests.distributed.test_fsdp2 import new_model, sharded, train

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
NUMEL = sum(parameter.numel() for parameter in new_model().parameters())


def attached(block: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = sharded(new_model(), mp_policy=BF16)
    optimizer = adam(model, lr=3e-3)
    block = {"node_size": 2, "min_numel": 512, **block}
    return model, optimizer, fsdp2.attach(model, block, optimizer=optimizer)


@on_ranks(4)
def test_the_start_up_line_names_what_stays_and_what_it_takes() -> None:
    model, optimizer, front = attached({"scheme": "eden4", "exclude": ["uneven.*"]})
    # Five biases and the head of one row are small.
    assert ", 6 small tensors, 1 excluded unquantized (86.5 % of bytes); " in front.line
    assert re.search(r"keeps 1\.0\d B/param \(\S+ GB\) more on every rank", front.line)
    assert re.search(r"buffering them takes 2\.\d\d B/param", front.line)
    assert re.search(r"; extra memory: up to \S+ GB", front.line)
    assert "advice: scheme" not in front.line
    train(model, optimizer, steps=2, micro_steps=3)
    report = ds_quant.report(model)
    assert report["expected_kept_bytes"] == pytest.approx(report["kept_bytes"], rel=0.06)
    assert report["expected_peak_bytes"] > 0 and report["lossless_bits"] is None
    assert report["expected_most_bytes_per_param"] == report["expected_bytes_per_param"]
    # In full precision a rank receives a quarter of what crosses between the nodes.
    sent_once = report["received_bytes"]["gradients"]["inter"]
    saved = report["saved_bytes"]["gradients"]["inter"]
    assert (sent_once + saved) / 2 == pytest.approx(2 * NUMEL / 4, rel=0.1)
    assert saved > 0 and report["saved_bytes"]["weights"]["inter"] > 0


@on_ranks(4)
def test_steps_that_differ_keep_what_they_have_saved() -> None:
    """Frozen parameters, and an accumulation that is shorter at the end of an epoch."""
    model, optimizer, _ = attached({"scheme": "eden4"})

    def saved() -> float:
        return sum(ds_quant.report(model)["saved_bytes"]["gradients"].values())

    by_step = []
    for micro_steps, is_frozen in ((3, False), (3, False), (1, False), (3, False), (3, True)):
        next(model.parameters()).requires_grad_(not is_frozen)
        before = saved()
        train(model, optimizer, steps=1, micro_steps=micro_steps)
        by_step.append(saved() - before)
    whole, again, short, last, frozen = by_step
    assert [again, last] == pytest.approx([whole, whole])
    assert 0 < short < 0.6 * whole and 0 < frozen < 0.95 * whole


@pytest.mark.parametrize("scheme", ["eden4", "lossless"])
@on_ranks(4)
def test_what_is_received_and_saved_adds_up_to_full_precision(scheme: str) -> None:
    """With other micro-steps in every step, and with weights of which all bits change. But for
    padding, and what FSDP2 does not gather again in backward.
    """
    totals = []
    for name in ("full_precision", scheme):
        model = sharded(new_model(), mp_policy=BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        block = {"scheme": name, "node_size": 2, "min_numel": 0}
        fsdp2.attach(model, block, optimizer=optimizer)
        for micro_steps in (1, 2, 1, 3):
            train(model, optimizer, steps=1, micro_steps=micro_steps)
        report = ds_quant.report(model)
        received, saved = (
            report[key]["weights"]["inter"] for key in ("received_bytes", "saved_bytes")
        )
        totals.append(received + saved)
    expected, found = totals
    assert found == pytest.approx(expected, rel=0.03)


@on_ranks(4)
def test_a_block_that_leaves_all_parameters_out_says_so_and_advises_nothing() -> None:
    lines = logged()
    for scheme, node_size in (("eden4", 4), ("sdp4bit", 2), ("qsdp", 2)):
        del lines[:]
        _, _, front = attached({"scheme": scheme, "exclude": ["*"], "node_size": node_size})
        assert "advice" not in front.line
        if dist.get_rank() == 0:
            assert "nothing is quantized" in lines[0].replace("\n  ", " ")
            assert any("excluded, 100.0 % of the bytes" in line for line in lines)
            assert not any("advice" in line for line in lines)


@on_ranks(2)
def test_modules_that_are_wrapped_together_are_served_once() -> None:
    """As accelerate and torchtitan wrap the last norm and the head."""
    model = new_model()
    fully_shard([model.uneven, model.head])
    model = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = {"scheme": "sdp4bit", "node_size": 1, "min_numel": 512, "allow_full_replica": True}
    front = fsdp2.attach(model, block, optimizer=optimizer)
    assert len(front.served) == len(front.copies.node_shards) == 2
    assert front.run.comm_volume().numel == NUMEL
    losses = train(model, optimizer, steps=4)
    assert losses[-1] < losses[0]


@on_ranks(2)
def test_a_scheme_without_node_copies_keeps_nothing() -> None:
    model, _, _ = attached({"scheme": "qsdp"})
    assert ds_quant.report(model)["kept_bytes"] == 0


@on_ranks(2)
def test_an_optimizer_of_another_model_counts_no_step() -> None:
    """As that of a discriminator which is trained beside."""
    model, optimizer, front = attached({"scheme": "qsdp"})
    train(model, optimizer, steps=2)
    other = nn.Linear(4, 4)
    optimizer_of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 4)).sum().backward()
    optimizer_of_other.step()
    train(model, optimizer, steps=1)
    assert front.step == 3


@on_ranks(2)
def test_patterns_that_match_nothing_and_better_schemes_are_named() -> None:
    said = heard("log_rank0")
    _, _, front = attached({"scheme": "qsdp", "exclude": ["haed.*"], "node_size": 1})
    assert "advice: scheme" not in front.line, "one rank per node would keep a full replica"
    if torch.distributed.get_rank() == 0:
        assert any('"haed.*" matches no parameter' in line for line in said)
    _, _, front = attached({"scheme": "full_precision"})
    assert "nothing quantized" in front.line


@on_ranks(4)
def test_metrics_are_written_every_interval_by_rank_0() -> None:
    file = scratch() / "metrics.jsonl"
    metrics = {"interval": 2, "file": str(file)}
    model, optimizer, front = attached({"scheme": "eden4", "metrics": metrics})
    train(model, optimizer, steps=2)
    before = {role: dict(hops) for role, hops in front.run.traffic.received.items()}
    train(model, optimizer, steps=2)
    torch.distributed.barrier()
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    if torch.distributed.get_rank() == 0:
        for role, hops in front.run.traffic.received.items():
            for hop, nbytes in hops.items():
                assert lines[1][f"{role}/{hop}/bytes"] == (nbytes - before[role][hop]) / 2
    line = lines[1]
    assert all(line[f"seconds/{name}"] > 0 for name in ("encode", "wait", "decode"))
    assert 4 < line["weights/inter/bits"] < 6 and line["weights/intra/bits"] >= 16
    assert 8 < line["gradients/intra/bits"] < 10 and 4 < line["gradients/inter/bits"] < 6
    assert 0 < line["weights/inter/error"] < 1e-3 and line["weights/intra/error"] == 0
    assert 0 < line["gradients/intra/error"] < 1e-3 < line["gradients/inter/error"] < 5e-2
    assert 0.5 < line["weights/inter/saved"] < 1 and 0.5 < line["gradients/inter/saved"] < 1
    assert not front.run.traffic.meter.is_open


@on_ranks(4)
def test_exact_gathers_are_measured_in_sampled_steps() -> None:
    file = scratch() / "metrics.jsonl"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = fully_shard(nn.Linear(64, 32, bias=False), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = {"interval": 1, "file": str(file)}
    fsdp2.attach(model, {"scheme": "eden4", "metrics": metrics}, optimizer=optimizer)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.distributed.barrier()
    (line,) = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert line["weights/intra/bits"] == 32 and line["weights/intra/error"] == 0


@on_ranks(2)
def test_a_file_that_cannot_be_written_stops_the_start_on_all_ranks() -> None:
    metrics = {"file": str(scratch() / "nowhere" / "metrics.jsonl")}
    with pytest.raises(StartError, match="metrics.file=.*No such file"):
        attached({"scheme": "qsdp", "metrics": metrics})
    model, optimizer, front = attached({"scheme": "qsdp", "metrics": metrics | {"interval": 0}})
    train(model, optimizer, steps=1)
    assert not front.run.traffic.meter.is_open


# ---- calls in the wrong order, or without an argument ----


@on_ranks(2)
def test_an_attach_between_a_forward_and_its_backward_is_named() -> None:
    model = sharded(new_model(), mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, model.layers[0].in_features)).float().square().mean()
    block = {"scheme": "lossless", "node_size": 1, "allow_full_replica": True}
    fsdp2.attach(model, block, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="call ds_quant.fsdp2.attach before the forward"):
        loss.backward()


@on_ranks(1)
def test_the_optimizer_is_asked_for_by_name() -> None:
    model = sharded(new_model())
    with pytest.raises(AttachError, match=r"optimizer=None: allowed: .* or \[\] for a model"):
        fsdp2.attach(model, "qsdp")


@on_ranks(2)
def test_a_loop_that_asks_for_nan_runs_without_a_block() -> None:
    model = sharded(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    front = fsdp2.attach(model, {"scheme": "qsdp", "enabled": False}, optimizer=optimizer)
    assert not front.found_nonfinite()
