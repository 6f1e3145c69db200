import torch
from capture_models import hf_batch, small_llama
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.capture.modes import promote_to_float64
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.batch import InputPlace
from autoparallel.passes.programs.constants import evaluate


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
