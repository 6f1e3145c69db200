"""Measurement of ops, and of updates of parameters, on every rank of a cluster.

In: op cases in the order of their importance. Out: each case's measurement, the same on every
rank. CPU ranks share the machine's memory and maybe its cores, so there every rank measures the
same case at the same time, and the median over the ranks includes the contention. GPUs do not
share, so there the ranks split the list.

Updates: in, an optimizer's name or the function that builds a model's own, and sizes of tensors;
out, seconds per tensor of each size on the slowest rank, of the runtime's own update: the norm of
the gradient in float64, then the optimizer's step on DTensor masters. Each size is measured with
``TOTAL_BYTES`` of tensors, so that small tensors are some of many and large tensors are read from
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ...cost_model.profile.case import OpCase, ProfileError
from ...cost_model.profile.measure import Budget, measure
from ...cost_model.profile.records import Measurement
from ..messages.shared_objects import gather_values
from ..update.optimizer import BuildOptimizer, build_with, default_optimizer, sum_of_all_squares
from .blocks import median_of_ranks
from .links import LinkTime, Meshes, agree, ends_first, median_seconds


@dataclass(frozen=True, slots=True)
class OpTime:
    """The measured time of an op with given input shapes (``case``), or None and the reason why it
    could not be measured."""

    case: OpCase
    measurement: Measurement | None
    reason: str = ""


def measure_ops(
    cases: Sequence[OpCase], *, device: torch.device, budget: Budget, until: Callable[[], bool]
) -> Iterator[OpTime]:
    """Measure the ops of ``cases`` (an op with the shapes of its inputs) and yield their times,
    until ``until()`` is true on rank 0. ``budget`` limits the time of each. Collective over all
    ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = device.type == "cpu"
    stride = 1 if shares else world_size
    for start in range(0, len(cases), stride):
        if not agree(not until(), device):
            return
        wave = cases[start : start + stride]
        own = wave[0] if shares else wave[rank] if rank < len(wave) else None
        answers = gather_values(None if own is None else _measured(own, device, budget))
        if shares:
            yield _joined(wave[0], answers)
        else:
            yield from (_joined(case, answers[i : i + 1]) for i, case in enumerate(wave))


def _measured(case: OpCase, device: torch.device, budget: Budget) -> Measurement | str:
    try:
        return measure(case, "cuda" if device.type == "cuda" else "cpu", budget=budget)
    except ProfileError as error:
        return str(error)


def _joined(case: OpCase, answers: Sequence[Any]) -> OpTime:
    """Combine the answers of all ranks (times or errors) about one op case into one measurement."""
    found = [answer for answer in answers if isinstance(answer, Measurement)]
    if len(found) < len(answers):
        reasons = [answer for answer in answers if isinstance(answer, str)]
        return OpTime(case, None, reasons[0] if reasons else "not measured")
    return OpTime(case, median_of_ranks(found))


TOTAL_BYTES = 1 << 26
MOST_TENSORS = 64
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 27)
_ITEM_BYTES = 4


def measure_updates(
    optimizer: str,
    sizes: Sequence[int] = SIZES,
    *,
    device: torch.device,
    case_seconds: float,
    until: Callable[[], bool],
    build: BuildOptimizer | None = None,
) -> Iterator[LinkTime]:
    """Measure an optimizer's step: yield, for each size in bytes, the seconds per parameter of that
    size. Each size takes about ``case_seconds``; before each, ``until()`` on rank 0 may stop it.
    Collective over all ranks. If ``build`` is given, it builds the user's optimizer, which is
    measured instead of the optimizer named ``optimizer``."""
    meshes = Meshes(device)
    mesh = meshes.of(torch.arange(dist.get_world_size()).tolist())
    for size in ends_first(sizes):
        if not agree(not until(), device):
            break
        count = max(1, min(MOST_TENSORS, TOTAL_BYTES // size))
        masters = [_master(max(1, size // _ITEM_BYTES), mesh, device) for _ in range(count)]
        made = _own(build, masters) or default_optimizer(
            masters, optimizer, fused=True, learning_rate=1e-6
        )
        step = _update(made, masters, device)
        seconds, repeats = median_seconds(step, device=device, case_seconds=case_seconds)
        yield LinkTime(size, seconds / count, repeats)
    meshes.close()


def own_name(build: BuildOptimizer) -> str:
    """Return a text that identifies the user's optimizer by its class and its flags that affect the
    time of a step. Return "" if it can only be built over the model's own parameters.

    >>> own_name(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)).split()[::3]
    ['SGD', 'fused=None', 'nesterov=False']
    """
    made = _own(build, [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
    if made is None:
        return ""
    found = {
        name: value
        for name, value in made.defaults.items()
        if value is None or isinstance(value, bool)
    }
    found["momentum"] = bool(made.defaults.get("momentum"))
    return " ".join([type(made).__name__, *(f"{name}={found[name]}" for name in sorted(found))])


def _own(build: BuildOptimizer | None, parameters: list[nn.Parameter]) -> Optimizer | None:
    """Build the user's optimizer over ``parameters`` that stand in for the model's. Return None if
    that fails: the optimizer may accept only matrices, for example, or certain names."""
    if build is None:
        return None
    try:
        return build_with(build, [(f"{at}.weight", each) for at, each in enumerate(parameters)])
    except Exception:  # noqa: BLE001 - whatever it is: the run shows it, of the model's parameters
        return None


def _master(numel: int, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    def held() -> DTensor:
        local = torch.full((numel,), 1e-3, device=device)
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

    master = nn.Parameter(held())
    master.grad = held()
    return master


def _update(
    optimizer: Optimizer, masters: Sequence[nn.Parameter], device: torch.device
) -> Callable[[], object]:
    def step() -> None:
        gradients = [master.grad for master in masters]
        local = [each.to_local() for each in gradients if isinstance(each, DTensor)]
        sum_of_all_squares(local, device)
        optimizer.step()

    return step
