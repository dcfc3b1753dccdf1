"""Sums that wait for the last micro-step, on ranks of one process: whatever turns up in which
bucket and when, the gradients of an optimizer step are the plain sums of its micro-steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ds_quant.kernels.wire import shard_range
from ds_quant.runtime.partial_sums import PartialSumsMemory
from ds_quant.zero import hooks, optimizer_hooks, shard_hooks
from ds_quant.zero.owner_gradients import OwnerReduction
from ds_quant.zero.partial_gradients import PartialGradients
from tests.world import SimulatedRank, World

A, B, C, D = NUMELS = (37, 300, 64, 5)
NAMES = "ABCD"
# Micro-steps with their buckets, and every bucket with its parameters. "-": the user drops the
# accumulation so far. "?" and "!" at the end: the remaining sums are reduced when the optimizer
# steps, not at the end of the backward. With "?" that backward was not declared to be the last one.
SCRIPTS = {
    "the same buckets": "AB,CD AB,CD AB,CD",
    "other buckets": "AB,CD A,BC,D ABCD",
    "other buckets in every micro-step": "AB,C,D A,BC,D AB,CD A,BCD",
    "no gradient at the end": "AB,CD CD,AB C",
    "no gradient at the end of what crossed": "AB,CD A,CD D",
    "only one at the end": "ABCD ABCD D",
    "no gradient at the end of another rank's": "AB,CD AB,C AB",
    "over afterwards": "AB,CD A,CD?",
    "over afterwards, of what crossed": "AB,CD A,CD!",
    "twice in a bucket": "AA,B AA,B",
    "abandoned": "AB,CD - A,B,CD",
    "abandoned, then the same buckets": "AB,CD AB,CD - AB,CD AB,CD",
    "abandoned with crossed sums": "AB,CD A,BCD - ABCD D",
}  # fmt: skip


def gradient(name: str, rank: int, micro: int, place: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    seed = torch.Generator().manual_seed(1000 * rank + 100 * micro + 10 * place + ord(name))
    return torch.randint(-50, 50, (NUMELS[NAMES.index(name)],), generator=seed).float()


class Accumulation:
    """One rank: reduces buckets as DeepSpeed hands them over and adds up what comes back.

    sums: by parameter, of its elements on this rank, zeros elsewhere. rest: places of what is given
    zeros, at every boundary.
    """

    def __init__(self, rank: SimulatedRank) -> None:
        self.rank, self.params = rank, list(rank.engine.module.parameters())
        self.owners = OwnerReduction(
            rank, rank.partial_gradients, SimpleNamespace(dp_process_group=None)
        )
        self.sums = [torch.zeros(numel) for numel in NUMELS]
        self.flush, self.rest = lambda: None, list[list[int]]()

    def reduce(self, params: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        world, mine = self.rank.run.topology.world, self.rank.number
        places = [next(i for i, own in enumerate(self.params) if own is p) for p in params]
        if self.rank.stage == 3:
            found = self.rank.reduction.begin(params, list(tensors), None).finish()
            parts = [shard_range(t.numel(), world, mine) for t in tensors]
        else:
            flat, found, parts, slices, owners = torch.cat(list(tensors)), [], [], [], []
            for place, values in zip(places, flat.split([len(t) for t in tensors]), strict=True):
                first = sum(NUMELS[:place])
                for owner in range(world):
                    start, stop = shard_range(sum(NUMELS), world, owner)
                    cut = [min(max(x - first, 0), len(values)) for x in (start, stop)]
                    if cut[0] < cut[1]:
                        slices.append(values[slice(*cut)])
                        owners.append(owner)
                    if owner == mine:
                        found.append(values[slice(*cut)])
                        parts.append(cut)
            call = {"small_bucket": slices, "bucket_ranks": owners}
            call |= {"process_group": None, "communication_data_type": flat.dtype}
            with self.owners.bucket(flat, params, float(world)):
                self.owners.reduce(lambda **_: None, call)
        for place, values, (start, stop) in zip(places, found, parts, strict=True):
            self.sums[place][start:stop] += values

    def reduce_zeros(self, params: Sequence[Any]) -> None:
        places = [next(i for i, own in enumerate(self.params) if own is p) for p in params]
        self.rest.append(places)
        self.reduce(params, [torch.zeros(p.numel()) for p in params])

    def run(self, script: str, meet: threading.Barrier) -> list[torch.Tensor]:
        steps = script.split()
        for micro, buckets in enumerate(steps):
            if meet.wait(20) == 0:
                engine = self.rank.engine
                engine.is_last_micro_step = micro == len(steps) - 1 and "?" not in buckets
                engine.global_steps += buckets == "-"
            meet.wait(20)
            if buckets == "-":
                for sums in self.sums:
                    sums.zero_()
                continue
            for names in buckets.rstrip("?!").split(","):
                tensors = [gradient(n, self.rank.number, micro, i) for i, n in enumerate(names)]
                self.reduce([self.params[NAMES.index(n)] for n in names], tensors)
            if buckets[-1] in "?!":
                rest = partial(
                    self.rank.partial_gradients.reduce_remaining, self.flush, self.reduce_zeros
                )
                epilogue = {"independent_gradient_partition_epilogue": rest}
                self.rank.partial_gradients.reduce_before_step(SimpleNamespace(**epilogue))
            else:
                self.rank.partial_gradients.reduce_remaining(self.flush, self.reduce_zeros)
            self.rank.after_backward()
        return self.sums


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("stage", (2, 3))
def test_gradients_are_the_plain_sums_of_all_micro_steps(stage: int, script: str) -> None:
    world = waiting_world(stage)
    meet, of_ranks = threading.Barrier(4), [Accumulation(rank) for rank in world.ranks]
    found = world.all(lambda rank: of_ranks[rank.number].run(script, meet))
    # Parameters without a gradient get zeros in module order on all ranks: else messages of
    # different parameters meet.
    for one in of_ranks:
        assert one.rest == of_ranks[0].rest == [sorted(places) for places in one.rest]
    for i, name in enumerate(NAMES):
        sum_of_ranks = sum(sums[i] for sums in found)  # each has its own elements, else zeros
        torch.testing.assert_close(sum_of_ranks, wanted_sum(name, script), rtol=0, atol=0)
    for rank in world.ranks:
        assert rank.partial_gradients.most_nbytes > 0
        assert rank.partial_gradients.nbytes == 0
        assert not rank.partial_gradients._reduced


def wanted_sum(name: str, script: str) -> torch.Tensor:
    """Return the mean over the ranks of all gradients of a parameter that were not dropped."""
    steps = script.split()
    begin = steps.index("-") + 1 if "-" in steps else 0
    wanted = torch.zeros(NUMELS[NAMES.index(name)])
    for micro, buckets in enumerate(steps):
        if micro < begin:
            continue
        for names in buckets.rstrip("?!").split(","):
            for place, in_bucket in enumerate(names):
                if in_bucket == name:
                    wanted += sum(gradient(name, rank, micro, place) for rank in range(4)) / 4
    return wanted


def waiting_world(stage: int, **block: Any) -> World:
    module = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for numel in NUMELS])
    return World(2, 2, module=module, stage=stage, micro_steps=2, scheme="full_precision", **block)


def test_sums_that_crossed_are_added_before_the_sum_is_rounded() -> None:
    """In bf16 257.5 is 258, and 257 alone is 256; so are the sums of both nodes exact."""

    def run(rank: SimulatedRank) -> torch.Tensor:
        first, second = list(rank.engine.module.parameters())[:2]
        rank.reduction.begin([first], [torch.full((A,), 0.5).bfloat16()], None).finish()
        meet.wait(20)
        rank.engine.is_last_micro_step = True
        value = torch.full((A,), 260.0 if rank.number == 3 else 256.0).bfloat16()
        both = [value, torch.zeros(B).bfloat16()]
        return rank.reduction.begin([first, second], both, None).finish()[0]

    meet, world = threading.Barrier(4), waiting_world(3)
    world.engine.is_last_micro_step = False
    for shard in world.all(run):
        assert shard.dtype == torch.bfloat16 and set(shard.tolist()) <= {258.0}


@pytest.mark.parametrize("then", ["the same bucket", "another bucket", "leaves the device"])
def test_what_waits_is_used_only_when_it_has_arrived(then: str) -> None:
    """Nobody has waited for the first micro-step when the second one begins."""

    def run(rank: SimulatedRank) -> list[torch.Tensor]:
        first, second = list(rank.engine.module.parameters())[:2]
        both = [torch.full((A,), 1.0 + rank.number), torch.full((B,), 2.0 + rank.number)]
        begun = rank.reduction.begin([first, second], list(both), None)
        if then == "leaves the device":
            rank.partial_gradients.leave_device(pin=False)
        meet.wait(20)
        rank.engine.is_last_micro_step = True
        turns = [[0], [1]] if then == "another bucket" else [[0, 1]]
        params, found = (first, second), []
        for turn in turns:
            tensors = [both[i] for i in turn]
            found += rank.reduction.begin([params[i] for i in turn], tensors, None).finish()
        begun.finish()
        return found

    meet, world = threading.Barrier(4), waiting_world(3)
    world.engine.is_last_micro_step = False
    for shards in world.all(run):
        assert [set(shard.tolist()) for shard in shards] == [{5.0}, {7.0}]  # 2 (1 + 3 / 2)


def test_a_bucket_is_the_rest_if_all_of_it_is() -> None:
    waiting = PartialGradients(None)
    waiting._zeroed = {"a", "b"}
    assert waiting.only_zeros([("a", -1), ("b", -1)])
    assert not waiting.only_zeros([("a", -1), ("c", -1)])


def test_zeros_are_not_added_to_shards_on_the_host() -> None:
    parameters = [SimpleNamespace(grad=0, waits=waits) for waits in (True, True, False)]
    put: list[Any] = []
    optimizer = SimpleNamespace(
        micro_step_id=0, partition_grads=lambda params, shards: put.append(params)
    )
    around = shard_hooks.skip_zero_shards(optimizer, lambda p: p.waits)
    hooks.Hooks(None, optimizer).wrap(optimizer, "partition_grads", around)
    waiting = parameters[:2]
    optimizer.partition_grads(waiting, [])
    assert put == [waiting]  # so that what DeepSpeed has from the last step is overwritten
    optimizer.micro_step_id = 1
    optimizer.partition_grads(waiting, [])
    assert put == [waiting] and all(p.grad is None for p in waiting)
    optimizer.partition_grads(parameters, [])
    assert put == [waiting, parameters]


def test_zeros_are_not_added_to_gradients_on_the_host() -> None:
    copied: list[Any] = []
    optimizer = SimpleNamespace(
        micro_step_id=0,
        cpu_offload=True,
        accumulated_grads_in_cpu={"seen": None},
        get_param_id=lambda param: param,
        async_accumulate_grad_in_cpu_via_gpu=copied.append,
    )
    optimizer_hooks.skip_zero_gradients(hooks.Hooks(None, optimizer), lambda param: True)
    optimizer.async_accumulate_grad_in_cpu_via_gpu("seen")
    optimizer.micro_step_id = 1
    optimizer.async_accumulate_grad_in_cpu_via_gpu("seen")
    optimizer.async_accumulate_grad_in_cpu_via_gpu("new")
    assert copied == ["seen", "new"]


def test_bytes_of_waiting_sums_are_counted_with_the_most_so_far() -> None:
    memory = PartialSumsMemory()
    assert (memory.nbytes, memory.most_nbytes, memory.running) == (0, 0, None)
    first, second = torch.zeros(3), torch.zeros(5, dtype=torch.float64)  # 12 and 40 bytes
    memory.hold(first)
    memory.hold(second)
    assert (memory.nbytes, memory.most_nbytes) == (52, 52)
    assert memory.release(second, Mock()) is second
    assert (memory.nbytes, memory.most_nbytes) == (12, 52)
    memory.hold(first)
    assert (memory.nbytes, memory.most_nbytes) == (24, 52)


def test_sums_are_released_when_the_last_reduction_has_added_to_them() -> None:
    memory, values = PartialSumsMemory(), torch.zeros(3)
    running, another = Mock(), Mock()
    memory.running = running
    memory.release(values, another)
    assert another.wait.call_count == 1 and memory.running is running, "it still runs"
    memory.release(values, running)
    assert running.wait.call_count == 1 and memory.running is None
    memory.wait()
    assert running.wait.call_count == 1, "nothing runs"
    memory.running = running
    memory.wait()
    assert running.wait.call_count == 2 and memory.running is None
