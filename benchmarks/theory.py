"""The theorems of both papers, on small problems with the codecs of this package.

stall           SGD that keeps only quantized weights (QSDP): a quadratic of 50 dimensions
counterexample  weights replaced by their codes, and differences to what was sent (SDP4Bit)
random_walk     how far a replica that is sent differences lags behind its master (SDP4Bit)

tests/unit/test_theory.py holds their results to the theorems. May import torch and the codecs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_quant.codec.bound import Rotation, decode, decode_sum, encode
from ds_quant.codec.codec import GroupCodec
from ds_quant.kernels.random_bits import Address, Role, key_of

ROUNDINGS = ("nearest", "random_shift", "stochastic")
STEPS_OF_GRID = (0.5, 0.1, 0.02)


def address(step: int, *, rank: int = 0, role: Role = Role.WEIGHTS) -> Address:
    """Return the address of the random bits of a step."""
    return Address(key_of(seed=1, role=role, parameter=0, rank=rank + 1), step)


def coded(values: Tensor, codec: GroupCodec, at: Address | None = None) -> Tensor:
    """Return what ``values``, (numel,) fp32, decode to."""
    wire = torch.empty(1, codec.wire_bytes(values.numel()), dtype=torch.uint8)
    decoded = torch.empty(1, values.numel())
    encode(codec, values.view(1, -1), wire, address=at)
    decode(codec, wire, decoded)
    return decoded[0]


# ---- QSDP: only quantized weights are kept ----


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """f(x) = sum of c_i x_i^2 / 2 with c between 1 and 4."""

    numel: int = 50
    rate: float = 0.02
    steps: int = 1000

    @property
    def curvature(self) -> Tensor:
        return torch.linspace(1, 4, self.numel)

    def start(self) -> Tensor:
        return torch.randn(self.numel, generator=torch.Generator().manual_seed(0))

    def value(self, x: Tensor) -> float:
        return float((self.curvature.double() * x.double().square()).sum() / 2)


def stall(rounding: str, grid: float, problem: Quadratic | None = None) -> Iterator[float]:
    """Yield f before every step of x <- Q(x - rate grad f), and after the last one.

    grid: distance of the points that Q rounds to, the same in all steps: two elements of a group,
        put at its ends in every step, fix the range of its 8-bit codes.
    """
    problem = problem or Quadratic()
    codec = GroupCodec(bits=8, group_size=64, range="minmax", rounding=rounding)
    end = grid * 255 / 2
    x = problem.start()
    group = torch.zeros(codec.group_size)
    for step in range(problem.steps):
        yield problem.value(x)
        group[: problem.numel] = x - problem.rate * problem.curvature * x
        group[-2], group[-1] = -end, end
        x = coded(group, codec, address(step))[: problem.numel]
    yield problem.value(x)


# ---- SDP4Bit: differences to what was sent ----


def follow(replica: Tensor, master: Tensor, codec: GroupCodec, *, step: int) -> None:
    """Bring a replica nearer to its master by one quantized difference, as all receivers do.

    replica: (numel,), changed in place.
    """
    wire = torch.empty(1, codec.wire_bytes(replica.numel()), dtype=torch.uint8)
    values, reference = master.to(replica.dtype).view(1, -1), replica.view(1, -1)
    encode(codec, values, wire, address=address(step), base=reference)
    decode(codec, wire, reference, add=True)


def counterexample() -> dict[str, float]:
    """Return the largest weight after 400 steps from (1, -1), for three ways of keeping weights.

    SDP4Bit, counterexample 4.1: f(w) = |w|^2 with one coordinate's gradient at a time, nearest
    rounding to {-m, 0, m}.
    """
    ternary = GroupCodec(bits=2, group_size=32, range="absmax")
    coins = torch.randint(0, 2, (400,), generator=torch.Generator().manual_seed(0))

    def gradient(w: Tensor, coin: int) -> Tensor:
        found = torch.zeros(2)
        found[coin] = 4 * w[coin]
        return found

    exact = torch.tensor([1.0, -1.0])
    replaced, master, replica = exact.clone(), exact.clone(), exact.clone()
    for step, coin in enumerate(coins.tolist()):
        exact = exact - 0.1 * gradient(exact, coin)
        replaced = coded(replaced - 0.1 * gradient(replaced, coin), ternary)
        master = master - 0.1 * gradient(replica, coin)
        follow(replica, master, ternary, step=step)
    return {
        "not quantized": float(exact.abs().max()),
        "replaced by codes": float(replaced.abs().max()),
        "differences": float(replica.abs().max()),
    }


def random_walk(lr: float, codec: GroupCodec, steps: int = 120) -> float:
    """Return the largest distance of a replica to its master, in distances of a bf16 copy.

    Weights of 0.02 take Adam's steps where gradients are noise: lr times their running mean.
    """
    generator = torch.Generator().manual_seed(1)
    master = 0.02 * torch.randn(1 << 15, generator=generator)
    replica, moment = master.bfloat16(), torch.zeros_like(master)
    worst = 0.0
    for step in range(steps):
        moment = 0.9 * moment + 0.1 * torch.randn(master.shape, generator=generator)
        master -= lr * moment
        follow(replica, master, codec, step=step)
        copied = (master.bfloat16().float() - master).norm()
        worst = max(worst, float((replica.float() - master).norm() / copied))
    return worst


# ---- SDP4Bit: gradients over two levels ----


def two_level_error(sources: Tensor, *, block: int) -> float:
    """Return the squared error of a sum over its energy: 8 bits inside nodes of two, 4 between.

    sources: (2 * nodes, numel) fp32.
    block: elements of the Hadamard transform; 0: none.
    """
    int8 = GroupCodec(bits=8, group_size=128, range="absmax", rounding="stochastic")
    int4 = GroupCodec(bits=4, group_size=128, range="absmax", rounding="stochastic")
    rotation = Rotation(block=block) if block else None
    ranks, numel = sources.shape
    wire = torch.empty(ranks, int8.wire_bytes(numel), dtype=torch.uint8)
    for rank in range(ranks):
        at = address(0, rank=rank, role=Role.GRADIENTS)
        encode(int8, sources[rank, None], wire[rank, None], address=at, rotation=rotation)
    between = torch.empty(ranks // 2, int4.wire_bytes(numel), dtype=torch.uint8)
    partial_sum = torch.empty(numel)
    for node in range(ranks // 2):
        decode_sum(int8, wire[2 * node : 2 * node + 2], partial_sum)
        at = address(1, rank=node, role=Role.GRADIENTS)
        encode(int4, partial_sum[None], between[node, None], address=at)
    total = torch.empty(numel)
    decode_sum(int4, between, total, rotation=rotation)
    exact = sources.double().sum(0)
    return float((total.double() - exact).square().sum() / exact.square().sum())
