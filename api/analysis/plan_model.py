"""Plan with its model, captured again and priced as when it was planned.

In: a plan and the path of its file. Out: the target, its program, the graph as priced, and its
measured times. They give the figures of the plan, of its variants, and of plans of other
configurations of the model. Loading a target runs its file, so the file has to be trusted.

A variant is the plan with one choice changed; if the layouts of a stage depend on it, they are
solved anew. A configuration is hand-written: its layouts are solved, its step and memory priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autoparallel.analysis.configurations import (
    PricedConfigurations,
    configurations,
    described_plan,
)
from autoparallel.cache.captures import with_cached_memory
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import Observe, ignore
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as default_rules
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.costs.choices import Restriction
from autoparallel.planner.costs.price_cache import PriceCache
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.evaluate.evaluate import (
    Evaluation,
    Evaluator,
    at_microbatch,
    stage_prices,
    with_tiles,
)
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.graph.layout import NodeLayout
from autoparallel.planner.intra_op.intra_op import IntraOp, Limits
from autoparallel.planner.plan import Mode, Plan, StagePlan
from autoparallel.planner.requests.features import MODES
from autoparallel.planner.requests.goal import Budget
from autoparallel.planner.requests.request import Forced
from autoparallel.planner.search.report_plan import stage_layouts
from autoparallel.planner.search.stage_program import stage_problem_of
from autoparallel.planner.stage.branches import stage_starts
from autoparallel.planner.stage.stage_model import StageModel
from autoparallel.planner.stage.structure import Run, Structure
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import priced
from autoparallel.planning.plan_files import batch_seq, load_plan_target
from autoparallel.runtime.launch.membership import check_model
from autoparallel.target.target import Target
from autoparallel.target.trust import check_trusted

Standing = Literal[
    "CHOSEN", "TIE", "SLOWER", "CHEAPER", "CHEAPER BUT DOES NOT FIT", "DOES NOT FIT", "NOT OFFERED"
]
"""Result of comparing an alternative with the plan. TIE: within ``EQUAL``. CHEAPER: the alternative
is faster and fits, so the plan is not the best; its ``why`` says why it was not chosen."""

EQUAL = 1e-3
"""Relative difference of step seconds up to which an alternative ties with the plan."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Alternative to a choice of the plan: the step seconds and peak bytes that the plan would have
    with it, None if it is not offered; ``why`` says why it loses."""

    name: str
    standing: Standing
    step_seconds: float | None = None
    memory_bytes: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Priced alternatives to a choice of a plan, the chosen one included; ``subject`` names the
    choice, ``where`` the stage and blocks that it concerns."""

    subject: str
    where: str
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanModel:
    """Plan with its captured model, as needed to price variants of the plan. ``options`` are the
    planning options that the plan records; ``basis`` is the source of op times."""

    plan: Plan
    target: Target
    program: Program
    options: PlanOptions
    graph: Graph
    basis: Basis
    cache: Cache = NO_CACHE

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.graph, self.program.blocks, basis=self.basis)

    def evaluate(self, plan: Plan) -> Evaluation:
        """Price a plan of this model: return its step seconds, memory and bubble."""
        return self.evaluator.evaluation(plan, plan.cluster)

    def tiled(self, plan: Plan) -> Plan:
        """Return a variant of the plan in which full recomputation runs tiles if it can."""
        return with_tiles(plan, self.graph, self.program.blocks, basis=self.basis)

    @cached_property
    def base(self) -> Evaluation:
        """Prices of the plan itself, to compare its variants with: seconds, memory and bubble."""
        return self.evaluate(self.plan)

    @cached_property
    def structure(self) -> Structure:
        return Structure(at_microbatch(self.graph, self.plan), self.program.blocks)

    def variant(self, name: str, plan: Plan, *, is_chosen: bool = False) -> Alternative:
        """Price ``plan``, a variant of the model's plan, and return it as an alternative called
        ``name``. With ``is_chosen`` it is the model's plan itself, whose prediction is taken."""
        if is_chosen:
            own, held = self.plan.prediction.step_seconds, self.plan.prediction.peak_memory_bytes
            return Alternative(name, "CHOSEN", own, held)
        try:
            found = self.evaluate(plan)
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
        """Return a copy of the plan whose stage ``index`` is ``stage``."""
        stages = list(self.plan.stages)
        stages[index] = stage
        return replace(self.plan, stages=tuple(stages))

    def prices(self, stage: StagePlan) -> Prices:
        """Return the pricing of ops on the mesh and devices of a stage."""
        return stage_prices(self.plan, stage, (), PriceCache(), basis=self.basis)

    def run(self, index: int) -> Run:
        """Return the consecutive blocks of stage ``index`` in the form that layout solvers take."""
        start = stage_starts(self.plan)[index]
        return self.structure.run(start, start + len(self.plan.stages[index].blocks))

    def restriction(self, index: int) -> Restriction:
        """Return the limits on layouts of stage ``index`` (which dimensions each mesh axis may or
        must shard) that held in the search for the plan."""
        stage = self.plan.stages[index]
        stage_problem, _ = stage_problem_of(
            self.structure, self.run(index), stage, self.plan, default_rules, self.basis
        )
        return stage_problem.model.restriction

    def solved(
        self, index: int, stage: StagePlan, limited: Restriction
    ) -> Mapping[str, NodeLayout] | None:
        """Return the fastest layouts of a stage within ``limited``, None if there are none."""
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

    def configured(self, degrees: Forced) -> Plan:
        """Return the plan of hand-written ``degrees``; ``dp`` takes the devices that are left.

        Raises UsageError (AP124, AP127, AP128) if they do not suit the model or the cluster.
        """
        return self.best_configuration(configurations(self.plan, degrees))[1]

    def best_configuration(self, candidates: Iterable[Configuration]) -> tuple[Configuration, Plan]:
        """Return the fastest fitting configuration (else the one with least memory) and its plan.

        Raises UsageError as ``configured`` does.
        """
        pricer = ConfigurationPricer(self.program.graph, self.program.blocks, self.basis)
        priced = PricedConfigurations(pricer, self.plan.cluster)
        if not list(priced.price(candidates)):
            assert priced.error is not None, "there is a candidate"
            raise priced.error
        for step in priced.fitting:
            found = self._described(step)
            if found.prediction.peak_memory_bytes <= step.usable_bytes:
                return step.configuration, found
        least = min(priced.steps, key=lambda step: step.peak_bytes)
        return least.configuration, self._described(least)

    def _described(self, step: PricedStep) -> Plan:
        """Return the plan of a priced configuration, with its memory simulated or cached."""
        found = replace(
            described_plan(step, self.program, self.plan.model),
            model=self.plan.model,
            version=self.plan.version,
            torch_version=self.plan.torch_version,
        )
        return with_cached_memory(found, self.program, self.cache)


