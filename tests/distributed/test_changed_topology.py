"""Checkpoints that are loaded by other ranks or nodes than saved them.

Another node size is this plugin's business alone. Another world size is refused by DeepSpeed in
all stages (``test_deepspeed_refuses_...``) unless the checkpoint was made universal by its
``ds_to_universal``, which under ZeRO-1 and 2 wants ``--inject_missing_state``; then all stages
work. The script runs inside rank 0, with one worker each, as for unit tests.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import pytest

from tests import needs
from tests.distributed.harness import run, run_each
from tests.distributed.models import (
    engine_of,
    exact,
    heard,
    master_bits,
    train_step,
    train_steps,
    watch,
)
from tests.thin import thinned

SCHEMES = {
    "qsdp": {"scheme": "qsdp"},
    "sdp4bit": {"scheme": "sdp4bit", "allow_full_replica": True},
}
STEPS = 3


def _save(stage: int, block: dict, folder: str) -> tuple[dict[str, str], list[float]]:
    """Bits of the masters of a run of two nodes of two ranks, and its next losses."""
    from deepspeed import comm as dist
    from deepspeed.checkpoint import ds_to_universal

    engine = engine_of(stage, block | {"node_size": 2})
    train_steps(engine, STEPS)
    engine.save_checkpoint(folder, "here")
    dist.barrier()
    if dist.get_rank() == 0:
        ds_to_universal.main(
            Namespace(
                input_folder=f"{folder}/here", output_folder=f"{folder}/universal",
                num_extract_workers=1, num_merge_workers=1,
                keep_temp_folder=False, strict=True, inject_missing_state=True,
            )
        )  # fmt: skip
    dist.barrier()
    return master_bits(engine), train_steps(engine, STEPS, STEPS)


def _load(stage: int, block: dict | None, folder: str, tag: str) -> dict[str, Any]:
    """What a run finds in the checkpoint, what its first forward sees, and how it goes on."""
    said = heard()
    checkpoint = {"load_universal": tag == "universal"}
    engine = engine_of(stage, block, checkpoint=checkpoint, seed=7)
    engine.load_checkpoint(folder, tag=tag)
    found: dict[str, Any] = {
        "said": [line for line in said if "resuming" in line],
        "masters": master_bits(engine),
        "exact": exact(engine, "bf16"),
        "steps": engine.global_steps,
    }
    with watch(engine) as seen:
        found["losses"] = train_step(engine, STEPS)
    found["used"] = {s.name: s.bits for s in seen if s.forward}
    found["losses"] += train_steps(engine, STEPS - 1, STEPS + 1)
    return found


class Saved(NamedTuple):
    """A checkpoint and what was in it."""

    stage: int
    scheme: str
    folder: str
    masters: dict[str, str]
    losses: list[float]


@pytest.fixture(
    scope="module",
    params=thinned(
        [((1, "sdp4bit"),), ((2, "qsdp"),), ((3, "qsdp"),), ((3, "sdp4bit"),)],
        ((2, "qsdp"), (3, "sdp4bit")).__contains__,
    ),
    ids=lambda p: f"zero{p[0]}-{p[1]}",
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    stage, scheme = request.param
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    (found, *_) = run(_save, 4, stage, SCHEMES[scheme], folder, timeout=180)
    return Saved(stage, scheme, folder, *found)


def _check(saved: Saved, ranks: list[dict[str, Any]], nodes: str) -> None:
    """Exact masters, equal weights on all ranks, kept ones refilled exactly, and one line. On one
    node ZeRO-3 keeps nothing: gathers carry exact weights.
    """
    line = f"quantized_comm: resuming {saved.scheme} of 2 x 2 ranks as {saved.scheme} on {nodes}"
    if saved.scheme == "sdp4bit" and not (saved.stage == 3 and nodes == "1 x 4"):
        line += "; weights kept between steps start exact"
    assert ranks[0]["said"] == [line]
    for found in ranks:
        assert found["steps"] == STEPS
        assert found["masters"] == saved.masters
        assert found["used"] == ranks[0]["used"]
        assert found["used"].keys() == found["exact"].keys()
        if saved.scheme == "sdp4bit":  # differences: nothing has changed since the refill
            assert found["used"] == found["exact"]
        else:
            differ = {name for name, bits in found["used"].items() if bits != found["exact"][name]}
            assert differ == {"first.weight", "second.weight", "last.weight"}
        assert found["losses"][-1] < 0.75 * found["losses"][0]


def test_a_universal_checkpoint_is_loaded_by_half_the_ranks_in_other_nodes(saved: Saved) -> None:
    if saved.stage < 3:
        needs.deepspeed("0.19", "loads other masters from a universal checkpoint, plugin or not")
    block = SCHEMES[saved.scheme] | {"node_size": 1}
    ranks, plain = (
        run(_load, 2, saved.stage, own, saved.folder, "universal") for own in (block, None)
    )
    _check(saved, ranks, "2 x 1")
    for found, uncompressed in zip(ranks, plain, strict=True):
        assert uncompressed["masters"] == saved.masters
        first, last = (abs(found["losses"][i] / uncompressed["losses"][i] - 1) for i in (0, -1))
        # Equal weights give equal losses; 8-bit ones are off by up to half a step, 1 / 510 of the
        # range of their group.
        assert first == 0 if saved.scheme == "sdp4bit" else first < 0.01
        assert last < 0.05


@pytest.mark.parametrize("node_size", [1, 4])
def test_another_node_size_refills_kept_weights_and_says_so(saved: Saved, node_size: int) -> None:
    block = SCHEMES[saved.scheme] | {"node_size": node_size}
    ranks = run(_load, 4, saved.stage, block, saved.folder, "here")
    _check(saved, ranks, f"{4 // node_size} x {node_size}")
    assert ranks[0]["losses"][0] == pytest.approx(saved.losses[0], rel=0.01)


def test_deepspeed_refuses_another_world_size_without_conversion(saved: Saved) -> None:
    for _, error in run_each(_load, 2, saved.stage, SCHEMES[saved.scheme], saved.folder, "here"):
        assert "used a DP world size of 4 but the current world size is 2" in error
