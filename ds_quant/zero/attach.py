"""Attach a scheme to a DeepSpeed engine, and serve the public functions of the package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ds_quant.codec.module import load as load_codec
from ds_quant.comm.topology import Topology
from ds_quant.config.environment import VARIABLE
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.policy import refusals
from ds_quant.runtime import handshake, message_check
from ds_quant.runtime.copies import WeightCache, compare_copies, compares_copies
from ds_quant.runtime.fallback import fallback_of
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.run import Run
from ds_quant.runtime.start_line import announce, saving
from ds_quant.runtime.tuning import tuned_front
from ds_quant.runtime.warmup import warm_up
from ds_quant.zero import (
    accelerator,
    checkpoint,
    first_step,
    hooks,
    muon,
    offload,
    optimizer_hooks,
    shard_hooks,
    sharded_params,
)
from ds_quant.zero.advice import advice, one_bucket_advice
from ds_quant.zero.deepspeed_types import Engine, OwnerOptimizer, ShardOptimizer
from ds_quant.zero.engine import AttachedEngine
from ds_quant.zero.equal_buckets import require_equal
from ds_quant.zero.fetch import Fetch
from ds_quant.zero.front import EngineFront
from ds_quant.zero.gather_count import GatherCount
from ds_quant.zero.overlapped_reduce_scatter import OverlappedReduceScatter
from ds_quant.zero.owner_gradients import OwnerReduction
from ds_quant.zero.partial_gradients import NO_OWNER, PartialGradients
from ds_quant.zero.replica import Replica
from ds_quant.zero.shard_gradients import ShardReduction
from ds_quant.zero.startup_line import line_parts_of
from ds_quant.zero.telemetry import Telemetry, is_read

# ---- attach ----


def attach(engine: Engine, optimizer: Any) -> None:
    """Attach to an engine whose ZeRO optimizer exists. No block, no effect.

    optimizer: None for ``BF16_Optimizer``, which is refused.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        StartError: ranks without the plugin, with other settings, or placed so that they make no
            nodes (see ``handshake``).
    """
    config = hooks.block_of(engine)
    if config is None:
        return
    # Checked a second time. ``install.read_block`` ran ahead of DeepSpeed's checks, so that a user
    # reads these messages first; it knew neither the optimizer nor a stage that was set later.
    refusals.refuse(hooks.param_dict(engine), config, bf16_optimizer=optimizer is None)
    _, world = hooks.rank_and_world()
    config.validate_world(world)
    topology = _topology(config, world)
    front = _make_front(engine, config, topology, optimizer)
    run = front.run
    events = hooks.Hooks(engine, optimizer)
    if hooks.block_is_from_variable(engine):
        run.notices.append(f"from {VARIABLE}")
    if world == 1:
        run.notices.append("single rank: nothing to communicate")
        attached = AttachedEngine(front=front, events=events)
    elif front.stage == 3:
        attached = _attach_shards(front, events, optimizer)
    else:
        attached = _attach_replica(front, events, optimizer)
    engine.ds_quant_attached = attached
    run.notices += [f"{role} in codec {name}" for role, name in config.own_codecs.items()]
    _connect(attached, config, trains=front.stage < 3 or hooks.has_step(optimizer))
    device = accelerator.device()
    if device.type == "cuda" and world > 1:
        run.notices += advice(engine)
        warm_up(run, attached.message_kinds())
    announce(run, line_parts_of(front))


def _topology(config: QuantizedCommConfig, world: int) -> Topology:
    """Run the handshake of all ranks and return the topology."""
    codecs = {f"codec {name}": load_codec(name).digest for name in config.own_codecs.values()}
    node_size = handshake.handshake(config, facts=codecs, device=accelerator.device())
    return Topology(world=world, node_size=node_size)


def _make_front(
    engine: Engine, config: QuantizedCommConfig, topology: Topology, optimizer: Any
) -> EngineFront:
    """Make the front of an engine with its scheme, which "autotune" chooses by measuring."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        refusals.refuse_full_replica(
            config,
            world=topology.world,
            node_size=topology.node_size,
            model_bytes=sharded_params.total_bytes(engine.module),
        )
    make = partial(
        EngineFront,
        engine,
        topology,
        served_params=_served_params(engine, optimizer) if topology.world > 1 else (),
        gather_count=GatherCount(engine) if stage == 3 else None,
        stock_gradients_reason=muon.stock_gradients_reason(engine),
    )
    return tuned_front(config, make)


