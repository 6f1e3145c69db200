"""A layer of attention for small models."""

from __future__ import annotations

from torch import Tensor, nn


class Layer(nn.Module):
    """Two heads of attention over normalized positions, beside which the input goes on."""

    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, seq, 3, 2, -1).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=self.causal)
        return x + self.out(h.transpose(1, 2).reshape(rows, seq, width)).tanh()
