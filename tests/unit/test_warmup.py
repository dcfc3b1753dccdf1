"""What the rehearsal launches, connects and waits for, without ranks.

test_rehearsal.py compares it with training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_quant.codec.codec import CastCodec, Codec, GroupCodec
from ds_quant.comm.reduction_plan import ReductionHop
from ds_quant.config.schema import parse_block
from ds_quant.kernels.batch import Decode, Encode, Operation
from ds_quant.kernels.dispatch import Operations, RngState
from ds_quant.policy.route import Routes
from ds_quant.runtime import warmup
from ds_quant.runtime.warmup import MessageKinds, message_kinds, warm_up, warm_up_kernels

BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
CPU = torch.device("cpu")
RAGGED, WHOLE = 9, 16384  # elements; the second fills whole blocks of every codec here


def communicator(rank: int, size: int) -> Any:
    return Mock(rank=rank, size=size, node_size=2)


def run_of(block: dict[str, Any], *, stage: int = 3, node_size: int = 2) -> Any:
    """Return a run on two nodes, as far as the rehearsal asks."""
    scheme = parse_block({"backend": "torch", **block}).to_scheme()
    routes = Routes(scheme=scheme, stage=stage, nodes=2, node_size=node_size)
    return SimpleNamespace(scheme=scheme, routes=routes)


def kinds_of(**changes: Any) -> MessageKinds:
    """Return the kinds of a run that sends nothing but for the changes."""
    nothing: dict[str, Any] = {
        "weight_dtypes": [], "gradient_dtype": BF16, "reducing": [], "all_levels": [],
        "crosses_once": False, "has_few_ranks": False,
    }  # fmt: skip
    return MessageKinds(**nothing | changes)


# ---- kernels ----


class Launch(NamedTuple):
    """Operations that were launched at once. buffers: dtype and elements of each."""

    operations: list[Operation]
    buffers: list[tuple[torch.dtype, int]]


class Launches(list[Launch]):
    """The launches of a rehearsal, whose streams and buffers fit their operations."""

    def add(
        self, operations: Operations, buffers: Sequence[Tensor], rng: RngState, *, backend: str
    ) -> None:
        assert backend == "torch"
        assert all(buffer.device == CPU for buffer in buffers)
        for operation, offsets in operations.tasks:
            if hasattr(operation, "values"):
                stop = offsets.values + operation.numel
                assert stop <= buffers[operation.values].numel()
            codec = getattr(operation, "fuse_with", None) or operation.codec
            bound, rotation = rng.bound_codecs[operation.stream], rng.rotations[operation.stream]
            assert bound.codec == codec
            block = getattr(operation, "block", 0)
            if block:
                assert rotation is not None and rotation.block == block
                if hasattr(operation, "flips"):
                    assert (rotation.signs is not None) == bool(operation.flips)
            if isinstance(codec, CastCodec):
                assert rotation is None
        streams = {operation.stream for operation, _ in operations.tasks}
        assert not streams or len(rng.arrays.key) == len(streams)
        self.append(
            Launch(
                [operation for operation, _ in operations.tasks],
                [(buffer.dtype, buffer.numel()) for buffer in buffers],
            )
        )


def rehearsed(run: Any, kinds: MessageKinds, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Return what is launched on the CPU, where tensors without a device are on another one."""
    launches = Launches()
    monkeypatch.setattr(
        Operations, "run", lambda self, *args, **options: launches.add(self, *args, **options)
    )
    with torch.device("meta"):
        warm_up_kernels(run, kinds, CPU)
    return launches


def transfers(codec: Codec, dtype: torch.dtype, *, is_difference: bool = False) -> list[Launch]:
    """Return the launches that encode and decode, alone and two at once."""
    found = []
    for numel, jobs in product((RAGGED, WHOLE), (1, 2)):
        buffers = [(dtype, numel), (U8, codec.wire_bytes(numel)), (dtype, numel)]
        base = 2 if is_difference else None
        encode: list[Operation] = [
            Encode(codec, numel, values=0, wire=1, stream=job, base=base) for job in range(jobs)
        ]
        decode: list[Operation] = [
            Decode(codec, numel, wire=1, values=2, stream=job, add=is_difference)
            for job in range(jobs)
        ]
        found += [Launch(encode, buffers), Launch(decode, buffers)]
    return found


