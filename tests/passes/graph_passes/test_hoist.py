import torch
from capture_models import hf_batch, small_llama
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.batch import InputPlace
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.tracing.modes import promote_to_float64


def test_rotary_tables_are_constants_with_the_models_own_values():
    program = capture(record_build(small_llama).model, hf_batch(), dtype="float64")
    tables = {n.name: n for n in program.graph if n.op in ("aten.cos.default", "aten.sin.default")}
    assert {node.kind for node in tables.values()} == {"constant"}
    model = plain_build(small_llama, 0).double()
    buffers = {name: dict(model.named_buffers())[name] for name in program.buffers}
    values = evaluate(program, tables, buffers=buffers)
    with promote_to_float64():
        position = torch.arange(12)[None]
        cos, sin = model.model.rotary_emb(torch.empty(1, dtype=torch.float64), position)
    by_op = {tables[name].op: value for name, value in values.items()}
    assert torch.equal(by_op["aten.cos.default"], cos)
    assert torch.equal(by_op["aten.sin.default"], sin)


def test_random_ops_are_no_constants():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            gate = nn.functional.dropout(torch.ones(4), 0.5, training=True)
            return (self.linear(x) * gate * torch.rand(4)).sum()

    graph = capture(record_build(Noisy).model, (torch.randn(2, 4),)).graph
    kinds = {node.op: node.kind for node in graph}
    assert kinds["autoparallel.counter_dropout.default"] == "op"
    assert kinds["autoparallel.counter_uniform.default"] == "op"
    assert kinds["aten.ones.default"] == "constant"


def test_each_output_of_a_constant_is_a_constant():
    """A recommender takes the products of all pairs of features, those below the diagonal."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            rows, columns = torch.tril_indices(3, 3, -1)
            largest, at = torch.tensor([0.5, 2.0, 1.0]).max(0)
            products = (y[:, :, None] * y[:, None])[:, rows, columns]
            return products.mean() * largest + y.index_select(1, at.view(1)).mean()

    program = capture(record_build(Pairs).model, (torch.randn(2, 4),))
    graph = program.graph
    read = {ref for node in graph if node.kind == "op" for ref in node.inputs}
    constants = {ref for ref in read if graph[ref.name].kind == "constant"}
    assert len(constants) >= 4
    assert {ref.index for ref in constants} == {0}
    values = evaluate(program, [ref.name for ref in constants])
    found = sorted(value.tolist() for value in values.values() if value.dim() == 1)
    assert found == [[0, 0, 1], [1], [1, 2, 2]]
    assert [value.item() for value in values.values() if value.dim() == 0] == [2.0]


def test_what_the_loss_does_not_need_is_dropped():
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            y = self.linear(x)
            y.exp()
            (y + unused).sum()
            return y.sum()

    program = capture(record_build(Chatty).model, (torch.randn(2, 4), torch.randn(2, 4)))
    assert [n.op for n in program.graph if n.kind == "op"] == [
        "aten.linear.default",
        "aten.sum.default",
    ]
    assert program.inputs == {"input_0": InputPlace((0,))}


def test_constants_that_are_made_alike_are_held_once():
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for power in (1, 1, 2):
                table = torch.arange(4.0).mul(power).cos()
                x = self.linear(x) * table + torch.zeros_like(x) + torch.zeros(2)[:1]
            return x.sum()

    program = capture(record_build(Tables).model, (torch.ones(2, 4),))
    made = [node.op for node in program.graph if node.kind == "constant"]
    assert made.count("aten.cos.default") == 2
    assert made.count("aten.zeros.default") == 1
    names = [node.name for node in program.graph if node.op == "aten.cos.default"]
    powers = [value.acos()[1].item() for value in evaluate(program, names).values()]
    torch.testing.assert_close(powers, [1.0, 2.0])
