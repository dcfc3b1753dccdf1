"""A DDP model that a block is attached to: its run, and the events of its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ds_quant.comm.topology import Topology
from ds_quant.config.errors import KEY
from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.ddp.gradients import RUN_NUMEL, BucketReduction
from ds_quant.ddp.hook import Hook, mean_of_ranks
from ds_quant.policy import choosing
from ds_quant.policy.memory import Sizes
from ds_quant.policy.route import Routes
from ds_quant.policy.scheme import FLOATS, Scheme
from ds_quant.runtime.copies import compare_replicas, compares_replicas
from ds_quant.runtime.figures import figures
from ds_quant.runtime.front import SentParam, Workload
from ds_quant.runtime.message_check import check_messages
from ds_quant.runtime.param import Param
from ds_quant.runtime.run import Run
from ds_quant.runtime.start_line import LineParts, full_line
from ds_quant.runtime.step_events import StepEvents

STAGE = 0  # nothing is sharded


class AttachedModel:
    """One model under DDP.

    A ``torch.distributed.checkpoint`` Stateful: ``state_dict`` holds the number of rounds, which
    names the random bits, so that a resumed run repeats them. See [Note: rounds] of gradients.py.

    Its hook holds it until ``detach``, and lives as long as the model. It holds the model's
    parameters, but not the model.

    ddp: the model, of which nothing else is kept.
    hook: the model's communication hook.
    block: as it was given, perhaps with "autotune".

    step: finished rounds.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        hook: Hook,
        topology: Topology,
        block: QuantizedCommConfig,
        scheme: Scheme,
    ) -> None:
        routes = Routes.over(topology, scheme, stage=STAGE)
        params: list[Param] = []
        # DDP goes on to reduce parameters that were frozen after it had wrapped the model.
        frozen: list[Param] = []
        for index, name, parameter in watched_parameters(ddp):
            param = Param(
                index=index,
                name=name,
                shape=parameter.shape,
                trained=True,
                tensor=parameter,
                routes=routes,
            )
            (params if parameter.requires_grad else frozen).append(param)
        device = ddp.device
        self.step = 0
        self.run = Run(
            self,
            routes,
            topology,
            params,
            device=device,
            dist=torch.distributed,
        )
        self.events = StepEvents(self.run)
        self.block = block
        self._hook = hook
        self._reduction = BucketReduction(self.run, frozen)
        # Encodes, waits and decodes during the backward.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_equal_rounds = False  # compared since the start or the last load
        self._accumulation = Accumulation(self.run)

    # ---- life ----

    def connect(self) -> None:
        """Reduce the model's buckets."""
        self._hook.reducer = self

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Notice gradients that are sent several times per step of these optimizers."""
        if optimizers:
            self._accumulation.follow(optimizers)

    def detach(self) -> None:
        """Let torch reduce the gradients in full precision. Call it on all ranks, between rounds.

        The model's hook stays: torch removes none.
        """
        self._hook.reducer = None
        self._accumulation.stop()

    # ---- a round ----

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to replace the gradients of a bucket by their mean over all ranks.

        The last bucket of a round finishes all of them. Errors are raised here, on all ranks, and
        end the backward.

        Raises:
            RuntimeError: a message arrived corrupted on any rank, or replicas differ.
            FloatingPointError: of ``fallback``.
        """
        self.run.refuse_capture()
        buffer = bucket.buffer()
        # Lets the stream of its waiter wait.
        future: Future[Tensor] = Future(devices=[] if self._stream is None else [self.run.device])
        with self._own_stream():
            if bucket.index() == 0:
                self._compare_rounds()
                self._compare_replicas(buffer)
            if self.run.topology.world == 1:
                self._complete(bucket, future)
            elif bucket.parameters()[0].dtype not in FLOATS:  # complex ones have a real buffer
                flat = self.run.world.hierarchy.flat
                flat.count_ring(buffer.nbytes, role="gradients", passes=2)
                future = mean_of_ranks(bucket.buffer())
            else:
                self._reduction.begin(bucket, self.step, partial(self._complete, bucket, future))
            if bucket.is_last():
                self._reduction.finish()
                self._end_round()
        return future

    def _own_stream(self) -> AbstractContextManager[object]:
        """Let the device's work wait for the gradients, but not the backward for this work."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.run.device))
        return torch.cuda.stream(self._stream)

    def _complete(self, bucket: GradBucket, future: Future[Tensor]) -> None:
        buffer = bucket.buffer()
        if self.run.finite_flags is not None:
            first, *others = bucket.parameters()
            known = self.run.param_of(first)  # None: one rank, which plans no reduction
            title = "a frozen parameter" if known is None else known.name
            title += f" or {len(others)} others" if others else ""
            self.run.finite_flags.append((title, torch.isfinite(buffer).all()))
        future.set_result(buffer)

    def _end_round(self) -> None:
        """Check the gradients of all buckets before the optimizer uses them."""
        if self.run.scheme.block.payload_checksum:
            check_messages(self.run)
        self.events.gradients_changed()
        self.events.before_step()
        self.step += 1
        self._accumulation.rounds += 1
        self.events.after_step()

    def _compare_rounds(self) -> None:
        """Compare the number of rounds of all ranks, in the first one after a start or a load.

        Raises:
            RuntimeError: on all ranks, if ranks begin with other rounds.
        """
        if self._has_equal_rounds:
            return
        self._has_equal_rounds = True
        rounds = torch.tensor([self.step, -self.step], device=self.run.device)
        least, inverted_most = self.run.votes.least(rounds).tolist()
        if least != -inverted_most:
            raise RuntimeError(
                f"{KEY}: ranks begin with round {least} to {-inverted_most}, and random bits need "
                "equal rounds: call front.load_state_dict on all ranks, with equal states"
            )

    def _compare_replicas(self, gradients: Tensor) -> None:
        """Compare the weights of all ranks, every ``checksum_steps`` rounds.

        A rank that has left ``join()`` early continues with old weights and gradients of zeros
        until the others have ended. So a rank whose first bucket is zero is not compared.

        Raises:
            RuntimeError: on all ranks, if weights differ.
        """
        if not compares_replicas(self.run, self.step):
            return
        owner = 0
        if not gradients.any():
            owner = 1 + self.run.world.hierarchy.rank  # no other rank's, so nobody compares them
        weights = [param.tensor for param in self.run.params]
        compare_replicas(self.run, [(owner, weights)], self.step)

    def found_nonfinite(self) -> bool:
        """Return True on all ranks if gradients of the last round hold NaN or Inf.

        Raises:
            RuntimeError: nothing is watched.
        """
        return self.events.watched_gradients().found_nonfinite

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint: the number of rounds."""
        return self.events.state_dict(self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's state. Call it on all ranks, with equal states.

        Raises:
            ValueError: a state without a number of rounds.
        """
        self.step = self.events.load_state_dict(state)
        self._has_equal_rounds = False
        self.events.rearm()

    # ---- figures ----

    @property
    def counted_steps(self) -> int:
        """Finished rounds."""
        return self.step

    def workload(self) -> Workload:
        """Return the communication of a round."""
        params = [
            SentParam(param, param.tensor.dtype, param.tensor.dtype, trained=True)
            for param in self.run.params
        ]
        params.sort(key=lambda sent: sent.stock_gradients)  # the line names their dtypes last
        return Workload(params=[params], gathers=[0.0], gather_numel=0, micro_steps=1)

    def sizes(self) -> list[Sizes]:
        """Return the sizes that decide the peak memory of a round."""
        numels = [param.shape.numel() for param in self.run.params]
        sizes = Sizes(
            trained=sum(numels),
            largest=max(numels),
            bucket=RUN_NUMEL,
            under_way=1 + len(self.run.world.hops),
            slicing=self.run.slicing,
        )
        return [sizes]

    @property
    def line(self) -> str:
        """What the start-up lines say, and all that they leave out, in one line."""
        return full_line(self.run, self.line_parts())

    def line_parts(self) -> LineParts:
        """Return the part of the start-up lines that DDP knows."""
        volume = self.run.comm_volume()
        stock = self.run.stock_volume(volume)
        reasons: list[str] = []
        advice = choosing.advice_under_ddp(self.block)  # none if autotune has chosen
        if advice is not None and self.run.topology.world > 1:
            reasons.append(f"advice: {advice}")
        return LineParts(layout="DDP", volume=volume, stock=stock, reasons=reasons)

    def figures(self) -> dict[str, Any]:
        """Return the figures of ``ds_quant.report``."""
        return {"front": "ddp", **figures(self.run), "line": self.line}


def watched_parameters(ddp: DistributedDataParallel) -> Iterator[tuple[int, str, Tensor]]:
    """Yield the parameters that DDP does not ignore: position among all, name, parameter.

    It reduces those that were trained when it wrapped the model.
    """
    for index, (name, parameter) in enumerate(ddp.module.named_parameters()):
        if name not in ddp.parameters_to_ignore:
            yield index, name, parameter


class Accumulation:
    """Warns of gradients that are sent several times per optimizer step, once.

    rounds: since the last step of the optimizer.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rounds = 0
        self._last_rounds = 0  # of the optimizer step before
        self._has_warned = False
        self._hooks: list[Any] = []  # of the optimizers, which hold this until ``stop``

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Notice the steps of optimizers, and no longer those of earlier ones."""
        self.stop()
        # Before a step: one that raises has used its gradients, too.
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in optimizers]

    def stop(self) -> None:
        """Follow no optimizer any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_step(self, *_: Any) -> None:
        """Warn of two optimizer steps in a row with as many rounds each, more than one.

        A single step with several rounds has skipped updates: a GradScaler looks for its scale.
        """
        if not self.rounds:  # another optimizer has just stepped with these gradients
            return
        if 1 < self.rounds == self._last_rounds and not self._has_warned:
            self._has_warned = True
            self._run.log(
                f"{KEY}: {self.rounds} backwards per optimizer step send gradients, each with the "
                "sum of those before it: more bytes and more error. Run all but the last one "
                "inside no_sync() of the DDP model (logged once)"
            )
        self._last_rounds = self.rounds
        self.rounds = 0
