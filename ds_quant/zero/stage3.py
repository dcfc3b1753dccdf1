"""ZeRO-3: fetch weights and reduce gradients.

[Note: two gathers] DeepSpeed fetches for computation through ``all_gather_coalesced`` and gathers
everything that must be exact (GatheredParameters, checkpoints, persistent parameters) through
``all_gather``. Only the first is quantized. A parameter can stay gathered with decoded values
after an evaluation, so the second drops such values and fetches exactly; else GatheredParameters
with a modifier rank would write decoded weights into the master shards. A parameter that a module
borrows from another one comes through the second in the first forward of a run, though it is
computed with: it is sent to the first, so that this forward equals later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ds_quant.codec.bound import Coding, Rotation, exactly
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.gather import all_gather
from ds_quant.comm.message import Bundle, sort_out
from ds_quant.comm.reduce import Reduction, ShardSums
from ds_quant.comm.reduction_plan import Form, LinkHop
from ds_quant.comm.transport import Link, Pending
from ds_quant.zero import hooks
from ds_quant.zero.engine import QuantizedEngine
from ds_quant.zero.held import HeldBucket, Member
from ds_quant.zero.node_shard import NodeShard
from ds_quant.zero.param import Param, exact_gradient

# ---- weights ----


class Fetch:
    """Serve the parameter fetches of one engine."""

    def __init__(self, binding: QuantizedEngine) -> None:
        self._binding = binding
        self.barrier = hooks.StepBarrier()
        self._parameters: list[torch.Tensor] = []
        self._hooked: dict[int, Any] = {}  # wrapped parameters by ds_id
        self._is_closed = False  # then hooks that nobody has removed may still call
        self.node: NodeShard | None = None

    def attach(self, params: Iterable[torch.Tensor]) -> None:
        """Serve the parameters of a module, and what is fetched together with them."""
        self._parameters = list(params)
        for before in dict.fromkeys(hooks.owner_of(p) for p in self._parameters):
            if before is not None and before.serves_only(self._parameters):
                before.close()  # an engine on the same module that nobody has destroyed
        self.hook_parameters(self._parameters)
        hooks.before_fetch(self._binding.hooks, self.hook_parameters)
        hooks.note_borrowed()

    def hook_parameters(self, params: Iterable[Any]) -> None:
        """Hook all parameters, also those created later or never quantized: which
        one of a fetch DeepSpeed calls, the first of a set, differs from rank to rank.
        """
        for p in params:
            if p.ds_id not in self._hooked and not self._is_closed:
                self._hooked[p.ds_id] = p
                hooks.wrap_fetch(p, self.fetch, self.gather_exactly, owner=self)

    def keep_in_node(self) -> NodeShard:
        """Serve gathers from a node shard from now on."""
        self.node = NodeShard(self._binding, self._parameters, self.barrier)
        for parameter in self._parameters:
            hooks.wrap_partition(parameter, self.node.mark_stale, owner=self)
        return self.node

    def serves_only(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether all parameters of its module are among these."""
        return {p.ds_id for p in self._parameters} <= {p.ds_id for p in params}

    def close(self) -> None:
        """Give the parameters back to DeepSpeed when the engine is destroyed, all exact."""
        self._is_closed = True
        if self.node is not None:
            self.node.close()
        for p in self._hooked.values():
            hooks.unwrap(p, owner=self)
            if self._pop_decoded(p) and hooks.is_available(p):
                p.ds_active_sub_modules.clear()  # a forward that was not finished has left them
                p.partition()
        self._hooked.clear()
        self._parameters = []

    def _pop_decoded(self, parameter: Any) -> bool:
        """Whether the values of the last gather may be decoded ones, which is forgotten."""
        param = self._binding.param_of(parameter)
        if param is None or not param.decoded:
            return False
        param.decoded = False
        return True

    def learn_levels(self) -> None:
        """Learn from the shards that the optimizer has written. DeepSpeed counts its step later."""
        self._binding.learn_levels(self._binding.step + 1, self._own_values())

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Link]]:
        """(parameter, this rank's shard, link) of every parameter."""
        for p in self._parameters:
            link = self._binding.link(p.ds_process_group)
            yield p, hooks.valid_shard(p, link.rank).to(hooks.device()), link

    def fetch(
        self, original: Callable[..., Any], params: Iterable[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace ``all_gather_coalesced``: post one gather per process group.

        Parameters that this engine does not know (created later) or that hold no floats go to
        DeepSpeed. The split and the order depend on rank-invariant facts only.
        """
        self._binding.asked.add("weights")
        params = sorted(params, key=lambda p: p.ds_id)  # the caller's order comes from a set
        if self._binding.gather_count is not None:
            self._binding.gather_count.fetched(params)
        groups: dict[int, list[Param]] = {}
        kept, others = [], []
        for p in params:
            param = self._binding.param_of(p)
            if param is not None and param.kept is not None:
                kept.append(param)
            elif param is not None and self._is_sent(p):
                groups.setdefault(id(p.ds_process_group), []).append(param)
            else:
                others.append(p)
                self._pop_decoded(p)
        self.barrier.wait()
        ours = [self._gather(group) for group in groups.values()]
        if kept:
            ours.append(self._gather_in_node(kept))
        if not others:
            return _FetchHandle(ours)
        theirs = original(others, *args, **kwargs)
        return _FetchHandle(ours, theirs) if ours else theirs

    def _is_sent(self, parameter: Any) -> bool:
        link = self._binding.link(parameter.ds_process_group)
        return hooks.is_sendable(parameter) and link.size > 1

    def _gather(self, params: list[Param]) -> _Gather:
        tensors = [param.tensor for param in params]
        fabric = self._binding.fabric(tensors[0].ds_process_group)
        for p in tensors:
            hooks.begin_fetch(p)
        step = self._binding.step
        exact = self._binding.is_exact(step)
        codings = [self._coding(param, fabric.rank, step, exact) for param in params]
        lossy = [not isinstance(c.codec, CastCodec) for c in codings]
        alone, bundles = sort_out(
            [p.ds_numel for p in tensors], [c.codec for c in codings], fabric.size
        )
        shards = [hooks.valid_shard(tensors[i], fabric.rank) for i in alone]
        shards += [
            torch.cat([tensors[i].ds_tensor.data for i in members]) for _, members in bundles
        ]
        device = hooks.device()
        pending = all_gather(
            [s.to(device, non_blocking=True) for s in shards],
            [tensors[i].ds_numel for i in alone] + [bundle.numel for bundle, _ in bundles],
            [codings[i] for i in (*alone, *(members[0] for _, members in bundles))],
            fabric,
        )

        order = [*alone, *(i for _, members in bundles for i in members)]
        bundles = [bundle for bundle, _ in bundles]
        return _Gather([params[i] for i in order], [lossy[i] for i in order], bundles, pending)

    def _gather_in_node(self, params: list[Param]) -> _Gather:
        for param in params:
            hooks.begin_fetch(param.tensor)
        pending, lossy = self.node.gather(params)
        return _Gather(params, lossy, [], pending)

    def _coding(self, param: Param, rank: int, step: int, exact: bool) -> Coding:
        dtype = param.tensor.ds_tensor.dtype
        if exact or param.tensor.ds_persist:  # stays gathered between steps, refreshed exactly
            return exactly(dtype)
        # The node shard serves all that the whole world shares.
        stream, *_ = param.weight_streams(dtype, rank=rank, whole=self.node is None)
        return param.coding(stream, dtype, step)

    def gather_exactly(
        self,
        original: Callable[..., Any],
        parameter: Any,
        param_list: Sequence[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace ``all_gather``. See [Note: two gathers]."""
        if param_list is None and hooks.take_borrowed(parameter):
            if hooks.is_unavailable(parameter):
                parameter.all_gather_coalesced([parameter]).wait()
            return None
        for p in [parameter] if param_list is None else param_list:
            if hooks.is_available(p) and self._pop_decoded(p):
                hooks.drop_values(p)
        if param_list is not None and not (args or kwargs) and hooks.awaits_last_gather_only():
            for p in param_list:
                original([p])
            return None
        return original(param_list, *args, **kwargs)


class _Gather(NamedTuple):
    """A posted gather: its parameters in the order of the result, small ones at the end in bundles.
    lossy: which values may differ from the exact ones.
    """

    params: list[Param]
    lossy: list[bool]
    bundles: list[Bundle]
    pending: Pending[list[torch.Tensor]]


class _FetchHandle:
    """DeepSpeed's gather handle, for our gathers and what it gathers itself.

    ``wait`` is called once per parameter, and DeepSpeed keeps the handle until the last one is
    used: so it keeps no values.
    """

    def __init__(self, ours: list[_Gather], theirs: Any = None) -> None:
        self._ours, self._theirs = ours, theirs

    def wait(self, **kwargs: Any) -> None:
        while self._ours:
            params, lossy, bundles, pending = self._ours[0]
            gathered = pending.wait()
            values = gathered[: len(gathered) - len(bundles)]
            for bundle, packed in zip(bundles, gathered[len(values) :], strict=True):
                values += bundle.unpack(packed)
            for param, full, is_lossy in zip(params, values, lossy, strict=True):
                hooks.fill(param.tensor, full)
                param.decoded = is_lossy
            del self._ours[0]
        if self._theirs is not None:
            self._theirs.wait(**kwargs)


# ---- gradients ----


_PLANS = 1000  # remembered
_NONE: Mapping[int, torch.Tensor] = MappingProxyType({})


class ShardReduction:
    """ZeRO-3: replace ``reduce_scatter_coalesced``."""

    def __init__(self, binding: QuantizedEngine) -> None:
        self._binding = binding
        self._plans: dict[tuple, ShardSums] = {}  # by sizes: buckets of equal layers share one

    def __call__(
        self,
        original: Callable[..., Any],
        params: Sequence[Any],
        tensors: list[torch.Tensor],
        group: Any = None,
    ) -> list[torch.Tensor]:
        """Mean over ``group`` of each tensor; returns this rank's unpadded shard, input dtype."""
        bucket = self.begin(params, tensors, group)
        return original(tensors, group) if bucket is None else bucket.finish()

    def begin(
        self, params: Sequence[Any], tensors: list[torch.Tensor], group: Any
    ) -> Bucket | None:
        """Post the reduction; None if it is DeepSpeed's own. Afterwards the tensors may change."""
        binding = self._binding
        binding.asked.add("gradients")
        link = binding.link(group)
        tracked = [binding.param_of(p) for p in params]
        if link.size == 1 or not tensors or None in tracked:
            return None
        route = binding.route(group)
        flat, sent = self._sent(tracked, tensors, route, link)
        plan = self._plan(flat, sent, route, link)
        if binding.crosses_once(route):
            under_way, take = self._begin_held(flat, sent, plan, tracked, link)
        else:
            sums = plan.room(flat[0].device, plan.dtype)
            under_way = Reduction(plan.plan, flat, sent.codings, sent.rotations, sums)

            def take() -> list[torch.Tensor]:
                return sent.shards(plan.shards(sums), link)

        return Bucket(binding, tracked, tensors, under_way, take)

    def _sent(
        self,
        tracked: Sequence[Param],
        tensors: Sequence[torch.Tensor],
        route: tuple[LinkHop, ...],
        link: Link,
    ) -> tuple[list[torch.Tensor], _Sent]:
        """Return what is sent of the gradients, (numel,) each, and how."""
        binding, rank = self._binding, link.rank
        exact, step, hops = binding.is_exact(binding.step), binding.gradient_step, len(route)
        signed = binding.signed_step(route)
        streams = []
        for parameter, gradient in zip(tracked, tensors, strict=True):
            dtype = gradient.dtype
            if exact:
                streams.append(exact_gradient(dtype, hops))
            else:
                streams.append(parameter.gradient_streams(dtype, rank=rank, hops=hops))
        # See [Note: bundles].
        last = [s.form.codecs[-1] for s in streams]
        alone, bundles = sort_out([g.numel() for g in tensors], last, link.size)
        flat = [tensors[i].reshape(-1) for i in alone]
        flat += [bundle.pack([tensors[i] for i in members]) for bundle, members in bundles]
        streams = [streams[i] for i in (*alone, *(members[0] for _, members in bundles))]
        codings, rotations = zip(*[s.codings(step, signed) for s in streams], strict=True)
        forms, dtypes = tuple([s.form for s in streams]), tuple([tensor.dtype for tensor in flat])
        return flat, _Sent(alone, bundles, dtypes, forms, codings, rotations)

    def _plan(
        self, flat: Sequence[torch.Tensor], sent: _Sent, route: tuple[LinkHop, ...], link: Link
    ) -> ShardSums:
        numels = tuple([tensor.numel() for tensor in flat])
        key = numels, sent.dtypes, sent.forms, route, link
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            how = {"scale": 1.0 / link.size, "dtype": sent.sum_dtype(flat[0].device)}
            self._plans[key] = ShardSums(numels, sent.forms, route, link, **how)
        return self._plans[key]

    def _begin_held(
        self,
        flat: Sequence[torch.Tensor],
        sent: _Sent,
        plan: ShardSums,
        tracked: Sequence[Param],
        link: Link,
    ) -> tuple[Reduction | None, Callable[[], list[torch.Tensor]]]:
        """Post a bucket that crosses between nodes at the boundary only: [Note: held gradients].

        Returns what is under way, and what makes this rank's shards when it is done.
        """
        store, device = self._binding.held, flat[0].device
        members = tuple([(param, -1) for param in tracked])
        under_way, sums = None, partial(_zeros, plan, sent.dtypes, device)
        is_left = store.are_left(members)  # what is held of them takes the second hop alone
        held = store.take(None if is_left else (plan, members), members)
        if held is not None:
            held.added.wait()
        if not is_left and not hooks.at_boundary(self._binding.engine):
            bucket = _hold(plan, flat, sent, link, members, held)
            store.put((plan, members), bucket)
            return bucket.added, lambda: sent.split(sums(), link.rank)
        crossed = store.take_crossed(members)
        if not is_left:
            room = plan.room(device, torch.float32 if crossed else plan.dtype)
            how, values = (sent.codings, sent.rotations), None if held is None else held.values
            under_way = Reduction(plan.plan, flat, *how, room, held=values)
            sums = partial(plan.shards, room)
        waited = {members.index(member): values for member, values in crossed.items()}
        return under_way, lambda: sent.shards(sums(), link, waited)


class _Sent(NamedTuple):
    """How the gradients of a bucket are sent: single ones first, then bundles with their members.
    See [Note: bundles]. All else is of what is sent, in this order.
    """

    alone: list[int]
    bundles: list[tuple[Bundle, list[int]]]
    dtypes: tuple[torch.dtype, ...]
    forms: tuple[Form, ...]
    codings: Sequence[tuple[Coding, ...]]
    rotations: Sequence[Rotation | None]

    def sum_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of all tensors if the kernels write sums in it for nothing, else fp32."""
        wanted = self.dtypes[0]
        coded = [c[-1] for c in self.codings if not isinstance(c[-1].codec, CastCodec)]
        found = {c.sum_dtype(wanted, device) for c in coded} | set(self.dtypes)
        return wanted if coded and found == {wanted} else torch.float32

    def shards(
        self, sums: Sequence[torch.Tensor], link: Link, waited: Mapping[int, torch.Tensor] = _NONE
    ) -> list[torch.Tensor]:
        """This rank's shards in the gradients' dtypes. ``waited``: added to some of them first."""
        if not waited:
            return self.split(_cast(sums, self.dtypes, link), link.rank)
        dtypes = dict(zip(self.alone, self.dtypes, strict=False))
        for (_, members), dtype in zip(self.bundles, self.dtypes[len(self.alone) :], strict=True):
            dtypes |= dict.fromkeys(members, dtype)
        parts = self.split(sums, link.rank)
        for place, values in waited.items():
            parts[place] = parts[place] + values
        return _cast(parts, [dtypes[place] for place in range(len(parts))], link)

    def split(self, sent: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Take the gradients' shards of ``rank`` out of what was sent."""
        found = dict(zip(self.alone, sent, strict=False))
        for (bundle, members), shard in zip(self.bundles, sent[len(self.alone) :], strict=True):
            found |= zip(members, bundle.unpack_shard(shard, rank), strict=True)
        return [found[index] for index in range(len(found))]


def _cast(
    sums: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], link: Link
) -> list[torch.Tensor]:
    """Cast every sum to its dtype; most have it, where kernels write it."""
    found = list(sums)
    different = [i for i, wanted in enumerate(dtypes) if sums[i].dtype != wanted]
    for dtype in {dtypes[place] for place in different}:
        places = [place for place in different if dtypes[place] == dtype]
        whole = [sums[place] for place in places]
        numels, device = [values.numel() for values in whole], whole[0].device
        narrow = link.empties(numels, dtype=dtype, device=device)
        torch._foreach_copy_(narrow, whole)
        for place, values in zip(places, narrow, strict=True):
            found[place] = values
    return found


class Bucket:
    """A running reduction of some gradients to this rank's shards.

    under_way: None if nothing was sent. take: makes the shards when that is done.
    shards: (length,) each, in the gradients' dtype; valid once ``finish`` has returned them.
    """

    def __init__(
        self,
        binding: QuantizedEngine,
        tracked: Sequence[Param],
        tensors: Sequence[torch.Tensor],
        under_way: Reduction | None,
        take: Callable[[], list[torch.Tensor]],
    ) -> None:
        self._binding, self._tracked = binding, tracked
        self._under_way, self._take = under_way, take
        self.shards = [g.new_empty(0) for g in tensors]
        self.finished = False

    def advance(self) -> None:
        """Post what was not posted yet, waiting for what comes before it."""
        if self._under_way is not None:
            self._under_way.advance()

    def finish(self) -> list[torch.Tensor]:
        """Wait for the shards."""
        watch = self._binding.watch
        if self._under_way is not None:
            self._under_way.wait()
        for parameter, shard, values in zip(self._tracked, self.shards, self._take(), strict=True):
            shard.data = values
            if watch is not None:
                watch.note(parameter, shard)
        self.finished = True
        return self.shards


def _hold(
    plan: ShardSums,
    flat: Sequence[torch.Tensor],
    sent: _Sent,
    link: Link,
    members: tuple[Member, ...],
    held: HeldBucket | None,
) -> HeldBucket:
    """Begin to add the tensors, summed inside the node, to what is held of them."""
    device, how = flat[0].device, (sent.codings, sent.rotations)
    values = None if held is None else held.values
    if values is None:
        values = link.empty(plan.plan.held_numel, dtype=torch.float32, device=device)
    added = Reduction(plan.plan, flat, *how, None, held=values, fresh=held is None)

    def cross() -> dict[Member, torch.Tensor]:
        added.wait()
        sums = plan.room(device)
        Reduction(plan.plan, None, *how, sums, held=values).wait()
        return dict(zip(members, sent.split(plan.shards(sums), link.rank), strict=True))

    return HeldBucket(members=members, values=values, added=added, cross=cross)


def _zeros(
    plan: ShardSums, dtypes: Sequence[torch.dtype], device: torch.device
) -> list[torch.Tensor]:
    """Shards of zeros, which share memory."""
    most = max(plan.shard_numels, default=0)
    memory = {dtype: torch.zeros(most, dtype=dtype, device=device) for dtype in set(dtypes)}
    return [memory[dtype][:n] for dtype, n in zip(dtypes, plan.shard_numels, strict=True)]
