"""``autoparallel program``: the integer program of a plan's stage, for other solvers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from autoparallel.commands.inspect import PlanArgument
from autoparallel.commands.options import (
    DatabaseOption,
    MemoryLimitOption,
    ProfileOption,
    TrustOption,
)
from autoparallel.options.parse import parse_size

if TYPE_CHECKING:
    from autoparallel.planner.search.stage_program import Minimized

StageOption = Annotated[int, typer.Option("--stage", help="which stage of the plan, from 0 on")]
MinimizedOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help="time (of a micro-batch, within the memory limit), unlimited (time, without one) or "
        "memory",
    ),
]
FileOption = Annotated[
    str, typer.Option("-o", "--output", metavar="FILE", help="what to write: .lp or .mps")
]


def program(
    plan: PlanArgument,
    *,
    stage: StageOption = 0,
    objective: MinimizedOption = "time",
    memory_limit: MemoryLimitOption = None,
    output: FileOption,
    profile: ProfileOption = "auto",
    database: DatabaseOption = None,
    trust: TrustOption = False,
) -> None:
    """Write the integer program of a plan's stage, for any solver."""
    from autoparallel.exporting.solver_programs import (
        check_format,
        plan_program,
        write_plan_program,
    )

    check_format(output)
    found = plan_program(
        plan, stage, minimized=cast("Minimized", objective),
        memory_limit_bytes=None if memory_limit is None else parse_size(memory_limit),
        profile=profile, database=database, trust=trust,
    )  # fmt: skip
    done = write_plan_program(found, output)
    typer.echo(
        f"{done.path}: {done.num_variables:,} variables ({done.num_binaries:,} binary), "
        f"{done.num_constraints:,} constraints; minimizes {done.unit}"
    )
    if done.planned is not None:
        typer.echo(f"the plan's own layouts: {done.planned:.6f} {done.unit}")
