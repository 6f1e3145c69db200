"""The models of the published runs, built from their shapes as a user would write them.

In: a ``Shape``. Out: an ``nn.Module`` (on ``meta`` under ``torch.device("meta")``) that takes
``tokens`` and ``targets``, both (batch, seq), and returns the loss. Nothing in it knows of
parallelism: it goes through the same capture as any model.

- ``gpt``: learned positions, LayerNorm with bias, GELU, dropout after attention and MLP
  (Shoeybi et al. 2019, Megatron-LM);
- ``llama``: RMSNorm, rotary positions, SwiGLU, grouped key/value heads, no biases;
- ``nemotron``: LayerNorm, rotary positions, squared ReLU, grouped heads.

Queries, keys and values come of one product, as do SwiGLU's two factors; heads are laid out so
that both can be split by heads or columns. Attention is ``flash`` (one kernel), ``unfused``: two
products around one softmax kernel that scales and masks too, as Megatron-LM's fused
scale-mask-softmax does, and dropout; or ``apart``: what Megatron-LM falls back to where that kernel
does not run. Dropout is an op of its own, registered as a user's fused
kernel would be: one pass over memory, as torch's on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.target.register_op import register_op, registered_rules

from .depth import FEWEST_LAYERS

CAPTURE_ROWS = 2
Family = Literal["gpt", "llama", "nemotron"]
Kernels = Literal["flash", "unfused", "apart"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's shape.

    ``layers`` is how many are built. ``fused``: rotary positions and the activation are one
    kernel each, as TransformerEngine's, and not an op at a time. ``tied``: the head's weight is
    the embedding's. ``eager``: written as torchtitan's Llama is, for a compiler to fuse: RMSNorm
    and complex rotary positions in float32, an op at a time, and heads repeated. ``unpads``:
    queries, keys and values are copied without padding rows for the attention kernel, and what it
    makes is copied back (llm-foundry's ``flash_attn_fn``). ``fused_loss``: the loss is one kernel
    on logits in half precision, as TransformerEngine's and a compiled one are.
    """

    family: Family
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    seq: int
    vocab: int
    attention: Kernels
    dropout: float = 0.0
    fused: bool = False
    tied: bool = False
    eager: bool = False
    unpads: bool = False
    fused_loss: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def repeated(self) -> int:
        """The number of layers that are alike."""
        return self.layers

    @property
    def few(self) -> Shape:
        """The shape with no more layers than can be repeated."""
        return replace(self, layers=min(self.layers, FEWEST_LAYERS))

    def program(self, dtype: str) -> Program:
        """Capture the decoder."""
        with torch.device("meta"):
            model = Decoder(self)
        batch = example_batch(self, CAPTURE_ROWS)
        return capture(model, batch, dtype=dtype, rules=registered_rules())


def mask_bytes(shape: Sequence[int], *_others: Sequence[int]) -> int:
    """Dropout's mask: one byte per element."""
    return prod(shape)


@register_op("* -> *", name="validation_dropout", saved_bytes=mask_bytes)
def fused_dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout in one kernel."""
    return F.dropout(x, probability)


@register_op("*b _ + _ + *b _ -> *b _", name="validation_bias_dropout_add", saved_bytes=mask_bytes)
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, probability: float) -> Tensor:
    """What follows a row-parallel product in Megatron-LM, in one kernel, on whole features."""
    return residual + F.dropout(x + bias, probability)


def nothing(*_shapes: Sequence[int]) -> int:
    """Bytes that an op keeps whose backward reads nothing."""
    return 0


@register_op("* -> *", name="validation_rows_copied", saved_bytes=nothing)
def copied_rows(x: Tensor) -> Tensor:
    """Rows gathered by their indices, in one kernel."""
    return x.clone()


@register_op("*b s _, [s _], [s _] -> *b s _", name="validation_rotary", saved_bytes=nothing)
def fused_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``rotated`` in one kernel."""
    return rotated(x, (cosine, sine))


@register_op("*b f _ => *b f", name="validation_swiglu")
def fused_swiglu(x: Tensor) -> Tensor:
    """SiLU of the first factor times the second, in one kernel."""
    return swiglu(x)


@register_op("* => *", name="validation_squared_relu")
def fused_squared_relu(x: Tensor) -> Tensor:
    """The square of the positive part, in one kernel."""
    return F.relu(x).square()


def half_bytes(shape: Sequence[int], *_others: Sequence[int]) -> int:
    """Logits in half precision."""
    return 2 * prod(shape)


@register_op("*b v, *b -> *b", name="validation_cross_entropy", saved_bytes=half_bytes)
def fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token in one kernel. Ranks that split the vocabulary sum two numbers per
    token, which is priced as the sum of their results."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return flat.unflatten(0, targets.shape)


def swiglu(x: Tensor) -> Tensor:
    """(…, width, 2) to (…, width)."""
    gate, up = x.unbind(-1)
    return F.silu(gate) * up


def dropout(x: Tensor, probability: float) -> Tensor:
    """``fused_dropout``, or nothing where nothing is dropped."""
    if not probability:
        return x
    dropped: Tensor = fused_dropout(x, probability)
    return dropped


