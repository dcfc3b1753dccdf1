"""ZeRO-1 and 2: gather updated weights into the replica.

[Note: replica] Every rank holds all weights in 16 bits (or fp32), the *replica*. DeepSpeed splits
it into one *partition* per rank; the rank owns it and updates it from fp32 *master weights*. After
a step the replica holds decoded weights on all ranks, the owner too, bit for bit. The master
weights stay untouched. Exact replicas are gathered again on demand, for checkpoints and exports.
They leave the parameters that user code has written since the last gather as they are; the next
step overwrites these, as DeepSpeed does without this plugin.

[Note: differences] With difference coding the replica itself is the reference: the owner encodes
the difference between its master weights and the replica, and all ranks add the decoded difference
in place, without a copy. The quantization error of a step is carried into the next difference. A
replica that was made exact stays so, on all ranks: a run that saves continues like one that loads
the checkpoint. A parameter that user code has written, on any rank, is no reference: ranks may hold
other values, or values that are far off or not finite. Its weights are sent whole, in full
precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ds_quant.codec.bound import VECTORS_PER_ELEMENT
from ds_quant.codec.codec import CastCodec
from ds_quant.comm.lossless_gather import MOST_NUMEL, Post
from ds_quant.comm.message import GatherSlice, Message
from ds_quant.comm.small_tensors import SMALL_NUMEL, group_small_tensors, is_tight
from ds_quant.comm.transport import Communicator, Pending
from ds_quant.runtime import log
from ds_quant.runtime.param import HopCodec, Param
from ds_quant.runtime.plan_cache import PlanCache
from ds_quant.zero import optimizer_hooks
from ds_quant.zero.deepspeed_types import OwnerOptimizer, ZeroParameter
from ds_quant.zero.front import EngineFront
from ds_quant.zero.lossless import Window, replica_posts
from ds_quant.zero.optimizer_hooks import ReplicaGroup
from ds_quant.zero.written_replica import WrittenReplica

# Parameters of a window of the partitions with their codecs, and the gather of the window. Its
# buffers are the replica and, if they are not in the replica, this rank's new weights.
_GatherPlan = tuple[list[tuple[Param, HopCodec]], Message]

_ALIGNMENT = 4096  # elements, of the windows of a partition; part of the wire format


class SentWeights(NamedTuple):
    """The content of a gather of all weights.

    step: the optimizer step that has changed the weights.
    exact: send all in full precision.
    from_master: new weights are in a buffer of their own, not in the replica.
    written: parameters whose replica is no reference: sent in full precision, too.
    """

    step: int
    exact: bool
    from_master: bool
    written: frozenset[Param]


class Replica:
    """The replica of one ZeRO-1/2 engine: see [Note: replica].

    holds_exact: True if exact weights were gathered last. User code may have changed them since.
    """

    def __init__(self, front: EngineFront, optimizer: OwnerOptimizer) -> None:
        self.front = front
        self._run = front.run
        self._optimizer = optimizer
        self.holds_exact = True
        self._always_exact = self._run.scheme.weights is None
        # The replica is the reference of differences, which are taken from the master weights.
        self._has_reference = self._run.scheme.block.weights.difference_key is not None
        self._plans: PlanCache[Hashable, _GatherPlan] = PlanCache()  # emptied when it is full
        # Offsets of the parameters. Kept, because user code may give a parameter other storage.
        self._offsets: dict[int, int] = {}
        for group in optimizer_hooks.replica_groups(optimizer):
            for p in group.params:
                self._offsets[id(p)] = _offset(group.flat, p)
        self._writes = WrittenReplica(self._run, optimizer, self._offsets)
        self._has_logged_writes = False
        self._take_fingerprints()

    # ---- after a step ----

    def gather_updated(self) -> None:
        """Gather the updated weights. Called inside ``optimizer.step``."""
        self.front.requested_roles.add("weights")
        step = self.front.step + 1  # DeepSpeed counts the step only after it
        if self._run.scheme.level_steps:
            self._run.learn_levels(step, self._own_values())
        written: list[Param] = []
        if self._has_reference and not self._run.is_full_precision(step):
            written = [self._run.known_param(p) for p in self._writes.written()]
        self._run.begin_step(step)
        if written:
            self._run.traffic.is_exact = True  # of some; the savings of this step are left out
        self._gather(step, written=frozenset(written))
        if written:
            self._log_writes(written, "this step sends their exact weights")

    # ---- exact weights ----

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Show exact weights inside the context, decoded ones outside. A collective.

        After an error they stay exact: a rank that fails alone must not wait for the others. With
        difference coding they stay exact, too: see [Note: differences].
        """
        held_exact = self.holds_exact
        self.show_exact()
        yield
        if not held_exact and self.holds_exact:  # else a step inside has gathered new ones
            self._gather_decoded()

    def show_exact(self) -> None:
        """Show exact weights until the next step. A collective, unless they are shown already."""
        if not self.holds_exact:
            self._refill(exact=True)

    def after_load(self) -> None:
        """Follow a load: DeepSpeed has loaded master weights and an exact replica."""
        self.holds_exact = True
        self._writes.forget()
        self._gather_decoded()
        self._take_fingerprints()

    def resync(self) -> None:
        """Refill exact weights on all ranks from the master weights. A collective."""
        self._writes.forget()
        self._refill(exact=True)

    def _gather_decoded(self) -> None:
        """Repeat the gather of the last step, which gives the same bits."""
        run, step = self._run, self.front.step
        stays_exact = self._always_exact or run.scheme.difference or run.is_full_precision(step)
        if step > 0 and not stays_exact:
            self._refill(exact=False)

    def _refill(self, *, exact: bool) -> None:
        """Gather the master weights, except of parameters that user code has written here."""
        optimizer_hooks.require_replica(self._optimizer)
        written = [(p, p.detach().clone()) for p in self._writes.written_here()]
        optimizer_hooks.finish_background_save(self.front.engine)
        gather = partial(self._gather, self.front.step, exact=exact)
        with self._run.traffic.adding():
            optimizer_hooks.refresh_replica(self._optimizer, gather)
        for p, values in written:
            p.data.copy_(values)
        if written:
            params = [self._run.known_param(p) for p, _ in written]
            self._log_writes(params, "exports hold them as they are, and the next step overwrites")

    def _take_fingerprints(self) -> None:
        """Take the fingerprints of the replica, if exports or steps compare them."""
        if self._has_reference or not self._always_exact:
            self._writes.take()

    def _log_writes(self, written: Sequence[Param], consequence: str) -> None:
        """Log the first write that was noticed."""
        if self._has_logged_writes:
            return
        self._has_logged_writes = True
        log.log_rank0(
            f"quantized_comm: your code has written {len(written)} parameter(s) since the last "
            f"step, such as {written[0].name}: {consequence} (logged once)"
        )

    # ---- all holders ----

    def comparable_weights(self) -> Iterator[tuple[int, list[ZeroParameter]]]:
        """See ``copies.WeightCache``. The ranks of a process group hold equal replicas."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            yield self._run.communicator(group.process_group).ranks[0], list(group.params)

    def _own_values(self) -> Iterator[tuple[Param | None, Tensor, Communicator]]:
        """Yield every parameter, this rank's elements of it, and the ranks that share it."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            communicator = self._run.communicator(group.process_group)
            width = group.flat.numel() // communicator.size
            partition_start = communicator.rank * width
            partition_stop = partition_start + width
            for p in group.params:
                begin = self._offsets[id(p)]
                start = max(begin, partition_start)
                stop = max(start, min(begin + p.numel(), partition_stop))
                yield self._run.param_of(p), group.flat[start:stop], communicator

    # ---- gathers ----

    def _gather(
        self, step: int, *, exact: bool = False, written: frozenset[Param] = frozenset()
    ) -> None:
        """Gather all partitions, window by window.

        A message stays within DeepSpeed's ``allgather_bucket_size``. One window is sent while the
        one before is decoded.

        written: parameters whose replica is no reference.
        """
        sent = SentWeights(
            step=step,
            exact=exact or self._run.is_full_precision(step),
            # Without a reference the new weights are in the replica already.
            from_master=self._has_reference and not exact,
            written=written,
        )
        self.holds_exact = sent.exact or self._always_exact
        posted: deque[Pending[Any]] = deque()
        for post in self._posts(sent):
            posted.append(post())
            if len(posted) > 1:
                posted.popleft().wait()
        for last in posted:
            last.wait()
        self._take_fingerprints()

    def _posts(self, sent: SentWeights) -> Iterator[Post]:
        """Yield per window a function that posts its gather."""
        run = self._run
        lossless_windows: list[Window] = []
        sends_differences = run.scheme.lossless and not sent.exact
        for group in optimizer_hooks.replica_groups(self._optimizer):
            hierarchy = run.level(group.process_group).hierarchy
            if hierarchy.size == 1:
                continue
            most_numel = self._optimizer.allgather_bucket_size // hierarchy.size
            is_lossless = sends_differences and run.routes.sends_lossless(group.flat.dtype)
            if is_lossless:
                most_numel = min(most_numel, MOST_NUMEL)
            for within in _window_ranges(group, hierarchy.size, most_numel):
                window = Window(group, hierarchy, within)
                if is_lossless and not self._holds_any(window, sent.written):
                    lossless_windows.append(window)
                else:
                    yield partial(self._post, window, sent)
        if lossless_windows:
            yield from replica_posts(lossless_windows, run.traffic)

    def _post(self, window: Window, sent: SentWeights) -> Pending[None]:
        """Post the gather of a window of the partitions."""
        weights, message = self._plan(window, sent)
        flat, hierarchy = window.group.flat.view(-1), window.hierarchy
        bound_codecs = [
            param.bound_codec(hop_codec, flat.dtype, sent.step) for param, hop_codec in weights
        ]
        values = [flat]
        if sent.from_master:
            # Rounded before the difference is taken, as in SDP4Bit: see docs/wire_format.md.
            values.append(window.group.updated(window.within, hierarchy.empty))
        return message.gather(hierarchy, values, bound_codecs, lambda: [flat]).then(lambda _: None)

    def _plan(self, window: Window, sent: SentWeights) -> _GatherPlan:
        """Plan the gather of a window of all partitions.

        Alignment gaps between parameters are left out. Small slices of an owner follow each other,
        at the place of the first one.
        """
        group, hierarchy, within = window
        key = group.group_index, within, sent.exact, sent.from_master, sent.written
        known = self._plans.get(key)
        if known is not None:
            return known
        dtype = group.flat.dtype
        width = group.flat.numel() // hierarchy.size
        weights: list[tuple[Param, HopCodec]] = []
        # Index in ``weights``. A quantized parameter has an entry of its own; all slices in full
        # precision with the same codec share one.
        indices: dict[Hashable, int] = {}
        slices: list[tuple[GatherSlice, int | None]] = []
        for p, owner, start, stop in group.owned_ranges(self._offsets, width, within):
            param = self._run.known_param(p)
            is_own = owner == hierarchy.rank
            hop_codec: HopCodec | None = None
            if not sent.exact and param not in sent.written:
                (hop_codec,) = param.weight_codecs(dtype, rank=hierarchy.rank if is_own else None)
            index_key: Hashable = param
            if hop_codec is None:
                index_key = CastCodec(dtype, tight=stop - start <= SMALL_NUMEL)
                hop_codec = HopCodec(index_key, key=None)
            index = indices.setdefault(index_key, len(weights))
            if index == len(weights):
                weights.append((param, hop_codec))
            elif is_own:  # only the sender's codec draws random bits
                weights[index] = param, hop_codec
            window_start = owner * width + within.start
            gather_slice = GatherSlice(
                owner,
                hop_codec.codec,
                stop - start,
                index,
                source=(1, start - window_start) if sent.from_master else (0, start),
                target=(0, start),
                vector=VECTORS_PER_ELEMENT * (start - self._offsets[id(p)]),
                is_difference=hop_codec.difference,
            )
            slices.append((gather_slice, owner if is_tight(hop_codec.codec) else None))
        message = Message(
            group_small_tensors(slices),
            rank=hierarchy.rank,
            ranks=hierarchy.size,
            node_size=hierarchy.node_size,
        )
        return self._plans.add(key, (weights, message))

    def _holds_any(self, window: Window, params: frozenset[Param]) -> bool:
        """Return True if the window of any partition holds elements of these parameters."""
        if not params:
            return False
        group, hierarchy, within = window
        width = group.flat.numel() // hierarchy.size
        owned = group.owned_ranges(self._offsets, width, within)
        return any(self._run.known_param(part.parameter) in params for part in owned)


def _window_ranges(group: ReplicaGroup, ranks: int, most_numel: int) -> Iterator[range]:
    """Cut a partition into ranges of at most ``most_numel`` elements."""
    width = group.flat.numel() // ranks
    stride = max(1, most_numel)
    if stride > _ALIGNMENT:
        stride -= stride % _ALIGNMENT
    for first in range(0, width, stride):
        yield range(first, min(first + stride, width))


def _offset(flat: Tensor, parameter: Tensor) -> int:
    """Return the first element of a parameter, a view of the flat buffer."""
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
