"""Refuse what has no room, detect drift and corruption, fall back to full precision.

If DeepSpeed no longer calls a function that was replaced, what it carried bypasses the plugin
without an error. Where the caller is known, ``hooks.ExpectedCall`` notices at once. The rest is
checked here after the first step: a role that was never asked for ends the run, one that received
few bytes is logged.

A rank that decides alone can hang the others, so every check reads facts that all ranks share and
every error names the setting, its value and the fix.

Differences are added to what a rank holds, so one lost or changed bit would stay for ever and
nobody would see it. All ranks exchange all checksums and decide alike.

Messages that the links of an engine have found changed, or lossless differences that could not be
decoded, are reported before every optimizer step, before anything is updated from them, before
weights are exported, and after every save, which may send weights too. All ranks raise together:
one that ended alone would leave the others waiting.

[Note: written weights] A parameter that user code has written since the last gather of ZeRO-1 and 2
is left alone by exports, as without this plugin; the next step overwrites it. Writing
``parameter.data`` leaves no trace in torch, so every gather is followed by a sample of 64 elements
of each parameter, spread evenly, to which the next export compares.

[Note: one vote] What one rank sees (a NaN in its shard, a file on its disk) must change the traffic
of all ranks in the same step, else they wait for messages of different lengths. So all ranks take
the minimum of two numbers after the last gradient collective and before the optimizer uses the
gradients. Nobody votes unless a policy or a kill file asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ds_quant.comm.checksum import MessageError
from ds_quant.config.schema import FallbackConfig
from ds_quant.zero import hooks, log, offload
from ds_quant.zero.handshake import Board
from ds_quant.zero.param import Param
from ds_quant.zero.plugin import Plugin
from ds_quant.zero.version import deepspeed_version
from ds_quant.zero.world import broadcast, minimum

# ---- start-up ----


def refuse_no_room(plugin: Plugin) -> None:
    """Raise RuntimeError on all ranks if what the scheme keeps does not fit on one: the node shard
    between steps, or with it the sums of gradients within one. A collective, if it keeps any.
    """
    comm_volume, offloaded = plugin.comm_volume(), offload.offloads_parameters(plugin.engine)
    kept, peak = comm_volume.memory * comm_volume.numel, plugin.peak_bytes(comm_volume)
    waiting = (
        comm_volume.partial_sums * comm_volume.numel if hooks.accumulates(plugin.engine) else 0.0
    )
    if not (kept or waiting):
        return
    (free, host) = minimum([hooks.free_memory(), offload.free_host_memory()])
    shown = f"{free / 1e9:.3g} GB of memory are free on the fullest device"
    needed, room, where, left = kept, free, "GB on every rank, but", shown
    if offloaded:
        needed, room = kept * plugin.topology.node_size, host
        where = "GB of host memory in every node, but"
        left = f"{host / 1e9:.3g} GB are free in the fullest one"
        kept = 0.0
    if needed > room:
        raise RuntimeError(
            f"quantized_comm: the node shard takes {needed / 1e9:.3g} {where} {left}; use "
            "more ranks per node, zero_optimization.stage 2, or a scheme without a node shard such "
            'as "qsdp"'
        )
    if kept + waiting > free:
        shard = f" beside {kept / 1e9:.3g} GB of node shard" if kept else ""
        raise RuntimeError(
            "quantized_comm: gradients that wait for the last micro-step take "
            f"{waiting / 1e9:.3g} GB on every rank{shard}, but {shown}; set quantized_comm."
            'gradients.cross: "micro_step", which holds none and sends them in every micro-step, '
            "or use more ranks per node"
        )
    if kept + waiting + peak > free:
        parts = {"node shard": kept, "waiting gradients": waiting, "messages": peak}
        sizes = " and ".join(f"{n / 1e9:.3g} GB of {what}" for what, n in parts.items() if n)
        plugin.notices.append(f"may run out of memory: {sizes} are needed, {shown}")


def wait_for_ranks(what: str, *, rank: int, world: int, patience: float, timeout: float) -> None:
    """Wait through the store until every rank has called ``what``, which is a collective.

    Rank 0 warns after ``patience`` seconds, because it may be alone by mistake; others may also be
    late because they write a large file.

    Raises:
        RuntimeError: naming the ranks that have not called it within ``timeout`` seconds.
    """
    board, ranks = Board.of_call(f"wait_for_ranks/{what}", rank), range(world)
    board.put(rank, "here")
    if board.count("count") == world:  # so that nobody asks for every rank
        board.put("all", "here")
    message = "quantized_comm: {} needs all ranks under ZeRO-1 and 2: not called on rank(s) {}"
    if board.arrive(["all"], patience):
        return
    if missing := board.missing(ranks):
        log.log_rank0(message.format(what, missing) + f" after {patience:g} s, still waiting")
    if not board.arrive(["all"], timeout) and (missing := board.missing(ranks)):
        raise RuntimeError(
            message.format(what, missing) + f" within {timeout:g} s. Call it on all ranks and let "
            "one of them write the files, as ZeRO-3 needs it too"
        )


# ---- drifted replicas ----


_ROW = 4096  # elements of equal weight in the position-dependent sum


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return (2,) int64: sum of all bit patterns, and one that depends on their order. Wraps."""
    plain, ordered = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1)
        bits = bits.view(torch.int16 if bits.element_size() == 2 else torch.int32)
        whole = bits.numel() // _ROW * _ROW
        rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
        rows = torch.cat([rows, bits[whole:].to(torch.int64)])
        plain = plain.to(bits.device) + rows.sum()
        places = torch.arange(1, rows.numel() + 1, device=bits.device)
        ordered = ordered.to(bits.device) * 1_000_003 + (rows * places).sum()
    return torch.stack([plain, ordered])


