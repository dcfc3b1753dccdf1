"""Attach a scheme to a DeepSpeed engine, and answer what a user asks of it.

All ranks measure at once, so that links and codecs see the load of a real step; rank 0 decides for
all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ds_quant.codec.module import load
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator
from ds_quant.config.environment import VARIABLE
from ds_quant.config.presets import AUTOTUNE
from ds_quant.config.schema import FallbackConfig, QuantizedCommConfig
from ds_quant.kernels import dispatch
from ds_quant.policy import autotune, choosing, refusals
from ds_quant.policy.route import Routes
from ds_quant.zero import (
    checkpoint,
    handshake,
    hooks,
    muon,
    offload,
    optimizer_hooks,
    safety,
    shard_hooks,
    sharded_params,
)
from ds_quant.zero.equal_buckets import require_equal
from ds_quant.zero.fetch import Fetch
from ds_quant.zero.gather_count import GatherCount, gathered_modules, predicted_gathers
from ds_quant.zero.overlapped_reduce_scatter import OverlappedReduceScatter
from ds_quant.zero.owner_gradients import OwnerReduction
from ds_quant.zero.partial_gradients import PartialGradients
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.replica import Replica
from ds_quant.zero.report import advice, announce, figures, one_bucket, start_line
from ds_quant.zero.shard_gradients import ShardReduction
from ds_quant.zero.telemetry import Telemetry, listened_to, unwritable
from ds_quant.zero.warmup import warm_up_rank
from ds_quant.zero.world import broadcast, level_groups

# ---- autotune ----


def tune(engine: Any, config: QuantizedCommConfig, topology: Topology) -> dict[str, float]:
    """Return the seconds of a step's messages by scheme, the same on all ranks, of candidates that
    start-up would not refuse. A collective.
    """
    stage, device = engine.zero_optimization_stage(), hooks.device()
    nodes, node_size = topology.nodes, topology.node_size
    shipped = muon.exact_gradient_reason(engine) is not None
    where = {"stage": stage, "nodes": nodes, "node_size": node_size, "stock_gradients": shipped}
    groups = level_groups(topology) if 1 < node_size < topology.world else ()
    # Links of their own, so that nothing is counted as training.
    how = {"topology": topology, "traffic": Traffic(), "backend": config.backend}
    hierarchy = HierarchicalCommunicator(*(Communicator(group, **how) for group in (None, *groups)))
    work, seconds = _work(engine, stage), {}
    for name in choosing.tuned(choosing.Place(stage, nodes, node_size, config.allow_full_replica)):
        picked = config.picked(name)
        if refusals.starts(picked, stage=stage, world=topology.world, node_size=node_size):
            routes = Routes(scheme=picked.to_scheme(), **where)
            seconds[name] = autotune.step_seconds(routes, hierarchy, work, device)
    return broadcast(seconds, source=0)


def _work(engine: Any, stage: int) -> autotune.Work:
    numel, trained = sharded_params.elements(engine.module)
    if stage == 3:
        gather = numel // max(1, gathered_modules(engine.module))
    else:
        numel, gather = trained, engine.zero_allgather_bucket_size()
    dtypes = [p.dtype for p in engine.module.parameters() if p.is_floating_point()]
    return autotune.Work(
        numel=numel, trained=trained, gather=min(gather, numel),
        bucket=min(engine.zero_reduce_bucket_size(), trained),
        dtype=dtypes[0] if dtypes else torch.float32, gradients=engine.communication_data_type,
        micro_steps=engine.gradient_accumulation_steps(),
        gathers=predicted_gathers(engine) if stage == 3 else 1.0,
    )  # fmt: skip


# ---- attach ----


def attach(engine: Any, optimizer: Any) -> None:
    """Attach to an engine whose ZeRO optimizer exists. No block, no effect.

    Raises:
        ConfigError: a setting or a combination that cannot work, before any collective.
        StartError: ranks without the plugin, with other settings, or placed so that they make no
            nodes (see ``handshake``).
    """
    config = getattr(engine._config, "quantized_comm", None)
    if config is None:
        return
    refusals.refuse(hooks.param_dict(engine), config, bf16_optimizer=optimizer is None)
    rank, world = hooks.rank_and_world()
    config.validate_world(world)
    topology = _agree(config, rank, world)
    plugin = engine.ds_quant_plugin = _bind(engine, config, topology)
    plugin.hooks = hooks.Hooks(engine, optimizer)
    if getattr(engine._config, "quantized_comm_from_variable", False):
        plugin.notices.append(f"from {VARIABLE}")
    fetch = None
    if world == 1:
        plugin.notices.append("single rank: nothing to communicate")
    elif plugin.stage == 3:
        fetch = _attach_shards(plugin, optimizer)
    else:
        _attach_replica(plugin, optimizer)
    plugin.notices += [f"{role} in codec {name}" for role, name in config.own_codecs.items()]
    _connect(plugin, config, fetch, trains=plugin.stage < 3 or hooks.steps(optimizer))
    device = hooks.device()
    if device.type == "cuda" and world > 1:
        plugin.notices += advice(engine)
        warm_up_rank(plugin, device)
    announce(plugin)


def _connect(
    plugin: Plugin, config: QuantizedCommConfig, fetch: Fetch | None, *, trains: bool
) -> None:
    """Fill the lists of events, whose order is decided here and nowhere else, and wrap.

    trains: False for inference, which has no optimizer step.
    """
    events, (rank, world) = plugin.hooks, hooks.rank_and_world()
    fallback = _fallback(plugin, config.fallback)
    sealed = plugin.scheme.block.payload_checksum and world > 1
    if sealed:
        plugin.notices.append("every message carries a checksum")
    checked = sealed or (plugin.scheme.lossless and world > 1)
    if checked and not trains:  # no step at which all ranks could agree
        plugin.message_errors.at_once = partial(safety.end_run, plugin, rank)
    if trains:
        if checked:  # before the messages of the step are used for an update
            check = partial(safety.check_messages, plugin)
            events.before_step.append(check)
            events.around_export.insert(0, partial(safety.checked_messages, plugin))
            if sealed:  # those that the save has sent
                events.after_save.append(check)
        if fallback is not None:  # then all ranks agree how the next step is sent
            events.before_step.append(fallback.vote)
        if fetch is not None:  # levels and the node shard follow the new weights
            if plugin.scheme.level_steps:
                events.after_update.append(fetch.learn_levels)
            if plugin.node is not None:
                events.after_update.append(plugin.node.after_step)
            events.after_update.append(fetch.barrier.record)
        if plugin.weight_cache and plugin.scheme.block.checksum_steps:  # compares what was updated
            events.after_update.append(partial(safety.compare_copies, plugin))
        if world > 1:
            safety.judge_first_step(plugin, safety.promised_roles(plugin))
        if fallback is not None:  # may refresh what a skipped step left behind
            events.after_step.append(fallback.after_step)
        if fetch is not None:
            count = plugin.gather_count = GatherCount(plugin, partial(start_line, plugin))
            events.after_count.append(count.after_step)
        if listened_to(plugin.engine, config.metrics) and world > 1:
            plugin.telemetry = Telemetry(plugin, config.metrics)
            events.after_count.append(plugin.telemetry.after_step)
            plugin.telemetry.arm()
    shards, sums = ([guest] if guest else [] for guest in (plugin.node, plugin.partial_gradients))
    offload.follow_states(events, weights=shards, gradients=sums)
    dump, restore = partial(checkpoint.dump, plugin), partial(checkpoint.restore, plugin)
    events.keep_state(checkpoint.KEY, dump, restore)
    events.connect()


def _agree(config: QuantizedCommConfig, rank: int, world: int) -> Topology:
    """Run the handshake of all ranks and return the topology."""
    must = {f"codec {name}": load(name).digest for name in config.own_codecs.values()}
    # A vote in which some ranks take no part would hang.
    must[safety.KILL_VARIABLE] = "unset" if safety.kill_file() is None else "set"
    kernels = dispatch.describe(hooks.device(), config.backend)
    fault = unwritable(config.metrics, rank)
    agreed = handshake.handshake(
        config=config, must=must, kernels=kernels, rank=rank, world=world, fault=fault
    )
    return Topology(world=world, node_size=config.node_size or agreed)


def _bind(engine: Any, config: QuantizedCommConfig, topology: Topology) -> Plugin:
    """Make the engine's plugin with its scheme, which "autotune" chooses by measuring."""
    if engine.zero_optimization_stage() == 3:
        refusals.refuse_full_replica(
            config, world=topology.world, node_size=topology.node_size,
            model_bytes=sharded_params.total_bytes(engine.module),
        )  # fmt: skip
    notices: list[str] = []
    if config.scheme == AUTOTUNE and topology.world == 1:
        config = config.picked("full_precision")
    elif config.scheme == AUTOTUNE:
        seconds = tune(engine, config, topology)
        config = config.picked(autotune.choose(seconds))
        notices.append(autotune.reason(seconds))
    plugin = Plugin(engine, config.to_scheme(), topology)
    plugin.stock_gradients = muon.exact_gradient_reason(engine)
    if plugin.stage == 3:
        plugin.gathers = predicted_gathers(engine)
    plugin.notices += notices
    return plugin


