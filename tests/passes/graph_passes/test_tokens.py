"""Layers of experts, and the ops around them, compute on rows and positions apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.ops.activation import describe
from autoparallel.passes.ops.experts import experts
from autoparallel.passes.programs.interpret import run
from autoparallel.planner.graph.expert_dims import is_expert_layer
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.graph.layout import REPLICATE, shard
from autoparallel.planner.ops import axis_strategies

WIDTH, EXPERTS, CHOSEN, POSITIONS = 8, 6, 2, 4
Router = Callable[[Tensor], tuple[Tensor, Tensor]]
RELU = describe(nn.Module(), torch.relu)


def plain(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores, ids = logits.softmax(-1).topk(CHOSEN)
    return ids, scores / scores.sum(-1, keepdim=True)


def of_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Route within the best group of experts, as DeepSeek-V3 does."""
    scores = logits.sigmoid()
    best = scores.view(-1, 3, 2).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(scores), 3, dtype=scores.dtype).scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 3, 2).reshape(-1, EXPERTS)
    ids = scores.masked_fill(~mask.bool(), float("-inf")).topk(CHOSEN, dim=1)[1]
    return ids, scores.gather(1, ids) * 2.5


def balanced(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh each expert's tokens against each other, which no part of the tokens allows."""
    return plain(logits.log_softmax(0))


def noisy(logits: Tensor) -> tuple[Tensor, Tensor]:
    return plain(logits + nn.functional.dropout(torch.ones_like(logits), 0.5))


class Layer(nn.Module):
    """A layer of experts between a shared expert and a loss of the router's logits."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        logits = self.gate(tokens)
        ids, scores = self.router(logits)
        assert RELU is not None
        made = experts(
            tokens, ids, scores, self.up, self.down, activation=RELU, num_experts=EXPERTS
        )
        out = (made + self.shared(tokens).sigmoid()).view(x.shape)
        return (out * x).square().mean() + logits.logsumexp(-1).square().mean()


def captured(router: Router) -> tuple[Layer, Graph]:
    torch.manual_seed(0)
    model = Layer(router).double()
    batch = {"x": torch.randn(2, POSITIONS, WIDTH)}
    return model, capture(model, batch, dtype="float64").graph


@pytest.mark.parametrize(("router", "sizes"), [(plain, (2, 6)), (of_groups, (2,))])
def test_tokens_are_split_by_rows_and_by_positions(router: Router, sizes: tuple[int, ...]) -> None:
    model, graph = captured(router)
    (layer,) = filter(is_expert_layer, graph)
    shapes = [graph.spec(ref).shape for ref in layer.inputs[:3]]
    assert shapes == [(2, POSITIONS, size) for size in (WIDTH, CHOSEN, CHOSEN)]
    whole = (REPLICATE,) * (len(layer.inputs) - 3)
    for dim in (0, 1):
        split = ((shard(dim),) * 3 + whole, (shard(dim),))
        found = axis_strategies(layer, graph, 2)
        assert split in [(each.inputs, each.outputs) for each in found]
    for rows in sizes:
        x = torch.randn(rows, POSITIONS, WIDTH, dtype=torch.float64)
        values = {**dict(model.named_parameters()), "x": x}
        torch.testing.assert_close(run(graph.with_batch_size(rows), values), model(x))


def test_tokens_that_meet_stay_joined() -> None:
    """The scores are computed of all tokens at once, and the experts read them apart."""
    model, graph = captured(balanced)
    (met,) = (node for node in graph if "log_softmax" in node.op)
    assert met.spec.shape == (2 * POSITIONS, EXPERTS)
    (layer,) = filter(is_expert_layer, graph)
    assert graph.spec(layer.inputs[0]).shape == (2, POSITIONS, WIDTH)
    x = torch.randn(2, POSITIONS, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(run(graph, {**dict(model.named_parameters()), "x": x}), model(x))


def test_random_numbers_of_tokens_keep_their_places() -> None:
    _, graph = captured(noisy)
    (drawn,) = (node for node in graph if "dropout" in node.op)
    assert drawn.spec.shape == (2 * POSITIONS, EXPERTS)


def test_a_graph_without_experts_is_unchanged() -> None:
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(WIDTH, 1))
    batch = (torch.randn(2, POSITIONS, WIDTH),)
    graph = capture(model, batch, loss_fn=lambda out, _: out.mean()).graph
    assert any(node.spec.shape == (2 * POSITIONS, WIDTH) for node in graph if node.kind == "op")
