"""Writes into weights between steps, by any means, with plain DeepSpeed in the same program.

The forward that follows uses them, the next step takes over, and losses, weights of the forward and
master weights stay those of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_quant
from tests.distributed.harness import of_all_ranks, on_ranks, scratch
from tests.distributed.models import (
    FULL,
    Regression,
    build,
    digest,
    engine_of,
    evaluate,
    exact,
    forward,
    gathered,
    heard,
    live,
    masters,
    plain_descent,
    saved,
    settings,
    train_step,
    train_steps,
)
from tests.thin import thinned

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

EXACT = ("hybrid", "lossless", "full_precision")
SPREAD = 0.1  # of losses under lossy schemes


def block_of(scheme: str, node_size: int = 1, **keys: Any) -> dict[str, Any]:
    return {"scheme": scheme, "allow_full_replica": True, "node_size": node_size, **keys}


def pair(stage: int, block: dict[str, Any]) -> list[Any]:
    """DeepSpeed alone, and with the plugin."""
    return [engine_of(stage, given, optimizer=plain_descent) for given in (None, block)]


def require_equal_losses(plain: list[float], ours: list[float], scheme: str) -> None:
    if scheme in EXACT:
        assert ours == plain
    else:
        np.testing.assert_allclose(
            np.mean(of_all_ranks(ours), axis=0), np.mean(of_all_ranks(plain), axis=0), rtol=SPREAD
        )


def require_equal_masters(plain: Any, ours: Any, scheme: str) -> None:
    expected = masters(plain)
    for name, values in masters(ours).items():
        if scheme in EXACT:
            assert (values == expected[name]).all()
        else:
            error = np.linalg.norm(values - expected[name])
            assert error <= SPREAD * max(1.0, float(np.linalg.norm(expected[name])))


@contextmanager
def used_weights(engine: DeepSpeedEngine) -> Iterator[dict[str, str]]:
    """Digests of the weights with which modules compute."""
    used: dict[str, str] = {}

    def look(prefix: str, module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            used[f"{prefix}.{name}"] = digest(p.data)

    hooks = [
        module.register_forward_pre_hook(lambda m, _, name=name: look(name, m))
        for name, module in engine.module.named_modules()
        if name
    ]
    yield used
    for hook in hooks:
        hook.remove()


# ---- ZeRO-3 ----


def shards(engine: DeepSpeedEngine) -> list[Tensor]:
    return [p.ds_tensor.data for p in engine.module.parameters()]


def stored(engine: DeepSpeedEngine) -> dict[str, str]:
    """Digests of the full weights that the shards of all ranks hold."""
    params = dict(engine.module.named_parameters())
    with gathered(params.values()):
        return {name: digest(p.data) for name, p in params.items()}


def one_row(engine: DeepSpeedEngine) -> None:
    if torch.distributed.get_rank() == 1:
        engine.module.second.weight.ds_tensor.data[257:514].zero_()


def copied(engine: DeepSpeedEngine) -> None:
    for shard in shards(engine):
        shard.copy_(shard * 0.5)


def averaged(engine: DeepSpeedEngine) -> None:
    for shard in shards(engine):
        shard.lerp_(torch.ones_like(shard) / 16, 0.125)


def foreach(engine: DeepSpeedEngine) -> None:
    torch._foreach_mul_(shards(engine), 1.25)


def other_storage(engine: DeepSpeedEngine) -> None:
    shard = engine.module.last.weight.ds_tensor
    shard.data = shard.data.clone().neg_()


def bit_patterns(engine: DeepSpeedEngine) -> None:
    """The signs of all biases, written past torch."""
    engine.module.first.bias.ds_tensor.data.view(torch.int16).numpy()[:] ^= -(2**15)


# Each with a parameter that it writes.
WRITES: dict[Callable[[Any], None], str] = {
    one_row: "second.weight",
    copied: "second.weight",
    averaged: "first.weight",
    foreach: "last.weight",
    other_storage: "last.weight",
    bit_patterns: "first.bias",
}


def play_writes(engine: DeepSpeedEngine) -> list[float]:
    """Return the losses of a run in which weights are written before every evaluation."""
    losses = []
    for index, (write, name) in enumerate(WRITES.items()):
        losses += train_steps(engine, 2, 3 * index)
        write(engine)
        expected = stored(engine)
        with used_weights(engine) as used:
            losses.append(evaluate(engine))
        assert used[name] == expected[name], write.__name__
        losses += train_step(engine, 3 * index + 2)
        # The step has overwritten the weights, also in rows that hold differences to them.
        expected = stored(engine)
        with used_weights(engine) as used:
            losses.append(evaluate(engine))
        assert used[name] == expected[name], write.__name__
    return losses


@pytest.mark.parametrize(
    ("scheme", "world", "node_size"),
    thinned(
        [("hybrid", 2, 1), ("lossless", 2, 1), ("eden4", 2, 1), ("sdp4bit", 2, 1), ("eden4", 4, 2)],
        lambda scheme, world, _: (scheme, world) == ("eden4", 4),
    ),
)
@on_ranks(timeout=200)
def test_the_next_forward_uses_shards_as_they_were_written(
    scheme: str, world: int, node_size: int
) -> None:
    plain, ours = pair(3, block_of(scheme, node_size))
    logged = heard()
    expected = play_writes(plain)
    require_equal_losses(expected, play_writes(ours), scheme)
    require_equal_masters(plain, ours, scheme)
    if torch.distributed.get_rank() == 0:
        (line,) = [line for line in logged if "your code has written" in line]
        assert "1 parameter(s) outside the optimizer step, such as second.weight" in line


def swapped(engine: DeepSpeedEngine) -> list[float]:
    """Two averages are evaluated one after the other, in the mode of the first."""
    own = [shard.clone() for shard in shards(engine)]
    losses = []
    for factor in (0.5, 0.25):
        for shard, values in zip(shards(engine), own, strict=True):
            shard.copy_(values * factor)
        expected = stored(engine)
        with used_weights(engine) as used:
            losses.append(evaluate(engine))
        assert used == expected
    for shard, values in zip(shards(engine), own, strict=True):
        shard.copy_(values)
    return losses


def perturbed(engine: DeepSpeedEngine) -> list[float]:
    """A step whose gradients are those of perturbed weights, as in SAM."""
    own = [shard.clone() for shard in shards(engine)]
    losses = [float(forward(engine, 50).detach())]
    for shard in shards(engine):
        shard.add_(0.25)
    loss = forward(engine, 50)
    engine.backward(loss)
    for shard, values in zip(shards(engine), own, strict=True):
        shard.copy_(values)
    engine.step()
    return [*losses, float(loss.detach())]


def rolled_back(engine: DeepSpeedEngine) -> list[float]:
    """The optimizer loads a state that it had two steps before."""

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: copy_of(item) for key, item in value.items()}
        return [copy_of(item) for item in value] if isinstance(value, list) else value

    state = copy_of(engine.optimizer.state_dict())
    losses = [evaluate(engine), *train_steps(engine, 2, 60)]
    states = [state] * torch.distributed.get_world_size()
    engine.optimizer.load_state_dict(states, load_from_fp32_weights=True)
    return [*losses, evaluate(engine)]


def not_finite(engine: DeepSpeedEngine) -> list[float]:
    """NaN is in the weights for one evaluation, between a backward and its step."""
    loss = forward(engine, 70)
    engine.backward(loss)
    engine.module.second.weight.ds_tensor.data[:3] = float("nan")
    assert np.isnan(evaluate(engine))
    engine.step()
    return [float(loss.detach())]


@pytest.mark.parametrize(
    ("scheme", "world", "node_size"),
    thinned(
        [("hybrid", 2, 1), ("lossless", 2, 1), ("sdp4bit", 2, 1), ("eden4", 4, 2)],
        lambda scheme, *_: scheme == "eden4",
    ),
)
@on_ranks(timeout=200)
def test_weights_that_come_and_go_between_steps(scheme: str, world: int, node_size: int) -> None:
    plain, ours = pair(3, block_of(scheme, node_size))

    def play(engine: DeepSpeedEngine) -> list[float]:
        losses = train_steps(engine, 2)
        for index, events in enumerate((swapped, perturbed, rolled_back, not_finite)):
            losses += events(engine)
            losses += train_steps(engine, 2, 10 * index + 10)
        return losses

    require_equal_losses(play(plain), play(ours), scheme)
    require_equal_masters(plain, ours, scheme)


# ---- several engines on one module ----


class Wrapper(nn.Module):
    """A model with a parameter of its own around the model that trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((4096,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y) * self.scale.float().mean()


def evaluation_engine(module: nn.Module, block: dict[str, Any] | None) -> Any:
    """Return an engine without optimizer."""
    import deepspeed

    return deepspeed.initialize(model=module, config=settings(3, block, dtype="bf16"))[0]


def play_engines(block: dict[str, Any] | None) -> list[float]:
    """Return the losses of a training with engines for evaluation, built at any time."""
    torch.manual_seed(0)
    module = Regression()
    before = evaluation_engine(module, block)
    training = engine_of(3, block, lambda: module, optimizer=plain_descent)
    losses = [evaluate(before), *train_steps(training, 2), evaluate(before)]
    first = evaluation_engine(module, block)
    losses += [evaluate(first), *train_steps(training, 2, 2), evaluate(first)]
    second = evaluation_engine(module, block)
    losses += [evaluate(second), *train_steps(training, 1, 4)]
    second.destroy()
    losses += [*train_steps(training, 1, 5), evaluate(first)]
    around = evaluation_engine(Wrapper(module), block)
    losses += [evaluate(around), *train_steps(training, 2, 6), evaluate(around), evaluate(before)]
    training.destroy()
    # An engine for evaluation serves the others now.
    return [*losses, evaluate(before), evaluate(first), evaluate(around)]


@pytest.mark.parametrize(
    "scheme",
    thinned(
        ["hybrid", "lossless", "full_precision", "eden4", "sdp4bit", "qsdp"],
        lambda scheme: scheme == "eden4",
    ),
)
@on_ranks(timeout=200)
def test_engines_for_evaluation_follow_the_one_that_trains(scheme: str) -> None:
    logged = heard("info_rank0")
    expected = play_engines(None)
    require_equal_losses(expected, play_engines(block_of(scheme)), scheme)
    if torch.distributed.get_rank() == 0:
        guests = [line for line in logged if "another engine on this module fetches" in line]
        assert len(guests) == 3  # all but the one that was built before


# ---- ZeRO-1 and 2 ----


def everywhere(engine: DeepSpeedEngine) -> None:
    engine.module.second.weight.data.mul_(-3)


def on_one_rank(engine: DeepSpeedEngine) -> None:
    if torch.distributed.get_rank() == 1:
        engine.module.second.weight.data.mul_(1.5)


def one_element(engine: DeepSpeedEngine) -> None:
    if torch.distributed.get_rank() == 0:
        engine.module.second.weight.data.view(-1)[-1] += 1


def rows_exchanged(engine: DeepSpeedEngine) -> None:
    weight = engine.module.second.weight.data
    weight[[3, 7]] = weight[[7, 3]].clone()


def far_off(engine: DeepSpeedEngine) -> None:
    engine.module.second.weight.data[5] = 1e30


def nan(engine: DeepSpeedEngine) -> None:
    engine.module.second.weight.data[3, 5] = float("nan")


def infinity_on_one_rank(engine: DeepSpeedEngine) -> None:
    if torch.distributed.get_rank() == 1:
        engine.module.second.weight.data[:, 7] = float("inf")


def all_of_them(engine: DeepSpeedEngine) -> None:
    torch._foreach_zero_([p.data for p in engine.module.parameters()])


REPLICA_WRITES = (
    everywhere, on_one_rank, one_element, rows_exchanged, far_off, nan, infinity_on_one_rank,
    all_of_them,
)  # fmt: skip


def play_replica_writes(engine: DeepSpeedEngine) -> list[float]:
    """Return the losses of a run in which weights are written between backward and step."""
    losses = []
    for index, write in enumerate(REPLICA_WRITES):
        loss = forward(engine, 3 * index)
        engine.backward(loss)
        write(engine)
        engine.step()
        bits = of_all_ranks(live(engine))
        assert bits[0] == bits[1], write.__name__
        assert engine.skipped_steps == 0
        if index:  # before the first step all weights are exact
            assert bits[0]["second.weight"] == exact(engine, "bf16")["second.weight"]
        losses += [float(loss.detach()), *train_steps(engine, 2, 3 * index + 1)]
    return losses


@pytest.mark.parametrize(
    ("stage", "scheme"),
    thinned(
        [(2, "eden4"), (2, "sdp4bit"), (2, "lossless"), (1, "sdp4bit"), (1, "lossless")],
        lambda stage, scheme: (stage, scheme) in [(2, "eden4"), (1, "lossless")],
    ),
)
@on_ranks(timeout=200)
def test_a_step_overwrites_weights_that_were_written(stage: int, scheme: str) -> None:
    plain, ours = pair(stage, block_of(scheme))
    logged = heard()
    expected = play_replica_writes(plain)
    require_equal_losses(expected, play_replica_writes(ours), scheme)
    require_equal_masters(plain, ours, scheme)
    if torch.distributed.get_rank() == 0:
        (line,) = [line for line in logged if "your code has written" in line]
        assert "1 parameter(s) since the last step, such as second.weight" in line


@pytest.mark.parametrize(
    ("stage", "scheme"),
    thinned(
        [(2, "qsdp"), (1, "eden4"), (2, "sdp4bit"), (1, "qsdp"), (2, "full_precision")],
        lambda stage, scheme: (stage, scheme) in [(2, "qsdp"), (1, "eden4")],
    ),
)
@on_ranks()
def test_master_weights_are_refreshed_from_exact_weights(stage: int, scheme: str) -> None:
    """As DeepSpeed does alone: rounded to the dtype of the module, with edits of user code."""

    def rounded(engine: DeepSpeedEngine) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(values).bfloat16().float()
            for name, values in masters(engine).items()
        }

    for engine in pair(stage, FULL if scheme == "full_precision" else block_of(scheme)):
        train_steps(engine, 2)
        expected = rounded(engine)
        engine.module.last.weight.data[2] = 0.125
        engine.optimizer.refresh_fp32_params()
        refreshed = masters(engine)
        assert (refreshed["last.weight"][2] == 0.125).all()
        for name in expected.keys() - {"last.weight"}:
            assert (refreshed[name] == expected[name].numpy()).all(), name
        train_steps(engine, 2, 2)
        expected = rounded(engine)
        expected["last.weight"][2] = 0.25
        with ds_quant.exact_weights(engine):  # no effect on DeepSpeed alone
            engine.module.last.weight.data[2] = 0.25
            engine.optimizer.refresh_fp32_params()
        for name, values in masters(engine).items():
            assert (values == expected[name].numpy()).all(), name
        train_steps(engine, 2, 4)


