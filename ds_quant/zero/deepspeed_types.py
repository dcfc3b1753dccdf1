"""Types of the DeepSpeed objects that the plugin reads, calls or wraps.

DeepSpeed ships no types. Every attribute that this package uses is declared here once, with its
type and meaning. A new DeepSpeed release is checked against this list: see docs/new_deepspeed.md
and ``tests/distributed/test_deepspeed_types.py``, which compares it with a real engine of every
stage. Each class names the DeepSpeed file that it describes, relative to ``deepspeed/``.
``SINCE`` names the attributes that a supported release may lack.

Nothing here is instantiated: ``ZeroParameter`` and ``Shard`` derive from torch's classes only so
that a type checker accepts them as tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# ---- parameters of ZeRO-3: runtime/zero/partition_parameters.py, Init._convert_to_deepspeed_param


class ParamStatus(Protocol):
    """``ZeroParamStatus``, an enumeration: where the values of a parameter are."""

    AVAILABLE: ClassVar[ParamStatus]  # gathered
    NOT_AVAILABLE: ClassVar[ParamStatus]  # partitioned
    INFLIGHT: ClassVar[ParamStatus]  # being gathered


class GatherHandle(Protocol):
    """``AllGatherHandle`` and its kin: a gather that was posted."""

    def wait(self, **kwargs: Any) -> object:
        """Wait for the values, fill the parameters; called once per parameter."""


class Shard(Tensor):
    """``param.ds_tensor``: the elements of one rank, 1-D, uninitialised past the parameter's end.

    On the CPU if the parameters are offloaded.
    """

    ds_numel: int  # elements of a shard, equal on all ranks


class ZeroParameter(torch.nn.Parameter):
    """A parameter of the engine's module. The ``ds_`` attributes exist under ZeRO-3 only."""

    ds_id: int  # number of the parameter in this process, equal on all ranks
    ds_status: ParamStatus
    ds_shape: torch.Size  # full shape; ``shape`` is (0,) while the parameter is partitioned
    ds_numel: int  # elements of the full parameter
    ds_tensor: Shard  # shard of this rank
    ds_persist: bool  # small: stays gathered between steps
    ds_process_group: ProcessGroup  # ranks that share the parameter
    ds_active_sub_modules: set[int]  # modules whose forward is using the gathered values
    use_muon: bool  # marked by ``deepspeed.initialize`` (deepspeed/__init__.py) for Muon

    def all_gather_coalesced(self, params: Iterable[ZeroParameter]) -> GatherHandle:
        """Post a gather for forward or backward. Wrapped: sharded_params.wrap_fetch."""
        raise NotImplementedError

    def all_gather(self, param_list: Sequence[ZeroParameter] | None = None) -> object:
        """Gather exact values. Wrapped: sharded_params.wrap_fetch."""
        raise NotImplementedError

    def partition(
        self, param_list: Sequence[ZeroParameter] | None = None, *, has_been_updated: bool = False
    ) -> object:
        """Free the gathered values, after writing them to the shards if they were updated.
        Wrapped: sharded_params.wrap_partition.
        """
        raise NotImplementedError

    def ds_summary(self) -> Mapping[str, object]:
        """Describe the parameter for an error message."""
        raise NotImplementedError


# ---- engine: runtime/engine.py


class OffloadSettings(Protocol):
    """``DeepSpeedZeroOffload{Param,Optimizer}Config`` of runtime/zero/offload_config.py."""

    device: str  # a member of ``OffloadDeviceEnum``, whose members are strings
    pin_memory: bool


class ZeroSettings(Protocol):
    """``DeepSpeedZeroConfig`` of runtime/zero/config.py; keys of ``zero_optimization``."""

    stage: int
    reduce_scatter: bool
    contiguous_gradients: bool
    use_multi_rank_bucket_allreduce: bool


class Config(Protocol):
    """``DeepSpeedConfig`` of runtime/config.py. ``_initialize_params`` is wrapped."""

    _param_dict: dict[str, Any]  # the config as it was written
    zero_config: ZeroSettings
    # Set by this plugin: install.read_block.
    quantized_comm: Any  # QuantizedCommConfig | None
    quantized_comm_from_variable: bool

    def _initialize_params(self, param_dict: dict[str, Any]) -> object:
        """Parse the config. Wrapped: install.install."""


