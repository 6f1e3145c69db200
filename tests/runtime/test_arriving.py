"""A step waits for no rank but those that it exchanges messages with."""

from __future__ import annotations

import collections
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from test_chimera import ONE, Case, plan_for
from test_random_plans import ROWS, VOCABULARY, WIDTH, Model, Truth, truth
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.runtime.messages.pending_results import (
    Arrival,
    ArrivingTensor,
    arriving_tensor,
    shared_sum,
)
from autoparallel.runtime.step.trainer import Trainer

RANKS = 3


class Untied(Model):
    """Nothing is shared by its first and last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = Untied()
    batch = {
        key: torch.empty(2, 8, dtype=torch.int64, device="meta") for key in ("tokens", "labels")
    }
    return replace(capture(model, batch, dtype="float64"), model=nn.Module())


def make_trainer(program: Program, expected: Truth, progress=None) -> Trainer:
    plan = replace(plan_for(Case((1, 2), ONE), program), schedule="1f1b")
    weights = {**expected.weights, **program.literals}
    return Trainer(program, plan, weights, device=torch.device("cpu"), progress=progress)


def first_rank_waits_for_the_others_to_end_their_step(
    program: Program, expected: Truth
) -> list[float]:
    """Rank 0 goes on to its gradients only when all others have returned from the step.

    Were there anything in the step that all ranks wait for, no rank would ever return.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, steps = dist.get_rank(), 0

    def progress(what: str, waits_for: tuple[int, ...] = ()) -> None:
        if rank == 0 and what.startswith("0REDUCE"):
            store.wait([f"step {steps} of rank {other}" for other in range(1, RANKS)])

    trainer = make_trainer(program, expected, progress)
    results = []
    for steps in range(2):
        results.append(trainer.step(expected.batch))
        store.set(f"step {steps} of rank {rank}", "ended")
    return [float(result.loss) for result in results]


def test_no_rank_waits_in_a_step_for_the_first_one_to_end_it(program: Program) -> None:
    expected = truth(program)
    found = run_processes(
        RANKS,
        first_rank_waits_for_the_others_to_end_their_step,
        program.with_batch_size(ROWS),
        expected,
        backend="gloo",
    )
    assert found[0] == found[1] == found[2]
    assert found[0][0] == pytest.approx(float(expected.loss), rel=1e-12)
    assert found[0][1] < found[0][0]


def collectives_of_a_step(program: Program, expected: Truth) -> dict[str, int]:
    """How many collectives over all ranks a step starts, and how many of them it waits for."""
    trainer = make_trainer(program, expected)
    for _ in range(2):  # Batches are compared at steps 1, 2, 4 and so on.
        trainer.step(expected.batch)
    counts: collections.Counter[str] = collections.Counter()
    names = (
        "broadcast",
        "all_reduce",
        "barrier",
        "all_gather",
        "all_gather_object",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "all_to_all_single",
    )

    def counting(name, call):
        def counted(*args, **kwargs):
            group = kwargs.get("group")
            if group is None or dist.get_world_size(group) == RANKS:
                counts[name if kwargs.get("async_op") else f"{name} waited for"] += 1
            return call(*args, **kwargs)

        return counted

    kept = {name: getattr(dist, name) for name in names}
    for name, call in kept.items():
        setattr(dist, name, counting(name, call))
    trainer.step(expected.batch)
    for name, call in kept.items():
        setattr(dist, name, call)
    return dict(counts)


def test_a_step_starts_two_sums_over_all_ranks_and_waits_for_neither(program: Program) -> None:
    found = run_processes(
        RANKS, collectives_of_a_step, program.with_batch_size(ROWS), truth(program)
    )
    assert found == [{"all_reduce": 2}] * RANKS


class Counted:
    """A message that counts how often it is waited for, and fills its tensor then."""

    def __init__(self, tensor: Tensor, value: float) -> None:
        self.tensor, self.value, self.waits = tensor, value, 0

    def wait(self) -> None:
        self.waits += 1
        self.tensor.fill_(self.value)


READS = {
    "float": float,
    "item": lambda loss: loss.item(),
    "arithmetic": lambda loss: float(2 * loss) / 2,
    "in a list": lambda loss: float(torch.stack([loss, loss])[1]),
    "by name": lambda loss: float(torch.add(loss, other=loss)) / 2,
    "detached": lambda loss: float(loss.detach()),
    "comparison": lambda loss: 3.5 if loss > 3 else 0.0,
    "numpy": lambda loss: float(loss.numpy()),
    "print": lambda loss: float(repr(loss).split("(")[1].split(",")[0]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_loss_is_waited_for_when_it_is_used_and_only_once(read) -> None:
    tensor, told = torch.zeros((), dtype=torch.float64), []
    work = Counted(tensor, 3.5)
    arrival = Arrival(
        tensor, work, tell=lambda: told.append("waits"), told=lambda: told.append("goes on")
    )
    loss = arriving_tensor(arrival, tensor)
    assert isinstance(loss, Tensor)
    assert (work.waits, told) == (0, [])
    assert read(loss) == 3.5
    assert read(loss) == 3.5
    assert work.waits == 1
    assert told == ["waits", "goes on"]


def test_what_is_made_of_a_loss_is_an_ordinary_tensor() -> None:
    tensor = torch.zeros((), dtype=torch.float64)
    loss = arriving_tensor(Arrival(tensor, Counted(tensor, 1.0)), tensor)
    assert not isinstance(loss + 1, ArrivingTensor)
    assert not isinstance(loss.clone(), ArrivingTensor)


def reads_by_collectives() -> list[object]:
    """A loss under way is summed by the script's own collective, and differentiated."""
    weight = torch.tensor(float(dist.get_rank() + 1), requires_grad=True)
    loss = shared_sum(2 * weight, others=())
    loss.backward()
    is_there = loss.arrival.arrival._work is None
    again = shared_sum(2 * weight, others=())
    dist.all_reduce(again)
    scaled = shared_sum(2 * weight, others=()) / 2
    scaled.backward()
    third = shared_sum(2 * weight, others=())
    torch.autograd.backward(third)
    return [is_there, float(loss), float(again), float(scaled), float(weight.grad)]


def test_a_backward_waits_for_no_sum_and_a_script_s_own_collective_does() -> None:
    assert run_processes(2, reads_by_collectives) == [[False, 6.0, 12.0, 3.0, 5.0]] * 2
