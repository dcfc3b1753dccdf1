"""Stand in for your data and model: sequences that count upwards, a Llama of 0.3 M parameters."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY, LENGTH = 256, 32


def rows(count=512):
    """Tokenized samples; the labels are the tokens, as for any causal language model."""
    starts = torch.arange(count) * 37 % VOCABULARY
    tokens = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def model():
    """Replace this by `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
