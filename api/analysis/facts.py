"""Facts of a plan, each computed in one place: figures, memory, seconds, collectives, candidates.

In: a plan. Out: values, and rows of plain values, for the text, pages, data frames and JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, TypeVar

from autoparallel.options.words import bytes_text, count_text, percent_text, seconds_text
from autoparallel.planner.plan import Alternative, Plan, StagePlan
from autoparallel.planner.stage.stage_cost import TRANSIENT, combine_bytes
from autoparallel.planner.summary import SEPARATOR, mesh_text, plan_summary
from autoparallel.planner.variants.asynchronous import num_updates
from autoparallel.planner.variants.replicas import stages_of_ranks
from autoparallel.planning.tf32 import families_text


@dataclass(frozen=True, slots=True)
class Figure:
    """Kind of number that a plan predicts (step time, memory, …): its JSON key, its names in texts
    and tables, and the functions that read it from a plan and format it."""

    key: str
    name: str
    heading: str
    of_plan: Callable[[Plan], float]
    write: Callable[[float], str]
    less_is_better: bool = True

    def text(self, plan: Plan) -> str:
        return self.write(self.of_plan(plan))


STEP = Figure(
    "step_seconds", "step", "step", lambda plan: plan.prediction.step_seconds, seconds_text
)
THROUGHPUT = Figure(
    "throughput",
    "throughput /s",
    "per second",
    lambda plan: plan.prediction.tokens_per_second,
    count_text,
    less_is_better=False,
)
UTILIZATION = Figure(
    "model_flops_utilization",
    "MFU",
    "MFU",
    lambda plan: plan.prediction.model_flops_utilization,
    percent_text,
    less_is_better=False,
)
BUBBLE = Figure(
    "bubble_fraction",
    "bubble",
    "bubble",
    lambda plan: plan.prediction.bubble_fraction,
    percent_text,
)
MEMORY = Figure(
    "memory_bytes", "memory", "memory", lambda plan: plan.prediction.peak_memory_bytes, bytes_text
)
"""Predicted peak memory of the device with the highest peak."""

FIGURES = (STEP, THROUGHPUT, UTILIZATION, BUBBLE, MEMORY)


class FigureRow(NamedTuple):
    """Report row of a number that a plan predicts, with a remark and the value's source."""

    name: str
    text: str
    remark: str = ""
    source: str = ""


def figure_rows(plan: Plan) -> list[FigureRow]:
    """Return report rows of a plan's step time, throughput, MFU, memory and bubble."""
    memory, unit = fullest_rank(plan), unit_of(plan)
    used = percent_text(MEMORY.of_plan(plan) / memory.limit_bytes)
    limit = bytes_text(memory.limit_bytes)
    simulated = "the schedule simulated with each stage's seconds, docs/costs.md"
    per_step = f"{unit} of the global batch, divided by the step"
    flops = "FLOPs of the model without recomputation, at the peak, divided by the step"
    rows = [
        FigureRow("step", STEP.text(plan), "predicted", simulated),
        FigureRow(f"{unit} per second", THROUGHPUT.text(plan), "", per_step),
        FigureRow("MFU", UTILIZATION.text(plan), "of the devices' peak", flops),
        FigureRow("memory", MEMORY.text(plan), f"{used} of {limit}", memory_source(plan)),
    ]
    if plan.has_pipeline:
        rows.append(FigureRow("bubble", BUBBLE.text(plan), "of the step"))
    return rows


def unit_of(plan: Plan) -> str:
    """Return the unit of the throughput: "tokens" or "samples"."""
    return "tokens" if plan.model.seq else "samples"


def model_name(plan: Plan) -> str:
    """Return the file name of the model without folders, or the target if it is no file."""
    target = plan.model.target
    return target.rsplit("/", 1)[-1] if target.endswith(".py") else target


def batch_text(plan: Plan) -> str:
    """Describe the global batch in words."""
    model = plan.model
    return f"batch {model.global_batch}" + (f" × {model.seq} tokens" if model.seq else "")


