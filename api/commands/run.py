"""``autoparallel run``: train by a plan, on this machine's processes or under torchrun."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from autoparallel.commands.hosts import (
    ElasticOption,
    EndpointOption,
    JoinTimeoutOption,
    NumHostsOption,
    asked_hosts,
)
from autoparallel.commands.options import (
    ClusterOption,
    LoraOption,
    OutputOption,
    SetOption,
    StepsOption,
    TrustOption,
    planning,
    stdout_console,
    with_lora,
)
from autoparallel.options.parse import parse_settings

if TYPE_CHECKING:
    from autoparallel.planning.plan import PlanOptions
    from autoparallel.runtime.update.update import OnNan

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PLAN_OR_TARGET",
        help="a plan file (.json), or a TARGET that is planned first",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="seed of the initial weights and the data")]

SaveOption = Annotated[
    str | None, typer.Option("--save", metavar="DIR", help="write checkpoints into DIR")
]
SaveEveryOption = Annotated[
    int | None, typer.Option("--save-every", min=1, help="steps between checkpoints")
]
KeepOption = Annotated[
    int | None,
    typer.Option("--keep", min=1, metavar="N", help="keep only the newest N checkpoints"),
]
SaveAsyncOption = Annotated[
    bool, typer.Option("--save-async", help="write checkpoints in the background, from a copy")
]
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", metavar="DIR", help="start from a checkpoint, of any plan"),
]

InitOption = Annotated[
    str,
    typer.Option(
        "--init",
        help="initial weights: exact (those of a plain build, for which each rank draws the whole "
        "model's), sharded (each rank draws its own shards) or auto (exact up to 10 s)",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="PATH",
        help="initial weights: a .safetensors, .pt or .bin file, a folder of save_pretrained, or "
        "a checkpoint",
    ),
]
WeightsPartialOption = Annotated[
    bool,
    typer.Option("--weights-partial", help="allow names that only --weights or only the model has"),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="train a causal language model on text: a file, JSON lines with a field text, or a "
        "folder of .txt",
    ),
]

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="seconds without progress that end the run")
]

MaxRestartsOption = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        metavar="R",
        help="start all ranks again, so often, when one dies or hangs; from the last checkpoint",
    ),
]

ClipNormOption = Annotated[
    float | None,
    typer.Option("--clip-norm", metavar="NORM", help="scale the gradient down to this norm"),
]
ClipValueOption = Annotated[
    float | None,
    typer.Option("--clip-value", metavar="X", help="clip each element of the gradient to [-X, X]"),
]
AccumulateOption = Annotated[
    int, typer.Option("--accumulate", help="global batches per update of the weights")
]
LossScaleOption = Annotated[
    float | None,
    typer.Option(
        "--loss-scale",
        metavar="X",
        help="scale the loss, by X at first; skip updates that overflow",
    ),
]
OnNanOption = Annotated[
    str,
    typer.Option(
        "--on-nan",
        metavar="ignore|skip|stop",
        help="what to do when a gradient is not finite",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", metavar="FILE.jsonl", help="append each step's figures as JSON"),
]
TensorboardOption = Annotated[
    str | None,
    typer.Option("--tensorboard", metavar="DIR", help="write each step's figures for TensorBoard"),
]
WandbOption = Annotated[
    str | None,
    typer.Option("--wandb", metavar="PROJECT", help="log each step to Weights & Biases"),
]

TraceStepsOption = Annotated[
    int,
    typer.Option(
        "--trace-steps", min=0, metavar="N",
        help="record N steps, compare them with the predicted step, and write a Chrome trace",
    ),
]  # fmt: skip
TraceOption = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="where --trace-steps writes; trace.json"),
]

CheckFirstStepOption = Annotated[
    bool | None,
    typer.Option(
        "--check-first-step/--no-check-first-step",
        help="compare the first step with the model alone: loss, norm of each gradient; default: "
        "where one device takes the step in 10 s",
    ),
]


@planning()
def run(
    source: SourceArgument,
    *,
    steps: StepsOption = 20,
    seed: SeedOption = 0,
    cluster: ClusterOption = "local",
    options: PlanOptions,
    output: OutputOption = None,
    settings: SetOption = None,
    lora: LoraOption = None,
    weights: WeightsOption = None,
    weights_partial: WeightsPartialOption = False,
    data: DataOption = None,
    save: SaveOption = None,
    save_every: SaveEveryOption = None,
    keep: KeepOption = None,
    save_async: SaveAsyncOption = False,
    resume: ResumeOption = None,
    init: InitOption = "auto",
    timeout: TimeoutOption = 600.0,
    clip_norm: ClipNormOption = None,
    clip_value: ClipValueOption = None,
    accumulate: AccumulateOption = 1,
    loss_scale: LossScaleOption = None,
    on_nan: OnNanOption = "ignore",
    metrics: MetricsOption = None,
    tensorboard: TensorboardOption = None,
    wandb: WandbOption = None,
    trust: TrustOption = False,
    max_restarts: MaxRestartsOption = 0,
    nnodes: NumHostsOption = None,
    rdzv_endpoint: EndpointOption = None,
    join_timeout: JoinTimeoutOption = 600.0,
    elastic: ElasticOption = False,
    trace_steps: TraceStepsOption = 0,
    trace: TraceOption = None,
    check_first_step: CheckFirstStepOption = None,
) -> None:
    """Train by a plan; --cluster and what follows, up to --lora, are for planning a TARGET."""
    from autoparallel.options.asked import checked_init
    from autoparallel.options.run_options import RunOptions

    asked = RunOptions(
        clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate, loss_scale=loss_scale,
        on_nan=cast("OnNan", on_nan), metrics=metrics, tensorboard=tensorboard, wandb=wandb,
        compiled=options.compiled, elastic=_limits(options) if elastic else None,
        trace_steps=trace_steps, trace=trace, check_first_step=check_first_step,
    )  # fmt: skip
    asked.check()
    if trace_steps or trace is not None:
        from autoparallel.training.trace import check_trace

        check_trace(trace_steps, trace, steps)
    checked_init(init)
    if save is None and (save_every is not None or keep is not None or save_async):
        from autoparallel.planner.errors import UsageError

        raise UsageError(
            "AP891", "--save-every, --keep and --save-async need --save DIR", fix="add --save DIR"
        )
    if weights is not None:
        from autoparallel.training.start import check_weights

        check_weights(weights, resume)
    from autoparallel.planning.served_planning import what_servers_lack, without_servers

    if what_servers_lack(asked, {"saving": save, "resume": resume}):
        options = without_servers(options)
    settings = with_lora(settings, lora)
    hosts = asked_hosts(nnodes, rdzv_endpoint, join_timeout, elastic, source)
    with plan_path(source, cluster, options, settings=settings, output=output, trust=trust) as path:
        from autoparallel.training.start import Sources, Start, start_training
        from autoparallel.training.steps import Saving

        saving = None
        if save is not None:
            saving = Saving(save, every=save_every, keep=keep, asynchronous=save_async)
        start_training(
            path, steps=steps, seed=seed, saving=saving, resume=resume, options=asked,
            sources=Sources(weights, weights_partial, data, init),
            start=Start(timeout, max_restarts, hosts),
        )  # fmt: skip


def _limits(options: PlanOptions) -> dict[str, object]:
    """The options that hold for a plan which is made while the run goes on."""
    return {
        "time_limit_seconds": options.time_limit_seconds,
        "memory_limit_bytes": options.memory_limit_bytes,
        "profile": options.profile,
        "database": options.database,
    }


@contextmanager
def plan_path(
    source: str,
    cluster: str,
    options: PlanOptions,
    *,
    settings: list[str] | None,
    output: str | None = None,
    quiet: bool = False,
    trust: bool = False,
) -> Iterator[Path]:
    """The plan file that ``source`` is, or one made for the target that it names.

    The made plan's report goes to stdout unless ``quiet``.

    Without ``output`` a made plan lives in a temporary folder until the block ends.
    Raises UsageError AP116 for a target under torchrun, where each process would plan, and AP155
    for a plan file with a target that is not to be trusted.
    """
    from autoparallel.planning.plan_files import load_plan, save_plan
    from autoparallel.target.trust import check_trusted

    if source.endswith(".json") and not source.startswith("hf:"):
        check_trusted(load_plan(source), source, trust=trust)
        yield Path(source)
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from autoparallel.planner.errors import UsageError

        raise UsageError(
            "AP116",
            "a target cannot be planned under torchrun",
            why="every process would plan separately",
            fix=f"autoparallel plan {source} -o plan.json, then torchrun with plan.json",
        )
    from autoparallel.options.progress import progress
    from autoparallel.planning.plan import make_plan
    from autoparallel.report import ONE_SCREEN, print_report
    from autoparallel.target.load import load_target

    loaded = load_target(source, parse_settings(settings or ()))
    with progress() as observe:
        plan = make_plan(loaded, cluster, options, observe)
    if not quiet:
        print_report(plan, stdout_console(), ONE_SCREEN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(output) if output is not None else Path(folder) / "plan.json"
        save_plan(plan, path)
        yield path
