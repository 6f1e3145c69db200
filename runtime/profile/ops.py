"""Measuring ops on every rank of a cluster.

In: op cases in the order of their importance. Out: each case's measurement, the same on
every rank. CPU ranks share the machine's memory and maybe its cores, so there every rank
measures the same case at the same time, and what they take from each other is in the figure:
the median over the ranks. GPUs do not share, so there the ranks split the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...cost_model.profile.case import OpCase, ProfileError
from ...cost_model.profile.measure import Budget, measure
from ...cost_model.profile.records import Measurement
from ..messages.shared_objects import gather_values
from .links import agree


@dataclass(frozen=True, slots=True)
class OpTime:
    """A case and its measurement, or why there is none."""

    case: OpCase
    measurement: Measurement | None
    reason: str = ""


def measure_ops(
    cases: Sequence[OpCase], *, device: torch.device, budget: Budget, until: Callable[[], bool]
) -> Iterator[OpTime]:
    """The cases' times until ``until``, asked on rank 0 alone. Collective over all ranks."""
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
    """One measurement of those of several ranks."""
    found = [answer for answer in answers if isinstance(answer, Measurement)]
    if len(found) < len(answers):
        reasons = [answer for answer in answers if isinstance(answer, str)]
        return OpTime(case, None, reasons[0] if reasons else "not measured")
    return OpTime(
        case,
        Measurement(
            forward_seconds=median(each.forward_seconds for each in found),
            backward_seconds=median(each.backward_seconds for each in found),
            repeats=min(each.repeats for each in found),
            spread=max(each.spread for each in found),
        ),
    )
