"""A token model with the losses over a vocabulary that language models are trained with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCABULARY = 16, 48
IGNORED = -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + changed


class LanguageModel(nn.Module):
    """``loss``: "plain", "smoothed" (label smoothing), "capped" (soft caps on logits, as Gemma 2),
    "z" (a penalty on the squared log-sum-exp, as PaLM), or "distilled" (half of the loss is the
    divergence from a frozen teacher's head). Every third label is ignored."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if loss == "distilled":
            self.teacher = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(labels.shape[1], device=labels.device)
        labels = labels.masked_fill(places % 3 == 0, IGNORED)
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).float()
        if self.loss == "capped":
            logits = torch.tanh(logits / 5.0) * 5.0
        smoothing = 0.1 if self.loss == "smoothed" else 0.0
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
        )
        if self.loss == "z":
            loss = loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()
        if self.loss == "distilled":
            with torch.no_grad():
                wanted = functional.log_softmax(self.teacher(x).float() / 2.0, -1)
            given = functional.log_softmax(logits / 2.0, -1)
            divergence = functional.kl_div(given, wanted, reduction="none", log_target=True)
            loss = 0.5 * loss + 0.5 * 4.0 * divergence.sum(-1).mean()
        return loss


def build_model(loss: str = "plain") -> nn.Module:
    return LanguageModel(loss)


def example_batch(global_batch: int, seq: int = 16) -> dict[str, Tensor]:
    ids = torch.empty((global_batch, seq), dtype=torch.long, device="meta")
    return {"tokens": ids, "labels": ids}
