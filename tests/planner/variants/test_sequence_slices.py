"""Slices of sequences in one process: the slices' losses add up, and so do their gradients.

Each slice's graph runs as it is, keys and values handed on, on one rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention import Layer
from stage_simulation import plan_of
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.localize import reference_layouts
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run, run_nodes
from autoparallel.passes.programs.program import Program
from autoparallel.planner.dims.sequence_places import SeqDim, find_places
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.variants.sequence_slices import sequence_slice, slice_bounds

ROWS, SEQ, WIDTH, WORDS = 2, 8, 8, 11


class Model(nn.Module):
    """The loss: ``summed`` over rows, its mean, or that of the next word by a shift."""

    def __init__(self, loss: str = "mean", causal: bool = True, mixer: nn.Module | None = None):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList([Layer(WIDTH, causal), Layer(WIDTH, causal)])
        self.head, self.loss, self.mixer = nn.Linear(WIDTH, WORDS), loss, mixer

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        if self.mixer is not None:
            x = x + self.mixer(x)
        scores = self.head(x)
        if self.loss == "shifted":
            scores, labels = scores[:, :-1], labels[:, 1:]
        if self.loss == "square":
            return scores.square().mean()
        if self.loss == "max":
            return scores.max()
        reduction = "sum" if self.loss == "sum" else "mean"
        return nn.functional.cross_entropy(
            scores.reshape(-1, WORDS), labels.reshape(-1), reduction=reduction
        )


class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Noise(nn.Module):
    """Scales each element by a random number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class DroppedAttention(nn.Module):
    """Causal attention that drops weights, and that is therefore written out."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(
            heads, heads * 2, heads.sin(), is_causal=True, dropout_p=0.3
        )
        return y.transpose(1, 2).reshape(x.shape)


class MergedDropout(nn.Module):
    """Dropout of rows and positions merged into one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.flatten(0, 1)).view(x.shape)


def captured(**settings: object) -> Program:
    with torch.device("meta"):
        model = Model(**settings)  # type: ignore[arg-type]
    batch = {
        name: torch.empty(ROWS, SEQ, dtype=torch.int64, device="meta")
        for name in ("words", "labels")
    }
    return replace(capture(model, batch, dtype="float64"), model=nn.Module())


def leaves_of(program: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    graph = program.graph
    values = {
        node.name: torch.randn(node.spec.shape, dtype=torch.float64).requires_grad_()
        for node in graph.parameters
    }
    values |= {node.name: torch.randint(0, WORDS, node.spec.shape) for node in graph.inputs}
    constants = evaluate(program, [node.name for node in graph if node.kind == "constant"])
    return {**values, **constants, **program.literals}


@pytest.mark.parametrize(
    "slices",
    [(3, 1, 2, 2), *(pytest.param(each, marks=pytest.mark.slow) for each in ((8,), (4, 4)))],
)
@pytest.mark.parametrize("loss", ["mean", "sum", "shifted", "square"])
def test_the_slices_of_a_sequence_add_up_to_its_loss_and_gradients(
    loss: str, slices: tuple[int, ...]
) -> None:
    check_slices(captured(loss=loss), slices, loss)


def check_slices(
    program: Program, slices: tuple[int, ...], loss: str = "sum", attentions: int = 2
) -> None:
    """The slices' losses and gradients add up to those of the whole sequences."""
    graph, values = program.graph, leaves_of(program)
    whole = run(graph, values)
    weights = [node.name for node in graph.parameters]
    expected = torch.autograd.grad(whole, [values[name] for name in weights], allow_unused=True)
    layouts = reference_layouts(graph, 1)
    plan = plan_of(program.blocks, [], [Mesh(("dp",), (1,))], [layouts])
    places = find_places(graph)
    total, state = torch.zeros((), dtype=torch.float64), dict[str, Tensor]()
    for bounds in slice_bounds(slices):
        part = sequence_slice(graph, program.blocks, plan, places, bounds)
        carried = part.carried[0] if part.carried else ()
        assert len(carried) == 2 * attentions, "keys and values of each"
        given = {each.earlier: state[each.made] for each in carried if bounds[0]}
        keep = (part.graph.loss.name, *(each.made for each in carried))
        made = run_nodes(part.graph, part.graph.nodes, {**values, **given}, keep=keep)
        state = {each.made: made[each.made][0] for each in carried}
        share = made[part.graph.loss.name][0]
        if loss in ("mean", "shifted"):
            first, last = (min(at, SEQ - (loss == "shifted")) for at in bounds)
            share = share * (last - first) / (SEQ - (loss == "shifted")) if last > first else 0.0
        total = total + share
    assert torch.allclose(total, whole, rtol=1e-12)
    found = torch.autograd.grad(total, [values[name] for name in weights], allow_unused=True)
    for name, wanted, own in zip(weights, expected, found, strict=True):
        assert wanted is not None
        assert torch.allclose(own, wanted, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("slices", [(4, 4), (3, 1, 2, 2)])
def test_slices_draw_the_random_numbers_of_the_whole_sequence(slices: tuple[int, ...]) -> None:
    mixer = nn.Sequential(nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH), Noise())
    program = captured(loss="sum", mixer=mixer)
    assert sum(node.op.startswith("autoparallel.counter") for node in program.graph) == 2
    check_slices(program, slices)


@pytest.mark.parametrize("slices", [(8,), (4, 4), (3, 1, 2, 2)])
def test_attention_that_drops_weights_is_sliced_like_other_attention(
    slices: tuple[int, ...],
) -> None:
    program = captured(mixer=DroppedAttention())
    assert any(node.op.startswith("autoparallel.counter") for node in program.graph)
    check_slices(program, slices, "mean", attentions=3)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mixer": MergedDropout()}, "rows and positions in one dimension"),
        ({"causal": False}, "positions see later ones"),
        ({"mixer": Cumulative()}, "depends on others"),
        ({"loss": "max"}, "which of its dimensions counts positions is not known"),
    ],
)
def test_a_model_that_slices_would_change_is_refused_by_the_name_of_the_op(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(PlanError, match="AP548") as raised:
        find_places(captured(**settings).graph)
    assert why in str(raised.value)
    assert "aten." in str(raised.value) or "counter_dropout" in str(raised.value)


def test_merged_dimensions_keep_their_positions() -> None:
    places = find_places(captured(loss="mean").graph)
    assert places.length == SEQ
    assert SeqDim(0, outer=ROWS, count=SEQ) in places.cut.values(), "labels of all rows in one"


class Unused(nn.Module):
    """Concatenates to nothing, as an empty cache of keys does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x], dim=-2)


def test_a_concatenation_with_nothing_keeps_positions() -> None:
    places = find_places(captured(mixer=Unused()).graph)
    assert places.length == SEQ
    assert len(places.attention) == 2
