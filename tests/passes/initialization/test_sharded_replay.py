"""Boxes of a recorded build's tensors: those of the whole tensor, drawn for themselves alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from capture_models import small_gpt, small_gpt2, small_llama
from torch import Tensor, nn

from autoparallel.passes.initialization import sharded_replay
from autoparallel.passes.initialization.deferred_init import (
    Deferred,
    materialize,
    materialize_boxes,
    plain_build,
    record_build,
)
from autoparallel.planner.graph.layout import Region


class Chains(nn.Module):
    """Values by chains of random and other ops, in place, on views and out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 200)
        nn.init.kaiming_normal_(self.linear.weight)
        self.rows = nn.Embedding(1000, 70, padding_idx=3)
        self.rows.weight.data.normal_(0.1, 0.5)
        with torch.no_grad():
            self.rows.weight[3].zero_()
            self.rows.weight[10:20:2].mul_(3.0)
        self.fused = nn.Parameter(torch.empty(300, 150))
        for part in self.fused.data.chunk(3):
            nn.init.xavier_uniform_(part)
        self.made = nn.Parameter(torch.randn(150, 260) / math.sqrt(260) + 1)
        self.turned = nn.Parameter(torch.rand(210, 130).t().clone())
        self.turned.data.t()[5:90].normal_()
        self.bounded = nn.Parameter(torch.empty(256, 200))
        nn.init.trunc_normal_(self.bounded, std=0.5, a=-1.0, b=1.0)
        self.copied = nn.Parameter(self.linear.weight.detach().clone())
        self.rounded = nn.Parameter(torch.randn(200, 100).to(torch.bfloat16).float().clamp(-1, 1))
        self.orthogonal = nn.Parameter(torch.empty(60, 50))
        nn.init.orthogonal_(self.orthogonal)
        self.wave = nn.Parameter(torch.rand(200, 100).exp().sort(dim=0).values)
        self.joined = nn.Parameter(torch.cat([torch.randn(40, 30), torch.zeros(5, 30)]))
        self.conv = nn.Conv2d(40, 60, 3)
        self.dots = nn.Parameter(torch.zeros(50, 60).bernoulli_(0.3))
        self.scale = nn.Parameter(torch.full((77,), 0.5))
        self.mean = nn.Parameter(torch.tensor(2.0) * torch.ones(()))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "chains": Chains,
    "gpt": small_gpt,
    "gpt-tied": lambda: small_gpt(tied=True),
    "gpt2": small_gpt2,
    "llama": small_llama,
}


