"""ZeRO-1 and 2: gather updated weights; gradients.py reduces gradients to their owners.

After a step the replica holds decoded weights on all ranks, the owner too, bit for bit. The fp32
master weights stay untouched, and exact replicas come back on demand (checkpoints, exports).
What user code has written since the last gather stays in place.

[Note: differences] With difference coding the replica itself is the reference: the owner encodes
what its master weights differ from it, everybody adds the decoded difference, in place and without
a copy. What one step loses is in the next difference. A replica that was made exact stays so, on
all ranks: a run that saves continues like a run that loads what was saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_quant.codec.bound import VECTORS_PER_ELEMENT
from ds_quant.codec.codec import CastCodec, Codec
from ds_quant.comm.lossless_gather import MOST_NUMEL
from ds_quant.comm.message import SMALL_NUMEL, GatherSlice, Message, is_tight, small_together
from ds_quant.comm.transport import Communicator, HierarchicalCommunicator, Pending
from ds_quant.kernels.wire import ceil_div
from ds_quant.zero import log, optimizer_hooks
from ds_quant.zero.edited_weights import EditDetector
from ds_quant.zero.lossless import Post, Window, replica_posts
from ds_quant.zero.optimizer_hooks import ReplicaGroup
from ds_quant.zero.param import HopCodec, Param
from ds_quant.zero.plugin import Plugin

# Codecs of the parameters of a window of the partitions, and its gather, whose buffers are the
# replica and this rank's new weights of the window, if they are not in the replica.
_GatherPlan = tuple[list[tuple[Param, HopCodec]], Message]


class Replica:
    """The 16-bit (or fp32) replica of one ZeRO-1/2 engine."""

    def __init__(self, plugin: Plugin, optimizer: Any) -> None:
        self._plugin, self._optimizer = plugin, optimizer
        self.holds_exact = True  # what was gathered last, whatever user code has made of it
        self._always_exact = plugin.scheme.weights is None
        self._plans: dict[tuple, _GatherPlan] = {}  # do not change between steps
        groups = list(optimizer_hooks.replica_groups(optimizer))
        # User code may give a parameter other storage.
        self._begins = {id(p): _offset(group.flat, p) for group in groups for p in group.params}
        self._samples = EditDetector(
            (g.flat, [(p, self._begins[id(p)]) for p in g.params]) for g in groups
        )
        self._said_kept = False

    def gather_updated(self) -> None:
        """Inside ``optimizer.step``: the own partition holds new exact weights, gather them."""
        self._plugin.requested_roles.add("weights")
        step = self._plugin.step + 1  # DeepSpeed counts the step only after it
        if self._plugin.scheme.level_steps:
            self._plugin.learn_levels(step, self._own_values())
        self._gather(step)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Show exact weights inside the context, decoded ones outside. All ranks must enter and
        leave. After an error they stay exact: a rank that fails alone must not wait for others.

        With difference coding the exact ones stay: see [Note: differences].
        """
        shown = self.holds_exact
        self.show_exact()
        yield
        if not shown and self.holds_exact:  # else there was a step inside
            self._decode()

    def show_exact(self) -> None:
        """Show exact weights until the next step. A collective, unless they are shown already."""
        if not self.holds_exact:
            self._refill(exact=True)

    def after_load(self) -> None:
        """Follow DeepSpeed, which has loaded master weights and an exact replica."""
        self.holds_exact = True
        self._samples.forget()
        self._decode()

    def resync(self) -> None:
        """Refill exact weights on all ranks from the master weights. A collective."""
        self._samples.forget()
        self._refill(exact=True)

    def _decode(self) -> None:
        """Show again what the last step has gathered: equal step, equal bits."""
        plugin = self._plugin
        stays = (
            self._always_exact or plugin.scheme.difference or plugin.is_full_precision(plugin.step)
        )
        if plugin.step > 0 and not stays:
            self._refill(exact=False)

    def _refill(self, *, exact: bool) -> None:
        """Gather the master weights; what user code has written stays: [Note: written weights]."""
        optimizer_hooks.require_replica(self._optimizer)
        written = [(p, p.detach().clone()) for p in self._samples.edited_params()]
        optimizer_hooks.finish_background_save(self._plugin.engine)
        gather = partial(self._gather, self._plugin.step, exact=exact)
        optimizer_hooks.refresh_replica(self._optimizer, gather)
        for p, values in written:
            p.data.copy_(values)
        if written and not self._said_kept:
            self._said_kept = True
            log.log_rank0(
                f"quantized_comm: your code has written {len(written)} parameter(s) since the last "
                f"step, such as {self._plugin.param_of(written[0][0]).name}: exports hold them as "
                "they are, and the next step overwrites them, as without this plugin (logged once)"
            )

    def copies(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """See ``Plugin.keeper``. The ranks of a process group hold equal replicas."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            yield self._plugin.communicator(group.process_group).ranks[0], list(group.params)

    def _gather(self, step: int, *, exact: bool = False) -> None:
        """Gather all partitions, slice by slice so that the message stays within DeepSpeed's
        ``allgather_bucket_size``; slice i travels while slice i - 1 is decoded.
        """
        self.holds_exact = exact or self._always_exact or self._plugin.is_full_precision(step)
        posted: deque[Pending[Any]] = deque()
        for post in self._posts(step, exact):
            posted.append(post())
            if len(posted) > 1:
                posted.popleft().wait()
        for last in posted:
            last.wait()
        if not self._always_exact:
            self._samples.take()

    def _posts(self, step: int, exact: bool) -> Iterator[Post]:
        """Yield what posts the gather of each window."""
        routes, lossless_windows = self._plugin.routes, list[Window]()
        differs = self._plugin.scheme.lossless and not (
            exact or self._plugin.is_full_precision(step)
        )
        for group in optimizer_hooks.replica_groups(self._optimizer):
            hierarchy = self._plugin.hierarchy(group.process_group)
            if hierarchy.size == 1:
                continue
            most = self._optimizer.allgather_bucket_size // hierarchy.size
            if differs and routes.sends_lossless(group.flat.dtype):
                windows = _windows(group, hierarchy.size, min(most, MOST_NUMEL))
                lossless_windows += [Window(group, hierarchy, w) for w in windows]
                continue
            for window in _windows(group, hierarchy.size, most):
                yield partial(self._post, group, hierarchy, window, step, exact)
        if lossless_windows:
            yield from replica_posts(lossless_windows, self._plugin.traffic)

    def _own_values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Communicator]]:
        """(parameter, this rank's elements of it, link) of every parameter."""
        for group in optimizer_hooks.replica_groups(self._optimizer):
            communicator = self._plugin.communicator(group.process_group)
            for p in group.params:
                width = group.flat.numel() // communicator.size
                begin = self._begins[id(p)]
                start = max(begin, communicator.rank * width)
                stop = max(start, min(begin + p.numel(), (communicator.rank + 1) * width))
                yield p, group.flat[start:stop], communicator

    def _post(
        self,
        group: ReplicaGroup,
        hierarchy: HierarchicalCommunicator,
        window: range,
        step: int,
        exact: bool,
    ) -> Pending[None]:
        """Post the gather of ``window`` of the partitions."""
        # Else the new weights are in the replica already: exact ones, or absolute codes.
        from_master = self._plugin.scheme.block.weights.reference and not exact
        exact = exact or self._plugin.is_full_precision(step)
        weights, message = self._plan(group, hierarchy, window, exact, from_master)
        flat = group.flat.view(-1)
        bound_codecs = [param.bound_codec(stream, flat.dtype, step) for param, stream in weights]
        values = [flat]
        if from_master:
            # Rounded before the difference is taken, as in SDP4Bit: see docs/wire_format.md.
            values.append(group.updated(window, hierarchy.empty))
        return message.gather(hierarchy, values, bound_codecs, lambda: [flat]).then(lambda _: None)

    def _plan(
        self,
        group: ReplicaGroup,
        hierarchy: HierarchicalCommunicator,
        window: range,
        exact: bool,
        from_master: bool,
    ) -> _GatherPlan:
        """Cut the flat replica at parameter and partition borders, keeping the elements that lie
        in ``window`` of their partition; alignment gaps stay out. Small ones of an owner follow
        each other, where the first of them is.
        """
        key = group.index, window, exact, from_master
        if key in self._plans:
            return self._plans[key]
        flat, width = group.flat, group.flat.numel() // hierarchy.size
        weights: list[tuple[Param, HopCodec]] = []
        places: dict[Param | Codec, int] = {}  # of parameters, and of exact codecs, in the weights
        parts: list[tuple[GatherSlice, int | None]] = []
        for p in group.params:
            begin, param = self._begins[id(p)], self._plugin.param_of(p)
            end = begin + p.numel()
            for owner in range(begin // width, ceil_div(end, width)):
                start = max(begin, owner * width + window.start)
                stop, stream = min(end, owner * width + window.stop), None
                if start >= stop:
                    continue
                own = owner == hierarchy.rank
                if not exact:
                    sender = hierarchy.rank if own else None
                    (stream,) = param.weight_codecs(flat.dtype, rank=sender)
                sent: Param | Codec = param
                if stream is None:
                    sent = CastCodec(flat.dtype, tight=stop - start <= SMALL_NUMEL)
                    stream = HopCodec(sent, None)
                place = places.setdefault(sent, len(weights))
                if place == len(weights):
                    weights.append((param, stream))
                elif own:  # whose random bits are drawn
                    weights[place] = param, stream
                source = (1, start - owner * width - window.start) if from_master else (0, start)
                part = GatherSlice(
                    owner,
                    stream.codec,
                    stop - start,
                    place,
                    source=source,
                    into=(0, start),
                    vector=VECTORS_PER_ELEMENT * (start - begin),
                    differs=stream.difference,
                )
                parts.append((part, owner if is_tight(stream.codec) else None))
        how = {"rank": hierarchy.rank, "ranks": hierarchy.size, "node_size": hierarchy.node_size}
        self._plans[key] = weights, Message(small_together(parts), **how)
        return self._plans[key]


def _windows(group: ReplicaGroup, ranks: int, most: int) -> Iterator[range]:
    """Ranges of at most ``most`` elements that make up a partition, aligned as well as it is."""
    width, stride = group.flat.numel() // ranks, max(1, most // 4096 * 4096 or most)
    for first in range(0, width, stride):
        yield range(first, min(first + stride, width))


def _offset(flat: torch.Tensor, parameter: torch.Tensor) -> int:
    """Return the first element of a parameter, a view of the flat buffer."""
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
