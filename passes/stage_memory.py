"""What a plan needs of memory, exactly as its own stages run: by category, per stage.

In: a finished plan and the graph that it is for. Out: for each stage the bytes of a rank at
its fullest moment. States come from the precision policy and the parameters' layouts;
activations, recomputation, buffers and gradients from running one micro-batch of the stage's
program on fake tensors, where it is in the step (``saved_tensors``).

A rank's peak is the greatest of four moments: the first backward, with every micro-batch of
the warm-up in flight and no gradient yet; a backward in the steady state, with all gradients;
the last one, which completes the gradients, with one micro-batch in flight; and the
optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..cost_model.memory import PrecisionPolicy, fragmentation_bytes, policy, reserve_bytes
from ..planner.arranged.asynchronous import version_bytes
from ..planner.evaluate import BRIEF
from ..planner.graph import Blocks, Graph
from ..planner.layout import local_shape
from ..planner.plan import Plan, StagePlan
from ..planner.precision import with_precision
from ..planner.pricing.whole_stage import together
from ..planner.schedules.schedules import find_schedule
from .saved_tensors import INPUTS, Moment, StageActivations, run_microbatch
from .stage_cut import Boundary, boundaries, leaf_layout, stage_ranges
from .state_traffic import COMMUNICATION, GRADIENTS, padded_numel
from .storages import SAVED

Bytes = dict[str, float]


def with_exact_memory(plan: Plan, graph: Graph, blocks: Blocks) -> Plan:
    """The plan with ``memory_bytes`` of each stage, and the peak, as its stages really run.

    A stage that cannot be run on fake tensors, because its shapes depend on values or an op has
    none for its dtype, keeps its figures.
    """
    bytes_of = [
        stage.prediction.memory_bytes
        if exact is None
        else {name: round(size) for name, size in exact.items()}
        for stage, exact in zip(plan.stages, exact_memory(plan, graph, blocks), strict=True)
    ]
    return with_memory(plan, bytes_of)


def with_memory(plan: Plan, bytes_of: Sequence[Mapping[str, int]]) -> Plan:
    """The plan with these bytes of its stages, and the peak of its ranks.

    A rank of the pipeline may have several stages; what is transient then counts once.
    """
    ranks: dict[frozenset[int], list[Mapping[str, int]]] = {}
    for stage, own in zip(plan.stages, bytes_of, strict=True):
        ranks.setdefault(frozenset(stage.devices), []).append(own)
    peak = max(sum(together(own, BRIEF).values()) for own in ranks.values())
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, memory_bytes=own))
        for stage, own in zip(plan.stages, bytes_of, strict=True)
    )
    prediction = replace(plan.prediction, peak_memory_bytes=peak)
    return replace(plan, stages=stages, prediction=prediction)


def num_ops(plan: Plan, blocks: Blocks) -> int:
    """How many ops ``exact_memory`` runs at most: those of the stages that may differ."""
    sizes = [
        sum(len(blocks.kinds[block.kind].nodes) for block in stage.blocks) for stage in plan.stages
    ]
    return sum(sizes)


def exact_memory(plan: Plan, graph: Graph, blocks: Blocks) -> tuple[Bytes | None, ...]:
    """Per stage the bytes by category at its fullest moment; None where it cannot be run.

    Stages that are alike are run once. ``graph`` may be at any batch size.
    """
    graph = with_precision(graph, plan.model.precision)
    if graph.batch_size != plan.microbatch_size:
        graph = graph.with_batch_size(plan.microbatch_size)
    crossing = boundaries(graph, blocks, plan)
    known: dict[object, StageActivations | None] = {}
    stages = (
        _Stage(plan, graph, blocks, index, crossing, known) for index in range(len(plan.stages))
    )
    return tuple(stage.peak() for stage in stages)


@dataclass(frozen=True)
class _Stage:
    """One stage of the plan. ``known`` are the runs so far."""

    plan: Plan
    graph: Graph
    blocks: Blocks
    index: int
    crossing: Sequence[Boundary]
    known: dict[object, StageActivations | None]

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.index]

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        return self.plan.cluster.device(self.stage.devices[0]).kind

    def peak(self) -> Bytes | None:
        """The fullest of the moments."""
        states = self._states()
        moments = [self._step(states)]
        for moment, others in self._moments():
            run = self._run(moment)
            if run is None:
                return None
            moments += [self._at(states, run, each, others) for each in (run.forward, run.backward)]
        return max(moments, key=lambda found: sum(found.values()))

    def _moments(self) -> Iterator[tuple[Moment, int]]:
        """Each moment, and how many other micro-batches are in flight then."""
        count, num_stages = self.plan.num_microbatches, len(self.plan.stages)
        in_flight = 1
        if num_stages > 1:
            schedule, chunks = find_schedule(self.plan.schedule), self.plan.num_chunks
            in_flight = min(count, schedule.in_flight(num_stages, count, self.index, chunks))
        yield Moment(is_first=True, is_last=count == 1), in_flight - 1
        if count > 1:
            steady = in_flight - 1 if count > in_flight else in_flight - 2
            yield Moment(is_first=False, is_last=False), steady
            yield Moment(is_first=False, is_last=True), 0

    def _run(self, moment: Moment) -> StageActivations | None:
        key = (moment, self._likeness())
        if key not in self.known:
            try:
                found = run_microbatch(self.graph, self.blocks, self.plan, self.index, moment)
            except (RuntimeError, NotImplementedError):
                found = None
            self.known[key] = found
        return self.known[key]

    def _likeness(self) -> object:
        """What tells a stage's run from another's."""
        stage = self.stage
        ends = tuple(
            (b.source_stage == self.index, b.spec, b.source_layout, b.target_layout)
            for b in self.crossing
            if self.index in (b.source_stage, b.target_stage)
        )
        kinds = tuple((block.kind, block.recompute) for block in stage.blocks)
        return kinds, stage.mesh, stage.shares, stage.zero, frozenset(stage.layouts.items()), ends

    def _at(
        self, states: Mapping[str, float], run: StageActivations, peak: Mapping[str, int],
        others: int,
    ) -> Bytes:  # fmt: skip
        """The bytes at a run's peak with ``others`` micro-batches besides."""
        found = {name: size for name, size in states.items() if name != GRADIENTS}
        found |= {name: float(size) for name, size in peak.items()}
        inputs = found.pop(INPUTS, 0.0) + others * run.inputs
        found[SAVED] = found.get(SAVED, 0.0) + others * (run.kept - run.inputs)
        if self.kind != "cpu":
            found["buffers"] = found.get("buffers", 0.0) + inputs
        sent = self._message_bytes()
        if sent:
            found[COMMUNICATION] = found.get(COMMUNICATION, 0.0) + sent
        return self._with_reserves(found)

    def _message_bytes(self) -> float:
        """Messages under way: of the next micro-batch, posted ahead, and of the last one."""
        if self.plan.num_microbatches == 1:
            return 0.0
        total = 0.0
        for boundary in self.crossing:
            is_target = boundary.target_stage == self.index
            if is_target or boundary.source_stage == self.index:
                layout = boundary.target_layout if is_target else boundary.source_layout
                numel = local_shape(boundary.spec.shape, layout, self.stage.mesh.shape)
                size = replace(boundary.spec, shape=numel).num_bytes
                total += size * (1 + boundary.spec.requires_grad if is_target else 1)
        return total

    def _step(self, states: Mapping[str, float]) -> Bytes:
        """The optimizer's step: no activation, all gradients."""
        return self._with_reserves(dict(states))

    def _with_reserves(self, found: Bytes) -> Bytes:
        groups = sum(size > 1 for size in self.stage.mesh.shape)
        found["reserve"] = float(reserve_bytes(self.kind, groups))
        lasting = ("parameters", "master", "versions", "optimizer", "gradients", "reserve")
        moving = sum(size for name, size in found.items() if name not in lasting)
        found["fragmentation"] = fragmentation_bytes(self.kind, moving)
        return {name: size for name, size in found.items() if size}

    def _states(self) -> Bytes:
        """Parameters, their master copies, gradients and optimizer states."""
        rules = policy(self.plan.model.precision, self.plan.model.optimizer)
        positions = stage_ranges(self.plan)[self.index]
        names = {
            ref.name
            for position in positions
            for name in self.blocks.blocks[position].nodes
            for ref in self.graph[name].inputs
            if self.graph[ref.name].kind == "parameter"
        }
        found: Bytes = {"parameters": 0.0, "master": 0.0, GRADIENTS: 0.0, "optimizer": 0.0}
        for name in sorted(names):
            self._add_parameter(found, name, rules)
        held = found["parameters"] + found["master"]
        found["versions"] = version_bytes(self.plan, self.index, held)
        return found

    def _add_parameter(self, found: Bytes, name: str, rules: PrecisionPolicy) -> None:
        spec, mesh = self.graph[name].spec, self.stage.mesh
        layout = leaf_layout(self.stage, self.blocks, name)
        shape = local_shape(spec.shape, layout, mesh.shape)
        shards = mesh.shape[0] if mesh.axes[0] == "dp" and not layout[0].is_shard else 1
        is_sharded = self.stage.zero > 0 and shards > 1 and len(shape) > 0
        numel = padded_numel(shape, shards) // shards if is_sharded else padded_numel(shape, 1)
        copied = rules.is_mixed
        found["master" if copied else "parameters"] += numel * rules.parameter_bytes
        if copied and not is_sharded:
            found["parameters"] += numel * rules.gathered_bytes
        if spec.requires_grad:
            found[GRADIENTS] += numel * rules.gradient_bytes
            found["optimizer"] += numel * rules.optimizer_bytes
