"""Imported once by the fork server for the tests of client libraries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing may be downloaded
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import lightning  # noqa: E402, F401
import trl  # noqa: E402, F401
from trl import DPOTrainer, GRPOTrainer, SFTTrainer  # noqa: E402, F401

from tests.integration import hf_preload  # noqa: E402, F401
