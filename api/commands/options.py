"""The options that several commands share, and the console they print on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer

from autoparallel.options import parse_parallel, parse_size
from autoparallel.planner.plan import Precision

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.planner.basis import Mode
    from autoparallel.planning import PlanOptions

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:function, package.module:function or hf:PATH_OR_NAME",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option("--cluster", help="local, 8xH100, 4x8xA100-80GB, cpu:4 or a TOML file"),
]
GlobalBatchOption = Annotated[
    int, typer.Option("--global-batch", min=1, help="rows of one training step, over all devices")
]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, help="sequence length")]
MicroBatchOption = Annotated[
    int | None,
    typer.Option("--micro-batch", min=1, help="rows of a micro-batch over all data ranks"),
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="fp32, bf16 (fp32 master weights) or fp64")
]
OptimizerOption = Annotated[str, typer.Option("--optimizer", help="adamw, adam or sgd")]
MemoryLimitOption = Annotated[
    str | None, typer.Option("--memory-limit", help="per device: 72GiB, 80GB")
]
ParallelOption = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        help="force some choices, such as dp=2,tp=2,pp=2 or zero=1,microbatches=8 or "
        "recompute=full,schedule=1f1b; the rest is searched",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="seconds for the search")
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="candidates that are simulated")]
SearchOption = Annotated[
    str, typer.Option("--search", help="dp, or rl: placers that learn by trial, for comparison")
]
OutputOption = Annotated[str | None, typer.Option("-o", "--output", help="write the plan here")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a setting for build_model; repeatable"),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile", help="times: auto (measured where they are), measured (all) or analytic"
    ),
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="FILE", help="measured times; the user's own")
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="training steps")]


def plan_options(
    *,
    global_batch: int,
    seq: int | None,
    micro_batch: int | None,
    precision: str,
    optimizer: str,
    memory_limit: str | None,
    parallel: str | None,
    time_limit: float,
    top: int = 5,
    search: str = "dp",
    profile: str = "auto",
    database: str | None = None,
) -> PlanOptions:
    """The options as values. Raises UsageError (AP111 to AP117, AP173)."""
    from autoparallel.planning import PlanOptions

    return PlanOptions(
        global_batch=global_batch,
        seq=seq,
        micro_batch=micro_batch,
        precision=cast(Precision, precision),
        optimizer=optimizer,
        memory_limit_bytes=None if memory_limit is None else parse_size(memory_limit),
        forced=parse_parallel(parallel),
        time_limit_seconds=time_limit,
        top=top,
        search=search,
        profile=cast("Mode", profile),
        database=database,
    )


def stdout_console() -> Console:
    """A console on stdout: 80 columns where there is no terminal, 100 at most."""
    import shutil
    import sys

    from rich.console import Console

    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    return Console(width=max(60, min(columns, 100)), highlight=False)


def print_json(value: object) -> None:
    """``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))
