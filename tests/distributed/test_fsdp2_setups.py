"""Models that users set up in other ways than most tests: each trains as under FSDP2 alone."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import ds_quant
from ds_quant import fsdp2
from ds_quant.config.errors import AttachError, ConfigError
from ds_quant.fsdp2.attaching import front_of
from ds_quant.fsdp2.torch_names import ReduceScatter
from ds_quant.runtime.handshake import StartError
from ds_quant.runtime.memory_check import Free, require_memory
from tests import needs
from tests.distributed.fsdp2_runs import (
    WIDTH,
    Net,
    Run,
    adam,
    assert_near,
    logged,
    rows,
    sgd,
    sharded,
)
from tests.distributed.harness import of_all_ranks, on_ranks
from tests.thin import thinned

BLOCK = {"scheme": "hybrid", "node_size": 2, "min_numel": 64}
# Copies of the weights that hold their bits, lossy ones, and none.
SCHEMES = thinned(("hybrid", "eden4", "qsdp"), lambda scheme: scheme == "eden4")


def both(
    make: Callable[[], nn.Module],
    program: Callable[[Run], None],
    *,
    block: dict[str, Any] = BLOCK,
    optimizer: Callable[[nn.Module], Any] = sgd,
) -> tuple[Run, Run]:
    """Run a program with FSDP2 alone and with a block."""
    runs = []
    for each in (None, block):
        model = make()
        made = optimizer(model)
        front = None if each is None else fsdp2.attach(model, each, optimizer=made)
        runs.append(Run(model, made, front))
        program(runs[-1])
    return runs[0], runs[1]


def three_steps(run: Run) -> None:
    for seed in range(3):
        run.step(seed)


# ---- what is wrapped ----


class Chunked(Net):
    """The loss runs through the head in chunks, each with a backward of its own.

    torchtitan trains so by default: ``[third, head]`` are wrapped together, and the backward of a
    chunk has gradients of the head only.
    """

    def hidden(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


def chunked_model() -> Any:
    model = Chunked()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard([model.third, model.head])
    return fully_shard(model)


def in_chunks(run: Run, seed: int, *, last: bool) -> None:
    model = run.model
    model.set_is_last_backward(last)
    hidden = model(rows(seed))
    leaf = hidden.detach().requires_grad_()
    total = 0.0
    for part in leaf.chunk(2):
        loss = torch.tanh(model.head(part)).square().mean()
        loss.backward()
        total += float(loss.detach())
    hidden.backward(leaf.grad)
    run.losses.append(total)


@pytest.mark.parametrize("micro_steps", [1, 2])
@on_ranks(4)
def test_a_loss_in_chunks_reduces_the_gradients_that_a_backward_has(micro_steps: int) -> None:
    needs.torch("2.13", "cannot run backward through part of a module under FSDP2 alone")

    def program(run: Run) -> None:
        for seed in range(3):
            for micro_step in range(micro_steps):
                in_chunks(run, 10 * seed + micro_step, last=micro_step == micro_steps - 1)
            run.update()

    plain, run = both(chunked_model, program)
    assert_near(run, plain)
    assert run.front.step == 3 and run.front.micro_steps == micro_steps


@on_ranks(4)
def test_modules_that_run_in_some_micro_steps_only() -> None:
    """And never in the last one: their sums cross between the nodes all the same."""

    class Branches(Net):
        def forward(self, x: Tensor, deep: bool = True) -> Tensor:
            x = torch.tanh(self.first(x))
            if deep:
                x = torch.tanh(self.third(torch.tanh(self.second(x))))
            return self.head(x)

    def make() -> Any:
        model = Branches()
        for layer in (model.first, model.second, model.third):
            fully_shard(layer)
        return fully_shard(model)

    def program(run: Run) -> None:
        for seed in range(3):
            for micro_step, deep in enumerate((True, True, False)):
                run.model.set_is_last_backward(micro_step == 2)
                loss = run.model(rows(10 * seed + micro_step), deep).square().mean()
                loss.backward()
                run.losses.append(float(loss.detach()))
            run.update()

    plain, run = both(make, program)
    assert_near(run, plain)


@on_ranks(4)
def test_a_root_that_is_not_wrapped_and_a_module_around_it() -> None:
    def unwrapped() -> Any:
        model = Net()
        for layer in model.children():
            fully_shard(layer)
        return model

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = sharded()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def program(run: Run) -> None:
        for seed in range(3):
            loss = run.model(rows(seed)).square().mean()
            loss.backward()
            run.losses.append(float(loss.detach()))
            run.update()

    for make in (unwrapped, Around):
        plain, run = both(make, program)
        assert_near(run, plain)
        assert ds_quant.report(run.model)["steps"] == 3


@on_ranks(2)
def test_a_model_without_parameters_is_nothing_to_quantize() -> None:
    lines = logged()
    front = fsdp2.attach(fully_shard(nn.Sequential(nn.Tanh())), "qsdp", optimizer=[])
    assert "Sequential has no parameters that fully_shard has sharded: nothing is" in front.line
    assert len(lines) == (dist.get_rank() == 0)


# ---- dtypes ----


class WithBytes(nn.Module):
    """A layer of packed 8-bit weights, as QLoRA keeps them, beside one that is trained."""

    def __init__(self, *, together: bool, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        torch.manual_seed(1)
        values = torch.randint(0, 255, (WIDTH, WIDTH)).to(dtype)
        self.packed = nn.Module()
        self.packed.weight = nn.Parameter(values, requires_grad=False)
        self.trained = nn.Linear(WIDTH, WIDTH)
        if not together:
            self.packed.forward = lambda x: x + self.packed.weight.float().mean() / 1e4
            fully_shard(self.packed)
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            x = x + self.packed.weight.float().mean() / 1e4
        else:
            x = self.packed(x)
        return self.trained(x)


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(4)
def test_weights_that_no_codec_takes_are_gathered_by_fsdp2_itself(scheme: str) -> None:
    def in_double() -> Any:
        model = Net()
        model.first.double()
        model.first.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
        model.first.register_forward_hook(lambda module, inputs, output: output.float())
        fully_shard(model.first)
        return fully_shard(model)

    makers: dict[str, Callable[[], Any]] = {"float64": in_double}
    if needs.has_torch("2.13"):  # before it FSDP2 gives integers a gradient, which fails
        makers["uint8"] = lambda: fully_shard(WithBytes(together=False))
        makers["several dtypes"] = lambda: fully_shard(WithBytes(together=True))
    optimizer = lambda model: sgd_of([p for p in model.parameters() if p.requires_grad])  # noqa: E731
    for reason, make in makers.items():
        block = {**BLOCK, "scheme": scheme}
        plain, run = both(make, three_steps, block=block, optimizer=optimizer)
        assert_near(run, plain, off=0.0 if scheme == "hybrid" else 0.1, case=reason)
        line = run.front.line
        assert "FSDP2 gathers the weights of 1 module(s) itself" in line and reason in line
        reduces_itself = "module(s) itself, such as first, whose gradients are float64" in line
        assert reduces_itself == (reason == "float64")
        assert ds_quant.report(run.model)["expected_bytes_per_param"] > 0


def sgd_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@on_ranks(4)
def test_the_line_prices_fsdp2_alone_in_the_dtypes_that_it_sends() -> None:
    bf16 = torch.bfloat16
    # From torch 2.15 on gradients have the dtype of the master weights, if nothing else is said.
    default = "(bf16 + fp32 8.00)" if needs.has_torch("2.15") else "(bf16 6.00)"
    policies = [
        ("(bf16 + fp32 8.00)", MixedPrecisionPolicy(bf16, reduce_dtype=torch.float32)),
        ("(bf16 6.00)", MixedPrecisionPolicy(bf16, reduce_dtype=bf16)),
        (default, MixedPrecisionPolicy(bf16)),
        ("(fp32 12.00)", MixedPrecisionPolicy()),
    ]
    for alone, policy in policies:
        model = sharded(mp_policy=policy, reshard_after_forward=True)
        front = fsdp2.attach(model, {**BLOCK, "scheme": "eden4"}, optimizer=adam(model))
        assert alone in front.line, front.line


# ---- meta device, DTensors ----


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(4)
def test_a_model_on_the_meta_device_is_attached_before_its_weights_exist(scheme: str) -> None:
    state = Net().state_dict()

    def make() -> Any:
        with torch.device("meta"):
            model = Net()
        for layer in (model.first, model.second, model.third):
            fully_shard(layer)
        return fully_shard(model)

    def load(model: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model.to_empty(device="cpu")
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))

    runs = []
    for block in (None, {**BLOCK, "scheme": scheme, "gradients": {"enabled": False}}):
        model = make()
        optimizer = sgd(model)
        front = None if block is None else fsdp2.attach(model, block, optimizer=optimizer)
        load(model)
        runs.append(Run(model, optimizer, front))
        three_steps(runs[-1])
    assert_near(runs[1], runs[0], off=0.0 if scheme == "hybrid" else 0.05)


@on_ranks(4)
def test_parameters_replaced_after_fully_shard_are_those_that_train() -> None:
    """transformers replaces them while it loads, and FSDP2 notices it in the first forward."""

    def make() -> Any:
        model = sharded()
        for module in (model.first, model.second, model.third, model.head):
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach() * 0.5))
        return model

    plain, run = both(make, three_steps)
    assert_near(run, plain)


@on_ranks(4)
def test_parameters_that_are_dtensors_on_the_same_mesh_are_served() -> None:
    api = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_api")
    if not hasattr(api, "DataParallelMeshDims"):
        pytest.skip("needs torch 2.13: fully_shard(dp_mesh_dims=)")
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))

    def make() -> Any:
        model = distribute_module(Net(), mesh)
        dims = api.DataParallelMeshDims(shard="fsdp")
        for layer in (model.first, model.second, model.third):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
        return fully_shard(model, mesh=mesh, dp_mesh_dims=dims)

    def program(run: Run) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        for seed in range(3):
            x = DTensor.from_local(rows(seed), mesh, [Shard(0)])
            loss = run.model(x).square().mean()
            loss.backward()
            run.losses.append(float(loss.redistribute(mesh, [Replicate()]).to_local().detach()))
            run.update()

    plain, run = both(make, program)
    assert_near(run, plain)


# ---- part of the world ----


@pytest.mark.parametrize(
    ("scheme", "off"),
    thinned(
        [("full_precision", 0.0), ("hybrid", 0.0), ("eden4", 0.05)],
        lambda scheme, off: scheme == "eden4",
    ),
)
@on_ranks(4)
def test_two_halves_of_the_world_train_apart(scheme: str, off: float) -> None:
    """Pipeline stages, ensembles and sweeps: with equal names and one seed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "fsdp"))["fsdp"]
    half = dist.get_rank() // 2

    def program(run: Run) -> None:
        for seed in range(4):
            run.step(100 * half + seed)

    lines = logged()
    for node_size in (2, 1):
        block = {"scheme": scheme, "min_numel": 64, "node_size": node_size}
        block |= {"allow_full_replica": True, "gradients": {"enabled": False}}
        del block["gradients" if scheme != "eden4" else "min_numel"]
        plain, run = both(lambda: sharded(mesh), program, block=block)
        assert_near(run, plain, off=off, case=node_size)
        sums = of_all_ranks(sum(w.sum().item() for w in run.weights().values()))
        assert sums[0] == sums[1] != sums[2] == sums[3]
    said = [line for line in lines if "belongs to 2 of 4 ranks, from rank" in line]
    assert len(said) == (2 if dist.get_rank() % 2 == 0 else 0)


