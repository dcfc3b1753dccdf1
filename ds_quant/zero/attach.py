"""Attach a scheme to a DeepSpeed engine, and answer what a user asks of it.

Every rank measures, because links are measured together and codecs under the load that a step
brings; rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ds_quant.codec.plugin import load
from ds_quant.comm.topology import Topology
from ds_quant.comm.traffic import Traffic
from ds_quant.comm.transport import Link
from ds_quant.config.errors import did_you_mean
from ds_quant.config.presets import AUTOTUNE, CANDIDATES
from ds_quant.config.schema import FallbackConfig, QuantizedCommConfig
from ds_quant.kernels import dispatch, scratch
from ds_quant.policy import autotune, refusals
from ds_quant.policy.autotune import (
    Candidate,
    Links,
    Place,
    Rate,
    choose,
    codec_seconds,
    slice_pace,
)
from ds_quant.policy.cost import LABELS, LOSSLESS_BITS, shipped_bytes
from ds_quant.policy.refusals import starts
from ds_quant.policy.scheme import matches
from ds_quant.zero import checkpoint, hooks, log, optimizer_hooks, safety
from ds_quant.zero.cpu_overlap import LateReduction
from ds_quant.zero.engine import QuantizedEngine, broadcast
from ds_quant.zero.gather_count import GatherCount
from ds_quant.zero.held import GradientBuckets, HeldGradients
from ds_quant.zero.safety import (
    KILL_VARIABLE,
    Agreement,
    Corruption,
    Fallback,
    FirstStep,
    kill_file,
    promised_roles,
)
from ds_quant.zero.stage3 import Fetch, ShardReduction
from ds_quant.zero.stage12 import OwnerReduction, Replica
from ds_quant.zero.telemetry import Telemetry, check_file, listened_to
from ds_quant.zero.warmup import warm_up

# ---- the start-up line ----


def start_line(binding: QuantizedEngine) -> str:
    """Describe the engine in one line: scheme, bytes against DeepSpeed's, what stays exact,
    kernels.
    """
    costs, stage = binding.bill(), binding.stage
    micro_steps = binding.engine.gradient_accumulation_steps()
    waits = costs.crosses_once and hooks.accumulates(binding.engine)
    per_micro_step = stage == 3 and not costs.once_per_step and not (waits and micro_steps > 1)
    micro_steps = 1 if per_micro_step else micro_steps
    dtype = hooks.gradient_dtype(binding.engine)
    label = LABELS.get(dtype, "fp32")
    kept = [f"{n} {reason}" for reason, n in sorted(costs.kept.items())]
    if binding.scheme.lossless and binding.scheme.gradients is None:
        kept.insert(0, "all gradients")
    if _weights_stay(binding):
        kept.insert(0, "all weights")
    shipped = shipped_bytes(
        stage, dtype, micro_steps=micro_steps, gathers=costs.gathers, trained=costs.trained
    )
    inside = costs.intra_bytes(stage, micro_steps=micro_steps)
    parts = [
        f"{binding.scheme.name} on ZeRO-{stage}, "
        f"{costs.step_bytes(stage, micro_steps=micro_steps):.2f} "
        f"B/param/{'micro-step' if per_micro_step else 'step'}"
        f"{' between nodes' if inside else ''} "
        f"({label} {shipped:.2f}), "
        f"{100 * costs.full_precision_share:.1f} % of bytes left in full precision "
        f"({', '.join(kept) or 'none'})",
        f"{binding.topology.nodes} x {binding.topology.node_size} ranks",
        dispatch.describe(hooks.device(), binding.scheme.backend),
    ]
    if stage == 3:
        parts.append(f"{costs.gathers:.3g} gathers of the weights per micro-step")
    if inside:
        parts.append(f"{inside:.2f} B/param inside a node")
    if costs.memory:
        gigabytes = costs.memory * costs.numel / 1e9
        parts.append(f"keeps {costs.memory:.2f} B/param ({gigabytes:.3g} GB) more on every rank")
    if waits:
        gigabytes = costs.held * costs.numel / 1e9
        parts.append(
            f"gradients cross once per step and are held until then, {costs.held:.2f} B/param "
            f"({gigabytes:.3g} GB) on every rank"
        )
    if binding.topology.world > 1:
        parts.append(f"messages and sums of up to {binding.peak_bytes(costs) / 1e9:.2g} GB")
    if binding.scheme.warmup_steps:
        parts.append(f"from step {binding.scheme.warmup_steps} on")
    if costs.varies:
        most = costs.step_bytes(stage, micro_steps=micro_steps, most=True)
        parts.append(
            f"exact differences take {LOSSLESS_BITS} bits per weight at a learning rate of 3e-4, "
            f"fewer below it, and {most:.2f} B/param/step at most"
        )
    return "; ".join([*parts, *_why_weights_stay(binding), *binding.notices])


def _weights_stay(binding: QuantizedEngine) -> bool:
    """Whether a node shard has nobody to exchange quantized weights with."""
    sends = binding.scheme.weights is not None or binding.scheme.lossless
    is_exact = binding.routes.weights(dtype=torch.bfloat16).is_exact
    return sends and is_exact and binding.topology.world > 1


def _why_weights_stay(binding: QuantizedEngine) -> list[str]:
    """Say why and what would help, if they do."""
    if not _weights_stay(binding):
        return []
    if binding.scheme.lossless:
        return [
            "weights travel in full precision, because their differences cross between nodes and "
            "there is one node: zero_optimization.stage 2 sends differences inside a node, too"
        ]
    return [
        "weights stay exact, because this scheme quantizes what they cross between nodes and "
        'there is one node: weights.intra, such as {"bits": 8}, quantizes gathers inside it, '
        'scheme "qsdp" all weights'
    ]


def announce(binding: QuantizedEngine) -> None:
    """Log the start-up line and its warnings on rank 0."""
    for sentence in _idle_patterns(binding):
        log.log_rank0(f"quantized_comm: {sentence}")
    log.info_rank0(f"quantized_comm: {start_line(binding)}")


def _idle_patterns(binding: QuantizedEngine) -> list[str]:
    """One sentence per ``exclude`` pattern that matches no parameter."""
    names = [param.name for param in binding.all_params()]
    sentences = []
    for pattern in binding.scheme.exclude:
        if not any(matches(name, pattern) for name in names):
            near = did_you_mean(pattern, names, cutoff=0.4) or next(iter(names), "nothing")
            sentences.append(
                f'exclude pattern "{pattern}" matches no parameter; one is called {near}'
            )
    return sentences


# ---- autotune ----


def tune(binding: QuantizedEngine, config: QuantizedCommConfig) -> QuantizedCommConfig:
    """Choose the scheme that suits this engine; adds the reason as a notice, and the pace of slices
    on these links. A collective.
    """
    place = Place(
        stage=binding.stage,
        micro_steps=binding.engine.gradient_accumulation_steps(),
        nodes=binding.topology.nodes,
        node_size=binding.topology.node_size,
        modules=sum(map(_is_gathered, binding.engine.module.modules())),
        gathers=binding.gathers,
    )
    links = _links(binding)
    found = [_candidate(binding, config.picked(name), place) for name in _allowed(config, place)]
    choice = choose(found, place, links)
    (chosen,) = (c for c in found if c.name == choice.scheme)
    decided = choice.scheme, choice.reason(links), slice_pace(chosen, place, links)
    scheme, reason, pace = broadcast(decided, source=0)
    binding.notices.append(reason)
    if pace is not None:
        binding.slicing = replace(binding.slicing, pace=pace)
    return config.picked(scheme)


def _is_gathered(module: torch.nn.Module) -> bool:
    """Whether the module has parameters of its own that do not stay gathered."""
    return any(not getattr(p, "ds_persist", True) for p in module.parameters(recurse=False))


def _allowed(config: QuantizedCommConfig, place: Place) -> list[str]:
    """Drop candidates that start-up would refuse."""
    where = {"world": place.nodes * place.node_size, "node_size": place.node_size}
    return [n for n in CANDIDATES if starts(config.picked(n), stage=place.stage, **where)]


def _links(binding: QuantizedEngine) -> Links:
    """Measure both levels on separate links, so that nothing is counted as training."""
    fabric, topology = binding.fabric(None), binding.topology  # None: the world
    intra, inter = fabric.intra, fabric.inter
    if intra is None and topology.nodes == 1:
        intra = fabric.whole
    elif inter is None:
        inter = fabric.whole
    rates: list[Rate | None] = []
    for link in (intra, inter):
        if link is None:
            rates.append(None)
            continue
        uncounted = Link(link.process_group, topology=topology, traffic=Traffic())
        rates.append(autotune.measure_shortly(uncounted, hooks.device()))
    inside, between = rates
    if between is not None:  # every rank of a node receives its own share at the same time
        whole = between.bytes_per_second * topology.node_size
        between = Rate(bytes_per_second=whole, latency=between.latency)
    return Links(intra=inside, inter=between)


def _candidate(binding: QuantizedEngine, config: QuantizedCommConfig, place: Place) -> Candidate:
    scheme = config.to_scheme()
    dtypes = [p.dtype for p in binding.engine.module.parameters() if p.is_floating_point()]
    speeds = autotune.speeds_of(
        scheme,
        weights=dtypes[0] if dtypes else torch.float32,
        gradients=hooks.gradient_dtype(binding.engine),
        device=hooks.device(),
    )
    shipped = hooks.exact_gradient_reason(binding.engine) is not None
    codec = codec_seconds(scheme, speeds, place, shipped_gradients=shipped)
    return Candidate(name=config.scheme, bill=binding.bill(scheme), codec=codec)


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
    check_file(config.metrics, rank)
    topology = _agree(config, rank, world)
    binding = engine.ds_quant_engine = _bind(engine, config, topology)
    binding.hooks = hooks.Hooks(engine, optimizer)
    fetch = None
    if world == 1:
        binding.notices.append("single rank: nothing to communicate")
    elif binding.stage == 3:
        fetch = _attach_shards(binding, optimizer)
    else:
        _attach_replica(binding, optimizer)
    for role, settings in (("weights", config.weights), ("gradients", config.gradients)):
        if settings.enabled and settings.codec is not None:
            binding.notices.append(f"{role} in codec {settings.codec}")
    _connect(binding, config, fetch, trains=binding.stage < 3 or hooks.steps(optimizer))
    device = hooks.device()
    if device.type == "cuda" and world > 1:
        warm_up(binding, device)
    announce(binding)


def _connect(
    binding: QuantizedEngine, config: QuantizedCommConfig, fetch: Fetch | None, *, trains: bool
) -> None:
    """Fill the lists of events, whose order is decided here and nowhere else, and wrap.

    trains: False for inference, which has no optimizer step.
    """
    events, alone = binding.hooks, binding.topology.world == 1
    fallback = _fallback(binding, config.fallback)
    corruption = _corruption(binding, trains=trains)
    if trains:
        if corruption is not None:  # before the messages of the step are used for anything
            events.before_step.append(corruption.check)
            events.after_save.append(corruption.check)
        if fallback is not None:  # then all ranks agree how the next step is sent
            events.before_step.append(fallback.vote)
        if fetch is not None:  # levels and the node shard follow the new weights
            if binding.scheme.level_steps:
                events.after_update.append(fetch.learn_levels)
            if binding.node is not None:
                events.after_update.append(binding.node.after_step)
            events.after_update.append(fetch.barrier.record)
        holder = binding.node or (binding.replica if binding.scheme.keeps_reference else None)
        if holder is not None and binding.scheme.checksum_steps:  # compares what was updated
            events.after_update.append(Agreement(binding, holder).after_step)
        if not alone:
            events.after_step.append(_first_step(binding).after_step)
        if fallback is not None:  # may refresh what a skipped step left behind
            events.after_step.append(fallback.after_step)
        if fetch is not None:
            GatherCount.attach(binding)
        if listened_to(binding.engine, config.metrics) and not alone:
            binding.telemetry = Telemetry(binding, config.metrics)
            events.after_count.append(binding.telemetry.after_step)
            binding.telemetry.arm()
    dump, restore = partial(checkpoint.dump, binding), partial(checkpoint.restore, binding)
    events.keep_state(checkpoint.KEY, dump, restore)
    events.connect()


def _agree(config: QuantizedCommConfig, rank: int, world: int) -> Topology:
    """Run the handshake of all ranks and return the topology."""
    own = [load(r.codec) for r in (config.weights, config.gradients) if r.enabled and r.codec]
    must = {f"codec {codec.name}": codec.digest for codec in own}
    # A vote in which some ranks take no part would hang.
    must[KILL_VARIABLE] = "unset" if kill_file() is None else "set"
    facts = {"kernels": dispatch.describe(hooks.device(), config.backend)}
    agreed = safety.handshake(config=config, must=must, facts=facts, rank=rank, world=world)
    return Topology(world=world, node_size=config.node_size or agreed)


def _bind(engine: Any, config: QuantizedCommConfig, topology: Topology) -> QuantizedEngine:
    """Make the engine's binding with its scheme, which "autotune" chooses by measuring."""
    tuned = config.scheme == AUTOTUNE
    scheme = (config.picked("full_precision") if tuned else config).to_scheme()
    if engine.zero_optimization_stage() == 3:
        refusals.refuse_full_replica(
            config, world=topology.world, node_size=topology.node_size,
            model_bytes=hooks.total_bytes(engine.module),
        )  # fmt: skip
    binding = QuantizedEngine(engine, scheme, topology)
    if tuned and topology.world > 1:
        binding.scheme = tune(binding, config).to_scheme()
    return binding