def _served_params(engine: Engine, optimizer: Any) -> list[tuple[Tensor, object]]:
    """Return the parameters that an engine communicates, each with its process group."""
    if engine.zero_optimization_stage() == 3:
        return [(p, p.ds_process_group) for p in sharded_params.parameters_of(engine.module)]
    groups = optimizer_hooks.replica_groups(optimizer)
    return [(p, group.process_group) for group in groups for p in group.params]


def _note_few_ranks(front: EngineFront) -> None:
    """Name parameters on a subset of the ranks (experts, pipeline, tensor parallel)."""
    params = front.served_params
    few = sum(not front.run.is_world(group) for _, group in params)
    if few:
        front.run.notices.append(
            f"{few} of {len(params)} parameters live on a subset of ranks: "
            "single-level collectives, no node shard"
        )


# ---- the events ----


def _connect(attached: AttachedEngine, config: QuantizedCommConfig, *, trains: bool) -> None:
    """Fill the lists of events that all stages share, and wrap the methods.

    The attaching of the stage has filled its own lists. Calls run in the order of the lists.

    trains: False for inference, which has no optimizer step.
    """
    front, run, events = attached.front, attached.run, attached.events
    telemetry: Telemetry | None = None
    rank, world = hooks.rank_and_world()
    fallback = fallback_of(run, attached.resync)
    has_checksums = run.scheme.block.payload_checksum and world > 1
    if has_checksums:
        run.notices.append("every message carries a checksum")
    # Lossless differences may be undecodable, without a checksum too.
    checks_messages = has_checksums or (run.scheme.lossless and world > 1)
    if checks_messages and not trains:  # without steps the ranks have no point at which to agree
        run.message_errors.at_once = partial(message_check.raise_message_error, run, rank)
    if trains:
        if checks_messages:
            _add_message_checks(run, events, after_save=has_checksums)
        if fallback is not None:  # all ranks then agree how the next step is sent
            events.before_step.append(fallback.vote)
        _add_weight_updates(attached)
        if world > 1:
            first_step.check_first_step(front, events, first_step.promised_roles(front))
        if fallback is not None:  # may refresh weights that a skipped step left behind
            events.after_step.append(fallback.after_step)
        if front.gather_count is not None and world > 1:
            front.gather_count.count(events, lambda: saving(run, line_parts_of(front)))
        events.after_count.append(run.begin_step)
        run.begin_step()
        if is_read(front.engine, config.metrics) and world > 1:
            telemetry = Telemetry(front.engine, run, config.metrics)
            events.after_count.append(telemetry.after_step)
            telemetry.arm()
    sums = attached.partial_gradients
    offload.follow_states(
        events,
        weights=[attached.node_shard] if attached.node_shard is not None else [],
        gradients=[sums] if sums is not None else [],
    )
    events.keep_state(
        checkpoint.KEY,
        dump=partial(checkpoint.dump, run),
        restore=partial(_restore, attached, telemetry),
    )
    events.connect()


def _restore(attached: AttachedEngine, telemetry: Telemetry | None, saved: Any) -> None:
    """Take over the state of a checkpoint."""
    if telemetry is not None:
        telemetry.arm()  # ``global_steps`` has jumped
    checkpoint.restore(attached, saved)
    attached.run.begin_step()


def _add_message_checks(run: Run, events: hooks.Hooks, *, after_save: bool) -> None:
    """Check messages before an update or an export uses them, and after a save if asked to."""
    check = partial(message_check.check_messages, run)
    events.before_step.append(check)
    events.around_export.insert(0, partial(message_check.checked_messages, run))
    if after_save:  # those that the save itself has sent
        events.after_save.append(check)


def _add_weight_updates(attached: AttachedEngine) -> None:
    """After an update: learn levels, refresh the node shard, then compare the copies."""
    run, after_update = attached.run, attached.events.after_update
    fetch, node_shard, weight_cache = attached.fetch, attached.node_shard, attached.weight_cache
    if fetch is not None:
        if run.scheme.level_steps:
            after_update.append(fetch.learn_levels)
        if node_shard is not None:
            after_update.append(node_shard.after_step)
        after_update.append(fetch.barrier.record)
    if weight_cache is not None and run.scheme.block.checksum_steps:
        after_update.append(partial(_compare_copies, run, weight_cache))


