"""Events of DeepSpeed's engine and optimizers, and the functions that are replaced.

[Note: private names] Only these modules use names that DeepSpeed does not document: this one
(engine, and optimizers of all stages), sharded_params.py (parameters of ZeRO-3), shard_hooks.py
(gradients of ZeRO-3), optimizer_hooks.py (ZeRO-1 and 2), muon.py and install.py.
deepspeed_types.py declares the names.

[Note: replaced functions] Methods are wrapped per engine, on instances. Functions that DeepSpeed
calls by module name are wrapped once per process, each as an ``ExpectedCall``: the gradient
reduce-scatter of ZeRO-3, the weight gather of ZeRO-1 and 2, the gathers of Muon. An
``ExpectedCall`` calls the original, except on a thread on which an engine has redirected it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from ds_quant.config.schema import QuantizedCommConfig
from ds_quant.zero.deepspeed_types import Engine, ZeroOptimizer, ZeroParameter
from ds_quant.zero.version import deepspeed_version

# ---- wrapping ----


_TESTED = "0.17.6, 0.18.9 and 0.19.8"


def wrap_once(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, ...)`` for the whole process. Idempotent.

    owner: a class or a module.
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
    """Calls ``around(original, ...)``."""

    ds_quant_wraps: Callable[..., Any]  # the original
    ds_quant_owner: Hashable  # set on methods of parameters only


def wrapped_by(original: Callable[..., Any], around: Callable[..., Any]) -> Wrapped:
    """Return ``around(original, ...)``, named as the original."""
    wrapped = Wrapped(around, original)
    functools.update_wrapper(wrapped, original)
    wrapped.ds_quant_wraps = original
    return wrapped


Context = Callable[[], AbstractContextManager[object]]


class Hooks:
    """The methods that are replaced on one engine, and its events.

    An *event* is a list of calls, which run in the order of the list. Fill the lists, then
    ``connect``: methods without a call stay DeepSpeed's. ``remove`` restores all methods, and runs
    when the engine is destroyed.
    """

    def __init__(self, engine: Engine, optimizer: ZeroOptimizer) -> None:
        self.engine = engine
        self.optimizer = optimizer

        # - Backward
        # The last gradient of a backward exists; the last buckets are not reduced yet.
        self.before_last_buckets: list[Callable[[], None]] = []
        # Contexts of the reduction of the last buckets.
        self.around_last_buckets: list[Context] = []
        self.after_backward: list[Callable[[], None]] = []
        self.after_zero_grad: list[Callable[[], None]] = []

        # - Optimizer step
        # Gradients are about to be read, by the step or by user code ahead of it.
        self.before_gradients: list[Callable[[], None]] = []
        self.before_step: list[Callable[[], object]] = []
        self.around_step: list[Context] = []
        # The weights are updated: the step was not skipped because of an overflow.
        self.after_update: list[Callable[[], None]] = []
        # The argument is True if the step was skipped.
        self.after_step: list[Callable[[bool], None]] = []
        # ``global_steps`` has grown, also if the step was skipped.
        self.after_count: list[Callable[[], None]] = []

        # - Checkpoints
        # Contexts of a save, an export or a load.
        self.around_export: list[Context] = []
        # A checkpoint or 16-bit weights are saved.
        self.after_save: list[Callable[[], None]] = []
        # ZeRO-3: a checkpoint is saved or loaded.
        self.after_checkpoint_event: list[Callable[[], None]] = []

        self.on_destroy: list[Callable[[], None]] = []

        # Owner, name, and the owner's own attribute of that name, None if its class has it.
        self._replaced: list[tuple[object, str, object]] = []

    def wrap(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        """Replace the method ``name`` of an instance by ``around(original, ...)``.

        Raises:
            RuntimeError: the method does not exist, or this plugin has wrapped it already.
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
        """Restore the wrapped methods, except those that others have replaced. Idempotent."""
        while self._replaced:
            owner, name, own = self._replaced.pop()
            if not hasattr(vars(owner).get(name), "ds_quant_wraps"):
                continue
            if own is None:
                delattr(owner, name)  # the method of its class
            else:
                setattr(owner, name, own)

    def connect(self) -> None:
        """Wrap the methods of all events that have calls."""
        engine = self.engine
        optimizer = self.optimizer
        step_events = (
            self.before_gradients,
            self.before_step,
            self.around_step,
            self.after_update,
            self.after_step,
        )
        if any(step_events):
            self.wrap(optimizer, "step", self._step)
        self._wrap_event(engine, "_take_model_step", after=self.after_count)
        self._wrap_event(
            engine,
            "save_16bit_model",
            contexts=self.around_export,
            after=self.after_save,
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
        # Called by users whose accumulation DeepSpeed does not manage.
        finalize = "finalize_gradient_accumulation_boundary"
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
        """Wrap a method if its event has a call."""
        if contexts or before or after:
            self.wrap(owner, name, as_event(contexts, before, after))

    def keep_state(
        self, key: str, dump: Callable[[], object], restore: Callable[[object], None]
    ) -> None:
        """Add state of the plugin to checkpoints, as an entry of the client state.

        The caller's client state does not contain it.

        key: name of the entry.
        dump: returns the state when a checkpoint is saved.
        restore: gets the state when a checkpoint is loaded, None if the checkpoint has none.
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
        is_skipped = bool(self.optimizer.overflow)
        if not is_skipped:
            for call in self.after_update:
                call()
        for call_with_outcome in tuple(self.after_step):  # a call may remove itself
            call_with_outcome(is_skipped)
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
    """Return a wrapper: ``before`` and the original run inside the contexts, then ``after``.

    The lists are read when the method is called. A call may remove itself from its list.
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
    """A function that DeepSpeed must call while another one runs.

    Guards against new versions of DeepSpeed: if they stopped calling the function, communication
    would silently bypass the plugin.

    calls: number of calls on this thread.
    target: replacement of the function while ``through`` is open.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.target: Callable[..., Any] | None = None

    @contextmanager
    def expected(self, excused: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Check at exit that the function was called inside.

        Raises:
            RuntimeError: it was not called and ``excused()`` is False.
        """
        before = self.calls
        yield
        if self.calls == before and not excused():
            raise moved(self.name)

    def install(self, module: object) -> None:
        """Wrap the function of this name in a module."""

        def dispatch(original: Callable[..., object], *args: object, **kwargs: object) -> object:
            self.calls += 1
            return (self.target or original)(*args, **kwargs)

        require(module, self.name)
        wrap_once(module, self.name, dispatch)

    @contextmanager
    def through(
        self, target: Callable[..., Any], excused: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Call ``target`` in its place inside the context. Raises as ``expected``."""
        previous, self.target = self.target, target
        try:
            with self.expected(excused):
                yield
        finally:
            self.target = previous


def moved(name: str) -> RuntimeError:
    """Return the error for a function that this version of DeepSpeed no longer calls."""
    return RuntimeError(
        f"quantized_comm: {deepspeed_version()} did not call {name}, so communication bypassed "
        f"this plugin; use a tested version ({_TESTED}) or remove the quantized_comm block"
    )


def require(owner: object, name: str) -> None:
    """Raise RuntimeError if this version of DeepSpeed lacks an attribute."""
    if not hasattr(owner, name):
        raise RuntimeError(
            f"quantized_comm: {deepspeed_version()} has no {name} on {type(owner).__name__}; "
            f"tested versions are {_TESTED}"
        )


# ---- DeepSpeed's engine ----


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
    """Remove the block, so that the engine runs as without one."""
    engine._config.quantized_comm = None


def accumulates(engine: Engine) -> bool:
    """Return True if an optimizer step may take several backwards."""
    if engine.gradient_accumulation_steps() > 1:
        return True
    is_managed = getattr(engine, "managed_gradient_accumulation", None)
    return is_managed is not None and not is_managed()


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    from deepspeed import comm as dist

    return dist.get_rank(), dist.get_world_size()


# ---- optimizers of all stages ----


AVG_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"

# Functions through which DeepSpeed calls the plugin, by role; named in error messages.
CARRIERS = {
    "weights": "all_gather_coalesced of a parameter",
    "gradients": "__avg_scatter_grads (ZeRO-3) or average_tensor (ZeRO-1 and 2)",
}

# ``flush()`` and ``reduce_zeros(params)`` of the buckets in which an optimizer collects gradients:
# see ``shard_hooks.shard_buckets`` and ``optimizer_hooks.owner_buckets``.
BucketFunctions = tuple[Callable[[], None], Callable[[Sequence[ZeroParameter]], None]]


def has_gradients(optimizer: ZeroOptimizer) -> bool:
    """Return True if any bucket holds gradients, as the last ones of a backward do."""
    return any(bucket.params for bucket in optimizer.ipg_buckets.values())


def has_step(optimizer: object) -> bool:
    """Return True if a ZeRO-3 optimizer has a step; inference has none."""
    return hasattr(optimizer, "step") and hasattr(optimizer, AVG_SCATTER)
