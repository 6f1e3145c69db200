"""A DataLoader of which each rank loads its rows: the batches are those of one device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from one_device import reference_of
from processes import run_processes
from test_batches import BOTH, DP, PLANNED, Case, make_trainer, planned
from test_verification_shares import captured, target
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import autoparallel
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.data.batches import named_inputs
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import verify

NUM_ROWS, SEQ = 20, 8


def row(index: int) -> dict[str, Tensor]:
    """A row of the data set, with a number of labels that are not ignored."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(12, (SEQ,), generator=generator)
    labels = torch.randint(12, (SEQ,), generator=generator)
    labels[: index % SEQ] = -100
    return {"tokens": tokens, "labels": labels}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows by number; it counts those that it makes in this process."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.made.append(index)
        return row(index)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows one after the other, in an order that torch's generator gives."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (row(int(index)) for index in torch.randperm(NUM_ROWS))


class Joined:
    """A parallel model whose trainer is made already."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def join(self) -> Trainer:
        return self._trainer


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS = {
    "plain": lambda: DataLoader(Rows(), PLANNED),
    "shuffled": lambda: DataLoader(Rows(), PLANNED, shuffle=True),
    "workers": lambda: DataLoader(
        Rows(), PLANNED, shuffle=True, num_workers=1, multiprocessing_context="fork"
    ),
    "generator": lambda: DataLoader(Rows(), PLANNED, shuffle=True, generator=seeded()),
    "dropped": lambda: DataLoader(Rows(), PLANNED, shuffle=True, drop_last=True),
    "stream": lambda: DataLoader(Stream(), PLANNED),
}


def epochs(name: str) -> list[list[dict[str, Tensor]]]:
    """Two epochs of the DataLoader on one device."""
    torch.manual_seed(5)
    loader = LOADERS[name]()
    return [list(loader), list(loader)]


def join(case: Case, text: str) -> Trainer:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(torch.distributed.get_world_size()))
    return make_trainer(case.model, text)


def go_on(case: Case, text: str, state: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """On a rank: what differs of the second epoch from ``state`` on, and the state a batch on."""
    trainer = join(case, text)
    mine = autoparallel.distribute(LOADERS["shuffled"](), Joined(trainer))
    mine.load_state_dict(state)
    rest, wrong, after = epochs("shuffled")[1][1:], [], {}
    for at, (batch, whole) in enumerate(zip(mine, rest, strict=True)):
        after = after or mine.state_dict()
        if not is_part(trainer, batch, whole):
            wrong.append(f"batch {at}")
    return wrong, after


def compare_order(case: Case, text: str) -> list[str]:
    """On a rank: what differs from its rows of the batches of one device."""
    trainer, wrong = join(case, text), []
    rank = torch.distributed.get_rank()
    for name in LOADERS:
        torch.manual_seed(5 + rank)
        loader = LOADERS[name]()
        mine = autoparallel.distribute(loader, Joined(trainer))
        plain = epochs(name)
        torch.manual_seed(5 + rank)
        found = [list(mine), list(mine)]
        if name != "stream" and len(mine) != len(plain[0]):
            wrong.append(f"{name}: {len(mine)} batches")
        for epoch, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
            wrong += [
                f"{name}: batch {at} of epoch {epoch}"
                for at, (batch, whole) in enumerate(zip(ours, theirs, strict=True))
                if not is_part(trainer, batch, whole)
            ]
        wrong += resumed_wrong(trainer, name, plain)
        if name in ("plain", "shuffled") and len(loader.dataset.made) > 2 * NUM_ROWS * 0.75:
            wrong.append(f"{name}: {len(loader.dataset.made)} rows made")
    return wrong


def resumed_wrong(trainer: Trainer, name: str, plain: list[list[dict[str, Tensor]]]) -> list[str]:
    """The second epoch from its second batch on, by another loader."""
    torch.manual_seed(5 + torch.distributed.get_rank())
    first = autoparallel.distribute(LOADERS[name](), Joined(trainer))
    list(first)
    iterator = iter(first)
    next(iterator)
    second = autoparallel.distribute(LOADERS[name](), Joined(trainer))
    second.load_state_dict(first.state_dict())
    rest = list(second)
    is_right = len(rest) == len(plain[1]) - 1 and all(
        is_part(trainer, batch, whole) for batch, whole in zip(rest, plain[1][1:], strict=True)
    )
    return [] if is_right else [f"{name}: resumed"]


def is_part(trainer: Trainer, batch: Any, whole: dict[str, Tensor]) -> bool:
    held = trainer.runner.batches.held(len(whole["tokens"]))
    if held is None:
        return len(batch) == 0
    return all(torch.equal(batch[n], whole[n][list(held.indices())]) for n in whole)


def train(case: Case, text: str) -> list[str]:
    """On a rank: an epoch of a distributed loader, held to one device on the plain one's."""
    trainer = join(case, text)
    torch.manual_seed(5 + torch.distributed.get_rank())
    loader = autoparallel.distribute(LOADERS["shuffled"](), Joined(trainer))
    torch.manual_seed(5 + torch.distributed.get_rank())
    given = [trainer.batches.named(batch) for batch in loader]
    batches = epochs("shuffled")[0]
    program = captured(case.model, "fp64")[1]
    named = [named_inputs(batch, program) for batch in batches]
    found = verify(trainer, given, partial(reference_of, target(case.model), program, named))
    return [str(failure) for failure in found.failures]