def configuration_text(plan: Plan) -> str:
    """Return a plan's one-line summary of degrees and choices, with micro-batches spelled out."""
    size = plan.microbatch_size
    of_ranks = {size // stage.mesh.row_parts for stage in plan.stages}
    is_equal = len(of_ranks) == 1 and not any(stage.shares for stage in plan.stages)
    text = microbatches_text(plan.num_microbatches, size, of_ranks.pop() if is_equal else size)
    return SEPARATOR.join((plan_summary(plan).rpartition(SEPARATOR)[0], text))


def microbatches_text(count: int, size: int, rank_rows: int) -> str:
    """Describe micro-batches by count and size, with the samples of each rank if they are fewer,
    but not none: then ranks have parts of samples.

    >>> microbatches_text(1, 32, 32), microbatches_text(16, 4, 1)
    ('1 micro-batch of 32', '16 micro-batches of 4 (1 a rank)')
    """
    of_rank = f" ({rank_rows} a rank)" if rank_rows not in (0, size) else ""
    return f"{count} micro-batch{'es' if count > 1 else ''} of {size}{of_rank}"


def precision_text(plan: Plan) -> str:
    """Return the precision; for fp32 on devices with TF32 also the ops that compute in TF32."""
    found = plan.model.precision
    if found != "fp32" or plan.tf32 is None:
        return found
    return f"{found} (TF32 {families_text(plan.tf32)})" if plan.tf32 else f"{found} (no TF32)"


def device_text(plan: Plan) -> str:
    """Return the devices by name and number: ``8 × H100``."""
    counts: dict[str, int] = {}
    for host in plan.cluster.hosts:
        counts[host.device.name] = counts.get(host.device.name, 0) + host.num_devices
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


MEMORY_NAMES = {"master": "master weights", "transient": "working"}
"""Names in reports of the memory categories that plans name otherwise."""

MEMORY_MEANINGS = {
    "parameters": "what this device holds of the weights",
    "master weights": "the weights' copy in float32 that the optimizer steps",
    "versions": "older weights that micro-batches under way still need",
    "gradients": "sums over the micro-batches of a step",
    "optimizer": "the optimizer's states, two moments per weight with Adam",
    "gathered": "weights of other devices, gathered for the passes",
    "activations": "what forwards keep for their backwards",
    "inputs": "batches, and what other stages sent",
    "recomputation": "what a recomputed forward makes again",
    "working": "tensors that the running block frees before it ends",
    "communication": "messages and buffers of collectives",
    "buffers": "the model's buffers and constants",
    "fragmentation": "gaps in the allocator's memory",
    "communicators": "what NCCL takes for its communicators",
    "reserve": "the context and workspaces of CUDA",
}
"""Meaning of each memory category, in the order of reports."""


Size = TypeVar("Size", int, float)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of a pipeline rank on ``device``: ``held`` has the bytes by category.

    ``limit_bytes`` is the usable memory of its smallest device; ``excess_bytes`` is the plan's peak
    minus the limit, negative if the plan fits.
    """

    stages: tuple[int, ...]
    device: int
    held: Mapping[str, int]
    limit_bytes: int
    excess_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name of memory category, in the order of reports; empty ones are left out."""
        return named_memory({name: size for name, size in self.held.items() if size})


def named_memory(held: Mapping[str, Size]) -> dict[str, Size]:
    """Sum bytes by the names that reports give to memory categories, in the order of reports."""
    found: dict[str, Size] = {}
    for category, size in held.items():
        name = MEMORY_NAMES.get(category, category)
        found[name] = found.get(name, 0) + size
    return {name: found[name] for name in in_order(found, MEMORY_MEANINGS)}


def in_order(names: Iterable[str], order: Collection[str]) -> list[str]:
    """Return distinct names sorted as in ``order``; names missing there come last.

    >>> in_order(["x", "b", "a"], ("a", "b", "c"))
    ['a', 'b', 'x']
    """
    found = dict.fromkeys(names)
    return [*(name for name in order if name in found), *(n for n in found if n not in order)]


def fullest_rank(plan: Plan) -> RankMemory:
    """Return the memory of the pipeline rank with the highest peak.

    Of the transient bytes of the rank's stages only the largest counts. Under Chimera, where a rank
    runs two stages, activations are the predicted peak minus all other categories.
    """
    ranks = [(stages, bytes_of(plan, stages)) for stages in stages_of_ranks(plan)]
    stages, found = max(ranks, key=lambda rank: sum(rank[1].values()))
    peak = plan.prediction.peak_memory_bytes
    if plan.schedule == "chimera" and plan.has_pipeline:
        others = sum(found.values()) - found.get("activations", 0)
        found["activations"] = peak - others
    first = plan.stages[stages[0]]
    limit = usable_bytes(plan, first)
    return RankMemory(stages, first.devices[0], found, limit, peak - limit)


def bytes_of(plan: Plan, stages: Sequence[int]) -> dict[str, int]:
    """Return the predicted bytes, by memory category, of a pipeline rank that runs ``stages``."""
    return combine_bytes(
        (plan.stages[stage].prediction.memory_bytes for stage in stages), TRANSIENT
    )


def grouped_bytes(
    held: Mapping[str, int], groups: Mapping[str, Sequence[str]], rest: str
) -> dict[str, int]:
    """Sum memory bytes by group of categories; all ungrouped categories are summed as ``rest``.

    >>> grouped_bytes({"master": 2, "buffers": 1}, {"weights": ("parameters", "master")}, "rest")
    {'weights': 2, 'rest': 1}
    """
    found = {name: sum(held.get(each, 0) for each in group) for name, group in groups.items()}
    return {**found, rest: sum(held.values()) - sum(found.values())}


def usable_bytes(plan: Plan, stage: StagePlan) -> int:
    """Return the bytes that a process may allocate on the smallest device of ``stage``."""
    return min(plan.cluster.device(rank).usable_memory_bytes for rank in stage.devices)


def memory_source(plan: Plan) -> str:
    """Describe the method that predicted the memory of the plan's stages."""
    held = [stage.prediction.memory_bytes for stage in plan.stages]
    if not all("communicators" in own for own in held):
        return "estimated by the rules of the ops"
    if any("working" in own for own in held):
        return "simulated action by action, with the rules of the ops"
    return "simulated action by action, with the ops run on fake tensors"


class StageRow(TypedDict):
    """Report row of a stage: its blocks and ranks, seconds of a micro-batch, peak bytes."""

    stage: int
    blocks: list[str]
    ranks: list[int]
    mesh: str
    zero: int
    shard_degree: int
    recomputed: int
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int


def stage_rows(plan: Plan) -> list[StageRow]:
    """Return a report row (``StageRow``) per stage of a plan."""
    return [
        {
            "stage": index,
            "blocks": [block.name for block in stage.blocks],
            "ranks": list(stage.devices),
            "mesh": mesh_text(stage.mesh, stage.expert_degree, stage.slice_degree),
            "zero": stage.zero,
            "shard_degree": stage.shard_degree,
            "recomputed": sum(block.recompute != "none" for block in stage.blocks),
            "forward_seconds": stage.prediction.seconds.get("forward", 0.0),
            "backward_seconds": stage.prediction.seconds.get("backward", 0.0),
            "memory_bytes": sum(stage.prediction.memory_bytes.values()),
        }
        for index, stage in enumerate(plan.stages)
    ]


def memory_rows(plan: Plan) -> list[dict[str, int]]:
    """Return the predicted bytes of each stage by memory category."""
    return [
        {"stage": index, **stage.prediction.memory_bytes} for index, stage in enumerate(plan.stages)
    ]


SPENT = {
    "compute": "compute",
    "communication within the stage": "communication",
    "sends to the next stage": "send",
    "gradient synchronization": "exposed_sync",
    "optimizer": "optimizer",
}
"""Purposes on which a rank spends a step's seconds, and their keys in ``prediction.seconds``."""


def rank_seconds(plan: Plan, stages: Sequence[int]) -> dict[str, float]:
    """Return the seconds that a rank which runs ``stages`` spends in a training step, by purpose:
    compute, collectives, sends, …, and waiting."""
    updates, parts = num_updates(plan), dict.fromkeys(SPENT, 0.0)
    for stage in stages:
        seconds = plan.stages[stage].prediction.seconds
        for name, key in SPENT.items():
            times = updates if key in ("exposed_sync", "optimizer") else _num_runs(plan)
            parts[name] += seconds.get(key, 0.0) * times
    waiting = plan.prediction.step_seconds - sum(parts.values())
    other = "waiting for other stages" if plan.has_pipeline else "other"
    parts[other] = waiting if waiting > 1e-3 * plan.prediction.step_seconds else 0.0
    return {name: value for name, value in parts.items() if value > 0}


def busiest_rank(plan: Plan) -> tuple[int, ...]:
    """Return the stages of the rank with the most seconds per micro-batch."""

    def busy(stages: Sequence[int]) -> float:
        own = [plan.stages[stage].prediction.seconds for stage in stages]
        return sum(each.get("forward", 0.0) + each.get("backward", 0.0) for each in own)

    return max(stages_of_ranks(plan), key=busy)


def _num_runs(plan: Plan) -> float:
    """Return the number of micro-batches per step that run through a stage: all, or half of them
    under Chimera, whose pipeline runs in both directions."""
    is_both_ways = plan.schedule == "chimera" and plan.has_pipeline
    return plan.num_microbatches / (2 if is_both_ways else 1)


class Communication(NamedTuple):
    """Collectives of one purpose in a stage's step. ``beside`` names the work that they overlap
    with; ``seconds`` is their total, ``exposed_seconds`` the part that is not overlapped."""

    what: str
    beside: str
    seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)


