"""Attach a scheme to a DeepSpeed engine, and serve the public functions of the package."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_quant.codec.module import load as load_codec
from ds_quant.comm.topology import Topology
from ds_quant.config.environment import KILL_VARIABLE, VARIABLE
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import FallbackConfig, QuantizedCommConfig
from ds_quant.kernels import dispatch
from ds_quant.policy import autotune, refusals
from ds_quant.runtime import handshake, message_check
from ds_quant.runtime.copies import WeightCache, compare_copies
from ds_quant.runtime.fallback import Fallback, kill_file
from ds_quant.runtime.memory_check import Free, require_memory
from ds_quant.runtime.start_line import announce
from ds_quant.runtime.telemetry import unwritable
from ds_quant.runtime.tuning import tuned
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
from ds_quant.zero.deepspeed_types import Engine, OwnerOptimizer, ShardOptimizer, ZeroOptimizer
from ds_quant.zero.equal_buckets import require_equal
from ds_quant.zero.fetch import Fetch
from ds_quant.zero.gather_count import GatherCount, gathered_modules, predicted_gathers
from ds_quant.zero.overlapped_reduce_scatter import OverlappedReduceScatter
from ds_quant.zero.owner_gradients import OwnerReduction
from ds_quant.zero.partial_gradients import NO_OWNER, PartialGradients
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.replica import Replica
from ds_quant.zero.report import figures
from ds_quant.zero.shard_gradients import ShardReduction
from ds_quant.zero.startup_line import line_of
from ds_quant.zero.telemetry import Telemetry, is_read

# ---- autotune ----


def _work(engine: Engine, stage: int) -> autotune.Work:
    """Return the sizes of a step's messages."""
    numel, trained = sharded_params.elements(engine.module)
    if stage == 3:
        gather = numel // max(1, gathered_modules(engine.module))
        gathers = predicted_gathers(engine)
    else:
        numel = trained
        gather = engine.zero_allgather_bucket_size()
        gathers = 1.0
    dtypes = [p.dtype for p in engine.module.parameters() if p.is_floating_point()]
    return autotune.Work(
        numel=numel,
        trained=trained,
        gather=min(gather, numel),
        bucket=min(engine.zero_reduce_bucket_size(), trained),
        dtype=dtypes[0] if dtypes else torch.float32,
        gradients=engine.communication_data_type,
        micro_steps=engine.gradient_accumulation_steps(),
        gathers=gathers,
    )


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
    rank, world = hooks.rank_and_world()
    config.validate_world(world)
    topology = _agree(config, rank, world)
    plugin = _bind(engine, config, topology)
    engine.ds_quant_plugin = plugin
    plugin.hooks = hooks.Hooks(engine, optimizer)
    if hooks.block_is_from_variable(engine):
        plugin.run.notices.append(f"from {VARIABLE}")
    fetch = None
    if world == 1:
        plugin.run.notices.append("single rank: nothing to communicate")
    elif plugin.stage == 3:
        fetch = _attach_shards(plugin, optimizer)
    else:
        _attach_replica(plugin, optimizer)
    plugin.run.notices += [f"{role} in codec {name}" for role, name in config.own_codecs.items()]
    _connect(plugin, config, fetch, trains=plugin.stage < 3 or hooks.has_step(optimizer))
    device = accelerator.device()
    if device.type == "cuda" and world > 1:
        plugin.run.notices += advice(engine)
        warm_up(plugin.run, plugin.message_kinds())
    announce(plugin.run, line_of(plugin))


def _agree(config: QuantizedCommConfig, rank: int, world: int) -> Topology:
    """Run the handshake of all ranks and return the topology."""
    # Facts that must be equal on all ranks, by the name that an error shows.
    must = {f"codec {name}": load_codec(name).digest for name in config.own_codecs.values()}
    # All ranks must vote, or none: a vote of some would hang.
    must[KILL_VARIABLE] = "unset" if kill_file() is None else "set"
    node_size = handshake.handshake(
        config=config,
        must=must,
        kernels=dispatch.describe(accelerator.device(), config.backend),
        rank=rank,
        world=world,
        fault=unwritable(config.metrics, rank),
    )
    return Topology(world=world, node_size=config.node_size or node_size)