@pytest.mark.parametrize("scheme", thinned(["qsdp", "eden4"], lambda scheme: scheme == "qsdp"))
@on_ranks()
def test_an_export_keeps_every_written_element(scheme: str) -> None:
    engine = engine_of(2, block_of(scheme))
    train_steps(engine, 2)
    params = dict(engine.module.named_parameters())
    params["first.weight"].data[11] = 0.25
    params["second.bias"].data[-1] += 1
    if torch.distributed.get_rank() == 1:  # rank 0 writes the file
        params["last.weight"].data[3, 4] += 1
    expected = exact(engine, "bf16")
    if torch.distributed.get_rank() == 0:
        for name in ("first.weight", "second.bias"):
            expected[name] = digest(params[name])
    else:
        expected = {}
    weights = {name: digest(values) for name, values in saved(engine).items()}
    expected = of_all_ranks(expected)[0]
    assert weights == expected
    train_step(engine, 2)
    ds_quant.resync(engine)
    assert live(engine) == exact(engine, "bf16")


# ---- writes that are known ----


@pytest.mark.parametrize("scheme", thinned(["eden4", "hybrid"], lambda scheme: scheme == "eden4"))
@on_ranks()
def test_known_writes_are_neither_reported_nor_sent_twice(scheme: str) -> None:
    """Nor are steps, accumulations, evaluations and saves reported."""
    engine = engine_of(3, block_of(scheme), accumulation=2)
    logged = heard()
    weight = engine.module.second.weight

    def sent_by(events: Callable[[], object]) -> int:
        before = ds_quant.report(engine)["received_bytes"]["weights"]["inter"]
        events()
        return ds_quant.report(engine)["received_bytes"]["weights"]["inter"] - before

    def write() -> None:
        with gathered([weight], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                weight.data.mul_(0.5)
        evaluate(engine)
        evaluate(engine)

    train_steps(engine, 2)
    evaluate(engine)
    assert sent_by(lambda: evaluate(engine)) == 0
    nbytes = weight.ds_tensor.nbytes
    assert nbytes <= sent_by(write) < 1.01 * nbytes  # a message is padded
    train_steps(engine, 1, 2)
    evaluate(engine)
    engine.save_checkpoint(str(scratch()), "here")
    train_steps(engine, 1, 3)
    engine.load_checkpoint(str(scratch()), "here")
    train_steps(engine, 1, 3)
    ds_quant.resync(engine)
    train_steps(engine, 1, 4)
    assert [line for line in logged if "your code has written" in line] == []


# ---- fetches far ahead, and parameters that stay gathered ----


class Deep(nn.Module):
    """Three layers without a bias, at a root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


def _compute(engine: DeepSpeedEngine) -> Tensor:
    rows = torch.ones(2, 64)
    return engine(rows, 0.5 * rows)


def _double(engine: DeepSpeedEngine, factor: float) -> None:
    for p in engine.module.parameters():
        p.ds_tensor.data.mul_(factor)


def perturbed_again(engine: DeepSpeedEngine) -> list[float]:
    """Two forwards and backwards per step, of which the second sees perturbed weights."""
    losses = []
    for _ in range(2):
        for factor in (2.0, 0.5):
            loss = _compute(engine)
            engine.backward(loss)
            losses.append(float(loss.detach()))
            _double(engine, factor)
        engine.step()
    return losses


def read_and_written(engine: DeepSpeedEngine) -> list[float]:
    """Single layers are read between evaluations, and one is written after it was released."""
    import deepspeed

    first, _, last = engine.module.parameters()
    loss = _compute(engine)
    engine.backward(loss)
    engine.step()
    losses = []
    for p in (last, first):
        with torch.no_grad():
            losses.append(float(_compute(engine)))
        with deepspeed.zero.GatheredParameters([p]):
            losses.append(float(p.detach().norm()))
    first.ds_tensor.data.mul_(2)
    with torch.no_grad():
        losses += [float(_compute(engine)), float(_compute(engine))]
    return losses


@pytest.mark.parametrize(
    ("scheme", "prefetch"),
    thinned(
        [(scheme, prefetch) for scheme in ("hybrid", "eden4") for prefetch in (0, 9000, None)],
        lambda scheme, prefetch: scheme == "hybrid" and prefetch is None,
    ),
)
@on_ranks(2)
def test_writes_are_noticed_however_far_ahead_deepspeed_fetches(
    scheme: str, prefetch: int | None
) -> None:
    """None: DeepSpeed's own prefetch, which fetches all layers with the root."""
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 50_000}
    if prefetch is not None:
        zero["stage3_prefetch_bucket_size"] = prefetch
    for program in (perturbed_again, read_and_written):
        found = []
        for block in (None, block_of(scheme, min_numel=64)):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 3, **zero},
            }
            if block is not None:
                config["quantized_comm"] = block
            engine = build(config, Deep, optimizer=plain_descent)
            found.append(program(engine))
            engine.destroy()
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5 if scheme == "hybrid" else SPREAD)
