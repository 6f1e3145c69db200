"""The GPT of the runtime benchmark: query, key and value apart, so that torch can split heads.

``torch.distributed.tensor.parallel`` splits a linear layer's outputs in order, which for one
layer of all three would not be a split of heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Layer(nn.Module):
    """One pre-norm transformer layer: (batch, seq, width) to the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            linear(x).view(batch, seq, -1, self.head_width).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )  # each (batch, heads of this rank, seq, head_width)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


class GPT(nn.Module):
    """(batch, seq) bytes and the bytes that come next, to the mean negative log-likelihood."""

    def __init__(self, *, num_layers: int, width: int, num_heads: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # (batch, seq, 256)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
