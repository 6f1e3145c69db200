"""A GShard-style mixture of experts: top-2 gating with capacity, dispatched by einsum.

Each group (a row of the batch) sends its tokens to at most ``capacity`` places per expert
through a one-hot dispatch tensor; what finds no place passes by on the residual path.
Nothing here knows of parallelism: that a plan splits the experts over devices, and that
tokens then travel by all-to-all, follows from the einsums.

Source: Lepikhin et al. 2020, GShard (arXiv 2006.16668), algorithm 1, without random routing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SEQ = 64
BATCH = ("tokens", "targets")


class Gate(nn.Module):
    """(group, token, d_model) to combine weights (group, token, expert, place) and a loss."""

    def __init__(self, d_model: int, n_expert: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(d_model, n_expert, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(x).softmax(-1)  # (group, token, expert)
        n_expert = gates.shape[-1]
        first = F.one_hot(gates.argmax(-1), n_expert).to(gates.dtype)
        second = F.one_hot((gates * (1 - first)).argmax(-1), n_expert).to(gates.dtype)
        balance = (gates.mean(1) * first.mean(1)).sum(-1).mean() * n_expert
        place1 = first.cumsum(1) - first  # how many came before
        place2 = second.cumsum(1) - second + first.sum(1, keepdim=True)
        combined = [
            self._placed(gates * mask, mask, place)
            for mask, place in ((first, place1), (second, place2))
        ]
        weights = combined[0] + combined[1]
        total = weights.sum((-2, -1), keepdim=True).clamp_min(1e-9)
        return weights / total, balance

    def _placed(self, gate: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        """Weights (group, token, expert) spread over the places; beyond them they are lost."""
        fits = mask * (place < self.capacity)
        places = F.one_hot((place * fits).sum(-1).long(), self.capacity).to(gate.dtype)
        return torch.einsum("gse,gsc->gsec", gate * fits, places)


class Experts(nn.Module):
    """A two-layer network per expert: (group, token, d_model) to the same, and the gate's loss."""

    def __init__(self, d_model: int, d_ff: int, n_expert: int, capacity: int) -> None:
        super().__init__()
        self.gate = Gate(d_model, n_expert, capacity)
        self.up = nn.Parameter(torch.randn(n_expert, d_model, d_ff) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(n_expert, d_ff, d_model) * d_ff**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, balance = self.gate(x)
        dispatch = (combine > 0).to(x.dtype)
        inputs = torch.einsum("gsec,gsm->egcm", dispatch, x)  # (expert, group, place, d_model)
        hidden = F.relu(torch.einsum("egcm,emh->egch", inputs, self.up))
        outputs = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, outputs), balance


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.query, self.key, self.value, self.proj = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A pre-norm transformer layer; ``feed_forward`` also gives a loss."""

    def __init__(self, d_model: int, n_head: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_head)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.feed_forward(self.norm2(x))
        return x + y, balance


class MoE(nn.Module):
    """A language model whose every feed-forward is a layer of experts."""

    def __init__(
        self,
        *,
        n_layer: int,
        d_model: int,
        n_head: int,
        vocab: int,
        seq: int,
        experts: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(seq, d_model)
        self.layers = nn.ModuleList(
            Layer(d_model, n_head, Experts(d_model, *experts)) for _ in range(n_layer)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        losses = []
        for layer in self.layers:
            x, balance = layer(x)
            losses.append(balance)
        logits = self.head(self.norm(x))  # (batch, seq, vocab)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 0.01 * torch.stack(losses).sum()


def build_model(
    n_layer: int = 2,
    d_model: int = 64,
    n_head: int = 4,
    d_ff: int = 128,
    n_expert: int = 4,
    capacity: int = 40,
    vocab: int = 256,
    seq: int = SEQ,
) -> nn.Module:
    """The model: 0.2 M parameters by default, most of them experts'."""
    return MoE(
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        vocab=vocab,
        seq=seq,
        experts=(d_ff, n_expert, capacity),
    )


def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    shape = (global_batch, seq or SEQ)
    return {name: torch.empty(shape, dtype=torch.long, device="meta") for name in BATCH}


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)