def _bind(engine: Engine, config: QuantizedCommConfig, topology: Topology) -> Plugin:
    """Make the engine's plugin with its scheme, which "autotune" chooses by measuring."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        refusals.refuse_full_replica(
            config,
            world=topology.world,
            node_size=topology.node_size,
            model_bytes=sharded_params.total_bytes(engine.module),
        )
    stock_gradients_reason = muon.stock_gradients_reason(engine)
    notices: list[str] = []
    if config.scheme == AUTOTUNE:
        config, notices = tuned(
            config,
            topology,
            _work(engine, stage),
            stage=stage,
            process_group=None,
            device=accelerator.device(),
            has_streams=accelerator.has_streams(),
            stock_gradients=stock_gradients_reason is not None,
        )
    return Plugin(
        engine,
        config.to_scheme(),
        topology,
        stock_gradients_reason=stock_gradients_reason,
        gathers=predicted_gathers(engine) if stage == 3 else 1.0,
        notices=notices,
    )


# ---- the events ----


def _connect(
    plugin: Plugin, config: QuantizedCommConfig, fetch: Fetch | None, *, trains: bool
) -> None:
    """Fill the lists of events that all stages share, and wrap the methods.

    The attaching of the stage has filled its own lists. Calls run in the order of the lists.

    trains: False for inference, which has no optimizer step.
    """
    events = plugin.hooks
    telemetry: Telemetry | None = None
    rank, world = hooks.rank_and_world()
    fallback = _make_fallback(plugin, config.fallback)
    has_checksums = plugin.run.scheme.block.payload_checksum and world > 1
    if has_checksums:
        plugin.run.notices.append("every message carries a checksum")
    # Lossless differences may be undecodable, without a checksum too.
    checks_messages = has_checksums or (plugin.run.scheme.lossless and world > 1)
    if checks_messages and not trains:  # without steps the ranks have no point at which to agree
        plugin.run.message_errors.at_once = partial(
            message_check.raise_message_error, plugin.run, rank
        )
    if trains:
        if checks_messages:
            _add_message_checks(plugin, after_save=has_checksums)
        if fallback is not None:  # all ranks then agree how the next step is sent
            events.before_step.append(fallback.vote)
        _add_weight_updates(plugin, fetch)
        if world > 1:
            first_step.check_first_step(plugin, first_step.promised_roles(plugin))
        if fallback is not None:  # may refresh weights that a skipped step left behind
            events.after_step.append(fallback.after_step)
        if fetch is not None:
            plugin.gather_count = GatherCount(plugin, partial(line_of, plugin))
            events.after_count.append(plugin.gather_count.after_step)
        if is_read(plugin.engine, config.metrics) and world > 1:
            telemetry = Telemetry(plugin, config.metrics)
            events.after_count.append(telemetry.after_step)
            telemetry.arm()
    offload.follow_states(
        events,
        weights=[plugin.node_shard] if plugin.node_shard is not None else [],
        gradients=[plugin.partial_gradients] if plugin.partial_gradients is not None else [],
    )
    events.keep_state(
        checkpoint.KEY,
        dump=partial(checkpoint.dump, plugin),
        restore=partial(_restore, plugin, telemetry),
    )
    events.connect()


def _restore(plugin: Plugin, telemetry: Telemetry | None, saved: Any) -> None:
    """Take over the state of a checkpoint."""
    if telemetry is not None:
        telemetry.arm()  # ``global_steps`` has jumped
    checkpoint.restore(plugin, saved)


def _add_message_checks(plugin: Plugin, *, after_save: bool) -> None:
    """Check messages before an update or an export uses them, and after a save if asked to."""
    events = plugin.hooks
    check = partial(message_check.check_messages, plugin.run)
    events.before_step.append(check)
    events.around_export.insert(0, partial(message_check.checked_messages, plugin.run))
    if after_save:  # those that the save itself has sent
        events.after_save.append(check)


def _add_weight_updates(plugin: Plugin, fetch: Fetch | None) -> None:
    """After an update: learn levels, refresh the node shard, then compare the copies."""
    events = plugin.hooks
    if fetch is not None:
        if plugin.run.scheme.level_steps:
            events.after_update.append(fetch.learn_levels)
        if plugin.node_shard is not None:
            events.after_update.append(plugin.node_shard.after_step)
        events.after_update.append(fetch.barrier.record)
    if plugin.weight_cache is not None and plugin.run.scheme.block.checksum_steps:
        events.after_update.append(partial(_compare_copies, plugin, plugin.weight_cache))


def _compare_copies(plugin: Plugin, cache: WeightCache) -> None:
    """Compare the copies after an update, once they have the new weights."""
    compare_copies(plugin.run, cache, plugin.step + 1)  # DeepSpeed counts the step only after it


def _make_fallback(plugin: Plugin, settings: FallbackConfig) -> Fallback | None:
    """Return the vote on full precision, None if there is nothing to vote on."""
    watches = kill_file() is not None
    if settings.on_nonfinite == "skip" and not watches:
        return None
    fallback = Fallback(plugin.run, settings, plugin.resync)
    if watches:
        plugin.run.notices.append(f"{KILL_VARIABLE} watched")
        fallback.vote()  # the file may exist already
    return fallback


# ---- ZeRO-3 ----


def _require_memory(plugin: Plugin) -> None:
    """Refuse a scheme whose memory does not fit on every rank. A collective if it keeps any."""
    engine = plugin.engine
    require_memory(
        plugin.run,
        Free(accelerator.free_memory(), offload.free_host_memory()),
        on_host=offload.offloads_parameters(engine),
        holds_gradients=hooks.accumulates(engine),
        way_out="zero_optimization.stage 2",
    )


def _attach_shards(plugin: Plugin, optimizer: ShardOptimizer) -> Fetch:
    """ZeRO-3: serve the fetches of weights and, for training, reduce gradients to shards."""
    trains = hooks.has_step(optimizer)  # else inference: parameters only
    fetch = Fetch(plugin, shard_hooks.updated_parameters(optimizer) if trains else None)
    params = sharded_params.parameters_of(plugin.engine.module)
    fetch.attach(params)
    plugin.set_served_params([(p, p.ds_process_group) for p in params])
    _note_empty(plugin)
    if fetch.is_guest:
        plugin.run.notices.append(
            "another engine on this module fetches its weights, and counts them; nothing is kept "
            "twice"
        )
    else:
        _require_memory(plugin)
        fetch.keep_in_node()
    plugin.hooks.on_destroy.append(fetch.close)
    if trains:
        # Saving leaves rows of lossless differences exact, and ``checkpoint.restore`` refills them.
        if plugin.node_shard is not None and not plugin.run.scheme.lossless:
            plugin.hooks.after_checkpoint_event.append(plugin.node_shard.resync)
        if _reduces_gradients(plugin):
            if plugin.run.routes.gradients().keeps_partial_sums:
                _accumulate(plugin, optimizer, shard_hooks.shard_buckets(optimizer))
            _reduce_to_shards(plugin, optimizer)
            plugin.hooks.after_backward.append(plugin.after_backward)
        muon.attach(plugin, optimizer)
    return fetch


def _note_empty(plugin: Plugin) -> None:
    """Name parameters of 0 elements, on which DeepSpeed fails with an assertion or a KeyError."""
    empty = [param.name for param in plugin.run.params if param.shape.numel() == 0]
    if empty:
        plugin.run.notices.append(
            f"{len(empty)} parameter(s) have 0 elements, such as {empty[0]}: DeepSpeed itself can "
            "not fetch or save them under ZeRO-3; remove them, or use zero_optimization.stage 2"
        )


def _reduce_to_shards(plugin: Plugin, optimizer: ShardOptimizer) -> None:
    events, overlaps = plugin.hooks, plugin.engine.zero_overlap_comm()
    muon.set_reduce_scatter(events)
    plugin.run.notices += one_bucket_advice(plugin.engine, muon.full_round(plugin, optimizer))
    reduction = ShardReduction(plugin)
    partition = None
    if plugin.partial_gradients is not None:
        has_partial_sums = partial(_has_partial_sums, plugin, plugin.partial_gradients, NO_OWNER)
        partition = shard_hooks.skip_zero_shards(optimizer, has_partial_sums)
        # DeepSpeed drops its own gradients there, which ZeRO-2 does not.
        events.after_zero_grad.append(plugin.partial_gradients.discard)
    if accelerator.device().type != "cpu" or not overlaps:
        shard_hooks.wrap_shard_reduction(events, reduction, partition)
    else:
        overlapped = OverlappedReduceScatter(reduction, partition)
        shard_hooks.wrap_shard_reduction(events, overlapped.reduce, overlapped.partition)
        events.around_last_buckets.append(overlapped.last_buckets)


# ---- ZeRO-1 and 2 ----


def _attach_replica(plugin: Plugin, optimizer: OwnerOptimizer) -> None:
    """ZeRO-1 and 2: gather updated weights, reduce gradients to their owners."""
    engine, events = plugin.engine, plugin.hooks
    groups = list(optimizer_hooks.replica_groups(optimizer))
    served: list[tuple[Tensor, object]] = []
    foreign = 0
    for group in groups:
        for p in group.params:
            served.append((p, group.process_group))
            if plugin.run.param_of(p) is None:
                foreign += 1
    if foreign:
        raise RuntimeError(
            f"quantized_comm: the optimizer holds {foreign} parameter(s) that are not in "
            "engine.module; pass the module's own parameters to the optimizer"
        )
    plugin.set_served_params(served)
    _require_memory(plugin)
    replica = Replica(plugin, optimizer)
    plugin.replica = replica
    events.around_step.append(
        optimizer_hooks.weight_gather(
            optimizer,
            replica.gather_updated,
            keep_replica=plugin.run.scheme.block.weights.difference_key is not None,
        )
    )
    events.around_export.append(replica.exact)
    optimizer_hooks.wrap_refresh_of_masters(events)
    checkpoint.watch_reads(plugin)
    muon.attach(plugin, optimizer)
    if _reduces_gradients(plugin):
        if plugin.run.routes.gradients().keeps_partial_sums:
            _accumulate(plugin, optimizer, optimizer_hooks.owner_buckets(optimizer))
        _reduce_to_owners(plugin, optimizer)
        events.after_backward.append(plugin.after_backward)
    accumulates_here = plugin.partial_gradients is not None
    lost = optimizer_hooks.lost_gradients(engine, optimizer, waiting=accumulates_here)
    plugin.run.notices += lost


def _reduce_to_owners(plugin: Plugin, optimizer: OwnerOptimizer) -> None:
    events = plugin.hooks
    communicator = plugin.run.communicator(optimizer.dp_process_group)
    muon.note_whole_matrices(plugin, optimizer)
    reduction = OwnerReduction(plugin, optimizer)
    optimizer_hooks.wrap_owner_reduction(events, reduction.bucket, reduction.reduce)
    if communicator.is_gloo:
        events.before_step.append(partial(require_equal, plugin, communicator, None))
    if plugin.partial_gradients is not None:
        has_partial_sums = partial(
            _has_partial_sums, plugin, plugin.partial_gradients, communicator.rank
        )
        optimizer_hooks.skip_zero_gradients(events, has_partial_sums)


# ---- gradients of all stages ----


def _reduces_gradients(plugin: Plugin) -> bool:
    """Return True if the plugin reduces gradients; note it in the start-up line if not."""
    if plugin.stock_gradients_reason is not None:
        plugin.run.notices.append(
            f"gradients stay exact: {plugin.stock_gradients_reason}; DeepSpeed sends them, and "
            "reports and metrics do not count them"
        )
        return False
    _note_single_ranks(plugin)
    return True


def _note_single_ranks(plugin: Plugin) -> None:
    """Explain why gradients cross in every micro-step where every node has one rank."""
    asked_for_once = plugin.run.scheme.block.gradients.cross == "step" and plugin.stage > 1
    one_rank_per_node = plugin.run.topology.node_size == 1 < plugin.run.topology.nodes
    if asked_for_once and one_rank_per_node and hooks.accumulates(plugin.engine):
        plugin.run.notices.append(
            "gradients are sent between nodes in every micro-step, because with one rank per node "
            "buffering them would take a full copy; zero_optimization.stage 1 sends them once"
        )


def _accumulate(plugin: Plugin, optimizer: ZeroOptimizer, buckets: hooks.BucketFunctions) -> None:
    """Accumulate the sums of a node here until the last micro-step.

    buckets: functions that flush DeepSpeed's buckets and fill them with zeros.
    """
    partial_gradients = PartialGradients(plugin.engine)
    plugin.partial_gradients = partial_gradients
    flush, reduce_zeros = buckets
    events = plugin.hooks
    events.before_last_buckets.append(
        partial(partial_gradients.reduce_remaining, flush, reduce_zeros)
    )
    events.before_gradients.append(partial(partial_gradients.reduce_before_step, optimizer))


def _has_partial_sums(
    plugin: Plugin, partial_gradients: PartialGradients, owner: int, parameter: Tensor
) -> bool:
    """Return True if the plugin keeps partial sums of a gradient, and DeepSpeed got zeros.

    owner: rank that gets the sum; NO_OWNER under ZeRO-3.
    """
    param = plugin.run.param_of(parameter)
    return param is not None and partial_gradients.holds((param, owner))


# ---- public functions ----


def _plugin_of(engine: Any, function: str) -> Plugin | None:
    """Return the plugin of an engine, None if it has none.

    Raises:
        TypeError: not a DeepSpeed engine.
    """
    if not hasattr(engine, "zero_optimization_stage"):
        raise TypeError(
            f"ds_quant.{function} takes the engine that deepspeed.initialize or "
            f"accelerator.prepare has returned, not {type(engine).__name__}"
        )
    return getattr(engine, "ds_quant_plugin", None)


def exact_weights(engine: Any) -> AbstractContextManager[object]:
    """Show exact weights in the module of a ZeRO-1/2 engine inside a ``with`` block.

    Use it around your own code that reads the parameters, such as ``module.state_dict()``;
    DeepSpeed's save functions need no block. Saves inside the block keep the values that you write
    there. A collective: all ranks must enter and leave. Has no effect under ZeRO-3, where
    ``GatheredParameters`` is always exact, and on engines without the plugin.
    """
    plugin = _plugin_of(engine, "exact_weights")
    if plugin is None or plugin.replica is None:
        return nullcontext()
    return hooks.opened(plugin.hooks.around_export)


def resync(engine: Any) -> None:
    """Fill the module with the master weights, exactly and on all ranks.

    Shows values that ``safe_set_full_fp32_param`` has written. Under ZeRO-1/2 it undoes your own
    writes to ``parameter.data``. Under ZeRO-3 it refills the node shard, if the scheme keeps one.
    A collective: all ranks must call it.
    """
    plugin = _plugin_of(engine, "resync")
    if plugin is not None:
        plugin.resync()


def report(engine: Any) -> dict[str, Any] | None:
    """Return figures of this rank so far; None if the engine has no ``quantized_comm``.

    Links are intra (inside a node) and inter (between nodes); roles are weights and gradients.

    Returns:
        scheme, stage, world, node_size.
        params: elements.
        steps, micro_steps: as DeepSpeed counts them.
        received_bytes[role][link]: into this rank. The sum of inter over the ranks of a node is
            received per node.
        saved_bytes[role][link]: received besides in full precision, by formula.
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
        line: the start-up line.
    """
    plugin = _plugin_of(engine, "report")
    return None if plugin is None else figures(plugin)
