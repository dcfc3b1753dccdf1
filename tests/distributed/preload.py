"""What the fork server imports once for all ranks of all tests. See ``harness``."""

# ruff: noqa: E402  (the environment must be set before torch and DeepSpeed are imported)

import functools
import gc
import logging
import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: F401
import torch

import ds_quant  # noqa: F401  (plants the hook before DeepSpeed is imported)

torch.set_num_threads(1)

import deepspeed
import deepspeed.runtime.zero.stage3
import functorch.compile  # noqa: F401  (DeepSpeed's engine would import it on every rank)
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.config
from deepspeed.utils import logger

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a 30 s build that nothing uses
logger.setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*")
gc.freeze()

if deepspeed.__version__.startswith("0.18."):
    # Its ZeRO-1/2 gathers into a view that torch 2.13 refuses to modify, also without this plugin;
    # the runs that serve as baselines get detached views.
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
