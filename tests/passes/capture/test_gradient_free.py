"""Regions of a forward that compute without gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from capture_models import check_program, program_of
from torch import Tensor, nn

from autoparallel.passes.tracing.counter_random import counter_random
from autoparallel.planner.errors import CaptureError

ROWS, WIDTH = 6, 5


class Model(nn.Module):
    def __init__(self, region: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return (self.query(z) - self.region(self, z)).square().mean() + z.square().mean()

    @torch.no_grad()
    def decorated(self, z: Tensor) -> Tensor:
        return self.teacher(z)

    @torch.inference_mode()
    def inferred(self, z: Tensor) -> Tensor:
        return self.teacher(z)


def no_grad(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        return model.teacher(z)


def inference(model: Model, z: Tensor) -> Tensor:
    with torch.inference_mode():
        found = model.teacher(z)
    return found.clone()


def switched(model: Model, z: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    found = model.teacher(z)
    torch.set_grad_enabled(True)
    return found * model.scale


def switched_context(model: Model, z: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return model.query(z) * 2


def two_regions(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.teacher(z)
    with torch.no_grad():
        found = found + model.teacher(z * 2)
    return found


def enabled_inside(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.teacher(z)
        with torch.enable_grad():
            found = found * model.scale + model.query(z)
    return found


def written_inside(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        found = torch.zeros_like(z)
        found.add_(model.teacher(z)).mul_(model.scale)
        found[:, 0] = z[:, 1]
    return found


def viewed(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        found = z[:, :3]
    return torch.cat([found, z[:, 3:]], 1) * model.scale


def the_same_object(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        found = z.contiguous()
    return found * model.scale


def of_trained_weights(model: Model, z: Tensor) -> Tensor:
    with torch.no_grad():
        weight = model.query.weight / model.query.weight.norm()
    return z @ weight


def gaussian_loss(model: Model, z: Tensor) -> Tensor:
    """Its variances are at least a bound that its gradient does not see."""
    variance = torch.relu(model.query(z))
    return z * F.gaussian_nll_loss(z, z.roll(1, 0), variance, full=True, eps=1e-3)


REGIONS = {
    each.__name__: each
    for each in (
        no_grad,
        inference,
        switched,
        switched_context,
        two_regions,
        enabled_inside,
        written_inside,
        viewed,
        the_same_object,
        of_trained_weights,
        Model.decorated,
        gaussian_loss,
    )
}
REGIONS["inferred"] = lambda model, z: model.inferred(z).clone()


@pytest.mark.parametrize("name", REGIONS)
def test_a_program_has_the_gradients_of_the_model(name: str) -> None:
    check_program(lambda: Model(REGIONS[name]), (torch.randn(ROWS, WIDTH),))


GIVEN_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda z: z.contiguous(),
    "type_as": lambda z: z.type_as(z).type_as(z),
    "copied": lambda z: z.to(z.dtype, copy=True),
    "broadcast": lambda z: torch.broadcast_tensors(z, torch.zeros(1, WIDTH, dtype=z.dtype))[0],
    "expanded": lambda z: torch.broadcast_tensors(z[:1], z)[0],
    "flattened": lambda z: z.flatten(1),
    "sum_to_size": lambda z: z.sum_to_size(ROWS, WIDTH),
    "dropout": lambda z: F.dropout(z, 0.0),
    "reshaped": lambda z: z.reshape(ROWS, WIDTH).type_as(z),
    "part": lambda z: z.tensor_split(2)[0],
}
"""Ops that give back their argument itself, a view of it, or a copy."""


@pytest.mark.parametrize("name", GIVEN_BACK)
def test_a_value_that_an_op_gives_back_keeps_its_gradient(name: str) -> None:
    """Inside a region, read after it, and of the argument, which is read after it too."""

    def region(model: Model, z: Tensor) -> Tensor:
        with torch.no_grad():
            found = GIVEN_BACK[name](z)
        return found.sin().sum(0) * model.scale + z.cos()

    check_program(lambda: Model(region), (torch.randn(ROWS, WIDTH),))


@pytest.mark.parametrize("name", [each for each in GIVEN_BACK if each != "expanded"])
@pytest.mark.parametrize("writes_argument", [False, True])
def test_a_write_is_seen_by_all_that_show_the_value(name: str, writes_argument: bool) -> None:
    def region(model: Model, z: Tensor) -> Tensor:
        argument = z * 2
        found = GIVEN_BACK[name](argument)
        (argument if writes_argument else found).mul_(3.0)
        return found.sin().sum(0) * model.scale + argument.cos()

    check_program(lambda: Model(region), (torch.randn(ROWS, WIDTH),))


def test_dropout_in_place_writes_its_argument() -> None:
    def region(model: Model, z: Tensor) -> Tensor:
        found = z * 2
        F.dropout(found, 0.5, inplace=True)
        F.dropout2d(found[..., None, None], 0.5, inplace=True)
        return found

    drawn = []
    for place in (True, False):
        torch.manual_seed(0)
        model = Model(region if place else lambda model, z: _dropped_twice(z * 2))
        with counter_random(0):
            drawn.append(model(torch.ones(ROWS, WIDTH)))
    assert torch.equal(*drawn)


def _dropped_twice(z: Tensor) -> Tensor:
    return F.dropout2d(F.dropout(z, 0.5)[..., None, None], 0.5)[..., 0, 0]


def test_a_write_to_a_detached_view_is_refused() -> None:
    def region(model: Model, z: Tensor) -> Tensor:
        found = z * 2
        found.detach()[:, 0].mul_(0.5)
        return found

    with pytest.raises(CaptureError, match="AP212"):
        program_of(lambda: Model(region), (torch.randn(ROWS, WIDTH),))
    check_program(
        lambda: Model(lambda model, z: z.detach().clone().mul_(0.5) + z),
        (torch.randn(ROWS, WIDTH),),
    )


def test_a_write_to_a_trained_value_without_gradients_is_refused() -> None:
    def region(model: Model, z: Tensor) -> Tensor:
        found = z * 2
        with torch.no_grad():
            found.mul_(0.5)
        return found

    with pytest.raises(CaptureError, match="AP212"):
        program_of(lambda: Model(region), (torch.randn(ROWS, WIDTH),))