@pytest.mark.parametrize("mistaken", thinned([2, 3], lambda rank: rank == 2))
@on_ranks(4)
def test_a_mistake_in_one_half_of_the_world_stays_there_and_ends_its_other_rank(
    mistaken: int,
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "fsdp"))["fsdp"]
    block = {"scheme": "eden4", "handshake_timeout": 600.0}

    def attach(model: Any, block: dict[str, Any]) -> Any:
        return fsdp2.attach(model, block, optimizer=sgd(model))

    rank = dist.get_rank()
    model = sharded(mesh)
    if rank == mistaken:
        with pytest.raises(ConfigError, match="schem: unknown key|schem="):
            attach(model, {"schem": "eden4", **block})
    elif rank // 2 == mistaken // 2:
        with pytest.raises(StartError, match=f"rank {mistaken} stopped: ConfigError: .*schem="):
            attach(model, block)
    else:
        attach(model, block).detach()
    assert "eden4 on FSDP2" in attach(model, block).line
    whole = sharded(init_device_mesh("cpu", (4,)))
    assert "eden4 on FSDP2" in attach(whole, block).line


# ---- blocks ----


@on_ranks(2)
def test_without_a_block_a_loop_runs_and_the_log_says_so() -> None:
    lines = logged()
    model = sharded()
    optimizer = sgd(model)
    front = fsdp2.attach(model, optimizer=optimizer)
    front.load_state_dict({"step": 7})
    three_steps(Run(model, optimizer, front))
    front.discard_gradients()
    front.resync()
    assert front.state_dict() == {"step": 7}
    assert ds_quant.report(model) is None
    front.detach()
    off = fsdp2.attach(model, {"scheme": "qsdp", "enabled": False}, optimizer=optimizer)
    assert off.line == "enabled=false: nothing is quantized"
    if dist.get_rank() == 0:
        assert "no block was given and DS_QUANT_BLOCK is not set: nothing is" in lines[0]