def communication(plan: Plan, stage: StagePlan) -> list[Communication]:
    """Return the collectives of a stage in a step that take time, merged by purpose."""
    own, count = stage.prediction.seconds, _num_runs(plan)
    states = own.get("states", 0.0)
    exposed = states - own.get("hidden_states", 0.0)
    once = own.get("parameter_gather", 0.0) + own.get("gradient_sync", 0.0)
    on_path = count * (own.get("communication", 0.0) - exposed)
    of_states = "parameters and gradients" if stage.zero == 3 else "gradients"
    per_step = {0: "sum gradients", 1: "sum gradients, gather parameters", 2: "gather parameters"}
    beside = {0: "last backward", 1: "last backward, first forward", 2: "first forward"}
    if stage.shard_degree:
        per_step |= {
            2: "gather parameters, sum gradients over groups",
            3: "sum gradients over groups",
        }
        beside[2] = beside[1]
    if plan.gradient_order == "priority":
        beside[0] = "last backward, next forward"
    names = {own.algorithm for own in stage.gradient_sums}
    on_gpus = any(host.device.kind == "cuda" for host in plan.cluster.hosts)
    if not on_gpus and names - {"library"}:
        per_step[0] = f"sum gradients by {' or '.join(sorted(names))}"
    updates, zero = num_updates(plan), stage.zero
    found = [
        Communication("of ops and between layouts", "nothing", on_path, on_path),
        Communication(
            f"{of_states}, every micro-batch", "the next block", states * count, exposed * count
        ),
        Communication(
            per_step.get(zero, "sum gradients") + ", once",
            beside.get(zero, "last backward"),
            once * updates,
            own.get("exposed_sync", once) * updates,
        ),
    ]
    return [each for each in found if each.seconds > 1e-6 * plan.prediction.step_seconds]