def _attach_shards(binding: QuantizedEngine, optimizer: Any) -> Fetch:
    """ZeRO-3."""
    fetch = Fetch(binding)
    params = list(binding.engine.module.parameters())
    fetch.attach(params)
    binding.note_groups([p.ds_process_group for p in params])
    if binding.routes.keeps_shard:
        safety.refuse_no_room(binding)
        binding.node = fetch.keep_in_node()
    binding.hooks.on_destroy.append(fetch.close)
    if hooks.steps(optimizer):  # else inference: parameters only
        # Rows of exact differences need only follow what is loaded.
        if binding.node is not None and not binding.scheme.lossless:
            binding.hooks.after_checkpoint_event.append(binding.node.resync)
        if binding.gradients_travel():
            _attach_reduction(binding)
    return fetch


def _attach_reduction(binding: QuantizedEngine) -> None:
    events, overlaps = binding.hooks, binding.engine.zero_overlap_comm()
    _note_one_bucket(binding, binding.engine)
    _note_single_ranks(binding)
    reduction, skip = ShardReduction(binding), None
    if binding.crosses_at_boundary():
        skip = hooks.skip_zero_shards(events.optimizer, partial(_waits, binding, -1))
    if hooks.device().type != "cpu" or not overlaps:
        hooks.wrap_shard_reduction(events, reduction, skip)
    else:
        late = LateReduction(reduction)
        partition = late.partition if skip is None else hooks.inside(late.partition, skip)
        hooks.wrap_shard_reduction(events, late.reduce, partition)
        events.around_last_buckets.append(late.last_buckets)
    _hold(binding, hooks.ShardBuckets)
    if binding.held is not None:  # DeepSpeed drops its own gradients there, which ZeRO-2 does not
        events.after_zero_grad.append(binding.held.drop)
    events.after_backward.append(binding.after_backward)


