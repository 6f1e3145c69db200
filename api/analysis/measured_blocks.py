"""Prediction errors of compute by block and by stage, against measured times.

In: a plan with its model, and a database of measured times (``autoparallel profile``). Out: for
each kind of block in each stage, and for each stage, the compute seconds of a micro-batch (forward
and backward) predicted from specifications and from measurements, the largest error first. Blocks
and ops are measured on one device, so communication is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.analysis.plan_model import PlanModel
from autoparallel.cache.database import find_profile
from autoparallel.options.words import names_text
from autoparallel.planner.costs.basis import DEFAULT, Basis
from autoparallel.planner.evaluate.evaluate import at_microbatch, walked_stages
from autoparallel.planning.plan import priced


@dataclass(frozen=True, slots=True)
class ComputeError:
    """Predicted and measured compute seconds of a micro-batch in the stage or blocks ``name``."""

    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.1 if it is 10 % above the measurement."""
        return self.predicted_seconds / self.measured_seconds - 1


def compute_errors(
    model: PlanModel, database: str | None = None
) -> tuple[tuple[ComputeError, ...], tuple[ComputeError, ...]] | None:
    """Return the errors of predicted compute seconds: of blocks, then of stages, the largest first.
    None if the database has no measurements for the plan's devices. Raises UsageError AP171 or
    AP172 for an unusable database."""
    if find_profile(model.plan.cluster, "auto", database) is None:
        return None
    options = replace(model.options, profile="auto", database=database)
    _, measured = priced(model.program, model.target, model.plan.cluster, options)
    by_block = [_compute_seconds(model, basis) for basis in (DEFAULT, measured)]
    blocks: list[ComputeError] = []
    stages: list[ComputeError] = []
    pairs = zip(*by_block, strict=True)
    for index, (stage, (own, other)) in enumerate(zip(model.plan.stages, pairs, strict=True)):
        alike: dict[tuple[str, str, float], list[int]] = {}
        for place, block in enumerate(stage.blocks):
            alike.setdefault((block.kind, block.recompute, own[place]), []).append(place)
        for places in alike.values():
            name = names_text([stage.blocks[place].name for place in places])
            blocks.append(ComputeError(name, own[places[0]], other[places[0]]))
        stages.append(ComputeError(f"stage {index}", sum(own), sum(other)))
    return _ordered(blocks), _ordered(stages)


def _ordered(found: Sequence[ComputeError]) -> tuple[ComputeError, ...]:
    known = [each for each in found if each.measured_seconds > 0]
    return tuple(sorted(known, key=lambda each: -abs(each.error)))


def _compute_seconds(model: PlanModel, basis: Basis) -> list[list[float]]:
    """Return the compute seconds of each block of each stage, recomputation included."""
    graph = at_microbatch(model.graph, model.plan)
    walks = walked_stages(graph, model.program.blocks, model.plan, basis)
    return [
        [each.seconds.forward_compute + each.seconds.backward_compute for each in walk.found]
        for walk in walks
    ]
