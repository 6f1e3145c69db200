"""Prices runs: capture, blocks, strategies, integer program, stage costs, simulator.

In: runs. Out: per run the predicted seconds and bytes, by the way that a user's model takes.
Models are captured with a few layers; ``depth`` then repeats one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoparallel.cost_model.cluster.cluster import ClusterError
from autoparallel.cost_model.collectives.collectives import group_of
from autoparallel.cost_model.ops.memory import policy
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import Basis, CostAssumptions
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Precision

from .depth import deeper
from .tables import Model, Run, Skipped


@dataclass(frozen=True, slots=True)
class Result:
    """A priced run."""

    run: Run
    seconds: float
    num_bytes: float
    fits: bool

    @property
    def error(self) -> float | None:
        """The relative error of the step's time; more than measured is positive."""
        if self.run.measured_seconds is None:
            return None
        return self.seconds / self.run.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.run.measured_bytes is None:
            return None
        return self.num_bytes / self.run.measured_bytes - 1


@dataclass
class Pricer:
    """Prices one run after the other and keeps what they share."""

    programs: dict[tuple[Model, str], Program] = field(default_factory=dict)
    pricers: dict[tuple[Model, Precision, CostAssumptions], ConfigurationPricer] = field(
        default_factory=dict
    )

    def program(self, model: Model, precision: Precision = "bf16") -> Program:
        """The model captured, with no more layers than can be repeated."""
        dtype = policy(precision).compute_dtype
        key = model.few, dtype
        if key not in self.programs:
            self.programs[key] = model.few.program(dtype)
        return self.programs[key]

    def pricer(self, run: Run) -> ConfigurationPricer:
        """What prices the runs of a model that are trained by the same rules."""
        precision = run.configuration.precision
        key = run.shape, precision, run.assumptions
        if key not in self.pricers:
            program = self.program(run.shape, precision)
            graph, blocks = program.graph, program.blocks
            if run.shape.repeated is not None:
                graph, blocks = deeper(graph, blocks, run.shape.repeated)
            basis = Basis(assumptions=run.assumptions)
            self.pricers[key] = ConfigurationPricer(graph, blocks, basis)
        return self.pricers[key]

    def step(self, run: Run) -> PricedStep:
        pricer = self.pricer(run)
        staged = pricer.staged(run.program.launched(run.cluster), run.configuration)
        device, last = run.cluster.hosts[0].device, len(staged.costs) - 1
        per_stage = -(-run.shape.layers // len(staged.costs))
        passes = per_stage, per_stage * (2 if run.configuration.recompute == "full" else 1)
        own, mesh = run.configuration, run.configuration.mesh
        group = group_of(run.cluster, mesh.groups(0)[0] if own.dp > 1 else (0,))
        costs = [
            run.program.around(
                run.program.gathered(cost, group),
                device,
                passes,
                is_first=stage == 0,
                is_last=stage == last,
            )
            for stage, cost in enumerate(staged.costs)
        ]
        return pricer.step(run.configuration, replace(staged, costs=costs))

    def result(self, run: Run) -> Result | Skipped:
        """The priced run, or why it could not be priced."""
        try:
            step = self.step(run)
        except (AutoparallelError, ClusterError, ValueError) as error:
            return Skipped(run.name, run.source, str(error).splitlines()[0], run.quality)
        return Result(run, step.step_seconds, step.peak_bytes, step.fits)
