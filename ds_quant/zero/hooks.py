"""Events of DeepSpeed's engine and optimizers, and the functions that are replaced.

All contact with DeepSpeed's private names is here, in sharded_params.py (parameters of ZeRO-3),
optimizer_hooks.py (ZeRO-1 and 2), muon.py and install.py; deepspeed_types.py declares the names.

[Note: what is replaced] Methods are wrapped per engine, on instances. Functions that DeepSpeed
calls by module name (the gradient reduce-scatter of ZeRO-3, the weight gather of ZeRO-1 and 2, the
gathers of Muon) are wrapped once per process as an ``ExpectedCall``. It calls the original unless
an engine has opened it, on this thread, during one call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.zero.deepspeed_types import (
    Accelerator,
    Engine,
    ShardOptimizer,
    ZeroOptimizer,
    ZeroParameter,
)
from ds_quant.zero.version import deepspeed_version, is_older

# ---- wrapping ----


_TESTED = "0.17.6, 0.18.9 and 0.19.8"


def wrap_once(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` of a class or module by ``around(original, ...)`` for the whole
    process. Idempotent.
    """
    original = getattr(owner, name)
    if hasattr(original, "ds_quant_wraps"):
        return
    wrapped = wrapped_by(original, around)
    if isinstance(owner, type):  # only functions become methods
        setattr(owner, name, functools.wraps(wrapped)(lambda *args, **kw: wrapped(*args, **kw)))
    else:
        setattr(owner, name, wrapped)


class Wrapped(partial[Any]):
    """Calls ``around(original, ...)``; ``ds_quant_owner`` is set on parameters only."""

    ds_quant_wraps: Callable[..., Any]  # the original
    ds_quant_owner: Hashable


def wrapped_by(original: Callable[..., Any], around: Callable[..., Any]) -> Wrapped:
    """Return ``around(original, ...)``, named as the original."""
    wrapped = Wrapped(around, original)
    functools.update_wrapper(wrapped, original)
    wrapped.ds_quant_wraps = original
    return wrapped


Context = Callable[[], AbstractContextManager[object]]


