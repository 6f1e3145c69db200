"""Prices runs: capture, blocks, strategies, integer program, stage costs, simulator.

In: runs. Out: per run the predicted seconds and bytes, by the way that a user's model takes.
A model is captured with few layers and stands for its depth (``planner.configured.stage_runs``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from autoparallel.cost_model.cluster import ClusterError
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Cache, PricedStep, price
from autoparallel.planner.configured.stage_runs import FEWEST_LAYERS
from autoparallel.planner.errors import AutoparallelError
from autoparallel.register import registered_rules

from .models import Decoder, Shape, example_batch
from .tables import Run, Skipped

CAPTURE_ROWS = 2


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

    programs: dict[Shape, Program] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)

    def program(self, shape: Shape) -> Program:
        """The shape captured, with no more layers than stand for any number."""
        few = replace(shape, layers=min(shape.layers, FEWEST_LAYERS))
        if few not in self.programs:
            with torch.device("meta"):
                model = Decoder(few)
            self.programs[few] = capture(
                model, example_batch(few, CAPTURE_ROWS), dtype="bfloat16", rules=registered_rules()
            )
        return self.programs[few]

    def step(self, run: Run) -> PricedStep:
        program = self.program(run.shape)
        return price(
            program.graph, program.blocks, run.cluster, run.configuration, cache=self.cache
        )

    def result(self, run: Run) -> Result | Skipped:
        """The priced run, or why it could not be priced."""
        try:
            step = self.step(run)
        except (AutoparallelError, ClusterError, ValueError) as error:
            return Skipped(run.name, run.source, str(error).splitlines()[0], run.quality)
        return Result(run, step.step_seconds, step.peak_bytes, step.fits)
