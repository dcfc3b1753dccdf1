"""Refill cached copies of weights that have drifted.

Differences are added to the values that a rank holds. One lost or changed bit would therefore stay
in the weights, and no error would show it.
"""

from __future__ import annotations

from functools import partial

from ds_quant.runtime import log
from ds_quant.runtime.copies import brought_back, differing_ranks
from ds_quant.zero import accelerator
from ds_quant.zero.message_check import check_messages
from ds_quant.zero.plugin import Plugin, WeightCache


def compare_copies(plugin: Plugin, cache: WeightCache) -> None:
    """Compare the copies every ``checksum_steps`` optimizer steps; refill all if any differ.

    Runs after the optimizer step, once the copies have the new weights.
    """
    step = plugin.step + 1
    if step % plugin.scheme.block.checksum_steps != 0:
        return
    differing = _differing(plugin, cache)
    if differing:
        plugin.state.resyncs += 1
        log.log_rank0(brought_back(step, differing, "engine"))
        cache.resync()


def _differing(plugin: Plugin, cache: WeightCache) -> list[int]:
    """Return the ranks whose copies differ from those of most holders."""
    return differing_ranks(
        cache.comparable_weights(),
        plugin.hierarchy(None).flat,
        accelerator.device(),
        step=plugin.step + 1,
        check_messages=partial(check_messages, plugin),
    )
