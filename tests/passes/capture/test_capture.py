from pathlib import Path

import pytest
import torch
from capture_models import gpt_batch, hf_batch, small_gpt, small_gpt2, small_llama
from commands import run_python
from marks import slow
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.capture.repeats import find_tied
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.batch import InputPlace
from autoparallel.passes.programs.interpret import LITERAL, run
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.call_trace import tracing_calls
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import CaptureError

BUILDS = {
    "gpt": (small_gpt, gpt_batch),
    "gpt-tied": (lambda: small_gpt(tied=True), gpt_batch),
    "llama": (small_llama, hf_batch),
    "llama-tied": (lambda: small_llama(tie_word_embeddings=True), hf_batch),
    "gpt2": (small_gpt2, hf_batch),
}


def loss_and_gradients(program: Program, model: nn.Module, batch: dict[str, Tensor]):
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {
        name: value.detach().clone().requires_grad_(isinstance(value, nn.Parameter))
        for name, value in values.items()
    }
    given = {node.name: values[node.name] for node in program.graph if node.name in values}
    inputs = {name: place.read(batch) for name, place in program.inputs.items()}
    loss = run(program.graph, {**given, **inputs})
    loss.backward()
    return loss, {node.name: values[node.name].grad for node in program.graph.parameters}


@pytest.mark.parametrize("name", ["gpt", "gpt-tied", "llama", slow("llama-tied"), "gpt2"])
def test_a_captured_graph_computes_the_models_loss_and_every_gradient(name):
    build, make_batch = BUILDS[name]
    batch = make_batch()
    program = capture(record_build(build).model, batch, dtype="float64")
    model = plain_build(build, seed=1).double()
    with promote_to_float64():
        output = model(**batch)
    expected = output if isinstance(output, Tensor) else output.loss
    expected.backward()
    loss, gradients = loss_and_gradients(program, model, batch)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_graph_rescaled_to_another_batch_computes_that_batchs_loss(name):
    build, make_batch = BUILDS[name]
    program = capture(record_build(build).model, make_batch(), dtype="float64")
    assert program.graph.batch_dims
    larger = program.with_batch_size(6)
    batch = make_batch(6)
    model = plain_build(build, seed=1).double()
    with promote_to_float64():
        output = model(**batch)
    expected = output if isinstance(output, Tensor) else output.loss
    loss, _ = loss_and_gradients(larger, model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("build", [slow(small_gpt), small_llama])
def test_the_fingerprint_does_not_depend_on_the_dtype(build):
    batch = gpt_batch() if build is small_gpt else hf_batch()
    model = record_build(build).model
    prints = {
        capture(model, batch, dtype=dtype).graph.fingerprint
        for dtype in ("float32", "bfloat16", "float64")
    }
    assert len(prints) == 1


def test_tensors_that_the_code_holds_leave_the_graph_the_same_in_every_dtype():
    """In float64 they are float64 constants. Neither the cast nor a look at them is recorded."""
    weights, half = torch.tensor([0.5, 1.5]), torch.tensor([0.25, 3.0], dtype=torch.bfloat16)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.linear(x)
            scaled = (z * weights.to(z.dtype)).mean() + (z * half).mean() + (z * weights).sum()
            return nn.functional.cross_entropy(z, y, weight=weights) + scaled

    batch = {"x": torch.randn(2, 4), "y": torch.tensor([0, 1])}
    model = record_build(Weighted).model
    graphs = []
    for dtype in ("float32", "float64"):
        graphs.append(capture(model, batch, dtype=dtype).graph)
        with tracing_calls():
            graphs.append(capture(model, batch, dtype=dtype).graph)  # reads them
    assert len({graph.fingerprint for graph in graphs}) == 1
    held = [node.spec.dtype for node in graphs[2] if node.op == LITERAL]
    assert held == ["float64", "float64"]


def test_bfloat16_casts_parameters_and_keeps_what_the_model_asks_for_in_float32():
    graph = capture(record_build(small_llama).model, hf_batch(), dtype="bfloat16").graph
    assert {node.spec.dtype for node in graph.parameters} == {"bfloat16"}
    norms = {n.spec.dtype for n in graph if n.op == "aten.rsqrt.default"}
    assert norms == {"float32"}
    assert graph["model.rotary_emb.inv_freq"].spec.dtype == "float32"


def test_the_model_is_left_as_it_was():
    model = record_build(small_gpt).model
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    capture(model, gpt_batch(), dtype="float64")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_parts_of_one_storage_are_not_tied():
    """As of weights that were split off one tensor."""

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.zeros(2, 4)
            self.first, self.second = map(torch.nn.Parameter, both.unbind())
            self.again = self.first

    assert find_tied(Halves()) == {"again": "first"}


def test_a_tied_parameter_is_one_node_under_its_first_name():
    program = capture(record_build(lambda: small_gpt(tied=True)).model, gpt_batch())
    assert program.graph.tied == {"head.weight": "tokens.weight"}
    assert "head.weight" not in program.graph.by_name
    users = program.graph.users["tokens.weight"]
    assert {program.graph[user].op for user in users} == {
        "aten.embedding.default",
        "aten.linear.default",
    }


def test_nodes_say_which_module_and_which_line_of_the_users_file_made_them():
    graph = capture(record_build(small_gpt).model, gpt_batch()).graph
    up = next(n for n in graph if any(r.name == "layers.1.mlp.up.weight" for r in n.inputs))
    assert up.module == "layers.1.mlp.up"
    assert "examples/gpt.py:" in up.source


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.idle = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.idle(x)


def meta(build: type[nn.Module]) -> nn.Module:
    return record_build(build).model


def test_a_tuple_batch_and_a_loss_function_work_and_unused_parameters_are_named():
    program = capture(
        meta(Plain), (torch.randn(2, 4),), loss_fn=lambda outputs, batch: outputs[0].sum()
    )
    assert program.inputs == {"input_0": InputPlace((0,))}
    assert program.unused == ("idle.weight", "idle.bias")


def test_a_model_without_a_loss_is_told_what_to_add():
    with pytest.raises(CaptureError, match="no loss") as caught:
        capture(meta(Plain), (torch.randn(2, 4),))
    assert caught.value.code == "AP203"
    assert "loss_fn" in caught.value.fix


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(CaptureError, match=r"shape \(2, 3\)") as caught:
        capture(meta(Plain), (torch.randn(2, 4),), loss_fn=lambda outputs, batch: outputs[0])
    assert caught.value.code == "AP204"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Branch()])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x).sum()


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that the error names
            return y
        return -y