class Monitor(Protocol):
    """``MonitorMaster`` of monitor/monitor.py."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> object:
        """Write (name, value, samples) to every monitor."""


class CheckpointEngine(Protocol):
    """``CheckpointEngine`` of runtime/checkpoint_engine/checkpoint_engine.py."""

    def is_decoupled(self) -> bool:
        """Return True if checkpoints are written in the background."""


class Engine(Protocol):
    """``DeepSpeedEngine``."""

    _config: Config
    module: torch.nn.Module
    device: torch.device
    global_rank: int
    basic_optimizer: torch.optim.Optimizer | None  # the user's optimizer, None for inference
    communication_data_type: torch.dtype  # of gradients
    sequence_parallel_size: int
    global_steps: int  # optimizer steps, with skipped ones
    skipped_steps: int  # optimizer steps without an update because of an overflow
    micro_steps: int
    global_samples: int
    monitor: Monitor
    checkpoint_engine: CheckpointEngine
    ds_quant_attached: Any  # set by this plugin: attach.attach

    def zero_optimization_stage(self) -> int:
        """Return ``zero_optimization.stage``."""

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps of an optimizer step."""

    def managed_gradient_accumulation(self) -> bool:
        """Return False if the user's code decides when an accumulation ends."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True in the last micro-step of an optimizer step."""

    def gradient_predivide_factor(self) -> float:
        """Return ``gradient_predivide_factor``."""

    def postscale_gradients(self) -> bool:
        """Return True unless ``prescale_gradients`` is set."""

    def optimizer_name(self) -> str | None:
        """Return the type of the config's optimizer, None if there is none."""

    def zero_allgather_bucket_size(self) -> int:
        """Return elements."""

    def zero_reduce_bucket_size(self) -> int:
        """Return elements."""

    def zero_prefetch_bucket_size(self) -> int:
        """Return elements."""

    def zero_max_live_parameters(self) -> int:
        """Return elements."""

    def zero_max_reuse_distance(self) -> int:
        """Return elements."""

    def zero_overlap_comm(self) -> bool:
        """Return True if gradients are reduced during backward."""

    def zero_offload_param(self) -> OffloadSettings | None:
        """Return ``zero_optimization.offload_param``."""

    def zero_offload_optimizer(self) -> OffloadSettings | None:
        """Return ``zero_optimization.offload_optimizer``."""

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> object:
        """Save a checkpoint. Wrapped: hooks.Hooks.keep_state."""

    def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, Any]]:
        """Return path and client state. Wrapped: hooks.Hooks.keep_state."""

    def save_16bit_model(self, save_dir: str) -> object:
        """Export the weights. Wrapped: hooks.Hooks.connect."""

    def destroy(self) -> None:
        """End the engine. Wrapped: hooks.Hooks.connect."""

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> object:
        """Step the optimizer and count it. Wrapped: hooks.Hooks.connect."""

    def _do_sanity_check(self) -> object:
        """Check the config. Wrapped: install.install."""

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> object:
        """Return the ZeRO optimizer. Wrapped: install.install."""

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer | None) -> object:
        """Return ``BF16_Optimizer``. Wrapped to refuse it: install.install."""

    def _configure_fp16_optimizer(
        self, optimizer: torch.optim.Optimizer | None, low_precision_dtype: torch.dtype
    ) -> object:
        """Return an optimizer that shards nothing. Wrapped to refuse it: install.install."""

    def _commit_decoupled_checkpoint(self) -> object:
        """Wait for a checkpoint that is written in the background."""


# ---- optimizers of all stages


class Bucket(Protocol):
    """``IPGBucket`` of stage_1_and_2.py, ``IPGBucketZ3`` of stage3.py: gradients that are reduced
    together.
    """

    # ZeRO-1/2: (index of the group, index in the group, param id). ZeRO-3: parameters.
    params: Sequence[Any]


