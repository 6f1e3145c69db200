"""Export to another training system: its limits, and the files for a plan.

In: a plan, a system. Out: the files of the nearest configuration for the same model, devices and
global batch; a report of the differences, also written beside the files; and the price of the
configuration, if the plan's model can be loaded.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import Any

from autoparallel.analysis.configurations import configuration_summary, divided
from autoparallel.analysis.plan_model import load_plan_model
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.exporting.plans import WrittenPlan
from autoparallel.options.progress import progress
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.configured.configuration import Configuration, even_layers
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import OFFERED_MODES, PLAIN_MODES
from autoparallel.planner.schedules.catalogue import SCHEDULES
from autoparallel.planner.summary import plan_summary
from autoparallel.report.comparison import change_text
from autoparallel.systems.degrees import (
    configuration_of,
    expert_axes,
    layers_of,
    whole_experts,
)
from autoparallel.systems.features import FEATURES, Feature, features_of
from autoparallel.systems.model_config import ModelConfig, read_config

DIFFERENCES = "differences.txt"
"""File name of the report."""

WIDTH = 80
"""Width of the report in columns."""

ONE_CHAIN = {
    "uneven-shares": "equal shares: the step waits for the slowest device",
    "gradient-sums": "what NCCL chooses",
    "gradient-order": "sums as the backward makes gradients",
    "servers": "data parallelism without servers",
    "tiles": "these ops as a whole, which takes more memory",
    **{str(mode): "full recomputation" for mode in OFFERED_MODES},
    "fp64": "fp32",
}
"""Replacements of plan features that every system lacks: each trains a chain of stages by NCCL."""

PIPELINES = {
    **ONE_CHAIN,
    "chimera": "1F1B: it holds no stage twice",
    "terapipe": "1F1B of whole sequences",
    **{
        name: "1F1B with one update a step"
        for name, each in SCHEDULES.items()
        if each.family == "asynchronous"
    },
    "mixed-stages": "one mesh for all stages",
    "branches": "one chain of stages, each on devices of its own",
    "mixed-zero": "the highest of them for all stages",
    "weight-layouts": "whole weights, or its own column and row splits over tp; embeddings by "
    "vocabulary",
    "lora": "all weights are trained",
}
"""Replacements of plan features that training systems with pipelines lack."""

OVER_ALL = "states sharded over all data-parallel ranks"
"""Replacement of ZeRO within groups of ranks."""

RECIPE = (
    "learning rate, weight decay, clipping and steps are no part of a plan: the defaults of the "
    "system hold where you give none"
)
"""Note in the report of every system."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Property of a plan, and its replacement in the written configuration."""

    plan: str
    here: str