def compare_copies(plugin: Plugin) -> None:
    """Compare the weights that ranks keep, every ``checksum_steps`` optimizer steps. Runs after the
    optimizer step and the update of what is kept.
    """
    step, every = plugin.step + 1, plugin.scheme.block.checksum_steps
    if step % every == 0 and (differing := _differing(plugin)):
        plugin.state.resyncs += 1
        log.log_rank0(
            f"quantized_comm: step {step}: the weights that rank(s) {differing} keep differ from "
            "those of the other holders; all are brought back exactly. Something writes weights "
            "outside the optimizer: call ds_quant.resync(engine) after it"
        )
        plugin.weight_cache.resync()


def _differing(plugin: Plugin) -> list[int]:
    """Find ranks whose checksum is not that of most holders of the same weights."""
    copies = [
        torch.cat([torch.tensor([who]), checksum(tensors).cpu()])
        for who, tensors in plugin.weight_cache.copies()
    ]
    own = torch.stack(copies).to(hooks.device())  # (copies, 3) int64
    communicator = plugin.hierarchy(None).flat
    received = communicator.all_gather(own.view(torch.uint8).view(-1), role="weights").wait()
    _require_equal(plugin, received)
    by_rank = received.view(torch.int64).view(communicator.size, len(copies), 3).tolist()
    holders: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = {}
    for rank, rows in enumerate(by_rank):
        for place, (who, *sums) in enumerate(rows):
            versions = holders.setdefault((place, who), {})
            versions.setdefault(tuple(sums), []).append(rank)
    return sorted({rank for versions in holders.values() for rank in _outvoted(versions)})


def _require_equal(plugin: Plugin, received: Tensor) -> None:
    """End all ranks if their checksums arrived differently: some would resync, others not.

    Raises:
        RuntimeError: on all ranks.
    """
    sums = checksum([received.view(torch.int64)]).tolist()
    least = minimum([*sums, *(~total for total in sums)])
    if least[:2] == [~total for total in least[2:]]:
        return
    check_messages(plugin)  # may know sender and receiver
    raise RuntimeError(
        f"quantized_comm: step {plugin.step + 1}: ranks have received different checksums of the "
        "weights that they keep, so a message was changed on its way. Look for faulty memory or a "
        "faulty network, and resume from the last checkpoint; quantized_comm.payload_checksum=true "
        "names sender and receiver of such a message"
    )


def _outvoted(versions: dict[tuple[int, int], list[int]]) -> list[int]:
    """Find holders of another version than most have; all of them where there is no majority."""
    sizes = sorted((len(ranks) for ranks in versions.values()), reverse=True)
    common = sizes[0] if len(sizes) == 1 or sizes[0] > sizes[1] else 0
    return [rank for ranks in versions.values() if len(ranks) != common for rank in ranks]


# ---- weights that user code has written ----


_SAMPLE = 64  # elements of a parameter


class EditDetector:
    """Notice which parameters user code has written: see [Note: written weights]."""

    def __init__(self, flats: Iterable[tuple[Tensor, list[tuple[Tensor, int]]]]) -> None:
        """Each flat buffer comes with its parameters and the first element of each."""
        self._sampled: list[tuple[list[Tensor], Tensor, Tensor]] = []
        self._taken: list[Tensor] = []  # by buffer, (parameters, _SAMPLE)
        spread = torch.linspace(0, 1, _SAMPLE, dtype=torch.float64)
        for flat, params in flats:
            params = [(p, begin) for p, begin in params if p.numel()]
            places = [begin + (spread * (p.numel() - 1)).long() for p, begin in params]
            self._sampled.append(
                ([p for p, _ in params], flat, torch.stack(places).to(flat.device))
            )

    def take(self) -> None:
        """Sample what is there now, with one kernel per buffer."""
        self._taken = [flat[places] for _, flat, places in self._sampled]

    def forget(self) -> None:
        """Take whatever is there for gathered."""
        self._taken = []

    def written(self) -> list[Tensor]:
        """Find parameters whose sample differs in any bit from the one that was taken last."""
        found = []
        for (params, flat, places), taken in zip(self._sampled, self._taken, strict=False):
            differs = (flat[places].view(torch.uint8) != taken.view(torch.uint8)).any(1)
            found += [params[i] for i in differs.nonzero().view(-1).tolist()]
        return found


