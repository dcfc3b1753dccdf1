"""The plugin in four tests. Read this file first: one message, one sum, attaching, one step.

The first two run every rank as a thread of this process, on messages in memory. The others start
two processes that communicate over gloo.
"""

from __future__ import annotations

import torch
from torch import nn

import ds_quant
from ds_quant.codec.bound import BoundCodec
from ds_quant.codec.codec import GroupCodec
from ds_quant.comm.rows import all_gather
from tests.distributed.harness import on_ranks
from tests.distributed.models import engine_of, live, train_step
from tests.world import SimulatedRank, World

NUMEL = 4096


def test_one_message_gathers_a_weight_in_8_bits() -> None:
    # ZeRO-3 gives each of two ranks one half of the weight.
    weight = torch.linspace(-1, 1, NUMEL)
    shards = weight.chunk(2)
    codec = GroupCodec(bits=8, group_size=1024)
    world = World(nodes=1, node_size=2)

    def gather(rank: SimulatedRank) -> torch.Tensor:
        link = rank.run.world.hierarchy.flat
        pending = all_gather([shards[rank.number]], [NUMEL], [BoundCodec(codec)], link)
        return pending.wait()[0]

    first, second = world.all(gather)

    # Every rank uses decoded values, its own shard's too, so all ranks hold the same bits.
    assert torch.equal(first, second)
    # 255 steps cover the range of a group; rounding to the nearest code is off by half a step.
    group_range = weight[1023] - weight[0]
    assert (first - weight).abs().max() <= group_range / 255 / 2 * 1.001
    # 2,048 codes of one byte, then the fp32 scales and the fp32 offsets of two groups. Each of the
    # three parts is padded to a multiple of 16 bytes.
    message_bytes = 2048 + 16 + 16
    assert codec.wire_bytes(NUMEL // 2) == message_bytes
    assert world.ranks[0].run.traffic.received["weights"] == {"intra": message_bytes, "inter": 0}


def test_one_sum_averages_a_gradient_over_the_ranks() -> None:
    module = nn.Linear(NUMEL, 1, bias=False)
    gradients = [torch.linspace(0, 1, NUMEL), torch.linspace(0, 3, NUMEL)]
    world = World(nodes=1, node_size=2, module=module, stage=3, scheme="qsdp")

    def reduce(rank: SimulatedRank) -> torch.Tensor:
        bucket = rank.reduction.begin(
            params=[module.weight], tensors=[gradients[rank.number]], group=None
        )
        return bucket.finish()[0]

    shards = world.all(reduce)

    # Each rank gets the mean of its shard, (numel / ranks,).
    mean = (gradients[0] + gradients[1]) / 2
    assert [shard.shape for shard in shards] == [(NUMEL // 2,), (NUMEL // 2,)]
    # Stochastic rounding is off by less than one step of each gradient, and here by some.
    step = (gradients[0][1023] + gradients[1][1023]) / 255 / 2
    error = (torch.cat(shards) - mean).abs().max()
    assert 0 < error <= step * 1.001


@on_ranks(2)
def test_a_block_in_the_config_attaches_the_plugin() -> None:
    assert ds_quant.report(engine_of(stage=3, block=None)) is None
    engine = engine_of(stage=3, block={"scheme": "qsdp"})
    assert ds_quant.report(engine)["scheme"] == "qsdp"


@on_ranks(2)
def test_one_step_of_training_sends_compressed_messages() -> None:
    received = {}
    for scheme in ("full_precision", "qsdp"):
        engine = engine_of(stage=3, block={"scheme": scheme})
        # The training code is DeepSpeed's: forward, engine.backward(loss), engine.step().
        before = live(engine)
        train_step(engine, 0)
        assert live(engine) != before
        received[scheme] = ds_quant.report(engine)["received_bytes"]
    for role in ("weights", "gradients"):
        full_precision = received["full_precision"][role]["intra"]
        assert 0 < received["qsdp"][role]["intra"] < 0.6 * full_precision
