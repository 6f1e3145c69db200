"""Every schedule under the rules that NCCL and CUDA have, held to one device in float64.

Gloo's tags, buffers and waits hide what would then be a wrong gradient or a hang; a ``strict``
group (see there) hides nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_processes
from schedule_cases import SCHEDULES, Case
from strict_cases import COUNTS, MODELS, planned, run_cases

SAMPLE = (
    Case("skip", "zbv", 16),
    Case("skip", "zb-h1", 4, hosts=(2, 1)),
)
FEWEST = {"chain": 40, "tied": 40, "skip": 40, "u-net": 20, "encoder-decoder": 20, "branches": 20}
"""How many of a model's cases can be had, at least: the others are refused by the planner."""


def check(model: str, num_ranks: int, cases: list[Case]) -> int:
    """How many of the cases can be had; all these equal one device."""
    texts = {case: text for case in cases if (text := planned(case)) is not None}
    found = run_processes(
        num_ranks, run_cases, model, tuple(texts.values()), backend="strict", timeout_seconds=1200
    )[0]
    for case, verification in zip(texts, found, strict=True):
        assert verification.passed, (str(case), verification.failures[:3])
        assert len(verification.differences) > 10
    return len(texts)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_schedule_needs_no_tags_and_no_receive_that_is_overtaken(case: Case) -> None:
    assert check(case.model, case.num_ranks, [case]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", MODELS.files)
def test_every_schedule_needs_no_more_than_nccl_promises(model: str) -> None:
    cases = [Case(model, schedule, count) for schedule in SCHEDULES for count in COUNTS]
    assert check(model, 2, cases) >= FEWEST[model]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("parallel", ["pp=4", "pp=2,tp=2", "pp=2,dp=2,zero=2"])
def test_four_ranks_need_no_more_than_nccl_promises(parallel: str) -> None:
    cases = [Case("skip", schedule, 8, parallel) for schedule in SCHEDULES]
    assert check("skip", 4, cases) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", MODELS.files)
def test_stages_of_unlike_meshes_need_no_more_than_nccl_promises(model: str) -> None:
    cases = [Case(model, each, count, hosts=(2, 1)) for each in SCHEDULES for count in COUNTS]
    assert check(model, 3, cases) >= 12


def receives_first() -> None:
    rank, box = dist.get_rank(), torch.ones(1)
    other = dist.irecv(torch.empty(1), 1 - rank)
    dist.isend(box, 1 - rank)
    assert other is not None
    other.wait()


def writes_under_way() -> None:
    box = torch.ones(1)
    if dist.get_rank() == 1:
        dist.recv(box, 0)
        return
    work = dist.isend(box, 1)
    box += 1
    assert work is not None
    work.wait()


def reads_too_early() -> list[float]:
    box = torch.ones(1)
    work = dist.all_reduce(box, async_op=True)
    early = float(box)
    assert work is not None
    work.wait()
    return [early, float(box)]


def mixes_tags() -> list[float]:
    boxes = [torch.zeros(1), torch.zeros(1)]
    for tag in (0, 1):
        if dist.get_rank() == 0:
            dist.send(torch.full((1,), float(tag)), 1, tag=tag)
        else:
            dist.recv(boxes[tag], 0, tag=1 - tag)
    return [float(box) for box in boxes]


def sends_an_object() -> None:
    dist.broadcast_object_list([1], src=0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(receives_first, "Timed out waiting", marks=pytest.mark.slow),  # for long
        (writes_under_way, "a message was written to under way"),
        (sends_an_object, "objects do not travel"),
    ],
)
def test_the_strict_group_refuses(function: object, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_processes(2, function, backend="strict")  # type: ignore[arg-type]


def test_the_strict_group_ignores_tags_and_shows_what_is_read_too_early() -> None:
    assert run_processes(2, mixes_tags, backend="strict")[1] == [0.0, 1.0]
    for early, late in run_processes(2, reads_too_early, backend="strict"):
        assert early != early
        assert late == 2.0