def test_weights_are_rehearsed_in_every_dtype_with_the_codecs_of_all_hops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Differences between the nodes, 8 bits inside, and casts of what stays exact."""
    run = run_of({"scheme": "sdp4bit", "weights": {"intra": {"bits": 8}}})
    between, inside = run.scheme.weights, run.scheme.weights_intra
    assert rehearsed(run, kinds_of(weight_dtypes=[BF16, FP32]), monkeypatch) == [
        launch
        for dtype in (BF16, FP32)
        for launch in (
            *transfers(CastCodec(dtype), dtype),
            *transfers(between, dtype, is_difference=True),
            *transfers(inside, dtype),
        )
    ]


@pytest.mark.parametrize("has_few_ranks", [False, True])
def test_weights_that_part_of_the_ranks_share_have_a_route_of_their_own(
    has_few_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of one rank exchange differences alone. Experts on some of them are gathered with the
    codec of gathers inside nodes.
    """
    run = run_of({"scheme": "sdp4bit", "weights": {"intra": {"bits": 8}}}, node_size=1)
    wanted = transfers(CastCodec(BF16), BF16)
    wanted += transfers(run.scheme.weights, BF16, is_difference=True)
    if has_few_ranks:
        wanted += transfers(run.scheme.weights_intra, BF16)
    kinds = kinds_of(weight_dtypes=[BF16], has_few_ranks=has_few_ranks)
    assert rehearsed(run, kinds, monkeypatch) == wanted


