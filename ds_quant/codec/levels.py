"""Learned quantization levels of QSDP: one table of 2^bits values per tensor, fitted to its data.

Tables are fp32, ascending, in units of code steps: a value decodes to table[code] * scale +
offset, and the uniform table is 0, 1, 2, ... Pure functions; where and when tables are learned
and exchanged is the caller's business.

[Note: the online rule]
QSDP's rule is stochastic gradient descent on 1/2 (Q[i] - v)^2, one value after the other:
i = argmin_j |Q[j] - v|, then Q[i] -= a (Q[i] - v). Here a group is one batch: its values are
assigned to the levels as they stood before the group, and the n values v_0 ... v_(n-1) of a level
are then applied one after the other, exactly. With a fixed assignment that has a closed form,

    Q <- (1-a)^n Q + a * sum_j (1-a)^(n-1-j) v_j,

a weighted mean, so levels stay inside their cells and sorted whatever n is. (Adding the
gradients of a batch up instead diverges at 2 and 3 bits with a = 0.01.)
"""

from __future__ import annotations

import torch

from ds_quant.kernels.wire import ceil_div

MAX_GROUPS = 512
"""Groups looked at per update: 512 groups of 1024 are five passes over 100,000 values."""


def update_levels(
    levels: torch.Tensor,  # (2^bits,) fp32, ascending
    x: torch.Tensor,  # any shape, floating point
    *,
    group_size: int,
    rate: float,
    max_groups: int = MAX_GROUPS,
) -> torch.Tensor:
    """Return the table after one pass over the groups of x; see [Note: the online rule].

    x is read in order, flattened; groups are spread evenly over it when it has more than
    max_groups. Constant and non-finite groups are skipped; an empty x leaves the table unchanged.
    Deterministic. rate: between 0 and 1.
    """
    levels = levels.detach().clone()
    flat = x.detach().reshape(-1)
    num_groups = ceil_div(flat.numel(), group_size)
    count = min(num_groups, max_groups)
    for index in range(count):
        start = index * num_groups // count * group_size
        values = normalized(flat[start : start + group_size].float(), len(levels) - 1)
        if values is not None:
            _learn_group(levels, values, rate)
    return levels


def normalized(group: torch.Tensor, top: int) -> torch.Tensor | None:
    """Map a group (n,) fp32 to 0 .. top by its min and max; None without a usable range."""
    low, high = group.aminmax()
    span = float(high - low)
    if not 2.0**-99 <= span < float("inf"):
        return None
    return ((group - low) * (top / span)).clamp_(max=top)  # the product may round up past top


def _learn_group(levels: torch.Tensor, values: torch.Tensor, rate: float) -> None:
    """Apply one batch of the online rule in place. levels (2^bits,), values (n,), both fp32."""
    middles = (levels[1:] + levels[:-1]) / 2
    code = torch.bucketize(values, middles)  # ties to the lower level, as the codec does
    counts = torch.bincount(code, minlength=len(levels))
    # age[j]: how many values of the same level come after value j.
    order = torch.argsort(code, stable=True)
    ends = counts.cumsum(0)
    age = ends[code[order]] - 1 - torch.arange(len(values), device=values.device)
    keep = 1.0 - rate
    # fp64: weights of 1024 values and their sum must not add to the rounding of the table.
    weights = rate * torch.pow(keep, age.double())
    pull = torch.zeros(len(levels), dtype=torch.float64, device=levels.device)
    pull.index_add_(0, code[order], weights * values[order].double())
    levels.copy_(levels.double() * torch.pow(keep, counts.double()) + pull)


def merge_levels(
    tables: torch.Tensor,  # (ranks, 2^bits) fp32
    weights: torch.Tensor,  # (ranks,) any dtype, not negative, one of them positive
) -> torch.Tensor:
    """Average the tables of all ranks, (2^bits,) fp32, weighted and added in rank order.

    Every rank that holds the same bytes gets the same table. Weights are, for instance, the
    numbers of values seen.
    """
    weights = weights.double()
    total = torch.zeros(tables.shape[1], dtype=torch.float64, device=tables.device)
    for table, weight in zip(tables, weights, strict=True):
        total += table.double() * weight
    return (total / weights.sum()).to(torch.float32)