@on_ranks(2)
def test_a_name_of_a_preset_is_a_block() -> None:
    for block in ("eden4", " qsdp ", '{"scheme": "zeropp"}'):
        model = sharded()
        front = fsdp2.attach(model, block, optimizer=sgd(model))
        assert front.run.scheme.name in block


@on_ranks(1)
def test_sources_that_are_no_block_are_named() -> None:
    model = sharded()
    for source, message in (
        ("eden5", 'No such file or directory: did you mean "eden4"'),
        ("{scheme: eden4}", "Expecting property name"),
        ('[{"scheme": "eden4"}]', "No such file"),
        (7, "quantized_comm=7: allowed: an object"),
        (
            {"train_batch_size": 8, "quantised_comm": {}},
            "quantised_comm=.* did you mean quanti",
        ),
        ({"quantized_comm": "eden4"}, 'quantized_comm="eden4": did you mean .* allowed: an object'),
    ):
        with pytest.raises(ds_quant.ConfigError, match=message):
            fsdp2.attach(model, source, optimizer=[])


# ---- life of a model ----


@on_ranks(4)
def test_a_deleted_model_is_freed_with_its_front() -> None:
    def made() -> tuple[weakref.ref[Any], weakref.ref[Any], torch.optim.Optimizer]:
        model = sharded()
        optimizer = sgd(model)
        front = fsdp2.attach(model, {**BLOCK, "scheme": "eden4"}, optimizer=optimizer)
        three_steps(Run(model, optimizer, front))
        return weakref.ref(model), weakref.ref(front), optimizer

    groups = None
    for _ in range(3):
        model, front, optimizer = made()
        gc.collect()
        assert model() is None and front() is None
        optimizer.zero_grad()
        known = len(dist.distributed_c10d._world.pg_names)
        assert groups in (None, known)  # the levels are split once
        groups = known


