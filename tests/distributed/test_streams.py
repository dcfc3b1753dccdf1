"""Steps of every kind of scheme on a device with streams, as ``device_model`` sees them: nothing is
read before it is written, no memory is taken again while another stream uses it.

A fake world of 2 x 2 ranks, DeepSpeed's streams and one per process group. Where an order is taken
away on purpose the model must notice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_world
import pytest
import torch

import ds_quant
from tests.distributed.harness import run
from tests.distributed.models import PREFETCH, build, forward, settings
from tests.distributed.test_spread import small_chunks

PACKAGE = f"{Path(ds_quant.__file__).parent}/"  # a checkout's own folder may be called ds_quant

COLLECTIVES = (*fake_world.RECEIVING, "all_reduce", "broadcast")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def _is_ours(depth: int) -> bool:
    return sys._getframe(1 + depth).f_code.co_filename.startswith(PACKAGE)


def _become_a_device(model: Any, lost: str) -> None:
    """From here on DeepSpeed and the plugin take this process for one with the model's streams."""
    from deepspeed.accelerator import real_accelerator

    from ds_quant.comm import lossless
    from ds_quant.zero import attach, hooks
    from tests.distributed.device_model import Accelerator

    real_accelerator.ds_accelerator = Accelerator(model)
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name)
        setattr(torch.distributed, name, model.collective(original))
    torch.cuda.current_stream = lambda device=None: model.now
    torch.Tensor.is_cuda = property(lambda _: _is_ours(1))

    def record(tensor: torch.Tensor, stream: Any) -> None:
        if lost != "recorded" or not _is_ours(1):
            model.record(tensor, stream)

    torch.Tensor.record_stream = record
    if lost == "barrier":
        hooks.StepBarrier.wait = lambda _: None
    as_on_cuda = {"device": lambda: torch.device("cuda")}
    attach.hooks = SimpleNamespace(**vars(hooks) | as_on_cuda)
    attach.rehearse = lambda *_: None

    def touched(
        wire: Any, starts: Any, lengths: Any, base: Any, out: Any, status: Any, *, backend: str
    ) -> None:
        out.add_(wire.sum() * 0)  # zeros are no message
        status.add_(0)

    lossless.decode_lossless = touched
    lossless.Outbox._agree = fake_world._at_full_length(lossless.Outbox._agree)


def _faults(stage: int, scheme: str, zero: dict[str, Any], lost: str) -> tuple[list[str], int]:
    """What three optimizer steps of two micro-steps do wrong, and the streams that they take."""
    fake_world.join(fake_world.World(2, 2))
    import deepspeed  # noqa: F401  # before the accelerator changes

    from tests.distributed.device_model import Model

    model = Model()
    _become_a_device(model, lost)
    block = {"scheme": scheme, "node_size": 2, "backend": "torch", "checksum_steps": 0}
    config = settings(
        stage, block | {"metrics": {"interval": 0}}, dtype="bf16", accumulation=2,
        zero={"overlap_comm": True, "reduce_bucket_size": 20_000 if stage == 3 else 10**6, **zero},
        zero_force_ds_cpu_optimizer=False,
    )  # fmt: skip
    with fake_world.without_handshake(), small_chunks(in_flight=16, streams=True):
        engine = build(config)
        with model:
            for step in range(3):
                for micro in range(2):  # whose losses nobody reads: that would wait
                    engine.backward(forward(engine, step, micro))
                    engine.step()
    return sorted(set(model.faults)), len(model.streams)


def faults(stage: int, scheme: str, zero: dict[str, Any], lost: str = "nothing") -> list[str]:
    environment = {"TEST_PROCESS_GROUP": "own"}
    ((found, streams),) = run(_faults, 1, stage, scheme, zero, lost, environment=environment)
    assert streams > 4
    return found


@pytest.mark.parametrize(
    ("stage", "scheme", "zero"),
    [
        (3, "sdp4bit", PREFETCH), (3, "lossless_g3", PREFETCH), (3, "qsdp", PREFETCH),
        (3, "full_precision", {}), (2, "sdp4bit", {}), (2, "lossless_g3", {}), (2, "eden3", {}),
        (2, "sdp4bit", OFFLOAD), (3, "sdp4bit", OFFLOAD),
    ],
    ids=str,
)  # fmt: skip
def test_every_operation_knows_that_what_it_touches_is_done(
    stage: int, scheme: str, zero: dict[str, Any]
) -> None:
    assert faults(stage, scheme, zero) == []


@pytest.mark.parametrize(
    ("lost", "scheme"), [("barrier", "qsdp"), ("barrier", "sdp4bit"), ("recorded", "sdp4bit")]
)
def test_a_lost_order_is_noticed(lost: str, scheme: str) -> None:
    assert any("ds_quant/" in fault for fault in faults(3, scheme, PREFETCH, lost))
