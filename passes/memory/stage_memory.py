"""Memory of a plan: by category, per stage, at its rank's peak.

In: a finished plan and its graph. Out: for each stage the bytes of a rank at its peak. States come
from the precision policy and the parameters' layouts; activations, recomputation, buffers and
gradients from running one micro-batch of the stage's program on fake tensors at its moment in the
step (``saved_tensors``), or from the rules of its ops (``priced_activations``). The peak is the
rank's, with all of its stages (``rank_memory``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from ...cost_model.ops.memory import (
    PrecisionPolicy,
    communicator_bytes,
    fragmentation_bytes,
    policy,
    policy_on,
    reserve_bytes,
)
from ...cost_model.simulator.actions import Action, Schedule
from ...planner.costs.basis import RUNTIME, Basis
from ...planner.costs.expert_loads import ExpertLoads
from ...planner.errors import InfeasibleError
from ...planner.evaluate.evaluate import at_microbatch, held_micro_batches, walked_stages
from ...planner.evaluate.stage_walk import StageWalk
from ...planner.evaluate.step import schedule_of, splits_backward
from ...planner.graph.graph import Blocks, Graph, TensorSpec
from ...planner.graph.layout import Layout, Mesh, local_shape
from ...planner.graph.state_sharding import state_sharding
from ...planner.kernels.recompute import has_tiles, is_offloaded
from ...planner.plan import Plan, StagePlan
from ...planner.schedules.held import MessageBytes, most_held, sends_kept
from ...planner.stage.stage_cost import TRANSIENT, combine_bytes
from ...planner.summary import HOST_STATES
from ...planner.variants.asynchronous import version_bytes
from ...planner.variants.replicas import stages_of_ranks
from ...planner.variants.slice_costs import carried_bytes
from ..local.stage_cut import Boundary, boundaries, op_layout, stage_ranges, with_replicas
from ..local.stage_program import shard_axes
from .communicators import num_communicators
from .priced_activations import WORKING, PricedStage
from .rank_memory import Bytes, StageBytes, action_bytes, fullest_moment
from .saved_tensors import Moment, StageActivations, run_microbatch
from .state_traffic import GATHERED, GRADIENTS, padded_numel

LASTING = (
    "parameters",
    "master",
    "versions",
    "optimizer",
    GRADIENTS,
    "reserve",
    "communicators",
)
"""Categories of memory that is held during the whole step, and so not lost to fragmentation."""


MOST_OPS_RUN = 1000
"""Most ops of a plan whose stages are executed on fake tensors: this takes about 3 seconds."""


def with_stage_memory(
    plan: Plan, graph: Graph, blocks: Blocks, *, is_gpu: bool | None = None, runs: bool = True
) -> Plan:
    """Return the plan with ``memory_bytes`` of each stage and the peak of each rank, predicted as
    in ``stage_memory``."""
    found = stage_memory(plan, graph, blocks, is_gpu=is_gpu, runs=runs)
    return with_memory(plan, [{k: round(size) for k, size in own.items()} for own in found])


def with_memory(plan: Plan, bytes_of: Sequence[Mapping[str, int]]) -> Plan:
    """Return the plan with the bytes ``bytes_of`` each stage by category, and the peak of its
    ranks. Of several stages on a pipeline rank, only one counts with the bytes held temporarily."""
    ranks = ((bytes_of[stage] for stage in stages) for stages in stages_of_ranks(plan))
    peak = max(sum(combine_bytes(own, TRANSIENT).values()) for own in ranks)
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, memory_bytes=own))
        for stage, own in zip(plan.stages, bytes_of, strict=True)
    )
    prediction = replace(plan.prediction, peak_memory_bytes=peak)
    return replace(plan, stages=stages, prediction=prediction)


def runs_stages(plan: Plan, blocks: Blocks) -> bool:
    """Return whether a plan's memory may be measured by executing its stages on fake tensors: it
    has few enough ops and compiles no blocks (a compiler decides which tensors are kept)."""
    kinds = (blocks.kinds[block.kind] for stage in plan.stages for block in stage.blocks)
    return not plan.compiled and sum(len(kind.nodes) for kind in kinds) <= MOST_OPS_RUN


def stage_memory(
    plan: Plan, graph: Graph, blocks: Blocks, *, is_gpu: bool | None = None, runs: bool = True
) -> tuple[Bytes, ...]:
    """Return for each stage of the plan its bytes by category on one device, at the moment at which
    its pipeline rank holds most. In Chimera's schedule two ranks have the same stages; the rank
    with more memory in use counts. ``runs``: a micro-batch's bytes come from executing the stage on
    fake tensors (equal stages once); else, or if that fails, from the memory rules of its ops.
    ``graph`` may be at any batch size. ``is_gpu``: buffers of sent messages are kept as long as on
    GPUs; by default if the plan's devices are GPUs."""
    memory = _PlanMemory(plan, graph, blocks, is_gpu=is_gpu, runs=runs)
    found: list[Bytes] = [{}] * len(plan.stages)
    for rank in range(memory.schedule.num_ranks):
        for each, moment in fullest_moment(*memory.of_rank(rank)).items():
            part, bytes_of = memory.schedule.part(each), memory.with_reserves(each, moment)
            if sum(bytes_of.values()) > sum(found[part].values()):
                found[part] = bytes_of
    return tuple(found)