class ZeroOptimizer(Protocol):
    """Attributes that ``DeepSpeedZeroOptimizer`` and ``DeepSpeedZeroOptimizer_Stage3`` share."""

    optimizer: torch.optim.Optimizer  # the wrapped one
    overflow: bool  # the last step was skipped
    reduce_scatter: bool
    ipg_buckets: dict[torch.dtype, Any]  # dtype -> Bucket
    communication_data_type: torch.dtype
    gradient_accumulation_dtype: torch.dtype
    dp_process_group: ProcessGroup
    micro_step_id: int  # micro-step since the last optimizer step
    offloaded_states: set[str]  # by ``offload_states``; members of an enumeration of strings

    def step(self) -> object:
        """Update the weights. Wrapped: hooks.Hooks.connect."""

    def zero_grad(self) -> object:
        """Drop gradients. Wrapped: hooks.Hooks.connect."""

    def independent_gradient_partition_epilogue(self) -> object:
        """End a backward: reduce the last buckets. Wrapped: hooks.Hooks.connect."""

    def finalize_gradient_accumulation_boundary(self) -> object:
        """End an accumulation that DeepSpeed does not manage. Wrapped: hooks.Hooks.connect."""

    def offload_states(self) -> object:
        """Move states to the host. Wrapped: offload.follow_states."""

    def reload_states(self) -> object:
        """Move states back to the device. Wrapped: offload.follow_states."""

    def _apply_muon_updates_cpu_offload(self) -> object:
        """Run Muon on an offloaded optimizer. Wrapped: muon._count_gathers."""


# ---- ZeRO-1 and 2: runtime/zero/stage_1_and_2.py


class OwnerOptimizer(ZeroOptimizer, Protocol):
    """``DeepSpeedZeroOptimizer``. A group is a parameter group; a partition is the part of the
    flattened group that one rank owns.
    """

    partition_gradients: bool  # ZeRO-2
    cpu_offload: bool
    overlap_comm: bool
    gradient_average: bool  # divide a bucket by the ranks ahead of its reduction
    sequence_parallel_size: int
    allgather_bucket_size: int  # elements
    bit16_groups: list[list[ZeroParameter]]  # parameters by group: views of the flat ones
    bit16_groups_flat: list[Tensor]  # by group, (ranks * partition,)
    parallel_partitioned_bit16_groups: list[list[Tensor]]  # partitions by group and rank: views
    single_partition_of_fp32_groups: list[Tensor]  # master weights by group, (partition,) fp32
    real_dp_process_group: list[ProcessGroup]  # by group
    param_to_partition_ids: dict[int, dict[int, list[int]]]  # group -> param id -> owners
    accumulated_grads_in_cpu: dict[int, Tensor]  # by param id, with an offloaded optimizer

    def get_param_id(self, param: Tensor) -> int:
        """Return DeepSpeed's number of a parameter."""

    def average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> object:
        """Reduce a bucket. Wrapped: optimizer_hooks.wrap_owner_reduction."""

    def allreduce_and_copy_with_multiple_ranks(
        self,
        small_bucket: list[Tensor],
        communication_data_type: torch.dtype,
        *,
        process_group: ProcessGroup | None,
        bucket_ranks: list[int | frozenset[int]],
    ) -> object:
        """Reduce slices of a bucket to their owners. Wrapped: optimizer_hooks.wrap_owner_reduction.

        bucket_ranks: owners of each slice, ranks or, from 0.19.3 on, sets of ranks.
        output_bucket: fp32 buffers to which a slice is added; None for other slices.
        """

    def setup_buckets(self) -> object:
        """Allocate the buckets of a backward."""

    def reduce_ipg_grads(self) -> object:
        """Reduce the content of all buckets."""

    def reduce_ready_partitions_and_remove_grads(self, param: Tensor, i: int) -> object:
        """Put the gradient of a parameter of group ``i`` into its bucket."""

    def async_accumulate_grad_in_cpu_via_gpu(self, param: Tensor) -> object:
        """Add a gradient to its sum on the host. Wrapped: optimizer_hooks.skip_zero_gradients."""

    def _add_to_grad_partition_buffer(self, output: Tensor | None, source: Tensor) -> object:
        """Add a slice to a buffer of fp32 gradients."""

    def refresh_fp32_params(self) -> object:
        """Copy the replica into the master weights. Wrapped:
        optimizer_hooks.wrap_refresh_of_masters.
        """

    def update_lp_params(self) -> object:
        """Copy master weights into the own partition, then gather all partitions."""


# ---- ZeRO-3: runtime/zero/stage3.py


class Coordinator(Protocol):
    """``PartitionedParameterCoordinator`` of runtime/zero/partitioned_param_coordinator.py."""

    def _PartitionedParameterCoordinator__all_gather_params_(
        self, params: set[ZeroParameter], forward: bool
    ) -> object:
        """Post the gathers of a fetch. Wrapped: sharded_params.before_fetch."""