def test_control_flow_on_values_names_the_users_line_and_module():
    with pytest.raises(CaptureError) as caught:
        capture(meta(Branching), (torch.randn(2, 4),))
    assert caught.value.code == "AP202"
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "the line that the error" in text)
    assert caught.value.where == f"{__file__}:{line} in module 'inner.0'"
    assert "torch.where" in caught.value.fix
    assert caught.value.exit_code == 3


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()  # shapes do not match here


def test_an_error_of_the_models_own_names_its_line():
    with pytest.raises(CaptureError) as caught:
        capture(meta(Wrong), (torch.randn(2, 4),))
    assert caught.value.code == "AP201"
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "shapes do not match" in text)
    assert caught.value.where.startswith(f"{__file__}:{line}")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x))).mean((2, 3))
        scale = torch.ones(4, device=x.device)
        scale[1:] = 2.0
        z = y.clone()
        z[:, 0] = 0
        return (z * scale * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()


def test_writes_in_place_and_tensors_of_numbers_are_captured_with_their_meaning():
    x = torch.randn(2, 3, 8, 8)
    program = capture(meta(InPlace), (x,), dtype="float64")
    model, reference = (plain_build(InPlace, 0).double() for _ in range(2))
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {n.name: values[n.name] for n in program.graph if n.kind in ("parameter", "buffer")}
    loss = run(program.graph, {**held, "input_0": x.double()})
    with promote_to_float64():
        expected = reference(x.double())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_a_relu_in_place_becomes_a_relu():
    class Relu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.linear(x), inplace=True).sum()

    graph = capture(meta(Relu), (torch.randn(2, 4),)).graph
    assert [n.op for n in graph if n.kind == "op"] == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.sum.default",
    ]