@pytest.mark.parametrize(("stage", "delivers"), [(1, True), (2, True), (3, False)])
def test_sums_that_are_delivered_to_their_owners_are_rehearsed_in_fp32(
    stage: int, delivers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With at least 8 bits, or in the dtype of the gradients."""
    run = run_of({"scheme": "sdp4bit"}, stage=stage)
    four_bits = run.scheme.gradients
    assert isinstance(four_bits, GroupCodec) and four_bits.bits == 4
    delivery = run.routes.gradients().delivery
    launches = rehearsed(run, kinds_of(gradient_dtype=FP16), monkeypatch)
    if not delivers:
        assert delivery is None and launches == []
        return
    assert delivery.codec.bits == 8
    assert launches == [*transfers(CastCodec(FP16), FP32), *transfers(delivery.codec, FP32)]


def test_exact_sums_are_delivered_as_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of({"scheme": "full_precision"}, stage=2)
    assert rehearsed(run, kinds_of(), monkeypatch) == transfers(CastCodec(BF16), FP32)


def test_lossless_differences_are_rehearsed_alone_and_two_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equal weights and of weights that differ everywhere."""
    encoded: list[tuple[int, float, int]] = []

    def encode(messages: Any, used: Tensor, *, backend: str) -> None:
        assert backend == "torch" and used.device == CPU
        assert used.dtype == torch.int64 and not used.any()
        for values, reference, wire in messages:
            assert values.dtype == reference.dtype == BF16 and wire.dtype == U8
            assert wire.numel() == warmup.max_bytes(values.numel())
            assert not reference.any() and {each.device for each in (values, wire)} == {CPU}
        assert len({wire.data_ptr() for _, _, wire in messages}) == len(messages) == len(used)
        (change,) = {values.float().unique().item() for values, _, _ in messages}
        encoded.append((len(messages[0][0]), change, len(messages)))
        used.copy_(torch.arange(40, 40 + len(messages), device=CPU))
        encode.first = messages[0][2]  # type: ignore[attr-defined]

    def decode(
        wire: Tensor, starts: Any, lengths: Any, old: Tensor, into: Tensor, status: Tensor,
        *, backend: str,
    ) -> None:  # fmt: skip
        numel, _, rows = encoded[-1]
        assert backend == "torch" and wire is encode.first  # type: ignore[attr-defined]
        assert isinstance(starts, np.ndarray) and starts.tolist() == [0] * rows
        assert lengths.tolist() == [40, 41][:rows]
        assert old.shape == into.shape == (rows, numel) and not old.any()
        assert old.dtype == into.dtype == BF16
        assert status.dtype == torch.int32 and status.tolist() == [[0, 0]] * rows
        assert {each.device for each in (old, into, status)} == {CPU}
        decoded.append(rows)

    decoded: list[int] = []
    monkeypatch.setattr(warmup, "encode_lossless", encode)
    monkeypatch.setattr(warmup, "decode_lossless", decode)
    run = run_of({"scheme": "lossless"})
    launches = rehearsed(run, kinds_of(weight_dtypes=[BF16, FP32]), monkeypatch)
    assert encoded == [*product((9, 4096), (0, 1), (1, 2))]  # bf16 alone
    assert decoded == [rows for _, _, rows in encoded]
    casts = transfers(CastCodec(BF16), BF16), transfers(CastCodec(FP32), FP32)
    assert launches == [*casts[0], *casts[1]]


# ---- kernels of reductions ----


def name_of(codec: Codec) -> str:
    """Return the dtype of a cast, and range and bits of groups: a4 for absmax."""
    if isinstance(codec, CastCodec):
        return {BF16: "bf16", FP32: "fp32"}[codec.dtype]
    assert isinstance(codec, GroupCodec)
    return f"{codec.range[0]}{codec.bits}"


def in_words(operation: Any, buffers: Sequence[tuple[torch.dtype, int]]) -> str:
    """Return an operation with all that its kernel depends on, but for sizes."""
    kind, codec = type(operation).__name__.lower(), name_of(operation.codec)
    if kind == "recode":
        words = f"recode {name_of(operation.source)} as {codec}"
    elif kind == "sum":
        dtype = name_of(CastCodec(buffers[operation.values][0]))
        words = f"sum of {operation.sources} {codec} to {dtype}"
        words += f" x {operation.scale:.2f}" if operation.scale != 1 else ""
        words += ", without own" if operation.own_row is None else ""
        if operation.fuse_with is not None:
            words += f", then {name_of(operation.fuse_with)}"
    else:
        words = f"{kind} {name_of(CastCodec(buffers[operation.values][0]))} as {codec}"
    if getattr(operation, "block", 0):
        words += f", rotated by {operation.block}"
        words += f", signs {int(operation.flips)}" if getattr(operation, "flips", 0) else ""
    return words


INSIDE = ReductionHop(communicator=communicator(1, 2), full_precision_own=True)
BETWEEN = ReductionHop(communicator=communicator(0, 2), divisor=2, full_precision_own=True)

# The number of launches in sixes: of 9 and of 16384 elements, one and two at once.
# Casts are the same in all schemes: gradients of steps in full precision.
EXACT_CROSSING_ONCE = {
    "rotate bf16 as bf16": 16,
    "encode bf16 as bf16": 8,  # to the other rank of the node, of two scales and two dtypes
    "encode fp32 as bf16": 4,  # the held sums, to the other node
    "recode bf16 as bf16": 4,
    "sum of 1 bf16 to fp32": 10,
    "sum of 1 bf16 to fp32, then bf16": 4,
    "sum of 1 bf16 to fp32 x 0.33": 2,
    "sum of 1 bf16 to bf16": 2,
    "sum of 1 bf16 to bf16 x 0.33": 2,
}
REDUCTIONS: dict[str, tuple[dict[str, Any], int, Sequence[ReductionHop], dict[str, int]]] = {
    "a rotation without signs": (
        {"scheme": "sdp4bit"},
        3,
        (INSIDE, BETWEEN),
        {
            "rotate bf16 as a8, rotated by 32": 16,
            "encode bf16 as a8, rotated by 32": 8,
            "encode fp32 as a4": 4,
            "recode a8 as a4, rotated by 32": 4,
            "sum of 1 a8 to fp32": 8,
            "sum of 1 a8 to fp32, then a4": 4,
            "sum of 1 a4 to fp32, rotated by 32": 2,
            "sum of 1 a4 to fp32 x 0.33, rotated by 32": 2,
            "sum of 1 a4 to bf16, rotated by 32": 2,
            "sum of 1 a4 to bf16 x 0.33, rotated by 32": 2,
            **EXACT_CROSSING_ONCE,
        },
    ),
    "signs of every node": (
        {"scheme": "eden3", "gradients": {"rotation_signs": "node"}},
        3,
        (INSIDE, BETWEEN),
        {
            "rotate bf16 as a8, rotated by 128, signs 1": 16,
            "encode bf16 as a8, rotated by 128, signs 1": 8,
            "encode fp32 as g3": 4,
            "recode a8 as g3, rotated by 128": 4,
            "sum of 1 a8 to fp32": 8,
            "sum of 1 a8 to fp32, then g3": 4,
            "sum of 1 g3 to fp32, rotated by 128, signs 2": 2,
            "sum of 1 g3 to fp32 x 0.33, rotated by 128, signs 2": 2,
            "sum of 1 g3 to bf16, rotated by 128, signs 2": 2,
            "sum of 1 g3 to bf16 x 0.33, rotated by 128, signs 2": 2,
            **EXACT_CROSSING_ONCE,
        },
    ),
    "one hop, of four ranks": (
        {"scheme": "qsdp"},
        3,
        (ReductionHop(communicator=communicator(1, 4)),),
        {
            "encode bf16 as m8": 8,  # two reducers, of which none gets the values as they are
            "sum of 4 m8 to fp32, without own": 1,
            "sum of 4 m8 to fp32 x 0.33, without own": 1,
            "sum of 4 m8 to bf16, without own": 1,
            "sum of 4 m8 to bf16 x 0.33, without own": 1,
            "encode bf16 as bf16": 8,
            "sum of 4 bf16 to fp32, without own": 1,
            "sum of 4 bf16 to fp32 x 0.33, without own": 1,
            "sum of 4 bf16 to bf16, without own": 1,
            "sum of 4 bf16 to bf16 x 0.33, without own": 1,
        },
    ),
}  # fmt: skip


def level_of(hops: Sequence[ReductionHop], returning: Any = None) -> Any:
    hierarchy = SimpleNamespace(intra=hops[0].communicator if len(hops) > 1 else None)
    return SimpleNamespace(hops=tuple(hops), hierarchy=hierarchy, returning=returning)


def rehearsed_reductions(
    run: Any, levels: Sequence[Any], monkeypatch: pytest.MonkeyPatch, **kinds: Any
) -> Launches:
    """Return the launches of reductions, without those of deliveries."""
    once = run.routes.gradients().keeps_partial_sums
    how = {"crosses_once": once, "reducing": levels, **kinds}
    return rehearsed(run, kinds_of(**how), monkeypatch)


def counted(launches: Launches) -> dict[str, float]:
    """Return the operations in words, and their number in sixes."""
    words = Counter(in_words(each, buffers) for all_, buffers in launches for each in all_)
    return {word: number / 6 for word, number in words.items()}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_a_reduction_is_rehearsed_with_every_kernel_that_it_takes(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums have the dtype of the gradients or fp32, and the factor 1 or another one. Equal levels
    are rehearsed once.
    """
    block, stage, hops, wanted = REDUCTIONS[case]
    run = run_of(block, stage=stage)
    launches = rehearsed_reductions(run, [level_of(hops), level_of(hops)], monkeypatch)
    assert counted(launches) == wanted


def test_the_memory_of_a_rehearsed_reduction_is_as_large_as_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By elements: bytes of a message of bf16 and of 8 bits, which end at multiples of 16, and the
    elements of a contribution in fp32. 8 bits have a scale of 4 bytes for 128 elements, and whole
    rotation blocks of 32.
    """
    run = run_of({"scheme": "sdp4bit"})
    launches = rehearsed_reductions(run, [level_of((INSIDE, BETWEEN))], monkeypatch)
    found = set()
    for _, (messages, own, messages_again, own_again, sums, *tensors) in launches:
        assert messages == messages_again and own == own_again
        assert messages[0] == U8 and own[0] == FP32
        assert {*tensors} == {(BF16, sums[1])} and sums[0] in (BF16, FP32)
        found.add((sums[1], len(tensors), messages[1], own[1]))
    assert found == {
        (RAGGED, 1, 32, 0), (RAGGED, 1, 32, 16), (RAGGED, 1, 48, 0), (RAGGED, 1, 48, 32),
        (RAGGED, 2, 64, 0), (RAGGED, 2, 64, 32), (RAGGED, 2, 96, 0), (RAGGED, 2, 96, 64),
        (WHOLE, 1, 32768, 0), (WHOLE, 1, 32768, 16384),
        (WHOLE, 1, 16384 + 512, 0), (WHOLE, 1, 16384 + 512, 16384),
        (WHOLE, 2, 65536, 0), (WHOLE, 2, 65536, 32768),
        (WHOLE, 2, 32768 + 1024, 0), (WHOLE, 2, 32768 + 1024, 32768),
    }  # fmt: skip


def test_sums_that_are_not_held_cross_with_their_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of({"scheme": "sdp4bit", "gradients": {"cross": "micro_step"}})
    launches = rehearsed_reductions(run, [level_of((INSIDE, BETWEEN))], monkeypatch)
    words = counted(launches)
    assert "encode fp32 as a4" not in words and words["recode a8 as a4, rotated by 32"] == 4
    assert words["sum of 1 a4 to bf16, rotated by 32"] == 1
    one_hop = rehearsed_reductions(run, [level_of((INSIDE,))], monkeypatch, crosses_once=True)
    again = rehearsed_reductions(run, [level_of((INSIDE,))], monkeypatch, crosses_once=False)
    assert one_hop == again and one_hop  # one hop has no later one


def test_a_slice_of_a_rehearsal_has_all_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the user asks for more slices."""
    made = [level_of((INSIDE, BETWEEN))]
    usual = rehearsed_reductions(run_of({"scheme": "sdp4bit"}), made, monkeypatch)
    hops = [
        ReductionHop(
            communicator=hop.communicator,
            divisor=hop.divisor,
            full_precision_own=True,
            slicing=warmup.Slicing(count=3),
        )
        for hop in (INSIDE, BETWEEN)
    ]
    cut = rehearsed_reductions(run_of({"scheme": "sdp4bit"}), [level_of(hops)], monkeypatch)
    assert cut == usual


def test_nothing_is_reduced_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = level_of((ReductionHop(communicator=communicator(0, 1)),))
    assert rehearsed_reductions(run_of({"scheme": "qsdp"}), [alone], monkeypatch) == []


@pytest.mark.parametrize(
    ("rank", "reducers"), [(0, [0, 1, 2]), (1, [1, 0, 3]), (4, [4, 5, 0]), (5, [5, 4, 1])]
)
def test_a_rehearsal_sends_to_one_rank_over_each_hop(rank: int, reducers: list[int]) -> None:
    """On three nodes of two ranks: to itself, to the other rank of its node, to the next node."""
    hops = [
        ReductionHop(communicator=communicator(rank % 2, 2)),
        ReductionHop(communicator=communicator(rank // 2, 3), divisor=2),
    ]
    assert warmup._reducers(hops) == reducers


# ---- kernels of sums on their way back ----


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (
            {"scheme": "eden4"},
            {
                "encode fp32 as g5, rotated by 128, signs 1": 1,
                "sum of 1 g5 to bf16, without own, rotated by 128, signs 1": 1,
            },
        ),
        (
            {"scheme": "eden4", "gradients": {"rotation_signs": "node"}},
            {
                "encode fp32 as g5, rotated by 128, signs 1": 1,
                "sum of 1 g5 to bf16, without own, rotated by 128, signs 1": 1,
            },
        ),
        (
            {"scheme": "sdp4bit"},
            {
                "encode fp32 as a5, rotated by 32": 1,
                "sum of 1 a5 to bf16, without own, rotated by 32": 1,
            },
        ),
        ({"scheme": "full_precision"}, {}),
    ],
)
def test_sums_on_their_way_back_are_rehearsed(
    block: dict[str, Any], wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sum has one sender, so nodes have no signs of their own."""
    run, hops = run_of(block, stage=0), (INSIDE, BETWEEN)
    whole = rehearsed_reductions(run, [level_of(hops, communicator(1, 4))], monkeypatch)
    assert level_of(hops).returning is None
    without = rehearsed_reductions(run, [level_of(hops)], monkeypatch)
    assert whole[: len(without)] == without
    returned = Launches(whole[len(without) :])
    casts = {"encode fp32 as bf16": 1, "sum of 1 bf16 to bf16, without own": 1}
    assert counted(returned) == {**casts, **wanted}
    for (_, sent), (_, received) in zip(returned[::2], returned[1::2], strict=True):
        (wire, sums), (wires, result, unused) = sent, received
        assert wires == (U8, 4 * wire[1]) and result == (BF16, sums[1])
        assert sums == unused and sums[0] == FP32 and sums[1] in (RAGGED, WHOLE)
    # 9 and 16384 elements in bf16; in 5 bits whole rotation blocks, with a scale of 128 elements: 2
    # bytes for Gaussian levels, else 4. Codes and messages end at multiples of 16 bytes.
    messages = [sent[0][1] for _, sent in returned[::2]]
    assert messages[:4] == [32, 64, 32768, 65536]
    if wanted:
        ragged, whole = (48, 10240 + 512) if block["scheme"] == "sdp4bit" else (96, 10240 + 256)
        assert messages[4:] == [ragged, 2 * ragged, whole, 2 * whole]


# ---- kinds of messages ----


def sent(dtype: torch.dtype, *, weights: bool = True, gradients: bool = True) -> Any:
    """Return a parameter that the codecs serve, but for weights or gradients."""
    return SimpleNamespace(dtype=dtype, stock_weights=not weights, stock_gradients=not gradients)


def kinds_with(*of_levels: list[Any], stage: int = 3, stock: bool = False) -> MessageKinds:
    """Return the kinds of a run with parameters of some levels, and one that it does not list."""
    run = run_of({"scheme": "sdp4bit"}, stage=stage)
    run.workload = SimpleNamespace(params=of_levels, stock_gradients=stock, gradient_dtype=FP16)
    run.levels = [SimpleNamespace(routes=run.routes)]
    return message_kinds(run, run.levels)


def test_the_dtypes_of_a_rehearsal_are_those_of_gathered_weights() -> None:
    """Floating-point ones that no library gathers itself, in an order of all ranks."""
    kinds = kinds_with([sent(FP32), sent(BF16), sent(U8)], [sent(FP16, weights=False), sent(BF16)])
    assert kinds.weight_dtypes == [BF16, FP32] and kinds.gradient_dtype == FP16
    assert kinds_with([sent(FP32)], stage=0).weight_dtypes == []


@pytest.mark.parametrize(
    ("stock", "served", "reduces"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_gradients_that_the_library_reduces_are_not_rehearsed(
    stock: bool, served: bool, reduces: bool
) -> None:
    of_level = [sent(BF16, gradients=False), sent(BF16, gradients=served)]
    kinds = kinds_with(of_level, stock=stock)
    assert len(kinds.all_levels) == 1
    assert list(kinds.reducing) == (list(kinds.all_levels) if reduces else [])


def test_the_rehearsal_knows_levels_of_few_ranks_and_sums_that_are_held() -> None:
    run = run_of({"scheme": "sdp4bit"})
    run.workload = SimpleNamespace(params=[], stock_gradients=False, gradient_dtype=BF16)
    held, at_once = (
        SimpleNamespace(routes=run_of({"scheme": "sdp4bit"}, stage=stage).routes)
        for stage in (3, 1)
    )
    run.levels = [held]
    found = [message_kinds(run, levels) for levels in ([held], [at_once], [held, at_once])]
    assert [kinds.crosses_once for kinds in found] == [True, False, True]
    assert [kinds.has_few_ranks for kinds in found] == [False, True, True]


def test_the_kinds_of_messages_are_given_by_name_and_do_not_change() -> None:
    kinds = kinds_of()
    with pytest.raises(FrozenInstanceError):
        kinds.crosses_once = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        MessageKinds([], BF16, [], [], False, False)  # type: ignore[misc]


# ---- connections ----


class Ranks:
    """A communicator that notes its collectives. Uncounted ones note theirs for it."""

    def __init__(self, name: str, size: int, noted: list[tuple[Any, ...]]) -> None:
        self.name, self.size, self._noted = name, size, noted

    def all_gather(self, payload: Tensor, *, role: str) -> Any:
        assert payload.device == CPU and payload.dtype == U8 and not payload.any()
        self._noted.append(("gather", self.name, payload.numel(), role))
        return self

    def all_to_all(self, payload: Tensor, *, sent: Any, received: Any, role: str) -> Any:
        assert payload.device == CPU and payload.dtype == U8 and not payload.any()
        assert payload.numel() == sum(sent)
        self._noted.append(("exchange", self.name, list(sent), list(received), role))
        return self

    def wait(self) -> None:
        self._noted[-1] = "waited", *self._noted[-1]


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_are_connected_by_the_collectives_that_they_use(stage: int) -> None:
    """Gradients inside a node may have process groups of their own, which gather nothing. Under
    ZeRO-1 and 2 all ranks deliver sums to each other.
    """
    noted: list[tuple[Any, ...]] = []
    flat, intra, inter, own, alone = (
        Ranks(name, size, noted)
        for name, size in (("flat", 4), ("intra", 2), ("inter", 3), ("own", 2), ("alone", 1))
    )
    run = run_of({"scheme": "sdp4bit"}, stage=stage)
    run.device, run.communicators = CPU, lambda: [flat, alone, intra, inter, own]
    run.uncounted = lambda each: Ranks(f"uncounted {each.name}", each.size, noted)
    hierarchy = SimpleNamespace(flat=flat, intra=intra, inter=inter, gradients=own)
    level = SimpleNamespace(
        hierarchy=hierarchy,
        hops=[SimpleNamespace(communicator=own), SimpleNamespace(communicator=inter)],
    )
    with torch.device("meta"):
        warmup._connect(run, kinds_of(all_levels=[level], reducing=[level]))
    exchange = ("waited", "exchange", "uncounted flat", [1] * 4, [1] * 4, "gradients")
    assert noted == [
        ("waited", "gather", "uncounted flat", 1, "weights"),
        *([exchange] if stage == 2 else []),
        ("waited", "gather", "uncounted intra", 1, "weights"),
        ("waited", "gather", "uncounted inter", 1, "weights"),
        ("waited", "exchange", "uncounted inter", [1] * 3, [1] * 3, "gradients"),
        ("waited", "exchange", "uncounted own", [1, 1], [1, 1], "gradients"),
    ]


@pytest.mark.parametrize("gradients", ["none", "those of the node"])
def test_a_process_group_that_weights_share_is_connected_for_gathers(gradients: str) -> None:
    noted: list[tuple[Any, ...]] = []
    intra = Ranks("intra", 2, noted)
    run = run_of({"scheme": "sdp4bit"})
    run.device, run.communicators, run.uncounted = CPU, lambda: [intra], lambda each: each
    hierarchy = SimpleNamespace(intra=intra, gradients=None if gradients == "none" else intra)
    warmup._connect(run, kinds_of(all_levels=[SimpleNamespace(hierarchy=hierarchy)]))
    assert noted == [("waited", "gather", "intra", 1, "weights")]


# ---- who compiles first ----


@pytest.mark.parametrize(
    ("rank", "kind", "wanted"),
    [
        (4, "cpu", ["compile", "set 4 done", "connect"]),
        (5, "cpu", ["wait for 4, 600 s", "compile", "connect"]),
        (6, "cuda", ["compile", "set 6 done", "connect", "synchronize"]),
        (7, "cuda", ["wait for 6, 600 s", "compile", "connect", "synchronize"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_rank_of_a_node_compiles_before_the_others(
    rank: int, kind: str, wanted: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its compilation fails: the others do not wait for ten minutes."""
    noted: list[str] = []
    store = SimpleNamespace(set=lambda key, value: noted.append(f"set {key} {value}"))
    run: Any = SimpleNamespace(
        topology=SimpleNamespace(all_ranks=(4, 5, 6, 7), node_size=2), device=torch.device(kind)
    )
    kinds = kinds_of()

    def wait(of: Any, keys: list[str], seconds: float) -> None:
        assert of is store
        noted.append(f"wait for {', '.join(keys)}, {seconds:.0f} s")

    def compile_kernels(*given: Any) -> None:
        assert given == (run, kinds, run.device)
        noted.append("compile")
        if fails:
            raise RuntimeError("no compiler")

    def connect(*given: Any) -> None:
        assert given == (run, kinds)
        noted.append("connect")

    def synchronize(device: torch.device) -> None:
        assert device == run.device
        noted.append("synchronize")

    stores = {("rehearsals", rank): store}
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(warmup, "store_of_call", lambda name, caller: stores[name, caller])
    monkeypatch.setattr(warmup, "wait_for_keys", wait)
    monkeypatch.setattr(warmup, "warm_up_kernels", compile_kernels)
    monkeypatch.setattr(warmup, "_connect", connect)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    if fails:
        with pytest.raises(RuntimeError, match="no compiler"):
            warm_up(run, kinds)
        wanted = wanted[: wanted.index("connect")]
    else:
        warm_up(run, kinds)
    assert noted == wanted
