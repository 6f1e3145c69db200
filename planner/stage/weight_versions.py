"""Older weight versions that stages hold under asynchronous schedules.

In: a schedule's name, the number of stages and of micro-batches. Out: the number of weight versions
on each stage, and their bytes.
"""

from __future__ import annotations

from dataclasses import replace

from ...cost_model.ops.memory import PrecisionPolicy, policy
from ...cost_model.simulator.actions import versions_held
from ..plan import Plan
from ..requests.request import ASYNCHRONOUS
from ..schedules.schedules import build_schedule
from .stage_cost import StageCost


def is_asynchronous(schedule: str | None) -> bool:
    """Return whether a schedule updates weights in the middle of a step's micro-batches.

    >>> is_asynchronous("pipedream"), is_asynchronous("1f1b")
    (True, False)
    """
    return schedule in ASYNCHRONOUS


def num_versions(name: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the maximum number of weight versions on each stage; 1 in synchronous schedules.

    >>> num_versions("pipedream", 3, 6), num_versions("1f1b", 3, 6)
    ((3, 2, 1), (1, 1, 1))
    """
    if not is_asynchronous(name):
        return (1,) * num_stages
    schedule = build_schedule(name, num_stages, num_microbatches)
    return tuple(versions_held(schedule, stage) for stage in range(num_stages))


def version_bytes(plan: Plan, stage: int, parameters: float) -> float:
    """Return the bytes per device of a stage's older weight versions. ``parameters``: bytes of its
    parameters in all copies (master and compute format)."""
    rules = policy(plan.model.precision, plan.model.optimizer, plan.states)
    held = num_versions(plan.schedule, len(plan.stages), plan.num_microbatches)
    return (held[stage] - 1) * parameters * _version_share(rules)


def with_versions(cost: StageCost, versions: int, rules: PrecisionPolicy) -> StageCost:
    """Return the cost of a stage, changed by the memory of ``versions`` versions of its weights."""
    if versions == 1:
        return cost
    older = (versions - 1) * cost.memory_bytes["parameters"] * _version_share(rules)
    return replace(cost, memory_bytes={**cost.memory_bytes, "versions": older})


def _version_share(rules: PrecisionPolicy) -> float:
    """Return the bytes of one version of the weights, divided by the bytes of all their copies.

    Versions are in the compute format: in mixed precision they have no master copy.
    """
    copies = rules.gathered_bytes + (rules.parameter_bytes if rules.is_mixed else 0)
    return rules.gathered_bytes / copies
