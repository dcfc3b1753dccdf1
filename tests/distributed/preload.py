"""Imports of the fork server, once for all ranks of all tests. See ``harness``."""

# ruff: noqa: E402  (the environment must be set before torch and DeepSpeed are imported)

import contextlib
import functools
import gc
import importlib
import logging
import os
import pkgutil
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: F401
import torch

import ds_quant  # installs its hook before DeepSpeed is imported

torch.set_num_threads(1)

import deepspeed
import deepspeed.runtime.zero.stage3
import functorch.compile  # noqa: F401  (DeepSpeed's engine would import it on every rank)
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.config
from deepspeed.utils import logger

import tests.distributed
from ds_quant.config.presets import preset_description, preset_names

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes 30 s to build, not used
logger.setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*")

# An engine would import these on every rank, which takes half of its start-up time. Older versions
# of DeepSpeed lack some.
for name in (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.comm.mori",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler._cupti_monitor",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for name in preset_names():
    preset_description(name)
# Every rank would import most modules of the plugin and of the tests, too.
for module in pkgutil.walk_packages(ds_quant.__path__, "ds_quant."):
    if module.name != "ds_quant.kernels._native":  # a C++ library, which Python cannot import
        importlib.import_module(module.name)
for module in pkgutil.iter_modules(tests.distributed.__path__, "tests.distributed."):
    if not module.name.startswith("tests.distributed.test_") and module.name != __name__:
        importlib.import_module(module.name)
torch.set_printoptions(threshold=0, edgeitems=1)  # DeepSpeed formats parameters it never prints
gc.freeze()
gc.set_threshold(20_000, 20, 100)  # by default collections take a tenth of a short run

if deepspeed.__version__.startswith("0.18."):
    # Its ZeRO-1/2 gathers into a view that torch 2.13 refuses to modify, plugin or not.
    # The baselines of the tests get detached views.
    import deepspeed.runtime.zero.stage_1_and_2 as stage_1_and_2

    def gather_detached(groups_flat, partitioned_param_groups, original, **kwargs):
        original(
            groups_flat=[flat.detach() for flat in groups_flat],
            partitioned_param_groups=[[p.detach() for p in ps] for ps in partitioned_param_groups],
            **kwargs,
        )

    stage_1_and_2.all_gather_dp_groups = functools.partial(
        gather_detached, original=stage_1_and_2.all_gather_dp_groups
    )