def _compare_copies(run: Run, cache: WeightCache) -> None:
    """Compare the copies after an update, once they have the new weights."""
    step = run.step + 1  # DeepSpeed counts the step only after it
    if compares_copies(run, step):
        compare_copies(run, cache, step)


# ---- ZeRO-3 ----


def _require_memory(front: EngineFront) -> None:
    """Refuse a scheme whose memory does not fit on every rank. A collective if it keeps any."""
    engine = front.engine
    require_memory(
        front.run,
        Free(accelerator.free_memory(), offload.free_host_memory()),
        on_host=offload.offloads_parameters(engine),
        holds_gradients=hooks.accumulates(engine),
        way_out="zero_optimization.stage 2",
    )


def _attach_shards(
    front: EngineFront, events: hooks.Hooks, optimizer: ShardOptimizer
) -> AttachedEngine:
    """ZeRO-3: serve the fetches of weights and, for training, reduce gradients to shards."""
    run = front.run
    trains = hooks.has_step(optimizer)  # else inference: parameters only
    fetch = Fetch(front, shard_hooks.updated_parameters(optimizer) if trains else None)
    fetch.attach(sharded_params.parameters_of(front.engine.module), events)
    _note_few_ranks(front)
    _note_empty(run)
    if fetch.is_guest:
        run.notices.append(
            "another engine on this module fetches its weights, and counts them; nothing is kept "
            "twice"
        )
    else:
        _require_memory(front)
        fetch.make_node_shard()
    events.on_destroy.append(fetch.close)
    partial_gradients = None
    if trains:
        # Saving leaves rows of lossless differences exact, and ``checkpoint.restore`` refills them.
        if fetch.node_shard is not None and not run.scheme.lossless:
            events.after_checkpoint_event.append(fetch.node_shard.resync)
        if _reduces_gradients(front):
            partial_gradients = _keep_partial_sums(front, events, shard_hooks.shard_buckets)
            _reduce_to_shards(front, events, optimizer, partial_gradients)
            events.after_backward.append(front.after_backward)
        muon.attach(run, front.engine, events)
    return AttachedEngine(
        front=front, events=events, fetch=fetch, partial_gradients=partial_gradients
    )


def _note_empty(run: Run) -> None:
    """Name parameters of 0 elements, on which DeepSpeed fails with an assertion or a KeyError."""
    empty = [param.name for param in run.params if param.shape.numel() == 0]
    if empty:
        run.notices.append(
            f"{len(empty)} parameter(s) have 0 elements, such as {empty[0]}: DeepSpeed itself can "
            "not fetch or save them under ZeRO-3; remove them, or use zero_optimization.stage 2"
        )


def _reduce_to_shards(
    front: EngineFront,
    events: hooks.Hooks,
    optimizer: ShardOptimizer,
    partial_gradients: PartialGradients | None,
) -> None:
    engine, run = front.engine, front.run
    muon.set_reduce_scatter(events)
    run.notices += one_bucket_advice(engine, muon.full_round(run, optimizer))
    reduction = ShardReduction(front, partial_gradients)
    partition = None
    if partial_gradients is not None:
        has_partial_sums = partial(_has_partial_sums, run, partial_gradients, NO_OWNER)
        partition = shard_hooks.skip_zero_shards(optimizer, has_partial_sums)
        # DeepSpeed drops its own gradients there, which ZeRO-2 does not.
        events.after_zero_grad.append(partial_gradients.discard)
    if accelerator.device().type != "cpu" or not engine.zero_overlap_comm():
        shard_hooks.wrap_shard_reduction(events, reduction, partition)
    else:
        overlapped = OverlappedReduceScatter(reduction, partition)
        shard_hooks.wrap_shard_reduction(events, overlapped.reduce, overlapped.partition)
        events.around_last_buckets.append(overlapped.last_buckets)


# ---- ZeRO-1 and 2 ----


