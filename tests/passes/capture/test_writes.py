"""Writes of a forward: to buffers they are kept, to parameters they are refused."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest
import torch
from capture_models import program_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run_nodes
from autoparallel.planner.errors import CaptureError

ROWS, WIDTH = 6, 5
Write = Callable[["Model", Tensor], "Tensor | None"]


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, WIDTH), write
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral_by_hook = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.instances = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.frozen_instances = nn.InstanceNorm1d(3, track_running_stats=True).eval()
        self.table = nn.Embedding(7, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        made = self.write(self, z)
        return ((z if made is None else made) + self.frozen(x) + self.mean).square().mean()


def buffer_data(model: Model, z: Tensor) -> None:
    model.mean.data.mul_(2)


def buffer_data_assigned(model: Model, z: Tensor) -> None:
    model.mean.data = model.mean.data * 0.5 + z.detach().mean(0)


def buffer_detached(model: Model, z: Tensor) -> None:
    model.mean.detach().add_(z.detach().mean(0))


def buffer_part(model: Model, z: Tensor) -> None:
    with torch.no_grad():
        model.mean[:2] = z.mean(0)[:2]
        model.mean[3].add_(1.0)


def slices(model: Model, z: Tensor) -> Tensor:
    made = z.new_empty(z.shape)
    made[..., :2] = z[..., 3:]
    made[..., 2:].copy_(z[..., :3] * 2)
    return made


def broadcast_slice(model: Model, z: Tensor) -> Tensor:
    made = torch.zeros(len(z), 2, WIDTH, dtype=z.dtype)
    made[:, 1] = model.layer.bias
    return made.sum(1) * z


def overwritten(model: Model, z: Tensor) -> None:
    model.last.copy_(z.detach().mean(0))


def spectral(model: Model, z: Tensor) -> Tensor:
    return model.spectral(z)


def spectral_by_hook(model: Model, z: Tensor) -> Tensor:
    return model.spectral_by_hook(z)


def instance_normalized(model: Model, z: Tensor) -> Tensor:
    return model.instances(z[:, None] * torch.arange(1.0, 4.0)[:, None])[:, 0]


def normalized_in_evaluation(model: Model, z: Tensor) -> Tensor:
    return model.frozen_instances(z[:, None].expand(-1, 3, -1))[:, 0]


BUFFERS = [
    instance_normalized,
    normalized_in_evaluation,
    overwritten,
    spectral,
    spectral_by_hook,
    buffer_data,
    buffer_data_assigned,
    buffer_detached,
    buffer_part,
    slices,
    broadcast_slice,
]


@pytest.mark.parametrize("write", BUFFERS)
def test_a_program_writes_what_the_model_writes(write: Write) -> None:
    torch.manual_seed(0)
    model = Model(write).double()
    x = torch.randn(ROWS, WIDTH).double()
    program = program_of(lambda: Model(write), (x,))
    graph = program.with_batch_size(ROWS).graph
    names = [node.name for node in graph if node.kind == "constant"]
    names_held = [node.name for node in graph if node.kind == "buffer"]
    held = {name: attrgetter(name)(model).detach().clone() for name in names_held}
    values = {**dict(model.named_parameters()), **held}
    values |= evaluate(program.with_batch_size(ROWS), names, buffers=held)
    values[next(iter(program.inputs))] = x
    keep = {graph.loss.name, *(ref.name for ref in graph.updates.values())}
    found = run_nodes(graph, graph.nodes, values, keep=keep)
    loss = found[graph.loss.name][0]
    expected = model(x)
    assert torch.allclose(loss, expected, rtol=1e-12)
    written = {name: found[ref.name][ref.index] for name, ref in graph.updates.items()}
    for name, value in held.items():
        after = attrgetter(name)(model).to(value.dtype)
        assert torch.allclose(written.get(name, value), after, rtol=1e-12), name
    own = torch.autograd.grad(loss, list(model.layer.parameters()))
    plain = torch.autograd.grad(expected, list(model.layer.parameters()))
    assert all(map(torch.allclose, own, plain))


def clamped(model: Model, z: Tensor) -> None:
    with torch.no_grad():
        model.layer.weight.clamp_(-1, 1)


def clamped_data(model: Model, z: Tensor) -> None:
    model.layer.weight.data.clamp_(-1, 1)


def assigned_data(model: Model, z: Tensor) -> None:
    model.layer.weight.data = model.layer.weight.data / 2


def clamped_detached(model: Model, z: Tensor) -> None:
    model.layer.weight.detach().clamp_(-1, 1)


def zeroed_row(model: Model, z: Tensor) -> None:
    with torch.no_grad():
        model.layer.weight[0].zero_()


def scaled_frozen(model: Model, z: Tensor) -> None:
    model.frozen.weight.mul_(0.9)


def momentum(model: Model, z: Tensor) -> None:
    with torch.no_grad():
        pairs = zip(model.frozen.parameters(), model.layer.parameters(), strict=True)
        for slow, fast in pairs:
            slow.data = slow.data * 0.9 + fast.data * 0.1


def renormalized(model: Model, z: Tensor) -> Tensor:
    return z + model.table(torch.arange(len(z)))


REFUSED = {
    clamped: "layer.weight",
    clamped_data: "layer.weight",
    assigned_data: "layer.weight",
    clamped_detached: "layer.weight",
    zeroed_row: "layer.weight",
    scaled_frozen: "frozen.weight",
    momentum: "frozen.weight",
    renormalized: "table.weight",
}


@pytest.mark.parametrize("write", REFUSED)
def test_a_write_to_a_parameter_is_refused_by_name(write: Write) -> None:
    with pytest.raises(CaptureError, match="AP213") as caught:
        program_of(lambda: Model(write), (torch.randn(ROWS, WIDTH),))
    assert REFUSED[write] in caught.value.what


def test_a_module_that_is_kept_whole_and_writes_is_refused() -> None:
    """A batch norm with a cumulative average computes with the value of its counter."""
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError, match="AP216"):
        program_of(lambda: norm, (torch.zeros(2, 4),))