def whole_values(deferred: Deferred, names: list[str]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    materialize(deferred, names, made.__setitem__)
    return made


def parts(size: int, count: int) -> list[tuple[int, int]]:
    """``count`` parts of a dimension as ZeRO cuts it: the last ones shorter or empty."""
    rows = -(-size // count)
    return [(min(i * rows, size), min((i + 1) * rows, size)) for i in range(count)]


def grids(shape: torch.Size) -> list[list[Region]]:
    """Ways of cutting a tensor into boxes: along each dimension, and along the first two."""
    full = tuple((0, size) for size in shape)
    found: list[list[Region]] = [
        [(*full[:dim], part, *full[dim + 1 :]) for part in parts(size, count)]
        for dim, size in enumerate(shape)
        for count in (2, 3, 8)
    ]
    if len(shape) > 1:
        found.append(
            [
                (rows, columns, *full[2:])
                for rows in parts(shape[0], 2)
                for columns in parts(shape[1], 3)
            ]
        )
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_the_parts_of_a_tensor_are_those_of_the_whole_however_it_is_cut(name: str) -> None:
    deferred = record_build(BUILDS[name], 7, "sharded")
    assert deferred.is_recorded, deferred.reason
    names = [name for name, _ in deferred.model.named_parameters()]
    whole = whole_values(deferred, names)
    for key in names:
        for boxes in grids(whole[key].shape):
            found: dict[Region, Tensor] = {}
            materialize_boxes(
                deferred, {key: boxes}, lambda _, box, part, to=found: to.update({box: part})
            )
            assert set(found) == set(boxes)
            for box, part in found.items():
                expected = whole[key][tuple(slice(start, stop) for start, stop in box)]
                assert torch.equal(part, expected), (key, box)


@pytest.mark.parametrize("name", BUILDS)
def test_values_are_distributed_as_in_a_plain_build(name: str) -> None:
    """Means and deviations of 4096 or more elements differ by few standard errors, and bounds,
    zeros and what is not random are the same."""
    deferred = record_build(BUILDS[name], 7, "sharded")
    plain = dict(plain_build(BUILDS[name], 7).named_parameters())
    for key, value in whole_values(deferred, list(plain)).items():
        expected = plain[key].detach().double()
        found = value.double()
        assert found.shape == expected.shape
        assert torch.equal(found == 0, expected == 0) or expected.unique().numel() == 2
        if expected.unique().numel() == 1:
            assert torch.equal(found, expected)
        if expected.numel() >= 4096:
            std = float(expected.std())
            error = std / math.sqrt(expected.numel())
            assert abs(float(found.mean() - expected.mean())) < 6 * error, key
            assert float(found.std()) == pytest.approx(std, rel=0.05), key
            assert not torch.equal(found, expected)


def test_each_kind_of_draw_keeps_its_bounds_and_its_shape() -> None:
    """Quantiles of a million numbers, against those of the distribution."""
    fills: dict[str, Callable[[Tensor], Tensor]] = {
        "normal": lambda t: t.normal_(1.0, 2.0),
        "uniform": lambda t: t.uniform_(-3.0, 1.0),
        "trunc": lambda t: nn.init.trunc_normal_(t, std=1.0, a=-2.0, b=0.5),
        "exponential": lambda t: t.exponential_(2.0),
    }

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, fill in fills.items():
                self.register_parameter(name, nn.Parameter(torch.empty(1000, 1000)))
                with torch.no_grad():
                    fill(getattr(self, name))

    found = whole_values(record_build(Drawn, 3, "sharded"), list(fills))
    plain = plain_build(Drawn, 4)
    marks = torch.linspace(0.01, 0.99, 99)
    for name, value in found.items():
        other = getattr(plain, name).detach()
        each = [tensor.flatten()[:: 1000 // 100].quantile(marks) for tensor in (value, other)]
        assert float((each[0] - each[1]).abs().max()) < 0.05, name
        assert value.unique().numel() > 900_000 * 0.9
    assert -3 <= float(found["uniform"].min()) < -2.999
    assert 0.999 < float(found["uniform"].max()) <= 1
    assert -2 <= float(found["trunc"].min()) < -1.99 < 0.49 < float(found["trunc"].max()) <= 0.5


def test_no_two_tiles_of_a_draw_are_alike() -> None:
    value = whole_values(
        record_build(lambda: nn.Linear(512, 512, bias=False), 1, "sharded"), ["weight"]
    )["weight"]
    assert value.unique().numel() > 0.95 * value.numel()


def test_other_seeds_and_other_draws_have_other_values() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))

    one, other = (
        whole_values(record_build(build, seed, "sharded"), ["0.weight", "1.weight"])
        for seed in (1, 2)
    )
    values = [*one.values(), *other.values()]
    assert all(not torch.equal(values[i], values[j]) for i in range(4) for j in range(i))
    state = torch.Generator().manual_seed(1).get_state()
    again = whole_values(record_build(build, state, "sharded"), ["0.weight"])
    assert torch.equal(again["0.weight"], one["0.weight"])


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        torch.manual_seed(11)
        self.second = nn.Linear(20, 20)
        torch.manual_seed(11)
        self.third = nn.Linear(20, 20)


@pytest.mark.parametrize("init", ["sharded", "exact"])
def test_a_build_that_seeds_the_generator_starts_anew_there(init: str) -> None:
    names = ["first.weight", "second.weight", "third.weight"]
    one, other = (
        whole_values(record_build(Seeded, seed, init), names)  # type: ignore[arg-type]
        for seed in (1, 2)
    )
    assert torch.equal(one["second.weight"], one["third.weight"])
    assert torch.equal(one["second.weight"], other["second.weight"])
    assert not torch.equal(one["first.weight"], other["first.weight"])
    if init == "exact":
        plain = dict(plain_build(Seeded, 1).named_parameters())
        assert all(torch.equal(one[name], plain[name]) for name in names)


def test_only_the_numbers_of_what_is_wanted_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the rows takes an eighth of the numbers, a quarter of the columns a quarter,
    and nothing none."""
    deferred = record_build(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), 0, "sharded"
    )
    drawn = 0
    real = sharded_replay.draw_box

    def counted(target, shape, box, draw, seed_of):  # type: ignore[no-untyped-def]
        def counting(tile: Tensor) -> object:
            nonlocal drawn
            drawn += tile.numel()
            return draw(tile)

        real(target, shape, box, counting, seed_of)

    monkeypatch.setattr(sharded_replay, "draw_box", counted)
    names = [f"{at}.weight" for at in range(4)]
    materialize_boxes(deferred, {name: [] for name in names}, lambda *_: None)
    assert drawn == 0
    materialize_boxes(deferred, {n: [((128, 256), (0, 1024))] for n in names}, lambda *_: None)
    assert drawn == 4 * 128 * 1024
    drawn = 0
    materialize_boxes(deferred, {n: [((0, 1024), (256, 512))] for n in names}, lambda *_: None)
    assert drawn == 4 * 256 * 1024
