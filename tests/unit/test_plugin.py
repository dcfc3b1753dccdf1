"""One engine's addresses, links and full precision, on stand-ins for DeepSpeed's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_quant.comm.topology import Topology
from ds_quant.config.schema import parse_block
from ds_quant.policy.route import Routes
from ds_quant.zero import plugin as module
from ds_quant.zero import report
from ds_quant.zero.plugin import Plugin, SchemeState


def plugin(**keys: Any) -> Plugin:
    """In optimizer step 5, of which one was skipped, with sums held between micro-steps."""
    made = object.__new__(Plugin)
    made.engine = SimpleNamespace(global_steps=5, skipped_steps=1, zero_optimization_stage=3)
    made.engine.gradient_accumulation_steps = lambda: 2
    made.waiting, made._backwards, made.state = object(), {}, SchemeState()
    made.stage, made.topology, made.shipped_gradients = 2, Topology(world=4, node_size=2), None
    scheme = parse_block({"scheme": "full_precision", **keys}).to_scheme()
    made.routes = Routes(scheme=scheme, stage=2, nodes=2, node_size=2)
    return made


@pytest.mark.parametrize(
    ("warmup", "until", "killed", "exact"),
    [(0, 0, False, 0), (3, 0, False, 3), (0, 2, False, 2), (2, 4, False, 4), (4, 2, False, 4),
     (0, 0, True, 6)],
)  # fmt: skip
def test_full_precision_lasts_for_the_warm_up_the_fallback_and_the_kill_file(
    warmup: int, until: int, killed: bool, exact: int
) -> None:
    made = plugin(warmup_steps=warmup)
    made.state.exact_until, made.state.killed = until, killed
    assert [made.is_exact(step) for step in range(6)] == [step < exact for step in range(6)]


def test_an_entry_of_a_schedule_is_due_once() -> None:
    state = SchemeState()
    due = [state.due((2, 5), step) for step in (1, 2, 3, 6, 7, 4)]  # step 5 is loaded over
    assert due == [False, True, False, True, False, False]
    assert state.learned_at == 7


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0, 2]])
def test_the_world_has_two_levels_and_a_part_of_it_one(ranks: list[int]) -> None:
    made = plugin()
    near, far = SimpleNamespace(size=2), SimpleNamespace(size=2)
    whole: Any = SimpleNamespace(ranks=ranks, size=len(ranks), rank=0, backend="auto")
    whole.encoding = whole.decoding = whole.empty = None
    made._fabrics, made._levels, made.link = {}, (near, far), lambda group: whole
    fabric = made.fabric(object())
    assert (fabric.intra is near) == (fabric.inter is far) == (len(ranks) == 4)


@pytest.mark.parametrize("cross", ["step", "micro_step"])
def test_what_is_saved_is_compared_with_full_precision_that_crosses_as_often(
    cross: str,
) -> None:
    """64 x 64 in fp32 over 2 x 2 ranks: half of a node's gradients comes from the other one."""
    made = plugin(gradients={"cross": cross})
    made.engine.communication_data_type = module.torch.float32
    weight: Any = module.torch.nn.Parameter(module.torch.empty(64, 64))
    made.all_params = lambda: [
        SimpleNamespace(
            name="w", shape=weight.shape, tensor=weight, packed=False, whole=False, boundary=0
        )
    ]
    made.gathers = 1.0
    found = made.received_in_full_precision()["gradients"]
    own = made.received_by_formula(made.bill())
    steps = {role: {at: 3 * n for at, n in links.items()} for role, links in own.items()}
    made.traffic = SimpleNamespace(received=steps)
    saved = report._saved(made, made.bill())["gradients"]
    for at in ("inter", "intra"):
        assert saved[at] == pytest.approx(3 * (found[at] - own["gradients"][at]))
    crossings = 1 if cross == "step" else 2
    assert found["inter"] == crossings * 4 * 64 * 64 / 2 / 2
    assert found["intra"] == 2 * 4 * 64 * 64 / 2
