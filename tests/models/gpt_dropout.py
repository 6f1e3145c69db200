"""A small GPT with dropout in every place, some of it dead, and attention of two kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Self-attention that drops attention weights."""

    def __init__(self, width: int, heads: int, rate: float, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.rate, self.causal = heads, rate, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        q, k, v = (
            part.view(rows, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.rate
        )
        return self.proj(y.transpose(1, 2).reshape(rows, seq, width))


class Layer(nn.Module):
    """Attention and a network, each dropped; the second residual is kept or dropped by row."""

    def __init__(self, width: int, rate: float, attention: Attention) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        self.drop(x)  # the loss does not depend on it
        y = self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        kept = torch.rand((x.shape[0], 1, 1), device=x.device) >= self.rate
        return x + y * kept


class Model(nn.Module):
    """Token and position embeddings, layers, a head and the loss."""

    def __init__(self, width: int, rate: float, *, in_attention: bool, causal: bool) -> None:
        super().__init__()
        dropped = rate if in_attention else 0.0
        self.tokens = nn.Embedding(64, width)
        self.positions = nn.Embedding(64, width)
        self.drop = nn.Dropout(rate)
        self.layers = nn.ModuleList(
            Layer(width, rate, Attention(width, 4, dropped, causal=causal)) for _ in range(2)
        )
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def build_model(
    width: int = 32, rate: float = 0.2, in_attention: bool = True, causal: bool = True
) -> nn.Module:
    return Model(width, rate, in_attention=in_attention, causal=causal)


def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
    shape = (global_batch, seq or 16)
    return {
        name: torch.empty(shape, dtype=torch.long, device="meta") for name in ("tokens", "targets")
    }
