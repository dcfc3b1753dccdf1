"""Imported once by the fork server for the tests of Hugging Face libraries."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing may be downloaded

import peft  # noqa: E402, F401
import transformers  # noqa: E402
from transformers import (  # noqa: E402, F401
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