def _hold(binding: QuantizedEngine, buckets: Callable[[Any], GradientBuckets]) -> None:
    """Hold gradients between micro-steps, if they cross between nodes once per step."""
    if not binding.crosses_at_boundary():
        return
    events = binding.hooks
    held = binding.held = HeldGradients(binding.engine)
    rest = partial(held.reduce_rest, buckets(events.optimizer))
    events.before_last_buckets.append(rest)
    events.before_gradients.append(partial(held.finish, events.optimizer))


def _waits(binding: QuantizedEngine, owner: int, parameter: torch.Tensor) -> bool:
    """Whether gradients of a parameter are held; what DeepSpeed was given of it is zeros."""
    param = binding.param_of(parameter)
    return param is not None and binding.held.waits((param, owner))


def _note_single_ranks(binding: QuantizedEngine) -> None:
    """Explain why gradients cross in every micro-step where every node has one rank."""
    asked = binding.scheme.cross == "step" and binding.stage > 1
    alone = binding.topology.node_size == 1 < binding.topology.nodes
    if asked and alone and hooks.accumulates(binding.engine):
        binding.notices.append(
            "gradients cross between nodes in every micro-step, because a rank that is alone in "
            "its node would hold all of them until the last one; zero_optimization.stage 1 keeps "
            "them and crosses once"
        )


