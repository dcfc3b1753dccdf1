"""Contacts with DeepSpeed's private names that only ZeRO-1 and 2 need; see hooks.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ds_quant.zero import hooks
from ds_quant.zero.hooks import Buckets, ExpectedCall, Hooks, moved, require
from ds_quant.zero.version import FAULTS, deepspeed_version

BUCKET, _REDUCE_TO_OWNERS = "average_tensor", "allreduce_and_copy_with_multiple_ranks"

_TO_HOST = "async_accumulate_grad_in_cpu_via_gpu"

_weight_gather = ExpectedCall("all_gather_dp_groups")
_to_owners = ExpectedCall(_REDUCE_TO_OWNERS)


# ---- gradients ----


def wrap_owner_reduction(
    hooks: Hooks,
    around_bucket: Callable[..., AbstractContextManager[None]],
    reduce: Callable[..., Any],
) -> None:
    """ZeRO-1/2: ``around_bucket(tensor, params, divisor)`` is open while a bucket is cut into
    slices by owner, ``reduce(original, call)`` replaces the reduction of slices, which is
    ``original(**call)``, and divides by ``divisor``.
    """
    optimizer = hooks.optimizer
    require(optimizer, _REDUCE_TO_OWNERS)
    signature = inspect.signature(getattr(optimizer, _REDUCE_TO_OWNERS))

    def bucket(original: Callable[..., Any], tensor: torch.Tensor, dtype: Any, **kw: Any) -> Any:
        groups = optimizer.bit16_groups
        params = [groups[i][k] for i, k, _ in optimizer.ipg_buckets[dtype].params]
        called = _to_owners.expected(excused=lambda: tensor.numel() == 0)
        with _undivided(optimizer) as divisor, around_bucket(tensor, params, divisor), called:
            return original(tensor, dtype, **kw)

    def slices(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _to_owners.calls += 1
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return reduce(original, call.arguments)

    hooks.wrap(optimizer, BUCKET, bucket)
    hooks.wrap(optimizer, _REDUCE_TO_OWNERS, slices)


@contextmanager
def _undivided(optimizer: Any) -> Iterator[float]:
    """Inside, DeepSpeed does not divide a bucket ahead of its reduction, which would take a pass of
    its own; yields what is left to divide by. Before 0.19 it cannot be told and leaves nothing.
    """
    from deepspeed import comm as dist

    if not getattr(optimizer, "gradient_average", False):
        yield 1.0
        return
    optimizer.gradient_average = False
    try:
        ranks = dist.get_world_size(group=optimizer.dp_process_group)
        yield ranks / optimizer.sequence_parallel_size
    finally:
        optimizer.gradient_average = True


_LISTS = "small_bucket", "bucket_ranks", "output_bucket"  # the last one not in 0.17


def sorted_out(
    call: dict[str, Any], *, alone: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The arguments of a reduction for the slices that several ranks need, and for those of one;
    ``alone``: there is one rank, all its slices are of the first kind. None for no slices.
    """
    owners = owners_of(call)
    whole = [i for i, ranks in enumerate(owners) if alone or len(ranks) > 1]
    if not whole or len(whole) == len(owners):
        return (call, None) if whole else (None, call)
    single = sorted({*range(len(owners))} - {*whole})
    return _only(call, whole), _only(call, single)


