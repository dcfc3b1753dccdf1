"""What the fork server imports once for all ranks of all tests. See ``harness``."""

import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import ds_quant  # noqa: F401  (plants the hook before DeepSpeed is imported)

torch.set_num_threads(1)

import deepspeed
import deepspeed.runtime.zero.stage3  # noqa: F401
from deepspeed.utils import logger

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a 30 s build that nothing uses
logger.setLevel(logging.WARNING)