def merged_communication(plan: Plan) -> list[tuple[tuple[int, ...], Communication]]:
    """Return pairs of stage numbers and the collectives that these stages have in common."""
    found: dict[tuple[str, ...], tuple[list[int], Communication]] = {}
    for index, stage in enumerate(plan.stages):
        for each in communication(plan, stage):
            key = (
                each.what,
                each.beside,
                seconds_text(each.seconds),
                seconds_text(each.exposed_seconds),
            )
            found.setdefault(key, ([], each))[0].append(index)
    return [(tuple(stages), each) for stages, each in found.values()]


class CandidateRow(TypedDict):
    """Report row of a candidate plan: predicted seconds and bytes (or None), and why it lost."""

    configuration: str
    step_seconds: float | None
    memory_bytes: float | None
    reason: str
    chosen: bool


def candidate_rows(plan: Plan, *, merged: bool = False) -> list[CandidateRow]:
    """Return report rows of the plan and its alternatives. If ``merged``, alternatives with equal
    seconds and bytes share a row."""
    others = merged_alternatives(plan.alternatives) if merged else plan.alternatives
    best = plan.prediction
    own = Alternative(plan_summary(plan), best.step_seconds, best.peak_memory_bytes, "the plan")
    return [
        {
            "configuration": each.summary,
            "step_seconds": each.step_seconds or None,
            "memory_bytes": each.peak_memory_bytes or None,
            "reason": each.reason,
            "chosen": each is own,
        }
        for each in (own, *others)
    ]


def merged_alternatives(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Merge alternatives with equal seconds and bytes whose summaries differ in only one part.

    >>> first = Alternative("dp=4 pp=2 · ZeRO 0 · ZB-H1 · 1 × 32", 1.0, 10, "bubble +9.0 %")
    >>> second = Alternative("dp=4 pp=2 · ZeRO 0 · ZB-H2 · 1 × 32", 1.0, 10, "bubble +9.0 %")
    >>> [each.summary for each in merged_alternatives([first, second])]
    ['dp=4 pp=2 · ZeRO 0 · ZB-H1/ZB-H2 · 1 × 32']
    """
    groups: dict[tuple[str, str, str], list[list[list[str]]]] = {}
    shown: list[tuple[Alternative, list[list[str]]]] = []
    for each in alternatives:
        step, memory = seconds_text(each.step_seconds), bytes_text(each.peak_memory_bytes)
        group = groups.setdefault((step, memory, each.reason), [])
        parts = each.summary.split(SEPARATOR)
        if not any(_joins(merged, parts) for merged in group):
            group.append([[part] for part in parts])
            shown.append((each, group[-1]))
    return [
        replace(each, summary=SEPARATOR.join("/".join(options) for options in merged))
        for each, merged in shown
    ]


def _joins(merged: list[list[str]], parts: Sequence[str]) -> bool:
    """Add each part of a summary to the alternative texts at its place in ``merged``, if at most
    one part is new; return whether they were added."""
    if len(merged) != len(parts):
        return False
    new = [at for at, options in enumerate(merged) if parts[at] not in options]
    if len(new) > 1 or (new and len(parts) == 1):
        return False
    for at in new:
        merged[at].append(parts[at])
    return True