class ParameterOffload(Protocol):
    """``DeepSpeedZeRoOffload`` of runtime/zero/parameter_offload.py; the whole "optimizer" of an
    engine for inference.
    """

    def get_param_coordinator(self) -> Coordinator:
        """Return the coordinator of fetches."""

    def pre_sub_module_forward_function(self, sub_module: torch.nn.Module) -> object:
        """Fetch the parameters of a module for its forward.

        Wrapped: sharded_params.around_forward.
        """

    def post_sub_module_forward_function(self, sub_module: torch.nn.Module) -> object:
        """Release the parameters of a module after its forward.

        Wrapped: sharded_params.around_forward.
        """


class ShardOptimizer(ZeroOptimizer, Protocol):
    """``DeepSpeedZeroOptimizer_Stage3``."""

    parameter_offload: ParameterOffload
    offload_optimizer: bool
    fp16_groups: list[list[ZeroParameter]]  # parameters that the optimizer updates

    def partition_grads(
        self, params_to_release: list[ZeroParameter], grad_partitions: list[Tensor]
    ) -> object:
        """Store shards of gradients and free the gradients.

        Wrapped: shard_hooks.wrap_shard_reduction.
        """

    def reduce_ready_partitions_and_remove_grads(self, param: ZeroParameter) -> object:
        """Put the gradient of a parameter into its bucket."""

    def checkpoint_event_epilogue(self) -> object:
        """End a save or a load. Wrapped: hooks.Hooks.connect."""

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Reduce a bucket to shards. Wrapped: shard_hooks.wrap_shard_reduction."""

    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(
        self, communication_data_type: torch.dtype
    ) -> object:
        """Reduce the content of a bucket."""

    def _apply_muon_to_accumulated_grads(self) -> object:
        """Run Muon on accumulated shards. Wrapped: muon._count_gathers."""


# ---- accelerator and backend


class Accelerator(Protocol):
    """``DeepSpeedAccelerator`` of accelerator/abstract_accelerator.py."""

    def Event(self) -> torch.Event:
        """Make an event, on devices with streams."""

    def current_device_name(self) -> str:
        """Return the device of this process, such as "cuda:0"."""

    def current_stream(self) -> torch.Stream:
        """Return the stream that work is put on."""

    def is_synchronized_device(self) -> bool:
        """Return True if the device has no streams."""

    def resolves_data_dependency(self) -> bool:
        """Return True if work runs in order without events."""

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on the device."""

    def synchronize(self) -> object:
        """Wait for the device."""

    def available_memory(self) -> int:
        """Return the bytes that can still be allocated."""

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Return the tensor in page-locked memory."""


class ShmOperator(Protocol):
    """The C++ operator that ``build_shm_op`` of comm/torch.py returns."""

    def initialize(self, size: int, rank: int) -> object:
        """Open the shared memory."""

    def vector_kernel_level(self) -> int:
        """Return the level of vector instructions that the CPU has."""


class TorchBackend(Protocol):
    """``TorchBackend`` of comm/torch.py. ``inference_all_reduce`` is wrapped."""

    shm_comm_op: ShmOperator | None
    shm_vector_kernel_level: int

    def get_rank(self) -> int:
        """Return the rank of this process."""

    def get_world_size(self) -> int:
        """Return the number of ranks."""

    def inference_all_reduce(self, tensor: Tensor, op: object) -> object:
        """Reduce through shared memory. Wrapped: install.defer_operator."""


# ---- functions, and attributes that come and go


# Module -> functions that the plugin calls or replaces.
FUNCTIONS: Mapping[str, Sequence[str]] = {
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.comm": (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "broadcast_object_list",
        "get_rank",
        "get_world_size",
        "is_initialized",
    ),
    "deepspeed.comm.torch": ("build_shm_op", "TorchBackend"),
    "deepspeed.runtime.zero.parameter_offload": ("register_external_parameter",),
    "deepspeed.runtime.zero.stage3": ("reduce_scatter_coalesced",),
    "deepspeed.runtime.zero.stage_1_and_2": ("all_gather_dp_groups",),
    "deepspeed.utils": ("z3_leaf_module",),
}

# Attribute -> first release that has it; callers ask with ``hasattr`` or ``is_older``.
SINCE: Mapping[str, str] = {
    "_add_to_grad_partition_buffer": "0.19.8",
    "_apply_muon_to_accumulated_grads": "0.19.8",
    "_apply_muon_updates_cpu_offload": "0.19.8",
    "finalize_gradient_accumulation_boundary": "0.19.4",
    "gradient_average": "0.19.0",
    "managed_gradient_accumulation": "0.19.4",
    "setup_buckets": "0.18.3",
    "shm_vector_kernel_level": "0.19.6",
    "vector_kernel_level": "0.19.6",
}