def _only(call: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    lists = {name: call[name] for name in _LISTS if call.get(name) is not None}
    return {**call, **{name: [values[i] for i in places] for name, values in lists.items()}}


def owners_of(call: dict[str, Any]) -> list[frozenset[int]]:
    """The ranks that need each slice, named by rank or, from 0.19.3 on, by sets of ranks."""
    return [r if isinstance(r, frozenset) else frozenset((r,)) for r in call["bucket_ranks"]]


def owner_buckets(optimizer: Any) -> Buckets:
    """The same as ``shard_buckets`` of ZeRO-2."""
    require(optimizer, "reduce_ipg_grads")

    def flush() -> None:
        if hasattr(optimizer, "setup_buckets"):  # before 0.18.3 every backward sets them up
            optimizer.setup_buckets()
        optimizer.reduce_ipg_grads()
        if optimizer.overlap_comm:  # on a stream that may still read what is filled next
            hooks.synchronize()

    def reduce_zeros(params: Sequence[Any]) -> None:
        groups = {id(p): i for i, group in enumerate(optimizer.bit16_groups) for p in group}
        for p in params:
            p.grad = torch.zeros_like(p)
            optimizer.reduce_ready_partitions_and_remove_grads(p, groups[id(p)])

    return flush, reduce_zeros


def lost_gradients(engine: Any, optimizer: Any, *, waiting: bool) -> Iterator[str]:
    """Say which gradients this version of DeepSpeed loses itself, and since when it does not.

    waiting: they wait for the last micro-step; what is forgotten before it are zeros then.
    """
    import deepspeed

    steps = engine.gradient_accumulation_steps()
    for fault in FAULTS if optimizer.partition_gradients else ():
        if fault.offload != bool(optimizer.cpu_offload) or not fault.is_in(deepspeed.__version__):
            continue
        if fault.accumulation > (1 if waiting else steps):
            continue
        depends = fault.accumulation > 1
        needs = f"gradient_accumulation_steps={steps}" if depends else "a model that has one"
        yield (
            f"{deepspeed_version()} {fault.loses} under ZeRO-2, with and without this plugin: "
            f"{needs} needs DeepSpeed {fault.until} or newer, or zero_optimization.stage 1 or 3"
        )


def skip_zero_gradients(hooks: Hooks, waits: Callable[[Any], bool]) -> None:
    """ZeRO-2 with an offloaded optimizer: do not add gradients of parameters that wait, zeros, to
    those of the first micro-step on the host.
    """
    optimizer = hooks.optimizer

    def accumulate(original: Callable[..., Any], param: Any) -> Any:
        known = optimizer.get_param_id(param) in optimizer.accumulated_grads_in_cpu
        if not known or optimizer.micro_step_id == 0 or not waits(param):
            original(param)

    if getattr(optimizer, "cpu_offload", False):
        hooks.wrap(optimizer, _TO_HOST, accumulate)


def add_to_partition(optimizer: Any, output: torch.Tensor | None, values: torch.Tensor) -> None:
    """Accumulate into DeepSpeed's fp32 gradient partition, where this version has one."""
    if output is not None:
        optimizer._add_to_grad_partition_buffer(output, values)


# ---- updated weights ----


class _Untouched:
    """Stands for this rank's partition of the replica during ``optimizer.step``: what DeepSpeed
    copies into it is dropped, because the next difference is taken from what the replica holds.
    A group of one rank gathers nothing and keeps what is copied.
    """

    @property
    def data(self) -> _Untouched:
        return self

    def copy_(self, *_: Any, **__: Any) -> _Untouched:
        return self


@contextmanager
def _replica_untouched(optimizer: Any) -> Iterator[None]:
    from deepspeed import comm as dist

    rows = optimizer.parallel_partitioned_bit16_groups
    ranks = [dist.get_rank(group=group) for group in optimizer.real_dp_process_group]
    kept = [row[rank] for row, rank in zip(rows, ranks, strict=True)]
    for row, rank in zip(rows, ranks, strict=True):
        if len(row) > 1:
            row[rank] = _Untouched()
    try:
        yield
    except (AttributeError, TypeError) as error:
        if _Untouched.__name__ in str(error):  # read, as only its own gather does
            raise moved(_weight_gather.name) from error
        raise
    finally:
        for row, rank, partition in zip(rows, ranks, kept, strict=True):
            row[rank] = partition


def weight_gather(
    optimizer: Any, gather: Callable[[], None], *, keep_replica: bool
) -> Callable[[], AbstractContextManager[None]]:
    """ZeRO-1/2: a context for ``optimizer.step`` in which ``gather()`` replaces the gather of
    updated weights. ``keep_replica``: this rank's partition of the replica keeps the old weights
    until then.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    _weight_gather.install(stage_1_and_2)
    require(optimizer, "parallel_partitioned_bit16_groups")

    @contextmanager
    def replaced() -> Iterator[None]:
        untouched = _replica_untouched(optimizer) if keep_replica else nullcontext()
        gathering = _weight_gather.through(
            lambda *a, **k: gather(), excused=lambda: bool(optimizer.overflow)
        )
        with untouched, gathering:
            yield

    return replaced


def finish_background_save(engine: Any) -> None:
    """Wait for a checkpoint that is written in the background, as DeepSpeed does before a step: it
    is read from the replica. A collective.
    """
    if getattr(engine.checkpoint_engine, "is_decoupled", lambda: False)():  # not in 0.17
        engine._commit_decoupled_checkpoint()


def require_replica(optimizer: Any) -> None:
    """Raise RuntimeError if ``offload_states`` has taken the replica off the device."""
    if "lp_params" in getattr(optimizer, "offloaded_states", ()):
        raise RuntimeError(
            "quantized_comm: what is saved or exported is first gathered exactly, but "
            "offload_states has taken the weights off the device: call reload_states before"
        )


def refresh_replica(optimizer: Any, gather: Callable[[], None]) -> None:
    """ZeRO-1/2: copy the master weights into the own partition, then ``gather()``."""
    with _weight_gather.through(lambda *a, **k: gather()):
        optimizer.update_lp_params()


class ReplicaGroup(NamedTuple):
    """One parameter group of ZeRO-1/2."""

    index: int
    flat: torch.Tensor  # the replica, (ranks * partition,)
    params: list[torch.Tensor]  # views of it
    process_group: Any
    master: torch.Tensor  # fp32 weights of this rank's partition, (partition,), on any device

    def updated(self, within: range, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """New weights of a range of the partition, (elements,), as the replica has them.

        Of an offloaded optimizer they are copied and then rounded on the device; otherwise the
        host would round them, and wait.
        """
        values = empty(len(within), dtype=self.flat.dtype, device=self.flat.device)
        return values.copy_(self.master[within.start : within.stop], non_blocking=True)


def replica_groups(optimizer: Any) -> Iterator[ReplicaGroup]:
    """The parameter groups of a ZeRO-1/2 optimizer. Where it flattens with autograd on (0.18.9),
    slices of the replica could not be written to.
    """
    fields = zip(
        [f.detach() if f.requires_grad else f for f in optimizer.bit16_groups_flat],
        optimizer.bit16_groups,
        optimizer.real_dp_process_group,
        optimizer.single_partition_of_fp32_groups,
        strict=True,
    )
    yield from (ReplicaGroup(index, *values) for index, values in enumerate(fields))