def test_capturing_allocates_no_weights(tmp_path):
    """A model of 40 GB of parameters is captured in well under 1 GB of new memory."""
    code = """
import resource, torch
from torch import nn
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import record_build
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(50000, 50000) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
program = capture(record_build(Wide).model, (torch.empty(2, 50000, device="meta"),))
assert sum(node.spec.num_bytes for node in program.graph.parameters) > 40e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    (tmp_path / "wide.py").write_text(code)
    done = run_python(str(tmp_path / "wide.py"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 400_000


class Positions(nn.Module):
    """Sin-cos positions of integers, whose floats have torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places, channels = torch.arange(x.shape[1]), torch.arange(4)
        angles = places[:, None] * (1e4 ** (-channels / 4))
        angles = angles + torch.where(places > 1, 0.1, 0.3)[:, None]
        turned = torch.where(channels > 1, channels, 0.7) + torch.exp(channels * 0.3j).real
        scale = (x.detach() > 0).sum(-1, keepdim=True) / 3
        return (self.linear(x * scale) + torch.cat([angles.sin(), turned * angles.cos()], -1)).sum()


@pytest.mark.parametrize("rows", [2, 4])
def test_floats_made_of_integers_have_the_dtype_of_the_capture_not_the_default(rows: int) -> None:
    x = torch.randn(rows, 3, 8, dtype=torch.float64)
    program = capture(meta(Positions), (x[:2],), dtype="float64").with_batch_size(rows)
    model = plain_build(Positions, 0).double()
    with promote_to_float64():
        expected = model(x)
    loss = run(program.graph, {**dict(model.named_parameters()), "input_0": x})
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)


def test_a_graph_of_integers_made_floats_is_the_same_in_every_dtype() -> None:
    x = torch.randn(2, 3, 8)
    graphs = [capture(meta(Positions), (x,), dtype=dtype).graph for dtype in ("float32", "float64")]
    assert len({graph.fingerprint for graph in graphs}) == 1


class NamesDevices(nn.Module):
    """A forward of a script for one GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.arange(4.0, device="cuda").cuda(0)
        y = self.linear(x.cuda()) * weights + torch.zeros(4, device=torch.device("cuda", 0))
        return (y * x.new_ones(4, device="cuda")).to("cuda").mean()


def test_devices_that_a_forward_names_are_ignored() -> None:
    with torch.device("meta"):
        model = NamesDevices()
    graph = capture(model, {"x": torch.randn(2, 4)}).graph
    assert not any(
        "device" in str(value) and "cuda" in str(value)
        for node in graph
        for value in (node.args, node.kwargs)
    )
    assert graph.spec(graph.loss).shape == ()


class Scaled(nn.Module):
    """Computes with a buffer of one number; ``form`` says how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 3), form
        self.register_buffer("number", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        match self.form:
            case "item":
                return (y * self.number.item()).mean()
            case "index":
                return y[:, self.number].mean()
            case "tensor":
                return (y * self.number).mean()
        return y.index_select(1, self.number.view(1)).squeeze(1).mean()


@pytest.mark.parametrize(("form", "other"), [("item", "tensor"), ("index", "selected")])
def test_a_number_that_is_read_from_a_buffer_is_refused_with_what_to_write(form, other):
    with pytest.raises(CaptureError, match="a number that is read from a tensor"):
        capture(record_build(lambda: Scaled(form)).model, (torch.randn(2, 4),))
    program = capture(record_build(lambda: Scaled(other)).model, (torch.randn(2, 4),))
    model, x = plain_build(lambda: Scaled(form), seed=0), torch.randn(2, 4)
    loss, _ = loss_and_gradients(program, plain_build(lambda: Scaled(other), seed=0), (x,))
    torch.testing.assert_close(loss, model(x))