class Hooks:
    """The methods replaced on one engine, and the calls of each event in the order of its list.

    Fill the lists, then ``connect``: an event with an empty list stays DeepSpeed's. ``remove`` puts
    everything back, and runs when the engine is destroyed.
    """

    def __init__(self, engine: Engine, optimizer: ZeroOptimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.before_step: list[Callable[[], None]] = []
        self.around_step: list[Context] = []
        self.after_update: list[Callable[[], None]] = []  # a step that was not skipped (overflow)
        self.after_step: list[Callable[[bool], None]] = []  # told whether it was skipped
        self.after_count: list[Callable[[], None]] = []  # global_steps has grown, also if skipped
        self.before_gradients: list[Callable[[], None]] = []  # are used, by step or ahead of it
        self.before_last_buckets: list[Callable[[], None]] = []  # of a backward are reduced
        self.around_last_buckets: list[Context] = []
        self.after_backward: list[Callable[[], None]] = []
        self.after_zero_grad: list[Callable[[], None]] = []
        self.around_export: list[Context] = []  # and a load
        self.after_save: list[Callable[[], None]] = []  # a checkpoint or 16-bit weights
        self.after_checkpoint_event: list[Callable[[], None]] = []  # ZeRO-3: saved or loaded
        self.on_destroy: list[Callable[[], None]] = []
        self._replaced: list[tuple[object, str, object]] = []

    def wrap(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        """Replace the method ``name`` of an instance by ``around(original, ...)``.

        Raises:
            RuntimeError: there is no such method, or this plugin has wrapped it already.
        """
        require(owner, name)
        original = getattr(owner, name)
        if hasattr(original, "ds_quant_wraps"):
            raise RuntimeError(
                f"quantized_comm: {name} of {type(owner).__name__} is wrapped already; build one "
                "engine per optimizer"
            )
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrapped_by(original, around))

    def remove(self) -> None:
        """Give back what was wrapped, unless somebody has replaced it since. Idempotent."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if not hasattr(vars(owner).get(name), "ds_quant_wraps"):
                continue
            if own is None:
                delattr(owner, name)  # the method of its class
            else:
                setattr(owner, name, own)

    def connect(self) -> None:
        """Wrap the methods behind the events that have something to run."""
        engine, optimizer = self.engine, self.optimizer
        step = self.before_gradients, self.before_step, self.around_step, self.after_update
        if any(step) or self.after_step:
            self.wrap(optimizer, "step", self._step)
        self._wrap_event(engine, "_take_model_step", after=self.after_count)
        self._wrap_event(
            engine, "save_16bit_model", contexts=self.around_export, after=self.after_save
        )
        self._wrap_event(optimizer, "zero_grad", after=self.after_zero_grad)
        self._wrap_event(
            optimizer,
            "independent_gradient_partition_epilogue",
            contexts=self.around_last_buckets,
            before=self.before_last_buckets,
            after=self.after_backward,
        )
        self._wrap_event(optimizer, "checkpoint_event_epilogue", after=self.after_checkpoint_event)
        finalize = "finalize_gradient_accumulation_boundary"  # where DeepSpeed does not manage it
        if hasattr(optimizer, finalize):
            self._wrap_event(optimizer, finalize, before=self.before_gradients)
        if self._replaced or self.on_destroy:
            self.wrap(self.engine, "destroy", self._destroy)

    def _wrap_event(
        self,
        owner: object,
        name: str,
        *,
        contexts: Sequence[Context] = (),
        before: Sequence[Callable[[], None]] = (),
        after: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Wrap a method if its event has something to run."""
        if contexts or before or after:
            self.wrap(owner, name, as_event(contexts, before, after))

    def keep_state(
        self, key: str, dump: Callable[[], object], restore: Callable[[object], None]
    ) -> None:
        """Save ``dump()`` as ``key`` of the client state, hand it to ``restore`` on load (None if
        the checkpoint has none). The caller's client state does not show it.
        """

        export = as_event(self.around_export, after=self.after_save)

        def save(
            original: Callable[..., object],
            save_dir: str,
            tag: str | None = None,
            client_state: dict[str, object] | None = None,
            *args: object,
            **kwargs: object,
        ) -> object:
            state = {**(client_state or {}), key: dump()}
            return export(original, save_dir, tag, state, *args, **kwargs)

        def load(
            original: Callable[..., tuple[str | None, dict[str, object]]],
            *args: object,
            **kwargs: object,
        ) -> tuple[str | None, dict[str, object]]:
            with opened(self.around_export):
                path, client_state = original(*args, **kwargs)
                if path is not None:
                    restore(client_state.pop(key, None))
            return path, client_state

        self.wrap(self.engine, "save_checkpoint", save)
        self.wrap(self.engine, "load_checkpoint", load)

    def _step(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        for call in (*self.before_gradients, *self.before_step):
            call()
        with opened(self.around_step):
            result = original(*args, **kwargs)
        skipped = bool(self.optimizer.overflow)
        if not skipped:
            for call in self.after_update:
                call()
        for follow in tuple(self.after_step):
            follow(skipped)
        return result

    def _destroy(self, original: Callable[..., object], *args: object, **kwargs: object) -> None:
        try:
            for call in self.on_destroy:
                call()
        finally:
            self.remove()
            original(*args, **kwargs)


def opened(contexts: Iterable[Context]) -> ExitStack:
    """Enter the contexts, the first one outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


def as_event(
    contexts: Sequence[Context] = (),
    before: Sequence[Callable[[], None]] = (),
    after: Sequence[Callable[[], None]] = (),
) -> Callable[..., Any]:
    """Return what runs an event: ``before`` and the original inside the contexts, then ``after``.

    The lists are read when the event happens; a call may leave its own.
    """

    def run(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        with opened(contexts):
            for call in before:
                call()
            result = original(*args, **kwargs)
        for call in tuple(after):
            call()
        return result

    return run


class ExpectedCall(threading.local):
    """A function of DeepSpeed that must be called while another one runs. If DeepSpeed moved it,
    messages would bypass the plugin without a word.

    One of a module can be replaced by another while ``through`` is open.
    """

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0
        self.target: Callable[..., Any] | None = None

    @contextmanager
    def expected(self, excused: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Raise RuntimeError at the end if it was not called inside and that is not ``excused``."""
        before = self.calls
        yield
        if self.calls == before and not excused():
            raise moved(self.name)

    def install(self, module: object) -> None:
        def dispatch(original: Callable[..., object], *args: object, **kwargs: object) -> object:
            self.calls += 1
            return (self.target or original)(*args, **kwargs)

        require(module, self.name)
        wrap_once(module, self.name, dispatch)

    @contextmanager
    def through(
        self, target: Callable[..., Any], excused: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Inside, ``target`` is called instead; raises as ``expected``."""
        previous, self.target = self.target, target
        try:
            with self.expected(excused):
                yield
        finally:
            self.target = previous


def moved(what: str) -> RuntimeError:
    """Return the error for a function that DeepSpeed did not call as known versions do."""
    return RuntimeError(
        f"quantized_comm: {deepspeed_version()} did not call {what}, so what this plugin should "
        f"carry travelled without it; use a tested version ({_TESTED}) or remove the "
        "quantized_comm block"
    )


def require(owner: object, name: str) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"quantized_comm: {deepspeed_version()} has no {name} on {type(owner).__name__}; "
            f"tested versions are {_TESTED}"
        )


# ---- DeepSpeed's engine and optimizers ----


_AVG_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_FLUSH = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"


_shard_reduction = ExpectedCall("reduce_scatter_coalesced")


def param_dict(engine: Engine) -> dict[str, Any]:
    """Return the DeepSpeed config as it was written."""
    return engine._config._param_dict


def block_of(engine: Engine) -> QuantizedCommConfig | None:
    """Return the engine's ``quantized_comm`` block, None if it has none."""
    return getattr(engine._config, "quantized_comm", None)


def block_is_from_variable(engine: Engine) -> bool:
    """Return True if the block was set by the environment variable."""
    return getattr(engine._config, "quantized_comm_from_variable", False)


def drop_block(engine: Engine) -> None:
    """Run the engine as without a block."""
    engine._config.quantized_comm = None


# ---- gradients ----


# What goes around ``partition_grads``: (original, params, shards).
Partition = Callable[
    [Callable[..., object], Sequence[ZeroParameter], list[Tensor]],
    object,
]


def wrap_shard_reduction(
    hooks: Hooks,
    reduce: Callable[
        [Sequence[ZeroParameter], list[Tensor], ProcessGroup | None], list[Tensor] | None
    ],
    partition: Partition | None = None,
) -> None:
    """ZeRO-3: ``reduce(params, tensors, group)`` replaces the reduce-scatter, unless it returns
    None, and ``partition(original, params, shards)`` what follows it.
    """
    from deepspeed.runtime.zero import stage3

    _shard_reduction.install(stage3)
    original = stage3.reduce_scatter_coalesced.ds_quant_wraps

    def around(
        avg_scatter: Callable[..., list[Tensor]],
        params: Sequence[ZeroParameter],
        *args: object,
        **kwargs: object,
    ) -> list[Tensor]:
        def scatter(tensors: list[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
            shards = reduce(params, tensors, group)
            return original(tensors, group) if shards is None else shards

        with _shard_reduction.through(scatter):
            return avg_scatter(params, *args, **kwargs)

    hooks.wrap(hooks.optimizer, _AVG_SCATTER, around)
    if partition is not None:
        hooks.wrap(hooks.optimizer, "partition_grads", partition)


def accumulates(engine: Engine) -> bool:
    """Whether an optimizer step may take several backwards."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return engine.gradient_accumulation_steps() > 1 or (managed is not None and not managed())


Buckets = tuple[Callable[[], None], Callable[[Sequence[ZeroParameter]], None]]


def shard_buckets(optimizer: ShardOptimizer) -> Buckets:
    """The buckets in which ZeRO-3 collects gradients: what reduces their content, and what puts a
    gradient of zeros into them for every parameter; a bucket that is full is reduced.
    """
    require(optimizer, _FLUSH)

    def flush() -> None:
        for dtype in sorted(optimizer.ipg_buckets, key=str):
            getattr(optimizer, _FLUSH)(dtype)

    def reduce_zeros(params: Sequence[ZeroParameter]) -> None:
        for p in params:
            p.grad = torch.empty_like(p)  # of a partitioned parameter: of no elements
            p.grad.data = torch.zeros(p.ds_shape, dtype=p.dtype, device=device())
            optimizer.reduce_ready_partitions_and_remove_grads(p)

    return flush, reduce_zeros


def skip_zero_shards(
    optimizer: ShardOptimizer, waits: Callable[[ZeroParameter], bool]
) -> Partition:
    """ZeRO-3: return what goes around ``partition_grads``, so that shards of parameters that wait,
    zeros, are not added to those that DeepSpeed has from the first micro-step: an offloaded
    optimizer has them on the host.
    """
    require(optimizer, "micro_step_id")

    def partition(
        original: Callable[..., object], params: Sequence[ZeroParameter], shards: list[Tensor]
    ) -> object:
        if optimizer.micro_step_id == 0 or not all(map(waits, params)):
            return original(params, shards)
        for p in params:
            if p.grad is not None:
                keep_for_current_stream(p.grad)
            p.grad = None
        return []

    return partition


def has_gradients(optimizer: ZeroOptimizer) -> bool:
    """Whether any gradient waits in the optimizer's buckets, as the last ones of a backward do."""
    return any(bucket.params for bucket in optimizer.ipg_buckets.values())


CARRIERS = {
    "weights": "all_gather_coalesced of a parameter",
    "gradients": "__avg_scatter_grads (ZeRO-3) or average_tensor (ZeRO-1 and 2)",
}


# ---- facts ----


def rank_and_world() -> tuple[int, int]:
    from deepspeed import comm as dist

    return dist.get_rank(), dist.get_world_size()


def steps(optimizer: object) -> bool:
    """Whether there is an optimizer step; False for ZeRO-3 inference."""
    return hasattr(optimizer, "step") and hasattr(optimizer, _AVG_SCATTER)


# ---- the device ----


def keep_for_current_stream(values: Tensor) -> None:
    """Keep the allocator from reusing memory that the current stream may still read.

    Call it before the last reference to a tensor that another stream has allocated is dropped.
    """
    device = accelerator()
    if not device.is_synchronized_device() and device.on_accelerator(values):
        values.record_stream(device.current_stream())


def accelerator() -> Accelerator:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def free_memory() -> int:
    """Return the bytes that can still be allocated where collectives run."""
    return int(accelerator().available_memory())


def has_streams() -> bool:
    """Whether the device runs by itself: what waits there keeps a stream back, not the host."""
    return not accelerator().resolves_data_dependency()


def synchronize() -> None:
    """Wait until the device has done all it was asked to, where it runs by itself."""
    if has_streams():
        accelerator().synchronize()


def device() -> torch.device:
    """Return the device of the collectives."""
    return torch.device(accelerator().current_device_name())


def awaits_last_gather_only() -> bool:
    """Whether ``all_gather`` returns before all parameters are there: on the CPU, before 0.19.8."""
    return device().type == "cpu" and is_older("0.19.8")


class StepBarrier:
    """Orders the gather stream behind what wrote shards or kept weights on another one (the
    optimizer step), on devices whose streams run by themselves; does nothing on the CPU.
    """

    def __init__(self) -> None:
        self._event: torch.Event | None = None

    def record(self) -> None:
        if has_streams():
            self._event = accelerator().Event()
            self._event.record(accelerator().current_stream())

    def wait(self) -> None:
        if self._event is not None:
            accelerator().current_stream().wait_event(self._event)
