"""Stand in for your data and model: sequences that count upwards, models of 0.3 M parameters."""

import torch
from torch import nn

VOCABULARY, LENGTH = 256, 32
WIDTH, HEADS, LAYERS = 128, 4, 2


def rows(count=512):
    """Tokenized samples; the labels are the tokens, as for any causal language model."""
    starts = torch.arange(count) * 37 % VOCABULARY
    tokens = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def batch(samples, index, size=4):
    """The batch of this index. After the last sample comes the first one again."""
    chosen = [samples[place % len(samples)] for place in range(size * index, size * (index + 1))]
    return {key: torch.stack([row[key] for row in chosen]) for key in chosen[0]}


def model():
    """A Llama. Replace this by `AutoModelForCausalLM.from_pretrained(...)`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


class Decoder(nn.Module):
    """A causal language model that needs torch alone. ``forward`` returns the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(x)[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