def host_bytes(plan: Plan, graph: Graph, blocks: Blocks) -> dict[int, float]:
    """Return for each host (by index) the bytes of its memory that offloaded states and activations
    of its ranks take. Empty if nothing is offloaded, or if devices are CPUs."""
    graph, found = at_microbatch(graph, plan), dict[int, float]()
    walks = cache(lambda: walked_stages(graph, blocks, plan))
    held = cache(lambda: held_micro_batches(graph, blocks, plan))
    for index, stage in enumerate(plan.stages):
        one = _Stage(plan, graph, blocks, index, (), {}, walks, splits=False, runs=False)
        kept = one.activation_host_bytes * most_held(held()[index]) if one.is_offloading else 0.0
        kept += one.host_bytes if plan.offload != "none" else 0.0
        for device in stage.devices if kept and one.kind != "cpu" else ():
            host = plan.cluster.host_of[device]
            found[host] = found.get(host, 0.0) + kept
    return found


def check_host_memory(plan: Plan, graph: Graph, blocks: Blocks) -> None:
    """Raise InfeasibleError AP301 if a host's memory is too small for its ranks' offloaded
    states and activations."""
    for number, needed in host_bytes(plan, graph, blocks).items():
        host = plan.cluster.hosts[number]
        limit = host.device.host_memory_bytes * host.num_devices
        if limit and needed > limit:
            raise InfeasibleError(
                "AP301",
                f"{_offloaded_text(plan)} do not fit into the memory of host {number}",
                why=f"they need {needed / 1e9:.1f} GB, and its {host.num_devices} devices have "
                f"{limit / 1e9:.1f} GB of it",
                where=f"cluster {plan.cluster.name}",
                fix="zero=1 or more, more devices, or host_memory_bytes of the device in a cluster "
                "file, if the host has more",
            )


def _offloaded_text(plan: Plan) -> str:
    modes = {block.recompute for stage in plan.stages for block in stage.blocks}
    parts = [HOST_STATES[plan.offload]] if plan.offload != "none" else []
    return " and ".join(parts + ["offloaded activations"] * any(map(is_offloaded, modes)))


def memory_by_action(
    plan: Plan,
    graph: Graph,
    blocks: Blocks,
    rank: int,
    *,
    is_gpu: bool | None = None,
    runs: bool = True,
) -> list[tuple[Action, Bytes]]:
    """Return each compute action and weight update of a pipeline rank, with the rank's bytes by
    category on one device meanwhile; ``stage_memory`` returns their peak. If the rank has several
    stages, only the stage with most temporary bytes counts with them."""
    memory = _PlanMemory(plan, graph, blocks, is_gpu=is_gpu, runs=runs)
    return [
        (
            action,
            combine_bytes(
                (memory.with_reserves(each, own) for each, own in held.items()), TRANSIENT
            ),
        )
        for action, held in action_bytes(*memory.of_rank(rank))
    ]


class _PlanMemory:
    """Schedule, stages, messages and communicators of a plan, from which each rank's memory
    follows."""

    def __init__(
        self, plan: Plan, graph: Graph, blocks: Blocks, *, is_gpu: bool | None, runs: bool
    ) -> None:
        graph = at_microbatch(graph, plan)
        crossing = boundaries(graph, blocks, plan)
        self.schedule = schedule_of(plan, {(b.source_stage, b.target_stage) for b in crossing})
        known: dict[object, StageActivations] = {}
        assumed = replace(RUNTIME, loads=ExpertLoads.of_plan(plan, graph, blocks))
        basis = Basis(assumptions=assumed)
        walks = cache(lambda: walked_stages(graph, blocks, plan, basis=basis))
        self._stages = [
            _Stage(
                plan,
                graph,
                blocks,
                index,
                crossing,
                known,
                walks,
                splits=splits_backward(self.schedule, index),
                runs=runs,
            )
            for index in range(len(plan.stages))
        ]
        is_gpu = self._stages[0].kind != "cpu" if is_gpu is None else is_gpu
        self._most = sends_kept(self.schedule, is_gpu=is_gpu)
        self._messages = _message_bytes(plan, self.schedule, crossing)
        self._groups = num_communicators(plan, crossing)

    def of_rank(
        self, rank: int
    ) -> tuple[Schedule, int, Mapping[int, StageBytes], MessageBytes, int]:
        """Return the arguments of ``action_bytes`` for pipeline rank ``rank``."""
        held = {each: self._of(each).bytes() for each in self.schedule.stages(rank)}
        return self.schedule, rank, held, self._messages, self._most

    def with_reserves(self, stage: int, found: Bytes) -> Bytes:
        """Return a stage's bytes ``found`` with reserves of its device added (CUDA context,
        communicators, fragmentation). ``stage``: its number in the schedule."""
        return self._of(stage).with_reserves(found, self._groups)

    def _of(self, stage: int) -> _Stage:
        return self._stages[self.schedule.part(stage)]


