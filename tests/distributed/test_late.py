"""Gradients that travel while backward goes on (CPU, ZeRO-3) are those of a backward that waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_quant
from tests.distributed.features import Tied
from tests.distributed.harness import run
from tests.distributed.models import QSDP, Regression, build, digests, masters, settings, train_step
from tests.thin import thinned

pytestmark = pytest.mark.distributed

STEPS = 3
SMALL = {"reduce_bucket_size": 17_000}  # two to four buckets


class Phases(Regression):
    """Backward in phases of its own, through one layer twice."""

    def body(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        again = checkpoint(self.second, hidden.square(), use_reentrant=True)
        return again + checkpoint(self.second, hidden, use_reentrant=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """late: whether shards are stored late, whatever the version of DeepSpeed."""

    late: bool = True
    dtype: str = "bf16"
    model: type[nn.Module] = Regression
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1


ON_CPU = {"device": "cpu"}
OFFLOAD = {"offload_optimizer": ON_CPU, "offload_param": ON_CPU}
CASES = {
    "bf16": Case(),
    "fp32, several backwards": Case(dtype="fp32", accumulation=3),
    "a bucket per parameter": Case(zero={"reduce_bucket_size": 1}),
    "several parameters in a bucket": Case(zero={"reduce_bucket_size": 70_000}),
    "one bucket": Case(zero={"reduce_bucket_size": 10**9}),
    "shards cast by DeepSpeed": Case(late=False, top={"data_types": {"grad_accum_dtype": "fp32"}}),
    "shared parameter": Case(model=Tied),
    "backward in phases": Case(model=Phases),
    "offload": Case(zero=OFFLOAD, accumulation=2, top={"zero_force_ds_cpu_optimizer": False}),
    "clipping": Case(top={"gradient_clipping": 0.1}),
    "watched": Case(),
}


def outcomes(block: dict[str, Any], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Name of a case -> losses, weights and bytes, without and with overlap, and how many buckets
    were under way with each when the next was posted.
    """
    from ds_quant.zero.cpu_overlap import LateReduction

    depths: list[int] = []
    partition = LateReduction.partition

    def counted(self: Any, *args: Any) -> None:
        if not self._begun.finished:
            depths.append(len(self._under_way))
        partition(self, *args)

    LateReduction.partition = counted
    found: dict[str, list[Any]] = {}
    for name in names:
        case = CASES[name]
        for overlap in (False, True):
            depths.clear()
            zero = {**SMALL, **case.zero, "overlap_comm": overlap}
            fallback = {"fallback": {"on_nonfinite": "full_precision"}} if name == "watched" else {}
            config = settings(
                3, {**block, **fallback}, dtype=case.dtype, accumulation=case.accumulation,
                zero=zero, **case.top,
            )  # fmt: skip
            engine = build(config, case.model)
            losses = [train_step(engine, step) for step in range(STEPS)]
            received = engine.ds_quant_plugin.traffic.received
            found.setdefault(name, []).append((losses, digests(masters(engine)), received))
            engine.destroy()
        found[name].append(list(depths))
    return found


SOME = ("fp32, several backwards", "a bucket per parameter", "backward in phases")
BLOCKS = {
    "two hops": ({"scheme": "sdp4bit", "node_size": 2}, tuple(CASES)),
    "one hop": (QSDP, SOME),
    "one hop, exact own": ({"scheme": "tlq_hs", "node_size": 4}, SOME),
}


@pytest.mark.parametrize("name", thinned(BLOCKS, lambda name: name == "two hops"))
def test_overlap_changes_no_weight_no_loss_and_no_byte(name: str) -> None:
    for found in run(outcomes, 4, *BLOCKS[name], timeout=240):
        for name, (waiting, overlapping, depths) in found.items():
            assert overlapping == waiting, name
            assert depths or not CASES[name].late, name
        assert max(found["a bucket per parameter"][-1]) == 2


def lines() -> dict[tuple[bool, int], str]:
    """The start-up line, with and without overlap, by size of a bucket."""
    found = {}
    for overlap in (False, True):
        for room in (SMALL["reduce_bucket_size"], 10**9):
            zero = {"reduce_bucket_size": room, "overlap_comm": overlap}
            engine = build(settings(3, QSDP, zero=zero))
            found[overlap, room] = ds_quant.report(engine)["line"]
            engine.destroy()
    return found


def test_the_line_says_that_one_bucket_holds_all_gradients() -> None:
    for found in run(lines, 2):
        said = {case for case, line in found.items() if "gradients are not reduced during" in line}
        assert said == {(True, 10**9)}
        assert "reduce_bucket_size=1000000000 holds all" in found[True, 10**9]
