"""Contacts with DeepSpeed's private names that only ZeRO-1 and 2 need; see hooks.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup

from ds_quant.kernels.wire import ceil_div
from ds_quant.zero import accelerator
from ds_quant.zero.deepspeed_types import Engine, OwnerOptimizer, ZeroParameter
from ds_quant.zero.hooks import BucketFunctions, ExpectedCall, Hooks, as_event, moved, require
from ds_quant.zero.version import FAULTS, deepspeed_version

BUCKET = "average_tensor"
_REDUCE_TO_OWNERS = "allreduce_and_copy_with_multiple_ranks"
_TO_HOST = "async_accumulate_grad_in_cpu_via_gpu"

_weight_gather = ExpectedCall("all_gather_dp_groups")
_to_owners = ExpectedCall(_REDUCE_TO_OWNERS)


# ---- gradients ----


def wrap_owner_reduction(
    hooks: Hooks,
    around_bucket: Callable[..., AbstractContextManager[None]],
    reduce: Callable[[Callable[..., object], dict[str, Any]], object],
) -> None:
    """Replace the reduction of gradients.

    around_bucket: ``around_bucket(tensor, params, divisor)`` is a context in which DeepSpeed cuts a
        bucket into slices by owner and reduces them.
    reduce: ``reduce(original, arguments)`` replaces the reduction of slices, which is
        ``original(**arguments)``. The sums must be divided by ``divisor``.
    """
    optimizer = cast("OwnerOptimizer", hooks.optimizer)
    require(optimizer, _REDUCE_TO_OWNERS)
    signature = inspect.signature(getattr(optimizer, _REDUCE_TO_OWNERS))

    def bucket(
        original: Callable[..., object],
        tensor: torch.Tensor,
        dtype: torch.dtype,
        **kwargs: object,
    ) -> object:
        groups = optimizer.bit16_groups
        params = [groups[i][k] for i, k, _ in optimizer.ipg_buckets[dtype].params]
        called = _to_owners.expected(excused=lambda: tensor.numel() == 0)
        with _undivided(optimizer) as divisor, around_bucket(tensor, params, divisor), called:
            return original(tensor, dtype, **kwargs)

    def slices(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        _to_owners.calls += 1
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return reduce(original, call.arguments)

    hooks.wrap(optimizer, BUCKET, bucket)
    hooks.wrap(optimizer, _REDUCE_TO_OWNERS, slices)


@contextmanager
def _undivided(optimizer: OwnerOptimizer) -> Iterator[float]:
    """Keep DeepSpeed from dividing a bucket ahead of its reduction, which takes an extra pass.

    Yields the divisor of the sums. Before 0.19 this cannot be disabled, so the divisor is 1.
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


# Arguments with one entry per slice; 0.17 lacks the last one.
_LISTS = "small_bucket", "bucket_ranks", "output_bucket"