def _attach_shards(plugin: Plugin, optimizer: Any) -> Fetch:
    """ZeRO-3."""
    fetch = Fetch(plugin)
    params = list(plugin.engine.module.parameters())
    fetch.attach(params)
    plugin.serve([(p, p.ds_process_group) for p in params])
    _note_empty(plugin)
    safety.refuse_no_room(plugin)
    if plugin.routes.keeps_shard:
        fetch.keep_in_node()
    plugin.hooks.on_destroy.append(fetch.close)
    if hooks.steps(optimizer):  # else inference: parameters only
        # Rows of lossless differences need only follow what is loaded.
        if plugin.node is not None and not plugin.scheme.lossless:
            plugin.hooks.after_checkpoint_event.append(plugin.node.resync)
        _attach_gradients(plugin, optimizer)
        muon.attach(plugin, optimizer)
    return fetch


def _note_empty(plugin: Plugin) -> None:
    """Name parameters of 0 elements, on which DeepSpeed fails with an assertion or a KeyError."""
    empty = [param.name for param in plugin.all_params() if param.shape.numel() == 0]
    if empty:
        plugin.notices.append(
            f"{len(empty)} parameter(s) have 0 elements, such as {empty[0]}: DeepSpeed itself can "
            "not fetch or save them under ZeRO-3; remove them, or use zero_optimization.stage 2"
        )