# ---- corrupted messages ----


def check_messages(plugin: Plugin) -> None:
    """End the run if any rank received a message that cannot be used. A collective of the whole
    world; waits for the device once.

    Raises:
        RuntimeError: on all ranks, naming the message that the first of them found.
    """
    rank, world = hooks.rank_and_world()
    message_errors = plugin.message_errors
    vote = world - (world - rank) * message_errors.any_error(hooks.device()).long()
    (receiver,) = minimum(vote.view(1))
    if receiver < world:
        end_run(plugin, receiver, broadcast(message_errors.first(), source=receiver))
    message_errors.forget()


@contextmanager
def checked_messages(plugin: Plugin) -> Iterator[None]:
    """Check when weights are about to be read by all ranks."""
    check_messages(plugin)
    yield


def end_run(plugin: Plugin, receiver: int, found: MessageError) -> None:
    """Raise RuntimeError for a message that rank ``receiver`` cannot use."""
    step, scheme = plugin.engine.global_steps, plugin.scheme
    sealed = scheme.block.payload_checksum
    why = " because quantized_comm.payload_checksum=true" if sealed else ""
    code = " and for code that writes weights outside the optimizer" if scheme.lossless else ""
    raise RuntimeError(
        f"quantized_comm: step {step}: {found.role} from rank {found.sender} "
        f"{found.problem.format(receiver)}. Training ends{why}; look for faulty memory or a "
        f"faulty network on the hosts of these two{code}, and resume from a checkpoint that "
        "was saved before this step"
    )


# ---- fallback to full precision ----


KILL_VARIABLE = "DS_QUANT_KILL_FILE"


def kill_file() -> Path | None:
    """Return the file whose presence switches quantization off, None if none is watched."""
    path = os.environ.get(KILL_VARIABLE, "").strip()
    return Path(path) if path else None


def first_nonfinite(noted: list[tuple[Param, Tensor]]) -> Param | None:
    """Return the first parameter whose flag says that its gradient has NaN or Inf; forget all.

    noted: whether what this rank has received of a gradient is finite, () bool each: so that
    nobody waits for the device before.
    """
    finite = torch.stack([flag for _, flag in noted]).tolist() if noted else []
    bad = [param for (param, _), good in zip(noted, finite, strict=True) if not good]
    noted.clear()
    return bad[0] if bad else None


class Fallback:
    """Vote when the optimizer steps, and decide which steps use full precision."""

    def __init__(self, plugin: Plugin, settings: FallbackConfig) -> None:
        self._plugin, self._policy, self._steps = plugin, settings.on_nonfinite, settings.steps
        self._kill_file = kill_file()
        self._asked = self._blind = False  # whether this rank saw the file, and once could not look
        self._nonfinite = False  # gradients of the step being taken
        self._was_exact = False  # how they travelled
        if self._policy != "skip":
            plugin.noted = []

    def vote(self) -> None:
        """Vote before the optimizer steps. A collective of the whole world.

        Raises:
            FloatingPointError: on all ranks, with the policy "raise".
        """
        state, step = self._plugin.state, self._plugin.step
        state.exact_steps += state.killed or step < state.exact_until
        self._was_exact = self._plugin.is_full_precision(step)
        rank, world = hooks.rank_and_world()
        bad = first_nonfinite(self._plugin.noted or [])
        self._look()
        finder, killer = minimum([world if bad is None else rank, rank if self._asked else world])
        self._switch(killer if killer < world else None)
        self._nonfinite = finder < world
        if self._nonfinite:
            self._found(finder, bad if finder == rank else None)

    def after_step(self, skipped: bool) -> None:
        """Run after the optimizer step, or after DeepSpeed ``skipped`` the update.

        Raises:
            FloatingPointError: DeepSpeed has found what did not travel through this plugin.
        """
        if skipped and not self._nonfinite and self._policy != "skip":
            self._nonfinite = True
            self._found(None, None)
        if skipped and self._nonfinite and self._policy == "full_precision":
            self._plugin.state.exact_until -= 1  # this step is repeated, as the first of the n
        if skipped and self._plugin.is_full_precision(self._plugin.step) and not self._was_exact:
            self._plugin.resync()  # the skipped step did not refresh the kept weights
        self._nonfinite = False

    def _look(self) -> None:
        """Look for the kill file. A file system that fails here must not end the run, nor may this
        rank keep the others waiting: it goes on voting as it did last.
        """
        if self._kill_file is None:
            return
        try:
            self._asked = self._kill_file.exists()
        except OSError as error:
            if not self._blind:
                log.log_here(
                    f"quantized_comm: rank {hooks.rank_and_world()[0]} cannot look for the file of "
                    f"{KILL_VARIABLE}: {error}; until it can, its last vote stands (logged once)"
                )
            self._blind = True

    def _switch(self, killer: int | None) -> None:
        state = self._plugin.state
        if state.killed == (killer is not None):
            return
        state.killed = killer is not None
        what = (
            f"{KILL_VARIABLE} names a file that exists on rank {killer}: full precision from the "
            "next step on, as long as it does"
            if state.killed
            else f"the file of {KILL_VARIABLE} is gone on all ranks: quantized again"
        )
        log.log_rank0(f"quantized_comm: step {self._plugin.engine.global_steps}: {what}")

    def _found(self, finder: int | None, param: Param | None) -> None:
        """``finder``: rank that holds NaN or Inf, in the gradient of ``param``."""
        state, step = self._plugin.state, self._plugin.engine.global_steps
        state.nonfinite_steps += 1
        if self._policy == "raise":
            where = "a parameter that DeepSpeed reduces itself"
            if finder is not None:
                name = broadcast(None if param is None else param.name, source=finder)
                where = f"{name}, received by rank {finder}"
            raise FloatingPointError(
                f"quantized_comm: step {step}: NaN or Inf in the gradient of {where}. Training "
                'ends because quantized_comm.fallback.on_nonfinite="raise"; resume from the last '
                'checkpoint, or set it to "skip" or "full_precision"'
            )
        state.exact_until = self._plugin.step + 1 + self._steps
        if state.nonfinite_steps == 1:
            log.log_rank0(
                f"quantized_comm: step {step}: gradients hold NaN or Inf; the next {self._steps} "
                "steps travel in full precision (logged once, ds_quant.report counts)"
            )