CASES = {"dp=2": (2, DP), "tp=2": (2, "tp=2,pp=1"), "dp=2,pp=2": (4, BOTH)}


@cache
def plan_of(parallel: str) -> tuple[int, Case, str]:
    num_ranks, forced = CASES[parallel]
    case = Case("masked", forced)
    return num_ranks, case, planned(case, num_ranks)


@pytest.mark.parametrize(
    "parallel",
    ["dp=2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("tp=2", "dp=2,pp=2"))],
)
def test_the_ranks_have_the_rows_of_one_device_s_batches(parallel: str) -> None:
    num_ranks, case, text = plan_of(parallel)
    found = run_processes(num_ranks, compare_order, case, text, timeout_seconds=250)
    if parallel == "tp=2":
        found = [[line for line in each if "rows made" not in line] for each in found]
    assert found == [[]] * num_ranks


@pytest.mark.parametrize("parallel", ["dp=2", "dp=2,pp=2"])
def test_an_epoch_with_a_smaller_last_batch_trains_like_one_device(parallel: str) -> None:
    num_ranks, case, text = plan_of(parallel)
    assert run_processes(num_ranks, train, case, text, timeout_seconds=250) == [[]] * num_ranks


def equal(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "workers" else ()) for name in LOADERS],
)
def test_outside_torchrun_the_batches_are_the_loaders_own(name: str) -> None:
    plain = epochs(name)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    loader = autoparallel.distribute(LOADERS[name]())
    assert equal(list(loader), plain[0])
    assert equal(list(loader), plain[1])
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", LOADERS)
def test_outside_torchrun_a_loader_goes_on_in_the_middle_of_an_epoch(name: str) -> None:
    plain = epochs(name)
    torch.manual_seed(5)
    loader = autoparallel.distribute(LOADERS[name]())
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state, random = loader.state_dict(), torch.get_rng_state()
    torch.manual_seed(77)
    resumed = autoparallel.distribute(LOADERS[name]())
    resumed.load_state_dict(state)
    torch.set_rng_state(random)
    assert resumed.state_dict()["epoch"] == 0
    assert equal(list(resumed), plain[1][1:])
    assert resumed.state_dict()["epoch"] == 1


def test_a_loader_goes_on_twice_in_one_epoch() -> None:
    plain, state = epochs("shuffled"), None
    for taken in range(3):
        torch.manual_seed(5 if state is None else 77)
        loader = autoparallel.distribute(LOADERS["shuffled"]())
        if state is not None:
            loader.load_state_dict(state)
        assert equal([next(iter(loader))], plain[0][taken : taken + 1])
        state = loader.state_dict()


def test_a_state_of_before_the_first_epoch_is_a_beginning() -> None:
    loader = autoparallel.distribute(LOADERS["shuffled"]())
    loader.load_state_dict(autoparallel.distribute(LOADERS["shuffled"]()).state_dict())
    plain = epochs("shuffled")
    torch.manual_seed(5)
    assert equal(list(loader), plain[0])


def test_a_state_saved_outside_torchrun_goes_on_under_a_plan_and_back() -> None:
    num_ranks, case, text = plan_of("dp=2")
    torch.manual_seed(5)
    loader = autoparallel.distribute(LOADERS["shuffled"]())
    list(loader)
    next(iter(loader))
    found = run_processes(num_ranks, go_on, case, text, loader.state_dict(), timeout_seconds=250)
    for wrong, state in found:
        assert wrong == []
        back = autoparallel.distribute(LOADERS["shuffled"]())
        back.load_state_dict(state)
        assert equal(list(back), epochs("shuffled")[1][2:])


def test_loaders_that_are_not_of_global_batches_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    own = DistributedSampler(Rows(), num_replicas=2, rank=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="AP832"):
        autoparallel.distribute(DataLoader(Rows(), 4, sampler=own))
    with pytest.raises(UsageError, match="AP833"):
        autoparallel.distribute([1, 2])
    with pytest.raises(UsageError, match="AP834"):
        autoparallel.distribute(LOADERS["plain"](), torch.nn.Linear(1, 1))