def load_plan_model(
    plan: Plan,
    plan_path: str,
    *,
    trust: bool = False,
    profile: Mode | None = None,
    database: str | None = None,
    cache: Cache = NO_CACHE,
    observe: Observe = ignore,
) -> PlanModel:
    """Load and capture the model of a plan, to price the plan and its variants.

    ``profile`` is the source of op times; None takes measured times if the plan did. A plan
    by measured loads of experts is priced by them again. Raises the errors of ``check_trusted``, of
    loading and of capture, and PlanError AP550 if the model has changed since the plan was made.
    """
    check_trusted(plan, plan_path, trust=trust)
    target = load_plan_target(plan, plan_path)
    was_measured = plan.prediction.profile is not None
    options = PlanOptions(
        global_batch=plan.model.global_batch,
        seq=batch_seq(plan, target),
        precision=plan.model.precision,
        float32_ops=plan.model.float32_ops,
        gradient_dtype=plan.model.gradient_dtype,
        compiled=plan.compiled,
        optimizer=plan.model.optimizer,
        profile=profile or ("auto" if was_measured else "analytic"),
        database=database,
        routing=plan_path if any(stage.placements for stage in plan.stages) else None,
    )
    program = capture_target(target, options, observe, cache)
    check_model(program, plan)
    graph, basis = priced(program, target, plan.cluster, options)
    return PlanModel(plan, target, program, options, graph, basis, cache)
