"""Models of the kinds that people train: adapters, several inputs, encoder and decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoparallel
from autoparallel.target.load import load_target
from autoparallel.target.target import Target, checked_batches

WIDTH, SEQ, VOCABULARY = 16, 8, 32


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        updated: Tensor = self.base(x) + self.up(self.down(x))
        return updated


class Adapted(nn.Module):
    """A frozen embedding and first layer, then layers with adapters: mixed in one block."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                LoraLinear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                LoraLinear(4 * WIDTH, WIDTH),
            )
            for _ in range(num_layers)
        )
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SeveralInputs(nn.Module):
    """Two float inputs and an index, two outputs: a ranking model's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(6, WIDTH)
        self.wide = nn.Linear(4, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.click = nn.Linear(WIDTH, 1)
        self.price = nn.Linear(WIDTH, 1)

    def forward(self, dense: Tensor, wide: Tensor, item: Tensor) -> dict[str, Tensor]:
        x = self.dense(dense) * self.items(item) + self.wide(wide)
        for layer in self.mix:
            x = x + torch.tanh(layer(x))
        return {"click": self.click(x).squeeze(-1), "price": self.price(x).squeeze(-1)}


def several_loss(outputs: Any, batch: Any) -> Tensor:
    clicked = functional.binary_cross_entropy_with_logits(outputs["click"], batch["clicked"])
    return clicked + 0.5 * functional.mse_loss(outputs["price"], batch["paid"])


class Attention(nn.Module):
    """Multi-head attention of ``x`` over ``memory``, with a learned bias per distance."""

    def __init__(self, *, causal: bool, biased: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Embedding(2 * SEQ, 4) if biased else None
        self.causal = causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = (batch, -1, 4, WIDTH // 4)
        query = self.query(x).view(heads).transpose(1, 2)
        key = self.key(memory).view(heads).transpose(1, 2)
        value = self.value(memory).view(heads).transpose(1, 2)
        scores = query @ key.transpose(2, 3)
        if self.bias is not None:
            places = torch.arange(seq, device=x.device)
            distance = places[None, :] - places[:, None] + SEQ
            scores = scores + self.bias(distance).permute(2, 0, 1)[None]
        if self.causal:
            later = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = torch.softmax(scores, -1) @ value
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        return result


class Layer(nn.Module):
    """T5's layer; a decoder's also looks at what the encoder made."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention(causal=decodes, biased=True)
        self.cross_norm = nn.RMSNorm(WIDTH) if decodes else None
        self.cross = Attention(causal=False, biased=False) if decodes else None
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.ReLU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        own = self.norm(x)
        x = x + self.attention(own, own)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        result: Tensor = x + self.mlp(x)
        return result


class EncoderDecoder(nn.Module):
    """A small T5: one embedding for both sides, and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Layer(decodes=False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(decodes=True) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = self.norm(x) @ self.shared.weight.t() * WIDTH**-0.5
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity: exporting through it would lose that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


Straight = autoparallel.register_op("* => *")(_Straight)


@autoparallel.register_op("*b i, o i -> *b o")
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x.contiguous() @ weight.t()


class OwnLayer(nn.Module):
    """A layer of the user's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + project(Straight.apply(project(x, self.up)).tanh(), self.down)
        return result


class OwnOps(nn.Module):
    """Layers of the user's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Router(nn.Module):
    """Sends rows to experts by their values: Python decides, so it cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.gate(x), -1)
        if scores.isnan().any():
            raise ValueError("no row can be sent anywhere")
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            out[rows] = expert(x[rows]) * scores[rows, index, None]
        return out


@autoparallel.register_op("b w => b w")
class RowWise(Router):
    """The same, said to treat each row by itself."""


class Routed(nn.Module):
    """Layers, of which a part is opaque."""

    def __init__(self, router: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), router()
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def tokens(*names: str) -> Any:
    return lambda rows: {n: torch.randint(0, VOCABULARY, (rows, SEQ)) for n in names}


def several_batch(rows: int) -> dict[str, Tensor]:
    return {
        "dense": torch.randn(rows, 6),
        "wide": torch.randn(rows, 4),
        "item": torch.randint(0, VOCABULARY, (rows,)),
        "clicked": torch.rand(rows),
        "paid": torch.randn(rows),
    }


def target(name: str) -> Target:
    """A model by its name here."""
    if name == "towers":
        return load_target("examples/two_towers.py", {"width": 16, "num_layers": 1})
    build, batch, loss = {
        "lora": (Adapted, tokens("tokens", "labels"), None),
        "several": (SeveralInputs, several_batch, several_loss),
        "seq2seq": (EncoderDecoder, tokens("source", "target", "labels"), None),
        "opaque": (lambda: Routed(Router), lambda rows: {"x": torch.randn(rows, WIDTH)}, None),
        "rowwise": (lambda: Routed(RowWise), lambda rows: {"x": torch.randn(rows, WIDTH)}, None),
        "own": (OwnOps, lambda rows: {"x": torch.randn(rows, SEQ, WIDTH)}, None),
    }[name]
    return Target(name, build, checked_batches(batch, name), loss, takes_seq=False)