@on_ranks(2)
def test_an_optimizer_that_the_user_drops_is_freed_while_the_model_stays_attached() -> None:
    model = sharded()
    optimizer = adam(model)
    front = fsdp2.attach(model, {**BLOCK, "scheme": "qsdp"}, optimizer=optimizer)
    three_steps(Run(model, optimizer, front))
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dropped() is None
    three_steps(Run(model, sgd(model), front))
    front.detach()


@on_ranks(4)
def test_a_detached_model_trains_on_as_fsdp2_alone_and_is_attached_again() -> None:
    def program(run: Run) -> None:
        run.step(0)
        if run.front is not None:
            run.front.detach()
            run.front.detach()
            assert front_of(run.model) is None
        run.step(1)
        run.step(2)
        if run.front is not None:
            run.front = fsdp2.attach(run.model, BLOCK, optimizer=run.optimizer)
        run.step(3)

    for mesh in (None, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))):
        block = BLOCK if mesh is None else {"scheme": "full_precision"}

        def make(mesh: Any = mesh) -> Any:
            return sharded(mesh)

        def attached(run: Run, block: Any = block) -> None:
            run.step(0)
            if run.front is not None:
                run.front.detach()
            run.step(1)
            if run.front is not None:
                run.front = fsdp2.attach(run.model, block, optimizer=run.optimizer)
            run.step(2)

        plain, run = both(make, attached, block=block)
        assert_near(run, plain)
        assert run.front.step == 1
    plain, run = both(sharded, program)
    assert_near(run, plain)