@dataclass(frozen=True, slots=True)
class PricedConfig:
    """Configuration with its predicted time and memory; without them, ``reason`` says why."""

    configuration: Configuration
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Files:
    """Files for a training system: texts by file name, and the command that starts training.

    ``lost`` are differences from the plan in this configuration; ``notes`` are tasks for the user.
    """

    texts: Mapping[str, str]
    start: str
    lost: tuple[Deviation, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriterInput:
    """Input of a system's file writer. ``folder`` is the final path of the files' folder."""

    plan: Plan
    configuration: Configuration
    config: ModelConfig | None
    folder: Path

    @property
    def num_layers(self) -> int:
        return sum(len(layers_of(self.plan, stage)) for stage in self.plan.stages)

    @property
    def devices_per_host(self) -> int:
        return max(host.num_devices for host in self.plan.cluster.hosts)

    @property
    def num_hosts(self) -> int:
        return len(self.plan.cluster.hosts)


def _keep(configuration: Configuration) -> Configuration:
    return configuration


@dataclass(frozen=True, slots=True)
class System:
    """Training system. ``limits`` maps features of plans that it lacks to their replacements.

    ``lacks`` names the degrees that it lacks, of "tp", "cp", "ep" and "pp". ``settle`` changes a
    configuration to options that the system can run, keeping its degrees. ``version`` is the
    release whose option names are used. With ``builds_model`` the system builds its own model from
    sizes. With ``selects_less`` its selective recomputation saves less memory than the plan's, so
    it is priced as no recomputation.
    """

    title: str
    version: str
    limits: Mapping[str, str]
    write: Callable[[WriterInput], Files]
    settle: Callable[[Configuration], Configuration] = _keep
    lacks: tuple[str, ...] = ()
    builds_model: bool = False
    selects_less: bool = False

    def __post_init__(self) -> None:
        assert set(self.limits) <= set(FEATURES), "limits are features"

    def __call__(
        self, plan: Plan, folder: Path, *, place: Path, plan_path: Path, trust: bool
    ) -> WrittenPlan:
        """Write the system's configuration that is nearest to ``plan``, as files in ``folder``.

        Raises UsageError AP364 if the batch has too few samples for the devices without the degrees
        that the system lacks, and AP365 for a plan of CPUs.
        """
        if any(host.device.kind == "cpu" for host in plan.cluster.hosts):
            raise UsageError(
                "AP365",
                f"a plan for CPUs cannot be exported to {self.title}",
                why="on CPUs none of these systems runs, or it trains by DDP whatever it is told",
                where=f"the plan's cluster, {plan.cluster.name}",
                fix="plan for GPUs: --cluster 8xH100; autoparallel run trains on CPUs",
            )
        candidates = list(candidates_of(self, plan))
        if self.builds_model and "lora" in plan.model.settings:
            why = "it trains all weights, the plan adapters alone"
            cost = PricedConfig(candidates[0], reason=why)
        else:
            cost = price(plan, plan_path, candidates, trust=trust)
        planned, chosen = configuration_of(plan), cost.configuration
        if planned.recompute == "selective" and chosen.recompute == "none" and self.selects_less:
            cost = replace(cost, configuration=replace(chosen, recompute="selective"))
        config, why_none = read_config(plan) if self.builds_model else (None, "")
        files = self.write(WriterInput(plan, cost.configuration, config, place))
        lost = (
            *differences(self, features_of(plan)),
            *_wider_sharding(self, plan, chosen),
            *_more_recompute(self, planned, chosen),
            *files.lost,
        )
        unknown = f"the sizes of the model are left to you: {why_none}"
        notes = (*([unknown] if why_none else []), *files.notes)
        report = report_text(f"{self.title} ({self.version})", plan, cost, lost, notes)
        for name, text in files.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / DIFFERENCES).write_text(report + "\n", encoding="utf-8")
        return WrittenPlan(
            (*files.texts, DIFFERENCES), files.start, report, _facts(self, cost, lost, notes)
        )


def differences(system: System, features: Sequence[Feature]) -> Iterator[Deviation]:
    """Yield the plan's features that a training system lacks, with their replacements."""
    for feature in features:
        if feature.name in system.limits:
            yield Deviation(feature.text, system.limits[feature.name])


def expert_differences(job: WriterInput) -> Iterator[Deviation]:
    """Yield a difference from the plan if other ranks hold different experts, in a system that
    spreads experts over neighbouring ranks and else splits each over tensor-parallel ones."""
    own, planned = job.configuration, configuration_of(job.plan)
    names = {"tp": "tensor", "cp": "context", "dp": "data"}
    if own.ep > 1:
        here = expert_axes(own)
        there = [*planned.folded, *(["dp"] if planned.data_ep > 1 else [])]
        if sorted(here) != sorted(there):
            planned_names = " and ".join(names[name] for name in there) or "no"
            yield Deviation(
                f"experts spread over ranks of {planned_names} parallelism",
                f"over {own.ep} neighbouring ranks, which are of "
                f"{' and '.join(names[name] for name in here)} parallelism",
            )
        elif "tp" in here and max(stage.expert_degree for stage in job.plan.stages) < own.ep:
            yield Deviation(
                "experts' outputs summed over tensor-parallel ranks",
                "tokens sent to the experts of tensor-parallel ranks, too",
            )
    elif own.tp > 1 and whole_experts(job.plan):
        yield Deviation(
            "whole experts on each tensor-parallel rank",
            "a part of every expert on each tensor-parallel rank",
        )


