"""Two towers and a contrastive loss over the global batch, as CLIP trains them.

::

    autoparallel plan examples/two_towers.py --cluster cpu:2 --global-batch 16
    autoparallel verify examples/two_towers.py --cluster cpu:2 --parallel dp=2

Every image is compared with every text of the batch, so no row can be trained without the
others: the plan has one micro-batch, and gathers what the towers make.

Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language
Supervision", figure 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SEQ = 12
VOCABULARY = 64
IMAGE = 16
PATCH = 4


class Layer(nn.Module):
    """A transformer layer that sees the whole sequence."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width]; the same shape comes out."""
        batch, seq, width = x.shape
        heads = (batch, seq, self.num_heads, width // self.num_heads)
        query, key, value = self.attention(self.attention_norm(x)).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(
            query.view(heads).transpose(1, 2),
            key.view(heads).transpose(1, 2),
            value.view(heads).transpose(1, 2),
        )
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, width))
        hidden: Tensor = functional.gelu(self.up(self.mlp_norm(x)))
        return x + self.down(hidden)


class Tower(nn.Module):
    """A stack of layers over a sequence, and the mean of what comes out."""

    def __init__(self, width: int, num_heads: int, num_layers: int, seq: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(seq, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, width] to [batch, width]."""
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        pooled: Tensor = self.norm(x).mean(1)
        return pooled


class TwoTowers(nn.Module):
    """An image tower and a text tower that meet in one space."""

    def __init__(self, width: int, num_heads: int, num_layers: int, shared: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.image_tower = Tower(width, num_heads, num_layers, (IMAGE // PATCH) ** 2)
        self.text_tower = Tower(width, num_heads, num_layers, SEQ)
        self.image_project = nn.Linear(width, shared, bias=False)
        self.text_project = nn.Linear(width, shared, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels: [batch, 3, IMAGE, IMAGE], tokens: [batch, SEQ]; both towers and the scale."""
        images = self.patches(pixels).flatten(2).transpose(1, 2)
        image = self.image_project(self.image_tower(images))
        text = self.text_project(self.text_tower(self.tokens(tokens)))
        return (
            functional.normalize(image, dim=-1),
            functional.normalize(text, dim=-1),
            self.log_scale.exp(),
        )


def build_model(
    width: int = 32, num_heads: int = 4, num_layers: int = 2, shared: int = 16
) -> nn.Module:
    return TwoTowers(width, num_heads, num_layers, shared)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {
        "pixels": torch.randn(global_batch, 3, IMAGE, IMAGE),
        "tokens": torch.randint(0, VOCABULARY, (global_batch, SEQ)),
    }


def loss_fn(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Each image is to find its text among all of the batch, and each text its image."""
    image, text, scale = outputs
    logits = scale * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (
        functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)
    ) / 2
