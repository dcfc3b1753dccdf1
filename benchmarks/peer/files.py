"""The files of DeepSpeed's tests/unit that exercise ZeRO 1 to 3 and can run on a CPU.

Left out, because a CPU or this plugin has nothing for them: NVMe, ZeRO++, MiCS, DeepCompile, and
tests that build no engine (config parsing, tiling, process-group arguments, CUDA streams), tests of
how much device memory is in use, and one file that takes a fixed port.
"""

FILES = (
    "v1/zero/test_zero.py",
    "checkpoint/test_zero_optimizer.py",
    "checkpoint/test_universal_checkpoint.py",
    "runtime/comm/test_coalesced_collectives.py",
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_leaf_module.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_allreduce_fetch_params.py",
    "runtime/zero/test_zero_tensor_fragment.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_linear_direct_init.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_zero_late_module_attach.py",
    "runtime/zero/test_zero_hook_attribute_delegation.py",
    "runtime/zero/test_zero_autocast_mixed_dtype.py",
    "runtime/zero/test_zero_offloadpp.py",
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_convert_checkpoint.py",
    "checkpoint/test_moe_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_shared_weights.py",
    "checkpoint/test_tag_validation.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "v1/zero/test_zero_user_backward.py",
    "v1/zero/test_zero_hook_count_regression.py",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py",
    "v1/zero/test_zero_autocast.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero_functorch_linear.py",
    "v1/zero/test_zero_torch_func.py",
)

# Beginnings of test names. The first are measurements rather than tests: minutes each, for millions
# of parameters in tiny modules. The others need NVMe.
LEFT_OUT = (
    "runtime/zero/test_zero_leaf_module.py::TestZ3LeafOptimization",
    "runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentSet::test_zero_fragments[nvme",
    "runtime/zero/test_zero_tensor_fragment.py::TestTensorFragmentUpdate::test_zero_fragments[nvme",
)
