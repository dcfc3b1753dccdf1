"""A small byte-level GPT, the model of the demo and of the convergence runs.

Pre-norm transformer over the 256 byte values, with learned positions, causal attention and no
biases. It depends on neither ZeRO nor ds_quant. May import torch only.

[Note: bf16 weights, fp32 arithmetic]
A CPU without AVX-512 multiplies bf16 matrices in a scalar loop: 3.3 GFLOP/s on one core of an AVX2
machine, against 49 in fp32. With `compute_dtype=torch.float32` weights and gradients stay bf16, so
messages are the same as on a GPU. Every weight is converted to fp32 where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # byte values


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; `width` is divided evenly among `heads`.

    Raises:
        ValueError: a size is not positive, or `heads` does not divide `width`.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    seq_len: int = 128
    compute_dtype: torch.dtype | None = None  # None: the dtype of the weights; see the note

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: must divide width={self.width}")


class Linear(nn.Linear):
    """Linear layer without bias, in the dtype of its input.

    See [Note: bf16 weights, fp32 arithmetic].
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        return F.linear(x, self.weight.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """Layer normalisation without bias, in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> same
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), eps=self.eps)


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq_len, width) -> same
        batch, seq_len, width = x.shape
        qkv = self.qkv(x).view(batch, seq_len, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq_len, head_width)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq_len, width))


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = LayerNorm(config.width)
        self.expand = Linear(config.width, 4 * config.width)
        self.contract = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq_len, width) -> same
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class GPT(nn.Module):
    """Byte-level language model; `forward` returns the mean cross-entropy in nats per byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.seq_len, config.width)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = LayerNorm(config.width)
        self.head = Linear(config.width, VOCABULARY)
        self._initialise(blocks)

    def _initialise(self, blocks: Sequence[Block]) -> None:
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        # 2 * layers branches are added: smaller weights keep the variance of the sum.
        for block in blocks:
            for branch in (block.attention.out, block.contract):
                nn.init.normal_(branch.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets`, a scalar fp32.

        inputs, targets: (batch, seq_len) int64.

        Raises:
            ValueError: the sequence is longer than the model's `seq_len`.
        """
        seq_len = inputs.shape[1]
        if seq_len > self.config.seq_len:
            raise ValueError(f"sequence of {seq_len} bytes: at most {self.config.seq_len}")
        positions = torch.arange(seq_len, device=inputs.device)
        x = self.embedding(inputs)
        x = x.to(self.config.compute_dtype or x.dtype)
        x = x + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, seq_len, VOCABULARY)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
