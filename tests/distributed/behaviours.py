"""The table of behaviours that users rely on, of every front: see [Note: a cell] in cells.py.

docs/support.md is made from it: ``python -m tests.distributed.support_page`` writes its tables.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed import fsdp2_trials as trials
from tests.distributed import scenarios
from tests.distributed.cells import (
    Cannot,
    Featured,
    Plays,
    Proven,
    RefusalProven,
    RefusesConfig,
    RefusesModel,
    Row,
    Trains,
    Tries,
    Untried,
)
from tests.distributed.features import Feature, separate_experts
from tests.distributed.fsdp2_runs import BF16, sharded
from tests.distributed.fsdp2_trials import Refusal, Trial, three_steps, trained_only, wrapped
from tests.distributed.surroundings import full_of_nan, late_messages

ALL = (1, 2, 3)
V017, V018 = (0, 17), (0, 18)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)

# What a user would notice.
LOSS = "the loss is another one than without the plugin"
STALE = "forward goes on with old weights, so the loss is another one"
WRONG_SUMS = "gradients of other steps or parameters enter the step"
ENDS = "a run that works without the plugin ends with an error"
UNSEEN = "the run goes on, and nobody knows that it is wrong"

# Why a front cannot.
OF_DEEPSPEED = Cannot("a setting of DeepSpeed")
OF_FSDP2 = Cannot("a call of FSDP2")
OF_DDP = Cannot("an argument or context of DDP")
OWNS_OPTIMIZER = Cannot("DeepSpeed owns the optimizer")
NO_CPU_OFFLOAD = RefusesModel(
    refusal=Refusal(model=trials.offloaded, message="leave offload_policy out"),
    remark="`CPUOffloadPolicy`: leave `offload_policy` out",
)
NO_OTHER_STAGES = "DeepSpeed refuses the other stages"
FEW_RANKS = "process groups smaller than the world: single-level, no node shard"


def unclipped(*stages: int, **fields: Any) -> Feature:
    """Return a feature without clipping, which would hide a wrong divisor.

    DeepSpeed clips by default.
    """
    top = {"gradient_clipping": 0.0, **fields.pop("top", {})}
    return Feature(stages=stages or ALL, top=top, **fields)


def proven(
    file: str,
    *names: str,
    rows: tuple[str, ...] = (),
    stages: tuple[int, ...] = (),
    remark: str = "",
) -> Proven:
    """Point to tests of tests/distributed/test_FILE.py or of tests/integration."""
    return Proven(_ids(file, names), rows=rows, stages=stages, remark=remark)


def refused_in(file: str, *names: str, stages: tuple[int, ...] = (), remark: str) -> RefusalProven:
    """Point to tests that show a refusal."""
    return RefusalProven(tests=_ids(file, names), stages=stages, remark=remark)


def _ids(file: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([f"test_{file}.py::test_{name}" for name in names])


def between_steps(test: str, *, remark: str = "") -> Proven:
    return proven("fsdp2_between_steps", test, remark=remark)


def setups(test: str, *, remark: str = "") -> Proven:
    return proven("fsdp2_setups", test, remark=remark)


def meshes(*tests: str, remark: str = "") -> Proven:
    return proven("fsdp2_meshes", *tests, remark=remark)


def equal_runs(*rows: str, stages: tuple[int, ...] = ALL, remark: str = "") -> Proven:
    return proven("equal_runs", "runs_end_alike", rows=rows, stages=stages, remark=remark)


def noticed(test: str, *stages: int) -> Proven:
    return proven("noticed_writes", test, stages=stages)


def tries(loop: Any = three_steps, *, remark: str = "", **fields: Any) -> Tries:
    """Try a loop under FSDP2. fields: those of ``Trial``."""
    return Tries(Trial(loop=loop, **fields), remark=remark)


MUON = {"groups": scenarios.matrices_apart, "optimizer": scenarios.muon}
SLICED = {"model": scenarios.Sliced, "step": scenarios.neighbourly}
SEQUENCES = {"data_parallel_size": 2, "sequence_parallel_size": 2}
PIPELINE = {"model": scenarios.pipeline, "step": scenarios.piped}
# torch's clip_grad_norm_ takes no parameters of two meshes.
CLIPS = (trials.TENSOR_PARALLEL, trials.EXPERTS)
AUTO_TP = {"tensor_parallel": scenarios.AUTO_TENSOR_PARALLEL}
EXPERTS = {
    size: {"model": partial(scenarios.Mixture, size), "groups": separate_experts} for size in (1, 2)
}
NVME = {"device": "nvme", "nvme_path": "/nowhere"}
STAGES_APART = setups(
    "two_halves_of_the_world_train_apart", remark="every stage attaches a model of its own ranks"
)
TENSOR_PARALLEL = meshes(
    "full_precision_trains_as_fsdp2_alone",
    "parameters_that_tensor_parallelism_copies_keep_equal_bits",
    remark="`parallelize_module`",
)

MODELS = (
    Row(
        "MoE, every rank all experts",
        LOSS,
        zero=Trains(how=unclipped(1, 2, **EXPERTS[1]), remark=NO_OTHER_STAGES),
        fsdp2=tries(model=partial(wrapped, trials.Experts, layers=("first", "second", "third"))),
        ddp=Plays(),
    ),
    Row(
        "MoE, experts split over ranks",
        LOSS,
        zero=Trains(
            how=unclipped(1, 2, **EXPERTS[2]),
            few_ranks=True,
            remark=f"{FEW_RANKS}; {NO_OTHER_STAGES}",
        ),
        fsdp2=meshes(
            "full_precision_trains_as_fsdp2_alone",
            "every_mesh_is_priced_and_counted",
            remark="experts on a mesh of their own",
        ),
        ddp=Cannot("every rank holds the whole model"),
    ),
    Row(
        "AutoEP",
        LOSS,
        zero=(
            Trains(
                how=unclipped(1, 2, model=scenarios.AutoMixture, top=scenarios.AUTO_EXPERTS),
                few_ranks=True,
                fails={V017: (1, 2), V018: (1, 2)},
                remark=FEW_RANKS,
            ),
            RefusesConfig(
                top={"expert_parallel": {"enabled": True, "autoep_size": 2}},
                stages=(3,),
                parts=("expert_parallel.enabled=true under ZeRO-3", "stage 2"),
                since=(0, 19),
                remark="its experts' gradients are scaled bucket by bucket; use ZeRO-1 or 2",
            ),
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "pipeline parallel, fp32",
        LOSS,
        zero=Trains(
            how=unclipped(1, dtype="fp32", **PIPELINE),
            few_ranks=True,
            remark=f"{FEW_RANKS}; {NO_OTHER_STAGES}",
        ),
        fsdp2=STAGES_APART,
        ddp=refused_in(
            "ddp_life",
            "models_that_cannot_be_served_are_refused_by_name",
            remark="a `process_group` or `device_mesh` of part of the ranks",
        ),
    ),
    Row(
        "pipeline parallel, bf16",
        LOSS,
        zero=Trains(
            how=unclipped(1, **PIPELINE), few_ranks=True, remark=f"{FEW_RANKS}; {NO_OTHER_STAGES}"
        ),
        fsdp2=STAGES_APART,
        ddp=refused_in(
            "ddp_life",
            "models_that_cannot_be_served_are_refused_by_name",
            remark="a `process_group` or `device_mesh` of part of the ranks",
        ),
    ),
    Row(
        "tensor parallel (mpu)",
        LOSS,
        zero=Trains(how=unclipped(**SLICED), few_ranks=True, remark=FEW_RANKS),
        fsdp2=TENSOR_PARALLEL,
        ddp=refused_in(
            "ddp_life",
            "models_that_cannot_be_served_are_refused_by_name",
            remark="a `process_group` or `device_mesh` of part of the ranks",
        ),
    ),
    Row(
        "tensor parallel (AutoTP, `partition_config`)",
        LOSS,
        zero=Trains(
            how=unclipped(model=scenarios.Pair, step=scenarios.neighbourly, top=AUTO_TP),
            few_ranks=True,
            fails={V017: ALL, V018: (3,)},
            remark=FEW_RANKS,
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "sequence parallel (config)",
        LOSS,
        zero=(
            Trains(how=unclipped(1, 2, top=SEQUENCES), few_ranks=True, remark=FEW_RANKS),
            Trains(
                how=unclipped(3, top=SEQUENCES),
                fails={V017: (3,), V018: (3,)},
                remark="weights are split over all ranks",
            ),
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "Ulysses: one sequence over all ranks",
        LOSS,
        zero=proven(
            "hf",
            "a_sequence_over_all_ranks_trains_as_without_the_plugin",
            stages=ALL,
            remark="Trainer's `ParallelismConfig`; with several sequences gloo in torch fails",
        ),
        fsdp2=tries(model=partial(wrapped, trials.SplitSequence)),
        ddp=Plays(),
    ),
    Row(
        "frozen int8 base",
        LOSS,
        zero=Trains(
            how=unclipped(model=scenarios.Quantized),
            remark="non-float parameters are left to DeepSpeed and counted as full precision; "
            "under ZeRO-3 DeepSpeed itself refuses a model whose first parameter is one "
            '("Invalid data type")',
        ),
        fsdp2=setups("weights_that_no_codec_takes_are_gathered_by_fsdp2_itself"),
        ddp=Plays(),
    ),
    Row(
        "frozen bf16 base, fp32 adapter",
        LOSS,
        zero=Trains(how=unclipped(model=scenarios.MixedDtypes, dtype="fp32")),
        fsdp2=tries(
            model=partial(wrapped, trials.MixedDtypes, layers=("first",)),
            optimizer=trained_only,
            apart=0.01,
            remark="FSDP2 gathers modules of several dtypes itself",
        ),
        ddp=Plays(),
    ),
    Row(
        "QLoRA: 4-bit base stored as bf16 (bitsandbytes)",
        "packed weights lose bits, and the model talks nonsense",
        zero=proven(
            "packed",
            "packed_weights_keep_every_byte",
            stages=(3,),
            remark="packed weights travel byte for byte and are counted as `packed` in the `line` "
            "of `ds_quant.report`",
        ),
        fsdp2=tries(
            model=partial(wrapped, trials.PackedBase),
            optimizer=trained_only,
            scheme="qsdp",
            remark="a layer of the same kind, without bitsandbytes",
        ),
        ddp=Plays(),
    ),
    Row(
        "frozen module",
        LOSS,
        zero=Featured("frozen module"),
        fsdp2=proven("fsdp2", "frozen_adapters_and_resharding_train_as_alone"),
        ddp=Plays(),
    ),
    Row(
        "low-rank adapter",
        LOSS,
        zero=Featured("low-rank adapter"),
        fsdp2=tries(
            model=partial(wrapped, trials.LowRank), optimizer=trained_only, scheme="sdp4bit"
        ),
        ddp=Plays(),
    ),
    Row(
        "tied embeddings",
        LOSS,
        zero=Featured("tied embeddings"),
        fsdp2=proven("fsdp2_models", "models_train_as_alone_and_near_it_in_4_bits"),
        ddp=Plays(),
    ),
    Row(
        "weight used by another module",
        STALE,
        zero=Featured("weight used by another module"),
        fsdp2=tries(
            model=partial(wrapped, trials.Borrowing, layers=("first", "second", "third", "head")),
            remark="one that the root gathers",
        ),
        ddp=Plays(),
    ),
    Row(
        "activation checkpointing",
        LOSS,
        zero=Featured("activation checkpointing"),
        fsdp2=proven("fsdp2_models", "models_train_as_alone_and_near_it_in_4_bits"),
        ddp=Plays(),
    ),
    Row(
        "a layer that runs twice in a forward",
        LOSS,
        zero=equal_runs("overlap, two hops, backward in phases", stages=(3,)),
        fsdp2=tries(model=partial(wrapped, trials.Twice)),
        ddp=Plays(),
    ),
    Row(
        "layers that run in some forwards only",
        LOSS,
        zero=proven(
            "layer_drop",
            "ranks_that_leave_out_the_same_layers_train",
            stages=(1, 2),
            remark="the same on all ranks; others end the run",
        ),
        fsdp2=setups("modules_that_run_in_some_micro_steps_only", remark="the same on all ranks"),
        ddp=Plays(),
    ),
    Row(
        "zero-size parameter",
        ENDS,
        zero=Featured("zero-size parameter", remark="DeepSpeed 0.17 and 0.18 cannot"),
        fsdp2=Cannot("FSDP2 itself cannot reduce one (torch 2.13)"),
        ddp=Plays(),
    ),
    Row(
        "unused parameter",
        ENDS,
        zero=Featured("unused parameter"),
        fsdp2=proven("fsdp2_replicas", "a_parameter_without_a_gradient_stays_without_one"),
        ddp=Plays(),
    ),
    Row(
        "dropout",
        "random numbers of the model change with the scheme",
        zero=Featured("dropout"),
        fsdp2=tries(model=partial(wrapped, trials.Dropping), scheme="eden4"),
        ddp=Plays(),
    ),
    Row(
        "a method other than forward, such as `generate`",
        STALE,
        zero=Cannot("it calls forward, or gathers parameters as any reader does"),
        fsdp2=tries(
            trials.another_entry,
            model=partial(wrapped, trials.Generating, layers=("first", "second")),
            scheme="eden4",
            remark="`register_fsdp_forward_method`",
        ),
        ddp=Plays(),
    ),
    Row(
        "modules wrapped together, leaf modules",
        LOSS,
        zero=Featured("leaf modules"),
        fsdp2=proven("fsdp2_users", "modules_that_are_wrapped_together_are_served_once"),
        ddp=Cannot("DDP wraps the model as a whole"),
    ),
    Row(
        "`keep_in_fp32_modules`: buffers that bf16 would round",
        LOSS,
        zero=Featured(
            "`keep_in_fp32_modules`",
            remark="it names buffers, which do not travel; not in DeepSpeed 0.17 and 0.18",
        ),
        fsdp2=tries(
            model=partial(wrapped, trials.WithBuffer, mp_policy=BF16),
            apart=0.01,
            remark="FSDP2 leaves buffers alone",
        ),
        ddp=Plays(),
    ),
    Row(
        "built without weights (zero.Init, meta device)",
        "the run begins from other weights than those that were loaded",
        zero=Featured("built under zero.Init"),
        fsdp2=setups("a_model_on_the_meta_device_is_attached_before_its_weights_exist"),
        ddp=Cannot("DDP sends weights of rank 0 to all at the start"),
    ),
    Row(
        "a wrapper around the model",
        ENDS,
        zero=noticed("engines_for_evaluation_follow_the_one_that_trains", 3),
        fsdp2=setups("a_root_that_is_not_wrapped_and_a_module_around_it"),
        ddp=proven("ddp_life", "wrappers_around_ddp_are_opened"),
    ),
    Row(
        "shards of other dimensions than 0 (`shard_placement_fn`)",
        LOSS,
        zero=OF_FSDP2,
        fsdp2=meshes("full_precision_trains_as_fsdp2_alone"),
        ddp=OF_FSDP2,
    ),
    Row(
        "replicas of the model in every node (HSDP)",
        "replicas drift apart",
        zero=Cannot("MiCS, which DeepSpeed 0.19.7 removed"),
        fsdp2=proven(
            "fsdp2_replicas", "full_precision_trains_as_hsdp_alone", "replicas_end_with_equal_bits"
        ),
        ddp=Cannot("every rank holds the whole model"),
    ),
    Row(
        "all parameters on every rank (`replicate()`, replicas of one rank)",
        "copies drift apart",
        zero=OF_FSDP2,
        fsdp2=proven(
            "fsdp2_replicate",
            "full_precision_trains_as_fsdp2_alone_bit_for_bit",
            "full_precision_trains_as_fsdp2_alone_on_four_ranks",
            "lossy_schemes_train_and_all_ranks_hold_equal_bits",
        ),
        ddp=Cannot("DDP itself"),
    ),
    Row(
        "parameters replaced while loading, or DTensors before they are sharded",
        "the run trains parameters that forward does not use",
        zero=OF_FSDP2,
        fsdp2=(
            setups("parameters_replaced_after_fully_shard_are_those_that_train"),
            setups("parameters_that_are_dtensors_on_the_same_mesh_are_served"),
        ),
        ddp=Cannot("DDP takes its parameters at the start"),
    ),
    Row(
        "part of the world: ensembles, sweeps",
        "models that should train apart become one",
        zero=Cannot("DeepSpeed takes all ranks"),
        fsdp2=setups("two_halves_of_the_world_train_apart"),
        ddp=refused_in(
            "ddp_life",
            "models_that_cannot_be_served_are_refused_by_name",
            remark="a `process_group` or `device_mesh` of part of the ranks",
        ),
    ),
)

TRAINING = (
    Row(
        "training as without the plugin, nothing quantized",
        "losses are off by more than the order of sums",
        zero=equal_runs("full precision, fp32, 1 micro-steps", "everything excluded"),
        fsdp2=(
            proven("fsdp2", "exact_schemes_train_as_fsdp2_alone"),
            proven("fsdp2_exact", "nothing_quantized_trains_as_fsdp2_alone"),
        ),
        ddp=proven(
            "ddp",
            "nothing_quantized_trains_as_ddp_alone_bit_for_bit",
            "nothing_quantized_trains_as_ddp_alone_on_four_ranks",
        ),
    ),
    Row(
        "gradient accumulation",
        WRONG_SUMS,
        zero=equal_runs("lossless, accumulation"),
        fsdp2=(
            proven("fsdp2_exact", "nothing_quantized_trains_as_fsdp2_alone"),
            proven("fsdp2_replicas", "the_last_backward_is_declared_as_without_replicas"),
        ),
        ddp=Plays(),
    ),
    Row(
        "accumulation of whole gradients (`no_sync`)",
        WRONG_SUMS,
        zero=Trains(
            how=unclipped(1, accumulation=2, step=scenarios.no_sync), remark=NO_OTHER_STAGES
        ),
        fsdp2=tries(trials.without_sync, remark="`set_requires_gradient_sync(False)`"),
        ddp=Plays(),
    ),
    Row(
        "fp32 accumulation",
        LOSS,
        zero=(
            Featured("fp32 accumulation"),
            RefusesConfig(
                top={"data_types": {"grad_accum_dtype": "fp32"}},
                stages=(1,),
                parts=("data_types.grad_accum_dtype=fp32", "stage 2"),
                remark="BF16_Optimizer needs full gradients on every rank; use ZeRO-2",
            ),
        ),
        fsdp2=tries(
            trials.without_sync,
            model=partial(sharded, mp_policy=BF16),
            apart=0.01,
            remark="`reduce_dtype`",
        ),
        ddp=Cannot("gradients have the dtype of the weights"),
    ),
    Row(
        "fp32 gradients on the wire",
        LOSS,
        zero=Featured("fp32 gradients on the wire"),
        fsdp2=tries(
            trials.accumulated,
            model=partial(sharded, mp_policy=BF16),
            scheme="lossless",
            apart=0.01,
        ),
        ddp=Cannot("gradients have the dtype of the weights"),
    ),
    Row(
        "fp16 with dynamic loss scale",
        "the scale falls for ever, or steps that overflow are applied",
        zero=proven("features", "schemes_train_in_fp16_as_without_the_plugin", stages=(2, 3)),
        fsdp2=tries(
            trials.loss_scaled, model=partial(sharded, mp_policy=FP16), scheme="eden4", apart=0.01
        ),
        ddp=Plays(),
    ),
    Row(
        "torch autocast",
        LOSS,
        zero=Featured("torch autocast"),
        fsdp2=tries(trials.in_autocast, apart=0.01),
        ddp=Plays(),
    ),
    Row(
        "compiled layers, backend eager",
        ENDS,
        zero=Trains(how=unclipped(step=scenarios.compiled), remark="`engine.compile()`"),
        fsdp2=tries(model=trials.compiled_layers),
        ddp=Plays(),
    ),
    Row(
        "clipping",
        "the norm of gradients is another one",
        zero=Featured("clipping"),
        fsdp2=tries(trials.clipped, scheme="qsdp", fails_alone_on=CLIPS),
        ddp=Plays(),
    ),
    Row(
        "summed gradients",
        "gradients are a multiple of what they should be",
        zero=Featured("summed gradients"),
        fsdp2=tries(trials.summed, remark="`set_gradient_divide_factor(1.0)`"),
        ddp=Cannot("DDP averages"),
    ),
    Row(
        "two forwards before one backward",
        LOSS,
        zero=Featured("two forwards before one backward"),
        fsdp2=tries(trials.two_forwards, scheme="eden4"),
        ddp=Plays(),
    ),
    Row(
        "two backwards of one forward",
        WRONG_SUMS,
        zero=Untried(remark="`engine.backward` runs once per forward"),
        fsdp2=tries(trials.two_losses),
        ddp=Cannot("DDP reduces the first backward of a forward only"),
    ),
    Row(
        "a loss in chunks",
        ENDS,
        zero=Untried(remark="`engine.backward` runs once per forward"),
        fsdp2=setups("a_loss_in_chunks_reduces_the_gradients_that_a_backward_has"),
        ddp=Cannot("DDP reduces the first backward of a forward only"),
    ),
    Row(
        "order of gathers and reductions (prefetch, overlap)",
        LOSS,
        zero=(equal_runs("arrangements", stages=(3,)), Featured("overlap")),
        fsdp2=tries(
            trials.prefetched,
            remark="`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`",
        ),
        ddp=Plays(),
    ),
    Row(
        "no overlap",
        LOSS,
        zero=Featured("no overlap"),
        fsdp2=Cannot("FSDP2 always overlaps"),
        ddp=Cannot("DDP always overlaps"),
    ),
    Row(
        "weights that stay gathered",
        STALE,
        zero=(Featured("some persistent parameters"), Featured("all parameters persistent")),
        fsdp2=(
            proven("fsdp2", "frozen_adapters_and_resharding_train_as_alone"),
            proven("fsdp2", "a_step_is_priced_by_the_gathers_that_it_makes"),
            tries(
                trials.kept_after_backward,
                remark="`reshard_after_forward`, `set_reshard_after_backward`",
            ),
        ),
        ddp=Cannot("no weights are sent"),
    ),
    Row(
        "weights gathered ahead (`unshard(async_op=True)`)",
        STALE,
        zero=OF_FSDP2,
        fsdp2=tries(trials.gathered_ahead, scheme="eden4"),
        ddp=Cannot("no weights are sent"),
    ),
    Row(
        "parameters left out of sharding (`ignored_params`)",
        ENDS,
        zero=OF_FSDP2,
        fsdp2=tries(trials.reduced_by_the_user, model=trials.with_ignored),
        ddp=proven(
            "ddp_life",
            "parameters_that_pass_the_hook_by_are_named",
            remark="the start-up line names them",
        ),
    ),
    Row(
        "small gradient buckets",
        LOSS,
        zero=Featured("small gradient buckets"),
        fsdp2=OF_DEEPSPEED,
        ddp=Plays(),
    ),
    Row(
        "small gradient buckets, accumulated",
        LOSS,
        zero=Featured("small gradient buckets, accumulated"),
        fsdp2=OF_DEEPSPEED,
        ddp=Plays(),
    ),
    Row(
        "round-robin gradients",
        LOSS,
        zero=Featured("round-robin gradients"),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "small weight buckets",
        LOSS,
        zero=Featured("small weight buckets"),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "`parameter_alignment`",
        LOSS,
        zero=Featured("`parameter_alignment`", remark="not in DeepSpeed 0.17 and 0.18"),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "one gather per tensor",
        LOSS,
        zero=Featured("one gather per tensor", remark="DeepSpeed 0.17 cannot"),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "all-reduced fetches",
        LOSS,
        zero=Featured(
            "all-reduced fetches",
            remark="on the CPU DeepSpeed before 0.19.8 computes with wrong weights",
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "`reduce_scatter: false`",
        LOSS,
        zero=Featured(
            "`reduce_scatter: false`", remark="gradients stay exact, and the start-up line says so"
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "optimizer offload",
        LOSS,
        zero=Featured("optimizer offload"),
        fsdp2=NO_CPU_OFFLOAD,
        ddp=Cannot("DDP offloads nothing"),
    ),
    Row(
        "parameter offload",
        LOSS,
        zero=Featured("parameter offload"),
        fsdp2=NO_CPU_OFFLOAD,
        ddp=Cannot("DDP offloads nothing"),
    ),
    Row(
        "optimizer offload to NVMe",
        ENDS,
        zero=RefusesConfig(
            zero={"offload_optimizer": NVME},
            stages=(3,),
            parts=("offload_optimizer.device=nvme", "allowed: cpu, none"),
            remark="not tested; use cpu. Under ZeRO-1/2 DeepSpeed itself takes the CPU instead",
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "parameter offload to NVMe",
        ENDS,
        zero=RefusesConfig(
            zero={"offload_param": NVME},
            stages=(3,),
            parts=("offload_param.device=nvme", "allowed: cpu, none"),
            remark="shards are not in memory when they are encoded; use cpu",
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
)

OPTIMIZERS = (
    Row(
        "SGD",
        LOSS,
        zero=Trains(how=unclipped()),
        fsdp2=proven("fsdp2_exact", "nothing_quantized_trains_as_fsdp2_alone"),
        ddp=Plays(),
    ),
    Row(
        "Adagrad",
        LOSS,
        zero=Trains(how=unclipped(optimizer=partial(torch.optim.Adagrad, lr=0.01))),
        fsdp2=tries(optimizer=trials.adagrad, rough=True),
        ddp=Plays(),
    ),
    Row(
        "Muon",
        LOSS,
        zero=(
            Trains(
                how=unclipped(1, 2, **MUON),
                rough=True,
                remark="gradients take the scheme, but those of matrices that lie on several "
                "ranks, fewer than there are ranks in a parameter group, are summed exactly: "
                "Muon needs them whole",
            ),
            Trains(
                how=unclipped(3, **MUON, zero={"reduce_scatter": False}),
                rough=True,
                exact_gradients=(V017, V018),
                fails={V018: (3,)},
                remark="from DeepSpeed 0.19.8 on, although it asks for `reduce_scatter: false`, "
                "gradients take the scheme; what Muon gathers itself at every step ([8 bytes per "
                "element in bf16 and more in small "
                "buckets](running.md#messages-memory-and-python-time)) stays exact; before, "
                "gradients stay exact: Muon needs whole buckets",
            ),
        ),
        fsdp2=tries(
            optimizer=trials.gathering_muon,
            rough=True,
            apart=0.0001,
            remark="one that gathers its matrices itself, in full precision",
        ),
        ddp=Plays(),
    ),
    Row(
        "two parameter groups",
        LOSS,
        zero=Featured("two parameter groups"),
        fsdp2=tries(optimizer=trials.decay_groups),
        ddp=Plays(),
    ),
    Row(
        "a schedule of learning rates",
        LOSS,
        zero=Featured("a schedule of learning rates"),
        fsdp2=tries(trials.schedule, scheme="sdp4bit"),
        ddp=Plays(),
    ),
    Row(
        "a step that calls forward and backward (closure)",
        LOSS,
        zero=OWNS_OPTIMIZER,
        fsdp2=tries(trials.closed_over),
        ddp=Plays(),
    ),
    Row(
        "several optimizers, one made anew, one per parameter in backward, none of torch's",
        STALE,
        zero=OWNS_OPTIMIZER,
        fsdp2=between_steps("any_optimizer_may_move_the_model"),
        ddp=Plays(),
    ),
    Row(
        "an optimizer of another model",
        "nothing trains, and no word is said",
        zero=OWNS_OPTIMIZER,
        fsdp2=refused_in(
            "fsdp2_between_steps",
            "an_optimizer_of_another_model_is_refused",
            remark="make it after `fully_shard`",
        ),
        ddp=Cannot("the block follows no optimizer"),
    ),
    Row(
        "a step that only makes states",
        "a run that looks for a checkpoint has other random bits",
        zero=OWNS_OPTIMIZER,
        fsdp2=between_steps("a_step_that_only_makes_states_does_not_count"),
        ddp=Cannot("the block follows no optimizer"),
    ),
    Row(
        "ZenFlow",
        ENDS,
        zero=RefusesConfig(
            stages=(2,),
            zero={"zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}},
            parts=("zenflow", "remove"),
            remark="updates weights outside the optimizer step",
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
    Row(
        "SuperOffload",
        ENDS,
        zero=RefusesConfig(
            stages=(3,),
            zero={"offload_optimizer": {"device": "cpu", "super_offload": True}},
            since=(0, 18),
            parts=("super_offload=true", "set it to false"),
            remark="needs CUDA, not tested",
        ),
        fsdp2=OF_DEEPSPEED,
        ddp=OF_DEEPSPEED,
    ),
)

BETWEEN_STEPS = (
    Row(
        "weights that user code writes, by any means",
        STALE,
        zero=(
            noticed("the_next_forward_uses_shards_as_they_were_written", 3),
            noticed("a_step_overwrites_weights_that_were_written", 1, 2),
        ),
        fsdp2=between_steps("forward_uses_weights_that_other_code_has_written"),
        ddp=Plays(),
    ),
    Row(
        "averaged weights, swapped in for an evaluation",
        "an evaluation shows the loss of other weights",
        zero=(
            noticed("weights_that_come_and_go_between_steps", 3),
            proven("written", "an_average_in_the_module_is_exported_and_stays", stages=(1, 2)),
        ),
        fsdp2=between_steps("averaged_weights_are_swapped_in_and_out"),
        ddp=Plays(),
    ),
    Row(
        "weights perturbed between two forwards of a step (SAM)",
        STALE,
        zero=noticed("weights_that_come_and_go_between_steps", 3),
        fsdp2=between_steps("weights_are_perturbed_between_two_forwards_of_a_step"),
        ddp=Plays(),
    ),
    Row(
        "rollback in memory",
        STALE,
        zero=noticed("weights_that_come_and_go_between_steps", 3),
        fsdp2=tries(trials.rolled_back, scheme="eden4"),
        ddp=Plays(),
    ),
    Row(
        "NaN or infinity that is in the weights once",
        "NaN stays, and every later step is skipped",
        zero=(
            noticed("a_step_overwrites_weights_that_were_written", 1, 2),
            noticed("weights_that_come_and_go_between_steps", 3),
        ),
        fsdp2=tries(trials.not_finite_once, scheme="eden4"),
        ddp=Plays(),
    ),
    Row(
        "a step left out for gradients that are not finite",
        "weights or the node's copies hold part of that step",
        zero=proven("exactness", "a_skipped_step_changes_no_weight_and_no_resume", stages=ALL),
        fsdp2=tries(
            trials.step_left_out,
            scheme="sdp4bit",
            fails_alone_on=CLIPS,
            remark="by a decision of all ranks",
        ),
        ddp=Plays(),
    ),
    Row(
        "a step that some ranks leave out",
        UNSEEN,
        zero=OWNS_OPTIMIZER,
        fsdp2=refused_in(
            "fsdp2_between_steps",
            "ranks_that_step_alone_end_all_of_them",
            remark="the next forward ends all ranks: let them decide together",
        ),
        ddp=refused_in(
            "ddp_life",
            "a_replica_that_drifts_ends_all_ranks",
            remark="`checksum_steps` ends all ranks",
        ),
    ),
    Row(
        "parameters frozen between steps or micro-steps",
        WRONG_SUMS,
        zero=(
            proven(
                "kept_weights",
                "a_parameter_frozen_during_training_goes_on_following_its_master",
                stages=(3,),
            ),
            equal_runs("crossing once, frozen between, ZeRO-2", stages=(2,)),
        ),
        fsdp2=between_steps("parameters_are_frozen_and_thawed_at_any_time"),
        ddp=Plays(),
    ),
    Row(
        "parameters thawed or added (`add_param_group`)",
        "they train, and forward never sees it",
        zero=Cannot("DeepSpeed takes its parameters at the start"),
        fsdp2=between_steps("parameters_are_frozen_and_thawed_at_any_time"),
        ddp=Cannot("DDP takes its parameters at the start"),
    ),
    Row(
        "an accumulation that is given up",
        WRONG_SUMS,
        zero=equal_runs(
            "crossing once, abandoned, ZeRO-2", "crossing once, abandoned, ZeRO-3", stages=(2, 3)
        ),
        fsdp2=between_steps("an_accumulation_that_is_given_up_leaves_nothing"),
        ddp=Plays(),
    ),
    Row(
        "gradients read between micro-steps",
        WRONG_SUMS,
        zero=equal_runs(
            "crossing once, read between, ZeRO-3", stages=(3,), remark="zeros, if they wait"
        ),
        fsdp2=refused_in(
            "fsdp2_between_steps",
            "a_step_after_gradients_were_written_between_backwards_names_the_way_out",
            remark="zeros, if they wait; gradients that are written there end the run",
        ),
        ddp=Plays(),
    ),
    Row(
        "a boundary that the loop declares, or forgets",
        WRONG_SUMS,
        zero=equal_runs(
            "crossing once, announced, ZeRO-3",
            "crossing once, announced late, ZeRO-3",
            stages=(2, 3),
        ),
        fsdp2=proven(
            "fsdp2",
            "gradients_left_inside_the_nodes_end_the_step",
            remark="a step without the last backward ends with an error",
        ),
        ddp=Cannot("`no_sync` declares it"),
    ),
    Row(
        "evaluations between steps",
        "an evaluation changes the training",
        zero=equal_runs("evaluations, qsdp", "evaluations, sdp4bit"),
        fsdp2=proven("fsdp2_models", "evaluations_between_steps_change_no_bit_of_the_training"),
        ddp=Plays(),
    ),
    Row(
        "a first forward in inference mode",
        ENDS,
        zero=proven(
            "borrowed", "a_first_forward_that_only_evaluates_uses_what_later_ones_use", stages=(3,)
        ),
        fsdp2=between_steps("a_first_forward_in_inference_mode_does_not_spoil_the_copies"),
        ddp=Plays(),
    ),
    Row(
        "a second engine that evaluates the module in training",
        STALE,
        zero=noticed("engines_for_evaluation_follow_the_one_that_trains", 3),
        fsdp2=Cannot("the model evaluates itself"),
        ddp=Cannot("the model evaluates itself"),
    ),
    Row(
        "a frozen reference or teacher beside the model",
        "the teacher follows the student, or the other way round",
        zero=equal_runs("beside a frozen reference", stages=(2, 3)),
        fsdp2=tries(trials.with_a_frozen_teacher, scheme="eden4"),
        ddp=Plays(),
    ),
    Row(
        "several models in one process, trained in turn",
        "models take each other's messages or random bits",
        zero=proven(
            "support",
            "engines_trained_in_turn_equal_their_separate_runs",
            stages=ALL,
            remark="every one equals its run alone, bit for bit",
        ),
        fsdp2=tries(trials.with_an_opponent),
        ddp=Plays(),
    ),
    Row(
        "exports and state dicts",
        "a saved model holds decoded weights",
        zero=proven("exactness", "exports_have_the_bits_of_the_master_weights", stages=ALL),
        fsdp2=proven("fsdp2", "a_loaded_checkpoint_resumes_bit_for_bit_and_is_exact"),
        ddp=proven("ddp_life", "a_resumed_run_repeats_the_bits_of_the_one_that_went_on"),
    ),
    Row(
        "checkpoints, resumed",
        "a resumed run goes another way",
        zero=(
            equal_runs("resumed, qsdp, ZeRO-1", "resumed, kept, ZeRO-2"),
            proven("checkpoint", "checkpoints_cross_between_schemes", stages=(2, 3)),
        ),
        fsdp2=proven("fsdp2", "a_loaded_checkpoint_resumes_bit_for_bit_and_is_exact"),
        ddp=proven("ddp_life", "a_resumed_run_repeats_the_bits_of_the_one_that_went_on"),
    ),
    Row(
        "a checkpoint that is written in the background",
        "it holds weights of a later step, or decoded ones",
        zero=proven("exactness", "a_checkpoint_written_in_the_background_is_exact", stages=(2,)),
        fsdp2=Untried(),
        ddp=Untried(),
    ),
    Row(
        "a checkpoint on another number of ranks",
        "other weights are loaded",
        zero=proven(
            "checkpoint",
            "a_universal_checkpoint_is_loaded_by_half_the_ranks_in_other_nodes",
            stages=ALL,
            remark="`ds_to_universal`",
        ),
        fsdp2=proven("fsdp2", "a_saved_model_is_loaded_on_fewer_ranks_with_and_without_the_plugin"),
        ddp=Untried(),
    ),
    Row(
        "master weights edited or refreshed by user code",
        STALE,
        zero=(
            noticed("master_weights_are_refreshed_from_exact_weights", 1, 2),
            proven(
                "exactness",
                "edits_inside_gathered_parameters_arrive_in_shards_and_forward",
                stages=(3,),
            ),
        ),
        fsdp2=Cannot("parameters are the master weights"),
        ddp=Cannot("parameters are the master weights"),
    ),
    Row(
        "captured CUDA graphs",
        "a replay repeats one random rounding and skips all checks",
        zero=Cannot("DeepSpeed does not capture training"),
        fsdp2=refused_in(
            "fsdp2_setups",
            "a_captured_graph_is_refused",
            remark="capture no forward, backward or step",
        ),
        ddp=refused_in(
            "ddp_life", "a_captured_graph_is_refused", remark="capture no forward or backward"
        ),
    ),
    Row(
        "`offload_states`, `reload_states`",
        STALE,
        zero=proven(
            "offload_states",
            "what_leaves_the_device_comes_back_with_the_same_bits",
            stages=ALL,
            remark="node shard and partial sums leave the device with `lp_params`, and come back "
            "with the same bits; all ranks must call both",
        ),
        fsdp2=Cannot("a call of DeepSpeed"),
        ddp=Cannot("a call of DeepSpeed"),
    ),
)

SETTINGS = (
    Row(
        "no block",
        "the plugin changes a run that did not ask for it",
        zero=proven("untouched", "run_without_the_block_equals_one_without_the_plugin", stages=ALL),
        fsdp2=setups("without_a_block_a_loop_runs_and_the_log_says_so"),
        ddp=proven("ddp_life", "without_a_block_a_loop_runs_and_the_log_says_so"),
    ),
    Row(
        "a block of the environment",
        ENDS,
        zero=equal_runs("a block of the environment", stages=(2, 3)),
        fsdp2=proven("fsdp2", "the_block_of_the_environment_is_attached_and_messages_are_checked"),
        ddp=proven("ddp_life", "a_block_of_the_environment_and_a_message_that_changed_on_its_way"),
    ),
    Row(
        "`exclude`",
        "excluded parameters lose bits",
        zero=proven("features", "excluded_parameters_travel_exactly_and_others_do_not", stages=ALL),
        fsdp2=tries(block={"exclude": ["*"]}, scheme="qsdp", exact=True),
        ddp=Plays(),
    ),
    Row(
        "`warmup_steps`",
        "the first steps are quantized, or all are exact",
        zero=equal_runs("warm-up", "lossless, warm-up"),
        fsdp2=tries(block={"warmup_steps": 9}, scheme="eden4", exact=True),
        ddp=Plays(),
    ),
    Row(
        "`payload_checksum`",
        "a message that changed on its way is used",
        zero=equal_runs(
            "checksums, sdp4bit, ZeRO-1", "checksums, qsdp, ZeRO-2", "checksums, sdp4bit, ZeRO-3"
        ),
        fsdp2=tries(block={"payload_checksum": True}),
        ddp=Plays(),
    ),
    Row(
        "`metrics`",
        "a run that is watched trains another model",
        zero=equal_runs("metrics", stages=(2, 3)),
        fsdp2=tries(block={"metrics": {"file": "/dev/null", "interval": 1}}),
        ddp=Plays(),
    ),
    Row("`slices`", LOSS, zero=equal_runs("slices"), fsdp2=tries(block={"slices": 3}), ddp=Plays()),
    Row(
        "`backend`",
        "kernels of two machines give other bits",
        zero=equal_runs("overlap_comm, backend and checksums"),
        fsdp2=tries(block={"backend": "torch"}),
        ddp=Plays(),
    ),
    Row(
        "lossless weights",
        "forward uses other weights than the optimizer has",
        zero=equal_runs("200 steps of ZeRO-1, lossless", "lossless, low-bit gradients"),
        fsdp2=proven("fsdp2_weights", "lossless_weights_are_those_of_exact_ones_bit_for_bit"),
        ddp=Cannot("no weights are sent"),
    ),
    Row(
        "bytes that the start-up line promises",
        "savings are overstated",
        zero=proven("wire_bytes", "counted_bytes_are_those_of_the_formula", stages=ALL),
        fsdp2=(
            setups("the_line_prices_fsdp2_alone_in_the_dtypes_that_it_sends"),
            proven("fsdp2_weights", "bytes_between_nodes_stay_below_a_bound"),
        ),
        ddp=proven(
            "ddp",
            "received_bytes_are_those_of_the_formula",
            "eden4_receives_a_seventh_of_the_bytes_of_ddp",
        ),
    ),
    Row(
        "a codec of your own",
        ENDS,
        zero=proven("module_codec", "the_example_trains_and_its_bytes_are_counted", stages=ALL),
        fsdp2=tries(
            block={"weights": {"codec": "fp8"}, "gradients": {"codec": "fp8"}},
            inside=trials.codec_of_the_page,
            scheme="qsdp",
            schemes=("qsdp", "zeropp"),
        ),
        ddp=Plays(),
    ),
)

MEMORY_AND_LIFE = (
    Row(
        "memory that a steady step allocates",
        "the run ends out of memory after hours",
        zero=proven("memory", "a_steady_step_allocates_no_large_buffer", stages=ALL),
        fsdp2=proven("memory", "a_steady_step_of_fsdp2_makes_nothing_large"),
        ddp=proven("ddp_life", "memory_is_that_of_runs_and_the_line_promises_it"),
    ),
    Row(
        "memory between micro-steps",
        "out of memory in the second micro-step",
        zero=proven(
            "memory",
            "gradients_that_have_no_room_to_wait_are_refused_with_the_way_out",
            stages=(2, 3),
        ),
        fsdp2=setups("one_reduction_runs_between_two_backwards"),
        ddp=Cannot("nothing waits between micro-steps"),
    ),
    Row(
        "memory that the start-up line predicts",
        "out of memory although the line promised room",
        zero=proven("memory", "the_peak_is_what_is_alive_at_once_or_somewhat_more", stages=ALL),
        fsdp2=(
            proven("memory", "the_peak_under_fsdp2_is_never_below_what_is_alive"),
            proven("fsdp2_users", "the_start_up_line_names_what_stays_and_what_it_takes"),
        ),
        ddp=proven("ddp_life", "memory_is_that_of_runs_and_the_line_promises_it"),
    ),
    Row(
        "too little memory for copies of the weights",
        "out of memory in the first step",
        zero=refused_in(
            "memory",
            "a_node_shard_that_does_not_fit_on_one_rank_is_refused_on_all",
            stages=(3,),
            remark="the error names bytes and settings",
        ),
        fsdp2=refused_in(
            "fsdp2_setups",
            "copies_that_do_not_fit_on_one_rank_are_refused_on_all",
            remark="the error names bytes and settings",
        ),
        ddp=Cannot("no copies are kept"),
    ),
    Row(
        "copies of the weights in host memory",
        STALE,
        zero=proven(
            "memory",
            "the_device_has_all_bytes_of_the_shard_to_itself",
            stages=(3,),
            remark="with `offload_param`",
        ),
        fsdp2=Cannot("comes with `CPUOffloadPolicy`, which is refused"),
        ddp=Cannot("no copies are kept"),
    ),
    Row(
        "a model or engine rebuilt in one process",
        "memory of the last one stays, or it goes on sending",
        zero=proven(
            "kept_weights",
            "an_engine_rebuilt_on_one_module_leaves_nothing_of_the_last",
            stages=(3,),
        ),
        fsdp2=setups("a_deleted_model_is_freed_with_its_front"),
        ddp=proven("ddp_life", "a_deleted_model_is_freed_with_its_front"),
    ),
    Row(
        "the plugin taken off in the middle of a run",
        "training goes on with decoded weights",
        zero=proven(
            "kept_weights",
            "a_destroyed_engine_leaves_no_decoded_weights_behind",
            stages=(3,),
            remark="`engine.destroy()`",
        ),
        fsdp2=setups(
            "a_detached_model_trains_on_as_fsdp2_alone_and_is_attached_again",
            remark="`front.detach()`",
        ),
        ddp=proven(
            "ddp_life",
            "a_detached_model_trains_on_as_ddp_alone_and_is_attached_again",
            remark="`front.detach()`",
        ),
    ),
    Row(
        "a failed start, tried again",
        ENDS,
        zero=Cannot("an error of `deepspeed.initialize` ends the job"),
        fsdp2=(
            setups("a_model_is_attached_once_and_a_failed_start_leaves_nothing"),
            setups("an_error_of_one_rank_ends_all_at_once_and_they_attach_together_later"),
        ),
        ddp=proven("ddp_life", "a_rank_that_does_not_attach_is_named_and_the_others_may_go_on"),
    ),
    Row(
        "memory that is not zeroed",
        "results depend on what lay in memory",
        zero=equal_runs("empty memory", stages=(2, 3)),
        fsdp2=tries(trials.accumulated, inside=full_of_nan, scheme="full_precision"),
        ddp=Plays(),
    ),
)

OF_DDP_ONLY = (
    Row("uneven inputs (`join`)", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row(
        "parameters unused on some ranks, `find_unused_parameters`",
        LOSS,
        zero=OF_DDP,
        fsdp2=OF_DDP,
        ddp=Plays(),
    ),
    Row("`gradient_as_bucket_view`", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("one large bucket", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("bf16 weights", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("fp16 weights", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("gradients of several dtypes", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("buffers that DDP broadcasts", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("`channels_last`", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("`ZeroRedundancyOptimizer`", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
    Row("a backward that raises", LOSS, zero=OF_DDP, fsdp2=OF_DDP, ddp=Plays()),
)

RANKS_AND_MESSAGES = (
    Row(
        "messages that arrive late",
        LOSS,
        zero=equal_runs("late messages", stages=(2, 3)),
        fsdp2=tries(trials.accumulated, inside=late_messages),
        ddp=Plays(),
    ),
    Row(
        "a message that changed on its way",
        UNSEEN,
        zero=proven(
            "payload_checksum",
            "a_changed_message_ends_all_ranks_naming_role_sender_and_step",
            stages=ALL,
            remark="with `payload_checksum`",
        ),
        fsdp2=(
            proven("fsdp2", "the_block_of_the_environment_is_attached_and_messages_are_checked"),
            proven(
                "fsdp2_weights",
                "weights_that_cannot_be_decoded_end_all_ranks",
                remark="with `payload_checksum`, and lossless messages",
            ),
        ),
        ddp=proven(
            "ddp_life",
            "a_block_of_the_environment_and_a_message_that_changed_on_its_way",
            remark="with `payload_checksum`",
        ),
    ),
    Row(
        "a rank that dies",
        "the others wait for the timeout",
        zero=proven(
            "faults", "survivors_end_in_time_with_a_clear_error_and_the_run_resumes", stages=ALL
        ),
        fsdp2=proven("fsdp2_weights", "a_lost_rank_ends_the_others_by_name"),
        ddp=proven("ddp_life", "a_lost_rank_ends_the_others_by_name"),
    ),
    Row(
        "a rank without the plugin",
        "the job hangs at its start",
        zero=refused_in(
            "guard",
            "ranks_without_the_plugin_are_named_within_the_timeout",
            stages=(2, 3),
            remark="the error names the ranks",
        ),
        fsdp2=refused_in(
            "fsdp2_models",
            "a_rank_that_does_not_attach_is_named",
            remark="the error names the ranks",
        ),
        ddp=refused_in(
            "ddp_life",
            "a_rank_that_does_not_attach_is_named_and_the_others_may_go_on",
            remark="the error names the ranks",
        ),
    ),
    Row(
        "a rank without a block",
        "the job hangs in its first message",
        zero=refused_in(
            "guard",
            "ranks_without_the_plugin_are_named_within_the_timeout",
            stages=(2, 3),
            remark="the error names the ranks",
        ),
        fsdp2=refused_in(
            "start",
            "a_rank_without_a_block_ends_the_others_at_once",
            remark="at once",
        ),
        ddp=refused_in(
            "start",
            "a_rank_without_a_block_ends_the_others_at_once",
            remark="at once",
        ),
    ),
    Row(
        "a rank with another block",
        "ranks decode what others have not sent",
        zero=refused_in(
            "guard",
            "ranks_with_other_settings_are_named_with_the_keys_that_differ",
            stages=(2,),
            remark="the error names ranks and keys",
        ),
        fsdp2=refused_in(
            "fsdp2", "ranks_with_other_blocks_are_named", remark="the error names ranks and keys"
        ),
        ddp=refused_in(
            "ddp_life",
            "ranks_with_other_settings_or_models_are_named",
            remark="the error names ranks and keys",
        ),
    ),
    Row(
        "copies of the weights that drift apart",
        UNSEEN,
        zero=proven(
            "kept_weights",
            "a_holder_that_drifts_is_found_and_brought_back",
            stages=ALL,
            remark="`checksum_steps`",
        ),
        fsdp2=proven(
            "fsdp2_replicas",
            "weights_that_nodes_keep_are_brought_back_from_a_drift",
            "replicas_that_differ_end_the_run_on_all_ranks",
            remark="`checksum_steps`",
        ),
        ddp=proven(
            "ddp_life",
            "a_replica_that_drifts_ends_all_ranks",
            "ranks_that_leave_join_early_are_not_taken_for_drift",
            remark="`checksum_steps`",
        ),
    ),
    Row(
        "gradients that are not finite (`fallback.on_nonfinite`)",
        "the run goes on with NaN",
        zero=proven(
            "fallback", "non_finite_gradients_are_seen_skipped_and_resumed_from", stages=ALL
        ),
        fsdp2=proven(
            "fsdp2_fallback",
            "a_loop_skips_a_step_together_and_the_next_ones_are_exact",
            "a_step_with_inf_ends_all_ranks_if_asked_to",
            "gradients_are_looked_at_as_the_optimizer_would_use_them",
            remark="the loop asks `front.found_nonfinite()`",
        ),
        ddp=proven("ddp_life", "rounds_after_gradients_that_are_not_finite_are_exact"),
    ),
    Row(
        "the file that ends quantization (`DS_QUANT_KILL_FILE`)",
        "the file lies there, and nothing happens",
        zero=proven(
            "fallback", "a_kill_file_on_one_rank_switches_all_at_the_next_step", stages=ALL
        ),
        fsdp2=proven(
            "fsdp2_fallback",
            "a_kill_file_on_one_rank_sends_all_of_them_in_full_precision",
            "optimizers_that_step_in_backward_vote_before_the_next_forward",
        ),
        ddp=proven("ddp_life", "a_kill_file_on_one_rank_sends_all_of_them_in_full_precision"),
    ),
    Row(
        "`autotune`",
        ENDS,
        zero=proven("autotune", "a_real_run_measures_decides_and_trains", stages=(2, 3)),
        fsdp2=proven(
            "autotune",
            "a_model_under_fsdp2_takes_the_fastest_on_its_links",
            remark="refused with replicas",
        ),
        ddp=proven("ddp_life", "autotune_takes_the_fastest_on_the_links"),
    ),
    Row(
        "learned levels",
        ENDS,
        zero=equal_runs("resumed, learned levels, ZeRO-2", "resumed, learned levels, ZeRO-3"),
        fsdp2=proven(
            "fsdp2_levels",
            "levels_are_learned_from_the_shards_of_all_ranks",
            "a_resumed_run_goes_on_with_the_levels_it_has_learned",
        ),
        ddp=Cannot("levels are those of weights"),
    ),
    Row(
        "collectives of the user (`set_custom_all_gather`, `set_custom_reduce_scatter`)",
        "they are dropped without a word",
        zero=OF_FSDP2,
        fsdp2=refused_in(
            "fsdp2_setups",
            "collectives_of_the_user_are_refused",
            remark="before `attach`, and at the next step if they are set later",
        ),
        ddp=refused_in(
            "ddp_life",
            "a_second_hook_is_refused_by_name",
            remark="a second communication hook, in torch's words if it comes later",
        ),
    ),
    Row(
        "a hook of `set_all_reduce_hook` under HSDP",
        "it runs in micro-steps in which FSDP2 does not call it",
        zero=OF_FSDP2,
        fsdp2=between_steps("a_hook_of_replicas_runs_in_the_backwards_in_which_fsdp2_calls_it"),
        ddp=OF_FSDP2,
    ),
    Row(
        "kernels compiled and ranks connected at the start (CUDA)",
        "the first step takes tens of seconds",
        zero=proven("rehearsal", "training_launches_nothing_new", stages=ALL),
        fsdp2=proven("rehearsal", "training_under_fsdp2_launches_nothing_new"),
        ddp=Untried(),
    ),
)

# DeepSpeed's own settings that quantize, keep shards or remove hooks.
MIGRATE = "both would quantize; use scheme `zeropp`"
REFUSED_SETTINGS = tuple(
    (
        Row(name, LOSS, zero=refused, fsdp2=OF_DEEPSPEED, ddp=OF_DEEPSPEED)
        for name, refused in {
            "hpZ": RefusesConfig(
                zero={"zero_hpz_partition_size": 2},
                parts=("zero_hpz_partition_size=2", "ds_quant migrate"),
                remark="use `node_shard` or scheme `zeropp`",
            ),
            "ZeRO++ quantized weights": RefusesConfig(
                zero={"zero_quantized_weights": True},
                parts=("zero_quantized_weights=true", "ds_quant migrate"),
                remark=MIGRATE,
            ),
            "ZeRO++ quantized frozen weights": RefusesConfig(
                zero={"zero_quantized_nontrainable_weights": True},
                parts=("zero_quantized_nontrainable_weights=true", "ds_quant migrate"),
                remark=MIGRATE,
            ),
            "ZeRO++ quantized gradients": RefusesConfig(
                zero={"zero_quantized_gradients": True},
                parts=("zero_quantized_gradients=true", "ds_quant migrate"),
                remark=MIGRATE,
            ),
            "MiCS": RefusesConfig(
                zero={"mics_shard_size": 2},
                stages=(3,),
                parts=("mics_shard_size",),
                remark="keeps shards of its own; DeepSpeed 0.19.7 removed it. Use `node_shard`",
            ),
            "DeepCompile": RefusesConfig(
                top={"compile": {"deepcompile": True}},
                parts=("compile.deepcompile=true", "set compile.deepcompile to false"),
                remark="removes the hooks that the plugin needs; `engine.compile()` works",
            ),
            "hybrid engine": RefusesConfig(
                top={"hybrid_engine": {"enabled": True}},
                parts=("hybrid_engine.enabled=true", "set it to false"),
                remark="generates with kernels of its own, not tested",
            ),
        }.items()
    )
)

SECTIONS: dict[str, tuple[Row, ...]] = {
    "Models": MODELS,
    "Training": TRAINING,
    "Optimizers": OPTIMIZERS,
    "Between steps": BETWEEN_STEPS,
    "Settings of the block": SETTINGS,
    "Memory, start and end": MEMORY_AND_LIFE,
    "DDP's own arguments and contexts": OF_DDP_ONLY,
    "Ranks and messages": RANKS_AND_MESSAGES,
    "Settings that quantize, shard or compile by themselves": REFUSED_SETTINGS,
}
TABLE: dict[str, Row] = {row.name: row for rows in SECTIONS.values() for row in rows}


def trained() -> list[tuple[str, Trains]]:
    """Return the features that test_support.py trains, by name of the row."""
    cells = [(row.name, cell) for row in TABLE.values() for cell in row.of("zero")]
    return [(name, cell) for name, cell in cells if isinstance(cell, Trains)]


def refused_configs() -> list[tuple[str, RefusesConfig]]:
    """Return the DeepSpeed configs that start-up refuses, by name of the row."""
    cells = [(row.name, cell) for row in TABLE.values() for cell in row.of("zero")]
    return [(name, cell) for name, cell in cells if isinstance(cell, RefusesConfig)]
