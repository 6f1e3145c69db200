import pytest
import torch
from capture_models import hf_batch, small_llama
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.graph_passes.masks import SDPA, WINDOWED
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.planner.graph.graph import Node


class Attention(nn.Module):
    """Attention over (batch, 2, 6, 4) under a mask that ``make_mask(batch, seq)`` makes."""

    def __init__(self, make_mask) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.make_mask = make_mask

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        mask = self.make_mask(x.shape[0], x.shape[2])
        y = functional.scaled_dot_product_attention(q, q, q, mask)
        return (y * y).sum()


def attention(make_mask, rows: int = 2) -> tuple[Node, object]:
    model = record_build(lambda: Attention(make_mask)).model
    program = capture(model, (torch.randn(rows, 2, 6, 4),))
    return next(node for node in program.graph if node.op in (SDPA, WINDOWED)), program


def causal_bool(rows: int, seq: int) -> Tensor:
    return torch.ones(rows, 1, seq, seq, dtype=torch.bool).tril()


def causal_added(low: float):
    def make(rows: int, seq: int) -> Tensor:
        mask = torch.full((seq, seq), low).triu(1)
        return mask[None, None].expand(rows, 1, seq, seq)

    return make


@pytest.mark.parametrize(
    "make_mask",
    [causal_bool, causal_added(float("-inf")), causal_added(torch.finfo(torch.float32).min)],
)
def test_a_causal_mask_becomes_the_causal_flag_and_leaves_no_constant(make_mask):
    node, program = attention(make_mask)
    assert node.args[3:] == (None, 0.0, True)
    assert not [n for n in program.graph if n.kind == "constant"]


@pytest.mark.parametrize(
    "make_mask",
    [
        lambda rows, seq: torch.ones(rows, 1, seq, seq, dtype=torch.bool),
        lambda rows, seq: torch.zeros(seq, seq),
    ],
)
def test_a_mask_that_hides_nothing_is_dropped(make_mask):
    node, _ = attention(make_mask)
    assert node.args[3:] == (None, 0.0, False)


def sliding(rows: int, seq: int, before: int = 3) -> Tensor:
    return causal_bool(rows, seq) & torch.ones(seq, seq, dtype=torch.bool).triu(-before)


def narrow(rows: int, seq: int) -> Tensor:
    return sliding(rows, seq, 2)


def added(rows: int, seq: int) -> Tensor:
    return torch.where(narrow(rows, seq), 0.0, float("-inf"))


@pytest.mark.parametrize("make_mask", [narrow, added])
def test_a_mask_that_lets_see_half_of_the_positions_becomes_a_window(make_mask):
    node, program = attention(make_mask)
    assert (node.args[3:], node.kwargs["window"]) == ((None, 0.0, True), 3)
    assert not [n for n in program.graph if n.kind == "constant"]


def test_another_mask_stays_as_one_row_that_all_sequences_share():
    node, program = attention(sliding)
    mask = program.graph[node.args[3].name]
    assert mask.kind == "constant"
    assert mask.spec.shape == (1, 1, 6, 6)
    value = evaluate(program, [mask.name])[mask.name]
    assert torch.equal(value, sliding(1, 6))


def test_a_mask_that_differs_between_sequences_keeps_its_rows():
    def lengths(rows: int, seq: int) -> Tensor:
        return (torch.arange(seq) <= torch.arange(rows)[:, None])[:, None, None, :]

    node, program = attention(lengths)
    assert program.graph[node.args[3].name].spec.shape == (2, 1, 1, 6)


def test_an_upside_down_or_shifted_causal_mask_is_not_taken_for_causal():
    for shift in (-1, 1):
        node, _ = attention(lambda rows, seq, shift=shift: causal_bool(rows, seq).roll(shift, -1))
        assert node.args[3] is not None


def test_masks_of_a_hugging_face_llama_become_the_causal_flag():
    program = capture(record_build(small_llama).model, hf_batch())
    flags = [node.args[3:6] for node in program.graph if node.op == SDPA]
    assert flags == [(None, 0.0, True)] * 2
    constants = [node for node in program.graph if node.kind == "constant"]
    assert all(2 not in node.spec.shape for node in constants)


def test_a_model_with_simplified_masks_computes_what_it_did():
    x = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    for make_mask in (causal_bool, causal_added(float("-inf")), sliding, narrow):
        model = Attention(make_mask).double()
        program = capture(model, (x,), dtype="float64")
        loss = run(program.graph, {"input_0": x, **dict(model.named_parameters())})
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        expected = model(x)
        torch.set_default_dtype(default)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_a_constant_with_equal_rows_follows_the_batch_size():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.linear(x), torch.ones_like(x)], dim=1).sum()

    program = capture(record_build(Added).model, (torch.randn(2, 4),))
    name = next(node.name for node in program.graph if node.kind == "constant")
    assert program.graph.batch_dims
    larger = program.with_batch_size(6)
    assert torch.equal(evaluate(larger, [name])[name], torch.ones(6, 4))