def _wider_sharding(system: System, plan: Plan, chosen: Configuration) -> Iterator[Deviation]:
    """Yield a difference from the plan if it shards states within groups of ranks, which a system
    has, but not in the configuration ``chosen``."""
    within = next((own for own in features_of(plan) if own.name == "hsdp"), None)
    if within is not None and "hsdp" not in system.limits and not chosen.shard_degree:
        yield Deviation(within.text, OVER_ALL)


def _more_recompute(
    system: System, planned: Configuration, chosen: Configuration
) -> Iterator[Deviation]:
    """Yield a difference from the plan if only more recomputation than ``planned`` fits memory."""
    is_folded = any(getattr(planned, name) > 1 for name in system.lacks)
    is_more = chosen.recompute == "full" and chosen.recompute_share > planned.recompute_share
    if not is_folded and (is_more or (planned.recompute, chosen.recompute) == ("none", "full")):
        yield Deviation(
            "recomputation of fewer layers, or of none",
            "full recomputation of all layers, without which it does not fit",
        )


def candidates_of(system: System, plan: Plan) -> Iterator[Configuration]:
    """Yield configurations for a system to choose from; the first is taken if none can be priced.

    If the system has all degrees of the plan, it yields the plan's configuration, then that with
    full recomputation in case it does not fit. If ``selects_less`` applies, it yields full
    recomputation and none. If the system lacks a degree, its devices become data-parallel: first
    with ZeRO 3, full recomputation and the fewest samples per rank, for least memory, then with
    less of each.
    """
    own = configuration_of(plan)
    if all(getattr(own, name) == 1 for name in system.lacks):
        settled = system.settle(own)
        whole = replace(settled, recompute="full", recompute_share=1.0)
        if settled.recompute == "selective" and system.selects_less:
            yield whole
            yield replace(settled, recompute="none")
            return
        yield settled
        if whole != settled:
            yield whole
        return
    folded = _fold_degrees(own, system, plan.model.global_batch)
    for zero in dict.fromkeys((3, max(own.zero, 1))):
        every = replace(folded, zero=zero, recompute_share=1.0, recomputes_ends=False)
        for each in divided(every, plan.model.global_batch, PLAIN_MODES[::-1]):
            yield system.settle(each)