def _message_bytes(plan: Plan, schedule: Schedule, crossing: Sequence[Boundary]) -> MessageBytes:
    """Return the bytes per micro-batch of messages between stages, by the stages' numbers in the
    schedule."""
    sent: dict[tuple[int, int], float] = {}
    taken: dict[tuple[int, int], float] = {}
    if schedule.parts:
        crossing = with_replicas(tuple(crossing), len(plan.stages))
    for boundary in crossing:
        pair = boundary.source_stage, boundary.target_stage
        layouts = boundary.source_layout, boundary.target_layout
        source, target = (
            _local_bytes(boundary.spec, layout, plan.stages[schedule.part(stage)].mesh)
            for stage, layout in zip(pair, layouts, strict=True)
        )
        sent[pair] = sent.get(pair, 0.0) + source
        taken[pair] = taken.get(pair, 0.0) + target
        if boundary.spec.requires_grad:
            back = pair[::-1]
            sent[back] = sent.get(back, 0.0) + target
            taken[back] = taken.get(back, 0.0) + source
    return MessageBytes(sent, taken)


def _local_bytes(spec: TensorSpec, layout: Layout, mesh: Mesh) -> int:
    return replace(spec, shape=local_shape(spec.shape, layout, mesh.shape)).num_bytes


@dataclass(frozen=True)
class _Stage:
    """Stage of a plan whose memory is computed. ``known`` caches measurements; ``walks`` returns
    the predicted costs of all stages, block by block; ``splits``: the stage's backward is split
    into input and weight gradients; ``runs``: it is executed on fake tensors."""

    plan: Plan
    graph: Graph
    blocks: Blocks
    index: int
    crossing: Sequence[Boundary]
    known: dict[object, StageActivations]
    walks: Callable[[], Sequence[StageWalk]]
    splits: bool
    runs: bool

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.index]

    @property
    def is_offloading(self) -> bool:
        """True if blocks of the stage keep activations in host memory."""
        return any(is_offloaded(block.recompute) for block in self.stage.blocks)

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        return self.plan.cluster.device(self.stage.devices[0]).kind

    def bytes(self) -> StageBytes:
        """Return the bytes of the stage's training states and of a micro-batch, on one rank."""
        return StageBytes(
            self._states,
            self._run,
            holds_inputs=self.kind != "cpu",
        )

    def _run(self, moment: Moment) -> StageActivations:
        key = moment, self._likeness if self.runs else self.index
        if key not in self.known:
            self.known[key] = self._activations(moment)
        return self.known[key]

    def _activations(self, moment: Moment) -> StageActivations:
        moves = policy_on(self.kind, self._rules).moves_gradients
        if self.runs and not self.is_offloading and not moves:
            try:
                found = run_microbatch(
                    self.graph, self.blocks, self.plan, self.index, moment, splits=self.splits
                )
            except (RuntimeError, NotImplementedError):
                return self._priced.run(moment)
            return replace(found, kept=found.kept + round(self._carried))
        return self._priced.run(moment)

    @cached_property
    def _carried(self) -> float:
        """Additional bytes that a micro-batch keeps if its sequences are cut into slices: keys and
        values of earlier slices."""
        mesh, total = self.stage.mesh, 0.0
        positions = stage_ranges(self.plan)[self.index] if self.plan.slices else ()
        for position, decided in zip(positions, self.stage.blocks, strict=False):
            again = has_tiles(decided.recompute)
            for node in (self.graph[name] for name in self.blocks.blocks[position].nodes):
                layouts = op_layout(self.stage, self.blocks, node.name).inputs[1:3]
                pair = zip(node.inputs[1:3], layouts, strict=True)
                size = sum(_local_bytes(self.graph.spec(ref), held, mesh) for ref, held in pair)
                total += carried_bytes(node, size, self.plan.slices, again=again)
        return total

    @cached_property
    def _priced(self) -> PricedStage:
        walk, gathered = self.walks()[self.index], self._states.get(GATHERED, 0.0)
        return PricedStage(walk, gathered, self.splits)

    @cached_property
    def _likeness(self) -> object:
        """Key that is equal for stages that take the same memory when executed on fake tensors."""
        stage = self.stage
        ends = tuple(
            (b.source_stage == self.index, b.spec, b.source_layout, b.target_layout)
            for b in self.crossing
            if self.index in (b.source_stage, b.target_stage)
        )
        kinds = tuple((block.kind, block.recompute) for block in stage.blocks)
        layouts, placed = frozenset(stage.layouts.items()), [e.pairs for e in stage.placements]
        sharding = stage.zero, stage.shard_degree
        return kinds, stage.mesh, stage.shares, sharding, layouts, tuple(placed), ends

    def with_reserves(self, found: Bytes, groups: Mapping[int, int]) -> Bytes:
        """Return the stage's bytes ``found`` with added reserves: the CUDA context, communicators
        and fragmentation. ``groups``: number of communicators by device."""
        most = max(groups[device] for device in self.stage.devices)
        found["reserve"] = float(reserve_bytes(self.kind, 0))
        found["communicators"] = float(communicator_bytes(self.kind, most))
        moving = sum(size for name, size in found.items() if name not in LASTING)
        found["fragmentation"] = fragmentation_bytes(self.kind, moving)
        told = ("communicators",) if self.runs else ("communicators", WORKING)
        return {
            name: found.get(name, 0.0)
            for name in (*found, *told)
            if found.get(name) or name in told
        }

    @cached_property
    def _rules(self) -> PrecisionPolicy:
        model = self.plan.model
        return policy(model.precision, model.optimizer, self.plan.states)

    @property
    def activation_host_bytes(self) -> float:
        """Bytes in the host's memory of the activations that one micro-batch keeps on one rank."""
        return float(sum(block.host_bytes for block in self.walks()[self.index].found))

    @cached_property
    def host_bytes(self) -> float:
        """Bytes in the host's memory of one rank's offloaded states."""
        held = (self._held(name) for name in self._parameters if self._is_trained(name))
        rules, zero = self._rules, self.stage.zero
        return float(sum(numel * rules.in_host(zero, shards) for numel, shards in held))

    def _is_trained(self, name: str) -> bool:
        return self.graph[name].spec.requires_grad

    @cached_property
    def _parameters(self) -> list[str]:
        positions = stage_ranges(self.plan)[self.index]
        return sorted(
            {
                ref.name
                for position in positions
                for name in self.blocks.blocks[position].nodes
                for ref in self.graph[name].inputs
                if self.graph[ref.name].kind == "parameter"
            }
        )

    @cached_property
    def _states(self) -> Bytes:
        """Bytes on one rank of parameters, master weights, gathered parameters, gradients and
        optimizer states."""
        rules = policy_on(self.kind, self._rules)
        categories = ("parameters", "master", GATHERED, GRADIENTS, "optimizer")
        found: Bytes = dict.fromkeys(categories, 0.0)
        for name in self._parameters:
            self._add_parameter(found, name, rules)
        held = found["parameters"] + found["master"]
        found["versions"] = version_bytes(self.plan, self.index, held)
        return found

    def _held(self, name: str) -> tuple[int, int]:
        """Return the number of elements of parameter ``name`` that one rank holds, and the number
        of ranks over which ZeRO shards it."""
        spec, mesh = self.graph[name].spec, self.stage.mesh
        layout = self.stage.leaf_layout(name, self.blocks)
        shape = local_shape(spec.shape, layout, mesh.shape)
        zero, degree = self.stage.zero, self.stage.shard_degree
        axes = shard_axes(spec, layout, mesh, zero, degree)
        shards = state_sharding(mesh, axes, degree).num_shards
        return padded_numel(shape, shards) // shards, shards

    def _add_parameter(self, found: Bytes, name: str, rules: PrecisionPolicy) -> None:
        spec = self.graph[name].spec
        if spec.stored:
            found["parameters"] += spec.stored_bytes
            return
        numel, shards = self._held(name)
        rules = rules if self._is_trained(name) else rules.frozen
        copied = rules.is_mixed
        if not rules.moved_shard(self.stage.zero, shards):
            found["master" if copied else "parameters"] += numel * rules.parameter_bytes
        if copied and shards == 1:
            found["parameters"] += numel * rules.gathered_bytes
        if shards > 1 and self.stage.zero < 3:
            found[GATHERED] += numel * shards * rules.gathered_bytes
        found[GRADIENTS] += numel * rules.gradient_bytes * (not rules.moves_gradients)
        found["optimizer"] += numel * rules.optimizer_bytes