def by_owner_count(
    arguments: dict[str, Any], *, is_single_rank: bool
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Split the slices of a reduction into shared ones and those of a single owner.

    is_single_rank: the process group has one rank; then all slices are shared.

    Returns:
        the arguments for the shared slices and for the others, None if there are no slices.
    """
    owners = owners_of(arguments)
    shared = []
    single_owner = []
    for index, ranks in enumerate(owners):
        if is_single_rank or len(ranks) > 1:
            shared.append(index)
        else:
            single_owner.append(index)
    if not shared:
        return None, arguments
    if not single_owner:
        return arguments, None
    return _only(arguments, shared), _only(arguments, single_owner)


def _only(arguments: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    """Return the arguments for some of the slices."""
    selected = dict(arguments)
    for name in _LISTS:
        values = arguments.get(name)
        if values is not None:
            selected[name] = [values[index] for index in indices]
    return selected


def owners_of(arguments: dict[str, Any]) -> list[frozenset[int]]:
    """Return the ranks that need each slice. Before 0.19.3 DeepSpeed gives one rank per slice."""
    owners = []
    for ranks in arguments["bucket_ranks"]:
        if not isinstance(ranks, frozenset):
            ranks = frozenset((ranks,))
        owners.append(ranks)
    return owners


def owner_buckets(optimizer: OwnerOptimizer) -> BucketFunctions:
    """Return the two functions of ``shard_hooks.shard_buckets``, on the buckets of ZeRO-2."""
    require(optimizer, "reduce_ipg_grads")

    def flush() -> None:
        if hasattr(optimizer, "setup_buckets"):  # before 0.18.3 every backward sets them up
            optimizer.setup_buckets()
        optimizer.reduce_ipg_grads()
        if optimizer.overlap_comm:  # another stream may still read the buckets
            accelerator.synchronize()

    def reduce_zeros(params: Sequence[ZeroParameter]) -> None:
        group_of = {id(p): i for i, group in enumerate(optimizer.bit16_groups) for p in group}
        for p in params:
            p.grad = torch.zeros_like(p)
            optimizer.reduce_ready_partitions_and_remove_grads(p, group_of[id(p)])

    return flush, reduce_zeros


def lost_gradients(engine: Engine, optimizer: OwnerOptimizer, *, waiting: bool) -> Iterator[str]:
    """Name the gradients that this version of DeepSpeed loses, and the version that does not.

    waiting: the plugin keeps partial sums; before the last micro-step DeepSpeed loses zeros then.
    """
    import deepspeed

    if not optimizer.partition_gradients:
        return
    steps = engine.gradient_accumulation_steps()
    for fault in FAULTS:
        if fault.offload != bool(optimizer.cpu_offload) or not fault.is_in(deepspeed.__version__):
            continue
        if fault.accumulation > (1 if waiting else steps):
            continue
        needs = "a model that has one"
        if fault.accumulation > 1:
            needs = f"gradient_accumulation_steps={steps}"
        yield (
            f"{deepspeed_version()} {fault.loses} under ZeRO-2, with and without this plugin: "
            f"{needs} needs DeepSpeed {fault.until} or newer, or zero_optimization.stage 1 or 3"
        )


def skip_zero_gradients(hooks: Hooks, has_partial_sums: Callable[[ZeroParameter], bool]) -> None:
    """ZeRO-2 with an offloaded optimizer: do not add zeros to gradients on the host.

    The gradient of a parameter with partial sums is zeros before the last micro-step.
    """
    optimizer = cast("OwnerOptimizer", hooks.optimizer)

    def accumulate(original: Callable[..., object], param: ZeroParameter) -> None:
        is_on_host = optimizer.get_param_id(param) in optimizer.accumulated_grads_in_cpu
        is_first = optimizer.micro_step_id == 0 or not is_on_host
        if is_first or not has_partial_sums(param):
            original(param)

    if getattr(optimizer, "cpu_offload", False):
        hooks.wrap(optimizer, _TO_HOST, accumulate)


def add_to_partition(
    optimizer: OwnerOptimizer, output: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Add a slice to DeepSpeed's fp32 gradients. output: None if this version has none."""
    if output is not None:
        optimizer._add_to_grad_partition_buffer(output, values)


# ---- updated weights ----


class _Untouched:
    """Stands for this rank's partition of the replica during ``optimizer.step``.

    Discards the new weights that DeepSpeed copies into it: the next difference is taken from the
    old ones. Not used in a group of one rank, which gathers nothing.
    """

    @property
    def data(self) -> _Untouched:
        return self

    def copy_(self, *_: object, **__: object) -> _Untouched:
        return self


@contextmanager
def _replica_untouched(optimizer: OwnerOptimizer) -> Iterator[None]:
    """Keep the old weights in this rank's partition of the replica."""
    from deepspeed import comm as dist

    by_group = cast("list[list[Any]]", optimizer.parallel_partitioned_bit16_groups)
    ranks = [dist.get_rank(group=group) for group in optimizer.real_dp_process_group]
    own_partitions = [partitions[rank] for partitions, rank in zip(by_group, ranks, strict=True)]
    for partitions, rank in zip(by_group, ranks, strict=True):
        if len(partitions) > 1:
            partitions[rank] = _Untouched()
    try:
        yield
    except (AttributeError, TypeError) as error:
        if _Untouched.__name__ in str(error):  # only DeepSpeed's own gather reads it
            raise moved(_weight_gather.name) from error
        raise
    finally:
        for partitions, rank, own in zip(by_group, ranks, own_partitions, strict=True):
            partitions[rank] = own


def weight_gather(
    optimizer: OwnerOptimizer, gather: Callable[[], None], *, keep_replica: bool
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for ``optimizer.step`` in which ``gather()`` gathers the updated weights.

    keep_replica: this rank's partition of the replica keeps the old weights until ``gather()``.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    _weight_gather.install(stage_1_and_2)
    require(optimizer, "parallel_partitioned_bit16_groups")

    @contextmanager
    def replaced() -> Iterator[None]:
        untouched = _replica_untouched(optimizer) if keep_replica else nullcontext()
        gathering = _weight_gather.through(
            lambda *args, **kwargs: gather(),
            excused=lambda: bool(optimizer.overflow),
        )
        with untouched, gathering:
            yield

    return replaced


def finish_background_save(engine: Engine) -> None:
    """Wait for a checkpoint that is written in the background, which reads the replica.

    DeepSpeed waits for it in the same way before a step. A collective.
    """
    is_decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)  # 0.17 lacks it
    if is_decoupled is not None and is_decoupled():
        engine._commit_decoupled_checkpoint()


def require_replica(optimizer: OwnerOptimizer) -> None:
    """Raise RuntimeError if ``offload_states`` has taken the replica off the device."""
    if "lp_params" in getattr(optimizer, "offloaded_states", ()):
        raise RuntimeError(
            "quantized_comm: a save or an export first gathers exact weights, but offload_states "
            "has moved the weights off the device: call reload_states before it"
        )


def refresh_replica(optimizer: OwnerOptimizer, gather: Callable[[], None]) -> None:
    """Copy the master weights into this rank's partition, then run ``gather()``."""
    with _weight_gather.through(lambda *args, **kwargs: gather()):
        optimizer.update_lp_params()


def wrap_refresh_of_masters(hooks: Hooks) -> None:
    """Let ``refresh_fp32_params`` copy exact weights into the master weights, not decoded ones.

    ``load_checkpoint`` calls it for a module alone. User code calls it after it has written
    weights. All ranks must call it.
    """
    hooks.wrap(hooks.optimizer, "refresh_fp32_params", as_event(hooks.around_export))


class OwnedRange(NamedTuple):
    """Elements [start, stop) of a flat replica, of one parameter and owned by one rank."""

    parameter: ZeroParameter
    owner: int
    start: int
    stop: int


class ReplicaGroup(NamedTuple):
    """The replica of one parameter group: 16-bit (or fp32) weights that every rank holds.

    The flat replica is split over the ranks. Each rank updates its *partition* from its *master
    weights*.

    flat: the replica, (ranks * partition,).
    params: views of the replica.
    master: fp32 weights of this rank's partition, (partition,), on any device.
    """

    group_index: int
    flat: torch.Tensor
    params: list[ZeroParameter]
    process_group: ProcessGroup
    master: torch.Tensor

    def owned_ranges(
        self, offsets: Mapping[int, int], width: int, within: range
    ) -> Iterator[OwnedRange]:
        """Cut a range of every partition at parameter borders.

        offsets: first element of each parameter in the flat replica, by id.
        width: elements of a partition.
        """
        for p in self.params:
            begin = offsets[id(p)]
            end = begin + p.numel()
            for owner in range(begin // width, ceil_div(end, width)):
                start = max(begin, owner * width + within.start)
                stop = min(end, owner * width + within.stop)
                if start < stop:
                    yield OwnedRange(p, owner, start, stop)

    def updated(self, within: range, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return new weights of a range of the partition, (elements,), in the replica's dtype.

        Weights of an offloaded optimizer are copied in fp32 and rounded on the device, so that the
        host need not wait.
        """
        values = empty(len(within), dtype=self.flat.dtype, device=self.flat.device)
        return values.copy_(self.master[within.start : within.stop], non_blocking=True)


def replica_groups(optimizer: OwnerOptimizer) -> Iterator[ReplicaGroup]:
    """Yield the parameter groups of the optimizer."""
    for index, flat in enumerate(optimizer.bit16_groups_flat):
        if flat.requires_grad:  # 0.18.9 flattens with autograd on; slices could not be written to
            flat = flat.detach()
        yield ReplicaGroup(
            group_index=index,
            flat=flat,
            params=optimizer.bit16_groups[index],
            process_group=optimizer.real_dp_process_group[index],
            master=optimizer.single_partition_of_fp32_groups[index],
        )