@on_ranks(2)
def test_a_model_is_attached_once_and_a_failed_start_leaves_nothing() -> None:
    model = sharded()
    optimizer = sgd(model)
    front = fsdp2.attach(model, "qsdp", optimizer=optimizer)
    assert fsdp2.attach(model, {"scheme": "qsdp"}, optimizer=sgd(model)) is front
    with pytest.raises(AttachError, match=r'another block: .*scheme="qwd" \(in the first call: '):
        fsdp2.attach(model, "qwd", optimizer=optimizer)
    part = next(module for module in model.children() if isinstance(module, FSDPModule))
    with pytest.raises(AttachError, match="attached already, as a part of a larger model"):
        fsdp2.attach(part, "qsdp", optimizer=optimizer)
    evaluated = sharded()
    fsdp2.attach(evaluated, "qsdp", optimizer=[])
    with pytest.raises(AttachError, match="attached already, without an optimizer"):
        fsdp2.attach(evaluated, "qsdp", optimizer=sgd(evaluated))
    other = sharded()
    made = sgd(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds_quant.fsdp2.model.line_parts_of", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fsdp2.attach(other, "qsdp", optimizer=made)
    assert front_of(other) is None
    front = fsdp2.attach(other, "qsdp", optimizer=made)
    three_steps(Run(other, made, front))


@pytest.mark.parametrize("mistaken", [0, 1])
@on_ranks(2)
def test_an_error_of_one_rank_ends_all_at_once_and_they_attach_together_later(
    mistaken: int,
) -> None:
    model = sharded()
    optimizer = sgd(model)
    block = {"scheme": "qsdp", "handshake_timeout": 600}
    for given, found in (
        ({**block, "scheme": "qsdb"}, (ds_quant.ConfigError, 'scheme="qsdb": did you mean')),
        ({**block, "node_size": 3}, (ds_quant.ConfigError, "node_size=3: allowed with 2 ranks")),
    ):
        kind, message = found
        if dist.get_rank() != mistaken:
            kind, message = StartError, f"rank {mistaken} stopped: ConfigError: .*{message}"
            given = block
        begun = time.monotonic()
        with pytest.raises(kind, match=message):
            fsdp2.attach(model, given, optimizer=optimizer)
        assert time.monotonic() - begun < 9  # less than a rank's patience, too
    with pytest.raises(ds_quant.ConfigError):
        fsdp2.attach(model, {"scheme": "qsdb"}, optimizer=optimizer)  # on all ranks
    front = fsdp2.attach(model, block, optimizer=optimizer)
    three_steps(Run(model, optimizer, front))


@on_ranks(4)
def test_copies_that_do_not_fit_on_one_rank_are_refused_on_all() -> None:
    model = sharded()
    block = {"scheme": "eden4", "node_size": 2, "min_numel": 64}
    front = fsdp2.attach(model, block, optimizer=sgd(model))
    free = 10**12 if dist.get_rank() != 2 else 1000
    how = {"on_host": False, "holds_gradients": False, "way_out": "replicas (HSDP)"}
    with pytest.raises(RuntimeError, match=r"node shard takes .* GB on every .*replicas"):
        require_memory(front.run, Free(free, 0), **how)
    require_memory(front.run, Free(10**12, 0), **how)


@on_ranks(4)
def test_memory_that_messages_would_exceed_is_warned_of() -> None:
    model = sharded()
    block = {"scheme": "eden4", "node_size": 2, "min_numel": 64}
    run = fsdp2.attach(model, block, optimizer=sgd(model)).run
    volume = run.comm_volume()
    needed = (volume.memory + volume.partial_sums) * volume.numel + run.peak_bytes(volume)
    for free, is_warned in ((int(needed) + 1, False), (int(needed) - 1, True)):
        run.notices.clear()
        require_memory(run, Free(free, 0), on_host=False, holds_gradients=True, way_out="")
        said = "may run out of memory: .* of node shard and .* of waiting gradients and .* messages"
        assert bool(re.search(said, " ".join(run.notices))) == is_warned


@on_ranks(2)
def test_collectives_of_the_user_are_refused() -> None:
    class Own(ReduceScatter):
        def allocate(self, *size: Any, **options: Any) -> Tensor:
            return torch.empty(*size, **options)

        def __call__(self, *_: Any) -> None:
            """Never called."""

    model = sharded()
    model.second.set_custom_reduce_scatter(Own())
    with pytest.raises(AttachError, match="second has collectives of set_custom_all_gather"):
        fsdp2.attach(model, "qsdp", optimizer=sgd(model))
    model = sharded()
    optimizer = sgd(model)
    fsdp2.attach(model, "qsdp", optimizer=optimizer)
    model.second.set_custom_reduce_scatter(Own())
    with pytest.raises(RuntimeError, match=r"called on 1 attached module\(s\), such as second"):
        optimizer.step()


@on_ranks(2)
def test_a_captured_graph_is_refused() -> None:
    model = sharded()
    optimizer = sgd(model)
    front = fsdp2.attach(model, "qsdp", optimizer=optimizer)
    run = Run(model, optimizer, front)
    run.step(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(front.run, "device", torch.device("cuda"))
        with pytest.raises(RuntimeError, match="a CUDA graph is captured here"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="a CUDA graph is captured here"):
            model(rows(1))


# ---- memory ----


@on_ranks(4)
def test_one_reduction_runs_between_two_backwards() -> None:
    """Alive are the sums that the line announces, and the messages of one module."""
    layers = 6

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(layers)])
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    for scheme in ("full_precision", "sdp4bit"):
        model = make()
        optimizer = sgd(model)
        front = fsdp2.attach(model, {**BLOCK, "scheme": scheme}, optimizer=optimizer)
        x = torch.randn(2, 256)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_is_last_backward(False)
        gc.collect()
        before = alive()
        grown = []
        for _ in range(3):
            model(x).sum().backward()
            gc.collect()
            grown.append(alive() - before)
        numel = layers * 256 * 256
        gradients = numel  # the zeros that FSDP2 holds: 4 bytes for a quarter of the elements
        report = ds_quant.report(model)
        assert report["held_bytes"] == report["expected_held_bytes"] == 2 * numel
        bucket = 4 * 256 * 256
        messages = 4 * bucket  # of one layer: fp32 sent and received, and two copies at most
        assert max(grown) <= gradients + report["held_bytes"] + messages, (scheme, grown)
        optimizer.zero_grad()
        assert front.context.partial_sums.nbytes == 0


def alive() -> int:
    """Return the bytes of all tensors of this process."""
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