def _attach_replica(
    front: EngineFront, events: hooks.Hooks, optimizer: OwnerOptimizer
) -> AttachedEngine:
    """ZeRO-1 and 2: gather updated weights, reduce gradients to their owners."""
    run = front.run
    foreign = sum(run.param_of(p) is None for p, _ in front.served_params)
    if foreign:
        raise RuntimeError(
            f"quantized_comm: the optimizer holds {foreign} parameter(s) that are not in "
            "engine.module; pass the module's own parameters to the optimizer"
        )
    _note_few_ranks(front)
    _require_memory(front)
    replica = Replica(front, optimizer)
    events.around_step.append(
        optimizer_hooks.weight_gather(
            optimizer,
            replica.gather_updated,
            keep_replica=run.scheme.block.weights.difference_key is not None,
        )
    )
    events.around_export.append(replica.exact)
    optimizer_hooks.wrap_refresh_of_masters(events)
    checkpoint.watch_reads(replica, events)
    muon.attach(run, front.engine, events)
    partial_gradients = None
    if _reduces_gradients(front):
        partial_gradients = _keep_partial_sums(front, events, optimizer_hooks.owner_buckets)
        _reduce_to_owners(front, events, optimizer, partial_gradients)
        events.after_backward.append(front.after_backward)
    run.notices += optimizer_hooks.lost_gradients(
        front.engine, optimizer, waiting=partial_gradients is not None
    )
    return AttachedEngine(
        front=front, events=events, replica=replica, partial_gradients=partial_gradients
    )


def _reduce_to_owners(
    front: EngineFront,
    events: hooks.Hooks,
    optimizer: OwnerOptimizer,
    partial_gradients: PartialGradients | None,
) -> None:
    run = front.run
    communicator = run.communicator(optimizer.dp_process_group)
    muon.note_whole_matrices(run, optimizer)
    reduction = OwnerReduction(front, partial_gradients, optimizer)
    optimizer_hooks.wrap_owner_reduction(events, reduction.bucket, reduction.reduce)
    if communicator.is_gloo:
        events.before_step.append(partial(require_equal, front, communicator, None))
    if partial_gradients is not None:
        has_partial_sums = partial(_has_partial_sums, run, partial_gradients, communicator.rank)
        optimizer_hooks.skip_zero_gradients(events, has_partial_sums)


# ---- gradients of all stages ----


def _reduces_gradients(front: EngineFront) -> bool:
    """Return True if the plugin reduces gradients; note it in the start-up line if not."""
    if front.stock_gradients_reason is not None:
        front.run.notices.append(
            f"gradients stay exact: {front.stock_gradients_reason}; DeepSpeed sends them, and "
            "reports and metrics do not count them"
        )
        return False
    _note_single_ranks(front)
    return True


def _note_single_ranks(front: EngineFront) -> None:
    """Explain why gradients cross in every micro-step where every node has one rank."""
    run = front.run
    asked_for_once = run.scheme.block.gradients.cross == "step" and front.stage > 1
    one_rank_per_node = run.topology.node_size == 1 < run.topology.nodes
    if asked_for_once and one_rank_per_node and hooks.accumulates(front.engine):
        run.notices.append(
            "gradients are sent between nodes in every micro-step, because with one rank per node "
            "buffering them would take a full copy; zero_optimization.stage 1 sends them once"
        )


def _keep_partial_sums(
    front: EngineFront,
    events: hooks.Hooks,
    buckets_of: Callable[[Any], hooks.BucketFunctions],
) -> PartialGradients | None:
    """Create the store of partial sums, and let the last micro-step reduce what is left in it.

    buckets_of: ``shard_buckets`` or ``owner_buckets``.

    Returns:
        None if gradients cross between the nodes in every micro-step.
    """
    if not front.run.routes.gradients().keeps_partial_sums:
        return None
    optimizer = events.optimizer
    partial_gradients = PartialGradients(front.engine)
    flush, reduce_zeros = buckets_of(optimizer)
    events.before_last_buckets.append(
        partial(partial_gradients.reduce_remaining, flush, reduce_zeros)
    )
    events.before_gradients.append(partial(partial_gradients.reduce_before_step, optimizer))
    return partial_gradients