class Output(nn.Module):
    """A product that ends a branch, with its bias (if any), dropout and the residual's sum."""

    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__()
        self.product = nn.Linear(width, shape.hidden, bias=False)
        self.dropout = shape.dropout
        self.bias = nn.Parameter(torch.zeros(shape.hidden)) if shape.family == "gpt" else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        made: Tensor = self.product(x)
        if self.bias is not None:
            made = bias_dropout_add(made, self.bias, residual, self.dropout)
            return made
        return residual + made


class Attention(nn.Module):
    """Norm, causal self-attention and residual, (batch, seq, hidden) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.shape = shape
        self.group = shape.heads // shape.kv_heads
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, width, bias=bias)
        self.norm = norm(shape)
        self.out = Output(shape.heads * shape.head_dim, shape)

    def forward(self, residual: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        x = self.norm(residual)
        shape, group = self.shape, self.group
        grouped = self.qkv(x).unflatten(-1, (shape.kv_heads, group + 2, shape.head_dim))
        parts = grouped.split((group, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        # query (batch, heads, seq, head_dim), key and value with kv_heads
        if table is not None and shape.fused:
            query, key = fused_rotary(query, *table), fused_rotary(key, *table)
        elif table is not None and shape.eager:
            query, key = turned(query, table), turned(key, table)
        elif table is not None:
            query, key = rotated(query, table), rotated(key, table)
        if group > 1 and shape.eager:
            key, value = shared(key, group), shared(value, group)
        if shape.unpads:
            query, key, value = copied_rows(query), copied_rows(key), copied_rows(value)
        if shape.attention == "flash":
            made = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=group > 1 and not shape.eager
            )
        else:
            if group > 1:
                key, value = shared(key, group), shared(value, group)
            scores = query @ key.transpose(2, 3)
            weights = softmax_apart(scores) if shape.attention == "apart" else scores.softmax(-1)
            made = dropout(weights, shape.dropout) @ value
        made = copied_rows(made) if shape.unpads else made
        summed: Tensor = self.out(made.transpose(1, 2).flatten(2), residual)
        return summed


def softmax_apart(scores: Tensor) -> Tensor:
    """Scale, mask and softmax in float32, a kernel each, of (…, queries, keys)."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    wide = (scores.float() * 0.125).masked_fill(later, -10000.0)
    return wide.softmax(-1).to(scores.dtype)


def rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (Su et al. 2021): (batch, heads, seq, head_dim) turned by position."""
    cosine, sine = table
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def turned(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions as one product in float32, which is torchtitan's complex one in bytes."""
    return (x.float() * table[0].float()).to(x.dtype)


def shared(x: Tensor, times: int) -> Tensor:
    """(batch, kv_heads, seq, head_dim) with each head for ``times`` query heads."""
    batch, heads, seq, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, seq, dim).reshape(batch, -1, seq, dim)


class MLP(nn.Module):
    """Norm, position-wise network and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.family = shape.family
        self.width, self.fused = shape.ffn, shape.fused
        self.factors = 2 if shape.family == "llama" else 1
        self.up = nn.Linear(shape.hidden, self.factors * shape.ffn, bias=bias)
        self.norm = norm(shape)
        self.down = Output(shape.ffn, shape)

    def forward(self, residual: Tensor) -> Tensor:
        summed: Tensor = self.down(self.inner(self.norm(residual)), residual)
        return summed

    def inner(self, x: Tensor) -> Tensor:
        if self.family == "gpt":
            return F.gelu(self.up(x))
        if self.family == "llama":
            both = self.up(x).unflatten(-1, (self.width, 2))
            made: Tensor = fused_swiglu(both) if self.fused else swiglu(both)
            return made
        wide = self.up(x)
        squared: Tensor = fused_squared_relu(wide) if self.fused else F.relu(wide).square()
        return squared


class RMSNormApart(nn.Module):
    """RMSNorm in float32, an op at a time (torchtitan/models/norms.py of December 2024)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


def norm(shape: Shape) -> nn.Module:
    """The family's normalization."""
    if shape.eager:
        return RMSNormApart(shape.hidden)
    return nn.RMSNorm(shape.hidden) if shape.family == "llama" else nn.LayerNorm(shape.hidden)


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        made: Tensor = self.mlp(self.attention(x, table))
        return made


class Decoder(nn.Module):
    """Embedding, layers, head and loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.family == "gpt":
            self.positions = nn.Embedding(shape.seq, shape.hidden)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x, table = self.tokens(tokens), None
        if self.shape.family == "gpt":
            x = x + self.positions(torch.arange(seq, device=tokens.device))
            x = dropout(x, self.shape.dropout)
        else:
            table = rotary_table(seq, self.shape.head_dim, x)
        for layer in self.layers:
            x = layer(x, table)
        logits = self.head(self.norm(x))  # (batch, seq, vocab)
        if self.shape.fused_loss:
            mean: Tensor = fused_cross_entropy(logits, targets).mean()
            return mean
        return F.cross_entropy(logits.float().transpose(1, 2), targets)


def rotary_table(seq: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (seq, dim)."""
    angles = torch.arange(0, dim, 2, device=like.device).float() / dim
    turns = torch.outer(torch.arange(seq, device=like.device).float(), 10000.0**-angles)
    both = torch.cat((turns, turns), dim=-1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def example_batch(shape: Shape, rows: int) -> dict[str, Tensor]:
    """What a step takes, without values."""
    size = (rows, shape.seq)
    return {
        name: torch.empty(size, dtype=torch.long, device="meta") for name in ("tokens", "targets")
    }
