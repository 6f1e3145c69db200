"""The data of a run: who is asked for which part, and where a run goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_python
from forced_plans import settled
from marks import slow
from one_device import reference_of
from processes import RankError, run_processes
from test_batches import BOTH, DP, PLANNED, PP, Case, make_trainer, planned
from test_verification_shares import batch_of, captured, target
from torch.utils.data import DataLoader, Dataset

from autoparallel import load_plan
from autoparallel.analysis.measurement import checksum, load_measurement
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.runtime.verify.verify import verify
from autoparallel.training.data import TrainingData

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 3


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Rows whose tokens are all their number; ``made`` are those that were loaded."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return LENGTH * PLANNED

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.made.append(index)
        return {name: torch.full((8,), index) for name in ("tokens", "labels")}


class Counter:
    """Batches with a position that can be saved."""

    def __init__(self, rows: int) -> None:
        self.at, self.rows = 0, rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            self.at += 1
            yield {n: torch.full((self.rows, 8), self.at - 1) for n in ("tokens", "labels")}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbered(rows: int, start: int = 0, length: int | None = None) -> Iterator[Any]:
    """Batches whose tokens are all the number of the batch."""
    last = itertools.count(start) if length is None else range(start, length)
    return ({n: torch.full((rows, 8), step) for n in ("tokens", "labels")} for step in last)


def sources(log: list[Any]) -> dict[str, Any]:
    """``build_data`` of every kind; what each is asked for is noted in ``log``."""

    def noted(rank: int, world: int) -> None:
        log.append((rank, world))

    def plain(rank: int, world: int) -> Any:
        noted(rank, world)
        return numbered(PLANNED // world)

    def ends(rank: int, world: int) -> Any:
        noted(rank, world)
        return numbered(PLANNED // world, length=LENGTH)

    def started(rank: int, world: int, start: int) -> Any:
        noted(rank, world)
        return numbered(PLANNED // world, start)

    def stateful(rank: int, world: int) -> Any:
        noted(rank, world)
        return Counter(PLANNED // world)

    def loader(rank: int, world: int) -> Any:
        noted(rank, world)
        dataset = Numbers()
        log.append(dataset.made)
        return DataLoader(dataset, PLANNED)

    def whole(rank: int, world: int) -> Any:
        noted(rank, world)
        return numbered(PLANNED)

    return {
        "plain": plain,
        "ends": ends,
        "started": started,
        "stateful": stateful,
        "loader": loader,
        "whole": whole,
    }


def first_tokens(data: TrainingData, count: int) -> list[int | None]:
    """Of the next batches the first token of each; None where there is nothing."""
    batches = list(itertools.islice(data, count))
    return [int(batch["tokens"][0, 0]) if batch else None for batch in batches]


def read_all(case: Case, text: str) -> list[str]:
    """On a rank: what is wrong with the batches, at first and after a resumption."""
    trainer = make_trainer(case.model, text)
    wrong, place = [], trainer.runner.batches.place
    for name in sources([]):
        log: list[Any] = []
        lines: list[str] = []
        made = replace(target(case.model), build_data=sources(log)[name])
        data = TrainingData(trainer, made, seed=0)
        found = first_tokens(data, 5)
        per_batch = PLANNED if name == "loader" else 1
        length = LENGTH if name in ("ends", "loader") else 99
        wanted = [(step % length) * per_batch for step in range(9)]
        if found != (wanted[:5] if place is not None else [None] * 5):
            wrong.append(f"{name}: {found}")
        if {entry for entry in log if isinstance(entry, tuple)} != ({place} - {None}):
            wrong.append(f"{name}: asked for {log}")
        state = data.state_dict()
        again = TrainingData(trainer, made, seed=0, tell=lines.append)
        log.clear()
        again.load_state_dict(state)
        if (found := first_tokens(again, 4)) != (wanted[5:] if place is not None else [None] * 4):
            wrong.append(f"{name}: {found} after 5 batches")
        is_slow = name in ("plain", "ends", "whole") and place is not None
        if bool(lines) != is_slow:
            wrong.append(f"{name}: said {lines}")
        loaded = [row for entry in log if isinstance(entry, list) for row in entry]
        if name == "loader" and place is not None and len(loaded) != 4 * PLANNED:
            wrong.append(f"{name}: {len(loaded)} rows loaded")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, DP),
        pytest.param(2, PP, marks=pytest.mark.slow),
        pytest.param(4, BOTH, marks=pytest.mark.slow),
        slow(4, "pp=4,microbatches=2"),
    ],
)
def test_every_source_goes_on_where_it_stopped(ranks: int, parallel: str) -> None:
    case = Case("mean", parallel)
    text = planned(case, ranks)
    assert run_processes(ranks, read_all, case, text, timeout_seconds=250) == [[]] * ranks


def train_smaller(case: Case, text: str) -> list[str]:
    """On a rank: a step of a whole batch and one of a smaller one, held to one device."""
    trainer = make_trainer(case.model, text)
    batches = [batch_of(trainer.program, rows, step) for step, rows in enumerate((PLANNED, 6))]
    whole = [trainer.program.batch(batch) for batch in batches]
    made = replace(target(case.model), build_data=lambda rank, world: whole)
    given = list(itertools.islice(TrainingData(trainer, made, seed=0), 2))
    assert bool(given[0]) == (trainer.runner.batches.place is not None)
    program = captured(case.model, "fp64")[1]
    found = verify(trainer, given, partial(reference_of, target(case.model), program, batches))
    return [str(failure) for failure in found.failures]


@pytest.mark.slow
def test_ranks_without_data_run_a_smaller_batch_too() -> None:
    case = Case("mean", "pp=4,microbatches=2")
    assert run_processes(4, train_smaller, case, planned(case, 4)) == [[]] * 4


def train_unequal(case: Case, text: str, rows: int, first: int) -> None:
    """On a rank: steps of which those from number ``first`` on have a batch of the rank's own."""
    trainer = make_trainer(case.model, text)
    graph = captured(case.model, "fp64")[1].graph.with_batch_size(rows)
    for step in range(1, 9):
        seed = step + (1000 * torch.distributed.get_rank() if step >= first else 0)
        trainer.step(random_batch(graph, seed=seed, dtype="float64"))


