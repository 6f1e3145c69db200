"""A mixture of experts in plain PyTorch: what its router does follows from all tokens of a batch.

``balance``: the auxiliary loss of Switch Transformers, E times the product of two means; ``z``: the
z-loss of ST-MoE; ``sequence``: that of DeepSeek-V3, per sequence. ``bias``: no loss, a bias that
balances (Wang et al. 2024), which a script moves by counts of tokens that ``counts`` adds up as
real numbers or as integers, or which the forward moves itself ("sign"). ``capacity``: a token that
comes after that many others of its expert is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_EXPERTS, NUM_CHOSEN, RATE = 4, 2, 0.05


class Router(nn.Module):
    """Weights of tokens' experts, (token, expert), and an auxiliary loss."""

    def __init__(self, width: int, loss: str, counts: str, capacity: int) -> None:
        super().__init__()
        self.loss, self.counts, self.capacity = loss, counts, capacity
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        dtype = torch.long if counts == "integer" else torch.get_default_dtype()
        self.register_buffer("tokens_per_expert", torch.zeros(NUM_EXPERTS, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        logits = self.gate(x)  # (row, position, expert)
        scores = logits.softmax(-1)
        chosen = (scores + self.bias).topk(NUM_CHOSEN).indices
        hot = functional.one_hot(chosen, NUM_EXPERTS).sum(-2)
        if self.training and self.counts:
            self.count(hot.sum((0, 1)))
        weights = scores * hot
        if self.capacity:
            before = hot.flatten(0, 1).cumsum(0).view(hot.shape) - hot
            weights = weights * (before < self.capacity)
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9), self.auxiliary(
            logits, scores, hot.to(scores.dtype) / NUM_CHOSEN
        )

    @torch.no_grad()
    def count(self, load: Tensor) -> None:
        if self.counts == "sign":
            share = load / load.sum()
            self.bias += RATE * torch.sign(share.mean() - share)
        else:
            self.tokens_per_expert += load

    def auxiliary(self, logits: Tensor, scores: Tensor, hot: Tensor) -> Tensor | float:
        if self.loss == "balance":
            return NUM_EXPERTS * (hot.mean((0, 1)) * scores.mean((0, 1))).sum()
        if self.loss == "z":
            return logits.logsumexp(-1).square().mean()
        if self.loss == "sequence":
            return NUM_EXPERTS * (hot.mean(1) * scores.mean(1)).sum(-1).mean()
        return 0.0


class Layer(nn.Module):
    def __init__(self, width: int, loss: str, counts: str, capacity: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = Router(width, loss, counts, capacity)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        y = self.norm(x)
        weights, loss = self.router(y)
        hidden = functional.silu(torch.einsum("bsd,edf->bsef", y, self.up))
        return x + torch.einsum("bse,bsef,efd->bsd", weights, hidden, self.down), loss


class RoutedExperts(nn.Module):
    def __init__(self, loss: str, counts: str, capacity: int, width: int = 8) -> None:
        super().__init__()
        self.start = nn.Linear(4, width)
        self.layers = nn.ModuleList(Layer(width, loss, counts, capacity) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, losses = self.start(inputs), 0.0
        for layer in self.layers:
            x, loss = layer(x)
            losses = losses + loss
        return functional.mse_loss(self.head(x), targets) + 0.5 * losses


def build_model(loss: str = "", counts: str = "real", capacity: int = 0) -> nn.Module:
    return RoutedExperts(loss, counts, capacity)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {
        "inputs": torch.empty(global_batch, 6, 4, device="meta"),
        "targets": torch.empty(global_batch, 6, 3, device="meta"),
    }
