"""A token model with every kind of loss whose scale depends on the labels of all rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCABULARY, SEQ = 16, 12, 8
IGNORED = -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + changed


class MaskedLM(nn.Module):
    """``loss``: "mean", "weighted", "sum", "masked", "normalized", "nll".

    With ``is_random`` the forward itself draws which half of the labels count.
    """

    def __init__(self, loss: str, smoothing: float, *, is_random: bool) -> None:
        super().__init__()
        self.loss, self.smoothing, self.is_random = loss, smoothing, is_random
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("class_weight", torch.linspace(0.5, 2, VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.is_random:
            labels = labels.masked_fill(torch.rand(labels.shape) < 0.5, IGNORED)
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).flatten(0, 1)
        shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
        if self.loss in ("mean", "weighted", "sum"):
            return functional.cross_entropy(
                logits,
                shifted,
                self.class_weight if self.loss == "weighted" else None,
                reduction="sum" if self.loss == "sum" else "mean",
                label_smoothing=self.smoothing,
            )
        if self.loss == "nll":
            scores = functional.log_softmax(logits, -1)
            return functional.nll_loss(scores, shifted, self.class_weight)
        rows = functional.cross_entropy(logits, shifted, reduction="none")
        mask = (shifted != IGNORED).to(rows.dtype)
        if self.loss == "normalized":
            return (rows * (mask / mask.sum())).sum()
        decay = 0.01 * self.head.weight.pow(2).sum()
        return (rows * mask).sum() / mask.sum().clamp(min=1) + 0.1 * (logits**2).mean() + decay


def build_model(
    loss: str = "mean", smoothing: float = 0.0, *, is_random: bool = False
) -> nn.Module:
    return MaskedLM(loss, smoothing, is_random=is_random)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    shape = (global_batch, SEQ)
    return {n: torch.empty(shape, dtype=torch.long, device="meta") for n in ("tokens", "labels")}