def _attach_gradients(plugin: Plugin, optimizer: Any) -> None:
    """Any stage: reduce gradients, unless they take DeepSpeed's own collectives."""
    events, shards = plugin.hooks, plugin.stage == 3
    if reason := plugin.stock_gradients:
        plugin.notices.append(
            f"gradients stay exact: {reason}; DeepSpeed sends them, and reports and metrics do not "
            "count them"
        )
        return
    _note_single_ranks(plugin)
    if plugin.routes.gradients().waits:
        waiting = plugin.partial_gradients = PartialGradients(plugin.engine)
        make_buckets = shard_hooks.shard_buckets if shards else optimizer_hooks.owner_buckets
        buckets = make_buckets(optimizer)
        events.before_last_buckets.append(partial(waiting.reduce_rest, *buckets))
        events.before_gradients.append(partial(waiting.finish, optimizer))
    (_reduce_to_shards if shards else _reduce_to_owners)(plugin, optimizer)
    events.after_backward.append(plugin.after_backward)


def _reduce_to_shards(plugin: Plugin, optimizer: Any) -> None:
    events, overlaps = plugin.hooks, plugin.engine.zero_overlap_comm()
    muon.reduce_scatter(events)
    plugin.notices += one_bucket(plugin.engine, muon.full_round(plugin, optimizer))
    reduction, skip = ShardReduction(plugin), None
    if plugin.partial_gradients is not None:
        skip = shard_hooks.skip_zero_shards(optimizer, partial(_waits, plugin, -1))
        # DeepSpeed drops its own gradients there, which ZeRO-2 does not.
        events.after_zero_grad.append(plugin.partial_gradients.drop)
    if hooks.device().type != "cpu" or not overlaps:
        shard_hooks.wrap_shard_reduction(events, reduction, skip)
    else:
        late = OverlappedReduceScatter(reduction, skip)
        shard_hooks.wrap_shard_reduction(events, late.reduce, late.partition)
        events.around_last_buckets.append(late.last_buckets)


def _reduce_to_owners(plugin: Plugin, optimizer: Any) -> None:
    events, communicator = plugin.hooks, plugin.communicator(optimizer.dp_process_group)
    muon.note_whole_matrices(plugin, optimizer)
    reduction = OwnerReduction(plugin, optimizer)
    optimizer_hooks.wrap_owner_reduction(events, reduction.bucket, reduction.reduce)
    if communicator.is_gloo:
        events.before_step.append(partial(require_equal, plugin, communicator, None))
    if plugin.partial_gradients is not None:
        optimizer_hooks.skip_zero_gradients(events, partial(_waits, plugin, communicator.rank))


def _waits(plugin: Plugin, owner: int, parameter: torch.Tensor) -> bool:
    """Whether gradients of a parameter wait; what DeepSpeed was given of it is zeros."""
    param = plugin.param_of(parameter)
    return param is not None and plugin.partial_gradients.waits((param, owner))


def _note_single_ranks(plugin: Plugin) -> None:
    """Explain why gradients cross in every micro-step where every node has one rank."""
    asked = plugin.scheme.block.gradients.cross == "step" and plugin.stage > 1
    alone = plugin.topology.node_size == 1 < plugin.topology.nodes
    if asked and alone and hooks.accumulates(plugin.engine):
        plugin.notices.append(
            "gradients are sent between nodes in every micro-step, because with one rank per node "
            "buffering them would take a full copy; zero_optimization.stage 1 sends them once"
        )


