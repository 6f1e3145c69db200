"""Steps of an exported script on one rank, with and without a pipeline, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from script_ranks import group_of_one
from torch import Tensor, nn

from autoparallel.runtime.script_parts import pipeline, stages, training
from autoparallel.runtime.script_parts.mesh import Mesh
from autoparallel.runtime.script_parts.pipeline import (
    Crossing,
    Piece,
    PipelineTrainer,
    boxes,
    overlap,
    transfer_of,
)
from autoparallel.runtime.script_parts.stages import Draw, Stage
from autoparallel.runtime.script_parts.training import Trainer, load_weights, write_weights
from autoparallel.runtime.script_parts.weights import Weights

CPU, MICRO_BATCHES, ROWS = torch.device("cpu"), 2, 4
Values = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (stages, training):
        monkeypatch.setattr(module, "MICRO_BATCHES", MICRO_BATCHES)
    monkeypatch.setattr(stages, "BATCH_DIMS", {"x": 0, "y": 0})
    with group_of_one():
        yield


class Tied(nn.Module):
    """Two layers of one weight, and a count of the steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def batch_of(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, 3, generator=generator) for name in ("x", "y")}


def first(values: Values, weights: Weights, mesh: Mesh, draw: Draw) -> Values:
    made = torch.tanh(F.linear(values["x"], weights["first.weight"], weights["first.bias"]))
    return {"hidden": made, "seen.new": weights["seen"] + 1}


def last(values: Values, weights: Weights, mesh: Mesh, draw: Draw) -> Values:
    made = F.linear(values["hidden"], weights["first.weight"], weights["last.bias"])
    return {"loss": (made - values["y"]).square().sum() / values["elements"]}


def whole(values: Values, weights: Weights, mesh: Mesh, draw: Draw) -> Values:
    made = first(values, weights, mesh, draw)
    return {**made, **last({**values, **made}, weights, mesh, draw)}


MESH = {"dp": 1}
FIRST, LAST = ({"first.weight": {}, "first.bias": {}}, {"first.weight": {}, "last.bias": {}})
"""A tied weight has one name in all stages."""
SEEN = {"buffers": {"seen": {}}, "updates": {"seen": "seen.new"}}
ONE_STAGE = [Stage(whole, (0,), MESH, {**FIRST, **LAST}, {"x": {}, "y": {}}, loss="loss", **SEEN)]
TWO_STAGES = [
    Stage(first, (0,), MESH, FIRST, {"x": {}}, **SEEN),
    Stage(last, (0,), MESH, LAST, {"y": {}}, loss="loss"),
]
ROW = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0REDUCE 1REDUCE"


