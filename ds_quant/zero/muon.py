"""Muon: what DeepSpeed sends for it by itself, because it needs whole matrices."""

from __future__ import annotations

from typing import Any

from ds_quant.zero import muon_hooks
from ds_quant.zero.plugin import Plugin


def attach(plugin: Plugin, optimizer: Any) -> None:
    """Count what an optimizer step of Muon gathers: exact gradients and its momentum."""
    itemsize = muon_hooks.boundary_itemsize(optimizer, plugin.stage)
    if not itemsize:
        return
    muon_hooks.count_gathers(
        plugin.hooks,
        lambda nbytes, group: plugin.link(group).count_ring(nbytes, role="gradients"),
    )
    matrices = [p for p in plugin.all_params() if getattr(p.tensor, "use_muon", False)]
    for param in matrices:
        param.boundary = itemsize
    share = sum(p.shape.numel() for p in matrices) / plugin.bill().numel
    plugin.notices.append(
        f"Muon gathers gradients and momentum itself, exactly: {itemsize * share:.2f} B/param/step"
    )


def note_whole_matrices(plugin: Plugin, optimizer: Any) -> None:
    """Leave gradients to DeepSpeed of which several ranks need all, under ZeRO-1 and 2."""
    whole = [plugin.param_of(p) for p in muon_hooks.whole_matrices(optimizer)]
    for param in whole:
        param.whole = True
    if whole:
        trained = sum(p.shape.numel() for p in plugin.all_params() if p.trained)
        share = sum(p.shape.numel() for p in whole) / trained
        plugin.notices.append(
            f"gradients of Muon matrices that lie on several ranks ({len(whole)}, "
            f"{100 * share:.1f} % of the elements) stay exact: Muon needs them whole"
        )
