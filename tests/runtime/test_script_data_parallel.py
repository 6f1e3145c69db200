"""Data-parallel steps of an exported script on one rank, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from script_ranks import group_of_one
from torch import Tensor, nn

from autoparallel.runtime.script_parts import data_parallel
from autoparallel.runtime.script_parts.data_parallel import ModelTrainer

CPU, IGNORED, CLASSES = torch.device("cpu"), -100, 5
Rows = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(data_parallel, "MICRO_BATCHES", 2)
    monkeypatch.setattr(data_parallel, "ROWS", ("x", "y"))
    with group_of_one():
        yield


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, CLASSES))


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    return F.cross_entropy(model(rows["x"]), rows["y"])


def count(rows: Rows) -> Tensor:
    return (rows["y"] != IGNORED).sum()


@pytest.mark.parametrize("targets", [(0, 1, 2, IGNORED), (3, 4, IGNORED, IGNORED)])
@pytest.mark.parametrize(
    ("zero", "max_norm"), [(0, None), (0, 0.1), (1, None), (2, 0.1), (3, None)]
)
def test_micro_batches_with_unequal_numbers_of_targets_train_as_the_whole_batch(
    zero: int, max_norm: float | None, targets: tuple[int, ...]
) -> None:
    """In the second case the second micro-batch has no target: its own mean is no number."""
    batch = {"x": torch.linspace(-1, 1, 12).view(4, 3).sin(), "y": torch.tensor(targets)}
    plain, model = build(), build()
    trainer = ModelTrainer(model, loss_of, count, CPU, zero=zero, units=["0"])
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD([weight for _, weight in trainer.named_masters()], lr=0.1)
    for step in range(2):
        expected.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or float("inf"))
        expected.step()
        for part in range(2):  # of two batches, as --accumulate 2 has them
            trainer.begin(batch, 0, step)
            trainer.run(0.5, is_last=part == 1)
        assert trainer.loss() == pytest.approx(loss.item())
        assert trainer.update(optimizer, max_norm) == pytest.approx(norm.item())
    for name, whole in trainer.whole_state(model).items():
        torch.testing.assert_close(whole, plain.state_dict()[name])


def test_an_input_without_rows_is_whole_for_every_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_parallel, "ROWS", ("x",))
    seen: list[Rows] = []

    def loss(model: nn.Module, rows: Rows) -> Tensor:
        seen.append(rows)
        return F.cross_entropy(model(rows["x"]), rows["y"])

    trainer = ModelTrainer(build(), loss, count, CPU, zero=0)
    trainer.begin({"x": torch.eye(4)[:, :3], "y": torch.tensor([0, 1])}, 0, 0)
    trainer.run(1.0, is_last=True)
    assert [(len(rows["x"]), len(rows["y"])) for rows in seen] == [(2, 2), (2, 2)]