def _attach_replica(plugin: Plugin, optimizer: Any) -> None:
    """ZeRO-1 and 2."""
    engine, events = plugin.engine, plugin.hooks
    groups = list(optimizer_hooks.replica_groups(optimizer))
    foreign = sum(plugin.param_of(p) is None for group in groups for p in group.params)
    if foreign:
        raise RuntimeError(
            f"quantized_comm: the optimizer holds {foreign} parameter(s) that are not in "
            "engine.module; pass the module's own parameters to the optimizer"
        )
    plugin.serve([(p, group.process_group) for group in groups for p in group.params])
    safety.refuse_no_room(plugin)
    plugin.replica = replica = Replica(plugin, optimizer)
    keep = plugin.scheme.block.weights.reference is not None
    gathering = optimizer_hooks.weight_gather(optimizer, replica.gather_updated, keep_replica=keep)
    events.around_step.append(gathering)
    events.around_export.append(replica.exact)
    checkpoint.watch_reads(plugin)
    muon.attach(plugin, optimizer)
    _attach_gradients(plugin, optimizer)
    waiting = plugin.partial_gradients is not None
    plugin.notices += optimizer_hooks.lost_gradients(engine, optimizer, waiting=waiting)


def _fallback(plugin: Plugin, settings: FallbackConfig) -> safety.Fallback | None:
    """The vote on full precision, if there is anything to vote on."""
    watches = safety.kill_file() is not None
    if settings.on_nonfinite == "skip" and not watches:
        return None
    fallback = safety.Fallback(plugin, settings)
    if watches:
        plugin.notices.append(f"{safety.KILL_VARIABLE} watched")
        fallback.vote()  # the file may be there already
    return fallback


def _plugin_of(engine: Any, function: str) -> Plugin | None:
    """Return None for an engine without the plugin. TypeError for anything but an engine."""
    if not hasattr(engine, "zero_optimization_stage"):
        raise TypeError(
            f"ds_quant.{function} takes the engine that deepspeed.initialize or "
            f"accelerator.prepare has returned, not {type(engine).__name__}"
        )
    return getattr(engine, "ds_quant_plugin", None)


def exact_weights(engine: Any) -> AbstractContextManager[None]:
    """Exact weights in the module of a ZeRO-1/2 engine for the length of a ``with`` block.

    Needed around code of your own that reads the parameters, such as ``module.state_dict()``;
    DeepSpeed's own save functions do it by themselves. Saves inside the block keep what you write
    there. A collective: all ranks must enter and leave. Does nothing under ZeRO-3, where
    ``GatheredParameters`` is exact anyway, and on engines without the plugin.
    """
    plugin = _plugin_of(engine, "exact_weights")
    if plugin is None or plugin.replica is None:
        return nullcontext()
    return hooks.opened(plugin.hooks.around_export)


def resync(engine: Any) -> None:
    """Fill the module with the master weights, exactly and on all ranks.

    Shows what ``safe_set_full_fp32_param`` has written, and undoes what your code has written into
    ``parameter.data`` under ZeRO-1/2. Under ZeRO-3 it refills the node shard, if the scheme keeps
    one. A collective: all ranks must call it.
    """
    plugin = _plugin_of(engine, "resync")
    if plugin is not None:
        plugin.resync()


def report(engine: Any) -> dict[str, Any] | None:
    """Report what this rank has received so far; None if the engine has no ``quantized_comm``.

    Returns:
        scheme, stage, params (elements), steps, micro_steps, received_bytes[role][link] (into this
        rank, with role weights or gradients and link intra or inter (node); received per node is
        the sum of inter over the ranks of a node), collectives[role], not_counted (roles
        that both leave out, because DeepSpeed sends them its own way),
        gathers (of an element per micro-step under ZeRO-3, predicted and after the first steps
        counted, else 1), full_precision_share (0 to 1, of wire bytes), saved_bytes[role][link]
        (that full precision would have received besides, by formula), expected_bytes_per_param and
        expected_intra_bytes_per_param (per optimizer step; volumes, see [Note: bytes
        per parameter] of ``cost``),
        expected_most_bytes_per_param (the same at most: lossless differences of weights are as
        long as the training makes them), lossless_bits (per weight, as measured so far, None
        without them), lossless_padding (what moves besides them, a share of them), kept_bytes
        and expected_kept_bytes (memory on this rank that the scheme keeps between steps, host
        memory where parameters are offloaded),
        held_bytes (most bytes of gradients that waited for the last micro-step so far) and
        expected_held_bytes (the same by formula, if they wait),
        expected_peak_bytes (most bytes of messages and sums in a step, by the formula of memory),
        buffer_bytes (host buffers of 1 MB and more that messages use again in every step, none on
        CUDA, where torch's allocator keeps them),
        resyncs (exact refills after a checksum that differed), nonfinite_steps (found by
        ``fallback``, unless its policy is skip), exact_steps (in full precision because of that or
        of a kill file), killed (whether a kill file is there), line (the start-up line).
    """
    plugin = _plugin_of(engine, "report")
    return None if plugin is None else figures(plugin)
