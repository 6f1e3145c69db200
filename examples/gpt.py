"""A GPT that learns to write Python: byte-level language modelling of the standard library.

The model file of the quick start. autoparallel reads four names from it: ``build_model``,
``example_batch``, and the optional ``build_optimizer`` and ``build_data``.
Nothing in it knows of parallelism.
"""

from __future__ import annotations

import itertools
import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SEQ = 256
BATCH = ("tokens", "targets")


class Attention(nn.Module):
    """Causal self-attention: (batch, seq, d_model) to the same."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d_model = x.shape
        q, k, v = self.qkv(x).split(d_model, dim=2)
        q, k, v = (
            part.view(batch, seq, self.n_head, d_model // self.n_head).transpose(1, 2)
            for part in (q, k, v)
        )  # each (batch, n_head, seq, d_head)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, seq, d_model)
        return self.proj(y)


class MLP(nn.Module):
    """The position-wise network, four times as wide inside."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_head)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, ``n_layer`` layers, and a head (tied to the tokens' or not).

    (batch, seq) token ids, and the ids that come next, to the mean negative log-likelihood
    of the next id, in nats.
    """

    def __init__(
        self, *, n_layer: int, d_model: int, n_head: int, seq: int, vocab: int, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(seq, d_model)
        self.layers = nn.ModuleList(Layer(d_model, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        self.apply(self._init)
        for layer in self.layers:
            for linear in (layer.attention.proj, layer.mlp.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * n_layer))
        if tied:
            self.head.weight = self.tokens.weight

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # (batch, seq, vocab)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(
    n_layer: int = 6,
    d_model: int = 512,
    n_head: int = 8,
    seq: int = SEQ,
    vocab: int = 256,
    tied: bool = False,
) -> nn.Module:
    """The model: 19.3 M parameters by default."""
    return GPT(n_layer=n_layer, d_model=d_model, n_head=n_head, seq=seq, vocab=vocab, tied=tied)


def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    shape = (global_batch, seq or SEQ)
    return {name: torch.empty(shape, dtype=torch.long, device="meta") for name in BATCH}


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as GPT-3 trains with it."""
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def build_data(
    rank: int,
    world: int,
    *,
    global_batch: int = 32,
    seq: int = SEQ,
    seed: int = 0,
    start: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Random windows of the standard library's source, without end.

    ``rank`` of ``world`` makes its share of the rows: each tensor is (global_batch / world, seq).
    All draw the same windows for a step, whose number is their seed, so the rows of a step are
    the same for any ``world``, and a run that goes on begins with batch ``start``.
    """
    text = python_source()
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    for step in itertools.count(start):
        generator = torch.Generator().manual_seed(seed + step)
        starts = torch.randint(len(text) - seq - 1, (global_batch,), generator=generator)[rows]
        windows = text[starts[:, None] + torch.arange(seq + 1)].long()
        yield {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def python_source(limit_bytes: int = 16_000_000) -> Tensor:
    """The bytes of the standard library's ``*.py`` files in order of path, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and size < limit_bytes:
            parts.append(path.read_bytes())
            size += len(parts[-1])
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)
