"""A hand-written configuration as a whole plan: its layouts solved, its step and memory priced.

In: a plan whose model and cluster are taken, the model's captured program, a configuration or
degrees. Out: the plan that it describes. Where recomputation or micro-batches are left open, the
fastest that fits is taken, of every power of two of rows per data-parallel rank with no, selective
and full recomputation; if nothing fits, the one that needs the least.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoparallel.cache.captures import with_cached_memory
from autoparallel.planner.configured.configuration import Configuration, ConfigurationPricer
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate import Staged
from autoparallel.planner.plan import Plan, Prediction, SolverInfo, StagePlan

if TYPE_CHECKING:
    from autoparallel.cache.plan_cache import Cache
    from autoparallel.passes.programs.program import Program
    from autoparallel.planner.plan import Recompute
    from autoparallel.planner.pricing.basis import Basis
    from autoparallel.planner.requests.request import Forced

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class ConfiguredPlans:
    """Makes plans of configurations for the model, batch and cluster of ``like``."""

    like: Plan
    program: Program
    basis: Basis
    cache: Cache

    def plan(self, degrees: Forced) -> Plan:
        """The plan of some degrees; ``dp`` takes the devices that are left.

        Raises UsageError (AP124, AP127, AP128) where they do not fit the model or the cluster.
        """
        return self.best(configurations(self.like, degrees))[1]

    def best(self, candidates: Iterable[Configuration]) -> tuple[Configuration, Plan]:
        """The fastest of some configurations that fit, or the one that needs the least memory.

        Raises as ``plan``.
        """
        pricer = ConfigurationPricer(self.program.graph, self.program.blocks, self.basis)
        priced = [(each, self._priced(pricer, each)) for each in candidates]
        limit = self.like.cluster.usable_memory_bytes
        fitting = [each for each in priced if each[1].prediction.peak_memory_bytes <= limit]
        for own, found in sorted(fitting, key=lambda each: each[1].prediction.step_seconds):
            kept = self._finished(found)
            if kept.prediction.peak_memory_bytes <= limit:
                return own, kept
        own, found = min(priced, key=lambda each: each[1].prediction.peak_memory_bytes)
        return own, self._finished(found)

    def _priced(self, pricer: ConfigurationPricer, configuration: Configuration) -> Plan:
        return _plan_of(pricer.staged(self.like.cluster, configuration), self.like)

    def _finished(self, plan: Plan) -> Plan:
        return with_cached_memory(plan, self.program, self.cache)


def configurations(like: Plan, degrees: Forced) -> Iterator[Configuration]:
    """The configurations that degrees leave open, for the batch and cluster of a plan."""
    total = like.cluster.num_devices
    tp, pp, cp, ep = (getattr(degrees, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    dp = degrees.dp or max(1, total // (tp * pp * cp))
    batch = like.model.global_batch
    counts = [degrees.num_microbatches] if degrees.num_microbatches else _counts(batch, dp)
    if not counts or any(batch % count or batch // count % dp for count in counts):
        raise UsageError(
            "AP124", f"a global batch of {batch} samples cannot be split over dp={dp}",
            fix="degrees whose dp divides the batch, or microbatches= of a multiple of dp rows",
        )  # fmt: skip
    for count in counts:
        for recompute in [degrees.recompute] if degrees.recompute else RECOMPUTE:
            yield Configuration.like(
                like, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=degrees.zero or 0,
                recompute=recompute, microbatch_size=batch // count, num_microbatches=count,
                schedule=degrees.schedule or "1f1b", num_chunks=degrees.least_chunks,
                offload=degrees.offload or "none",
            )  # fmt: skip


def _counts(batch: int, parts: int) -> list[int]:
    """Numbers of micro-batches that give each data-parallel rank 1, 2, 4, … rows.

    >>> _counts(64, 8), _counts(6, 2), _counts(6, 4)
    ([8, 4, 2, 1], [3], [])
    """
    rows = [parts << bit for bit in range(batch.bit_length())]
    return [batch // size for size in rows if size <= batch and batch % size == 0]


def _plan_of(staged: Staged, like: Plan) -> Plan:
    """A staged configuration with its prices, under the name of the model that it is for."""
    found = staged.evaluation()
    stages: tuple[StagePlan, ...] = tuple(
        replace(stage, prediction=own)
        for stage, own in zip(staged.plan.stages, found.stages, strict=True)
    )
    ratio = like.prediction.step_seconds / found.step_seconds
    prediction = Prediction(
        found.step_seconds, found.bubble_fraction,
        like.prediction.tokens_per_second * ratio,
        like.prediction.model_flops_utilization * ratio,
        found.peak_memory_bytes, {},
    )  # fmt: skip
    return replace(
        staged.plan, model=like.model, stages=stages, prediction=prediction, alternatives=(),
        solver=SolverInfo(1.0, 0, {}), version=like.version, torch_version=like.torch_version,
    )  # fmt: skip
