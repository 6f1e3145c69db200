"""``autoparallel run``: train by a plan, on this machine's processes or under torchrun."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.options import (
    ClusterOption,
    OutputOption,
    SetOption,
    StepsOption,
    planning,
    stdout_console,
)
from autoparallel.options import parse_settings

if TYPE_CHECKING:
    from autoparallel.planning import PlanOptions

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
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", metavar="DIR", help="start from a checkpoint, of any plan"),
]

InitOption = Annotated[
    str,
    typer.Option(
        "--init",
        help="initial weights: sharded (each rank draws what it holds) or exact (those of a "
        "plain build, for which each rank draws the whole model's)",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, help="seconds without progress that end the run")
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
    save: SaveOption = None,
    save_every: SaveEveryOption = None,
    resume: ResumeOption = None,
    init: InitOption = "sharded",
    timeout: TimeoutOption = 600.0,
) -> None:
    """Train by a plan; --cluster and what follows, up to --set, are for planning a TARGET."""
    from autoparallel.asked import checked_init

    drawn = checked_init(init)
    with plan_path(source, cluster, options, settings=settings, output=output) as path:
        from autoparallel.training import start_training

        start_training(
            path, steps=steps, seed=seed, save=save, save_every=save_every, resume=resume,
            init=drawn, timeout_seconds=timeout,
        )  # fmt: skip


@contextmanager
def plan_path(
    source: str,
    cluster: str,
    options: PlanOptions,
    *,
    settings: list[str] | None,
    output: str | None = None,
    quiet: bool = False,
) -> Iterator[Path]:
    """The plan file that ``source`` is, or one made for the target that it names.

    The made plan's report goes to stdout unless ``quiet``.

    Without ``output`` a made plan lives in a temporary folder until the block ends.
    Raises UsageError AP116 for a target under torchrun, where each process would plan.
    """
    from autoparallel.plan_io import load_plan, save_plan

    if source.endswith(".json") and not source.startswith("hf:"):
        load_plan(source)
        yield Path(source)
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from autoparallel.planner.errors import UsageError

        raise UsageError(
            "AP116",
            "a target cannot be planned under torchrun",
            why="every process would plan on its own",
            fix=f"autoparallel plan {source} -o plan.json, then torchrun with plan.json",
        )
    from autoparallel.planning import make_plan
    from autoparallel.progress import progress
    from autoparallel.report import print_report
    from autoparallel.targets import load_target

    loaded = load_target(source, parse_settings(settings or ()))
    with progress() as observe:
        plan = make_plan(loaded, cluster, options, observe)
    if not quiet:
        print_report(plan, stdout_console(), short=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(output) if output is not None else Path(folder) / "plan.json"
        save_plan(plan, path)
        yield path
