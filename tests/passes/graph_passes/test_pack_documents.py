"""Masks of packed documents become ids of documents, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_models import check_program, program_of
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from autoparallel.passes.graph_passes import masks
from autoparallel.passes.graph_passes.masks import SDPA, WINDOWED
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.graph import Node

SEQ = 6
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]])
AGAIN = torch.tensor([[0, 0, 1, 0, 1, 2], [3, 1, 3, 1, 3, 3]])


class Attention(nn.Module):
    """Attention of two heads under a mask that ``make_mask(ids)`` makes."""

    def __init__(self, make_mask: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.make_mask, self.dropout = make_mask, dropout

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q = self.project(x)
        y = functional.scaled_dot_product_attention(q, q, q, self.make_mask(ids), self.dropout)
        return (y * y).sum()


def lower(before: int = SEQ) -> Tensor:
    return torch.ones(SEQ, SEQ, dtype=torch.bool).tril().triu(-before)


def same(ids: Tensor) -> Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


def along_rows(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids[:, :, None])[:, None] & lower()


def counted(ids: Tensor) -> Tensor:
    """Documents that end with the token 1."""
    found = (ids == 1).cumsum(-1)
    places = torch.arange(SEQ)
    return (places[:, None] >= places) & same(found)


def shared(ids: Tensor) -> Tensor:
    return (ids[0, :, None] == ids[0])[None, None] & lower()


def ids_of(positions: Tensor) -> Tensor:
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def by_positions(positions: Tensor, window: int = 0) -> Tensor:
    rows, columns = positions[:, None, :, None], positions[:, None, None, :]
    seen = (columns <= rows) & same(ids_of(positions))
    return seen & (columns > rows - window) if window else seen


KNOWN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "rows first": (along_rows, 0),
    "counted": (counted, 0),
    "window": (lambda ids: same(ids) & lower(2), 3),
    "wide window": (lambda ids: same(ids) & lower(4), 5),
    "expanded": (lambda ids: (same(ids) & lower()).expand(2, 1, SEQ, SEQ), 0),
    "positions": (by_positions, 0),
    "positions in a window": (lambda ids: by_positions(ids, 2), 2),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "not causal": lambda ids: same(ids) | torch.eye(SEQ, dtype=torch.bool),
    "both ways": same,
    "union": lambda ids: same(ids) | lower(),
    "other ids": lambda ids: same(ids) & same(ids + ids) & lower(),
    "not equal ids": lambda ids: (
        (ids[:, None, :, None] == (ids + 1)[:, None, None]) & lower()
        | torch.eye(SEQ, dtype=torch.bool)
    ),
    "later ids": lambda ids: (ids[:, None, :, None] >= ids[:, None, None]) & lower(),
    "floats": lambda ids: same(ids.double()) & lower(),
    "positions of other ids": lambda ids: (
        (ids[:, None, None] <= ids[:, None, :, None]) & same((ids == 0).cumsum(-1))
    ),
    "chunks of positions": lambda ids: by_positions(ids) & same(ids // 2),
    "multiples of positions": lambda ids: (
        (2 * ids[:, None, None] <= 3 * ids[:, None, :, None]) & same(ids_of(ids))
    ),
    "hidden keys": lambda ids: same(ids) & lower() & (ids[:, None, None] != 7),
    "heads": lambda ids: (same(ids) & lower()).expand(2, 2, SEQ, SEQ) & lower(3),
}


def built(make_mask: Callable[[Tensor], Tensor], dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Attention(make_mask, dropout)


def batch(ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 2, SEQ, 4), ids


def attentions(program: Program) -> list[Node]:
    return [node for node in program.graph if node.op in (SDPA, WINDOWED)]


def largest(program: Program) -> int:
    """Number of dimensions of a value that are as long as the sequence, at the most."""
    return max(node.spec.shape.count(SEQ) for node in program.graph)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_mask_of_documents_becomes_their_ids(kind: str) -> None:
    make_mask, window = KNOWN[kind]
    program = program_of(lambda: built(make_mask), batch())
    (node,) = attentions(program)
    assert node.op == WINDOWED
    assert node.args[3:] == (None, 0.0, True)
    assert node.kwargs.get("window", 0) == window
    assert program.graph.spec(node.inputs[3]).shape == (2, 1, 1, SEQ)
    assert largest(program) == 1
    for ids in (IDS, AGAIN, IDS.flip(-1), torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 0, 1]])):
        check_program(lambda: built(make_mask), batch(ids))


@pytest.mark.parametrize("kind", OTHERS)
def test_another_mask_stays(kind: str) -> None:
    (node,) = attentions(program_of(lambda: built(OTHERS[kind]), batch()))
    assert node.op == SDPA
    assert "documents" not in node.kwargs
    check_program(lambda: built(OTHERS[kind]), batch(AGAIN))


def test_ids_that_all_sequences_share_are_one_row() -> None:
    program = program_of(lambda: built(shared), batch())
    assert attentions(program)[0].op in (SDPA, WINDOWED)
    check_program(lambda: built(shared), batch(AGAIN))


def test_a_mask_beside_dropout_stays() -> None:
    program = program_of(lambda: built(KNOWN["counted"][0], 0.5), batch())
    assert not [node for node in program.graph if "documents" in node.kwargs]


TRIANGLES: dict[str, tuple[Callable[[], Tensor], int | None]] = {
    "lower": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), 0),
    "filled": (lambda: torch.full((SEQ, SEQ), True).tril(), 0),
    "window": (lambda: lower(2), 3),
    "window first": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).triu(-1).tril(), 2),
    "one later": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(1), None),
    "without itself": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(-1), None),
    "zeros": (lambda: torch.zeros(SEQ, SEQ, dtype=torch.bool).tril(), None),
    "not square": (lambda: torch.ones(1, SEQ, dtype=torch.bool).tril(), None),
    "upper": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).triu(), None),
    "upper, itself hidden": (lambda: torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1).tril(2), None),
}


@pytest.mark.parametrize("kind", TRIANGLES)
def test_triangles_too_large_to_evaluate_are_bands(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "LIMIT_ELEMENTS", SEQ - 1)
    triangle, window = TRIANGLES[kind]
    (node,) = attentions(program_of(lambda: built(lambda ids: same(ids) & triangle()), batch()))
    found = node.kwargs.get("window", 0) if "documents" in node.kwargs else None
    assert found == window


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "use_cache": False,
}


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_hugging_face_model_with_positions_has_documents(window: int, rows: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        if window:
            return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))
        return LlamaForCausalLM(LlamaConfig(**SIZES))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
            return self.model(tokens, labels=tokens, position_ids=positions).loss

    tokens = torch.randint(32, (rows, 12))
    positions = torch.arange(12).expand(rows, 12).contiguous()
    program = program_of(Loss, (tokens, positions))
    found = attentions(program)
    assert [node.kwargs.get("window", 0) for node in found] == [window] * 2
    assert len({node.kwargs["documents"] for node in found}) == 1
    assert all(node.spec.shape.count(12) < 2 for node in program.graph)
