"""Experts as one op: what it computes, how transformers' experts become it, how it is split."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_models import hf_batch
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.local.simulated import ThreadCommunicator, run_ranks
from autoparallel.passes.ops.activation import activate, describe
from autoparallel.passes.ops.experts import (
    Sending,
    Slices,
    run_experts,
    sent_experts,
    split_experts,
)
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.hf_experts import capturable_experts
from autoparallel.planner.graph.layout import REPLICATE, SLICED, Mesh, shard
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.ops.experts import column_order, sent_strategies

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "intermediate_size": 24,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


UNKNOWN = '[["functional.softmax", [{"at": 0}, -1], {}]]'


def gated(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2], rows[..., 1::2]
    return (up.clamp(min=-1.0, max=1.0) + 1) * gate * torch.sigmoid(1.7 * gate)


def test_a_function_survives_being_written_down() -> None:
    text = describe(nn.Module(), gated)
    assert text is not None
    rows = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(activate(text, rows), gated(rows))


def test_a_function_that_looks_at_values_or_calls_others_code_has_no_text() -> None:
    assert describe(nn.Module(), lambda x: x if x.sum() > 0 else -x) is None
    linear = nn.Linear(4, 4)
    assert describe(linear, linear.forward) is None


@pytest.mark.parametrize("first", [0, 2])
def test_the_experts_from_some_one_on_add_their_share(first: int) -> None:
    """Against the formula, token by token; parts of the experts add up to all."""
    torch.manual_seed(0)
    x, scores = torch.randn(7, 4).double(), torch.rand(7, 2).double()
    ids = torch.rand(7, 4).argsort(-1)[:, :2]
    up, down = torch.randn(4, 6, 4).double(), torch.randn(4, 4, 6).double()
    up_bias, down_bias = torch.randn(4, 6).double(), torch.randn(4, 4).double()
    text = describe(nn.Module(), torch.relu)
    assert text is not None
    expected = torch.zeros(7, 4).double()
    for token in range(7):
        for place in range(2):
            expert = int(ids[token, place])
            if first <= expert < first + 2:
                hidden = torch.relu(up[expert] @ x[token] + up_bias[expert])
                result = down[expert] @ hidden + down_bias[expert]
                expected[token] += scores[token, place] * result
    part = slice(first, first + 2)
    weights = (up[part], down[part], up_bias[part], down_bias[part])
    found = run_experts(x, ids, scores, *weights, activation=text, transposed=False, first=first)
    torch.testing.assert_close(found, expected)


def test_the_experts_of_ranks_on_two_axes_add_up_to_all() -> None:
    """Of 2 x 2 ranks each has two of eight experts, in the order of their coordinates."""
    torch.manual_seed(0)
    x, scores = torch.randn(7, 4).double(), torch.rand(7, 2).double()
    ids = torch.rand(7, 8).argsort(-1)[:, :2]
    up, down = torch.randn(8, 6, 4).double(), torch.randn(8, 4, 6).double()
    options = {"activation": describe(nn.Module(), torch.relu), "transposed": False}
    total = torch.zeros(7, 4).double()
    for number, place in enumerate(product(range(2), range(2))):
        own = SimpleNamespace(size=lambda axis: 2, coordinate=lambda axis, at=place: at[axis])
        part = slice(2 * number, 2 * number + 2)
        rank: Any = SimpleNamespace(communicator=own)
        total += split_experts(rank, x, ids, scores, up[part], down[part], axes=(0, 1), **options)
    torch.testing.assert_close(total, run_experts(x, ids, scores, up, down, **options))


@pytest.mark.parametrize("sent", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("hit", [8, 1], ids=["all experts", "one expert"])
@pytest.mark.parametrize(("num_parts", "chosen"), [(1, 2), (2, 2), (2, 1)])
def test_tokens_are_sent_to_their_experts_and_back(
    sent: tuple[int, ...], hit: int, num_parts: int, chosen: int
) -> None:
    """On 2 x 2 ranks with two of eight experts each: values and gradients are those of one rank,
    where tokens are split; over the other axis the results add up. In parts, which one expert of
    all tokens has in turn, whatever their number."""
    torch.manual_seed(0)
    mesh, options = (
        Mesh(("dp", "tp"), (2, 2)),
        {
            "activation": describe(nn.Module(), torch.relu),
            "transposed": False,
        },
    )
    whole = [torch.randn(12, 4), torch.rand(12, chosen)]
    whole += [torch.randn(8, 6, 4), torch.randn(8, 4, 6)]
    x, scores, up, down = (each.double().requires_grad_() for each in whole)
    ids = torch.rand(12, hit).argsort(-1)[:, :chosen].expand(12, chosen)
    expected = run_experts(x, ids, scores, up, down, **options)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    def on_rank(communicator: ThreadCommunicator) -> tuple[Tensor, ...]:
        place = communicator.coordinates
        at = sum(place[axis] * (2 if sent == (0, 1) and axis == 0 else 1) for axis in sent)
        size = 12 // 2 ** len(sent)  # 3 or 6 tokens
        tokens = slice(size * at, size * (at + 1))
        number = 2 * place[0] + place[1]
        own = [each.detach()[tokens].requires_grad_() for each in (x, scores)]
        held = [each.detach()[2 * number : 2 * number + 2].requires_grad_() for each in (up, down)]
        rank: Any = SimpleNamespace(communicator=communicator)
        sending = Sending((0, 1), sent, num_parts=num_parts)
        how: Any = {"axes": (0, 1), "sending": sending}
        made = sent_experts(rank, own[0], ids[tokens], own[1], *held, **how, **options)
        made.backward(gradient[tokens])
        return made.detach(), *(each.grad for each in (*own, *held))

    found = run_ranks(mesh, on_rank)
    left = [axis for axis in (0, 1) if axis not in sent]
    for place, want in enumerate((expected.detach(), x.grad, scores.grad)):
        made = torch.stack([each[place] for each in found]).view(2, 2, -1, *want.shape[1:])
        made = made.sum(left) if left else made
        torch.testing.assert_close(made.reshape(want.shape), want)
    for place, want in enumerate((up.grad, down.grad), 3):
        torch.testing.assert_close(torch.cat([each[place] for each in found]), want)


def joined(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize(("function", "factor"), [(torch.relu, 1), (gated, 2), (joined, 2)])
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("gathers", [True, False], ids=["own tokens", "same tokens"])
@pytest.mark.parametrize("hit", [4, 1], ids=["all experts", "one expert"])
def test_ranks_with_slices_of_experts_compute_them_together(
    function: Any, factor: int, shape: tuple[int, int], gathers: bool, hit: int
) -> None:
    """Experts are spread over the first axis and split by width over the second. On this each rank
    has its own tokens, or all have the same and the results add up."""
    torch.manual_seed(0)
    ep, etp = shape
    width, inner, tokens = 4, 12, 12
    text = describe(nn.Module(), function)
    assert text is not None
    options = {"activation": text, "transposed": True}
    sizes = [(tokens, width), (tokens, 2), (4, width, factor * inner), (4, inner, width)]
    sizes += [(4, factor * inner), (4, width)]
    x, scores, *weights = (torch.randn(size).double().requires_grad_() for size in sizes)
    ids = torch.rand(tokens, hit).argsort(-1)[:, :2].expand(tokens, 2)
    expected = run_experts(x, ids, scores, *weights, **options)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    slices = Slices((1,), (1,) if gathers else (), column_order(text) == "halves")
    parts = ep * etp if gathers else ep

    def on_rank(communicator: ThreadCommunicator) -> tuple[Tensor, ...]:
        row, column = communicator.coordinates
        at = row * etp + column if gathers else row
        own = slice(tokens // parts * at, tokens // parts * (at + 1))
        given = [each.detach()[own].requires_grad_() for each in (x, scores)]
        held = []
        for weight, dim in zip(weights, (2, 1, 1, None), strict=True):
            part = weight.detach().chunk(ep)[row]
            part = part if dim is None else part.chunk(etp, dim)[column]
            held.append(part.contiguous().requires_grad_())
        rank: Any = SimpleNamespace(communicator=communicator)
        made = sent_experts(
            rank,
            given[0],
            ids[own],
            given[1],
            *held,
            axes=(0,),
            slices=slices,
            sending=Sending((0,), (0,) if ep > 1 else (), slices.gathered),
            **options,
        )
        made.backward(gradient[own])
        return made.detach(), *(each.grad for each in (*given, *held))

    found = run_ranks(Mesh(("ep", "tp"), shape), on_rank)
    for place, want in enumerate((expected.detach(), x.grad, scores.grad)):
        every = [each[place] for each in found]
        if not gathers:
            every = [sum(every[row : row + etp]) for row in range(0, len(every), etp)]
        torch.testing.assert_close(torch.cat(every), want)
    for place, (weight, dim) in enumerate(zip(weights, (2, 1, 1, None), strict=True), 3):
        rows = [[each[place] for each in found[at : at + etp]] for at in range(0, ep * etp, etp)]
        whole = [sum(row) if dim is None else torch.cat(row, dim) for row in rows]
        torch.testing.assert_close(torch.cat(whole), weight.grad)


@pytest.mark.parametrize(
    ("function", "order"),
    [
        (torch.relu, "same"),
        (lambda rows: torch.relu(rows).square() * 2 + rows, "same"),
        (gated, "pairs"),
        (joined, "halves"),
        (lambda rows: functional.glu(rows), None),
        (lambda rows: rows.chunk(2, dim=-1)[0] * rows.mean(), None),
        (lambda rows: rows.chunk(3, dim=-1)[0], None),
        (lambda rows: rows[..., ::3], None),
        (lambda rows: rows.flip(-1), None),
        (lambda rows: rows.chunk(2, dim=0)[0], None),
        (lambda rows: rows.softmax(-1), None),
        (lambda rows: rows.chunk(2, dim=-1)[0] * rows[..., ::2], None),
    ],
)
def test_columns_that_an_activation_reads_together_are_known(
    function: Any, order: str | None
) -> None:
    text = describe(nn.Module(), function)
    assert text is not None
    assert column_order(text) == order


PLACED = (
    (0, (0, 1, 3)),
    (1, (2,)),
    (5, (0,)),
    (7, (1, 3)),
)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("hit", [8, 2], ids=["all experts", "two experts"])
def test_placed_experts_are_computed_by_other_ranks(biased: bool, hit: int) -> None:
    """Of four ranks, two of which share an axis, each owns two of eight experts: expert 0 is
    computed by three ranks, 1 and 5 by others than their owner. Values and gradients, summed at
    the owner, are those of one rank, and an expert's tokens are divided evenly."""
    torch.manual_seed(0)
    mesh = Mesh(("dp", "tp"), (2, 2))
    options = {"activation": describe(nn.Module(), torch.relu), "transposed": False}
    shapes = [(24, 4), (24, 2), (8, 6, 4), (8, 4, 6), *([(8, 6), (8, 4)] if biased else [])]
    whole = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    x, scores, *weights = whole
    ids = torch.rand(24, hit).argsort(-1)[:, :2]
    expected = run_experts(x, ids, scores, *weights, **options)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)

    def on_rank(communicator: ThreadCommunicator) -> tuple[Any, ...]:
        number = 2 * communicator.coordinates[0] + communicator.coordinates[1]
        tokens, part = (slice(n * number, n * number + n) for n in (6, 2))
        own = [each.detach()[tokens].requires_grad_() for each in (x, scores)]
        held = [each.detach()[part].requires_grad_() for each in weights]
        rank: Any = SimpleNamespace(communicator=communicator)
        split: Any = {"axes": (0, 1), "sending": Sending((0, 1), (0, 1), placed=PLACED)}
        made = sent_experts(rank, own[0], ids[tokens], own[1], *held, **split, **options)
        made.backward(gradient[tokens])
        return made.detach(), *(each.grad for each in (*own, *held))

    found = run_ranks(mesh, on_rank)
    for place, want in enumerate((expected.detach(), *(each.grad for each in whole))):
        torch.testing.assert_close(torch.cat([each[place] for each in found]), want)