# ---- the first step ----


# Of the bytes of one exchange of all weights and one reduction of all gradients. What a rank
# receives varies with what it owns and with parameters that a step leaves unused.
_LEAST_SHARE = 0.5


def judge_first_step(plugin: Plugin, promised: Sequence[str]) -> None:
    """Check once that the first step with gradients sends what was ``promised``, which are roles.
    A step that DeepSpeed skips, or without gradients (every label masked), is not judged.

    The step raises RuntimeError if DeepSpeed has not asked for a role that was promised.
    """
    events, had_gradients = plugin.hooks, "gradients" not in promised
    least = _least_bytes(plugin, promised)

    def note_gradients() -> None:  # at the end of a backward, in DeepSpeed's buckets
        nonlocal had_gradients
        had_gradients |= hooks.has_gradients(events.optimizer)

    def judge(skipped: bool) -> None:
        if skipped or not (had_gradients or "gradients" in plugin.asked):
            return
        events.after_step.remove(judge)
        if note_gradients in events.before_last_buckets:
            events.before_last_buckets.remove(note_gradients)
        for role in promised:
            if role not in plugin.asked:
                raise hooks.moved(f"{hooks.CARRIERS[role]} in the first step")
        for role, nbytes in least.items():
            brought = sum(plugin.traffic.received[role].values())
            if brought < nbytes:
                log.log_rank0(
                    f"quantized_comm: the first step has brought {brought} bytes of {role} to rank "
                    f"0, and {nbytes / _LEAST_SHARE:.0f} or more were expected: unless many "
                    f"parameters were unused in it, {deepspeed_version()} sends {role} past this "
                    "plugin, and the start-up line is wrong"
                )

    if not had_gradients:
        events.before_last_buckets.append(note_gradients)
    events.after_step.append(judge)


def _least_bytes(plugin: Plugin, promised: Sequence[str]) -> dict[str, float]:
    """Bytes that a first step must bring to this rank, by role, where a formula can tell."""
    if plugin.has_few_ranks:  # then other ranks send what the formula counts
        return {}
    # As for ZeRO-1: one exchange and one reduction, the least that a step of any stage needs.
    received = plugin.comm_volume().received(1, micro_steps=1)
    if plugin.scheme.lossless:  # how little has changed decides
        received.pop("weights")
    sums = {role: sum(links.values()) for role, links in received.items() if role in promised}
    return {role: _LEAST_SHARE * nbytes for role, nbytes in sums.items()}


def promised_roles(plugin: Plugin) -> list[str]:
    """Return the roles that a step must ask for."""
    shared = [p for p, group in plugin.served if plugin.communicator(group).size > 1]
    roles = []
    if any(not getattr(p, "ds_persist", False) for p in shared):
        roles.append("weights")
    if plugin.stock_gradients is None and any(p.requires_grad for p in shared):
        roles.append("gradients")
    return roles