def elements(batch: Values, constants: Values, microbatch: int) -> Values:
    """Count the elements of a micro-batch; a sum and a mean over them are the same."""
    return {"elements": torch.tensor(batch["y"].numel() // MICRO_BATCHES)}


def trainer_of(name: str, monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> Trainer:
    if name == "one stage":
        return Trainer(ONE_STAGE, model, {}, elements, CPU)
    crossing = Crossing("hidden", 0, 1, (ROWS // MICRO_BATCHES, 3), torch.float32, {}, {})
    monkeypatch.setattr(pipeline, "CROSSINGS", [crossing])
    monkeypatch.setattr(pipeline, "SCHEDULE", [ROW])
    return PipelineTrainer(TWO_STAGES, model, {}, elements, CPU)


KINDS = ("one stage", "two stages")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_steps_are_those_of_plain_pytorch(
    name: str, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms and weights of three steps, two batches each, with and without clipping."""
    plain, model = Tied(), Tied()
    trainer = trainer_of(name, monkeypatch, model)
    expected = torch.optim.SGD(plain.parameters(), lr=0.5)
    optimizer = torch.optim.SGD([master for _, master in trainer.named_masters()], lr=0.5)
    for step in range(3):
        for number in range(2):
            batch = batch_of(2 * step + number)
            loss = plain(**batch)
            (loss / 2).backward()
            trainer.begin(batch, 0, 0)
            trainer.run(0.5, is_last=number == 1)
            assert trainer.loss() == pytest.approx(loss.item(), rel=1e-6)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or 1e9)
        assert trainer.is_counted(0, "first.weight")
        assert trainer.is_counted(1, "first.weight") == (name == "one stage")
        assert trainer.update(optimizer, max_norm) == pytest.approx(float(norm), rel=1e-5)
        expected.step()
        expected.zero_grad()
    trainer.whole_state(model)
    for key, value in plain.state_dict().items():
        if key != "seen":
            torch.testing.assert_close(model.state_dict()[key], value)
    assert float(model.seen) == 3 * 2 * MICRO_BATCHES


def test_a_loss_scale_is_halved_by_an_overflow_and_doubled_after_finite_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "LOSS_SCALE", 8.0)
    monkeypatch.setattr(training, "GROWTH_STEPS", 2)
    plain, model = Tied(), Tied()
    trainer = trainer_of("one stage", monkeypatch, model)
    optimizer = torch.optim.SGD([master for _, master in trainer.named_masters()], lr=0.5)
    scales = []
    for is_finite in (True, True, False, True, True):
        trainer.rescale(is_finite)
        scales.append(trainer.scale)
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]
    for batch in (batch_of(0), {**batch_of(0), "y": torch.full((ROWS, 3), float("inf"))}):
        trainer.begin(batch, 0, 0)
        trainer.run(1.0, is_last=True)
        norm = trainer.update(optimizer)
        if torch.isfinite(torch.tensor(norm)):
            plain(**batch).backward()
            assert norm == pytest.approx(
                float(nn.utils.get_total_norm([each.grad for each in plain.parameters()])), rel=1e-5
            )
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
    trainer.whole_state(model)
    torch.testing.assert_close(model.first.weight, plain.first.weight)


def test_a_rank_that_trains_nothing_has_an_empty_tensor_for_its_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_of("two stages", monkeypatch, Tied().requires_grad_(False))
    ((name, master),) = trainer.named_masters()
    assert (name, master.numel()) == ("", 0)
    trainer.sum_tied()  # type: ignore[attr-defined]
    assert all(weight.gradient is None for *_, weight in trainer.all_weights())


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_are_read_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    """A .safetensors file has a tied weight under one of its names alone."""
    path, model, other = str(tmp_path / f"weights.{suffix}"), Tied(), Tied()
    with torch.no_grad():
        model.first.weight += 1
    write_weights(path, model.state_dict())
    load_weights(other, path)
    assert torch.equal(other.last.weight, model.first.weight)
    write_weights(path, {"first.weight": torch.ones(3, 3), "more": torch.ones(1)})
    with pytest.raises(ValueError, match=r"lacks .*'first.bias', 'last.bias'\].*\['more'\]"):
        load_weights(other, path)


def test_a_box_of_the_sender_meets_a_box_of_the_receiver() -> None:
    shared = overlap(((0, 4), (0, 6)), ((2, 8), (3, 6)))
    assert shared == [(slice(2, 4), slice(3, 6)), (slice(0, 2), slice(0, 3))]
    assert overlap(((0, 4), (0, 6)), ((4, 8), (0, 6))) == []


def test_messages_cover_what_each_rank_needs_and_ranks_with_the_same_box_share_them() -> None:
    """Rows over dp=2 become columns over tp=2; ranks 0 and 1 both hold the first two rows."""
    sender = Stage(first, (0, 1, 2, 3), {"dp": 2, "tp": 2}, {})
    receiver = Stage(last, (4, 5), {"tp": 2}, {})
    assert boxes(sender, (4, 6), {"dp": 0}) == {
        0: ((0, 2), (0, 6)),
        1: ((0, 2), (0, 6)),
        2: ((2, 4), (0, 6)),
        3: ((2, 4), (0, 6)),
    }
    crossing = Crossing("h", 0, 1, (4, 6), torch.float32, {"dp": 0}, {"tp": 1})
    forward = transfer_of(crossing, "forward", [sender, receiver])
    assert forward.shape == (4, 3)
    left, right, every = slice(0, 3), slice(3, 6), slice(0, 2)
    assert forward.pieces == (
        Piece(0, 4, (every, left), (every, left)),
        Piece(2, 4, (every, left), (slice(2, 4), left)),
        Piece(1, 5, (every, right), (every, left)),
        Piece(3, 5, (every, right), (slice(2, 4), left)),
    )
    backward = transfer_of(crossing, "backward", [sender, receiver])
    assert (backward.sender, backward.receiver, backward.shape) == (1, 0, (2, 6))
    whole_made = torch.arange(24.0).view(4, 6)
    for rank, box in boxes(sender, (4, 6), {"dp": 0}).items():
        own = torch.empty(backward.shape)
        for piece in backward.pieces:
            if piece.target == rank:
                columns = left if piece.source == 4 else right
                own[piece.place] = whole_made[:, columns][piece.cut]
        assert torch.equal(own, whole_made[tuple(slice(*each) for each in box)])
