"""Scheme state in DeepSpeed's checkpoint: other versions, runs without the plugin, and checkpoints
that are loaded by other ranks or nodes than saved them.

Another node size is this plugin's business alone. Another world size is refused by DeepSpeed in
all stages (``test_deepspeed_refuses_...``) unless the checkpoint was made universal by its
``ds_to_universal``, which under ZeRO-1 and 2 wants ``--inject_missing_state``; then all stages
work. The script runs inside rank 0, with one worker each, as for unit tests.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import pytest
import torch

from tests import needs
from tests.distributed.harness import on_ranks, run, run_each, scratch
from tests.distributed.models import (
    QSDP,
    engine_of,
    exact,
    heard,
    master_bits,
    save,
    train_step,
    train_steps,
    watch,
)
from tests.thin import thinned

LEARNED = {
    "scheme": "qsdp",
    "weights": {"bits": 4, "rounding": "nearest", "levels": "learned", "level_steps": [2, 5]},
}
SDP4BIT = {"scheme": "sdp4bit", "allow_full_replica": True}


CROSSINGS = {
    "plain to learned": (None, LEARNED),
    "learned to plain": (LEARNED, None),
    "to sdp4bit": (QSDP, SDP4BIT),
    "from sdp4bit": (SDP4BIT, QSDP),
    "learned away": (LEARNED, SDP4BIT),
}
# Away from the plugin, and to weights that are kept.
QUICK_CROSSINGS = ("learned to plain", "to sdp4bit")


@pytest.mark.parametrize("crossing", thinned(CROSSINGS, lambda title: title in QUICK_CROSSINGS))
@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_checkpoints_cross_between_schemes(stage: int, crossing: str) -> None:
    saving, loading = CROSSINGS[crossing]
    engine = engine_of(stage, saving)
    train_steps(engine, 3)
    save(engine)
    engine.destroy()
    engine = engine_of(stage, loading, seed=7)
    engine.load_checkpoint(str(scratch()), tag="middle")
    assert train_steps(engine, 3, 3)[-1] < 0.9


@pytest.mark.parametrize("stage", thinned([2, 3], lambda stage: stage == 3))
@on_ranks()
def test_a_checkpoint_without_state_resets_learned_levels(stage: int) -> None:
    """An engine that has learned some goes on as a fresh one."""
    engine = engine_of(stage, None)
    save(engine)
    engine.destroy()
    outcomes = []
    for learned in (0, 3):
        engine = engine_of(stage, LEARNED, seed=7)
        train_steps(engine, learned)
        engine.load_checkpoint(str(scratch()), tag="middle")
        outcomes.append((train_steps(engine, 2), master_bits(engine)))
        engine.destroy()
    assert outcomes[0] == outcomes[1]


def _without_ranks(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in ("ranks", "learned_at")}


def _one_rank_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"ranks": (2,)}


def _short_table(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"first.weight": torch.arange(15.0)}}


def _no_number(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"levels": {"last.weight": torch.full((16,), float("nan"))}}


VERSION = "the state in the checkpoint has version {}, this ds_quant reads 1"
DAMAGED = "the state in the checkpoint has no usable {}: it is incomplete"
# A state, or what has gone wrong with a good one -> what is said.
FOREIGN: list[tuple[Any, str]] = [
    ({"version": 2}, VERSION.format(2)),
    ({"version": None}, VERSION.format(None)),
    ("text", VERSION.format("'str'")),
    (_without_ranks, DAMAGED.format("ranks, learned_at")),
    (_one_rank_number, DAMAGED.format("ranks")),
    (_short_table, DAMAGED.format("levels['first.weight']")),
    (_no_number, DAMAGED.format("levels['last.weight']")),
]


@on_ranks(timeout=120)
def test_a_state_of_another_version_or_a_damaged_one_is_refused_by_name() -> None:
    from ds_quant.zero import checkpoint

    dump = checkpoint.dump
    for state, wanted in FOREIGN:
        changed = state if callable(state) else lambda _, state=state: state
        checkpoint.dump = lambda plugin, changed=changed: changed(dump(plugin))
        engine = engine_of(2, QSDP, dtype="fp32")
        save(engine)
        engine.destroy()
        engine = engine_of(2, QSDP, dtype="fp32")
        with pytest.raises(Exception, match="remove the key 'ds_quant'") as caught:
            engine.load_checkpoint(str(scratch()), tag="middle")
        assert wanted in str(caught.value)
        engine.destroy()


# ---- other ranks and nodes ----

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
    """Load a checkpoint; return its state, the weights of the first forward, and later losses."""
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


@pytest.mark.parametrize("node_size", thinned([1, 4], lambda node_size: node_size == 1))
def test_another_node_size_refills_kept_weights_and_says_so(saved: Saved, node_size: int) -> None:
    block = SCHEMES[saved.scheme] | {"node_size": node_size}
    ranks = run(_load, 4, saved.stage, block, saved.folder, "here")
    _check(saved, ranks, f"{4 // node_size} x {node_size}")
    assert ranks[0]["losses"][0] == pytest.approx(saved.losses[0], rel=0.01)


def test_deepspeed_refuses_another_world_size_without_conversion(saved: Saved) -> None:
    for _, error in run_each(_load, 2, saved.stage, SCHEMES[saved.scheme], saved.folder, "here"):
        assert "used a DP world size of 4 but the current world size is 2" in error
