"""A stage of an exported script on ranks, against plain PyTorch: weights, ZeRO, micro-batches."""

from __future__ import annotations

from functools import partial
from math import prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from script_ranks import on_ranks
from torch import Tensor, nn

from autoparallel.runtime.script_parts import stages
from autoparallel.runtime.script_parts.mesh import Mesh, all_reduce, divide_gradient, sum_gradient
from autoparallel.runtime.script_parts.stages import (
    Draw,
    Stage,
    StageRank,
    keeping_products,
    rows_of,
)
from autoparallel.runtime.script_parts.weights import Split, Weight, Weights, join, own
from autoparallel.runtime.script_parts.zero import GatheredWeight, run_sharded

CPU = torch.device("cpu")
ROWS, SPLITS = 8, {"0.weight": {"tp": 0}, "0.bias": {"tp": 0}, "2.weight": {"tp": 1}, "2.bias": {}}
X = torch.linspace(-1, 1, ROWS * 4, dtype=torch.float32).view(ROWS, 4).sin()


def build() -> nn.Module:
    """Return a model of 3 outputs, which two ranks cannot share evenly, with a frozen bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    model.register_buffer("seen", torch.arange(4.0))
    return model


def block(x: Tensor, weights: Weights, mesh: Mesh) -> Tensor:
    hidden = F.relu(
        F.linear(sum_gradient(x, mesh, "tp"), weights["0.weight"], weights.of("0")["bias"])
    )
    made = all_reduce(F.linear(hidden, weights["2.weight"]), mesh, "tp")
    return made + divide_gradient(weights.of("2")["bias"], mesh, "tp")


def forward(
    run: object, values: dict[str, Tensor], weights: Weights, mesh: Mesh, draw: Draw
) -> dict[str, Tensor]:
    assert (draw.seed, draw.of(3).first) == (5, 3)
    made = run(block, values["x"] * values["scale"], weights, mesh)  # type: ignore[operator]
    rows = values["rows"]
    return {"loss": made.square().sum() / rows, "seen.new": weights["seen"] + 1, "made": made}


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(2 * x).square().sum() / len(x)


def stage_of(shape: dict[str, int], zero: int, run: object) -> Stage:
    rows = tuple(axis for axis in shape if axis != "tp")
    return Stage(
        forward=partial(forward, run),
        devices=tuple(range(prod(shape.values()))),
        mesh=shape,
        parameters=SPLITS,
        inputs={"x": dict.fromkeys(rows, 0)},
        constants={"scale": {}},
        buffers={"seen": {"tp": 0}},
        updates={"seen": "seen.new"},
        zero=zero,
        weight=GatheredWeight if zero == 3 else Weight,
        loss="loss",
        loss_terms=rows,
    )


@pytest.fixture
def _two_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MICRO_BATCHES", 2)
    monkeypatch.setattr(stages, "BATCH_DIMS", {"x": 0})


def directly(block: object, *inputs: object) -> object:
    return block(*inputs)  # type: ignore[operator]


CASES = [
    ({"dp": 2, "tp": 2}, 0, directly),
    ({"dp": 2, "tp": 2}, 0, keeping_products),
    ({"dp": 2, "tp": 1}, 1, directly),
    ({"dp": 2, "tp": 2}, 2, directly),
    ({"dp": 2, "tp": 1}, 3, run_sharded),
    ({"dp": 2, "tp": 2}, 3, run_sharded),
    ({"dp": 2, "cp": 2, "tp": 2}, 2, directly),
    ({"dp": 2, "ep": 2, "tp": 1}, 3, run_sharded),
]


@pytest.mark.usefixtures("_two_micro_batches")
@pytest.mark.parametrize(("shape", "zero", "run"), CASES)
def test_two_micro_batches_give_the_loss_the_gradient_and_the_buffer_of_the_whole_batch(
    shape: dict[str, int], zero: int, run: object
) -> None:
    """The gradient is ``scale`` times that of the mean over the micro-batches."""
    expected = build()
    loss = (plain(expected, X[:4]) + plain(expected, X[4:])) / 2
    loss.backward()
    model = build()

    def train(mesh: Mesh) -> tuple[dict[str, tuple[Tensor, Tensor | None]], Tensor, Tensor]:
        rank = StageRank(stage_of(shape, zero, run), mesh, model, {"scale": torch.tensor(2.0)}, CPU)
        rank.begin({"x": X}, {"rows": torch.tensor(ROWS // 2)}, Draw(seed=5))
        for microbatch in range(2):
            rank.forward(microbatch, {})
            assert rank.backward(microbatch, {}, scale=3.0) == {}
        rank.complete()
        whole = {
            name: (rank.whole(name), None if each.gradient is None else each.whole(each.gradient))
            for name, each in rank.weights.items()
        }
        return whole, rank.whole("seen"), sum(rank.losses.values())

    found = on_ranks(shape, train)
    torch.testing.assert_close(sum(loss for *_, loss in found) / 2, loss.detach())
    for name, whole in expected.named_parameters():
        for weights, *_ in found:
            master, gradient = weights[name]
            assert torch.equal(master, whole)
            if whole.requires_grad:
                torch.testing.assert_close(gradient, 3 * whole.grad)
            else:
                assert gradient is None
    assert all(torch.equal(seen, expected.seen + 2) for _, seen, _ in found)


@pytest.mark.parametrize("zero", [1, 3])
def test_an_update_of_shares_reaches_the_whole_weight(zero: int) -> None:
    """Of 3 rows the first rank has 2; the second has the last row, and zeros behind it."""
    whole = torch.arange(6.0).view(3, 2)

    def run(mesh: Mesh) -> tuple[Tensor, Tensor, int, Tensor]:
        weight = GatheredWeight(whole, {}, mesh, zero=zero, trained=True)
        with torch.no_grad():
            weight.master += 10
        weight.refresh()
        master = weight.master.detach()
        return master, weight.whole(master), weight.replicas(), weight.use().detach()

    (first, *made), (second, *others) = on_ranks({"dp": 2}, run)
    assert torch.equal(first, whole[:2] + 10)
    assert second.tolist() == [[14.0, 15.0], [10.0, 10.0]]
    for every, replicas, used in (made, others):
        assert replicas == 1
        assert torch.equal(every, whole + 10)
        assert torch.equal(used, whole + 10)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_that_cannot_be_cut_is_whole_on_every_rank(zero: int) -> None:
    """A number has no rows; a weight that dp splits already is cut."""

    def run(mesh: Mesh) -> list[int]:
        splits: list[tuple[Tensor, Split]] = [
            (torch.ones(()), {}),
            (torch.ones(4), {"dp": 0}),
            (torch.ones(4), {}),
        ]
        return [Weight(*each, mesh, trained=True, zero=zero).zero for each in splits]

    assert on_ranks({"dp": 2}, run) == [[0, 0, zero]] * 2


@pytest.fixture
def _half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoparallel.runtime.script_parts.weights.COMPUTE", torch.bfloat16)


@pytest.mark.usefixtures("_half_precision")
def test_a_block_computes_in_half_precision_and_the_gradient_is_summed_in_full() -> None:
    """Two micro-batches with gradients 256 and 1: bfloat16 has no 257."""

    def run(mesh: Mesh) -> Weight:
        weight = Weight(torch.full((2,), 1.001), {}, mesh, trained=True)
        for factor in (256.0, 1.0):
            (weight.use() * factor).sum().backward()
        return weight

    (weight,) = on_ranks({"dp": 1}, run)
    assert weight.use().dtype == torch.bfloat16
    assert weight.use().tolist() == [1.0, 1.0]
    assert weight.gradient is not None
    assert weight.gradient.tolist() == [257.0, 257.0]
    with torch.no_grad():
        weight.master += 1
    weight.refresh()
    assert weight.use().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("split", [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"tp": 1}, {}])
def test_a_tensor_is_cut_by_every_axis_of_its_split_and_joined_again(split: Split) -> None:
    whole = torch.arange(48.0).view(8, 6)

    def run(mesh: Mesh) -> tuple[Tensor, Tensor]:
        part = own(whole, split, mesh)
        return part, join(part, split, mesh)

    found = on_ranks({"dp": 2, "tp": 2}, run)
    assert all(torch.equal(joined, whole) for _, joined in found)
    last = found[-1][0]
    assert torch.equal(last, whole[-last.shape[0] :, -last.shape[1] :])


@pytest.mark.usefixtures("_two_micro_batches")
def test_a_tensor_without_a_dimension_of_the_batch_is_whole_in_every_micro_batch() -> None:
    assert rows_of(X, "x", 1).tolist() == X[4:].tolist()
    assert rows_of(X, "other", 1) is X


def test_a_received_value_has_its_gradient_back_and_zeros_where_it_is_not_used() -> None:
    def doubled(
        values: dict[str, Tensor], weights: Weights, mesh: Mesh, draw: Draw
    ) -> dict[str, Tensor]:
        return {"made": values["one"] * 2}

    def run(mesh: Mesh) -> dict[str, Tensor]:
        rank = StageRank(
            Stage(forward=doubled, devices=(0,), mesh={"dp": 1}, parameters={}),
            mesh,
            nn.Module(),
            {},
            CPU,
        )
        rank.begin({}, {}, Draw())
        one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
        rank.forward(0, {"one": one, "other": other, "number": torch.ones(2)})
        return rank.backward(0, {"made": torch.tensor([1.0, 3.0])}, scale=1.0)

    (gradients,) = on_ranks({"dp": 1}, run)
    assert {name: each.tolist() for name, each in gradients.items()} == {
        "one": [2.0, 6.0],
        "other": [0.0, 0.0],
    }