@pytest.mark.parametrize(
    ("first", "parallel"),
    [
        (1, "tp=2,pp=1"),
        (2, DP),
        pytest.param(1, DP, marks=pytest.mark.slow),
        pytest.param(2, "tp=2,pp=1", marks=pytest.mark.slow),
    ],
)
def test_unequal_batches_are_an_error_that_names_ranks_and_input(parallel: str, first: int) -> None:
    case = Case("mean", parallel)
    with pytest.raises(RankError) as caught:
        run_processes(2, train_unequal, case, planned(case, 2), PLANNED, first)
    assert "AP830" in str(caught.value)
    assert f"the batch of step {first} is not the same on all ranks" in str(caught.value)
    assert "input 'labels'" in str(caught.value)
    assert "rank 0 and rank 1" in str(caught.value)


MODEL = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        return (self.down(self.up(x).relu()) - y).square().mean()

def build_model():
    return Net()

def example_batch(global_batch):
    return {"x": torch.empty(global_batch, 4), "y": torch.empty(global_batch, 1)}

def build_data(rank, world, global_batch, start):
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    while True:
        numbers = torch.arange(start * global_batch, (start + 1) * global_batch)[rows]
        with open(LOG, "a") as log:
            log.write(f"{os.environ['RANK']} {rank}/{world}: {numbers.tolist()}\\n")
        x = torch.sin(numbers[:, None] + torch.arange(4))
        yield {"x": x, "y": x.sum(1, keepdim=True)}
        start += 1
"""


@pytest.mark.slow
def test_a_run_goes_on_under_another_degree_and_makes_each_row_once(tmp_path: Path) -> None:
    model, log = tmp_path / "model.py", tmp_path / "log.txt"
    model.write_text(f"LOG = {str(log)!r}\n{MODEL}")

    def run(parallel: str, *more: str) -> None:
        done = run_python(
            "-m",
            "autoparallel",
            "run",
            str(model),
            "--cluster",
            "cpu:2",
            "--global-batch",
            "8",
            "--parallel",
            settled(parallel),
            "--steps",
            "2",
            *more,
            folder=ROOT,
        )
        assert done.returncode == 0, done.stderr

    run("dp=2,microbatches=2,pp=1", "--save", str(tmp_path / "saved"))
    measured = load_measurement(tmp_path / "saved" / "plan.json")
    assert measured is not None
    assert measured.plan == checksum(load_plan(tmp_path / "saved" / "plan.json"))
    assert measured.num_steps == len(measured.each_step_seconds) == 2
    run("tp=2,pp=1,dp=1", "--resume", str(tmp_path / "saved"))
    lines = [line.split(": ") for line in log.read_text().splitlines()]
    made = [(place.split()[1], tuple(eval(rows))) for place, rows in lines]
    first = sorted(row for place, rows in made if place.endswith("/2") for row in rows)
    assert first == list(range(16))
    whole = [rows for place, rows in made if place == "0/1"]
    assert sorted(set(whole)) == [tuple(range(16, 24)), tuple(range(24, 32))]
    assert len(whole) == 4  # Both ranks of tp have the same rows.
