"""ZeRO-1 and 2: gather updated weights and reduce gradients to their owners.

After a step the replica holds decoded weights on all ranks, the owner too, bit for bit. The fp32
master weights stay untouched, and exact replicas come back on demand (checkpoints, exports).

[Note: differences] With difference coding the replica itself is the reference: the owner encodes
what its master weights differ from it, everybody adds the decoded difference, in place and without
a copy. What one step loses is in the next difference. A replica that was made exact stays so, on
all ranks: a run that saves continues like a run that loads what was saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ds_quant.codec.bound import Coding, Rotation
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.gather import Part, owner_message
from ds_quant.comm.lossless import MOST_NUMEL
from ds_quant.comm.message import Copies, Cuts, Message, is_small
from ds_quant.comm.owners import Shape, plan
from ds_quant.comm.reduce import OwnerSums, Reduction
from ds_quant.comm.reduction_plan import LinkHop, Segment
from ds_quant.comm.transport import Fabric, Link, Pending
from ds_quant.kernels.wire import ceil_div
from ds_quant.zero import hooks, optimizer_hooks
from ds_quant.zero.engine import QuantizedEngine
from ds_quant.zero.held import HeldBucket, Member
from ds_quant.zero.lossless import Post, Window, replica_posts
from ds_quant.zero.optimizer_hooks import ReplicaGroup
from ds_quant.zero.param import GradientStreams, Param, Stream, exact_gradient

# ---- weights ----


class _GatherRun(NamedTuple):
    """One tensor of the message: [start, stop) of the flat replica, elements of one
    parameter from ``first`` on or, in full precision, several small ones of one owner. See
    [Note: bundles]. ``stream`` is None in full precision.
    """

    owner: int
    param: Param
    stream: Stream | None
    first: int
    ranges: list[tuple[int, int]]


class _GatherPlan(NamedTuple):
    """The gather of a window of the partitions: its parameters with their streams, the ranges that
    are concatenated for it and written back, and those of this rank's new weights, if they are not
    in the replica.
    """

    weights: list[tuple[Param, Stream | None]]
    message: Message
    scattered: Cuts
    spread: Copies
    own_scattered: Cuts | None  # ranges of the window of this rank's partition

    @classmethod
    def make(
        cls,
        runs: list[_GatherRun],
        dtype: torch.dtype,
        fabric: Fabric,
        first: int,
        *,
        from_master: bool,
    ) -> _GatherPlan:
        """first: element of the flat replica with which the window of this rank's partition begins.

        Tensors of the message: the replica, what is laid end to end of it, then with
        ``from_master`` this rank's new weights of the window and what is laid end to end of them.
        """
        places: dict[tuple[Param, bool], int] = {}  # of parameters among the weights
        weights, parts, moved, back, own_moved, end, own_end = [], [], [], [], [], 0, 0
        for run in runs:
            key = run.param, run.stream is None
            if key not in places:
                places[key] = len(weights)
                weights.append((run.param, run.stream))
            tensor, start, source = 0, run.ranges[0][0], None
            numel, is_own = sum(b - a for a, b in run.ranges), run.owner == fabric.rank
            if is_own:  # whose random bits are drawn
                weights[places[key]] = run.param, run.stream
            if is_own and from_master:
                source = 2, start - first
            if len(run.ranges) > 1:
                tensor, start, end = 1, end, end + numel
                moved += run.ranges
                back.append((run.ranges, start))
                if source is not None:
                    source, own_end = (3, own_end), own_end + numel
                    own_moved += [(a - first, b - first) for a, b in run.ranges]
            part = Part(run.owner, tensor, start, numel, places[key], run.first, source)
            parts.append(part)
        codecs = [
            (CastCodec(dtype), False) if s is None else (s.codec, s.difference) for _, s in weights
        ]
        message = owner_message(parts, codecs, fabric)
        own_scattered = Cuts(own_moved) if from_master else None
        return cls(weights, message, Cuts(moved), Copies(back), own_scattered)


class Replica:
    """The 16-bit (or fp32) replica of one ZeRO-1/2 engine."""

    def __init__(self, binding: QuantizedEngine, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._shows_exact = False
        self._holds_exact = True  # what was gathered last
        self._plans: dict[tuple, _GatherPlan] = {}  # do not change between steps

    def gather_updated(self) -> None:
        """Inside ``optimizer.step``: the own partition holds new exact weights, gather them."""
        self._binding.asked.add("weights")
        self._shows_exact = False  # also where a save that raised has left ``exact`` open
        step = self._binding.step + 1  # DeepSpeed counts the step only after it
        if self._binding.scheme.level_steps:
            self._binding.learn_levels(step, self._own_values())
        self._gather(step)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Show exact weights inside the context, decoded ones outside. All ranks must enter and
        leave.

        With difference coding the exact ones stay: see [Note: differences]. With exact differences
        they were never left.
        """
        shown = self._shows_exact or self._binding.scheme.lossless
        if not shown:
            self.resync()
            self._shows_exact = True
        try:
            yield
        finally:
            if self._shows_exact and not shown:
                self._shows_exact = False
                if self._binding.step > 0 and not self._binding.scheme.difference:
                    self._gather(self._binding.step)  # equal step, equal bits

    def is_exact(self) -> bool:
        """Whether the replica shows exact weights."""
        always = self._binding.scheme.lossless
        return always or self._holds_exact or self._binding.is_exact(self._binding.step)

    def resync(self) -> None:
        """Refill exact weights on all ranks from the master weights. A collective."""
        gather = partial(self._gather, self._binding.step, exact=True)
        optimizer_hooks.refresh_replica(self._optimizer, gather)

    def copies(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See Holder. The ranks of a process group hold equal replicas."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            yield self._binding.link(group.process_group).ranks[0], list(group.params)

    def _gather(self, step: int, *, exact: bool = False) -> None:
        """Gather all partitions, slice by slice so that the message stays within DeepSpeed's
        ``allgather_bucket_size``; slice i travels while slice i - 1 is decoded.
        """
        self._holds_exact = exact
        posted: deque[Pending[Any]] = deque()
        for post in self._posts(step, exact):
            posted.append(post())
            if len(posted) > 1:
                posted.popleft().wait()
        for last in posted:
            last.wait()

    def _posts(self, step: int, exact: bool) -> Iterator[Post]:
        """Yield what posts the gather of each window."""
        routes, exactly = self._binding.routes, list[Window]()
        differs = self._binding.scheme.lossless and not (exact or self._binding.is_exact(step))
        for group in optimizer_hooks.replica_groups(self._optimizer):
            fabric = self._binding.fabric(group.process_group)
            if fabric.size == 1:
                continue
            most = self._optimizer.allgather_bucket_size // fabric.size
            if differs and routes.differs_exactly(group.flat.dtype):
                codec = self._binding.scheme.exact_codec
                windows = _windows(group, fabric.size, min(most, MOST_NUMEL))
                exactly += [Window(group, fabric, w, codec) for w in windows]
                continue
            for window in _windows(group, fabric.size, most):
                yield partial(self._post, group, fabric, window, step, exact)
        if exactly:
            yield from replica_posts(exactly, self._binding.traffic)

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Link]]:
        """(parameter, this rank's elements of it, link) of every parameter."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            link = self._binding.link(group.process_group)
            for p in group.params:
                start, stop = _own_range(group.flat, p, link)
                yield p, group.flat[start:stop], link

    def _post(
        self, group: ReplicaGroup, fabric: Fabric, window: range, step: int, exact: bool
    ) -> Pending[None]:
        """Post the gather of ``window`` of the partitions."""
        # Else the new weights are in the replica already: exact ones, or absolute codes.
        from_master = self._binding.scheme.keeps_reference and not exact
        exact = exact or self._binding.is_exact(step)
        plan = self._plan(group, fabric, window, exact, from_master)
        flat = group.flat.view(-1)
        codings = [param.coding(stream, flat.dtype, step) for param, stream in plan.weights]
        tensors = [flat, *(plan.scattered.joined(flat) or [flat[:0]])]
        values = list(tensors)
        if plan.own_scattered is not None:
            # Rounded first, as the code of SDP4Bit does: see ``Coding.encode``.
            wanted = fabric.empty(len(window), dtype=flat.dtype, device=flat.device)
            wanted.copy_(group.master[window.start : window.stop])
            values += [wanted, *plan.own_scattered.joined(wanted)]
        gathered = plan.message.gather(fabric, values, codings, lambda: tensors)
        return gathered.then(lambda _: plan.spread.copy(flat, tensors[1]))

    def _plan(
        self, group: ReplicaGroup, fabric: Fabric, window: range, exact: bool, from_master: bool
    ) -> _GatherPlan:
        """Cut the flat replica at parameter and partition borders, keeping the elements that lie
        in ``window`` of their partition; alignment gaps stay out.
        """
        key = group.index, window, exact, from_master
        if key not in self._plans:
            runs = self._runs(group, fabric.whole, window, exact)
            first = fabric.rank * (group.flat.numel() // fabric.size) + window.start
            plan = _GatherPlan.make(runs, group.flat.dtype, fabric, first, from_master=from_master)
            self._plans[key] = plan
        return self._plans[key]

    def _runs(
        self, group: ReplicaGroup, link: Link, window: range, exact: bool
    ) -> list[_GatherRun]:
        flat, width = group.flat, group.flat.numel() // link.size
        runs: list[_GatherRun] = []
        bundles: dict[int, _GatherRun] = {}  # by owner
        for p in group.params:
            begin = _offset(flat, p)
            end = begin + p.numel()
            param = self._binding.param_of(p)
            for owner in range(begin // width, ceil_div(end, width)):
                start = max(begin, owner * width + window.start)
                stop = min(end, owner * width + window.stop)
                if start >= stop:
                    continue
                sender, stream = link.rank if owner == link.rank else None, None
                if not exact:
                    (stream,) = param.weight_streams(flat.dtype, rank=sender)
                small = stream is None and is_small(stop - start, CastCodec(flat.dtype))
                if small and owner in bundles:
                    _extend(bundles[owner].ranges, start, stop)
                    continue
                runs.append(_GatherRun(owner, param, stream, start - begin, [(start, stop)]))
                if small:
                    bundles[owner] = runs[-1]
        return runs


def _windows(group: ReplicaGroup, ranks: int, most: int) -> Iterator[range]:
    """Ranges of at most ``most`` elements that make up a partition."""
    width, stride = group.flat.numel() // ranks, max(1, most)
    for first in range(0, width, stride):
        yield range(first, min(first + stride, width))


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or extend the last one."""
    if ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], stop
    else:
        ranges.append((start, stop))


