"""Variants of a plan, each priced: the plan with another choice at one place.

In: a plan with its model (``recaptured``). Out: the step and the bytes of a variant, and how it
stands to the plan. ``evaluate`` prices each; where the layouts of a stage must follow the change,
they are solved anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from autoparallel.analysis.recaptured import Recaptured
from autoparallel.planner import rules as default_rules
from autoparallel.planner.budget import Budget
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.evaluate import Evaluation, Evaluator, at_microbatch
from autoparallel.planner.intra_op.intra_op import IntraOp, Limits
from autoparallel.planner.layout import NodeLayout
from autoparallel.planner.plan import Plan, Recompute, StagePlan
from autoparallel.planner.pricing.branches import stage_starts
from autoparallel.planner.pricing.choices import Restriction
from autoparallel.planner.pricing.price_cache import PriceCache
from autoparallel.planner.pricing.prices import Prices
from autoparallel.planner.pricing.stage_model import StageModel
from autoparallel.planner.pricing.structure import Run, Structure
from autoparallel.planner.search.report_plan import stage_layouts
from autoparallel.planner.search.stage_program import assembly_of

Standing = Literal[
    "CHOSEN", "TIE", "SLOWER", "CHEAPER", "CHEAPER BUT DOES NOT FIT", "DOES NOT FIT", "NOT OFFERED"
]
"""TIE: within ``EQUAL`` of the plan. CHEAPER: the plan is not the best here; see ``why``."""

MODES: tuple[Recompute, ...] = ("none", "selective", "full")

EQUAL = 1e-3
"""Steps that differ by less than this part are a tie."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One choice: the step and the bytes of the fullest device with it, None if not offered."""

    name: str
    standing: Standing
    step_seconds: float | None = None
    memory_bytes: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was explained, where it applies, and the alternatives, the chosen one among them."""

    subject: str
    where: str
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()


@dataclass
class Variants:
    """Prices variants of one plan, and keeps what they share."""

    model: Recaptured
    evaluator: Evaluator = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        self.plan = model.plan
        self.evaluator = Evaluator(model.graph, model.program.blocks, basis=model.basis)

    @cached_property
    def base(self) -> Evaluation:
        """The plan's own figures, as ``evaluate`` has them."""
        return self.evaluator.evaluation(self.plan, self.plan.cluster)

    @cached_property
    def structure(self) -> Structure:
        return Structure(at_microbatch(self.model.graph, self.plan), self.model.program.blocks)

    def priced(self, name: str, plan: Plan, *, is_chosen: bool = False) -> Alternative:
        """A variant of the plan as an alternative."""
        if is_chosen:
            own, held = self.plan.prediction.step_seconds, self.plan.prediction.peak_memory_bytes
            return Alternative(name, "CHOSEN", own, held)
        try:
            found = self.evaluator.evaluation(plan, plan.cluster)
        except AutoparallelError as error:
            return Alternative(name, "NOT OFFERED", why=error.what)
        except ValueError as error:
            return Alternative(name, "NOT OFFERED", why=str(error))
        ratio = found.step_seconds / self.base.step_seconds
        held = self.plan.prediction.peak_memory_bytes
        held += found.peak_memory_bytes - self.base.peak_memory_bytes
        standing, why = self._standing(ratio, held)
        return Alternative(name, standing, self.plan.prediction.step_seconds * ratio, held, why)

    def _standing(self, ratio: float, held_bytes: int) -> tuple[Standing, str]:
        usable = self.plan.cluster.usable_memory_bytes
        if held_bytes > usable:
            over = f"{(held_bytes - usable) / 2**30:.3g} GiB too much"
            is_cheaper = ratio < 1 - EQUAL
            return ("CHEAPER BUT DOES NOT FIT" if is_cheaper else "DOES NOT FIT"), over
        if abs(ratio - 1) <= EQUAL:
            return "TIE", ""
        if ratio > 1:
            return "SLOWER", ""
        simplest = self.plan.solver.simplest
        if simplest is not None and 1 - ratio <= simplest.tolerance:
            why = f"within {simplest.tolerance:.0%} of the fastest the simplest plan was chosen"
        elif self.plan.solver.stopped:
            why = f"the search was ended by {self.plan.solver.stopped}"
        else:
            why = "fixed otherwise, denied, or not searched for"
        return "CHEAPER", why

    def at(self, index: int, stage: StagePlan) -> Plan:
        stages = list(self.plan.stages)
        stages[index] = stage
        return replace(self.plan, stages=tuple(stages))

    def prices(self, stage: StagePlan) -> Prices:
        plan, basis = self.plan, self.model.basis
        return Prices(
            stage.mesh, plan.cluster, stage.devices, plan.model.precision, plan.model.optimizer,
            default_rules, PriceCache(), profile=basis.used, assumptions=basis.assumptions,
        )  # fmt: skip

    def run(self, index: int) -> Run:
        start = stage_starts(self.plan)[index]
        return self.structure.run(start, start + len(self.plan.stages[index].blocks))

    def restriction(self, index: int) -> Restriction:
        """What the axes of a stage are for, as in the search that made the plan."""
        stage = self.plan.stages[index]
        assembly, _ = assembly_of(
            self.structure, self.run(index), stage, self.plan, default_rules, self.model.basis
        )
        return assembly.model.restriction

    def solved(
        self, index: int, stage: StagePlan, limited: Restriction
    ) -> Mapping[str, NodeLayout] | None:
        """The fastest layouts of a stage under a restriction, at its ZeRO stage."""
        devices = stage.devices
        link = self.plan.cluster.entry_link(devices[0], len(devices))
        model = StageModel(self.structure, self.prices(stage), limited, link)
        modes = [block.recompute for block in stage.blocks]
        mode = max(MODES, key=modes.count)
        limits = Limits(float("inf"), (stage.zero,), mode)
        run = self.run(index)
        answer = IntraOp(model, limits, Budget.of(float("inf"))).best(
            run, self.plan.num_microbatches, 1
        )
        if answer is None:
            return None
        start = stage_starts(self.plan)[index]
        return stage_layouts(self.structure, model, answer, (start, start + len(stage.blocks)))