def _attach_replica(binding: QuantizedEngine, optimizer: Any) -> None:
    """ZeRO-1 and 2."""
    engine, events = binding.engine, binding.hooks
    groups = list(optimizer_hooks.replica_groups(optimizer))
    foreign = sum(binding.param_of(p) is None for group in groups for p in group.params)
    if foreign:
        raise RuntimeError(
            f"quantized_comm: the optimizer holds {foreign} parameter(s) that are not in "
            "engine.module; pass the module's own parameters to the optimizer"
        )
    binding.note_groups([group.process_group for group in groups for _ in group.params])
    binding.replica = replica = Replica(binding, optimizer)
    keep = binding.scheme.keeps_reference
    gathering = optimizer_hooks.weight_gather(optimizer, replica.gather_updated, keep_replica=keep)
    events.around_step.append(gathering)
    optimizer_hooks.wrap_exports(events, replica.exact)
    checkpoint.wrap_state_dict()
    checkpoint.watch_state_dict(binding)
    if any(getattr(p, "use_muon", False) for p in engine.module.parameters()):
        binding.notices.append("buckets with Muon matrices split over ranks stay exact")
    if binding.gradients_travel():
        reduction = OwnerReduction(binding, optimizer)
        optimizer_hooks.wrap_owner_reduction(events, reduction.bucket, reduction.reduce)
        _note_single_ranks(binding)
        _hold(binding, optimizer_hooks.OwnerBuckets)
        if binding.crosses_at_boundary():
            rank = binding.link(optimizer.dp_process_group).rank
            optimizer_hooks.skip_zero_gradients(events, partial(_waits, binding, rank))
        events.after_backward.append(binding.after_backward)
    forgotten = optimizer_hooks.forgotten_gradients(engine, optimizer)
    if forgotten is not None and binding.held is None:  # zeros are forgotten without harm
        binding.notices.append(forgotten)


