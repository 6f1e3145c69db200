"""Ops of autocast's float32 list, against torch's own registrations and against float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.interpret import run, run_nodes
from autoparallel.planner.ops.catalog import SPECS

PROMOTED = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
}
"""What torch computes in the widest of its inputs."""
PARTS = {"cross_entropy_loss", "nll_loss_nd", "square", "linalg_norm"}
"""What torch casts where its parts are called."""
OTHERS = {
    "ctc_loss",
    "_safe_softmax",
    "_softmax",
    "native_group_norm",
    "gru",
    "lstm",
    "rnn_relu",
    "rnn_tanh",
}
"""Composites whose parts torch casts, and what softmax and norms become."""
NEWER = {"linalg_matrix_sqrth", "rms_norm"}
"""Not in the lists of the oldest torch that is supported."""
CUDNN = {"_cudnn_rnn"}
"""Kernels of which only a torch built with CUDA casts the inputs; no capture has them."""


class Net(nn.Module):
    """A hand-written norm in the middle, and a loss of ``num_classes`` at the end."""

    def __init__(self, num_classes: int = 11) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, num_classes)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.norm(functional.gelu(self.up(x)))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        weights = torch.softmax(h, -1)
        h = h / h.norm() + torch.cat([weights[:, :4], h[:, 4:]], 1)
        return functional.cross_entropy(self.head(h), target) + 0.1 * weights.sum()


def batch(rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=generator)
    return {"x": x, "target": torch.randint(0, 11, (rows,), generator=generator)}


def captured(dtype: str, autocast: bool = True):
    return capture(record_build(Net).model, batch(), dtype=dtype, autocast=autocast).graph


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    return {**dict(model.named_parameters()), **batch(), "x": batch()["x"].to(dtype)}


def test_the_lists_are_those_of_torch():
    registered = set()
    for schema in torch._C._jit_get_all_schemas():
        kind = schema.name.removeprefix("aten::")
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            found = torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
        except RuntimeError:
            continue
        if found and schema.name.startswith("aten::"):
            registered.add(kind)
    listed = {spec.name for spec in SPECS if spec.autocast != "as inputs"}
    ours = listed | PROMOTED | {"sum"}
    assert ours - PARTS - OTHERS - NEWER <= registered
    assert registered <= ours | CUDNN


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_graph_says_the_formats_that_its_ops_compute_in(dtype):
    graph = captured(dtype)
    names = [node.name for node in graph if node.kind == "op"]
    found = run_nodes(graph, graph.nodes, values(getattr(torch, dtype)), keep=names)
    for name in names:
        given = tuple(str(each.dtype).removeprefix("torch.") for each in found[name])
        assert given == tuple(spec.dtype for spec in graph[name].outputs), name


def test_the_graph_is_the_same_in_every_precision():
    prints = {captured(dtype).fingerprint for dtype in ("bfloat16", "float16", "float64")}
    assert prints == {captured("float32").fingerprint}
    assert captured("bfloat16", autocast=False).fingerprint not in prints


def test_products_stay_in_half_precision_and_losses_leave_it():
    ops = {node.op: node for node in captured("bfloat16") if node.kind == "op"}
    assert ops["aten.linear.default"].spec.dtype == "bfloat16"
    assert ops["aten.layer_norm.default"].spec.dtype == "bfloat16"
    assert ops["aten.pow.Tensor_Scalar"].spec.dtype == "float32"
    assert ops["aten.cross_entropy_loss.default"].spec.dtype == "float32"
    assert "aten.to.dtype" not in {node.op for node in captured("bfloat16", autocast=False)}


def test_a_loss_of_many_classes_has_the_gradient_of_a_float32_loss():
    """32,000 classes: in bfloat16 alone the off-target gradients are an order less exact."""
    rows, classes = 16, 32_000

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.empty(rows, classes))

        def forward(self, target: Tensor) -> Tensor:
            return functional.cross_entropy(self.logits, target)

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).bfloat16()
    target = torch.randint(0, classes, (rows,), generator=generator)
    others = torch.ones(rows, classes, dtype=torch.bool)
    others[torch.arange(rows), target] = False

    def gradient(x: Tensor, dtype: str, autocast: bool) -> Tensor:
        x = x.clone().requires_grad_()
        model = record_build(Loss).model
        graph = capture(model, {"target": target}, dtype=dtype, autocast=autocast).graph
        run(graph, {"logits": x, "target": target}).backward()
        assert x.grad is not None
        return x.grad.double()[others]

    exact = gradient(logits.double(), "float64", False)
    error = {
        casts: float((gradient(logits, "bfloat16", casts) - exact).norm() / exact.norm())
        for casts in (True, False)
    }
    assert error[True] < 2.5e-3
    assert error[False] > 4 * error[True]


@pytest.mark.parametrize("kernel", ["softmax", "layer_norm", "rms_norm"])
def test_a_kernel_that_computes_in_float32_inside_differs_by_its_rounding_only(kernel):
    calls = {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: functional.layer_norm(x, (512,)),
        "rms_norm": lambda x: functional.rms_norm(x, (512,)),
    }
    torch.manual_seed(0)
    x, out = torch.randn(64, 512).bfloat16(), torch.randn(64, 512).bfloat16()

    def run_in(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        own = x.clone().requires_grad_()
        result = calls[kernel](own.to(dtype)).to(torch.bfloat16)
        result.backward(out)
        assert own.grad is not None
        return result.double(), own.grad.double()

    for inside, best in zip(run_in(torch.bfloat16), run_in(torch.float32), strict=True):
        assert float((inside - best).detach().norm() / best.detach().norm()) < 2**-8