def _has_partial_sums(
    run: Run, partial_gradients: PartialGradients, owner: int, parameter: Tensor
) -> bool:
    """Return True if the plugin keeps partial sums of a gradient. DeepSpeed's part of it is zeros.

    owner: rank that gets the sum; NO_OWNER under ZeRO-3.
    """
    param = run.param_of(parameter)
    return param is not None and partial_gradients.holds((param, owner))


# ---- public functions ----


def _attached(engine: Any, function: str) -> AttachedEngine | None:
    """Return the record of an engine with a block, None if it has none.

    Raises:
        TypeError: not a DeepSpeed engine.
    """
    if not hasattr(engine, "zero_optimization_stage"):
        raise TypeError(
            f"ds_quant.{function} takes the engine that deepspeed.initialize or "
            f"accelerator.prepare has returned, not {type(engine).__name__}"
        )
    return getattr(engine, "ds_quant_attached", None)


def exact_weights(engine: Any) -> AbstractContextManager[object]:
    """Show exact weights in the module of a ZeRO-1/2 engine inside a ``with`` block.

    Use it around your own code that reads the parameters, such as ``module.state_dict()``;
    DeepSpeed's save functions need no block. Saves inside the block keep the values that you write
    there. A collective: all ranks must enter and leave. Has no effect under ZeRO-3, where
    ``GatheredParameters`` is always exact, and on engines without the plugin.
    """
    attached = _attached(engine, "exact_weights")
    if attached is None or attached.replica is None:
        return nullcontext()
    return hooks.opened(attached.events.around_export)


def resync(engine: Any) -> None:
    """Fill the module with the master weights, exactly and on all ranks.

    Shows values that ``safe_set_full_fp32_param`` has written. Under ZeRO-1/2 it undoes your own
    writes to ``parameter.data``. Under ZeRO-3 it refills the node shard, if the scheme keeps one.
    A collective: all ranks must call it.
    """
    attached = _attached(engine, "resync")
    if attached is not None:
        attached.resync()


def report(engine: Any) -> dict[str, Any] | None:
    """Return figures of this rank so far; None if the engine has no ``quantized_comm``.

    Links are intra (inside a node) and inter (between nodes); roles are weights and gradients.

    Returns:
        scheme, stage, world, node_size.
        params: elements.
        steps, micro_steps: as DeepSpeed counts them.
        received_bytes[role][link]: into this rank. The sum of inter over the ranks of a node is
            received per node.
        saved_bytes[role][link]: received besides in full precision, by formula; nothing of steps
            in full precision, and nothing of forwards that send no weights because nodes keep them,
            such as those of an evaluation. The formula gathers weights under FSDP2 twice in a
            micro-step, also where ``reshard_after_forward=False`` keeps them for the backward.
        collectives[role]: number of messages.
        not_counted: roles that received_bytes and collectives leave out, because DeepSpeed sends
            them itself.
        gathers: of an element per micro-step under ZeRO-3, predicted at first, counted after the
            first steps; 1 under ZeRO-1/2.
        full_precision_share: 0 to 1, of the wire bytes.
        expected_bytes_per_param, expected_intra_bytes_per_param: per optimizer step; volumes, see
            [Note: bytes per parameter] of ``cost``.
        expected_most_bytes_per_param: upper bound of the first; the training decides the length of
            lossless differences.
        lossless_bits: measured bits per weight, None without lossless differences.
        lossless_padding: share of these bytes that is padding, None without them.
        kept_bytes, expected_kept_bytes: memory that the scheme keeps on this rank between steps;
            host memory if parameters are offloaded.
        held_bytes, expected_held_bytes: most bytes so far of gradients that wait for the last
            micro-step; the same by formula.
        expected_peak_bytes: most bytes of messages and sums in a step, by formula.
        buffer_bytes: host buffers of 1 MB and more that messages reuse in every step; 0 on CUDA,
            where torch's allocator keeps them.
        resyncs: exact refills after checksums that differed.
        nonfinite_steps: found by ``fallback``; 0 with the policy skip.
        exact_steps: in full precision because of ``fallback`` or a kill file.
        killed: True while a kill file exists.
        levels: of every set of ranks that shares parameters, its ranks, nodes, node_size, replicas,
            params and received_bytes. Under DeepSpeed one of all ranks, under FSDP2 one per mesh.
        line: what the start-up lines say, and all that they leave out.
    """
    attached = _attached(engine, "report")
    return None if attached is None else attached.figures()
