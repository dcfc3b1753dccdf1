"""Notices of the start-up line: weights that a scheme would compress, but not on these nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ds_quant.fsdp2.sharded_module import ShardedModule
from ds_quant.policy.route import Routes


def weights_in_full(routes: Routes, modules: Sequence[ShardedModule]) -> list[str]:
    """Return why weights are sent in full precision although the scheme compresses them."""
    scheme = routes.scheme
    if scheme.weights is None and not scheme.lossless:
        return []
    dtypes = {sharded.dtype for sharded in modules}
    full = [dtype for dtype in dtypes if routes.weights(dtype=dtype).is_full_precision]
    if full and routes.nodes == 1:
        return [
            "weights are sent in full precision: this scheme compresses them between nodes only, "
            'and there is one node; use scheme "qsdp"'
        ]
    if scheme.lossless and not all(map(scheme.sends_lossless, dtypes)):
        return [
            "fp32 weights are sent in full precision: lossless differences take 16 bits; give "
            "MixedPrecisionPolicy param_dtype=torch.bfloat16"
        ]
    return []