def _fold_degrees(own: Configuration, system: System, batch: int) -> Configuration:
    """Return the configuration with degrees that the system lacks made data-parallel, or
    tensor-parallel if the batch has too few samples. Raises UsageError AP364 if neither works."""
    # ranks that share experts are data-parallel already
    spare = prod(getattr(own, name) for name in system.lacks if name != "ep")
    kept: dict[str, Any] = {
        name: 1 if name in system.lacks else getattr(own, name) for name in DEGREES
    }
    parts = kept["dp"]
    more = gcd(batch // parts, spare)
    kept["dp"] *= more
    if spare // more > 1:
        if "tp" in system.lacks:
            raise UsageError(
                "AP364",
                f"{system.title} cannot train {batch} samples on {own.num_devices} devices",
                why=f"it has no {', '.join(system.lacks)}, and {own.num_devices} data-parallel "
                "ranks need a sample each",
                fix=f"plan with a global batch of a multiple of {parts * spare}",
            )
        kept["tp"] *= spare // more
    folded = replace(own, shard=None, **kept)
    if folded.pp > 1:
        return folded
    return replace(folded, schedule="1f1b", num_chunks=1, layers=None)


def whole_shard(own: Configuration) -> int | None:
    """Return the number of ranks that shard states together in a system that shards them over all
    context-parallel ranks, and experts over all ranks of a group; None for all data-parallel ranks.

    >>> whole_shard(Configuration(dp=4, cp=2, zero=3, shard=4))
    4
    """
    degree, tensors = own.shard_degree, own.tp if own.etp == 1 else 1
    fits = degree and degree % own.cp == 0 and (degree * tensors) % own.ep == 0
    return degree if fits else None


def stage_layers(own: Configuration, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: the plan's, or an even split for other stages.

    >>> stage_layers(Configuration(pp=2, layers=(3, 1)), 4), stage_layers(Configuration(), 4)
    ((3, 1), (4,))
    """
    if own.layers is not None and len(own.layers) == own.num_stages:
        return own.layers
    return even_layers(num_layers, own.num_stages)


def price(
    plan: Plan, plan_path: Path, candidates: Sequence[Configuration], *, trust: bool
) -> PricedConfig:
    """Price candidates with the plan's model and return the best. If the model's code is untrusted
    or missing, return the first candidate without a price."""
    try:
        with plan_cache() as cache, progress() as observe:
            model = load_plan_model(
                plan, str(plan_path), trust=trust, cache=cache.values, observe=observe
            )
            observe("prices", 0, 0)
            chosen, found = model.best_configuration(candidates)
    except AutoparallelError as error:
        return PricedConfig(candidates[0], reason=f"{error.what} ({error.code})")
    peak = found.prediction.peak_memory_bytes
    fits = peak <= plan.cluster.usable_memory_bytes
    return PricedConfig(chosen, found.prediction.step_seconds, peak, fits)


DEGREES = ("dp", "tp", "cp", "ep", "pp")


def _facts(
    system: System, cost: PricedConfig, lost: Sequence[Deviation], notes: Sequence[str]
) -> dict[str, Any]:
    own = cost.configuration
    return {
        "system": system.title,
        "names_of": system.version,
        "degrees": {name: getattr(own, name) for name in DEGREES},
        "zero": own.zero,
        "shard": own.shard_degree or None,
        "recompute": own.recompute,
        "schedule": own.schedule,
        "microbatch_size": own.microbatch_size,
        "num_microbatches": own.num_microbatches,
        "step_seconds": cost.step_seconds,
        "peak_memory_bytes": cost.peak_memory_bytes,
        "fits": cost.fits,
        "not_priced": cost.reason,
        "differences": [asdict(each) for each in lost],
        "notes": list(notes),
    }


def report_text(
    system: str,
    plan: Plan,
    cost: PricedConfig,
    lost: Sequence[Deviation],
    notes: Sequence[str],
) -> str:
    """Return the report: the plan's and the system's configuration, prices, differences, notes."""
    num_layers = sum(len(layers_of(plan, stage)) for stage in plan.stages)
    lines = [f"{system}: {configuration_summary(cost.configuration, num_layers)}"]
    lines += [f"the plan: {plan_summary(plan)}", *price_lines(plan, cost), ""]
    if lost:
        lines.append("What it cannot express")
        for each in lost:
            lines += [f"- plan: {each.plan}", f"  here: {each.here}"]
    else:
        lines.append("It expresses the plan.")
    if notes:
        lines += ["", "To know", *(f"- {note}" for note in notes)]
    return "\n".join(_wrap(lines))


def price_lines(plan: Plan, cost: PricedConfig) -> Iterator[str]:
    """Yield lines with the configuration's price and the plan's, or the reason for no price."""
    limit, step = plan.cluster.usable_memory_bytes, plan.prediction.step_seconds
    own = f"{seconds_text(step)} a step, {bytes_text(plan.prediction.peak_memory_bytes)}"
    if cost.step_seconds is None or cost.peak_memory_bytes is None:
        yield f"predicted: the plan {own}; this configuration is not priced: {cost.reason}"
        return
    yield (
        f"predicted: this configuration {seconds_text(cost.step_seconds)} a step "
        f"({change_text(cost.step_seconds / step - 1)}), {bytes_text(cost.peak_memory_bytes)} of "
        f"{bytes_text(limit)}; the plan {own}"
    )
    if not cost.fits:
        yield "DOES NOT FIT: no configuration that this system has was found to fit"


def _wrap(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        lead = "  " if line.startswith(("- ", "  ")) else "    "
        indent = lead + ("      " if line.startswith(("- plan:", "  here:")) else "")
        yield from textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