def _note_one_bucket(binding: QuantizedEngine, engine: Any) -> None:
    """DeepSpeed hands over a bucket when it is full or backward ends. Of a model that is mostly
    frozen, little is to be handed over at all.
    """
    room, params = engine.zero_reduce_bucket_size(), list(engine.module.parameters())
    numel = sum(hooks.shape_of(p).numel() for p in params)
    trained = sum(hooks.shape_of(p).numel() for p in params if p.requires_grad)
    if engine.zero_overlap_comm() and len(params) > 1 and numel / 2 < trained <= room:
        binding.notices.append(
            f"gradients are not reduced during backward: reduce_bucket_size={room} holds all "
            f"{trained} elements (try {trained // 8})"
        )


def _first_step(binding: QuantizedEngine) -> FirstStep:
    params = list(binding.engine.module.parameters())
    if binding.stage == 3:
        served = [(p, p.ds_process_group) for p in params]
    else:
        groups = optimizer_hooks.replica_groups(binding.hooks.optimizer)
        served = [(p, group.process_group) for group in groups for p in group.params]
    # DeepSpeed reduces Muon's whole matrices through its own code path.
    exact = any(getattr(p, "use_muon", False) for p in params)
    exact = exact or hooks.exact_gradient_reason(binding.engine) is not None
    return FirstStep(binding, promised_roles(binding, served, gradients=not exact))


def _corruption(binding: QuantizedEngine, *, trains: bool) -> Corruption | None:
    """The check of payload checksums, if messages have them."""
    if binding.findings is None or binding.topology.world == 1:
        return None
    binding.notices.append("every message carries a checksum")
    corruption = Corruption(binding)
    if not trains:  # no step at which all ranks could agree
        binding.findings.at_once = corruption.end_alone
    return corruption


def _fallback(binding: QuantizedEngine, settings: FallbackConfig) -> Fallback | None:
    """The vote on full precision, if there is anything to vote on."""
    watched = kill_file()
    fallback = Fallback(
        binding, on_nonfinite=settings.on_nonfinite, steps=settings.steps, kill_file=watched
    )
    if not fallback.votes():
        return None
    if watched is not None:
        binding.notices.append(f"{KILL_VARIABLE} watched")
        fallback.vote()  # the file may be there already
    return fallback


def _binding_of(engine: Any, function: str) -> QuantizedEngine | None:
    """Return None for an engine without the plugin. TypeError for anything but an engine."""
    if not hasattr(engine, "zero_optimization_stage"):
        raise TypeError(
            f"ds_quant.{function} takes the engine that deepspeed.initialize or "
            f"accelerator.prepare has returned, not {type(engine).__name__}"
        )
    return getattr(engine, "ds_quant_engine", None)