def _offset(flat: torch.Tensor, parameter: torch.Tensor) -> int:
    """Return the first element of a parameter, a view of the flat buffer."""
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()


def _own_range(flat: torch.Tensor, parameter: torch.Tensor, link: Link) -> tuple[int, int]:
    width = flat.numel() // link.size
    begin = _offset(flat, parameter)
    start = max(begin, link.rank * width)
    return start, max(start, min(begin + parameter.numel(), (link.rank + 1) * width))


# ---- gradients ----


_PLANS = 1000  # remembered


class _SumRun(NamedTuple):
    """One tensor of the message: elements [start, stop) of a bucket, of one parameter from
    ``first`` on or, in full precision, of several small ones of one owner.

    members: (parameter, first element in the bucket, last one
    exclusive).
    """

    owner: int
    streams: GradientStreams
    first: int
    members: list[tuple[Param, int, int]]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges of the bucket; adjacent members are one."""
        ranges: list[tuple[int, int]] = []
        for _, start, stop in self.members:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        return ranges

    def shape(self) -> Shape:
        """The facts that decide which rank sums it."""
        numel, form = sum(stop - start for _, start, stop in self.members), self.streams.form
        inner = form.codecs[0] if len(form.codecs) > 1 else None
        return Shape(self.owner, numel, form.codecs[-1], form.delivery, inner)


class _SumPlan(NamedTuple):
    """The reduction of a bucket: its gradients, the ranges that are concatenated first, and where
    this rank's runs and their sums lie.
    """

    gradients: list[GradientStreams]
    sums: OwnerSums
    scattered: Cuts
    own: Copies
    own_runs: list[_SumRun]
    members: tuple[Member, ...]
    own_places: dict[Member, tuple[int, int]]  # among the sums

    @classmethod
    def make(
        cls,
        runs: list[_SumRun],
        route: Sequence[LinkHop],
        link: Link,
        *,
        scale: float,
    ) -> _SumPlan:
        shapes = tuple([run.shape() for run in runs])
        pieces = plan(shapes, link.size, route[0].link.size if len(route) > 1 else None)
        places: dict[int, int] = {}  # of streams among the gradients
        shares, gradients, moved, end = [], [], [], 0
        for run, shape in zip(runs, shapes, strict=True):
            if id(run.streams) not in places:
                places[id(run.streams)] = len(gradients)
                gradients.append(run.streams)
            tensor, start = 0, run.ranges[0][0]
            if len(run.ranges) > 1:
                tensor, start, end = 1, end, end + shape.numel
                moved += run.ranges
            place = places[id(run.streams)]
            shares.append(Segment(tensor, start, shape.numel, place, run.first, run.owner))
        sums = OwnerSums(shares, pieces, [g.form for g in gradients], route, link, scale=scale)
        own = [(r, total) for r, total in zip(runs, sums.totals, strict=True) if total is not None]
        into = [(run.ranges, total) for run, total in own]
        own_places = {}
        for run, place in own:
            for param, start, stop in run.members:
                own_places[param, run.owner] = place, place + stop - start
                place += stop - start
        members = tuple([(param, run.owner) for run in runs for param, _, _ in run.members])
        own_runs = [run for run, _ in own]
        return cls(gradients, sums, Cuts(moved), Copies(into), own_runs, members, own_places)

    def hold(
        self,
        tensors: Sequence[torch.Tensor],
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
        held: HeldBucket | None,
    ) -> HeldBucket:
        """Add the tensors, summed inside the node, to what is held of them."""
        values = self.sums.held_room(tensors[0].device) if held is None else held.values
        how = codings, rotations
        added = Reduction(self.sums.plan, tensors, *how, None, held=values, fresh=held is None)
        added.wait()

        def cross() -> dict[Member, torch.Tensor]:
            totals = self.sums.add_up(None, *how, values)
            places = [self.own_places.get(member, (0, 0)) for member in self.members]
            parts = [totals[start:stop] for start, stop in places]
            return dict(zip(self.members, parts, strict=True))

        return HeldBucket(members=self.members, values=values, added=added, cross=cross)


class OwnerReduction:
    """ZeRO-1/2: replace ``allreduce_and_copy_with_multiple_ranks``.

    DeepSpeed hands over slices of its bucket by owner, with parameters run together. Where one
    parameter ends is read off the bucket, so that no group of a codec straddles two. See [Note:
    bundles] for small ones in full precision, which have no groups.
    """

    def __init__(self, binding: QuantizedEngine, optimizer: Any) -> None:
        self._binding, self._optimizer = binding, optimizer
        self._bucket: torch.Tensor | None = None
        self._divisor = 1.0
        self._params: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._plans: dict[tuple, _SumPlan] = {}

    @contextmanager
    def bucket(
        self, tensor: torch.Tensor, params: list[torch.Tensor], divisor: float
    ) -> Iterator[None]:
        """Inside, ``tensor`` is reduced, the sum divided by ``divisor``: ``params``, end to end.
        DeepSpeed frees its buffer at the end of a backward, so nothing may hold on to it.
        """
        self._bucket, self._params, self._divisor = tensor.view(-1), params, divisor
        self._starts = list(accumulate((p.numel() for p in params), initial=0))
        try:
            yield
        finally:
            self._bucket = None

    def reduce(self, original: Callable[[], None], call: dict[str, Any]) -> None:
        """Sum every slice for its owner, in place; other ranks' slices keep their old values."""
        self._binding.asked.add("gradients")
        owners = _single(call["bucket_ranks"])
        slices: list[torch.Tensor] = call["small_bucket"]
        group = call["process_group"] or self._optimizer.dp_process_group
        link = self._binding.link(group)
        if link.size == 1 or None in owners:  # several owners (Muon) need a full all-reduce
            for values in slices if self._divisor != 1 else ():
                values.div_(self._divisor)
            original()
            return
        dtype = call["communication_data_type"]
        route = self._binding.route(group)
        ranges = self._ranges(slices)
        plan = self._plan(ranges, owners, dtype, route, link)
        steps = self._binding.gradient_step, self._binding.signed_step(route)
        coded = [streams.codings(*steps) for streams in plan.gradients]
        tensors = [self._bucket, *plan.scattered.joined(self._bucket)]
        if self._binding.crosses_once(route):
            sums = self._rest(plan, tensors, *zip(*coded, strict=True))
        else:
            sums = plan.sums.add_up(tensors, *zip(*coded, strict=True))
        if sums is None:
            for owner, values in zip(owners, slices, strict=True):
                if owner == link.rank:
                    values.zero_()
            return
        plan.own.copy(self._bucket, sums)
        self._watch(plan.own_runs)
        outputs = call.get("output_bucket") or [None] * len(slices)
        for owner, values, output in zip(owners, slices, outputs, strict=True):
            if owner == link.rank:
                optimizer_hooks.add_to_partition(self._optimizer, output, values)

    def _rest(
        self,
        plan: _SumPlan,
        tensors: Sequence[torch.Tensor],
        codings: Sequence[tuple[Coding, ...]],
        rotations: Sequence[Rotation | None],
    ) -> torch.Tensor | None:
        """Reduce what crosses between nodes at the boundary only, None before it: see [Note: held
        gradients].
        """
        held, sums, how = self._binding.held, plan.sums, (codings, rotations)
        if held.are_left(plan.members):  # what is held of them takes the second hop alone
            held.take(None, plan.members)
            totals = sums.room(tensors[0].device).zero_()
        else:
            kept = held.take(sums, plan.members)
            if not hooks.at_boundary(self._binding.engine):
                held.put(sums, plan.hold(tensors, *how, kept))
                return None
            totals = sums.add_up(tensors, *how, None if kept is None else kept.values)
        for member, values in held.take_crossed(plan.members).items():
            start, stop = plan.own_places.get(member, (0, 0))
            totals[start:stop] += values
        return totals

    def _watch(self, runs: Iterable[_SumRun]) -> None:
        if self._binding.watch is not None:
            for param, start, stop in (member for run in runs for member in run.members):
                self._binding.watch.note(param, self._bucket[start:stop])

    def _plan(
        self,
        ranges: Sequence[tuple[int, int]],
        owners: Sequence[int],
        dtype: torch.dtype,
        route: tuple[LinkHop, ...],
        link: Link,
    ) -> _SumPlan:
        """Cut ranges of the bucket at parameter borders. Buckets come in the same order in every
        step, unless a parameter is without a gradient: what few there are is remembered.
        """
        exact = self._binding.is_exact(self._binding.step)
        params = tuple(map(id, self._params))
        key = tuple(ranges), tuple(owners), params, dtype, exact, link, route, self._divisor
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            runs = self._runs(ranges, owners, dtype, route, link.rank, exact)
            scale = 1 / self._divisor
            self._plans[key] = _SumPlan.make(runs, route, link, scale=scale)
        return self._plans[key]

    def _runs(
        self,
        ranges: Sequence[tuple[int, int]],
        owners: Sequence[int],
        dtype: torch.dtype,
        route: Sequence[LinkHop],
        rank: int,
        exact: bool,
    ) -> list[_SumRun]:
        runs: list[_SumRun] = []
        bundles: dict[int, _SumRun] = {}  # by owner
        for (position, end), owner in zip(ranges, owners, strict=True):
            place = bisect_right(self._starts, position) - 1
            while position < end:
                start, stop = self._starts[place], min(end, self._starts[place + 1])
                param = self._binding.param_of(self._params[place])
                if exact:
                    streams = exact_gradient(dtype, len(route))
                else:
                    streams = param.gradient_streams(dtype, rank=rank, hops=len(route))
                member = param, position, stop
                small = is_small(stop - position, streams.form.codecs[-1])
                if small and owner in bundles:
                    bundles[owner].members.append(member)
                elif position < stop:
                    runs.append(_SumRun(owner, streams, position - start, [member]))
                    if small:
                        bundles[owner] = runs[-1]
                position, place = stop, place + 1
        return runs

    def _ranges(self, slices: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Return the first element of every slice in the bucket and the one behind its last."""
        begin, itemsize = self._bucket.data_ptr(), self._bucket.element_size()
        found = []
        for values in slices:
            first, numel = (values.data_ptr() - begin) // itemsize, values.numel()
            if not 0 <= first <= self._bucket.numel() - numel:
                raise RuntimeError("quantized_comm: a gradient slice lies outside its bucket")
            found.append((first, first + numel))
        return found


def _single(owners: Sequence[Any]) -> list[int | None]:
    """DeepSpeed names owners by rank or, from 0.19.3 on, by sets of ranks; None for several."""
    found: list[int | None] = []
    for owner in owners:
        if isinstance(owner, frozenset):
            owner = next(iter(owner)) if len(owner) == 1 else None
        found.append(owner)
    return found