def program_of(name: str, **settings: Any) -> Program:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return capture(model, hf_batch(2, 8), dtype="float64")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}),
        ("GptOss", {"num_local_experts": 4, "head_dim": 8}),
    ],
)
def test_experts_of_transformers_are_captured_as_one_op(
    name: str, settings: dict[str, Any]
) -> None:
    graph = program_of(name, **settings).graph
    layers = [node for node in graph if node.op == "autoparallel.experts.default"]
    assert len(layers) == 2
    for node in layers:
        assert graph.batch_dims[node.name] == (0,)
        offered = {s.label: s for s in axis_strategies(node, graph, 2)}
        assert set(offered) == {"t0", "t1", "e", "R", "I"}  # rows, positions, experts
        assert str(offered["e"].inputs[3]) == "S(0)"
        assert str(offered["e"].outputs[0]) == "P"


@pytest.mark.parametrize(
    ("name", "settings", "dims"),
    [
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}, (1, 2)),
        ("GptOss", {"num_local_experts": 4, "head_dim": 8}, (2, 1, 1, None)),
    ],
)
def test_experts_are_split_along_their_inner_width(
    name: str, settings: dict[str, Any], dims: tuple[int | None, ...]
) -> None:
    """Also if it equals the width of tokens."""
    graph = program_of(name, **settings).graph
    node = next(node for node in graph if node.op == "autoparallel.experts.default")
    inputs = [graph.spec(ref) for ref in node.inputs]
    found = [each for each in sent_strategies(node, inputs, 2) if each.label == SLICED]
    assert [str(each.outputs[0]) for each in found] == ["S(0)", "S(1)", "P"]
    for strategy in found:
        assert strategy.inputs[3:] == tuple(
            REPLICATE if dim is None else shard(dim) for dim in dims
        )
    unknown = replace(node, kwargs={**node.kwargs, "activation": UNKNOWN})
    assert not any(each.label == SLICED for each in sent_strategies(unknown, inputs, 2))
    assert not any(each.label == SLICED for each in sent_strategies(node, inputs, 5))


@pytest.mark.parametrize("chosen", [1, 2])
def test_llama_4_computes_the_chosen_experts_alone(chosen: int) -> None:
    """As its own layer, which sends each token through all experts, most of them scaled to 0."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(
        hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=chosen
    )
    torch.manual_seed(0)
    layer = llama4.Llama4TextMoe(config).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = []
    for place in (nullcontext(), capturable_experts()):
        layer.zero_grad()
        with place:
            made, logits = layer(x)
        (made.square().sum() + logits.square().sum()).backward()
        found.append([made.detach(), *(each.grad for each in layer.parameters())])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)


def test_capture_leaves_transformers_as_it_was() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    before = moe.ExpertsInterface.get_interface
    program_of("Mixtral", num_local_experts=4)
    assert moe.ExpertsInterface.get_interface is before