def exact_weights(engine: Any) -> AbstractContextManager[None]:
    """Exact weights in the module of a ZeRO-1/2 engine for the length of a ``with`` block.

    Needed around code of your own that reads the parameters, such as ``module.state_dict()``;
    DeepSpeed's own save functions do it by themselves. A collective: all ranks must enter and
    leave. Does nothing under ZeRO-3, where ``GatheredParameters`` is exact anyway, and on engines
    without the plugin.
    """
    binding = _binding_of(engine, "exact_weights")
    return nullcontext() if binding is None or binding.replica is None else binding.replica.exact()


def resync(engine: Any) -> None:
    """Bring back exact weights on all ranks after code of your own has changed them.

    Needed only by schemes that keep weights between steps (weight differences, node shard) and
    only for changes that DeepSpeed does not see, such as writing ``parameter.data`` under ZeRO-1/2.
    A collective: all ranks must call it.
    """
    binding = _binding_of(engine, "resync")
    for holder in (None,) if binding is None else (binding.replica, binding.node):
        if holder is not None:
            holder.resync()


def report(engine: Any) -> dict[str, Any] | None:
    """Report what this rank has received so far; None if the engine has no ``quantized_comm``.

    Returns:
        scheme, stage, params (elements), steps, micro_steps, received_bytes[role][link] with role
        weights or gradients and link intra or inter (node), collectives[role],
        gathers (of an element per micro-step under ZeRO-3, predicted and after the first steps
        counted, else 1), full_precision_share (0 to 1, of wire bytes), expected_bytes and
        expected_intra_bytes (per parameter and optimizer step, volumes as in ``cost``),
        expected_most_bytes (the same at most: exact differences of weights are as long as the
        training makes them), lossless_bits (per weight, as measured so far, None without exact
        differences), lossless_padding (what moves besides them, a share of them), kept_bytes
        and expected_kept_bytes (memory on this rank that the scheme keeps between steps),
        held_bytes (most bytes of gradients that waited for the last micro-step so far) and
        expected_held_bytes (the same by formula, if they wait),
        expected_peak_bytes (most bytes of messages and sums in a step, by the formula of memory),
        buffer_bytes (host buffers of 1 MB and more that messages use again in every step, none on
        CUDA, where torch's allocator keeps them, and the kernels' scratch memory in this process),
        resyncs (exact refills after a checksum that differed), nonfinite_steps (found by
        ``fallback``, unless its policy is skip), exact_steps (in full precision because of that or
        of a kill file), killed (whether a kill file is there), line (the start-up line).
    """
    binding = _binding_of(engine, "report")
    if binding is None:
        return None
    bill = binding.bill()
    micro_steps = engine.gradient_accumulation_steps()
    return {
        "scheme": binding.scheme.name,
        "stage": binding.stage,
        "world": binding.topology.world,
        "node_size": binding.topology.node_size,
        "params": bill.numel,
        "steps": engine.global_steps,
        "micro_steps": engine.micro_steps,
        "received_bytes": {r: dict(links) for r, links in binding.traffic.received.items()},
        "collectives": dict(binding.traffic.collectives),
        "gathers": binding.gathers,
        "full_precision_share": bill.full_precision_share,
        "expected_bytes": bill.step_bytes(binding.stage, micro_steps=micro_steps),
        "expected_intra_bytes": bill.intra_bytes(binding.stage, micro_steps=micro_steps),
        "expected_most_bytes": bill.step_bytes(binding.stage, micro_steps=micro_steps, most=True),
        "lossless_bits": binding.traffic.exact.bits,
        "lossless_padding": binding.traffic.exact.padding,
        "kept_bytes": 0 if binding.node is None else binding.node.nbytes(),
        "expected_kept_bytes": bill.memory * bill.numel,
        "held_bytes": 0 if binding.held is None else binding.held.most_nbytes,
        "expected_held_bytes": bill.held * bill.numel if hooks.accumulates(engine) else 0,
        "expected_peak_bytes": binding.peak_bytes(bill),
        "buffer_bytes": binding.buffers.nbytes + scratch.nbytes(),
        "resyncs": binding.state.resyncs,
        "nonfinite_steps": binding.state.nonfinite_steps,
        "exact_steps": binding.state.exact_steps,
        "killed": binding.state.killed,
        "line": start_line(binding),
    }
